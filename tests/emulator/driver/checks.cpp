// Checked runs: every memory access of a kernel passes through here.
//
// The nvcc stand-in compiles kernels with -fsanitize=thread but links none of its runtime: the __tsan_* calls that
// the compiler puts before each access land in this file, which knows what ThreadSanitizer cannot: CUDA's memory
// spaces, which bytes were written, and which barriers order which threads. -fsanitize=alignment works the same way.
// All blocks of a checked launch run on one OS thread, so nothing here needs a lock.
#include <algorithm>
#include <cstring>

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include <sys/mman.h>

#include "driver.hpp"

namespace emu {

int stack_owner(const Fiber &fiber, uintptr_t address);
bool worker_unchecked(const Fiber &fiber);
Block *peer_block_of(const Fiber &fiber, uintptr_t address);
Block *resident_block(const Fiber &fiber, uint64_t index);
uint64_t grid_barrier_tick(const Fiber &fiber);

namespace {
// Who touched a word, and when. Time is a counter that every barrier and fence of the launch advances.
struct Record {
    uint32_t launch;  // or copy, or memset
    uint32_t block, thread;
    uint32_t site_and_bytes;  // code site in the upper 28 bits, touched bytes of the word in the lower 4
    uint64_t tick;
};
}  // namespace

struct RaceCell {
    Record write, atomic, read[2];  // the last of each; reads by two different threads
};

size_t race_cell_bytes() { return sizeof(RaceCell); }

namespace {
uint64_t tick_counter = 1;
uint32_t launch_counter = 0;
// What launches and copies were part of, by their numbers.
struct Actor {
    std::string name;
    unsigned stream = 0, identity = 0;
    uint64_t number = 0;
    size_t node = 0;
};
std::vector<Actor> actors(1);
std::unordered_set<uint32_t> known_earlier;  // of those, as far as the running one asked
constexpr size_t most_of_a_copy = 1 << 20;   // bytes that are looked at
std::vector<const void *> sites;
std::unordered_map<const void *, uint32_t> site_numbers;
std::unordered_set<std::string> said;  // one report per pair of lines
Allocation *last_hit = nullptr;

uint32_t site_number(const void *pc) {
    auto [entry, fresh] = site_numbers.try_emplace(pc, static_cast<uint32_t>(sites.size()));
    if (fresh) sites.push_back(pc);
    return entry->second;
}

constexpr uint8_t shared_outside = 0, shared_unwritten = 1, shared_written = 2;

const char *verb(EmuAccess kind) {
    return kind == EMU_READ ? "read" : kind == EMU_WRITE ? "write" : "atomic";
}

void out_of_bounds(const Fiber &fiber, size_t bytes, EmuAccess kind, const void *pc,
                   const std::string &where, bool freed = false) {
    finding(CUDA_ERROR_ILLEGAL_ADDRESS,
            text("%s: %s of %zu bytes %s, in kernel %s, %s, at %s", freed ? "use after free" : "out of bounds",
                 verb(kind), bytes, where.c_str(), kernel_name().c_str(), thread_text(fiber).c_str(),
                 code_text(pc).c_str()));
}

// How threads meet without a barrier, as CUDA's memory model has it: what a thread did, and what barriers showed it,
// before a fence is released by its next atomics. Another thread's atomic on the same word, later, and a fence behind it
// acquire that. A volatile access of the word does for half of an atomic.
struct Fence {
    uint64_t tick = 0;       // what the thread did before is released,
    uint64_t of_block = 0;   // and what its block did before this barrier,
    uint64_t of_lanes[warp_size] = {};  // or the lanes of its warp before theirs
    std::shared_ptr<const Seen> seen;   // or others that it met at mbarriers
    bool wide = false;                  // for other blocks as well
};
struct Release {
    uintptr_t word;
    uint64_t tick;
    uint32_t thread;
    Fence fence;
};
struct Acquire {
    uint64_t tick;  // of the atomic
    uint32_t block, thread;
    uint64_t fence;
    bool wide;
};
struct Met {
    Fence wide, narrow;                                   // the thread's last fences
    std::vector<std::pair<uintptr_t, uint64_t>> pending;  // words that it saw, and when, since its last wide fence
};
constexpr size_t remembered = 256;
std::unordered_map<uint64_t, Met> met;                       // by block and thread
std::unordered_map<uint32_t, std::deque<Release>> releases;  // by block
std::unordered_map<uintptr_t, std::vector<Acquire>> acquires;  // by word

Met &met_by(const Fiber &fiber) { return met[fiber.block->index << 10 | fiber.linear]; }

void note_atomic(const Fiber &fiber, uintptr_t word, bool reads, bool writes) {
    uint64_t tick = next_tick();
    Met &own = met_by(fiber);
    auto &list = releases[static_cast<uint32_t>(fiber.block->index)];
    for (const Fence *fence : {&own.wide, &own.narrow}) {
        if (!writes || !fence->tick) continue;
        list.push_back({word, tick, fiber.linear, *fence});
        if (list.size() > remembered) list.pop_front();
    }
    if (!reads) return;
    for (auto &[seen, when] : own.pending)
        if (seen == word) {
            when = tick;
            return;
        }
    own.pending.emplace_back(word, tick);
    if (own.pending.size() > remembered) own.pending.erase(own.pending.begin());
}

// How many mbarriers of a block have bulk copies that race mode follows, and the numbers in records of these.
constexpr uint32_t most_barriers = 64;
uint32_t actors_of(const Block &block) { return static_cast<uint32_t>(block.fibers.size() + block.warps.size()) + most_barriers; }
uint32_t copies_of(const Block &block, unsigned barrier) {
    return static_cast<uint32_t>(block.fibers.size() + block.warps.size()) + std::min(barrier, most_barriers - 1);
}

// The place in `Seen` of a number in records.
size_t in_seen(const Block &block, uint32_t thread) { return size_t{block.fibers[0].cluster_rank} * actors_of(block) + thread; }

// Does what a thread of a block did at a time come before what `fiber` does, by the mbarriers that it waited for?
bool knows(const Fiber &fiber, const Block &block, uint32_t thread, uint64_t when) {
    if (!fiber.warpgroups) return false;
    size_t at = in_seen(block, thread);
    return at < fiber.warpgroups->seen.size() && fiber.warpgroups->seen[at] > when;
}
bool knows(const Fiber &fiber, uint32_t thread, uint64_t when) { return knows(fiber, *fiber.block, thread, when); }

// The number in records of what a warp's wgmma do.
uint32_t wgmma_of(const Fiber &fiber) { return static_cast<uint32_t>(fiber.block->fibers.size()) + fiber.warp; }

// Does the running access of `fiber` come behind what a thread of its own block acquired?
bool has_acquired(const Fiber &fiber, const Acquire &q) {
    if (q.block != fiber.block->index) return false;
    if (q.thread == fiber.linear || q.fence < fiber.block->barrier.tick || knows(fiber, q.thread, q.fence)) return true;
    return q.thread / warp_size == fiber.warp &&
           fiber.block->warps[fiber.warp].joined[(q.thread % warp_size) * warp_size + fiber.lane] > q.fence;
}

// Does what a thread of a block did at a time come before the running access of `fiber`? Fences are cumulative, from
// block to block; `seen` are the acquires that were followed already.
bool released_to(const Fiber &fiber, uint32_t block, uint32_t thread, uint64_t when,
                 std::unordered_set<const Acquire *> &seen) {
    std::vector<const Acquire *> others;
    const Block *of = resident_block(fiber, block);
    const size_t at = of ? in_seen(*of, thread) : thread;
    for (const Release &r : releases[block]) {
        uint64_t until = r.thread == thread ? r.fence.tick : 0;
        if (r.fence.seen && at < r.fence.seen->size()) until = std::max(until, (*r.fence.seen)[at]);
        if (r.thread / warp_size == thread / warp_size) until = std::max(until, r.fence.of_lanes[thread % warp_size]);
        if (when >= std::max(until, r.fence.of_block)) continue;
        for (const Acquire &q : acquires[r.word]) {
            if (q.tick <= r.tick || (q.block != block && !(r.fence.wide && q.wide))) continue;
            if (has_acquired(fiber, q)) return true;
            if (seen.insert(&q).second) others.push_back(&q);
        }
    }
    return std::any_of(others.begin(), others.end(), [&](const Acquire *q) {
        return released_to(fiber, q->block, q->thread, q->fence, seen);
    });
}

// Is everything `a` did before the running access of `fiber`?
bool ordered(const Fiber &fiber, const Record &a) {
    if (a.block == fiber.block->index) {
        if (a.thread == fiber.linear || a.thread == wgmma_of(fiber)) return true;  // who has waited for that
        if (a.tick < fiber.block->barrier.tick || knows(fiber, a.thread, a.tick)) return true;
        if (a.thread / warp_size == fiber.warp) {
            const Warp &warp = fiber.block->warps[fiber.warp];
            if (warp.joined[(a.thread % warp_size) * warp_size + fiber.lane] > a.tick) return true;
        }
    } else {
        if (a.tick < grid_barrier_tick(fiber)) return true;
        Block *other = resident_block(fiber, a.block);
        if (other && other->cluster && other->cluster == fiber.block->cluster &&
            (a.tick < other->cluster->barrier.tick || knows(fiber, *other, a.thread, a.tick)))
            return true;
    }
    std::unordered_set<const Acquire *> seen;
    return released_to(fiber, a.block, a.thread, a.tick, seen);
}

// What two blocks that touch a word are short of.
std::string missing(const Fiber &fiber, const Record &a) {
    if (a.block == fiber.block->index) return "a barrier between";
    for (const Release &r : releases[a.block])
        if (r.fence.wide && a.tick < (r.thread == a.thread ? r.fence.tick : r.fence.of_block))
            return "a __threadfence() of the later block, behind the atomic by which it saw the other arrive";
    return "a barrier between, or a __threadfence() of the earlier block before an atomic that the other sees";
}

// The thread of a record, in words.
std::string thread_of(const Fiber &fiber, const Record &a) {
    unsigned gx = fiber.grid_dim.x, gy = fiber.grid_dim.y;
    unsigned x = fiber.block_dim.x, y = fiber.block_dim.y, threads = x * y * fiber.block_dim.z;
    std::string block = text("block (%u,%u,%u), ", a.block % gx, a.block / gx % gy, a.block / gx / gy);
    const unsigned warps = (threads + warp_size - 1) / warp_size;
    if (a.thread >= threads + warps) return block + text("a bulk copy to mbarrier %u", a.thread - threads - warps);
    if (a.thread >= threads) return block + text("the wgmma of warp %u", a.thread - threads);
    return block + text("thread (%u,%u,%u)", a.thread % x, a.thread / x % y, a.thread / x / y);
}

void race(const Fiber &fiber, const Record &a, EmuAccess a_kind, const void *address, EmuAccess kind, const void *pc,
          const char *space) {
    std::string here = code_text(pc), there = code_text(sites[a.site_and_bytes >> 4]);
    std::string key = here + there + verb(kind) + verb(a_kind);
    if (!said.insert(key).second) return;
    finding(CUDA_ERROR_LAUNCH_FAILED,
            text("race: %s at %s by %s and %s at %s by %s touch the same word of %s memory (0x%llx) without %s, in "
                 "kernel %s",
                 verb(kind), here.c_str(), thread_text(fiber).c_str(), verb(a_kind), there.c_str(),
                 thread_of(fiber, a).c_str(), space,
                 static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)), missing(fiber, a).c_str(),
                 kernel_name().c_str()));
}

