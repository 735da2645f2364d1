// Runs the grid of a launch: CUDA threads are fibers, blocks (clusters, whole cooperative grids) are units of work
// for a small pool of OS threads.
//
// A CUDA thread runs until it has to wait, then the next ready one goes on, directly, without passing a scheduler.
// A thread that ends hands its stack to the next fresh one, so a kernel without barriers needs one stack and no
// switch at all.
#include <csetjmp>
#include <csignal>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "driver.hpp"
#include "fault.hpp"

extern "C" {
__thread EmuThread *emu_self __attribute__((tls_model("initial-exec"))) = nullptr;
}

namespace emu {

namespace {
constexpr uint64_t stack_canary = 0x5afe57ac4b07706dULL;
constexpr unsigned spin_limit = 256;
constexpr unsigned resident_blocks_limit = 132 * 16;  // blocks one worker keeps on the device at once

struct RunningLaunch {
    const Launch *launch = nullptr;
    uint64_t units = 0;
    std::atomic<uint64_t> next_unit{0};
    std::atomic<int> error{CUDA_SUCCESS};
    std::mutex message_lock;
    std::vector<std::string> messages;
};
}  // namespace

struct Worker {
    RunningLaunch *running = nullptr;
    const Launch *launch = nullptr;
    std::vector<std::unique_ptr<Block>> blocks;  // of this unit; kept for the next one
    size_t blocks_used = 0;
    std::vector<std::unique_ptr<Cluster>> clusters;
    size_t clusters_used = 0;
    Barrier grid_barrier;
    uint64_t grid_alive = 0;
    uint64_t alive = 0;
    std::deque<Fiber *> ready;
    Context scheduler;
    sigjmp_buf escape;
    volatile sig_atomic_t running_kernel = 0;
    Fault fault{};
    volatile int fault_signal = 0;
    int failed = CUDA_SUCCESS;
    uint64_t idle_spins = 0;
    double spin_since = 0;
    std::mt19937_64 random;
    bool unchecked = false;  // the engine itself touches kernel memory
    char *signal_stack = nullptr;

    char *stacks = nullptr;
    size_t stack_bytes = 0, stack_count = 0, stacks_made = 0;
    std::vector<char *> free_stacks;

    char *take_stack() {
        if (free_stacks.empty()) {
            if (!stacks) {
                stack_bytes = options().stack;
                stack_count = (size_t{64} << 30) / stack_bytes;
                stacks = static_cast<char *>(reserve(stack_count * stack_bytes));
            }
            if (stacks_made == stack_count) fail_launch(CUDA_ERROR_OUT_OF_MEMORY, "too many waiting threads");
            char *stack = stacks + stacks_made++ * stack_bytes;
            *reinterpret_cast<uint64_t *>(stack) = stack_canary;
            return stack;
        }
        char *stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }

    // Stacks lie a power of two apart; without an offset of their own all tops would share one set of the cache.
    size_t usable(const char *stack) const {
        size_t number = static_cast<size_t>(stack - stacks) / stack_bytes;
        return stack_bytes - (number % 61) * 192;
    }

    Fiber *pop() {
        if (ready.empty()) return nullptr;
        Fiber *fiber = ready.front();
        ready.pop_front();
        return fiber;
    }

