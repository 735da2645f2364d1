// The dense layer: three matrix products, the bias and activation at their end, and the bias's gradient.
//
// gemm_<layout>_<tile>: c_MN = a b, for a tile of `tile` x `tile` results a block, 64 or 256 threads.
//   nn  y_BO  = activation(x_BI kernel_IO + bias_O)   a is (M, K),  b is (K, N)
//   tn  dkernel_IO = x_BI^T dy_BO                     a is (K, M),  b is (K, N)
//   nt  dx_BI = dy_BO kernel_IO^T                     a is (M, K),  b is (N, K)
//   Grid (ceil(M / tile), ceil(N / tile), slices), block THREADS. With one slice of K the bias (null for none) and the
//   activation are applied and c is overwritten. With more, slice z overwrites partials z of (slices, M, N), and
//   gemm_finish adds them in order: a tall-skinny batch has too few tiles to fill a GPU.
// gemm_finish: c_MN = activation(sum_z partials[z] + bias_N). Grid-stride over M N, any block. Overwrites.
// dense_gradient: dz_BO = dy_BO * activation'(y_BO), in place on dy (of gelu and silu y is their input), and sums of its columns over 64 rows:
//   partials (ceil(B / 64), O). Grid (ceil(O / 32), ceil(B / 64)), block (32, 8). Overwrites.
// sum_partials: dbias_O = sum_z partials[z], in order. Grid-stride over O, any block. Overwrites.
//
// Deterministic: K, slices and rows are summed in a fixed order that depends on the shapes alone.
//
// How a product works: shared memory holds two stages of a tile pair (BK columns of a, BK rows of b). While one stage is
// multiplied, the next pair is in flight from global memory in staging registers, so a pair costs one barrier. Each thread holds
// TM x TN sums in registers, in groups of 4 x 4 that lie a fixed distance apart, which keeps the lanes of a warp on
// different banks. Loads and stores take four floats at once where alignment and edges allow.
#include "tiles.cuh"

// The distance of rows in shared memory beyond the tile: float4 stays aligned, transposed stores spread over banks.
#define PAD 4

template <int BM, int BN, int BK, int TM, int TN, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ inline void gemm(float4 *shared, const float *a, const float *b, const float *bias_N, float *c_MN, int M,
                            int N, int K, int K_slice, int activation, int vector_a, int vector_b, int vector_c) {
    constexpr int THREADS = (BM / TM) * (BN / TN);
    constexpr int PITCH_A = BM + PAD, PITCH_B = BN + PAD;
    constexpr int STAGE_A = BK * PITCH_A, STAGE_B = BK * PITCH_B;
    constexpr int GROUPS_M = TM / 4, GROUPS_N = TN / 4, STEP_M = BM / GROUPS_M, STEP_N = BN / GROUPS_N;
    float *tiles_a = reinterpret_cast<float *>(shared), *tiles_b = tiles_a + 2 * STAGE_A;
    // a as (M, K) has K contiguous and is transposed on its way into shared memory; as (K, M) it is not.
    Part<A_TRANSPOSED ? BK : BM, A_TRANSPOSED ? BM : BK, THREADS, !A_TRANSPOSED, PAD> part_a;
    Part<B_TRANSPOSED ? BN : BK, B_TRANSPOSED ? BK : BN, THREADS, B_TRANSPOSED, PAD> part_b;
    const int m0 = blockIdx.x * BM, n0 = blockIdx.y * BN;
    const int tm = threadIdx.x / (BN / TN) * 4, tn = threadIdx.x % (BN / TN) * 4;
    const int k_begin = blockIdx.z * K_slice, k_end = min(k_begin + K_slice, K);

    auto load = [&](int k) {
        if (A_TRANSPOSED) part_a.load(a, M, k, k_end, m0, M, vector_a);
        else part_a.load(a, K, m0, M, k, k_end, vector_a);
        if (B_TRANSPOSED) part_b.load(b, K, n0, N, k, k_end, vector_b);
        else part_b.load(b, N, k, k_end, n0, N, vector_b);
    };

    float sums[TM][TN];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) sums[i][j] = 0.0f;

    int stage = 0;
    if (k_begin < k_end) {
        load(k_begin);
        part_a.store(tiles_a);
        part_b.store(tiles_b);
    }
    __syncthreads();
    for (int k0 = k_begin; k0 < k_end; k0 += BK) {
        const bool more = k0 + BK < k_end;
        if (more) load(k0 + BK);
        const float *tile_a = tiles_a + stage * STAGE_A, *tile_b = tiles_b + stage * STAGE_B;
#pragma unroll
        for (int k = 0; k < BK; ++k) {
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

    const bool whole = gridDim.z == 1;
    float *c = c_MN + (long long)blockIdx.z * M * N;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int m = m0 + i / 4 * STEP_M + tm + i % 4;
        if (m >= M) continue;
#pragma unroll
        for (int g = 0; g < GROUPS_N; ++g) {
            const int n = n0 + g * STEP_N + tn;
            const float4 quad = make_float4(sums[i][g * 4], sums[i][g * 4 + 1], sums[i][g * 4 + 2], sums[i][g * 4 + 3]);
            write_quad(c + (long long)m * N + n, quad, bias_N, n, N, activation, whole, vector_c);
        }
    }
}