void begin_operation(std::string name) {
    const Operation &running = *running_operation;
    const Operation &whole = running.whole ? *running.whole : running;
    ++launch_counter;
    actors.push_back({std::move(name), running.stream->number, running.stream->identity, whole.number, running.node});
    known_earlier.clear();
}

// Did an operation end before the running one begins, in every order that streams, events and the host allow?
bool is_earlier(uint32_t launch) {
    if (known_earlier.count(launch)) return true;
    const Actor &actor = actors[launch];
    const Operation &running = *running_operation;
    const Operation &whole = running.whole ? *running.whole : running;
    bool same_graph = running.whole && actor.identity == whole.stream->identity && actor.number == whole.number;
    auto seen = whole.clock.find(actor.identity);
    if (same_graph ? !running.behind[actor.node] : seen == whole.clock.end() || seen->second < actor.number) return false;
    known_earlier.insert(launch);
    return true;
}

std::string race_between_streams(const Record &a, EmuAccess a_kind, uintptr_t address, EmuAccess kind, const void *pc) {
    const Actor &here = actors[launch_counter], &there = actors[a.launch];
    auto place = [](const void *code) { return code ? " at " + code_text(code) : std::string(); };
    bool branches = here.identity == there.identity;
    return text("race: %s by %s on stream %u%s and %s by %s on stream %u%s touch the same word of global memory "
                "(0x%llx) without %s between",
                verb(kind), here.name.c_str(), here.stream, place(pc).c_str(), verb(a_kind), there.name.c_str(),
                there.stream, place(sites[a.site_and_bytes >> 4]).c_str(), static_cast<unsigned long long>(address),
                branches ? "an edge of the graph" : "an event, or a wait of the host's,");
}

