// Products of bfloat16 or float16 matrices on the tensor cores of compute capability 9.0: the products of product_half.cuh
// for large matrices, computed by warpgroups (wgmma).
//
// product_wgmma<type, BM, BN, layout>: operands, slices and epilogue are those of `product`; a block has WgmmaShape::THREADS
// threads, and takes WgmmaShape::SHARED bytes of dynamic shared memory, more than a kernel has without asking. BM is 128, BN
// 128 or 256, a stage 64 terms. Sums are float32. Only sm_90a has these instructions: no later architecture does.
//
// Deterministic: each sum is made by one warpgroup in the order of K, slices in the order of their numbers; shapes alone
// decide.
//
// How a product works: the first warpgroup copies, the other two multiply, each 64 rows by all BN columns. Shared memory is a
// ring of four stages. A stage has two mbarriers: `full` counts the warps that copied, `empty` those that multiplied.
// While the tensor cores work on one stage, the next is full, and the two others are on their way from global memory or
// begin to be, as soon as they are empty: 64 or 96 KiB, where 64 bytes a cycle and some 600 cycles of latency ask for 38.
// Copiers say which stage is full before they wait for an empty one. After it, the multipliers would wait for 24 copies to
// be issued each time: measured, a stage took 1,900 cycles.
//
// Copies are cp.async, 16 bytes a thread, by HalfPart, and not TMA: a tensor map says where a dense matrix lies, whose rows
// begin at multiples of 16 bytes. Products here are also of gathered matrices (convolution.cuh), of rows that begin anywhere,
// of slices of K, and of the matrices of whichever run a block belongs to, whose addresses it reads from memory. One way
// for all of them is proven once. It costs a warpgroup's instructions, one warp's a scheduler: with nvcc 13.0 some 170 for
// the 24 copies of a stage that takes tensor cores 1,024 cycles (BN = 256), and of gathered matrices 210 for the 16 copies
// in 512 (128). They have to stay that few: at 48 a copy the copying warps, and not the tensor cores, would set the pace.
//
// cp.async writes through the generic proxy and wgmma reads through the async one. So who copied waits for its own copies,
// then fences (fence.proxy.async); when all lanes have, the first one arrives at `full` for its warp. Waiting for products (wgmma.wait_group) orders the other way.
//
// A part of a stage lies as the 128-byte swizzle has it: panels of 64 columns, rows of 128 bytes, whose 16-byte chunks
// change places with the row. A factor is K-major where K is contiguous (a as it is, b transposed), else MN-major; both are
// read as they lie.
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (register fragments, "Shared
// Memory Matrix Layout", "Strides", "Matrix Descriptor Format", "Async Proxy") and "mbarrier".
#pragma once

#include "product_half.cuh"

// Barriers in shared memory, by their addresses.

static __device__ __forceinline__ void begin_barrier(unsigned int barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void arrive(unsigned int barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

// Waits for the end of a phase of this parity. The phase before the first one has ended, with parity 1.
static __device__ __forceinline__ void wait_for(unsigned int barrier, int parity) {
    unsigned int ended;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(ended)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!ended);
}

// The threads of a block that multiply, which meet without the others.
template <int FIRST, int THREADS> struct Multipliers {
    unsigned int barrier;
    int parity;
    __device__ __forceinline__ int count() const { return THREADS; }
    __device__ __forceinline__ int number() const { return (int)threadIdx.x - FIRST; }
    __device__ __forceinline__ void meet() {
        arrive(barrier);
        wait_for(barrier, parity);
        parity ^= 1;
    }
};

// What wgmma is told of a matrix that lies at an address: the stride of 8 rows of 128 bytes, where it is not K-major that of
// panels, and 1 for the 128-byte swizzle.
static __device__ __forceinline__ unsigned long long matrix_descriptor(unsigned int address, int of_panels) {
    constexpr unsigned long long OF_ROWS = 8 * 128 / 16, SWIZZLE = 1;
    return SWIZZLE << 62 | OF_ROWS << 32 | (unsigned long long)(of_panels / 16) << 16 | (address & 0x3ffff) >> 4;
}

#define DP_TEN(tens)                                                                                              \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens \
    "8, %" #tens "9, "
#define DP_SUMS_8(i)                                                                                             \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define DP_SUMS_64(i)                                                                                            \
    DP_SUMS_8(i), DP_SUMS_8(i + 8), DP_SUMS_8(i + 16), DP_SUMS_8(i + 24), DP_SUMS_8(i + 32), DP_SUMS_8(i + 40),  \
        DP_SUMS_8(i + 48), DP_SUMS_8(i + 56)

// sums += a b: a warpgroup's 64 x 128 or 64 x 256 sums of 16 terms. The sums are read and written until they are waited for.
template <class Number, bool A_MN, bool B_MN> struct Wgmma;

#define DP_WGMMA(number, type)                                                                                     \
    template <bool A_MN, bool B_MN> struct Wgmma<number, A_MN, B_MN> {                                             \
        static __device__ __forceinline__ void multiply(float (&sums)[64], unsigned long long a, unsigned long long b) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" DP_TEN() DP_TEN(1)      \
                         DP_TEN(2) DP_TEN(3) DP_TEN(4) DP_TEN(5) "%60, %61, %62, %63}, %64, %65, 1, 1, 1, %66, %67;" \
                         : DP_SUMS_64(0)                                                                           \
                         : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN));                                        \
        }                                                                                                          \
        static __device__ __forceinline__ void multiply(float (&sums)[128], unsigned long long a, unsigned long long b) { \
            asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" DP_TEN() DP_TEN(1)      \
                         DP_TEN(2) DP_TEN(3) DP_TEN(4) DP_TEN(5) DP_TEN(6) DP_TEN(7) DP_TEN(8) DP_TEN(9) DP_TEN(10) \
                         DP_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, "       \
                         "%130, %131;"                                                                             \
                         : DP_SUMS_64(0), DP_SUMS_64(64)                                                           \
                         : "l"(a), "l"(b), "n"((int)A_MN), "n"((int)B_MN));                                        \
        }                                                                                                          \
    };
DP_WGMMA(dp_bfloat16, "bf16")
DP_WGMMA(dp_float16, "f16")

// To the compiler a wgmma's sums are there when it was issued: whoever reads them behind the wait names them here, so that
// nothing moves the reading before it.
template <int COUNT> static __device__ __forceinline__ void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) asm volatile("" : "+f"(sums[e]) : : "memory");
}

