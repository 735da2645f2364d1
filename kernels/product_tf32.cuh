// The products of product.cuh on tensor cores: inputs rounded to TF32, sums in float32.
//
// product_tf32<tile sizes, layout>: operands, blocks, slices and epilogue are those of `product`; a block has BM / WM * BN / WN
// warps. TF32 keeps 10 of the 23 bits of a float32's mantissa (to nearest, ties away from zero) and all of its exponent. So
// each product is off by up to 2^-10 of itself; K and slices are added in float32.
//
// Deterministic: each sum is made by one warp in the order of K, slices in the order of their numbers; shapes alone decide.
//
// How a product works: as in product_half.cuh, cp.async copies float32 from global to shared memory into three stages; two are
// on their way while one is multiplied. A copy takes 16 bytes, or 4 where rows begin anywhere, and fills with zeros what lies
// outside of the matrices. A factor whose K is contiguous is loaded by ldmatrix, to which four floats are eight halves. It
// cannot transpose floats: of the others, lanes load the floats of mma.m16n8k8's fragments one by one. Chunks of 16 bytes
// lie in an order that changes with the row (`Tf32Part::place`), so that either way no bank is asked twice, without gaps.
// A warp rounds what it has loaded: once a fragment, which its 8 x 8 fragments of sums share. At the end each warp puts 16
// rows at a time into a patch of shared memory of its own, from which its lanes take results that lie side by side.
//
// Tensor cores know TF32 from compute capability 8.0; the CUDA backend refuses the precision on older ones.
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k8" and "Asynchronous copy".
#pragma once

#include <mma.h>

#include "product_half.cuh"

// One matrix's part of a stage: ROWS x COLUMNS as they lie in global memory, where columns are contiguous. BY_K: these
// are along K. All threads of a block copy it.
template <int ROWS, int COLUMNS, int THREADS, bool BY_K> struct Tf32Part {
    static constexpr int CHUNKS = COLUMNS / 4, STEP = THREADS / CHUNKS, TURNS = ROWS / STEP, PITCH = COLUMNS * 4;
    static constexpr int BYTES = ROWS * PITCH, ORDERS = BY_K && CHUNKS < 8 ? CHUNKS : BY_K ? 8 : 4;
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "every thread carries the same chunk of as many rows");
    static_assert(CHUNKS >= (BY_K ? 4 : 8), "enough chunks for the orders");
    static_assert(STEP % 8 == 0 || (!BY_K && STEP % 4 == 0), "all rows of a thread have the same order");

    // Where a chunk lies, in bytes. Along K, the chunks of one number of 8 rows that follow each other are on all 32 banks;
    // otherwise two neighbours of 4 rows, which have the 4 x 8 floats that lanes load at once.
    static __device__ __forceinline__ unsigned int place(unsigned int row, unsigned int chunk) {
        return row * PITCH + (BY_K ? chunk ^ row / (8 / ORDERS) % ORDERS : chunk ^ row % ORDERS * 2) * 16;
    }

    // Begin to copy from `source`, whose elements are where `matrix` says; outside (rows, columns) there are zeros, and no
    // address is looked at.
    template <class Matrix>
    static __device__ __forceinline__ void copy(char *part, const float *source, long long pitch, int row0, int rows,
                                                int column0, int columns, bool wide, const Matrix &matrix) {
        const unsigned int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const unsigned int to = shared_address(part) + place(first, chunk);
        const int row = row0 + (int)first, column = column0 + (int)chunk * 4;
        if (wide) {  // so that a chunk is inside of the columns or outside
            const auto of_column = matrix.column(column);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                const auto of_row = matrix.row(row + turn * STEP, pitch);
                const bool there = column < columns && row + turn * STEP < rows && matrix.has(of_row, of_column);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             :
                             : "r"(to + turn * STEP * PITCH), "l"(source + matrix.at(of_row, of_column)), "r"(there ? 16 : 0)
                             : "memory");
            }
            return;
        }
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
            const auto of_column = matrix.column(column + j);
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                const auto of_row = matrix.row(row + turn * STEP, pitch);
                const bool there = column + j < columns && row + turn * STEP < rows && matrix.has(of_row, of_column);
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                             :
                             : "r"(to + turn * STEP * PITCH + j * 4), "l"(source + matrix.at(of_row, of_column)),
                               "r"(there ? 4 : 0)
                             : "memory");
            }
        }
    }

    // Four fragments of 8 x 4, rounded: of 16 lines from first + `line` on, and 8 terms from `k` on. TERMS_FIRST: the second
    // has the next terms of the same lines, otherwise the same terms of the next lines. `first` is a warp's, a multiple of
    // what all its lines fit in; `line` and `k` are constants, which change only those bits of a chunk's place that lanes do.
    template <bool TERMS_FIRST>
    static __device__ __forceinline__ void load(unsigned int (&fragments)[4], const char *part, int first, int line, int k) {
        const unsigned int lane = threadIdx.x % WARP;
        if constexpr (BY_K) {
            const unsigned int of_lines = TERMS_FIRST ? lane / 16 : lane / 8 % 2;
            const unsigned int of_terms = TERMS_FIRST ? lane / 8 % 2 : lane / 16;
            const unsigned int at = place(first + of_lines * 8 + lane % 8, of_terms ^ k / 4) + line * PITCH;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                         : "r"(shared_address(part) + at)
                         : "memory");
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own_line = line + (TERMS_FIRST ? i / 2 : i % 2) * 8, own_k = k + (TERMS_FIRST ? i % 2 : i / 2) * 4;
                const unsigned int low_line = (first + lane / 4) ^ (own_line % 32);
                const unsigned int at = place(lane % 4, low_line / 4) + low_line % 4 * 4 + own_k * PITCH + own_line / 32 * 128;
                fragments[i] = *reinterpret_cast<const unsigned int *>(part + at);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            fragments[i] = __float_as_uint(nvcuda::wmma::__float_to_tf32(__uint_as_float(fragments[i])));
    }
};