// Looks at what others did with each word, and leaves a record of what is done now. `conflicts` is told of what was done
// by whom, at which address.
template <class Conflicts>
void touch(RaceCell *cells, uintptr_t base, uintptr_t address, size_t bytes, EmuAccess kind, const void *pc,
           uint32_t block, uint32_t thread, Conflicts conflicts) {
    uint32_t site = site_number(pc) << 4;
    for (uintptr_t at = address; at < address + bytes;) {
        uintptr_t word = (at - base) / 4;
        uintptr_t end = std::min<uintptr_t>(base + word * 4 + 4, address + bytes);
        uint32_t touched = ((1u << (end - at)) - 1) << (at - base) % 4;
        RaceCell &cell = cells[word];
        auto look = [&](const Record &a, EmuAccess a_kind) {
            if (a.launch && a.site_and_bytes & touched) conflicts(a, a_kind, at);
        };
        look(cell.write, EMU_WRITE);
        if (kind != EMU_ATOMIC) look(cell.atomic, EMU_ATOMIC);
        if (kind != EMU_READ) {
            look(cell.read[0], EMU_READ);
            look(cell.read[1], EMU_READ);
        }
        Record record{launch_counter, block, thread, site | touched, tick_counter};
        if (kind == EMU_WRITE) {
            cell.write = record;
        } else if (kind == EMU_ATOMIC) {
            cell.atomic = record;
        } else {
            if (cell.read[0].launch != record.launch || cell.read[0].thread != record.thread ||
                cell.read[0].block != record.block)
                cell.read[1] = cell.read[0];
            cell.read[0] = record;
        }
        at = end;
    }
}

