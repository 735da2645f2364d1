// Products of bfloat16 or float16 matrices on tensor cores: factors are read as two bytes, sums are float32.
//
// product_half<type, tile sizes, layout>: operands, blocks, slices and epilogue are those of `product`; a block has
// BM / WM * BN / WN warps. A product of two halves fits a float32, so that sums alone are rounded.
//
// Deterministic: each sum is made by one warp in the order of K, slices in the order of their numbers; shapes alone decide.
//
// How a product works: copies of 16 bytes go from global to shared memory past the registers (cp.async), into three stages.
// While one is multiplied, two are on their way, and a step of BK costs one barrier. Copies fill what lies outside of the
// matrices with zeros; where rows do not begin at multiples of 16 bytes, threads carry single numbers instead. The chunks of
// 8 numbers of a row lie in an order that differs from row to row (`HalfPart::place`): the 8 rows of an ldmatrix fall on
// different banks without a gap between rows, and stages of 128 x 128 x 32 fill 48 KiB. ldmatrix transposes on the way where
// a factor's K is not contiguous. Each warp holds WM x WN sums in the registers of mma.m16n8k16, where lane l has rows
// l / 4 and l / 4 + 8 and columns l % 4 * 2 and the next, and hands them to the epilogue from there.
//
// Tensor cores know bfloat16, and threads cp.async, from compute capability 8.0; before, products of halves are float32's.
// Source: PTX ISA, "Warp-level matrix instructions" and "Asynchronous copy".
#pragma once

#include "tiles.cuh"

// The address of shared memory as instructions take it.
static __device__ __forceinline__ unsigned int shared_address(const void *pointer) {
    return (unsigned int)__cvta_generic_to_shared(pointer);
}

