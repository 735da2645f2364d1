// The products of product.cuh on tensor cores: inputs rounded to TF32, sums in float32.
//
// product_tf32<tile sizes, layout>: operands, blocks, slices and epilogue are those of `product`; a block has BM / WM * BN / WN
// warps. TF32 keeps 10 of the 23 bits of a float32's mantissa (to nearest, ties away from zero) and all of its exponent. So
// each product is off by up to 2^-10 of itself; K and slices are added in float32.
//
// Deterministic: each sum is made by one warp in the order of K, slices in the order of their numbers; shapes alone decide.
//
// How a product works: parts of a and b travel through registers into two stages of shared memory as in product.cuh, and
// are rounded on the way, once an element, where rounding fragments would do it again in every warp that reads the element.
// Nothing is transposed, because fragments can be loaded from rows and from columns. Each warp holds WM x WN sums in
// fragments of 16 x 16. The rows of a stage are 4 or 8 floats longer than the part, by which the 32 lanes of a fragment's
// load fall on different banks (mma.m16n8k8's lanes read 8 rows x 4 columns). At the end each warp puts fragments into a
// patch of shared memory of its own, from which its lanes take the results.
//
// Tensor cores know TF32 from compute capability 8.0; the CUDA backend refuses the precision on older ones.
// Source: CUDA C++ Programming Guide, "Warp matrix functions".
#pragma once

#include <mma.h>

#include "tiles.cuh"

namespace wmma = nvcuda::wmma;

template <class Part> __device__ inline void round_to_tf32(Part &part) {
#pragma unroll
    for (int q = 0; q < Part::QUADS; ++q) {
        float4 &quad = part.quads[q];
        quad = make_float4(wmma::__float_to_tf32(quad.x), wmma::__float_to_tf32(quad.y), wmma::__float_to_tf32(quad.z),
                           wmma::__float_to_tf32(quad.w));
    }
}

template <bool BY_COLUMNS> struct order_of {
    using type = wmma::row_major;
};
template <> struct order_of<true> {
    using type = wmma::col_major;
};

// The tiles' sizes. A_TRANSPOSED: a is (K, M); B_TRANSPOSED: b is (N, K).
template <int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED> struct Tf32Shape {
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = WARPS * WARP;
    // Where k is contiguous a row begins 4 banks after the one before, where m or n is, 8.
    using PartA = Part<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, THREADS, false, A_TRANSPOSED ? 8 : 4>;
    using PartB = Part<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, THREADS, false, B_TRANSPOSED ? 4 : 8>;
    static constexpr int STAGE = PartA::SIZE + PartB::SIZE, SHARED = 2 * STAGE;
    static constexpr int PATCH_PITCH = 16 + 4, PATCH = 16 * PATCH_PITCH;
    static_assert(PartA::SIZE % 8 == 0 && PartB::SIZE % 8 == 0 && PATCH % 8 == 0, "fragments lie at multiples of 32 bytes");
    static_assert(WARPS * PATCH <= SHARED, "the patches lie in the stages' memory");
};

template <int BM, int BN, int BK, int WM, int WN, bool A_TRANSPOSED, bool B_TRANSPOSED, class Epilogue, class A = Dense,
          class B = Dense, class Columns = NoColumns>