void check_race(Fiber &fiber, RaceCell *cells, uintptr_t base, uintptr_t address, size_t bytes, EmuAccess kind,
                const void *pc, const char *space, bool meets = true) {
    auto conflicts = [&](const Record &a, EmuAccess a_kind, uintptr_t at) {
        if (a.launch == launch_counter) {
            if (!ordered(fiber, a)) race(fiber, a, a_kind, reinterpret_cast<void *>(at), kind, pc, space);
        } else if (!is_earlier(a.launch)) {
            std::string message = race_between_streams(a, a_kind, at, kind, pc);
            if (said.insert(message.substr(0, message.find("(0x"))).second) finding(CUDA_ERROR_LAUNCH_FAILED, message);
        }
    };
    touch(cells, base, address, bytes, kind, pc, static_cast<uint32_t>(fiber.block->index), fiber.linear, conflicts);
    if (kind == EMU_ATOMIC && meets) note_atomic(fiber, address / 4, true, true);
}

RaceCell *cells_of(Allocation &allocation) {
    if (!allocation.races)
        allocation.races = static_cast<RaceCell *>(reserve((allocation.bytes / 4 + 1) * sizeof(RaceCell)));
    return allocation.races;
}

// Shared memory of the running block, or of a peer in its cluster: whether it is there, and written. Whether it is there.
bool check_state(const Fiber &fiber, Block &block, uintptr_t address, size_t bytes, EmuAccess kind, const void *pc) {
    auto low = reinterpret_cast<uintptr_t>(block.shared_low);
    size_t offset = address - low;
    uint8_t *state = block.shared_state + offset;
    bool past = address + bytes > reinterpret_cast<uintptr_t>(block.shared_high);
    for (size_t i = 0; i < bytes && options().check_memory; ++i) {
        if (past || state[i] == shared_outside) {
            size_t dynamic = static_cast<size_t>(fiber.shared_dynamic - fiber.shared_static);
            std::string where =
                offset + bytes > dynamic
                    ? text("at byte %zu of %u bytes of dynamic shared memory", offset - dynamic, fiber.dynamic_bytes)
                    : std::string("outside every __shared__ variable");
            out_of_bounds(fiber, bytes, kind, pc, where);
            return false;
        }
        if (kind != EMU_WRITE && state[i] == shared_unwritten) {
            finding(CUDA_ERROR_LAUNCH_FAILED,
                    text("unwritten memory: %s of %zu bytes of shared memory that nothing wrote, in kernel %s, %s, "
                         "at %s",
                         verb(kind), bytes, kernel_name().c_str(), thread_text(fiber).c_str(), code_text(pc).c_str()));
            memset(state, shared_written, bytes);
            break;
        }
    }
    if (!past && kind != EMU_READ) memset(state, shared_written, bytes);
    return !past;
}

