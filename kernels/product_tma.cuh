// Products of dense bfloat16 or float16 matrices, whose rows begin at multiples of 16 bytes, for compute capability 9.0.
//
// **It has run only on the emulated driver**, and programs use it only if dptrain/backend/cuda/tma.py is told to. What is
// measured of `product_wgmma` says why it is here: its tiles of 128 x 256 pass through the L2 cache at close to that
// cache's limit.
//
// product_tma<type, rows, columns, pingpong, blocks of a cluster, layout>: operands are two tensor maps in global memory, the
// epilogue is that of `product`; a block has TmaShape::THREADS threads and takes TmaShape::SHARED bytes of dynamic shared
// memory. As many blocks as the GPU holds walk over all tiles. Sums are float32.
//
// Deterministic: each sum is made by one warpgroup in the order of K, whatever number of blocks there is: the bits are those
// of `product_wgmma`.
//
// How a product works: one thread copies by tensor maps (cp.async.bulk.tensor), two warpgroups multiply. The ring of stages goes
// on from tile to tile, so that copies of the next tile come while sums of this one are stored. Two schedules, as CUTLASS
// names them:
// - cooperative: both warpgroups have a half of each tile's rows. They read least.
// - pingpong: each has every second tile for itself. While one stores, the other multiplies.
//
// A cluster's blocks have tiles of the same columns, below each other. Each copies its part of b for all of them (multicast),
// so a stage may only be filled again when all of them have multiplied it: `empty` counts the warps of all blocks.
//
// `full` ends when the copier has arrived and all bytes are there. A wait tells two phases apart, not more. With pingpong, a
// warpgroup has left out the stages of the other's tile: it waits for the other's last wait before its own first one.
//
// The host writes the maps into global memory, and a proxy of its own reads them: the copying thread acquires each map before
// it uses it (fence.proxy.tensormap, PTX 8.3, CUDA 12.3).
//
// Source: PTX ISA, "cp.async.bulk.tensor", "mbarrier" ("Tracking asynchronous operations", "Phase of the mbarrier object"), "mapa",
// "barrier.cluster", "membar / fence"; CUDA driver API, "Tensor Map Object Management"; CUDA C++ Programming Guide, "Encoding a
// tensor map on device" (maps in global memory).
#pragma once

#include "product_wgmma.cuh"

// What cuTensorMapEncodeTiled makes; kernels only pass on its address.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// Waits for the end of a phase of this parity, at most some seconds: then the kernel faults.
static __device__ __forceinline__ bool has_ended(unsigned int barrier, int parity) {
    unsigned int ended;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return ended != 0;
}

static __device__ __forceinline__ void wait_seconds_for(unsigned int barrier, int parity) {
    if (has_ended(barrier, parity)) return;
    const long long begun = clock64();
    while (!has_ended(barrier, parity))
        if (clock64() - begun > 1ll << 33) __trap();
}

// Arrive, and let the phase wait for so many bytes.
static __device__ __forceinline__ void arrive_and_expect(unsigned int barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the barrier of this place in a block of the cluster.
static __device__ __forceinline__ void arrive_in(unsigned int barrier, unsigned int rank) {
    unsigned int there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(there) : "memory");
}

// Before this thread copies by a map that the host has written.
static __device__ __forceinline__ void acquire_map(const TensorMap *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" : : "l"(map) : "memory");
}

static __device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;" : : : "memory");
    asm volatile("barrier.cluster.wait.acquire;" : : : "memory");
}

// Begin to copy a box of the map at (column, row), zeros where it is outside; of several blocks to the same place in all.
template <int BLOCKS>
static __device__ __forceinline__ void copy_box(unsigned int to, const TensorMap *map, int column, int row, unsigned int barrier) {
    if constexpr (BLOCKS == 1) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     :
                     : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                     "[%1, {%2, %3}], [%4], %5;"
                     :
                     : "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)((1 << BLOCKS) - 1))
                     : "memory");
    }
}