// One matrix's part of a stage: ROWS x COLUMNS as they lie in global memory, where columns are contiguous. In shared memory
// it is cut into panels of so many columns, which lie one behind the other. The first THREADS threads of a block copy it:
// each the chunks of 8 numbers in the same columns of every STEP-th row.
template <int ROWS, int COLUMNS, int THREADS, int PANEL = COLUMNS> struct HalfPart {
    static constexpr int CHUNKS = COLUMNS / 8, STEP = THREADS / CHUNKS, TURNS = ROWS / STEP, BYTES = ROWS * COLUMNS * 2;
    // Of a row in a panel: its chunks, and the orders that these may have.
    static constexpr int ACROSS = PANEL / 8, ORDERS = ACROSS < 8 ? ACROSS : 8;
    static_assert(STEP * CHUNKS == THREADS && TURNS * STEP == ROWS, "every thread carries chunks of the same rows");
    static_assert(CHUNKS >= 4, "four rows of the same half of 128 bytes have four orders");
    static_assert(STEP % 8 == 0 || 8 % STEP == 0, "orders repeat after 8 rows");

    // Where a chunk lies, in bytes: 8 rows that follow each other have their chunks of one number on all 32 banks. In
    // panels of 64 columns this is the 128-byte swizzle of the PTX ISA.
    static __device__ __forceinline__ unsigned int place(unsigned int row, unsigned int chunk) {
        const unsigned int panel = ACROSS == CHUNKS ? 0 : chunk / ACROSS;
        return ((panel * ROWS + row) * ACROSS + (chunk % ACROSS ^ row / (8 / ORDERS) % ORDERS)) * 16;
    }

    // The place of a thread's chunk in this turn, from that of its first one: place(row + turn * STEP, chunk), in additions
    // of constants. Rows below STEP do not carry into those bits of a row that say its order.
    static __device__ __forceinline__ unsigned int place_in_turn(unsigned int first, unsigned int turn) {
        return (first ^ turn * STEP % 8 / (8 / ORDERS) * 16) + turn * STEP * ACROSS * 16;
    }

    // Begin to copy from `source`, whose elements are where `matrix` says; outside (rows, columns) there are zeros. Where
    // the source is wide, chunks begin at multiples of 16 bytes, and (rows, columns) has all of a chunk or nothing of it.
    template <class Matrix>
    static __device__ __forceinline__ void copy(char *part, const unsigned short *source, long long pitch, int row0, int rows,
                                                int column0, int columns, bool wide, const Matrix &matrix) {
        const unsigned int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const int row = row0 + (int)first, column = column0 + (int)chunk * 8;
        if (wide) copy_wide(shared_address(part), place(first, chunk), source, pitch, row, rows, column, columns, matrix);
        else copy_narrow(part, place(first, chunk), source, pitch, row, rows, column, columns, matrix);
    }

    // 16 bytes at once, past the registers. Of a chunk that is outside nothing is read, wherever its address points.
    template <class Matrix>
    static __device__ __forceinline__ void copy_wide(unsigned int part, unsigned int place, const unsigned short *source,
                                                     long long pitch, int row, int rows, int column, int columns,
                                                     const Matrix &matrix) {
        const auto of_column = matrix.column(column);
        const bool has_column = column < columns;
        long long beginning = 0;
        if constexpr (Matrix::SIDE_BY_SIDE) beginning = matrix.at(matrix.row(row, pitch), of_column);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            bool there = has_column && row + turn * STEP < rows;
            const unsigned short *from = source;
            if constexpr (Matrix::SIDE_BY_SIDE) {
                from += beginning + turn * STEP * pitch;
            } else {
                const auto of_row = matrix.row(row + turn * STEP, pitch);
                there = there && matrix.has(of_row, of_column);
                from += matrix.at(of_row, of_column);
            }
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :
                         : "r"(part + place_in_turn(place, turn)), "l"(from), "r"(there ? 16 : 0)
                         : "memory");
        }
    }

    // Number by number, from rows that begin anywhere.
    template <class Matrix>
    static __device__ __forceinline__ void copy_narrow(char *part, unsigned int place, const unsigned short *source,
                                                       long long pitch, int row, int rows, int column, int columns,
                                                       const Matrix &matrix) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const int count = row + turn * STEP < rows ? columns - column : 0;
            const auto of_row = matrix.row(row + turn * STEP, pitch);
            unsigned int pairs[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (j >= count) continue;
                if constexpr (Matrix::SIDE_BY_SIDE) {
                    pairs[j / 2] |= (unsigned int)source[matrix.at(of_row, column) + j] << j % 2 * 16;
                } else {
                    const auto of_column = matrix.column(column + j);
                    if (matrix.has(of_row, of_column))
                        pairs[j / 2] |= (unsigned int)source[matrix.at(of_row, of_column)] << j % 2 * 16;
                }
            }
            *reinterpret_cast<uint4 *>(part + place_in_turn(place, turn)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }

    // Four fragments of 8 x 8 of 16 rows and 16 columns: BY_ROWS, the second is below the first, otherwise beside it.
    template <bool BY_ROWS, bool TRANSPOSED>
    static __device__ __forceinline__ void load(unsigned int (&fragments)[4], const char *part, int row, int column) {
        const int lane = threadIdx.x % WARP;
        row += BY_ROWS ? lane % 16 : lane / 16 * 8 + lane % 8;
        column += (BY_ROWS ? lane / 16 : lane / 8 % 2) * 8;
        const unsigned int address = shared_address(part + place(row, column / 8));
        if (TRANSPOSED) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                         : "r"(address)
                         : "memory");
        } else {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                         : "r"(address)
                         : "memory");
        }
    }
};

// sums += a b: 16 x 8 sums of 16 terms.
template <class Number>
static __device__ __forceinline__ void multiply(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1);

