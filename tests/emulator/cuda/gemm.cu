// c_MN = a_MK b_KN in tiles: plain, with float4 loads, and with asynchronous copies in two stages.
#include <cuda_pipeline.h>
#define TILE 16

extern "C" __global__ void gemm_tiled(const float *a_MK, const float *b_KN, float *c_MN, int M, int N, int K) {
    __shared__ float a[TILE][TILE], b[TILE][TILE + 1];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < K; k0 += TILE) {
        int ka = k0 + threadIdx.x, kb = k0 + threadIdx.y;
        a[threadIdx.y][threadIdx.x] = row < M && ka < K ? __ldg(&a_MK[row * K + ka]) : 0.0f;
        b[threadIdx.y][threadIdx.x] = column < N && kb < K ? __ldg(&b_KN[kb * N + column]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += a[threadIdx.y][k] * b[k][threadIdx.x];
        __syncthreads();
    }
    if (row < M && column < N) c_MN[row * N + column] = sum;
}

// 64 x 64 results a block, 4 x 4 a thread. M and N multiples of 64, K of 16.
extern "C" __global__ void __launch_bounds__(256) gemm_vector(const float *a_MK, const float *b_KN, float *c_MN, int M,
                                                              int N, int K) {
    __shared__ __align__(16) float a[16][64 + 4];
    __shared__ __align__(16) float b[16][64];
    int t = threadIdx.x, tx = t % 16, ty = t / 16;
    int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    float sums[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
        float4 va = *reinterpret_cast<const float4 *>(&a_MK[(row0 + t / 4) * K + k0 + t % 4 * 4]);
        a[t % 4 * 4 + 0][t / 4] = va.x;
        a[t % 4 * 4 + 1][t / 4] = va.y;
        a[t % 4 * 4 + 2][t / 4] = va.z;
        a[t % 4 * 4 + 3][t / 4] = va.w;
        *reinterpret_cast<float4 *>(&b[t / 16][t % 16 * 4]) =
            *reinterpret_cast<const float4 *>(&b_KN[(k0 + t / 16) * N + column0 + t % 16 * 4]);
        __syncthreads();
        for (int k = 0; k < 16; ++k) {
            float4 x = *reinterpret_cast<float4 *>(&a[k][ty * 4]), y = *reinterpret_cast<float4 *>(&b[k][tx * 4]);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(xs[i], ys[j], sums[i][j]);
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float4 *>(&c_MN[(row0 + ty * 4 + i) * N + column0 + tx * 4]) =
            make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
}

// 16 x 16 results a block of 64 threads, four columns a thread; tiles arrive while the previous pair is multiplied.
// M and N multiples of 16, K of 16.
extern "C" __global__ void gemm_async(const float *a_MK, const float *b_KN, float *c_MN, int M, int N, int K) {
    __shared__ __align__(16) float a[2][TILE][TILE], b[2][TILE][TILE];
    int row = threadIdx.x / 4, quad = threadIdx.x % 4 * 4;
    int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    auto fetch = [&](int stage, int k0) {
        __pipeline_memcpy_async(&a[stage][row][quad], &a_MK[(row0 + row) * K + k0 + quad], 16);
        __pipeline_memcpy_async(&b[stage][row][quad], &b_KN[(k0 + row) * N + column0 + quad], 16);
        __pipeline_commit();
    };
    float sums[4] = {};
    fetch(0, 0);
    int stage = 0;
    for (int k0 = 0; k0 < K; k0 += TILE, stage ^= 1) {
        if (k0 + TILE < K) fetch(stage ^ 1, k0 + TILE);
        else __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        for (int k = 0; k < TILE; ++k)
            for (int j = 0; j < 4; ++j) sums[j] += a[stage][row][k] * b[stage][k][quad + j];
        __syncthreads();
    }
    for (int j = 0; j < 4; ++j) c_MN[(row0 + row) * N + column0 + quad + j] = sums[j];
}
