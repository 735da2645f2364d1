// Threads that share a loop of generated code for a CPU.
//
// A job is a function that is called once for each of its parts, 0 to parts - 1. Each thread begins at its own share of
// them, which from job to job lies in its core's cache, and then takes what is left of the others'. The calling thread is
// one of them: it never waits for a thread that has not begun, so that a core that another process uses costs its share of
// the speed and no more. A thread looks out for jobs for some 100 us before it sleeps, as a step's jobs follow each other.
// Nothing that is computed may depend on which thread computes it.
#ifndef DPTRAIN_NATIVE_THREADS_H
#define DPTRAIN_NATIVE_THREADS_H

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__x86_64__)
#define DP_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define DP_PAUSE() __asm__ volatile("yield")
#else
#define DP_PAUSE() (void)0
#endif

typedef void dp_Part(void *data, int64_t part);

struct dp_Threads {
    static const int WATCHING = 4000, YIELDING = 1000;  // turns of looking out
    static const int64_t CLAIMS = 256;                  // parts that are taken by themselves; of more, several together
    static const int BITS = 20;                         // of a job's number of parts
    struct alignas(64) Claim {
        std::atomic<uint64_t> job{0};
    };

    std::atomic<uint64_t> job{0};      // its number, and in the lower bits how many parts it has
    Claim claims[CLAIMS];              // the number of the last job of which somebody took this part
    std::atomic<int64_t> missing{0};   // parts that are not done
    std::atomic<dp_Part *> function{nullptr};
    std::atomic<void *> data{nullptr};
    std::atomic<int64_t> sharing{1};   // threads
    fenv_t environment;                // of the calling thread: flush-to-zero is a switch of each thread's own
    std::atomic<int> sleeping{0};
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    std::mutex mutex;
    std::condition_variable work;
    int64_t started = 0;

    // Execute the parts of a job that nobody has taken. What it consists of is replaced only after all of its parts are
    // done: so function and data are this job's once a part of it is one's own.
    void share(uint64_t now, int64_t own, bool caller) {
        const uint64_t number = now >> BITS;
        const int64_t parts = now & ((1 << BITS) - 1), of = sharing.load(std::memory_order_relaxed);
        const int64_t units = parts < CLAIMS ? parts : CLAIMS, first = own % of * units / of;
        bool begun = caller;
        for (int64_t n = 0; n < units; ++n) {
            const int64_t unit = (first + n) % units;
            std::atomic<uint64_t> &claim = claims[unit].job;
            uint64_t before = claim.load(std::memory_order_relaxed);
            if (before >= number || !claim.compare_exchange_strong(before, number, std::memory_order_acq_rel)) continue;
            if (!begun) fesetenv(&environment);
            begun = true;
            for (int64_t part = unit; part < parts; part += units) {
                function.load(std::memory_order_relaxed)(data.load(std::memory_order_relaxed), part);
                missing.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    void work_on(int64_t own) {
#if defined(__unix__) || defined(__APPLE__)
        sigset_t all;  // signals are Python's main thread's
        sigfillset(&all);
        sigdelset(&all, SIGBUS);  // of a file that is cut short (native_maps.h)
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
#endif
        for (uint64_t known = 0;;) {
            for (int turn = 0; turn < WATCHING; ++turn) {
                const uint64_t now = job.load(std::memory_order_acquire);
                if (now != known) {
                    share(known = now, own, false);
                    turn = 0;
                }
                DP_PAUSE();
            }
            std::unique_lock<std::mutex> lock(mutex);
            ++sleeping;
            work.wait(lock, [&] { return job.load() != known; });
            --sleeping;
        }
    }

    void run(int64_t threads, int64_t parts, dp_Part *f, void *d) {
        // Alone, or another thread's job runs.
        if (threads < 2 || parts < 2 || parts >> BITS || taken.test_and_set(std::memory_order_acquire)) {
            for (int64_t part = 0; part < parts; ++part) f(d, part);
            return;
        }
        try {
            for (; started < threads - 1; ++started) std::thread(&dp_Threads::work_on, this, started + 1).detach();
        } catch (const std::system_error &) {  // the system gives no more: those that there are do it
        }
        function.store(f, std::memory_order_relaxed);
        data.store(d, std::memory_order_relaxed);
        sharing.store(threads, std::memory_order_relaxed);
        fegetenv(&environment);
        missing.store(parts, std::memory_order_relaxed);
        const uint64_t now = ((job.load(std::memory_order_relaxed) >> BITS) + 1) << BITS | (uint64_t)parts;
        job.store(now);
        if (sleeping.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            work.notify_all();
        }
        share(now, 0, true);
        for (int turn = 0; missing.load(std::memory_order_acquire); ++turn)
            if (turn < YIELDING)
                DP_PAUSE();
            else
                std::this_thread::yield();
        taken.clear(std::memory_order_release);
    }
};

// Never destroyed: its threads may look at it until the process ends.
static dp_Threads *dp_threads = new dp_Threads;

#if defined(__unix__) || defined(__APPLE__)
// A forked process has none of the threads.
static const int dp_at_fork = pthread_atfork(nullptr, nullptr, [] { dp_threads = new dp_Threads; });
#endif

// Call f(data, part) for each part, on so many threads at most, and return when all are done.
extern "C" void dp_parallel(int64_t threads, int64_t parts, dp_Part *f, void *data) {
    dp_threads->run(threads, parts, f, data);
}

#endif
