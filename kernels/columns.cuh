// Sums and greatest elements over rows, for each column.
//
// A block takes 32 columns and `chunk` rows, its warps take turns; or one column and `chunk` rows, its threads take turns,
// where the rows lie side by side in memory. Block = tile of columns + tiles * chunk number. What a block finds goes to parts
// (chunks, columns); the last block of a tile joins the chunks in order. With one chunk there are no parts. Deterministic.
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

// What the chunks of rows have left for a column, in `parts` that lie `columns` apart, as far as this thread joins it: from
// chunk `first` on, every `distance`th.
template <class Join, class T>
__device__ __forceinline__ T chunks_join(const T *parts, Index columns, int chunks, int first, int distance) {
    T value = Join::template identity<T>();
#pragma unroll 8  // as many are on their way at once
    for (int chunk = first; chunk < chunks; chunk += distance) value = Join::join(value, parts[(long long)chunk * columns]);
    return value;
}
