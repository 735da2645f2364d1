// Options from the environment, reports, source lines, the trace.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "driver.hpp"

extern char **environ;

namespace emu {

namespace {
[[noreturn]] void refuse(const char *name, const std::string &value, const char *expected) {
    fprintf(stderr, "emulator: %s=%s: expected %s\n", name, value.c_str(), expected);
    fflush(stderr);
    _exit(2);
}

std::string variable(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

uint64_t number(const char *name, uint64_t otherwise, uint64_t low = 0) {
    std::string value = variable(name);
    if (value.empty()) return otherwise;
    char *end;
    errno = 0;
    unsigned long long result = strtoull(value.c_str(), &end, 10);
    uint64_t scale = 1;
    if (*end == 'K') scale = uint64_t{1} << 10, ++end;
    else if (*end == 'M') scale = uint64_t{1} << 20, ++end;
    else if (*end == 'G') scale = uint64_t{1} << 30, ++end;
    if (*end || errno || value[0] == '-' || result * scale < low)
        refuse(name, value, text("a whole number of at least %llu (K, M, G allowed)",
                                 static_cast<unsigned long long>(low)).c_str());
    return result * scale;
}

template <class T>
T choice(const char *name, T otherwise, std::initializer_list<std::pair<const char *, T>> allowed) {
    std::string value = variable(name), names;
    if (value.empty()) return otherwise;
    for (auto &[word, result] : allowed) {
        if (value == word) return result;
        names += (names.empty() ? "" : ", ") + std::string(word);
    }
    refuse(name, value, names.c_str());
}

Options read_options() {
    Options o;
    o.order = choice("EMULATOR_ORDER", Order::forward,
                     {{"forward", Order::forward}, {"reverse", Order::reverse}, {"shuffled", Order::shuffled}});
    o.random_streams = choice("EMULATOR_STREAMS", false, {{"inorder", false}, {"random", true}});
    int sanitize = choice("EMULATOR_SANITIZE", 0, {{"off", 0}, {"address", 1}, {"race", 2}, {"all", 3}});
    o.check_memory = sanitize & 1;
    o.check_races = sanitize & 2;
    o.continue_after_report = choice("EMULATOR_ON_REPORT", false, {{"error", false}, {"continue", true}});
    o.strict_barriers = choice("EMULATOR_BARRIERS", true, {{"strict", true}, {"lenient", false}});
    o.leaks = choice("EMULATOR_LEAKS", Options::leaks_report, {{"off", Options::leaks_off},
                                                               {"report", Options::leaks_report},
                                                               {"fail", Options::leaks_fail}});
    o.seed = number("EMULATOR_SEED", 0);
    unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    o.threads = static_cast<unsigned>(number("EMULATOR_THREADS", std::min(cores, 4u), 1));
    o.devices = static_cast<unsigned>(number("EMULATOR_DEVICES", 1));
    o.multiprocessors = static_cast<unsigned>(number("EMULATOR_SMS", 132, 1));
    o.memory = number("EMULATOR_MEMORY", uint64_t{8} << 30, 1);
    o.stack = (number("EMULATOR_STACK", 64 * 1024, 16 * 1024) + page_bytes - 1) / page_bytes * page_bytes;
    o.timeout = static_cast<double>(number("EMULATOR_TIMEOUT", 60, 1));
    o.trace = variable("EMULATOR_TRACE");
    o.slices = choice("EMULATOR_MIG", false, {{"0", false}, {"1", true}});
    if (std::string version = variable("EMULATOR_DRIVER"); !version.empty()) {
        int major = 0, minor = 0;
        if (sscanf(version.c_str(), "%d.%d", &major, &minor) != 2)
            refuse("EMULATOR_DRIVER", version, "a CUDA version, such as 12.4");
        o.version = 1000 * major + 10 * minor;
    }
    if (std::string capability = variable("EMULATOR_CAPABILITY"); !capability.empty()) {
        if (capability.size() != 3 || capability[1] != '.' || capability < "7.5" || capability > "9.0")
            refuse("EMULATOR_CAPABILITY", capability, "a compute capability from 7.5 to 9.0");
        o.capability = (capability[0] - '0') * 10 + capability[2] - '0';
    }
    return o;
}
}  // namespace

const Options &options() {
    static const Options result = read_options();
    return result;
}

std::string text(const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(nullptr, 0, format, arguments);
    std::string result(static_cast<size_t>(length), '\0');
    vsnprintf(result.data(), result.size() + 1, format, again);
    va_end(again);
    va_end(arguments);
    return result;
}

void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *line = nullptr;
    int length = vasprintf(&line, format, arguments);
    va_end(arguments);
    if (length < 0) return;
    // One write, so that the lines of several ranks do not mix.
    std::string out = "emulator: " + std::string(line) + "\n";
    free(line);
    [[maybe_unused]] ssize_t n = write(2, out.data(), out.size());
}

std::string site_text(const EmuSite &site) {
    const char *slash = strrchr(site.file, '/');
    return text("%s:%d", slash ? slash + 1 : site.file, site.line);
}

std::string code_text(const void *pc) {
    static std::unordered_map<const void *, std::string> known;
    static std::mutex lock;
    std::lock_guard guard(lock);
    if (auto found = known.find(pc); found != known.end()) return found->second;
    std::string result = "an unknown place";
    Dl_info info{};
    Module *module = module_of_code(pc);
    // Not in a kernel: the driver or a function of the C library that the kernel called.
    if (!module && dladdr(pc, &info) && info.dli_fname)
        result = text("%s+0x%zx", info.dli_fname, reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(info.dli_fbase));
    if (module && dladdr(pc, &info) && module->file >= 0) {
        // The return address of a call belongs to the next instruction: look one byte before it.
        auto offset = reinterpret_cast<uintptr_t>(pc) - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
        std::string path = text("/proc/%d/fd/%d", getpid(), module->file);
        std::string address = text("0x%zx", static_cast<size_t>(offset));
        char program[] = "addr2line", inlined[] = "-i", option[] = "-e";
        char *arguments[] = {program, inlined, option, path.data(), address.data(), nullptr};
        int out[2];
        if (pipe2(out, O_CLOEXEC) == 0) {
            posix_spawn_file_actions_t actions;
            posix_spawn_file_actions_init(&actions);
            posix_spawn_file_actions_adddup2(&actions, out[1], 1);
            pid_t child;
            bool started = posix_spawnp(&child, program, &actions, nullptr, arguments, environ) == 0;
            posix_spawn_file_actions_destroy(&actions);
            close(out[1]);
            std::string answer;
            char buffer[512];
            ssize_t n;
            while (started && ((n = read(out[0], buffer, sizeof buffer)) > 0 || (n < 0 && errno == EINTR)))
                if (n > 0) answer.append(buffer, static_cast<size_t>(n));
            close(out[0]);
            if (started) waitpid(child, nullptr, 0);
            // Innermost frame first; the device header's own lines say nothing to the kernel's author.
            std::string line, fallback;
            for (size_t at = 0; at < answer.size();) {
                size_t end = answer.find('\n', at);
                if (end == std::string::npos) end = answer.size();
                line = answer.substr(at, end - at);
                at = end + 1;
                if (auto cut = line.find(" ("); cut != std::string::npos) line.resize(cut);
                if (line.empty() || line[0] == '?') continue;
                auto slash = line.rfind('/');
                std::string name = slash == std::string::npos ? line : line.substr(slash + 1);
                if (fallback.empty()) fallback = name;
                if (line.find("emulator/include/") == std::string::npos &&
                    line.find("/c++/") == std::string::npos) {
                    fallback = name;
                    break;
                }
            }
            if (!fallback.empty()) result = fallback;
        }
    }
    return known[pc] = result;
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------- trace

namespace {
std::vector<std::string> &trace_lines() {
    static auto &lines = *new std::vector<std::string>;
    return lines;
}

std::string json(const std::string &value) {
    std::string out = "\"";
    for (char c : value) {
        if (c == '"' || c == '\\') out += '\\';
        if (static_cast<unsigned char>(c) < 32) continue;
        out += c;
    }
    return out + "\"";
}
}  // namespace

unsigned running_graph = 0;

void trace(const std::string &name, const char *category, int device, unsigned stream, double start, double end,
           const std::string &arguments) {
    if (options().trace.empty()) return;
    std::string graph = running_graph ? text("\"graph\":%u,", running_graph) : "";
    trace_lines().push_back(text("{\"name\":%s,\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,"
                                 "\"tid\":%u,\"args\":{\"device\":%d,\"stream\":%u,%s%s}}",
                                 json(name).c_str(), category, start * 1e6, (end - start) * 1e6, getpid(),
                                 static_cast<unsigned>(device) * 1000 + stream, device, stream, graph.c_str(), arguments.c_str()));
}

void write_trace() {
    std::string path = options().trace;
    if (path.empty()) return;
    // Ranks write files of their own: NAME.rankR, or wherever %p puts the process number.
    if (auto at = path.find("%p"); at != std::string::npos) {
        path.replace(at, 2, std::to_string(getpid()));
    } else {
        for (const char *name : {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"})
            if (const char *rank = getenv(name)) {
                path += std::string(".rank") + rank;
                break;
            }
    }
    FILE *file = fopen(path.c_str(), "w");
    if (!file) {
        say("EMULATOR_TRACE: cannot write %s: %s", path.c_str(), strerror(errno));
        return;
    }
    fputs("{\"traceEvents\":[\n", file);
    for (size_t i = 0; i < trace_lines().size(); ++i)
        fprintf(file, "%s%s", i ? ",\n" : "", trace_lines()[i].c_str());
    fputs("\n]}\n", file);
    fclose(file);
}

}  // namespace emu
