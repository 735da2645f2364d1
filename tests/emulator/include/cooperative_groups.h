// Cooperative groups over the emulator's barriers: thread_block, thread_block_tile, cluster_group, grid_group.
// coalesced_group is not modelled: which threads run together is nothing the emulator could answer truthfully.
#pragma once

#include "emulator/device.h"

namespace cooperative_groups {

struct thread_block {
    using arrival_token = uint64_t;
    static void sync(EMU_SITE) { emu_block_barrier(EMU_COUNT, 0, emu_site); }
    arrival_token barrier_arrive(EMU_SITE) const { return emu_barrier_arrive(EMU_BLOCK, emu_site); }
    void barrier_wait(arrival_token &&token, EMU_SITE) const { emu_barrier_wait(EMU_BLOCK, token, emu_site); }
    static unsigned thread_rank() { return emu_self->linear; }
    static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned size() { return num_threads(); }
    static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
    static dim3 thread_index() { return dim3(threadIdx.x, threadIdx.y, threadIdx.z); }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
EMU_INLINE thread_block this_thread_block() { return {}; }

struct grid_group {
    using arrival_token = uint64_t;
    bool is_valid() const { return emu_self->cooperative; }
    void sync(EMU_SITE) const {
        uint64_t token = emu_barrier_arrive(EMU_GRID, emu_site);
        emu_barrier_wait(EMU_GRID, token, emu_site);
    }
    arrival_token barrier_arrive(EMU_SITE) const { return emu_barrier_arrive(EMU_GRID, emu_site); }
    void barrier_wait(arrival_token &&token, EMU_SITE) const { emu_barrier_wait(EMU_GRID, token, emu_site); }
    static unsigned long long num_blocks() { return 1ull * gridDim.x * gridDim.y * gridDim.z; }
    static unsigned long long block_rank() {
        return blockIdx.x + 1ull * gridDim.x * (blockIdx.y + 1ull * gridDim.y * blockIdx.z);
    }
    static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
    static unsigned long long size() { return num_threads(); }
    static unsigned long long thread_rank() {
        return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
    }
    static dim3 group_dim() { return gridDim; }
    static dim3 dim_blocks() { return gridDim; }
    static dim3 block_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
};
EMU_INLINE grid_group this_grid() { return {}; }

struct cluster_group {
    struct arrival_token {};
    static void sync(EMU_SITE) {
        uint64_t token = emu_barrier_arrive(EMU_CLUSTER, emu_site);
        emu_barrier_wait(EMU_CLUSTER, token, emu_site);
    }
    static arrival_token barrier_arrive(EMU_SITE) {
        emu_self->cluster_token = emu_barrier_arrive(EMU_CLUSTER, emu_site);
        return {};
    }
    static void barrier_wait(EMU_SITE) { emu_barrier_wait(EMU_CLUSTER, emu_self->cluster_token, emu_site); }
    static void barrier_wait(arrival_token &&, EMU_SITE) {
        emu_barrier_wait(EMU_CLUSTER, emu_self->cluster_token, emu_site);
    }
    static unsigned block_rank() { return emu_self->cluster_rank; }
    static unsigned num_blocks() { return emu_self->cluster_size; }
    static dim3 dim_blocks() { return dim3(emu_self->cluster_dim.x, emu_self->cluster_dim.y, emu_self->cluster_dim.z); }
    static dim3 block_index() {
        return dim3(emu_self->block_in_cluster.x, emu_self->block_in_cluster.y, emu_self->block_in_cluster.z);
    }
    static unsigned thread_rank() { return block_rank() * thread_block::num_threads() + thread_block::thread_rank(); }
    static unsigned num_threads() { return num_blocks() * thread_block::num_threads(); }
    static unsigned size() { return num_threads(); }
    template <class T>
    static T *map_shared_rank(T *address, int rank) {
        return reinterpret_cast<T *>(emu_map_shared(
            const_cast<char *>(reinterpret_cast<const volatile char *>(address)), static_cast<unsigned>(rank)));
    }
};
EMU_INLINE cluster_group this_cluster() { return {}; }

// A part of a warp: Size lanes that follow each other.
template <unsigned Size, class Parent = thread_block>
struct thread_block_tile {
    static_assert(Size && Size <= 32 && !(Size & (Size - 1)), "tiles of 1 to 32 threads, powers of two");
    static unsigned first() { return emu_self->lane & ~(Size - 1); }
    static unsigned mask() { return (Size == 32 ? 0xffffffffu : (1u << (Size % 32)) - 1) << first(); }
    static void sync(EMU_SITE) { emu_warp_barrier(mask(), emu_site); }
    static unsigned thread_rank() { return emu_self->lane & (Size - 1); }
    static constexpr unsigned num_threads() { return Size; }
    static constexpr unsigned size() { return Size; }
    static unsigned meta_group_rank() { return emu_self->linear / Size; }
    static unsigned meta_group_size() { return (thread_block::num_threads() + Size - 1) / Size; }
    template <class T> T shfl(T value, int source, EMU_SITE) const {
        return __shfl_sync(mask(), value, source, Size, emu_site);
    }
    template <class T> T shfl_up(T value, int delta, EMU_SITE) const {
        return __shfl_up_sync(mask(), value, static_cast<unsigned>(delta), Size, emu_site);
    }
    template <class T> T shfl_down(T value, int delta, EMU_SITE) const {
        return __shfl_down_sync(mask(), value, static_cast<unsigned>(delta), Size, emu_site);
    }
    template <class T> T shfl_xor(T value, int bits, EMU_SITE) const {
        return __shfl_xor_sync(mask(), value, bits, Size, emu_site);
    }
    int any(int predicate, EMU_SITE) const { return __any_sync(mask(), predicate, emu_site); }
    int all(int predicate, EMU_SITE) const { return __all_sync(mask(), predicate, emu_site); }
    unsigned ballot(int predicate, EMU_SITE) const {
        return (__ballot_sync(mask(), predicate, emu_site) >> first()) & (Size == 32 ? 0xffffffffu : (1u << (Size % 32)) - 1);
    }
};
template <unsigned Size, class Parent>
EMU_INLINE thread_block_tile<Size, Parent> tiled_partition(const Parent &) { return {}; }

template <class Group>
EMU_INLINE void sync(const Group &group, EMU_SITE) { group.sync(emu_site); }

template <class T> struct plus : emu::Add {};
template <class T> struct less : emu::Min {};
template <class T> struct greater : emu::Max {};
template <class T> struct bit_and : emu::And {};
template <class T> struct bit_or : emu::Or {};
template <class T> struct bit_xor : emu::Xor {};

template <unsigned Size, class Parent, class T, class Op>
EMU_INLINE T reduce(const thread_block_tile<Size, Parent> &group, T value, Op, EMU_SITE) {
    return emu::reduce<Op>(group.mask(), value, "cooperative_groups::reduce", emu_site);
}

// Each thread copies a part; the bytes arrive at the wait.
template <class Group, class T, class Shape>
EMU_INLINE void memcpy_async(const Group &group, T *to, const T *from, Shape bytes) {
    size_t all = static_cast<size_t>(bytes), step = 4;
    for (size_t at = group.thread_rank() * step; at < all; at += static_cast<size_t>(group.num_threads()) * step) {
        unsigned n = static_cast<unsigned>(all - at < step ? all - at : step);
        emu_async_copy(reinterpret_cast<char *>(to) + at, reinterpret_cast<const char *>(from) + at, n, 0);
    }
    emu_async_commit();
}
template <class Group>
EMU_INLINE void wait(const Group &group, EMU_SITE) {
    emu_async_wait(~0u);
    group.sync(emu_site);
}
template <unsigned Pending, class Group>
EMU_INLINE void wait_prior(const Group &group, EMU_SITE) {
    emu_async_wait(Pending);
    group.sync(emu_site);
}

}  // namespace cooperative_groups