// The tiles' sizes. A_TRANSPOSED: a is (K, M); B_TRANSPOSED: b is (N, K). Boxes of the maps are 64 numbers wide and
// BOX_A or BOX_B rows high.
template <int BM, int BN, bool PINGPONG, int CLUSTER, bool A_TRANSPOSED, bool B_TRANSPOSED> struct TmaShape {
    static constexpr int GROUP = 128, BK = 64, CONSUMERS = 2, THREADS = CONSUMERS * GROUP + WARP;
    static constexpr int PART_A = BM * BK * 2, PART_B = BN * BK * 2, STAGE = PART_A + PART_B;
    static constexpr int STAGES = PINGPONG ? 5 : 4, ALIGNMENT = 1024, BARRIERS = 2 * STAGES + CONSUMERS;
    static constexpr int OF_B = BN / CLUSTER;  // columns of b that a block copies
    static constexpr int BOX_A = A_TRANSPOSED ? BK : BM, BOX_B = B_TRANSPOSED ? OF_B : BK;
    // Warps of a block that read a stage.
    static constexpr int READERS = (PINGPONG ? 1 : CONSUMERS) * GROUP / WARP;
    // The rows of a warp's sums on their way to the epilogue, so many columns at once: 8 banks apart.
    static constexpr int PATCH_COLUMNS = WARP, PATCH_PITCH = PATCH_COLUMNS + 8, PATCH = 16 * PATCH_PITCH;
    static constexpr int SHARED = ALIGNMENT + STAGES * STAGE + CONSUMERS * GROUP / WARP * PATCH * 4 + BARRIERS * 8;
    static_assert(BM == (PINGPONG ? 64 : CONSUMERS * 64), "a warpgroup has 64 rows");
    static_assert(OF_B % 64 == 0, "a block copies whole panels");
};

