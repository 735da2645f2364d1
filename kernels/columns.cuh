// Sums and greatest elements over rows, for each column.
//
// A block takes a tile of WIDTH columns and `chunk` rows: a lane has a column, and the lanes that would have none (of 16
// channels half a warp) take the next row instead, so that all of a block's threads load. Where the rows lie side by side
// in memory, a block takes one column and its threads take turns. Block = tile of columns + tiles * chunk number. What a
// block finds goes to parts (chunks, columns); the last block of a tile joins the chunks in order. With one chunk there are
// no parts. Deterministic.
//
// The time is that of waiting for memory, so a thread has what it waits for on its way at once: the elements of several
// rows (`Ahead`) before it computes with the first, and likewise several chunks.
#pragma once

#include "common.cuh"

// Elements of several rows, which a thread has loaded and not yet used.
template <class T, int ROWS> struct Ahead {
    T of[ROWS];
};

// Over the threads of a block that have the same one of WIDTH columns, a power of 2 up to 32: thread n has column n % WIDTH.
// Valid in the first WIDTH threads. `shared` holds a number for each column and warp.
template <class Join, int WIDTH, class T> __device__ __forceinline__ T column_join(T value, void *shared) {
    static_assert(WIDTH <= WARP && (WIDTH & (WIDTH - 1)) == 0, "lanes of a column are WIDTH apart");
    T *of_warps = (T *)shared;
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int distance = WARP / 2; distance >= WIDTH; distance /= 2) value = Join::join(value, from_lane(value, distance));
    if (lane < WIDTH) of_warps[threadIdx.x / WARP * WIDTH + lane] = value;
    __syncthreads();
    if (threadIdx.x < WIDTH)
#pragma unroll 4
        for (int warp = 1; warp < (int)blockDim.x / WARP; ++warp) value = Join::join(value, of_warps[warp * WIDTH + threadIdx.x]);
    __syncthreads();
    return value;
}

// What the chunks of rows have left for a column, in `parts` that lie `columns` apart, as far as this thread joins it: from
// chunk `first` on, every `distance`th.
template <class Join, class T>
__device__ __forceinline__ T chunks_join(const T *parts, Index columns, int chunks, int first, int distance) {
    constexpr int AHEAD = 8;
    T value = Join::template identity<T>();
#pragma unroll 1
    for (int chunk = first; chunk < chunks; chunk += AHEAD * distance) {
#pragma unroll
        for (int own = 0; own < AHEAD; ++own)
            if (chunk + own * distance < chunks)
                value = Join::join(value, parts[(long long)(chunk + own * distance) * columns]);
    }
    return value;
}