void check_shared(Fiber &fiber, Block &block, uintptr_t address, size_t bytes, EmuAccess kind, const void *pc,
                  bool meets = true) {
    if (check_state(fiber, block, address, bytes, kind, pc) && options().check_races && block.shared_races)
        check_race(fiber, block.shared_races, reinterpret_cast<uintptr_t>(block.shared_low), address, bytes, kind, pc,
                   "shared", meets);
}

// Has the thread that wrote something through the generic proxy fenced, before what `fiber` waited for?
bool is_fenced(const Fiber &fiber, const Record &a) {
    if (a.thread >= fiber.block->fibers.size()) return true;
    const Warpgroups *writer = fiber.block->fibers[a.thread].warpgroups;
    if (!writer) return false;
    auto fence = std::upper_bound(writer->proxy_fences.begin(), writer->proxy_fences.end(), a.tick);
    return fence != writer->proxy_fences.end() &&
           (*fence < fiber.block->barrier.tick || a.thread == fiber.linear || knows(fiber, a.thread, *fence));
}

// Calls `each` with the cells of words in the shared memory of a thread's block, and their addresses.
template <class Each>
void cells_at(const Fiber &fiber, const void *shared, size_t bytes, Each each) {
    auto low = reinterpret_cast<uintptr_t>(fiber.block->shared_low), address = reinterpret_cast<uintptr_t>(shared);
    for (uintptr_t at = address; at < address + bytes; at += 4) each(fiber.block->shared_races[(at - low) / 4], at);
}
}  // namespace

Seen &seen_by(const Fiber &fiber) {
    auto &own = const_cast<Fiber &>(fiber).warpgroups;
    if (!own) own = new Warpgroups;
    own->seen.resize(size_t{fiber.cluster_size} * actors_of(*fiber.block));
    return own->seen;
}

void release_to(const Fiber &fiber, Seen &into) {
    const Seen &seen = seen_by(fiber);
    into.resize(seen.size());
    for (size_t i = 0; i < seen.size(); ++i) into[i] = std::max(into[i], seen[i]);
    const Warp &warp = fiber.block->warps[fiber.warp];
    for (unsigned lane = 0; lane < warp_size && !warp.joined.empty(); ++lane)
        if (unsigned thread = fiber.warp * warp_size + lane; thread < fiber.block->fibers.size())
            into[in_seen(*fiber.block, thread)] =
                std::max(into[in_seen(*fiber.block, thread)], warp.joined[lane * warp_size + fiber.lane]);
    into[in_seen(*fiber.block, fiber.linear)] = into[in_seen(*fiber.block, wgmma_of(fiber))] = next_tick();
}

void release_copies(const Block &block, MemoryBarrier &barrier) {
    barrier.arriving.resize(size_t{block.fibers[0].cluster_size} * actors_of(block));
    barrier.arriving[in_seen(block, copies_of(block, barrier.number))] = next_tick();
}

void acquire_from(const Fiber &fiber, const Seen &from) {
    Seen &seen = seen_by(fiber);
    for (size_t i = 0; i < from.size(); ++i) seen[i] = std::max(seen[i], from[i]);
    next_tick();
}

void check_barrier(Block &block, const void *word, EmuAccess kind, const void *pc) {
    Fiber &fiber = *static_cast<Fiber *>(emu_self);
    check_shared(fiber, block, reinterpret_cast<uintptr_t>(word), 8, kind, pc, false);
}

void check_bulk_write(Block &block, unsigned barrier, const void *shared, size_t bytes, const void *pc) {
    Fiber &fiber = *static_cast<Fiber *>(emu_self);
    auto address = reinterpret_cast<uintptr_t>(shared), low = reinterpret_cast<uintptr_t>(block.shared_low);
    if (!check_state(fiber, block, address, bytes, EMU_WRITE, pc)) return;
    if (!options().check_races || !block.shared_races) return;
    next_tick();  // behind what the phase before released
    auto conflicts = [&](const Record &a, EmuAccess a_kind, uintptr_t at) {
        if (a.launch == launch_counter && !ordered(fiber, a))
            race(fiber, a, a_kind, reinterpret_cast<void *>(at), EMU_WRITE, pc, "shared");
    };
    touch(block.shared_races, low, address, bytes, EMU_WRITE, pc, static_cast<uint32_t>(block.index),
          copies_of(block, barrier), conflicts);
}