    void add_block(uint64_t index, Cluster *cluster);
    void run_unit(uint64_t unit);
    void loop();
    void start_or_resume(Context &from, Fiber *next);
    void wait(Fiber *self);
    void finish(Fiber *self);
    void wake(Barrier &barrier, EmuScope scope, Block *block, Cluster *cluster);
    void wake_fibers(Block &block, EmuScope scope);
    void report_stuck();
    [[noreturn]] void leave();
};

namespace {
thread_local Worker *this_worker = nullptr;

Fiber *self() { return static_cast<Fiber *>(emu_self); }

// Body of every stack: runs fresh threads one after the other until only suspended ones are left.
void fiber_main() {
    for (;;) {
        auto *fiber = self();
        Worker *worker = fiber->worker;
        // At the alignment that arguments have on a device.
        alignas(64) char arguments[4096];
        const std::string &of_launch = worker->launch->arguments;
        if (of_launch.size() > sizeof arguments) worker->launch->function->info.entry(of_launch.data());
        else worker->launch->function->info.entry(static_cast<char *>(memcpy(arguments, of_launch.data(), of_launch.size())));
        worker->finish(fiber);
        char *stack = fiber->stack;
        Fiber *next = worker->pop();
        if (next && next->state == State::fresh) {
            next->stack = stack;
            next->state = State::ready;
            emu_self = next;
            continue;
        }
        // Nobody else runs on this OS thread before the switch, so the stack may already count as free.
        worker->free_stacks.push_back(stack);
        Context nowhere;
        if (!next) {
            emu_self = nullptr;
            switch_context(nowhere, worker->scheduler);
        } else {
            emu_self = next;
            switch_context(nowhere, next->context);
        }
        __builtin_unreachable();
    }
}
}  // namespace

Worker *current_worker() { return this_worker; }

void Worker::leave() {
    emu_self = nullptr;
    Context nowhere;
    switch_context(nowhere, scheduler);
    __builtin_unreachable();
}

// Goes on with next; the caller's registers stay in from.
void Worker::start_or_resume(Context &from, Fiber *next) {
    if (next->state == State::fresh) {
        next->stack = take_stack();
        next->state = State::ready;
        make_context(next->context, next->stack, usable(next->stack), fiber_main);
    }
    emu_self = next;
    switch_context(from, next->context);
}

void Worker::wait(Fiber *fiber) {
    Fiber *next = pop();
    if (next == fiber) return;
    if (next) {
        start_or_resume(fiber->context, next);
    } else {
        emu_self = nullptr;
        switch_context(fiber->context, scheduler);
    }
}

namespace {
void in_order(Worker &worker, std::vector<Fiber *> &fibers) {
    switch (options().order) {
        case Order::forward: break;
        case Order::reverse: std::reverse(fibers.begin(), fibers.end()); break;
        case Order::shuffled: std::shuffle(fibers.begin(), fibers.end(), worker.random); break;
    }
}
}  // namespace

void Worker::add_block(uint64_t index, Cluster *cluster) {
    const Module &module = *launch->function->module;
    if (blocks_used == blocks.size()) blocks.push_back(std::make_unique<Block>());
    Block &block = *blocks[blocks_used++];
    unsigned threads = launch->threads_per_block();
    block.index = index;
    block.cluster = cluster;
    block.alive = threads;
    block.barrier = Barrier{};
    block.barriers.clear();
    block.reached = block.awaited = 0;
    block.meetings.assign((threads + 4 * warp_size - 1) / (4 * warp_size), Meeting{});

    // Static variables first; the dynamic part ends where a page without access begins.
    size_t static_bytes = (module.static_bytes + 127) & ~size_t{127};
    size_t dynamic_bytes = (size_t{launch->dynamic_shared} + 127) & ~size_t{127};
    size_t bytes = static_bytes + dynamic_bytes;
    if (!block.shared_map || block.shared_capacity < bytes) {
        if (block.shared_map) munmap(block.shared_map, block.shared_map_bytes);
        block.shared_capacity = std::max<size_t>((bytes + page_bytes - 1) & ~(page_bytes - 1), page_bytes);
        block.shared_map_bytes = block.shared_capacity + page_bytes;
        block.shared_map = static_cast<char *>(reserve(block.shared_map_bytes));
        mprotect(block.shared_map + block.shared_capacity, page_bytes, PROT_NONE);
    }
    block.shared_high = block.shared_map + block.shared_capacity;
    block.shared_low = block.shared_high - bytes;
    fill_poison(block.shared_low, bytes);

    emu_uint3 grid = launch->grid;
    emu_uint3 at{static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                 static_cast<unsigned>(index / grid.x / grid.y)};
    emu_uint3 c = launch->cluster;
    emu_uint3 inside{at.x % c.x, at.y % c.y, at.z % c.z};

    block.fibers.resize(threads);
    block.warps.resize((threads + warp_size - 1) / warp_size);
    for (size_t w = 0; w < block.warps.size(); ++w) {
        unsigned lanes = std::min<unsigned>(warp_size, threads - static_cast<unsigned>(w) * warp_size);
        block.warps[w].alive = lanes == warp_size ? ~0u : (1u << lanes) - 1;
        block.warps[w].pending.clear();
        if (options().check_races) block.warps[w].joined.assign(warp_size * warp_size, 0);
    }
    emu_uint3 thread{0, 0, 0};
    for (unsigned i = 0; i < threads; ++i) {
        Fiber &fiber = block.fibers[i];
        fiber.thread_idx = thread;
        fiber.block_idx = at;
        fiber.block_dim = launch->block;
        fiber.grid_dim = grid;
        fiber.cluster_dim = c;
        fiber.cluster_idx = {at.x / c.x, at.y / c.y, at.z / c.z};
        fiber.block_in_cluster = inside;
        fiber.cluster_rank = inside.x + c.x * (inside.y + c.y * inside.z);
        fiber.cluster_size = launch->cluster_blocks();
        fiber.linear = i;
        fiber.lane = i % warp_size;
        fiber.warp = i / warp_size;
        fiber.cooperative = launch->cooperative;
        fiber.shared_static = block.shared_low;
        fiber.shared_dynamic = block.shared_low + static_bytes;
        fiber.dynamic_bytes = launch->dynamic_shared;
        fiber.block = &block;
        fiber.worker = this;
        fiber.waits_for = nullptr;
        fiber.state = State::fresh;
        fiber.spins = 0;
        fiber.copy_group = 0;
        delete fiber.copies;
        fiber.copies = nullptr;
        forget_warpgroups(fiber);
        if (++thread.x == launch->block.x) {
            thread.x = 0;
            if (++thread.y == launch->block.y) thread.y = 0, ++thread.z;
        }
    }
    alive += threads;
    grid_alive += threads;
    if (cluster) {
        cluster->blocks.push_back(&block);
        cluster->alive += threads;
    }
    if (options().checked()) begin_checked_block(block, module, launch->function->info);
}

namespace {
// The blocks of a unit: one block, one cluster, or everything.
std::vector<uint64_t> blocks_of_unit(const Launch &launch, uint64_t unit) {
    std::vector<uint64_t> result;
    emu_uint3 c = launch.cluster, grid = launch.grid;
    emu_uint3 clusters{grid.x / c.x, grid.y / c.y, grid.z / c.z};
    uint64_t x0 = unit % clusters.x * c.x, y0 = unit / clusters.x % clusters.y * c.y,
             z0 = unit / clusters.x / clusters.y * c.z;
    for (uint64_t z = z0; z < z0 + c.z; ++z)
        for (uint64_t y = y0; y < y0 + c.y; ++y)
            for (uint64_t x = x0; x < x0 + c.x; ++x) result.push_back(x + grid.x * (y + grid.y * z));
    return result;
}

// The n-th unit in the order that EMULATOR_ORDER asks for.
uint64_t ordered_unit(const RunningLaunch &running, uint64_t n) {
    switch (options().order) {
        case Order::reverse: return running.units - 1 - n;
        case Order::shuffled: {
            // An odd step through a power of two visits every number once; those past the end are walked over.
            uint64_t size = 1;
            while (size < running.units) size <<= 1;
            uint64_t place = n;
            do place = (place * 0x9E3779B97F4A7C15ULL + options().seed * 2654435761ULL + 12345) & (size - 1);
            while (place >= running.units);
            return place;
        }
        default: return n;
    }
}
}  // namespace

void Worker::run_unit(uint64_t unit) {
    blocks_used = 0;
    clusters_used = 0;
    alive = grid_alive = 0;
    grid_barrier = Barrier{};
    ready.clear();
    failed = CUDA_SUCCESS;
    unchecked = false;  // where a warp's instruction ended the launch
    idle_spins = 0;
    spin_since = 0;
    // Threads of an aborted unit leave their stacks behind.
    free_stacks.clear();
    for (size_t i = stacks_made; i-- > 0;) free_stacks.push_back(stacks + i * stack_bytes);
    random.seed(options().seed * 1000003 + unit);

    auto add_unit = [&](uint64_t number) {
        size_t first = blocks_used;
        Cluster *cluster = nullptr;
        if (launch->cluster_blocks() > 1) {
            if (clusters_used == clusters.size()) clusters.push_back(std::make_unique<Cluster>());
            cluster = clusters[clusters_used++].get();
            cluster->blocks.clear();
            cluster->alive = 0;
            cluster->barrier = Barrier{};
        }
        for (uint64_t index : blocks_of_unit(*launch, number)) add_block(index, cluster);
        std::vector<Fiber *> fibers;
        for (size_t b = first; b < blocks_used; ++b)
            for (Fiber &fiber : blocks[b]->fibers) fibers.push_back(&fiber);
        in_order(*this, fibers);
        ready.insert(ready.end(), fibers.begin(), fibers.end());
    };
    if (launch->cooperative) {
        uint64_t count = launch->blocks() / launch->cluster_blocks();
        std::vector<uint64_t> numbers(count);
        for (uint64_t i = 0; i < count; ++i) numbers[i] = i;
        if (options().order == Order::reverse) std::reverse(numbers.begin(), numbers.end());
        if (options().order == Order::shuffled) std::shuffle(numbers.begin(), numbers.end(), random);
        for (uint64_t number : numbers) add_unit(number);
    } else {
        add_unit(unit);
    }

    while (alive > 0 && !failed) {
        if (sigsetjmp(escape, 0) == 0) {
            running_kernel = 1;
            Fiber *next = pop();
            if (next) {
                start_or_resume(scheduler, next);
            } else {
                report_stuck();
            }
            running_kernel = 0;
        } else {
            // A signal ended a CUDA thread: the stack it ran on is not used again before the unit ends.
            running_kernel = 0;
            emu_self = nullptr;
            uintptr_t address = fault.address;
            failed = CUDA_ERROR_ILLEGAL_ADDRESS;
            std::string what;
            if (fault_signal != SIGSEGV && fault_signal != SIGBUS) {
                what = fault_signal == SIGFPE   ? "integer division by zero"
                       : fault_signal == SIGILL ? "illegal instruction"
                                                : "abort";
                failed = CUDA_ERROR_LAUNCH_FAILED;
            } else if (fault.alignment) {
                what = text("misaligned address: access at %s, which is not a multiple of %u",
                            describe_address(address, 1).c_str(), fault.alignment);
                failed = CUDA_ERROR_MISALIGNED_ADDRESS;
            } else {
                what = std::string(find_freed(address) ? "use after free" : "out of bounds") + ": access at " +
                       describe_address(address, 1);
            }
            // A fault is at its instruction; code_text looks before a return address.
            say("%s, in kernel %s at %s", what.c_str(), kernel_name().c_str(),
                code_text(reinterpret_cast<void *>(fault.pc + 1)).c_str());
        }
        // A spinning thread asked for company: blocks that a real device would already run beside this one.
        if (!failed && idle_spins && !launch->cooperative && blocks_used < resident_blocks_limit) {
            uint64_t more = running->next_unit.fetch_add(1);
            if (more < running->units) add_unit(ordered_unit(*running, more));
            idle_spins = 0;
        }
    }
    for (size_t b = 0; b < blocks_used; ++b) {
        if (options().checked()) release_checked_block(*blocks[b]);
        for (Fiber &fiber : blocks[b]->fibers) {
            delete fiber.copies;
            fiber.copies = nullptr;
            forget_warpgroups(fiber);
        }
    }
    for (size_t i = 0; i < stacks_made; ++i) {
        auto *canary = reinterpret_cast<uint64_t *>(stacks + i * stack_bytes);
        if (*canary != stack_canary && !failed) {
            say("stack overflow in kernel %s: a thread's local variables need more than EMULATOR_STACK=%zu bytes",
                kernel_name().c_str(), stack_bytes);
            failed = CUDA_ERROR_LAUNCH_FAILED;
        }
        *canary = stack_canary;
    }
    if (failed) {
        int none = CUDA_SUCCESS;
        running->error.compare_exchange_strong(none, failed);
    }
}

void Worker::loop() {
    Worker *outer = this_worker;
    this_worker = this;
    for (;;) {
        if (running->error.load() != CUDA_SUCCESS) break;
        uint64_t n = running->next_unit.fetch_add(1);
        if (n >= running->units) break;
        run_unit(ordered_unit(*running, n));
    }
    this_worker = outer;
}

void Worker::finish(Fiber *fiber) {
    if (fiber->copies && !fiber->copies->empty()) emu_async_wait(~0u);
    check_nothing_in_flight(*fiber);
    fiber->state = State::finished;
    idle_spins = 0;
    spin_since = 0;
    --alive;
    --grid_alive;
    Block &block = *fiber->block;
    --block.alive;
    Warp &warp = block.warps[fiber->warp];
    warp.alive &= ~(1u << fiber->lane);
    bool strict = options().strict_barriers;
    if (block.alive && block.barrier.arrived == block.alive) {
        if (strict) report_stuck();
        wake(block.barrier, EMU_BLOCK, &block, nullptr);
    }
    if (!strict) {
        for (size_t i = 0; i < warp.pending.size(); ++i) {
            Collective pending = warp.pending[i];
            if ((pending.mask & warp.alive) != pending.arrived) continue;
            warp.pending.erase(warp.pending.begin() + static_cast<long>(i--));
            if (pending.combine) pending.combine(pending.lanes, pending.arrived);
            for (unsigned lane = 0; lane < warp_size; ++lane)
                if (pending.arrived >> lane & 1) {
                    Fiber &other = block.fibers[fiber->warp * warp_size + lane];
                    other.state = State::ready;
                    ready.push_back(&other);
                }
        }
    }
    if (block.cluster) {
        Cluster &cluster = *block.cluster;
        --cluster.alive;
        if (cluster.alive && cluster.barrier.arrived == cluster.alive) {
            if (strict) report_stuck();
            wake(cluster.barrier, EMU_CLUSTER, nullptr, &cluster);
        }
    }
    if (launch->cooperative && grid_alive && grid_barrier.arrived == grid_alive) {
        if (strict) report_stuck();
        wake(grid_barrier, EMU_GRID, nullptr, nullptr);
    }
}

void Worker::wake_fibers(Block &block, EmuScope scope) {
    auto waits = [&](Fiber &fiber) { return fiber.state == State::waiting && fiber.wait_scope == scope; };
    auto take = [&](Fiber &fiber) {
        if (!waits(fiber)) return;
        fiber.state = State::ready;
        fiber.waits_for = nullptr;
        ready.push_back(&fiber);
    };
    switch (options().order) {
        case Order::forward:
            for (Fiber &fiber : block.fibers) take(fiber);
            break;
        case Order::reverse:
            for (auto fiber = block.fibers.rbegin(); fiber != block.fibers.rend(); ++fiber) take(*fiber);
            break;
        case Order::shuffled: {
            std::vector<Fiber *> list;
            for (Fiber &fiber : block.fibers)
                if (waits(fiber)) list.push_back(&fiber);
            std::shuffle(list.begin(), list.end(), random);
            for (Fiber *fiber : list) take(*fiber);
        }
    }
}

// Completes a barrier: everyone who waits for it becomes ready.
void Worker::wake(Barrier &barrier, EmuScope scope, Block *block, Cluster *cluster) {
    idle_spins = 0;
    spin_since = 0;
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.tick = next_tick();
    if (block) {
        wake_fibers(*block, scope);
    } else if (cluster) {
        auto list = cluster->blocks;
        if (options().order == Order::reverse) std::reverse(list.begin(), list.end());
        if (options().order == Order::shuffled) std::shuffle(list.begin(), list.end(), random);
        for (Block *b : list) {
            b->barrier.tick = barrier.tick;
            wake_fibers(*b, scope);
        }
    } else {
        for (size_t b = 0; b < blocks_used; ++b) {
            blocks[b]->barrier.tick = barrier.tick;
            if (blocks[b]->cluster) blocks[b]->cluster->barrier.tick = barrier.tick;
            wake_fibers(*blocks[b], scope);
        }
    }
}

// Some threads wait for others that will never come: says who waits where.
void Worker::report_stuck() {
    struct Group {
        std::string what;
        unsigned count = 0;
        const Fiber *example = nullptr;
    };
    std::map<std::string, Group> groups;
    unsigned finished = 0;
    const Block *stuck = nullptr;
    for (size_t b = 0; b < blocks_used && !stuck; ++b)
        for (const Fiber &fiber : blocks[b]->fibers)
            if (fiber.state == State::waiting) {
                stuck = blocks[b].get();
                break;
            }
    std::string where;
    if (stuck) {
        for (const Fiber &fiber : stuck->fibers) {
            if (fiber.state == State::finished) {
                ++finished;
                continue;
            }
            if (fiber.state != State::waiting) continue;
            std::string key = std::string(fiber.waits_for) + " at " + site_text(fiber.site);
            Group &group = groups[key];
            if (!group.count++) group.example = &fiber;
        }
        where = text("block (%u,%u,%u): ", stuck->fibers[0].block_idx.x, stuck->fibers[0].block_idx.y,
                     stuck->fibers[0].block_idx.z);
    }
    bool first = true;
    for (auto &[key, group] : groups) {
        where += text("%s%u of %zu threads wait in %s, thread (%u,%u,%u) for one", first ? "" : "; ", group.count,
                      stuck->fibers.size(), key.c_str(), group.example->thread_idx.x, group.example->thread_idx.y,
                      group.example->thread_idx.z);
        first = false;
    }
    if (finished) where += text("; %u have left the kernel", finished);
    say("divergent barrier in kernel %s, %s", kernel_name().c_str(), where.c_str());
    failed = CUDA_ERROR_LAUNCH_TIMEOUT;
    if (emu_self) leave();
}

void fail_launch(CUresult code, const std::string &message) {
    Worker *worker = this_worker;
    say("%s", message.c_str());
    worker->failed = code;
    worker->leave();
}

std::string kernel_name() {
    return this_worker && this_worker->launch ? this_worker->launch->function->info.name : "?";
}

std::string thread_text(const Fiber &fiber) {
    return text("block (%u,%u,%u), thread (%u,%u,%u)", fiber.block_idx.x, fiber.block_idx.y, fiber.block_idx.z,
                fiber.thread_idx.x, fiber.thread_idx.y, fiber.thread_idx.z);
}

// Called by the checks: is the address in a stack, and in whose?
int stack_owner(const Fiber &fiber, uintptr_t address) {
    const Worker &worker = *fiber.worker;
    auto low = reinterpret_cast<uintptr_t>(worker.stacks);
    if (address < low || address >= low + worker.stack_bytes * worker.stack_count) return 0;
    auto mine = reinterpret_cast<uintptr_t>(fiber.stack);
    return address >= mine && address < mine + worker.stack_bytes ? 1 : 2;
}

bool worker_unchecked(const Fiber &fiber) { return fiber.worker->unchecked; }

Block *peer_block_of(const Fiber &fiber, uintptr_t address) {
    Cluster *cluster = fiber.block->cluster;
    if (cluster)
        for (Block *block : cluster->blocks)
            if (address >= reinterpret_cast<uintptr_t>(block->shared_low) &&
                address < reinterpret_cast<uintptr_t>(block->shared_high))
                return block;
    return nullptr;
}

// Block `index` of the running unit, for race records.
Block *resident_block(const Fiber &fiber, uint64_t index) {
    Worker &worker = *fiber.worker;
    for (size_t b = 0; b < worker.blocks_used; ++b)
        if (worker.blocks[b]->index == index) return worker.blocks[b].get();
    return nullptr;
}

uint64_t grid_barrier_tick(const Fiber &fiber) { return fiber.worker->grid_barrier.tick; }

// ---------------------------------------------------------------- faults

namespace {
struct sigaction old_segv, old_bus, old_fpe;
constexpr size_t signal_stack_bytes = 64 * 1024;

void on_fault(int number, siginfo_t *info, void *context) {
    Worker *worker = this_worker;
    if (worker && worker->running_kernel && emu_self) {
        worker->fault = fault_of(*info, context);
        worker->fault_signal = number;
        worker->running_kernel = 0;
        siglongjmp(worker->escape, 1);
    }
    // Not ours: whoever was here before decides (Python's faulthandler, or the default action).
    struct sigaction &old = number == SIGSEGV ? old_segv : number == SIGBUS ? old_bus : old_fpe;
    if (old.sa_flags & SA_SIGINFO && old.sa_sigaction) {
        old.sa_sigaction(number, info, context);
    } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN && old.sa_handler) {
        old.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
}

void watch_signal(int number, struct sigaction &old) {
    struct sigaction current {};
    sigaction(number, nullptr, &current);
    if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == on_fault) return;
    struct sigaction wanted {};
    wanted.sa_sigaction = on_fault;
    // SA_NODEFER: the handler leaves by siglongjmp, which does not restore the mask.
    wanted.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(number, &wanted, &old);
}

void watch_faults() {
    watch_signal(SIGSEGV, old_segv);
    watch_signal(SIGBUS, old_bus);
    watch_signal(SIGFPE, old_fpe);
}

// A fault handler needs a stack of its own: the CUDA thread's may be what overflowed.
void give_signal_stack(Worker &worker) {
    stack_t current{};
    sigaltstack(nullptr, &current);
    if (!(current.ss_flags & SS_DISABLE) && current.ss_sp) return;
    if (!worker.signal_stack) worker.signal_stack = static_cast<char *>(reserve(signal_stack_bytes));
    stack_t wanted{};
    wanted.ss_sp = worker.signal_stack;
    wanted.ss_size = signal_stack_bytes;
    sigaltstack(&wanted, nullptr);
}

// ---------------------------------------------------------------- pool of OS threads

class Pool {
public:
    void run(RunningLaunch &running) {
        unsigned helpers = 0;
        if (running.units > 1 && options().threads > 1 && !options().checked()) {
            helpers = static_cast<unsigned>(std::min<uint64_t>(options().threads - 1, running.units - 1));
            start(options().threads - 1);
        }
        if (helpers) {
            std::lock_guard guard(lock_);
            running_ = &running;
            wanted_ = helpers;
            ++generation_;
            wake_.notify_all();
        }
        work(caller(), running);
        if (helpers) {
            std::unique_lock guard(lock_);
            wanted_ = 0;
            idle_.wait(guard, [&] { return busy_ == 0; });
            running_ = nullptr;
        }
    }

private:
    static void work(Worker &worker, RunningLaunch &running) {
        worker.running = &running;
        worker.launch = running.launch;
        give_signal_stack(worker);
        worker.loop();
        worker.running = nullptr;
        worker.launch = nullptr;
    }

