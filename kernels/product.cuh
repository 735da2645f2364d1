// Products of matrices in float32.
//
// product<tile sizes, groups, layout>(shared, operands, block, epilogue, a, b, columns): c_MN = a b, for a tile of BM x BN
// results a block of GROUPS times BM / TM * BN / TN threads; see `Product` in tiles.cuh for the operands, and `Dense` for a and b, which say where their
// elements are. The epilogue gets (row, column, sum, own) of each result, the row counted over the batch, and writes what
// becomes of it; `own` numbers the thread's columns. Where results are summed over rows, `columns` ends it; see `TileColumns`.
//
// Deterministic: K and slices are summed in a fixed order that depends on the shapes alone.
//
// How a product works: shared memory holds two stages of a tile pair (BK columns of a, BK rows of b). While one stage is
// multiplied, the next pair is in flight from global memory in staging registers, so a pair costs one barrier. Each thread holds
// TM x TN sums in registers, in groups of 4 x 4 that lie a fixed distance apart, which keeps the lanes of a warp on
// different banks. Threads of a warp are 4 x 8: a 16-byte load of shared memory asks for 64 bytes of a and 128 of b, once for
// all lanes, where 2 x 16 threads would ask for 32 and 256, in twice as many cycles. In a tile of 16 columns they are 8 x 4:
// of 16 channels, a tile of 32 x 32 would multiply as many zeros, with as many loads for each product as one of 128 x 16
// has for two. Loads take four floats at once where
// alignment and edges allow. Where blocks are few, GROUPS of threads each sum up their part of every stage's terms, add these
// sums up in the order of the groups, and share the rows of a thread's results: four times the threads wait for memory at
// once, a fourth of the time. Where a dense matrix has all of a stage's terms, they find them without a branch. A stage is
// multiplied without a loop, which would take S2UR and address arithmetic for each turn on sm_90.
#pragma once

#include "tiles.cuh"

// The distance of rows in shared memory beyond the tile: float4 stays aligned, transposed stores spread over banks.
#define PAD 4

// Bytes of shared memory.
#define PRODUCT_SHARED(BM, BN, BK) (2 * BK * (BM + PAD + BN + PAD) * 4)

template <int BM, int BN, int BK, int TM, int TN, int GROUPS, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue,
          class A = Dense, class B = Dense, class Columns = NoColumns>