template <>
__device__ __forceinline__ void multiply<dp_bfloat16>(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                                                      unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply<dp_float16>(float (&sums)[4], const unsigned int (&a)[4], unsigned int b0,
                                                     unsigned int b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The tiles' sizes. A_TRANSPOSED: a is (K, M); B_TRANSPOSED: b is (N, K).
template <int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED> struct HalfShape {
    static constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * WARP, STAGES = 3;
    using PartA = HalfPart<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, THREADS>;
    using PartB = HalfPart<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, THREADS>;
    static constexpr int STAGE = PartA::BYTES + PartB::BYTES, SHARED = STAGES * STAGE;
    static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % 16 == 0, "a warp loads fragments of 16 x 16");
};

template <class Number, int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue,
          class A = Dense, class B = Dense, class Columns = NoColumns>
__device__ __forceinline__ void product_half(void *shared, ProductOf<Number> of, int block, Epilogue epilogue,
                                             A of_a = A(), B of_b = B(), Columns columns = Columns()) {
    using S = HalfShape<BM, BN, BK, WM, WN, A_TRANSPOSED, B_TRANSPOSED>;
    using PartA = typename S::PartA;
    using PartB = typename S::PartB;
    constexpr int FRAGMENTS_M = WM / 16, FRAGMENTS_N = WN / 8, AHEAD = S::STAGES - 1;
    char *const stages = (char *)shared;
    of.template enter<BM, BN>(block);
    const int M = of.M, N = of.N, K = of.K;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wm = warp / S::WARPS_N * WM, wn = warp % S::WARPS_N * WN;
    const unsigned short *a = reinterpret_cast<const unsigned short *>(of.a);
    const unsigned short *b = reinterpret_cast<const unsigned short *>(of.b);

    // A group of copies for each step, empty behind the end of K, so that counting groups counts steps.
    auto begin_copy = [&](int stage, int k) {
        if (k < of.k_end) {
            char *part_a = stages + stage * S::STAGE, *part_b = part_a + PartA::BYTES;
            if (A_TRANSPOSED) PartA::copy(part_a, a, M, k, of.k_end, of.m0, M, of.wide_a, of_a);
            else PartA::copy(part_a, a, K, of.m0, M, k, of.k_end, of.wide_a, of_a);
            if (B_TRANSPOSED) PartB::copy(part_b, b, K, of.n0, N, k, of.k_end, of.wide_b, of_b);
            else PartB::copy(part_b, b, N, k, of.k_end, of.n0, N, of.wide_b, of_b);
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
        for (int k = 0; k < BK; k += 16) {
            unsigned int x[FRAGMENTS_M][4];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                if (A_TRANSPOSED) PartA::template load<false, true>(x[i], part_a, k, wm + i * 16);
                else PartA::template load<true, false>(x[i], part_a, wm + i * 16, k);
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; j += 2) {
                unsigned int y[4];
                if (B_TRANSPOSED) PartB::template load<false, false>(y, part_b, wn + j * 8, k);
                else PartB::template load<true, true>(y, part_b, k, wn + j * 8);
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i) {
                    multiply<Number>(sums[i][j], x[i], y[0], y[1]);
                    multiply<Number>(sums[i][j + 1], x[i], y[2], y[3]);
                }
            }
        }
        stage = stage == AHEAD ? 0 : stage + 1;
    }

    constexpr int COUNT = FRAGMENTS_M * FRAGMENTS_N * 4;
    if (!of.template join<COUNT>(
            [&](int e) -> float & { return sums[e / 4 / FRAGMENTS_N][e / 4 % FRAGMENTS_N][e % 4]; }, shared))
        return;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M * 2; ++i) {
        const int m = of.m0 + wm + i * 8 + lane / 4;
        if (m >= M) continue;
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N * 2; ++j) {
            const int n = of.n0 + wn + j / 2 * 8 + lane % 4 * 2 + j % 2;
            if (n < N) epilogue((Index)(of.matrix * M + m), (Index)n, sums[i / 2][j / 2][i % 2 * 2 + j % 2], j);
        }
    }
    WholeBlock team;
    auto column = [&](int j) { return wn + j / 2 * 8 + lane % 4 * 2 + j % 2; };
    const int slot = warp / S::WARPS_N * 8 + lane / 4;
    columns(tile_columns<BN, FRAGMENTS_N * 2, BM / WM * 8>(shared, slot, of, of.m0 / BM, column, team));
}