// sums += a b: 16 x 8 sums of 8 terms.
static __device__ __forceinline__ void multiply_tf32(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                                                     unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The tiles' sizes. A_TRANSPOSED: a is (K, M); B_TRANSPOSED: b is (N, K).
template <int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED> struct Tf32Shape {
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = WARPS * WARP, STAGES = 3;
    using PartA = Tf32Part<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, THREADS, !A_TRANSPOSED>;
    using PartB = Tf32Part<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, THREADS, B_TRANSPOSED>;
    static constexpr int STAGE = PartA::BYTES + PartB::BYTES, SHARED = STAGES * STAGE;
    // The rows of a warp's sums on their way to the epilogue: 8 banks apart.
    static constexpr int PATCH_PITCH = WN + 8, PATCH = 16 * PATCH_PITCH, ACROSS = WN < WARP ? WN : WARP;
    static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % 8 == 0, "a warp loads fragments of 16 x 8");
    static_assert(WARPS * PATCH * 4 <= SHARED, "the patches lie in the stages' memory");
};

template <int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue, class A = Dense,
          class B = Dense, class Columns = NoColumns>
__device__ __forceinline__ void product_tf32(void *shared, Product of, int block, Epilogue epilogue, A of_a = A(), B of_b = B(),
                                             Columns columns = Columns()) {
    using S = Tf32Shape<BM, BN, BK, WM, WN, A_TRANSPOSED, B_TRANSPOSED>;
    using PartA = typename S::PartA;
    using PartB = typename S::PartB;
    constexpr int FRAGMENTS_M = WM / 16, FRAGMENTS_N = WN / 8, AHEAD = S::STAGES - 1;
    char *const stages = (char *)shared;
    of.enter<BM, BN>(block);
    const int M = of.M, N = of.N, K = of.K;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wm = warp / S::WARPS_N * WM, wn = warp % S::WARPS_N * WN;

    // A group of copies for each step, empty behind the end of K, so that counting groups counts steps.
    auto begin_copy = [&](int stage, int k) {
        if (k < of.k_end) {
            char *part_a = stages + stage * S::STAGE, *part_b = part_a + PartA::BYTES;
            if (A_TRANSPOSED) PartA::copy(part_a, of.a, M, k, of.k_end, of.m0, M, of.wide_a, of_a);
            else PartA::copy(part_a, of.a, K, of.m0, M, k, of.k_end, of.wide_a, of_a);
            if (B_TRANSPOSED) PartB::copy(part_b, of.b, K, of.n0, N, k, of.k_end, of.wide_b, of_b);
            else PartB::copy(part_b, of.b, N, k, of.k_end, of.n0, N, of.wide_b, of_b);
        }
        asm volatile("cp.async.commit_group;" : : : "memory");
    };

    float sums[FRAGMENTS_M][FRAGMENTS_N][4];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;

#pragma unroll
    for (int stage = 0; stage < AHEAD; ++stage) begin_copy(stage, of.k_begin + stage * BK);
    int stage = 0;
    for (int k0 = of.k_begin; k0 < of.k_end; k0 += BK) {
        asm volatile("cp.async.wait_group %0;" : : "n"(AHEAD - 1) : "memory");
        __syncthreads();  // all threads' copies are there, and the stage before this one has been read
        begin_copy(stage == 0 ? AHEAD : stage - 1, k0 + AHEAD * BK);
        const char *part_a = stages + stage * S::STAGE, *part_b = part_a + PartA::BYTES;
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            unsigned int x[FRAGMENTS_M][4];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) PartA::template load<false>(x[i], part_a, wm, i * 16, k);
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; j += 2) {
                unsigned int y[4];
                PartB::template load<true>(y, part_b, wn, j * 8, k);
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i) {
                    multiply_tf32(sums[i][j], x[i], y[0], y[1]);
                    multiply_tf32(sums[i][j + 1], x[i], y[2], y[3]);
                }
            }
        }
        stage = stage == AHEAD ? 0 : stage + 1;
    }
    __syncthreads();  // patches replace stages that other warps may still read

    constexpr int COUNT = FRAGMENTS_M * FRAGMENTS_N * 4;
    if (!of.join<COUNT>(
            [&](int e) -> float & { return sums[e / 4 / FRAGMENTS_N][e / 4 % FRAGMENTS_N][e % 4]; }, shared))
        return;
    float *const patch = (float *)shared + warp * S::PATCH;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N * 2; ++j) {
            float *const at = patch + (lane / 4 + j % 2 * 8) * S::PATCH_PITCH + j / 2 * 8 + lane % 4 * 2;
            *reinterpret_cast<float2 *>(at) = make_float2(sums[i][j / 2][j % 2 * 2], sums[i][j / 2][j % 2 * 2 + 1]);
        }
        __syncwarp();
#pragma unroll 1
        for (int row = lane / S::ACROSS; row < 16; row += WARP / S::ACROSS) {
            const int m = of.m0 + wm + i * 16 + row;
#pragma unroll
            for (int j = 0; j < WN / S::ACROSS; ++j) {
                const int column = j * S::ACROSS + lane % S::ACROSS, n = of.n0 + wn + column;
                if (m < M && n < N) epilogue((Index)(of.matrix * M + m), (Index)n, patch[row * S::PATCH_PITCH + column], j);
            }
        }
        __syncwarp();  // the next rows replace these
    }
    WholeBlock team;
    auto column = [&](int j) { return wn + j * S::ACROSS + lane % S::ACROSS; };
    constexpr int SLOTS = WARP / S::ACROSS;
    const int slot = warp / S::WARPS_N * SLOTS + lane / S::ACROSS;
    columns(tile_columns<BN, WN / S::ACROSS, BM / WM * SLOTS>(shared, slot, of, of.m0 / BM, column, team));
}
