// Sums and greatest elements of the columns of a matrix.
//
// A block takes 32 columns and `chunk` rows, its warps take turns; block = tile + tiles * chunk number.
// What a block finds goes to parts (chunks, columns); the last block of a tile joins the chunks in order. With one chunk
// there are no parts. Deterministic.
#pragma once

#include "common.cuh"

// Over the warps of a block, for each of its 32 columns; valid in the first warp. `shared` holds a number for each thread.
template <class Join, class T> __device__ __forceinline__ T column_join(T value, void *shared) {
    T *of_threads = (T *)shared;
    of_threads[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x < WARP)
        for (int warp = 1; warp < (int)blockDim.x / WARP; ++warp) value = Join::join(value, of_threads[warp * WARP + threadIdx.x]);
    __syncthreads();
    return value;
}

// What the chunks of rows have left for a column; as `column_join`.
template <class Join, class T>
__device__ __forceinline__ T join_chunks(const T *parts, int chunks, Index column, Index columns, void *shared) {
    T value = Join::template identity<T>();
    if (column < columns)
        for (int chunk = threadIdx.x / WARP; chunk < chunks; chunk += (int)blockDim.x / WARP)
            value = Join::join(value, parts[(long long)chunk * columns + column]);
    return column_join<Join>(value, shared);
}
