// Files that are cut short while they are mapped: the system ends a process that reads behind their end (SIGBUS).
//
// Here the page that is missing becomes one of zeros, so that what reads it comes to an end, and Python's main thread is
// told, which raises an error. Only what is mapped to be read and shared is replaced, as `numpy.load(mmap_mode="r")` does:
// zeros in memory that processes write to for each other would be taken for a message. For that a line is written, and the
// process ends. Signal handlers may call little: no allocation, no locks, no stdio.
#ifndef DPTRAIN_NATIVE_MAPS_H
#define DPTRAIN_NATIVE_MAPS_H

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

struct dp_Guard {
    struct sigaction before;   // what happened on SIGBUS before
    void (*interrupt)(int);    // tells Python's main thread of a signal; null where no handler of Python's is there
    int code;                  // that the process ends with
    char who[512], file[4096]; // how its line begins; the file that was cut short
};
static dp_Guard dp_guard;

static uintptr_t dp_hexadecimal(const char *&text) {
    uintptr_t number = 0;
    for (;; ++text) {
        const char c = *text;
        if (c >= '0' && c <= '9') number = number << 4 | (uintptr_t)(c - '0');
        else if (c >= 'a' && c <= 'f') number = number << 4 | (uintptr_t)(c - 'a' + 10);
        else return number;
    }
}

// Whether a line of /proc/self/maps, "start-end rw-s offset device inode    path", is about an address.
static bool dp_maps_line(const char *line, uintptr_t address, char *permissions, char *file, size_t length) {
    const uintptr_t start = dp_hexadecimal(line);
    if (*line++ != '-') return false;
    const uintptr_t end = dp_hexadecimal(line);
    if (address < start || address >= end || strlen(line) < 6) return false;
    memcpy(permissions, line + 1, 4);
    const char *path = strchr(line, '/');
    size_t count = path ? strlen(path) : 0;
    if (count >= length) count = length - 1;
    if (count) memcpy(file, path, count);
    file[count] = 0;
    return true;
}

// Find what is mapped at an address: "r--s" or the like, and the file.
static bool dp_mapped(uintptr_t address, char *permissions, char *file, size_t length) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return false;
    static char line[4600], part[4096];
    size_t at = 0;
    bool found = false;
    for (ssize_t count; !found && (count = read(maps, part, sizeof part)) > 0;)
        for (ssize_t i = 0; i < count && !found; ++i) {
            if (part[i] != '\n') {
                if (at < sizeof line - 1) line[at++] = part[i];
                continue;
            }
            line[at] = 0, at = 0;
            found = dp_maps_line(line, address, permissions, file, length);
        }
    close(maps);
    return found;
}

static void dp_say(const char *text) {
    for (size_t left = strlen(text); left;) {
        const ssize_t count = write(2, text, left);
        if (count <= 0) return;
        text += count, left -= (size_t)count;
    }
}

static void dp_bus_error(int number, siginfo_t *info, void *) {
    static char lock;
    const int error = errno;
    while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}  // threads may meet here
    char permissions[5] = "";
    const uintptr_t page = (uintptr_t)info->si_addr & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (info->si_code == BUS_ADRERR && dp_mapped(page, permissions, dp_guard.file, sizeof dp_guard.file)) {
        const size_t size = (size_t)sysconf(_SC_PAGESIZE);
        if (dp_guard.interrupt && !strcmp(permissions, "r--s") &&
            mmap((void *)page, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
            dp_guard.interrupt(number);
            errno = error;
            __atomic_clear(&lock, __ATOMIC_RELEASE);
            return;
        }
        if (!strcmp(permissions, "r--p") && !*dp_guard.file) {  // another thread has just replaced it
            errno = error;
            __atomic_clear(&lock, __ATOMIC_RELEASE);
            return;
        }
        if (permissions[3] == 's') {
            dp_say(dp_guard.who), dp_say(dp_guard.file);
            dp_say(": truncated while in use, or its disk is full (SIGBUS)\n");
            _exit(dp_guard.code);
        }
    }
    sigaction(SIGBUS, &dp_guard.before, nullptr);  // the instruction is executed again, and ends as before
    __atomic_clear(&lock, __ATOMIC_RELEASE);
}

// Remember what happens on SIGBUS; to be called before Python's handler is set.
extern "C" void dp_maps_before() { sigaction(SIGBUS, nullptr, &dp_guard.before); }

extern "C" void dp_maps_guard(void (*interrupt)(int), int code, const char *who) {
    dp_guard.interrupt = interrupt, dp_guard.code = code;
    strncpy(dp_guard.who, who, sizeof dp_guard.who - 1);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = dp_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, nullptr);
}

// The file that was cut short last.
extern "C" const char *dp_maps_file() { return dp_guard.file; }

#endif