    // One worker per host thread that launches; it keeps its stacks for the next launch.
    static Worker &caller() {
        static thread_local Worker *worker = new Worker;
        return *worker;
    }

    void start(unsigned count) {
        if (process_ != getpid()) {
            // A forked child has none of the parent's threads.
            process_ = getpid();
            started_ = 0;
            busy_ = 0;
        }
        while (started_ < count) {
            ++started_;
            std::thread([this] { help(); }).detach();
        }
    }

    void help() {
        auto *worker = new Worker;
        uint64_t seen = 0;
        sigset_t all;
        sigfillset(&all);
        for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, nullptr);  // Ctrl-C and friends belong to Python's threads
        for (;;) {
            RunningLaunch *running;
            {
                std::unique_lock guard(lock_);
                wake_.wait(guard, [&] { return generation_ != seen && wanted_ > 0; });
                seen = generation_;
                --wanted_;
                ++busy_;
                running = running_;
            }
            work(*worker, *running);
            std::lock_guard guard(lock_);
            if (--busy_ == 0) idle_.notify_all();
        }
    }

    std::mutex lock_;
    std::condition_variable wake_, idle_;
    RunningLaunch *running_ = nullptr;
    unsigned wanted_ = 0, busy_ = 0, started_ = 0;
    uint64_t generation_ = 0;
    pid_t process_ = getpid();
};
}  // namespace