#define GEMM(NAME, BM, BN, BK, TM, TN, A_TRANSPOSED, B_TRANSPOSED)                                                        \
    extern "C" __global__ void __launch_bounds__((BM / TM) * (BN / TN))                                           \
        NAME(const float *a, const float *b, const float *bias_N, float *c_MN, int M, int N, int K, int K_slice,  \
             int activation, int vector_a, int vector_b, int vector_c) {                                          \
        __shared__ float4 shared[2 * BK * (BM + PAD + BN + PAD) / 4]; /* both parts, twice */                     \
        gemm<BM, BN, BK, TM, TN, A_TRANSPOSED, B_TRANSPOSED>(shared, a, b, bias_N, c_MN, M, N, K, K_slice, activation,    \
                                                     vector_a, vector_b, vector_c);                               \
    }
#define GEMM_LAYOUTS(TILE, BK, T)                               \
    GEMM(gemm_nn_##TILE, TILE, TILE, BK, T, T, false, false)    \
    GEMM(gemm_tn_##TILE, TILE, TILE, BK, T, T, true, false)     \
    GEMM(gemm_nt_##TILE, TILE, TILE, BK, T, T, false, true)

// The table of tiles; `product_plan` in dptrain/backend/cuda/products.py chooses.
GEMM_LAYOUTS(32, 32, 4)
GEMM_LAYOUTS(64, 16, 4)
GEMM_LAYOUTS(128, 8, 8)

extern "C" __global__ void gemm_finish(const float *partials, const float *bias_N, float *c_MN, long long M, int N,
                                       int slices, int activation) {
    const long long size = M * N;
    for (long long i = grid_thread(); i < size; i += grid_threads()) {
        float sum = 0.0f;
        for (int z = 0; z < slices; ++z) sum += partials[z * size + i];
        if (bias_N != nullptr) sum += bias_N[i % N];
        c_MN[i] = activate(sum, activation);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    dense_gradient(const float *y_BO, float *dy_BO, float *partials, long long B, int O, int activation,
                   float alpha) {
    __shared__ float sums[8][32 + 1];
    const int o = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (o < O) {
        const long long end = min((long long)(blockIdx.y + 1) * 64, B);
        for (long long b = (long long)blockIdx.y * 64 + threadIdx.y; b < end; b += 8) {
            float dz = dy_BO[b * O + o];
            if (activation != LINEAR) {
                dz *= activation_slope(y_BO[b * O + o], activation, alpha);
                dy_BO[b * O + o] = dz;
            }
            sum += dz;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || o >= O) return;
    for (int lane = 1; lane < 8; ++lane) sum += sums[lane][threadIdx.x];
    partials[(long long)blockIdx.y * O + o] = sum;
}

extern "C" __global__ void sum_partials(const float *partials, float *out_O, int O, int count) {
    for (long long o = grid_thread(); o < O; o += grid_threads()) {
        float sum = 0.0f;
        for (int z = 0; z < count; ++z) sum += partials[(long long)z * O + o];
        out_O[o] = sum;
    }
}