template <class Number, int BM, int BN, bool PINGPONG, int CLUSTER, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue>
__device__ __forceinline__ void product_tma(void *shared, const TensorMap *maps, int M, int N, int K, int block, int blocks,
                                            Epilogue epilogue) {
    using S = TmaShape<BM, BN, PINGPONG, CLUSTER, A_TRANSPOSED, B_TRANSPOSED>;
    constexpr int STAGES = S::STAGES, BK = S::BK;
    const unsigned int given = shared_address(shared), begin = (given + S::ALIGNMENT - 1) / S::ALIGNMENT * S::ALIGNMENT;
    const unsigned int patches = begin + STAGES * S::STAGE;
    const unsigned int full = patches + S::CONSUMERS * S::GROUP / WARP * S::PATCH * 4, empty = full + STAGES * 8;
    const unsigned int turn = empty + STAGES * 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int rank = block % CLUSTER, first = block / CLUSTER, clusters = blocks / CLUSTER;
    // Items of a cluster: CLUSTER tiles below each other.
    const int across = ((M + BM - 1) / BM + CLUSTER - 1) / CLUSTER, items = across * ((N + BN - 1) / BN);
    const int steps = (K + BK - 1) / BK;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            begin_barrier(full + stage * 8, 1);
            begin_barrier(empty + stage * 8, S::READERS * CLUSTER);
        }
        for (int group = 0; group < S::CONSUMERS; ++group) begin_barrier(turn + group * 8, S::GROUP / WARP);
        asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    }
    meet_cluster();

    if (warp == S::CONSUMERS * S::GROUP / WARP) {
        if (lane == 0) {
            const TensorMap *const of_a = maps, *const of_b = maps + 1;
            acquire_map(of_a);
            acquire_map(of_b);
            int stage = 0, parity = 1;
            for (int item = first; item < items; item += clusters) {
                const int m0 = (item % across * CLUSTER + rank) * BM, n0 = item / across * BN;
                for (int step = 0; step < steps; ++step) {
                    const int k = step * BK;
                    wait_seconds_for(empty + stage * 8, parity);
                    arrive_and_expect(full + stage * 8, S::STAGE);
                    const unsigned int part_a = begin + stage * S::STAGE, part_b = part_a + S::PART_A;
                    if constexpr (A_TRANSPOSED) {
                        for (int m = 0; m < BM; m += 64) copy_box<1>(part_a + m * BK * 2, of_a, m0 + m, k, full + stage * 8);
                    } else {
                        copy_box<1>(part_a, of_a, k, m0, full + stage * 8);
                    }
                    const int n = rank * S::OF_B;
                    if constexpr (B_TRANSPOSED) {
                        copy_box<CLUSTER>(part_b + n * BK * 2, of_b, k, n0 + n, full + stage * 8);
                    } else {
                        for (int panel = n; panel < n + S::OF_B; panel += 64)
                            copy_box<CLUSTER>(part_b + panel * BK * 2, of_b, n0 + panel, k, full + stage * 8);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        __syncwarp();
    } else {
        const int group = threadIdx.x / S::GROUP, in_group = warp % (S::GROUP / WARP);
        float *const patch = (float *)((char *)shared + (patches - given)) + warp * S::PATCH;
        // Gives a stage back to the copiers of all blocks.
        auto release = [&](int stage) {
            if (lane < CLUSTER) arrive_in(empty + stage * 8, lane);
        };
        float sums[BN / 2];
        int number = PINGPONG ? group : 0;  // of an item among those of the cluster
        for (int item = first + number * clusters; item < items;) {
#pragma unroll
            for (int e = 0; e < BN / 2; ++e) sums[e] = 0.0f;
            if (PINGPONG && number > 0) wait_seconds_for(turn + group * 8, (number - 1) / 2 % 2);
            int stage = number * steps % STAGES, before = 0;
            int parity = number * steps / STAGES % 2;
            for (int step = 0; step < steps; ++step) {
                wait_seconds_for(full + stage * 8, parity);
                const unsigned int part_a = begin + stage * S::STAGE + (PINGPONG ? 0 : group * (64 * 128));
                const unsigned int part_b = begin + stage * S::STAGE + S::PART_A;
                asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
#pragma unroll
                for (int k = 0; k < BK; k += 16) {
                    // 16 terms are 32 bytes of each row, or 16 rows.
                    const unsigned long long a = matrix_descriptor(part_a + (A_TRANSPOSED ? k * 128 : k * 2), BK * 128);
                    const unsigned long long b = matrix_descriptor(part_b + (B_TRANSPOSED ? k * 2 : k * 128), BK * 128);
                    Wgmma<Number, A_TRANSPOSED, !B_TRANSPOSED>::multiply(sums, a, b);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
                asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(1) : "memory");
                if (step > 0) release(before);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            if (PINGPONG && lane == 0) arrive(turn + (1 - group) * 8);
            asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(0) : "memory");
            hold(sums);
            if (steps > 0) release(before);

            // As in product_wgmma: lane l of a warp has rows l / 4 and l / 4 + 8, of every 8 columns two.
            const int row0 = (item % across * CLUSTER + rank) * BM + (PINGPONG ? 0 : group * 64) + in_group * 16;
            const int column0 = item / across * BN + lane;
#pragma unroll
            for (int part = 0; part < BN; part += S::PATCH_COLUMNS) {
#pragma unroll
                for (int e = 0; e < S::PATCH_COLUMNS / 2; e += 2) {
                    float *const at = patch + (lane / 4 + e / 2 % 2 * 8) * S::PATCH_PITCH + e / 4 * 8 + lane % 4 * 2;
                    *reinterpret_cast<float2 *>(at) = make_float2(sums[part / 2 + e], sums[part / 2 + e + 1]);
                }
                __syncwarp();
#pragma unroll 4
                for (int i = 0; i < 16; ++i)
                    if (row0 + i < M && column0 + part < N)
                        epilogue((Index)(row0 + i), (Index)(column0 + part), patch[i * S::PATCH_PITCH + lane]);
                __syncwarp();
            }
            number += PINGPONG ? 2 : 1;
            item = first + number * clusters;
        }
    }
    // Nobody leaves while others arrive at its barriers.
    meet_cluster();
}