CUresult execute(const Launch &launch) {
    static Pool &pool = *new Pool;  // never destroyed: detached threads may outlive main
    RunningLaunch running;
    running.launch = &launch;
    running.units = launch.cooperative ? 1 : launch.blocks() / launch.cluster_blocks();
    watch_faults();
    if (options().checked()) begin_checked_launch(launch);
    fflush(stdout);
    pool.run(running);
    fflush(stdout);  // what kernels printed
    return static_cast<CUresult>(running.error.load());
}

}  // namespace emu

// ---------------------------------------------------------------- what kernels call

using namespace emu;

namespace {
void suspend(Fiber &fiber, EmuScope scope, const char *what, const EmuSite &site) {
    fiber.state = State::waiting;
    fiber.wait_scope = scope;
    fiber.waits_for = what;
    fiber.site = site;
    fiber.worker->wait(&fiber);
}

// One thread arrives. Returns whether it was the last.
bool arrive(Fiber &fiber, Barrier &barrier, uint64_t alive, uint64_t all, const char *what, const EmuSite &site) {
    if (alive != all && options().strict_barriers)
        fail_launch(CUDA_ERROR_LAUNCH_TIMEOUT,
                    text("divergent barrier in kernel %s, %s waits in %s at %s; %llu of %llu threads have left the kernel",
                         kernel_name().c_str(), thread_text(fiber).c_str(), what, site_text(site).c_str(),
                         static_cast<unsigned long long>(all - alive), static_cast<unsigned long long>(all)));
    if (barrier.arrived == 0) {
        barrier.site = site;
        barrier.sum = 0;
    } else if (options().strict_barriers && !same_site(barrier.site, site)) {
        elsewhere(fiber, what, site, "group", barrier.site);
    }
    return ++barrier.arrived == alive;
}

struct Place {
    Barrier *barrier;
    uint64_t alive, all;
    Block *block;
    Cluster *cluster;
    const char *what;
};

Place place_of(Fiber &fiber, EmuScope scope) {
    Block *block = fiber.block;
    switch (scope) {
        case EMU_CLUSTER:
            if (block->cluster)
                return {&block->cluster->barrier, block->cluster->alive,
                        block->cluster->blocks.size() * block->fibers.size(), nullptr, block->cluster,
                        "cluster barrier"};
            return {&block->barrier, block->alive, block->fibers.size(), block, nullptr, "cluster barrier"};
        case EMU_GRID:
            if (!fiber.cooperative)
                fail_launch(CUDA_ERROR_LAUNCH_FAILED,
                            text("grid barrier in kernel %s, which was not launched cooperatively",
                                 kernel_name().c_str()));
            return {&fiber.worker->grid_barrier, fiber.worker->grid_alive,
                    fiber.worker->blocks_used * block->fibers.size(), nullptr, nullptr, "grid barrier"};
        default: return {&block->barrier, block->alive, block->fibers.size(), block, nullptr, "block barrier"};
    }
}
}  // namespace

