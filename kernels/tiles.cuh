// What the matrix products of dense.cu and dense_tf32.cu share: the way of a tile into shared memory and that of the
// results out, with edges of any size.
#pragma once

#include "common.cuh"

// One matrix's part of a tile on its way from global to shared memory.
//
// The part is ROWS x COLUMNS in global memory, where columns are contiguous. TURNED stores it as [column][row]. PAD floats
// lie between the rows in shared memory, which spreads them over the banks.
template <int ROWS, int COLUMNS, int THREADS, bool TURNED, int PAD> struct Part {
    static constexpr int QUADS = ROWS * COLUMNS / 4 / THREADS;
    static constexpr int PITCH = (TURNED ? ROWS : COLUMNS) + PAD, SIZE = (TURNED ? COLUMNS : ROWS) * PITCH;
    static_assert(QUADS * 4 * THREADS == ROWS * COLUMNS, "every thread carries the same number of quads");
    float4 quads[QUADS];

    // Read from `source`, whose rows are `pitch` apart; outside (rows, columns) there are zeros.
    __device__ inline void load(const float *source, long long pitch, int row0, int rows, int column0, int columns,
                                bool vector) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int i = threadIdx.x + q * THREADS;
            const int row = row0 + i / (COLUMNS / 4), column = column0 + i % (COLUMNS / 4) * 4;
            float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < rows) {
                const float *place = source + row * pitch + column;
                if (vector && column + 4 <= columns) {
                    quad = *reinterpret_cast<const float4 *>(place);
                } else {
                    if (column < columns) quad.x = place[0];
                    if (column + 1 < columns) quad.y = place[1];
                    if (column + 2 < columns) quad.z = place[2];
                    if (column + 3 < columns) quad.w = place[3];
                }
            }
            quads[q] = quad;
        }
    }

    __device__ inline void store(float *tile) const {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
            const int i = threadIdx.x + q * THREADS;
            const int row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            if (TURNED) {
                tile[(column + 0) * PITCH + row] = quads[q].x;
                tile[(column + 1) * PITCH + row] = quads[q].y;
                tile[(column + 2) * PITCH + row] = quads[q].z;
                tile[(column + 3) * PITCH + row] = quads[q].w;
            } else {
                *reinterpret_cast<float4 *>(&tile[row * PITCH + column]) = quads[q];
            }
        }
    }
};

// Writes results of one row, columns n to n + 3 of those below N, to `place`. With `whole` sums the bias (null for none)
// and the activation come first; parts of sums are written as they are.
__device__ inline void write_quad(float *place, float4 sums, const float *bias_N, int n, int N, int activation,
                                  bool whole, bool vector) {
    float results[4] = {sums.x, sums.y, sums.z, sums.w};
    if (whole) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (n + j >= N) continue;
            if (bias_N != nullptr) results[j] += bias_N[n + j];
            results[j] = activate(results[j], activation);
        }
    }
    if (vector && n + 4 <= N) {
        *reinterpret_cast<float4 *>(place) = make_float4(results[0], results[1], results[2], results[3]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (n + j < N) place[j] = results[j];
    }
}