// The tiles' sizes. A_TRANSPOSED: a is (K, M); B_TRANSPOSED: b is (N, K).
template <int BM, int BN, bool A_TRANSPOSED, bool B_TRANSPOSED> struct WgmmaShape {
    static constexpr int GROUP = 128, BK = 64, STAGES = 4, BEHIND = 2;  // steps from a copy to its arrival
    static constexpr int COPIERS = GROUP, MULTIPLIERS = BM / 64 * GROUP, THREADS = COPIERS + MULTIPLIERS;
    using PartA = HalfPart<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, COPIERS, 64>;
    using PartB = HalfPart<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, COPIERS, 64>;
    // The pattern of the swizzle begins at multiples of 1024 bytes, and so do stages.
    static constexpr int ALIGNMENT = 1024, STAGE = PartA::BYTES + PartB::BYTES, BARRIERS = 2 * STAGES + 1;
    static constexpr int SHARED = ALIGNMENT + STAGES * STAGE + (BARRIERS + 1) * 8;
    // The rows of a warp's sums on their way to the epilogue: 8 banks apart.
    static constexpr int PATCH_PITCH = BN + 8, PATCH = 16 * PATCH_PITCH;
    static_assert(MULTIPLIERS / WARP * PATCH * 4 <= STAGES * STAGE, "the patches lie in the stages' memory");
    static_assert(BEHIND <= STAGES - 2, "one stage is multiplied while the products of the one before are waited for");
};

template <class Number, int BM, int BN, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue, class A = Dense, class B = Dense,
          class Columns = NoColumns>