void check_wgmma_begins(const Fiber &lane, const void *shared, size_t bytes, const void *pc) {
    if (!check_state(lane, *lane.block, reinterpret_cast<uintptr_t>(shared), bytes, EMU_READ, pc)) return;
    if (!options().check_races) return;
    cells_at(lane, shared, bytes, [&](RaceCell &cell, uintptr_t at) {
        const Record &a = cell.write;
        if (a.launch != launch_counter) return;
        if (!ordered(lane, a)) race(lane, a, EMU_WRITE, reinterpret_cast<void *>(at), EMU_READ, pc, "shared");
        else if (!is_fenced(lane, a))
            finding(CUDA_ERROR_LAUNCH_FAILED,
                    text("proxies: wgmma at %s reads through the async proxy what %s wrote through the generic one at %s, "
                         "without a fence.proxy.async of the thread that wrote it between, in kernel %s",
                         code_text(pc).c_str(), thread_of(lane, a).c_str(), code_text(sites[a.site_and_bytes >> 4]).c_str(),
                         kernel_name().c_str()));
    });
}

void check_wgmma_ended(const Fiber &lane, const void *shared, size_t bytes, uint64_t begun, const void *pc) {
    uint32_t site = site_number(pc) << 4 | 15, own = wgmma_of(lane), block = static_cast<uint32_t>(lane.block->index);
    cells_at(lane, shared, bytes, [&](RaceCell &cell, uintptr_t at) {
        const Record &a = cell.write;
        if (a.launch == launch_counter && a.tick >= begun)
            race(lane, a, EMU_WRITE, reinterpret_cast<void *>(at), EMU_READ, pc, "shared");
        if (cell.read[0].launch != launch_counter || cell.read[0].thread != own) cell.read[1] = cell.read[0];
        cell.read[0] = {launch_counter, block, own, site, tick_counter};
    });
}

uint64_t next_tick() { return ++tick_counter; }
uint64_t current_tick() { return tick_counter; }

void note_fence(const Fiber &fiber, bool reaches_other_blocks) {
    Met &own = met_by(fiber);
    Fence &fence = reaches_other_blocks ? own.wide : own.narrow;
    fence.tick = next_tick();
    fence.of_block = fiber.block->barrier.tick;
    fence.wide = reaches_other_blocks;
    fence.seen = fiber.warpgroups ? std::make_shared<const Seen>(fiber.warpgroups->seen) : nullptr;
    const auto &joined = fiber.block->warps[fiber.warp].joined;
    for (unsigned lane = 0; lane < warp_size && !joined.empty(); ++lane)
        fence.of_lanes[lane] = joined[lane * warp_size + fiber.lane];
    for (auto [word, tick] : own.pending) {
        auto &list = acquires[word];
        if (list.size() < remembered * remembered)
            list.push_back({tick, static_cast<uint32_t>(fiber.block->index), fiber.linear, fence.tick, reaches_other_blocks});
    }
    if (reaches_other_blocks) own.pending.clear();
}

