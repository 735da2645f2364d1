// Threads that share a loop of generated code for a CPU.
//
// A job is a function that is called once for each of its parts, 0 to parts - 1. Whoever is free takes the next part, the
// calling thread among them: it never waits for a thread that has not begun, so that a core that another process uses
// costs its share of the speed and no more. A thread looks out for jobs for some 100 us before it sleeps, as a step's jobs
// follow each other. Nothing that is computed may depend on which thread computes it.
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

    std::atomic<uint64_t> job{0};      // its number in the upper half, in the lower one the parts that nobody has taken
    std::atomic<int64_t> missing{0};   // parts that are not done
    std::atomic<dp_Part *> function{nullptr};
    std::atomic<void *> data{nullptr};
    fenv_t environment;                // of the calling thread: flush-to-zero is a switch of each thread's own
    std::atomic<int> sleeping{0};
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    std::mutex mutex;
    std::condition_variable work;
    int64_t started = 0;

    // Execute a part that nobody has taken; false where there is none. What a job consists of is replaced only after all
    // of its parts are done: so it is that job's if the exchange succeeds.
    bool take(uint64_t &known) {
        uint64_t now = job.load(std::memory_order_acquire);
        while ((uint32_t)now) {
            dp_Part *f = function.load(std::memory_order_relaxed);
            void *d = data.load(std::memory_order_relaxed);
            if (!job.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            if (known != now >> 32) {
                known = now >> 32;
                fesetenv(&environment);
            }
            f(d, (int64_t)(uint32_t)now - 1);
            missing.fetch_sub(1, std::memory_order_release);
            return true;
        }
        return false;
    }

    void work_on() {
#if defined(__unix__) || defined(__APPLE__)
        sigset_t all;  // signals are Python's main thread's
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
#endif
        for (uint64_t known = 0;;) {
            int turn = 0;
            while (turn < WATCHING)
                if (take(known)) {
                    turn = 0;
                } else {
                    DP_PAUSE();
                    ++turn;
                }
            std::unique_lock<std::mutex> lock(mutex);
            ++sleeping;
            work.wait(lock, [&] { return (uint32_t)job.load() != 0; });
            --sleeping;
        }
    }

    void run(int64_t threads, int64_t parts, dp_Part *f, void *d) {
        if (threads < 2 || parts < 2 || taken.test_and_set(std::memory_order_acquire)) {  // another thread's job runs
            for (int64_t part = 0; part < parts; ++part) f(d, part);
            return;
        }
        try {
            for (; started < threads - 1; ++started) std::thread(&dp_Threads::work_on, this).detach();
        } catch (const std::system_error &) {  // the system gives no more: those that there are do it
        }
        function.store(f, std::memory_order_relaxed);
        data.store(d, std::memory_order_relaxed);
        fegetenv(&environment);
        missing.store(parts, std::memory_order_relaxed);
        uint64_t known = (job.load(std::memory_order_relaxed) >> 32) + 1 & 0xffffffff;
        job.store(known << 32 | (uint64_t)parts);
        if (sleeping.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            work.notify_all();
        }
        while (take(known)) {
        }
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
