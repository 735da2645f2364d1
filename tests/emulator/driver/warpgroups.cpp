// mbarriers, the fence between proxies, wgmma, and copies of tiles by tensor maps.
//
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (fragments of D, "Shared Memory Matrix
// Layout", "Strides", "Matrix Descriptor Format", "Async Proxy") and "mbarrier". Of layouts, the 128-byte swizzle.
//
// A wgmma is computed when a thread waits for it, as late as the rules allow; until then its registers are NaN. Race mode
// looks at what it reads both when it begins and when it has ended, since a device may read at any time between, and asks
// whether who wrote that through the generic proxy has fenced. Waiting for a wgmma makes its reads come before whatever
// the warp does next; nothing else does.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "driver.hpp"

namespace emu {

struct Wgmma {
    uint64_t a, b;
    bool a_mn, b_mn;
    EmuFactor type;
    unsigned columns;
    EmuSite site;
    const void *code;
    uint64_t begun = 0;
    Block *block;
    unsigned group;                 // of four warps
    std::shared_ptr<Wgmma> before;  // that it adds to, where that is in flight as well
    bool computed = false;
    std::vector<float> sums;        // by lane, as its registers
    unsigned registers() const { return columns / 2; }
};

namespace {
constexpr uint8_t mark[8] = {0xb4, 0x44, 0x1e, 0x4b, 0xb4, 0x44, 0x1e, 0x4b};
constexpr unsigned lanes_of_group = 4 * warp_size;

Fiber &self() { return *static_cast<Fiber *>(emu_self); }

Warpgroups &of(Fiber &fiber) {
    if (!fiber.warpgroups) fiber.warpgroups = new Warpgroups;
    return *fiber.warpgroups;
}

[[noreturn]] void refuse(EmuSite site, const std::string &what) {
    fail_launch(CUDA_ERROR_LAUNCH_FAILED, what + ", " + place_in_source(site));
}

// An address of another block's shared memory, as mapa makes it: the block's rank and the address there.
constexpr unsigned of_cluster = 1u << 30, rank_shift = 24, within = (1u << rank_shift) - 1;

struct Place {
    Block *block;
    unsigned address;  // in its shared memory
    char *word() const { return block->shared_low + static_cast<int32_t>(address); }
};

Block &block_of_rank(unsigned rank, const char *what, EmuSite site) {
    Block &mine = *self().block;
    if (rank >= self().cluster_size) refuse(site, text("%s: rank %u of a cluster of %u", what, rank, self().cluster_size));
    Block *block = &mine;
    if (mine.cluster)
        for (Block *other : mine.cluster->blocks)
            if (other->fibers[0].cluster_rank == rank) block = other;
    if (block->alive == 0)
        fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS, text("use after free: %s reaches into the shared memory of cluster rank %u, "
                                                     "which has left the kernel, %s", what, rank, place_in_source(site).c_str()));
    return *block;
}

Place place_at(unsigned address, const char *what, EmuSite site) {
    if (!(address & of_cluster) || address >> 31) return {self().block, address};
    return {&block_of_rank(address >> rank_shift & 0x3f, what, site), address & within};
}

void check_there(const Block &block, const char *place, unsigned bytes, const char *what, EmuSite site) {
    check_place(place, bytes, false, what, site);
    if (place < block.shared_low || place + bytes > block.shared_high)
        fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS, text("out of bounds: %s at %p, which is not in shared memory, %s", what, place,
                                                     place_in_source(site).c_str()));
}

// The mbarrier at an address.
MemoryBarrier &barrier_at(const Place &place, const char *what, EmuSite site, const void *code) {
    char *word = place.word();
    check_there(*place.block, word, 8, what, site);
    if (options().checked()) check_barrier(*place.block, word, EMU_ATOMIC, code);
    auto found = place.block->barriers.find(place.address);
    if (found == place.block->barriers.end()) refuse(site, text("%s: no mbarrier at 0x%x", what, place.address));
    if (memcmp(word, mark, sizeof mark) != 0)
        refuse(site, text("%s: something wrote over the mbarrier at 0x%x", what, place.address));
    return found->second;
}

// Ends the phase if all have arrived and the bytes that it waits for are on their way, which land only now: as late as
// the rules allow.
void end_phase(const Block &block, MemoryBarrier &barrier, EmuSite site) {
    if (barrier.pending > 0) return;
    uint64_t coming = 0;
    for (const BulkCopy &copy : barrier.copies) coming += copy.bytes();
    if (coming > barrier.bytes)
        refuse(site, text("mbarrier: copies of %llu bytes end at a phase that expects %llu",
                          static_cast<unsigned long long>(coming), static_cast<unsigned long long>(barrier.bytes)));
    if (coming < barrier.bytes) return;
    for (const BulkCopy &copy : barrier.copies)
        for (const BulkCopy::Chunk &chunk : copy.chunks) {
            if (chunk.from) memcpy(chunk.to, chunk.from, 16);
            else memset(chunk.to, 0, 16);
        }
    if (options().check_races && coming > 0) release_copies(block, barrier);
    barrier.copies.clear();
    barrier.bytes = 0;
    barrier.pending = barrier.expected;
    ++barrier.phase;
    barrier.ended_reached = barrier.reached;
    barrier.ended = std::move(barrier.arriving);
    barrier.arriving.clear();
    make_ready(std::move(barrier.waiting));
    barrier.waiting.clear();
}

void arrive_at(const Place &place, uint64_t bytes, const char *what, EmuSite site, const void *code) {
    MemoryBarrier &barrier = barrier_at(place, what, site, code);
    if (options().check_races) {
        release_to(self(), barrier.arriving);
        if (place.block != self().block) place.block->reached = barrier.reached = current_tick();
    }
    barrier.bytes += bytes;
    if (barrier.bytes >= 1u << 20) refuse(site, text("%s: %llu bytes", what, static_cast<unsigned long long>(barrier.bytes)));
    --barrier.pending;
    end_phase(*place.block, barrier, site);
}

// Where an element of a matrix lies: `along` is its number in the direction of M or N.
unsigned element_at(uint64_t descriptor, bool mn_major, unsigned along, unsigned k) {
    unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
             stride = (descriptor >> 32 & 0x3fff) << 4;
    unsigned at = mn_major ? start + along / 64 * leading + along % 64 * 2 + k / 8 * stride + k % 8 * 128
                           : start + along / 8 * stride + along % 8 * 128 + k * 2;
    return at ^ (at >> 7 & 7) << 4;
}

// A descriptor that says something else than the 128-byte swizzle, or says it wrongly.
void check_descriptor(uint64_t descriptor, bool mn_major, unsigned along, const char *which, EmuSite site) {
    unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
             stride = (descriptor >> 32 & 0x3fff) << 4, base = descriptor >> 49 & 7, swizzle = descriptor >> 62;
    auto wrong = [&](const std::string &why) {
        refuse(site, text("wgmma: descriptor 0x%016llx of %s: %s", static_cast<unsigned long long>(descriptor), which, why.c_str()));
    };
    if (descriptor & 0x3ff1c000c000c000ull) wrong("bits are set that mean nothing");
    if (swizzle != 1) wrong(text("swizzling mode %u, of which the emulator knows 1, 128 bytes", swizzle));
    if ((start >> 7 & 7) != base)
        wrong(text("it begins in row %u of the swizzle's pattern, and says a base offset of %u", start >> 7 & 7, base));
    if (base) wrong("a base offset, which the emulator does not know");
    if (stride == 0 || stride % 1024) wrong(text("a stride of %u bytes, where 8 rows take 1024", stride));
    if (mn_major && along > 64 && (leading == 0 || leading % 1024))
        wrong(text("a leading stride of %u bytes, where panels lie at multiples of 1024", leading));
}

// Calls `each` with the places of 16 bytes that a warp's part of a wgmma reads: its rows of a, a quarter of b's columns.
template <class Each>
void places_of(const Wgmma &op, unsigned warp, Each each) {
    auto part = [&](uint64_t descriptor, bool mn_major, unsigned first, unsigned count) {
        for (unsigned along = first; along < first + count; along += mn_major ? 8 : 1)
            for (unsigned k = 0; k < 16; k += mn_major ? 1 : 8) each(element_at(descriptor, mn_major, along, k));
    };
    part(op.a, op.a_mn, warp * 16, 16);
    part(op.b, op.b_mn, warp * (op.columns / 4), op.columns / 4);
}

// Row and column of one of a lane's registers.
std::pair<unsigned, unsigned> place_of(unsigned lane, unsigned i) {
    return {lane / warp_size * 16 + lane % warp_size / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

void compute(Wgmma &op) {
    if (op.computed) return;
    op.computed = true;
    if (op.before) {
        compute(*op.before);
        op.sums = op.before->sums;
        op.before.reset();
    }
    const char *shared = op.block->fibers[0].shared_static;
    auto value = [&](uint64_t descriptor, bool mn_major, unsigned along, unsigned k) -> double {
        uint16_t bits;
        memcpy(&bits, shared + element_at(descriptor, mn_major, along, k), sizeof bits);
        return op.type == EMU_BF16 ? of_bits(static_cast<uint32_t>(bits) << 16) : of_half(bits);
    };
    std::vector<double> a(64 * 16), b(16 * op.columns), sums(64 * op.columns);
    for (unsigned m = 0; m < 64; ++m)
        for (unsigned k = 0; k < 16; ++k) a[m * 16 + k] = value(op.a, op.a_mn, m, k);
    for (unsigned n = 0; n < op.columns; ++n)
        for (unsigned k = 0; k < 16; ++k) b[k * op.columns + n] = value(op.b, op.b_mn, n, k);
    auto registers = [&](auto each) {
        for (unsigned lane = 0; lane < lanes_of_group; ++lane)
            for (unsigned i = 0; i < op.registers(); ++i) {
                auto [m, n] = place_of(lane, i);
                each(sums[m * op.columns + n], op.sums[lane * op.registers() + i]);
            }
    };
    registers([](double &sum, float &own) { sum = own; });
    for (unsigned m = 0; m < 64; ++m) add_products(&sums[m * op.columns], &a[m * 16], b.data(), op.columns, 16, op.type);
    registers([](double &sum, float &own) { own = static_cast<float>(sum); });
}

struct Issue {
    float *const *registers;
    uint64_t a, b;
    Fiber *fiber;
};

// All 128 threads are there.
void begin(void **lanes, std::shared_ptr<Wgmma> op) {
    const unsigned count = op->registers();
    op->sums.resize(lanes_of_group * count);
    bool first = true;
    for (unsigned lane = 0; lane < lanes_of_group; ++lane) {
        Issue &mine = *static_cast<Issue *>(lanes[lane]);
        Warpgroups &own = of(*mine.fiber);
        if (mine.a != op->a || mine.b != op->b) refuse(op->site, "wgmma: threads of a warpgroup have other descriptors");
        std::vector<float *> registers(mine.registers, mine.registers + count);
        std::shared_ptr<Wgmma> before;
        if (!own.pending.empty() && own.registers == registers) before = own.pending.back().of;
        if (!first && before != op->before) refuse(op->site, "wgmma: threads of a warpgroup add to other sums");
        op->before = before;
        first = false;
        if (!before) {
            for (float *one : registers)
                if (is_in_flight(*mine.fiber, one))
                    refuse(op->site, "wgmma: some of the registers are those of another one that is in flight");
            bool unchanged = own.registers == registers && own.left.size() == count;
            for (unsigned i = 0; i < count && unchanged; ++i) unchanged = memcmp(registers[i], &own.left[i], 4) == 0;
            if (!own.fenced && !unchanged)
                refuse(op->site, "wgmma: no wgmma.fence between it and what the thread did with its registers before");
            for (unsigned i = 0; i < count; ++i) {
                op->sums[lane * count + i] = *registers[i];
                *registers[i] = NAN;
            }
            auto [low, high] = std::minmax_element(registers.begin(), registers.end());
            own.low = reinterpret_cast<uintptr_t>(*low), own.high = reinterpret_cast<uintptr_t>(*high);
            own.registers = std::move(registers);
        }
        own.pending.push_back({op, own.committed});
    }
    if (!options().checked()) return;
    op->begun = next_tick();
    for (unsigned warp = 0; warp < 4; ++warp) {
        const Fiber &lane = *static_cast<Issue *>(lanes[warp * warp_size])->fiber;
        places_of(*op, warp, [&](unsigned at) { check_wgmma_begins(lane, in_shared(at), 16, op->code); });
    }
}

// A warp waits until no more groups than that are in flight.
struct Wait {
    Fiber *fiber;
    unsigned pending;
};

void end_groups(void **lanes, unsigned) {
    for (unsigned lane = 0; lane < warp_size; ++lane) {
        Fiber &fiber = *static_cast<Wait *>(lanes[lane])->fiber;
        unsigned most = static_cast<Wait *>(lanes[lane])->pending;
        Warpgroups &own = of(fiber);
        std::shared_ptr<Wgmma> last;
        while (!own.pending.empty() && own.pending.front().group + most < own.committed) {
            last = own.pending.front().of;
            compute(*last);
            if (lane == 0 && options().check_races)
                places_of(*last, fiber.warp % 4,
                          [&](unsigned at) { check_wgmma_ended(fiber, in_shared(at), 16, last->begun, last->code); });
            own.pending.pop_front();
        }
        if (!last) continue;
        own.fenced = false;
        if (!own.pending.empty()) continue;  // which add to the same registers
        const float *sums = &last->sums[fiber.linear % lanes_of_group * last->registers()];
        own.left.assign(sums, sums + last->registers());
        for (unsigned i = 0; i < last->registers(); ++i) *own.registers[i] = sums[i];
    }
}

void nothing(void **, unsigned) {}
}  // namespace

bool is_in_flight(const Fiber &fiber, const void *place) {
    if (!fiber.warpgroups || fiber.warpgroups->pending.empty()) return false;
    const auto &registers = fiber.warpgroups->registers;
    auto address = reinterpret_cast<uintptr_t>(place);
    if (address < fiber.warpgroups->low || address > fiber.warpgroups->high) return false;
    return std::any_of(registers.begin(), registers.end(), [&](const float *one) { return one == place; });
}

void forget_warpgroups(Fiber &fiber) {
    delete fiber.warpgroups;
    fiber.warpgroups = nullptr;
}

void check_nothing_in_flight(const Fiber &fiber) {
    const Block &block = *fiber.block;
    if (block.alive <= 1 && block.cluster && block.reached > std::max(block.awaited, block.cluster->barrier.tick))
        fail_launch(CUDA_ERROR_ILLEGAL_ADDRESS,
                    text("use after free: kernel %s, a block leaves without waiting for what another block of its cluster did "
                         "with its mbarriers", kernel_name().c_str()));
    if (block.alive <= 1)
        for (const auto &[address, barrier] : fiber.block->barriers)
            if (!barrier.copies.empty())
                refuse(barrier.copies[0].site,
                       text("cp.async.bulk.tensor: the block leaves before copies to mbarrier 0x%x have ended", address));
    if (fiber.warpgroups && !fiber.warpgroups->pending.empty())
        refuse(fiber.warpgroups->pending.front().of->site, "wgmma: a thread leaves the kernel without waiting for it");
}

}  // namespace emu

using namespace emu;

extern "C" {

void emu_mbarrier_init(unsigned address, unsigned arrivals, EmuSite site) {
    char *word = in_shared(address);
    check_place(word, 8, true, "mbarrier.init", site);
    if (options().checked()) check_barrier(*self().block, word, EMU_WRITE, __builtin_return_address(0));
    if (arrivals == 0 || arrivals >= 1u << 20) refuse(site, text("mbarrier.init: %u arrivals", arrivals));
    auto [entry, fresh] = self().block->barriers.try_emplace(address);
    if (!fresh) refuse(site, text("mbarrier.init: there is one at 0x%x already", address));
    entry->second.number = static_cast<unsigned>(self().block->barriers.size()) - 1;
    entry->second.expected = entry->second.pending = arrivals;
    memcpy(word, mark, sizeof mark);
}

void emu_mbarrier_arrive(unsigned address, EmuSite site) {
    arrive_at(place_at(address, "mbarrier.arrive", site), 0, "mbarrier.arrive", site, __builtin_return_address(0));
}

void emu_mbarrier_expect(unsigned address, unsigned bytes, EmuSite site) {
    arrive_at(place_at(address, "mbarrier.arrive.expect_tx", site), bytes, "mbarrier.arrive.expect_tx", site,
              __builtin_return_address(0));
}

unsigned emu_map_address(unsigned address, unsigned rank, EmuSite site) {
    check_place(in_shared(address), 1, true, "mapa", site);
    block_of_rank(rank, "mapa", site);
    return of_cluster | rank << rank_shift | address;
}

void emu_mbarrier_wait(unsigned address, unsigned parity, EmuSite site) {
    MemoryBarrier &barrier = barrier_at({self().block, address}, "mbarrier.try_wait", site, __builtin_return_address(0));
    if (parity > 1) refuse(site, text("mbarrier.try_wait: a parity of %u", parity));
    if (barrier.phase % 2 == parity) {
        barrier.waiting.push_back(&self());
        suspend_thread(self(), "mbarrier.try_wait", site);
    }
    if (options().check_races) {
        acquire_from(self(), barrier.ended);
        self().block->awaited = std::max(self().block->awaited, barrier.ended_reached);
    }
}

void emu_bulk_tensor(unsigned to, const void *map, int x, int y, unsigned barrier, int mask, EmuSite site) {
    const void *code = __builtin_return_address(0);
    const char *what = "cp.async.bulk.tensor";
    EmuTensorMap tile;
    memcpy(&tile, map, sizeof tile);
    if (reinterpret_cast<uintptr_t>(map) % 64 || memcmp(tile.name, emu_tensor_map_name, sizeof tile.name) != 0)
        refuse(site, text("%s: no tensor map at %p", what, map));
    const std::vector<const void *> &acquired = of(self()).maps;
    if (find_allocation(reinterpret_cast<uintptr_t>(map)) && std::find(acquired.begin(), acquired.end(), map) == acquired.end())
        refuse(site, text("%s: the tensor map at %p is in global memory, which this thread has not acquired", what, map));
    if (to & of_cluster || barrier & of_cluster) refuse(site, text("%s: an address of another block", what));
    if (mask >= 0 && (mask == 0 || mask >> self().cluster_size))
        refuse(site, text("%s: the blocks 0x%x of a cluster of %u", what, mask, self().cluster_size));
    if (to % 1024) refuse(site, text("%s: to 0x%x, which is no multiple of the swizzle's 1024 bytes", what, to));
    const unsigned line = tile.box[0] * 2, chunks = line / 16;
    for (unsigned rank = 0; rank < self().cluster_size; ++rank) {
        if (mask < 0 ? rank != self().cluster_rank : !(mask >> rank & 1)) continue;
        Block &block = block_of_rank(rank, what, site);
        MemoryBarrier &end = barrier_at({&block, barrier}, what, site, code);
        BulkCopy copy{{}, site};
        for (unsigned row = 0; row < tile.box[1]; ++row) {
            const long long line_of = static_cast<long long>(y) + row;
            char *const place = block.shared_low + static_cast<int32_t>(to + row * line);
            check_there(block, place, 128, what, site);
            for (unsigned chunk = 0; chunk < chunks; ++chunk) {
                const long long column = static_cast<long long>(x) + chunk * 8;
                if (column % 8) refuse(site, text("%s: column %d, which the emulator does not know", what, x));
                bool there = line_of >= 0 && line_of < static_cast<long long>(tile.size[1]) && column >= 0 &&
                             column + 8 <= static_cast<long long>(tile.size[0]);
                if (!there && line_of < static_cast<long long>(tile.size[1]) && line_of >= 0 && column >= 0 &&
                    column < static_cast<long long>(tile.size[0]))
                    refuse(site, text("%s: a row of %llu numbers ends within 16 bytes, which the emulator does not know", what,
                                      static_cast<unsigned long long>(tile.size[0])));
                const char *from = there ? reinterpret_cast<const char *>(tile.address) + line_of * static_cast<long long>(tile.pitch) + column * 2 : nullptr;
                if (from && options().checked()) check_access(from, 16, EMU_READ, code);
                char *chunk_to = block.shared_low + static_cast<int32_t>((to + row * line + chunk * 16) ^ (((to + row * line) >> 7 & 7) << 4));
                copy.chunks.push_back({chunk_to, from});
            }
            if (options().checked()) check_bulk_write(block, end.number, place, line, code);
            memset(place, 0xff, line);
        }
        end.copies.push_back(std::move(copy));
        end_phase(block, end, site);
    }
}

void emu_proxy_fence(void) {
    if (options().check_races) of(self()).proxy_fences.push_back(next_tick());
}

void emu_acquire_map(const void *map, EmuSite site) {
    if (reinterpret_cast<uintptr_t>(map) % 128) refuse(site, text("fence.proxy.tensormap: %p is no multiple of 128", map));
    if (options().checked()) check_access(map, 128, EMU_READ, __builtin_return_address(0));
    of(self()).maps.push_back(map);
}

void emu_wgmma_fence(EmuSite site) {
    of(self()).fenced = true;
    emu_warp_collective(~0u, nullptr, nothing, "wgmma.fence", site);
}

void emu_wgmma_commit(EmuSite site) {
    ++of(self()).committed;
    emu_warp_collective(~0u, nullptr, nothing, "wgmma.commit_group", site);
}

void emu_wgmma_wait(unsigned pending, EmuSite site) {
    Wait mine{&self(), pending};
    emu_warp_collective(~0u, &mine, end_groups, "wgmma.wait_group", site);
}

void emu_wgmma(float *const *registers, unsigned columns, uint64_t a, uint64_t b, int a_mn, int b_mn, EmuFactor type,
               EmuSite site) {
    Fiber &fiber = self();
    Block &block = *fiber.block;
    unsigned group = fiber.linear / lanes_of_group;
    if ((group + 1) * lanes_of_group > block.fibers.size()) refuse(site, "wgmma: the warpgroup has fewer than 128 threads");
    for (unsigned warp = 0; warp < 4; ++warp)
        if (block.warps[group * 4 + warp].alive != ~0u) refuse(site, "wgmma: threads of the warpgroup have left the kernel");
    check_descriptor(a, a_mn, 64, "a", site);
    check_descriptor(b, b_mn, columns, "b", site);
    Meeting &meeting = block.meetings[group];
    if (meeting.arrived == 0) meeting.site = site;
    else if (!same_site(meeting.site, site)) elsewhere(fiber, "wgmma", site, "warpgroup", meeting.site);
    Issue mine{registers, a, b, &fiber};
    meeting.lanes[fiber.linear % lanes_of_group] = &mine;
    if (++meeting.arrived < lanes_of_group) {
        suspend_thread(fiber, "wgmma", site);
        return;
    }
    auto op = std::make_shared<Wgmma>();
    op->a = a, op->b = b, op->a_mn = a_mn, op->b_mn = b_mn, op->type = type, op->columns = columns;
    op->site = site, op->code = __builtin_return_address(0), op->block = &block, op->group = group;
    for (unsigned warp = 0; warp < 4; ++warp)
        places_of(*op, warp, [&](unsigned at) { check_place(in_shared(at), 16, true, "a row of wgmma", site); });
    begin(meeting.lanes, std::move(op));
    meeting.arrived = 0;
    std::vector<Fiber *> others;
    for (unsigned lane = 0; lane < lanes_of_group; ++lane)
        if (Fiber *one = &block.fibers[group * lanes_of_group + lane]; one != &fiber) others.push_back(one);
    make_ready(std::move(others));
}

}  // extern "C"