bool emu::same_site(const EmuSite &a, const EmuSite &b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

void emu::elsewhere(const Fiber &fiber, const char *what, const EmuSite &site, const char *group, const EmuSite &others) {
    fail_launch(CUDA_ERROR_LAUNCH_TIMEOUT,
                text("divergent barrier in kernel %s, %s waits in %s at %s, others of its %s at %s", kernel_name().c_str(),
                     thread_text(fiber).c_str(), what, site_text(site).c_str(), group, site_text(others).c_str()));
}

void emu::suspend_thread(Fiber &fiber, const char *what, const EmuSite &site) { suspend(fiber, EMU_WARP, what, site); }

void emu::make_ready(std::vector<Fiber *> threads) {
    if (threads.empty()) return;
    Worker &worker = *threads[0]->worker;
    worker.idle_spins = 0;
    in_order(worker, threads);
    for (Fiber *thread : threads) {
        thread->state = State::ready;
        thread->waits_for = nullptr;
        worker.ready.push_back(thread);
    }
}

// Asynchronous copies happen as late as the rules allow, so that a missing wait reads what was there before. A race is
// looked for from here on: a device may copy at once.
void emu::begin_async_copy(void *shared, const void *global, unsigned bytes, unsigned zero_fill, const void *pc) {
    Fiber &fiber = *self();
    if (!fiber.copies) fiber.copies = new std::vector<AsyncCopy>;
    fiber.copies->push_back({shared, global, bytes, zero_fill, pc, fiber.copy_group});
    if (options().check_races) check_coming_write(shared, bytes, pc);
}

extern "C" {

int emu_block_barrier(EmuReduce reduce, int predicate, EmuSite site) {
    Fiber &fiber = *self();
    Block &block = *fiber.block;
    Barrier &barrier = block.barrier;
    bool last = arrive(fiber, barrier, block.alive, block.fibers.size(), "__syncthreads", site);
    barrier.sum += predicate != 0;
    if (last) {
        int result = reduce == EMU_COUNT ? barrier.sum
                     : reduce == EMU_AND ? barrier.sum == static_cast<int>(block.alive)
                                         : barrier.sum > 0;
        for (Fiber &other : block.fibers) other.result = result;
        fiber.state = State::waiting;
        fiber.wait_scope = EMU_BLOCK;
        fiber.worker->wake(barrier, EMU_BLOCK, &block, nullptr);
        fiber.worker->wait(&fiber);
    } else {
        suspend(fiber, EMU_BLOCK, "__syncthreads", site);
    }
    return fiber.result;
}

void emu_warp_collective(unsigned mask, void *mine, void (*combine)(void **, unsigned), const char *what,
                         EmuSite site) {
    Fiber &fiber = *self();
    Block &block = *fiber.block;
    Warp &warp = block.warps[fiber.warp];
    unsigned threads = static_cast<unsigned>(block.fibers.size());
    unsigned lanes = std::min(warp_size, threads - fiber.warp * warp_size);
    unsigned exist = lanes == warp_size ? ~0u : (1u << lanes) - 1;
    if (!(mask >> fiber.lane & 1))
        fail_launch(CUDA_ERROR_LAUNCH_FAILED,
                    text("divergent barrier in kernel %s, %s calls %s at %s with mask 0x%08x, which does not name it",
                         kernel_name().c_str(), thread_text(fiber).c_str(), what, site_text(site).c_str(), mask));
    mask &= exist;
    unsigned gone = mask & ~warp.alive;
    if (gone && options().strict_barriers)
        fail_launch(CUDA_ERROR_LAUNCH_TIMEOUT,
                    text("divergent barrier in kernel %s, %s calls %s at %s with mask 0x%08x, lanes 0x%08x of which "
                         "have left the kernel",
                         kernel_name().c_str(), thread_text(fiber).c_str(), what, site_text(site).c_str(), mask, gone));
    Collective *group = nullptr;
    for (Collective &pending : warp.pending)
        if (pending.mask == mask && strcmp(pending.what, what) == 0 && !(pending.arrived >> fiber.lane & 1)) {
            group = &pending;
            break;
        }
    if (!group) {
        warp.pending.emplace_back();
        group = &warp.pending.back();
        group->mask = mask;
        group->what = what;
        group->site = site;
        group->combine = combine;
    } else if (options().strict_barriers && !same_site(group->site, site)) {
        elsewhere(fiber, what, site, "warp", group->site);
    }
    group->arrived |= 1u << fiber.lane;
    group->lanes[fiber.lane] = mine;
    if (group->arrived != (mask & warp.alive)) {
        suspend(fiber, EMU_WARP, what, site);
        return;
    }
    Collective complete = *group;
    warp.pending.erase(warp.pending.begin() + (group - warp.pending.data()));
    fiber.worker->idle_spins = 0;
    if (complete.combine) {
        fiber.worker->unchecked = true;
        complete.combine(complete.lanes, complete.arrived);
        fiber.worker->unchecked = false;
    } else if (!warp.joined.empty()) {
        uint64_t tick = next_tick();
        for (unsigned i = 0; i < warp_size; ++i)
            for (unsigned j = 0; j < warp_size; ++j)
                if (complete.arrived >> i & complete.arrived >> j & 1) warp.joined[i * warp_size + j] = tick;
        Seen seen;
        auto of_lanes = [&](auto each) {
            for (unsigned lane = 0; lane < lanes; ++lane)
                if (complete.arrived >> lane & 1) each(block.fibers[fiber.warp * warp_size + lane]);
        };
        of_lanes([&](Fiber &other) {
            if (other.warpgroups && !other.warpgroups->seen.empty()) release_to(other, seen);
        });
        if (!seen.empty()) of_lanes([&](Fiber &other) { acquire_from(other, seen); });
    }
    // The last to arrive goes on at once; the others follow in the chosen order.
    std::vector<Fiber *> others;
    for (unsigned lane = 0; lane < warp_size; ++lane)
        if ((complete.arrived >> lane & 1) && lane != fiber.lane)
            others.push_back(&block.fibers[fiber.warp * warp_size + lane]);
    make_ready(others);
}

void emu_warp_barrier(unsigned mask, EmuSite site) {
    emu_warp_collective(mask, nullptr, nullptr, "__syncwarp", site);
}

uint64_t emu_barrier_arrive(EmuScope scope, EmuSite site) {
    Fiber &fiber = *self();
    Place place = place_of(fiber, scope);
    uint64_t token = place.barrier->generation;
    if (arrive(fiber, *place.barrier, place.alive, place.all, place.what, site))
        fiber.worker->wake(*place.barrier, scope, place.block, place.cluster);
    return token;
}

void emu_barrier_wait(EmuScope scope, uint64_t token, EmuSite site) {
    Fiber &fiber = *self();
    Place place = place_of(fiber, scope);
    if (place.barrier->generation != token) {
        // The last to arrive: behind the others, as the order demands.
        fiber.worker->ready.push_back(&fiber);
        fiber.worker->wait(&fiber);
        return;
    }
    suspend(fiber, scope, place.what, site);
}

unsigned emu_active_mask(void) { return self()->block->warps[self()->warp].alive; }

char *emu_map_shared(char *address, unsigned rank) {
    Fiber &fiber = *self();
    Block &mine = *fiber.block;
    if (address < mine.shared_low || address >= mine.shared_high || rank >= fiber.cluster_size)
        fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS,
                    text("map_shared_rank in kernel %s, %s: %s", kernel_name().c_str(), thread_text(fiber).c_str(),
                         rank >= fiber.cluster_size ? text("rank %u of a cluster of %u", rank, fiber.cluster_size).c_str()
                                                    : "the address is not in shared memory"));
    if (!mine.cluster) return address;
    for (Block *block : mine.cluster->blocks)
        if (block->fibers[0].cluster_rank == rank) {
            // DSMEM of a block that has left is gone on a real device.
            if (block->alive == 0)
                fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS,
                            text("use after free: kernel %s, %s reaches into the shared memory of cluster rank %u, "
                                 "which has left the kernel",
                                 kernel_name().c_str(), thread_text(fiber).c_str(), rank));
            return block->shared_low + (address - mine.shared_low);
        }
    return address;
}

