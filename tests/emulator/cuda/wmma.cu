// Tensor-core tiles of 16 x 16 by one warp each: TF32, bf16 and half inputs, float sums.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;

// Rounds inputs to TF32. M and N multiples of 16, K of 8; one warp a block.
extern "C" __global__ void wmma_tf32(const float *a_MK, const float *b_KN, float *c_MN, int N, int K) {
    wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 8, float> c;
    wmma::fill_fragment(c, 0.0f);
    for (int k = 0; k < K; k += 8) {
        wmma::load_matrix_sync(a, a_MK + blockIdx.y * 16 * K + k, K);
        wmma::load_matrix_sync(b, b_KN + k * N + blockIdx.x * 16, N);
        for (int i = 0; i < a.num_elements; ++i) a.x[i] = wmma::__float_to_tf32(a.x[i]);
        for (int i = 0; i < b.num_elements; ++i) b.x[i] = wmma::__float_to_tf32(b.x[i]);
        wmma::mma_sync(c, a, b, c);
    }
    wmma::store_matrix_sync(c_MN + blockIdx.y * 16 * N + blockIdx.x * 16, c, N, wmma::mem_row_major);
}

// Inputs arrive as float and are rounded to T in shared memory; b is stored by columns.
template <class T>
__device__ void wmma_16(const float *a_MK, const float *b_NK, float *c_MN, int N, int K) {
    __shared__ __align__(32) T tile_a[16 * 16], tile_b[16 * 16];
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 0.0f);
    for (int k = 0; k < K; k += 16) {
        for (int i = threadIdx.x; i < 256; i += 32) {
            tile_a[i] = T(a_MK[(blockIdx.y * 16 + i / 16) * K + k + i % 16]);
            tile_b[i] = T(b_NK[(blockIdx.x * 16 + i / 16) * K + k + i % 16]);
        }
        __syncwarp();
        wmma::load_matrix_sync(a, tile_a, 16);
        wmma::load_matrix_sync(b, tile_b, 16);
        wmma::mma_sync(c, a, b, c);
        __syncwarp();
    }
    wmma::store_matrix_sync(c_MN + blockIdx.y * 16 * N + blockIdx.x * 16, c, N, wmma::mem_row_major);
}

extern "C" __global__ void wmma_bf16(const float *a_MK, const float *b_NK, float *c_MN, int N, int K) {
    wmma_16<__nv_bfloat16>(a_MK, b_NK, c_MN, N, K);
}

extern "C" __global__ void wmma_half(const float *a_MK, const float *b_NK, float *c_MN, int N, int K) {
    wmma_16<__half>(a_MK, b_NK, c_MN, N, K);
}

// What rounding does to single numbers.
extern "C" __global__ void roundings(const float *x, float *tf32, float *bf16, float *half, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    tf32[i] = wmma::__float_to_tf32(x[i]);
    bf16[i] = __bfloat162float(__float2bfloat16(x[i]));
    half[i] = __half2float(__float2half(x[i]));
}