__device__ __forceinline__ void product_wgmma(void *shared, ProductOf<Number> of, int block, Epilogue epilogue,
                                              A of_a = A(), B of_b = B(), Columns columns = Columns()) {
    using S = WgmmaShape<BM, BN, A_TRANSPOSED, B_TRANSPOSED>;
    using PartA = typename S::PartA;
    using PartB = typename S::PartB;
    constexpr int STAGES = S::STAGES, BK = S::BK;
    const unsigned int given = shared_address(shared), begin = (given + S::ALIGNMENT - 1) / S::ALIGNMENT * S::ALIGNMENT;
    char *const stages = (char *)shared + (begin - given);
    const unsigned int full = begin + STAGES * S::STAGE, empty = full + STAGES * 8, meeting = empty + STAGES * 8;
    of.template enter<BM, BN>(block);
    const int M = of.M, N = of.N, K = of.K, steps = (of.k_end - of.k_begin + BK - 1) / BK;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            begin_barrier(full + stage * 8, S::COPIERS / WARP);
            begin_barrier(empty + stage * 8, S::MULTIPLIERS / WARP);
        }
        begin_barrier(meeting, S::MULTIPLIERS);
    }
    __syncthreads();

    if (threadIdx.x < S::COPIERS) {
        const unsigned short *a = reinterpret_cast<const unsigned short *>(of.a);
        const unsigned short *b = reinterpret_cast<const unsigned short *>(of.b);
        // A group of copies for each step, empty behind the last one, so that counting groups counts steps. What has arrived
        // is said before anything is waited for: the multipliers need it while they still read the stage that is copied next.
        for (int step = 0; step < steps + S::BEHIND; ++step) {
            if (step >= S::BEHIND) {
                asm volatile("cp.async.wait_group %0;" : : "n"(S::BEHIND - 1) : "memory");
                asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
                __syncwarp();  // all lanes' copies are there
                if (threadIdx.x % WARP == 0) arrive(full + (step - S::BEHIND) % STAGES * 8);
            }
            if (step < steps) {
                const int stage = step % STAGES, k = of.k_begin + step * BK;
                wait_for(empty + stage * 8, (step / STAGES + 1) % 2);
                char *part_a = stages + stage * S::STAGE, *part_b = part_a + PartA::BYTES;
                if (A_TRANSPOSED) PartA::copy(part_a, a, M, k, of.k_end, of.m0, M, of.wide_a, of_a);
                else PartA::copy(part_a, a, K, of.m0, M, k, of.k_end, of.wide_a, of_a);
                if (B_TRANSPOSED) PartB::copy(part_b, b, K, of.n0, N, k, of.k_end, of.wide_b, of_b);
                else PartB::copy(part_b, b, N, k, of.k_end, of.n0, N, of.wide_b, of_b);
            }
            asm volatile("cp.async.commit_group;" : : : "memory");
        }
        return;
    }

    const int number = (int)threadIdx.x - S::COPIERS, warp = number / WARP, lane = number % WARP;
    float sums[BN / 2];
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) sums[e] = 0.0f;
    // Of a warpgroup's 64 rows: as many rows of the part, or a panel.
    const unsigned int rows_a = begin + number / S::GROUP * (64 * 128);
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES;
        wait_for(full + stage * 8, step / STAGES % 2);
        const unsigned int part_a = rows_a + stage * S::STAGE, part_b = begin + stage * S::STAGE + PartA::BYTES;
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
        if (step > 0 && lane == 0) arrive(empty + (step - 1) % STAGES * 8);
    }
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(0) : "memory");
    hold(sums);

    // Warp w of a warpgroup has rows 16 w to 16 w + 15, and its lane l of them l / 4 and l / 4 + 8, of every 8 columns the
    // l % 4 * 2-nd and the next. They go through the stages' memory, so that a warp hands on numbers of one row at a time.
    Multipliers<S::COPIERS, S::MULTIPLIERS> team{meeting, 0};
    if (!of.template join<BN / 2>([&](int e) -> float & { return sums[e]; }, stages + (meeting + 8 - begin), team)) return;
    team.meet();  // what was the last stage has been multiplied
    float *const patch = (float *)stages + warp * S::PATCH;
#pragma unroll
    for (int e = 0; e < BN / 2; e += 2) {
        float *const at = patch + (lane / 4 + e / 2 % 2 * 8) * S::PATCH_PITCH + e / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2 *>(at) = make_float2(sums[e], sums[e + 1]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
        const int m = of.m0 + warp * 16 + i;
#pragma unroll
        for (int j = 0; j < BN / WARP; ++j) {
            const int n = of.n0 + j * WARP + lane;
            if (m < M && n < N)
                epilogue((Index)(of.matrix * M + m), (Index)n, patch[i * S::PATCH_PITCH + j * WARP + lane], j);
        }
    }
    auto column = [&](int j) { return j * WARP + lane; };
    columns(tile_columns<BN, BN / WARP, S::MULTIPLIERS / WARP>(stages, warp, of, of.m0 / BM, column, team));
}
