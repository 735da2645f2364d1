// Attention of bfloat16 or float16 on tensor cores: the tiles of attention.cuh, made of the fragments of product_half.cuh.
//
// Products of halves are summed in float32. Weights and slopes are rounded to halves where rows are multiplied by them:
// the registers in which a warp has a tile of sums, rounded, are the fragments of the next product's first factor.
#pragma once

#include "attention.cuh"
#include "product_half.cuh"

// Bytes of shared memory.
#define ATTENTION_HALF_SHARED(D, KEPT, PASSING) (2 * D * (KEPT + PASSING + PASSING))
#define ATTENTION_HALF_GRADIENTS_SHARED(D, KEPT, PASSING) (2 * D * (KEPT + PASSING) * 2)

// A tile of scores (KEPT, PASSING) by four warps, each with 16 rows: lane l has rows l / 4 and l / 4 + 8, and columns
// l % 4 * 2 and the next of every 8.
template <class T, int D, int KEPT, int PASSING> struct HalfTile {
    static_assert(KEPT == 64 && ATTENTION_THREADS == 128, "a warp has 16 rows");
    using Kept = HalfPart<KEPT, D, ATTENTION_THREADS>;
    using Passing = HalfPart<PASSING, D, ATTENTION_THREADS>;
    static constexpr int ROWS = 2, COLUMNS = PASSING / 4, EACH = D / 4, LANES = 4, BUFFERS = 2;
    static constexpr int KEPT_BYTES = Kept::BYTES, PASSING_BYTES = Passing::BYTES;
    typedef float Scores[PASSING / 8][4];
    typedef float Sums[D / 8][4];

    __device__ __forceinline__ HalfTile(char *) {}

    static __device__ __forceinline__ int warp_row() { return threadIdx.x / WARP * 16; }
    static __device__ __forceinline__ int row(int i) { return warp_row() + threadIdx.x % WARP / 4 + 8 * i; }
    static __device__ __forceinline__ int column(int j) { return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2; }
    static __device__ __forceinline__ float &at(Scores &scores, int i, int j) { return scores[j / 2][i * 2 + j % 2]; }
    static __device__ __forceinline__ float &sum(Sums &sums, int i, int e) { return sums[e / 2][i * 2 + e % 2]; }
    static __device__ __forceinline__ void clear(Sums &sums) {
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
    }

    // Until at most so many of the last loads are on their way.
    template <int PENDING> static __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
        __syncthreads();
    }

    static __device__ __forceinline__ void load_kept(char *tile, const T *array, const AttentionHead &head, int length, int width) {
        load<Kept>(tile, array, head, head.first, length, width);
    }
    static __device__ __forceinline__ void load_passing(char *tile, const T *array, const AttentionHead &head, int from,
                                                        int length, int width) {
        load<Passing>(tile, array, head, from, length, width);
    }

    template <class Part>
    static __device__ __forceinline__ void load(char *tile, const T *array, const AttentionHead &head, int from, int length,
                                                int width) {
        const unsigned short *const source = reinterpret_cast<const unsigned short *>(array + head.place(0, length, width));
        Part::copy(tile, source, (long long)head.N * width, from, length, 0, width, width % 8 == 0 && aligned(array), Dense());
        asm volatile("cp.async.commit_group;" : : : "memory");
    }

    static __device__ __forceinline__ void multiply_rows(Scores &products, const char *kept, const char *passing) {
#pragma unroll
        for (int n = 0; n < PASSING / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) products[n][e] = 0.0f;
#pragma unroll 2
        for (int d = 0; d < D; d += 16) {  // unrolled all, its addresses would spill
            unsigned int x[4], y[4];
            Kept::template load<true, false>(x, kept, warp_row(), d);
#pragma unroll
            for (int n = 0; n < PASSING / 8; n += 2) {
                Passing::template load<false, false>(y, passing, n * 8, d);
                multiply<T>(products[n], x, y[0], y[1]);
                multiply<T>(products[n + 1], x, y[2], y[3]);
            }
        }
    }

    static __device__ __forceinline__ unsigned int pair(float a, float b) {
        return (unsigned int)T(a).bits | (unsigned int)T(b).bits << 16;
    }

    static __device__ __forceinline__ void add(Sums &sums, const Scores &factors, const char *passing) {
#pragma unroll
        for (int p = 0; p < PASSING / 8; p += 2) {
            const unsigned int x[4] = {pair(factors[p][0], factors[p][1]), pair(factors[p][2], factors[p][3]),
                                       pair(factors[p + 1][0], factors[p + 1][1]), pair(factors[p + 1][2], factors[p + 1][3])};
            unsigned int y[4];
#pragma unroll
            for (int n = 0; n < D / 8; n += 2) {
                Passing::template load<true, true>(y, passing, p * 8, n * 8);
                multiply<T>(sums[n], x, y[0], y[1]);
                multiply<T>(sums[n + 1], x, y[2], y[3]);
            }
        }
    }

    static __device__ __forceinline__ void store(float *array, const Sums &sums, const AttentionHead &head, int length,
                                                int width) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (head.first + row(i) < length) {
                float *const of_row = array + head.place(head.first + row(i), length, width);
#pragma unroll
                for (int e = 0; e < EACH; ++e)
                    if (column(e) < width) of_row[column(e)] = sums[e / 2][i * 2 + e % 2];
            }
    }
};