CUresult check_copy(const char *name, uintptr_t to, uintptr_t from, size_t bytes) {
    if (!options().check_races) return CUDA_SUCCESS;
    begin_operation(name);
    std::string found;
    for (auto [start, kind] : {std::pair(from, EMU_READ), std::pair(to, EMU_WRITE)}) {
        Allocation *allocation = start ? find_allocation(start) : nullptr;
        if (!allocation || (allocation->kind != Kind::device && allocation->kind != Kind::managed)) continue;
        auto conflicts = [&, kind = kind](const Record &a, EmuAccess a_kind, uintptr_t at) {
            if (found.empty() && a.launch != launch_counter && !is_earlier(a.launch))
                found = race_between_streams(a, a_kind, at, kind, nullptr);
        };
        touch(cells_of(*allocation), allocation->base, start, std::min(bytes, most_of_a_copy), kind, nullptr, 0, 0,
              conflicts);
    }
    if (found.empty()) return CUDA_SUCCESS;
    say("%s", found.c_str());
    return options().continue_after_report ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

void check_coming_write(const void *shared, size_t bytes, const void *pc) {
    Fiber &fiber = *static_cast<Fiber *>(emu_self);
    Block &block = *fiber.block;
    if (shared < block.shared_low || shared >= block.shared_high || !block.shared_races) return;
    check_race(fiber, block.shared_races, reinterpret_cast<uintptr_t>(block.shared_low),
               reinterpret_cast<uintptr_t>(shared), bytes, EMU_WRITE, pc, "shared");
}

void begin_checked_launch(const Launch &launch) {
    begin_operation("kernel " + std::string(launch.function->info.name));
    met.clear();
    releases.clear();
    acquires.clear();
    last_hit = nullptr;
    said.clear();
}

void begin_checked_block(Block &block, const Module &module, const EmuKernelInfo &) {
    size_t bytes = static_cast<size_t>(block.shared_high - block.shared_low);
    if (!bytes) return;
    block.shared_state = static_cast<uint8_t *>(calloc(bytes, 1));
    for (EmuSharedSlot *slot : module.slots) memset(block.shared_state + slot->offset, shared_unwritten, slot->size);
    const Fiber &fiber = block.fibers[0];
    memset(block.shared_state + (fiber.shared_dynamic - fiber.shared_static), shared_unwritten, fiber.dynamic_bytes);
    if (options().check_races)
        block.shared_races = static_cast<RaceCell *>(calloc((bytes + 3) / 4, sizeof(RaceCell)));
}

void release_checked_block(Block &block) {
    free(block.shared_state);
    free(block.shared_races);
    block.shared_state = nullptr;
    block.shared_races = nullptr;
}

void finding(CUresult code, const std::string &message) {
    if (options().continue_after_report && code != CUDA_ERROR_ILLEGAL_ADDRESS) {
        say("%s", message.c_str());
        return;
    }
    fail_launch(code, message);
}

void check_access(const void *pointer, size_t bytes, EmuAccess kind, const void *pc, bool is_volatile) {
    auto *fiber = static_cast<Fiber *>(emu_self);
    if (!fiber || bytes == 0) return;  // host code of the module: static constructors
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address - reinterpret_cast<uintptr_t>(fiber) < sizeof(Fiber)) return;  // threadIdx and friends
    if (pointer == &emu_self) return;
    if (int owner = stack_owner(*fiber, address)) {
        if (owner == 2 && options().check_memory && !worker_unchecked(*fiber))
            out_of_bounds(*fiber, bytes, kind, pc, "to a local variable of another thread");
        if (owner == 1 && is_in_flight(*fiber, pointer))
            finding(CUDA_ERROR_LAUNCH_FAILED,
                    text("wgmma: %s of a register that it has not been waited for, in kernel %s, %s, at %s", verb(kind),
                         kernel_name().c_str(), thread_text(*fiber).c_str(), code_text(pc).c_str()));
        return;
    }
    if (worker_unchecked(*fiber)) return;
    if (is_volatile) {
        // A volatile access is how kernels wait for each other's flags: no race of its own, and a reason to let
        // others run.
        kind = kind == EMU_WRITE ? EMU_WRITE : EMU_READ;
        if (kind == EMU_READ) emu_spin();
    }
    Block *block = fiber->block;
    if (pointer >= block->shared_low && pointer < block->shared_high) {
        check_shared(*fiber, *block, address, bytes, kind, pc);
        return;
    }
    if (pointer >= block->shared_high && pointer < block->shared_high + page_bytes) {
        out_of_bounds(*fiber, bytes, kind, pc,
                      text("behind the %u bytes of dynamic shared memory", fiber->dynamic_bytes));
        return;
    }
    if (Block *peer = peer_block_of(*fiber, address)) {
        check_shared(*fiber, *peer, address, bytes, kind, pc);
        return;
    }
    Allocation *allocation = last_hit;
    if (!allocation || !allocation->contains(address, 1)) {
        allocation = find_allocation(address);
        if (allocation) last_hit = allocation;
    }
    if (!allocation) {
        Module *module = module_of_data(address);
        if (module) {
            if (kind != EMU_READ && address >= module->constant_low && address < module->constant_high)
                out_of_bounds(*fiber, bytes, kind, pc, "to a __constant__ variable");
            return;  // literals and tables
        }
        if (find_freed(address))
            out_of_bounds(*fiber, bytes, kind, pc, "at " + describe_address(address, bytes), true);
        else
            out_of_bounds(*fiber, bytes, kind, pc, "at " + describe_address(address, bytes));
        return;
    }
    if (!allocation->contains(address, bytes)) {
        out_of_bounds(*fiber, bytes, kind, pc, "at " + describe_address(address, bytes));
        return;
    }
    if (allocation->kind == Kind::module_data) {
        Module *module = module_of_data(address);
        if (module && kind != EMU_READ && address >= module->constant_low && address < module->constant_high) {
            out_of_bounds(*fiber, bytes, kind, pc, "to a __constant__ variable");
            return;
        }
    }
    if (options().check_memory && allocation->written) {
        uint8_t *written = allocation->written + (address - allocation->base);
        if (kind == EMU_READ || kind == EMU_ATOMIC) {
            for (size_t i = 0; i < bytes; ++i)
                if (!written[i]) {
                    finding(CUDA_ERROR_LAUNCH_FAILED,
                            text("unwritten memory: %s of %zu bytes that nothing wrote, %s, in kernel %s, %s, at %s",
                                 verb(kind), bytes, describe_address(address, bytes).c_str(), kernel_name().c_str(),
                                 thread_text(*fiber).c_str(), code_text(pc).c_str()));
                    memset(written, 1, bytes);
                    break;
                }
        }
        if (kind != EMU_READ) memset(written, 1, bytes);
    }
    if (options().check_races && is_volatile) note_atomic(*fiber, address / 4, kind == EMU_READ, kind == EMU_WRITE);
    if (options().check_races && !is_volatile)
        check_race(*fiber, cells_of(*allocation), allocation->base, address, bytes, kind, pc, "global");
}

}  // namespace emu