int emu_is_shared(const void *address) {
    Fiber &fiber = *self();
    return address >= fiber.block->shared_low && address < fiber.block->shared_high;
}

static void fence(bool reaches_other_blocks) {
    if (emu_self) {
        if (options().check_races) note_fence(*self(), reaches_other_blocks);
        emu_spin();
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

void emu_fence(void) { fence(true); }

void emu_fence_block(void) { fence(false); }

void emu_spin(void) {
    Fiber &fiber = *self();
    if (++fiber.spins < spin_limit) return;
    fiber.spins = 0;
    Worker &worker = *fiber.worker;
    if (worker.running->error.load(std::memory_order_relaxed) != CUDA_SUCCESS) {
        worker.failed = CUDA_ERROR_LAUNCH_FAILED;  // another OS thread's blocks ended the launch
        worker.leave();
    }
    if (++worker.idle_spins > 8 * (worker.ready.size() + 1)) {
        double time = now();
        if (worker.spin_since == 0) worker.spin_since = time;
        if (time - worker.spin_since > options().timeout)
            fail_launch(CUDA_ERROR_LAUNCH_TIMEOUT,
                        text("kernel %s: threads spin for EMULATOR_TIMEOUT=%g seconds without progress, %s for one",
                             kernel_name().c_str(), options().timeout, thread_text(fiber).c_str()));
        // Back to the scheduler, which may add blocks; this thread goes on later.
        std::this_thread::yield();
        worker.ready.push_back(&fiber);
        emu_self = nullptr;
        switch_context(fiber.context, worker.scheduler);
        return;
    }
    worker.ready.push_back(&fiber);
    worker.wait(&fiber);
}

void emu_misaligned_matrix(const void *place, unsigned long stride, const char *what, EmuSite site) {
    auto address = reinterpret_cast<uintptr_t>(place);
    std::string why = address % 32
                          ? text("0x%llx, which is not a multiple of 32", static_cast<unsigned long long>(address))
                          : text("rows %lu bytes apart, which is not a multiple of 16", stride);
    fail_launch(CUDA_ERROR_MISALIGNED_ADDRESS,
                text("misaligned address: %s with %s, in kernel %s, %s, at %s", what, why.c_str(),
                     kernel_name().c_str(), thread_text(*self()).c_str(), site_text(site).c_str()));
}

void emu_trap(EmuSite site) {
    fail_launch(CUDA_ERROR_ILLEGAL_INSTRUCTION, text("trap in kernel %s, %s, at %s", kernel_name().c_str(),
                                                     thread_text(*self()).c_str(), site_text(site).c_str()));
}

void emu_assert_failed(const char *expression, const char *function, EmuSite site) {
    fail_launch(CUDA_ERROR_ASSERT, text("assertion `%s' failed in %s at %s, %s", expression, function,
                                        site_text(site).c_str(), thread_text(*self()).c_str()));
}

void emu_async_copy(void *shared, const void *global, unsigned bytes, unsigned zero_fill) {
    emu::begin_async_copy(shared, global, bytes, zero_fill, __builtin_return_address(0));
}

void emu_async_commit(void) { ++self()->copy_group; }

void emu_async_wait(unsigned pending) {
    Fiber &fiber = *self();
    if (!fiber.copies) return;
    auto &copies = *fiber.copies;
    size_t done = 0;
    for (; done < copies.size(); ++done) {
        const AsyncCopy &copy = copies[done];
        if (pending != ~0u && copy.group + pending >= fiber.copy_group) break;  // ~0: also what was never committed
        unsigned n = copy.bytes - copy.zero_fill;
        if (options().checked()) {
            if (n) check_access(copy.from, n, EMU_READ, copy.pc);
            check_access(copy.to, copy.bytes, EMU_WRITE, copy.pc);
        }
        memcpy(copy.to, copy.from, n);
        memset(static_cast<char *>(copy.to) + n, 0, copy.zero_fill);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<long>(done));
}

}  // extern "C"
