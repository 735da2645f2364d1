// Products within a persistent loop (dptrain/backend/cuda/persistent.py): a block executes all steps of a recurrent layer for
// some rows of the batch. It needs no other block, so none waits for another. What a step leaves for the next one is global
// memory that this block alone writes; the weights are read again at each step, from L1 or L2.
#pragma once

#include "tiles.cuh"

#define ROWS_PRODUCT_THREADS 256
// The fewest terms for which threads share a sum.
#define ROWS_PRODUCT_LEAST 8
#define ROWS_PRODUCT_SHARED(ROWS) (ROWS * 4 * ROWS_PRODUCT_THREADS * 4)

// Rows `first` to `end`, at most ROWS, of a (M, K) times b (K, N): calls done(r, c, sum) for each element.
//
// A thread adds up four columns of all rows, so it reads each element of b once. If there are fewer columns than that takes
// threads, these share the terms: slices, which are joined in order. How depends on N and K alone.
template <int ROWS, class T, class Done>
static __device__ __forceinline__ void rows_product(void *shared, const T *a, const T *b, Index first, Index end, int N,
                                                    int K, Done &&done) {
    float *const parts = (float *)shared;
    const bool wide_a = K % 4 == 0 && aligned(a), wide_b = N % 4 == 0 && aligned(b);
    const int quads = (N + 3) / 4, rows = (int)(end - first);
    for (int quad0 = 0; quad0 < quads; quad0 += ROWS_PRODUCT_THREADS) {
        const int width = min(quads - quad0, ROWS_PRODUCT_THREADS), lane = threadIdx.x % width;
        const int most = (K + ROWS_PRODUCT_LEAST - 1) / ROWS_PRODUCT_LEAST;
        const int slices = max(1, min(ROWS_PRODUCT_THREADS / width, most)), slice = threadIdx.x / width;
        const int depth = ((K + slices - 1) / slices + 3) / 4 * 4, stop = min(K, (slice + 1) * depth);
        float sums[ROWS][4] = {};
        if (slice < slices) {
#pragma unroll 2
            for (int k = slice * depth; k < stop; k += 4) {
                Quad<T> of_a[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {  // instead of a row that there is not, the last one again
                    const Index row = (first + min(r, rows - 1)) * K;
                    of_a[r] = load_quad(a, row + k, row + stop, wide_a);
                }
#pragma unroll
                for (int term = 0; term < 4; ++term) {
                    if (k + term >= stop) break;
                    const Index row = (Index)(k + term) * N;
                    const Quad<T> of_b = load_quad(b, row + (quad0 + lane) * 4, row + N, wide_b);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int own = 0; own < 4; ++own)
                            sums[r][own] += (float)of_a[r].of[term] * (float)of_b.of[own];
                }
            }
        }
        __syncthreads();  // until nobody reads what was there before
        if (slice < slices)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                *reinterpret_cast<float4 *>(&parts[((slice * ROWS + r) * width + lane) * 4]) =
                    make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        __syncthreads();
        const int columns = min(4 * width, N - 4 * quad0);
        for (int i = threadIdx.x; i < rows * columns; i += ROWS_PRODUCT_THREADS) {
            const int r = i / columns, c = i % columns;
            float sum = parts[r * width * 4 + c];
            for (int n = 1; n < slices; ++n) sum += parts[(n * ROWS + r) * width * 4 + c];
            done(first + r, (Index)(quad0 * 4 + c), sum);
        }
    }
}