__device__ __forceinline__ void product(void *shared, Product of, int block, Epilogue epilogue, A a = A(), B b = B(),
                                        Columns columns = Columns()) {
    // Of a group; rows that each of its threads has results of; where they are, groups count as rows of threads.
    constexpr int THREADS = (BM / TM) * (BN / TN), ROWS = TM / GROUPS, SLOTS = BM / TM * GROUPS;
    static_assert(ROWS * GROUPS == TM, "groups share the rows of a thread");
    static_assert(GROUPS == 1 || GROUPS * BM * BN <= 2 * BK * (BM + PAD + BN + PAD), "sums lie where the stages were");
    constexpr int PITCH_A = BM + PAD, PITCH_B = BN + PAD;
    constexpr int STAGE_A = BK * PITCH_A, STAGE_B = BK * PITCH_B;
    constexpr int GROUPS_M = TM / 4, GROUPS_N = TN / 4, STEP_M = BM / GROUPS_M, STEP_N = BN / GROUPS_N;
    float *tiles_a = (float *)shared, *tiles_b = tiles_a + 2 * STAGE_A;
    // a as (M, K) has K contiguous and is transposed on its way into shared memory; as (K, M) it is not.
    Part<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, GROUPS * THREADS, !A_TRANSPOSED, PAD> part_a;
    Part<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, GROUPS * THREADS, B_TRANSPOSED, PAD> part_b;
    of.enter<BM, BN>(block);
    const int M = of.M, N = of.N, K = of.K;
    constexpr int WARP_COLUMNS = BN / TN < 8 ? BN / TN : 8, WARP_ROWS = WARP / WARP_COLUMNS;
    constexpr int WARPS_N = BN / TN / WARP_COLUMNS;
    static_assert(WARPS_N * WARP_COLUMNS * TN == BN && THREADS % WARP == 0, "a warp's threads are 4 x 8, or 8 x 4");
    const int group = threadIdx.x / THREADS, number = threadIdx.x % THREADS, warp = number / WARP, lane = number % WARP;
    const int row_of_threads = warp / WARPS_N * WARP_ROWS + lane / WARP_COLUMNS;
    const int tm = row_of_threads * 4, tn = (warp % WARPS_N * WARP_COLUMNS + lane % WARP_COLUMNS) * 4;
    const bool dense_a = A::SIDE_BY_SIDE && of.wide_a && M > 0, dense_b = B::SIDE_BY_SIDE && of.wide_b && N > 0;
    if (dense_a) part_a.find(A_TRANSPOSED ? M : K, of.m0, M);
    if (dense_b) part_b.find(B_TRANSPOSED ? K : N, of.n0, N);

    auto load = [&](int k) {
        const bool whole = k + BK <= of.k_end;
        if (dense_a && whole) part_a.load_found(of.a, A_TRANSPOSED ? M : K, k);
        else if (A_TRANSPOSED) part_a.load(of.a, M, k, of.k_end, of.m0, M, of.wide_a, a);
        else part_a.load(of.a, K, of.m0, M, k, of.k_end, of.wide_a, a);
        if (dense_b && whole) part_b.load_found(of.b, B_TRANSPOSED ? K : N, k);
        else if (B_TRANSPOSED) part_b.load(of.b, K, of.n0, N, k, of.k_end, of.wide_b, b);
        else part_b.load(of.b, N, k, of.k_end, of.n0, N, of.wide_b, b);
    };

    float sums[TM][TN];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sums[i][j] = 0.0f;

    int stage = 0;
    if (of.k_begin < of.k_end) {
        load(of.k_begin);
        part_a.store(tiles_a);
        part_b.store(tiles_b);
    }
    __syncthreads();
    for (int k0 = of.k_begin; k0 < of.k_end; k0 += BK) {
        const bool more = k0 + BK < of.k_end;
        if (more) load(k0 + BK);
        const float *tile_a = tiles_a + stage * STAGE_A + group * (BK / GROUPS) * PITCH_A;
        const float *tile_b = tiles_b + stage * STAGE_B + group * (BK / GROUPS) * PITCH_B;
#pragma unroll
        for (int k = 0; k < BK / GROUPS; ++k) {
            float x[TM], y[TN];
#pragma unroll
            for (int g = 0; g < GROUPS_M; ++g) {
                const float4 quad = *reinterpret_cast<const float4 *>(&tile_a[k * PITCH_A + g * STEP_M + tm]);
                x[g * 4] = quad.x, x[g * 4 + 1] = quad.y, x[g * 4 + 2] = quad.z, x[g * 4 + 3] = quad.w;
            }
#pragma unroll
            for (int g = 0; g < GROUPS_N; ++g) {
                const float4 quad = *reinterpret_cast<const float4 *>(&tile_b[k * PITCH_B + g * STEP_N + tn]);
                y[g * 4] = quad.x, y[g * 4 + 1] = quad.y, y[g * 4 + 2] = quad.z, y[g * 4 + 3] = quad.w;
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
        }
        if (more) {
            // The other stage was last read before the previous barrier.
            stage = 1 - stage;
            part_a.store(tiles_a + stage * STAGE_A);
            part_b.store(tiles_b + stage * STAGE_B);
            __syncthreads();
        }
    }

    if constexpr (GROUPS > 1) {
        float *const patches = (float *)shared;  // (groups, sums, threads)
        __syncthreads();                         // the last stage has been read
#pragma unroll
        for (int e = 0; e < TM * TN; ++e) patches[(group * TM * TN + e) * THREADS + number] = sums[e / TN][e % TN];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < ROWS * TN; ++e) {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < GROUPS; ++other)
                sum += patches[(other * TM * TN + group * ROWS * TN + e) * THREADS + number];
            sums[e / TN][e % TN] = sum;
        }
    }
    if (!of.join<ROWS * TN>([&](int e) -> float & { return sums[e / TN][e % TN]; }, shared)) return;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int of_thread = group * ROWS + i, m = of.m0 + of_thread / 4 * STEP_M + tm + of_thread % 4;
        if (m >= M) continue;
#pragma unroll
        for (int j = 0; j < TN; ++j) {
            const int n = of.n0 + j / 4 * STEP_N + tn + j % 4;
            if (n < N) epilogue((Index)(of.matrix * M + m), (Index)n, sums[i][j], j);
        }
    }
    WholeBlock team;
    auto column = [&](int j) { return j / 4 * STEP_N + tn + j % 4; };
    columns(tile_columns<BN, TN, SLOTS>(shared, row_of_threads * GROUPS + group, of, of.m0 / BM, column, team));
}