__device__ __forceinline__ void product_tf32(void *memory, Product of, int block, Epilogue epilogue, A a = A(), B b = B(),
                                             Columns columns = Columns()) {
    float *shared = (float *)memory;
    using S = Tf32Shape<BM, BN, BK, WM, WN, A_TRANSPOSED, B_TRANSPOSED>;
    constexpr int PITCH_A = S::PartA::PITCH, PITCH_B = S::PartB::PITCH;
    constexpr int FRAGMENTS_M = WM / 16, FRAGMENTS_N = WN / 16;
    typename S::PartA part_a;
    typename S::PartB part_b;
    of.enter<BM, BN>(block);
    const int M = of.M, N = of.N, K = of.K;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int wm = warp / S::WARPS_N * WM, wn = warp % S::WARPS_N * WN;

    auto load = [&](int k) {
        if (A_TRANSPOSED) part_a.load(of.a, M, k, of.k_end, of.m0, M, of.wide_a, a);
        else part_a.load(of.a, K, of.m0, M, k, of.k_end, of.wide_a, a);
        if (B_TRANSPOSED) part_b.load(of.b, K, of.n0, N, k, of.k_end, of.wide_b, b);
        else part_b.load(of.b, N, k, of.k_end, of.n0, N, of.wide_b, b);
    };
    auto store = [&](float *stage) {
        round_to_tf32(part_a);
        round_to_tf32(part_b);
        part_a.store(stage);
        part_b.store(stage + S::PartA::SIZE);
    };

    wmma::fragment<wmma::accumulator, 16, 16, 8, float> sums[FRAGMENTS_M][FRAGMENTS_N];
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i)
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) wmma::fill_fragment(sums[i][j], 0.0f);

    int stage = 0;
    if (of.k_begin < of.k_end) {
        load(of.k_begin);
        store(shared);
    }
    __syncthreads();
    for (int k0 = of.k_begin; k0 < of.k_end; k0 += BK) {
        const bool more = k0 + BK < of.k_end;
        if (more) load(k0 + BK);
        const float *tile_a = shared + stage * S::STAGE, *tile_b = tile_a + S::PartA::SIZE;
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, typename order_of<A_TRANSPOSED>::type>
                x[FRAGMENTS_M];
#pragma unroll
            for (int i = 0; i < FRAGMENTS_M; ++i) {
                const int m = wm + i * 16;
                wmma::load_matrix_sync(x[i], tile_a + (A_TRANSPOSED ? k * PITCH_A + m : m * PITCH_A + k), PITCH_A);
            }
#pragma unroll
            for (int j = 0; j < FRAGMENTS_N; ++j) {
                wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, typename order_of<B_TRANSPOSED>::type> y;
                const int n = wn + j * 16;
                wmma::load_matrix_sync(y, tile_b + (B_TRANSPOSED ? n * PITCH_B + k : k * PITCH_B + n), PITCH_B);
#pragma unroll
                for (int i = 0; i < FRAGMENTS_M; ++i) wmma::mma_sync(sums[i][j], x[i], y, sums[i][j]);
            }
        }
        if (more) {
            // The other stage was last read before the previous barrier.
            stage = 1 - stage;
            store(shared + stage * S::STAGE);
            __syncthreads();
        }
    }
    __syncthreads();  // patches replace stages that other warps may still read

    constexpr int EACH = wmma::fragment<wmma::accumulator, 16, 16, 8, float>::num_elements, COUNT = FRAGMENTS_M * FRAGMENTS_N * EACH;
    if (!of.join<COUNT>(
            [&](int e) -> float & { return sums[e / EACH / FRAGMENTS_N][e / EACH % FRAGMENTS_N].x[e % EACH]; }, shared))
        return;
    float *patch = shared + warp * S::PATCH;
#pragma unroll
    for (int i = 0; i < FRAGMENTS_M; ++i) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS_N; ++j) {
            wmma::store_matrix_sync(patch, sums[i][j], S::PATCH_PITCH, wmma::mem_row_major);
            __syncwarp();
#pragma unroll 1
            for (int e = lane; e < 16 * 16; e += WARP) {
                const int m = of.m0 + wm + i * 16 + e / 16, n = of.n0 + wn + j * 16 + e % 16;
                if (m < M && n < N)
                    epilogue((Index)(of.matrix * M + m), (Index)n, patch[e / 16 * S::PATCH_PITCH + e % 16], j);
            }
            __syncwarp();  // the next fragment replaces this one
        }
    }
    WholeBlock team;
    auto column = [&](int j) { return wn + j * 16 + lane % 16; };
    columns(tile_columns<BN, FRAGMENTS_N, BM / WM * 2>(shared, warp / S::WARPS_N * 2 + lane / 16, of, of.m0 / BM, column, team));
}