// ---------------------------------------------------------------- what instrumented code calls

using emu::check_access;

#define CALLER __builtin_return_address(0)

extern "C" {

void emu_check(const volatile void *address, size_t bytes, EmuAccess kind) {
    check_access(const_cast<const void *>(address), bytes, kind, CALLER);
}

void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

#define ACCESS(bytes)                                                                                               \
    void __tsan_read##bytes(void *p) { check_access(p, bytes, EMU_READ, CALLER); }                                  \
    void __tsan_write##bytes(void *p) { check_access(p, bytes, EMU_WRITE, CALLER); }                                \
    void __tsan_unaligned_read##bytes(void *p) { check_access(p, bytes, EMU_READ, CALLER); }                        \
    void __tsan_unaligned_write##bytes(void *p) { check_access(p, bytes, EMU_WRITE, CALLER); }                      \
    void __tsan_volatile_read##bytes(void *p) { check_access(p, bytes, EMU_READ, CALLER, true); }                   \
    void __tsan_volatile_write##bytes(void *p) { check_access(p, bytes, EMU_WRITE, CALLER, true); }                 \
    void __tsan_unaligned_volatile_read##bytes(void *p) { check_access(p, bytes, EMU_READ, CALLER, true); }         \
    void __tsan_unaligned_volatile_write##bytes(void *p) { check_access(p, bytes, EMU_WRITE, CALLER, true); }

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void *p, size_t bytes) { check_access(p, bytes, EMU_READ, CALLER); }
void __tsan_write_range(void *p, size_t bytes) { check_access(p, bytes, EMU_WRITE, CALLER); }

// -fsanitize=alignment: a float4 through a pointer that is not a multiple of 16 faults on a GPU.
struct UbsanType {
    uint16_t kind, info;
    char name[1];
};
struct UbsanLocation {
    const char *file;
    uint32_t line, column;
};
struct UbsanMismatch {
    UbsanLocation location;
    const UbsanType *type;
    unsigned char log_alignment, check_kind;
};

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(UbsanMismatch *data, uintptr_t pointer) {
    auto *fiber = static_cast<emu::Fiber *>(emu_self);
    if (!fiber) abort();
    emu::fail_launch(CUDA_ERROR_MISALIGNED_ADDRESS,
                     emu::text("misaligned address: %s at 0x%llx, which is not a multiple of %u, in kernel %s, %s, "
                               "at %s:%u",
                               data->type->name, static_cast<unsigned long long>(pointer), 1u << data->log_alignment,
                               emu::kernel_name().c_str(), emu::thread_text(*fiber).c_str(), data->location.file,
                               data->location.line));
}

}  // extern "C"
