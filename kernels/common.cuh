// What generated kernels share: the type of indices, and sums and greatest elements in a fixed order.
//
// A generated source (dptrain/backend/cuda/generate.py) defines INDEX, int or long long, and includes this. All arrays are dense and row-major. No kernel uses floating-point atomics: who adds what to what, and
// in which order, depends on shapes alone, so the same input gives the same bits on every run and every GPU.
//
// Grid: (blocks, runs). blockIdx.y is the run of a pack, whose addresses and numbers a kernel reads from `pack[blockIdx.y]`;
// no block touches what is another run's. Packs were right on an H200.
#pragma once

#include "scalar.h"
#include "half.h"

#define WARP 32
#define ALL_LANES 0xffffffffu

#ifndef INDEX  // in a user's own kernels
#define INDEX int
#endif
typedef INDEX Index;

// An address in the device's memory, itself read from memory. The compiler cannot see where such an address points, as it
// does with a kernel's parameter, and would use slower loads that work on shared memory as well: it is told.
template <class T> struct Global {
    size_t address;
    __device__ __forceinline__ operator T *() const { return (T *)__cvta_global_to_generic(address); }
};

// The type in which sums of T go on beyond one thread.
template <class T> struct Wide { typedef T type; };
template <> struct Wide<float> { typedef double type; };

// The least number that there is.
template <class T> __device__ __forceinline__ T lowest() {
    const T shifted = (T)((T)1 << (sizeof(T) * 8 - 2));
    return (T)-1 < (T)0 ? (T)(-(T)(shifted - 1) - shifted - 1) : (T)0;
}
template <> __device__ __forceinline__ float lowest<float>() { return -DP_INFINITY; }
template <> __device__ __forceinline__ double lowest<double>() { return -DP_INFINITY; }
template <> __device__ __forceinline__ bool lowest<bool>() { return false; }

struct Sum {
    template <class T> static __device__ __forceinline__ T identity() { return (T)0; }
    template <class T> static __device__ __forceinline__ T join(T a, T b) { return (T)(a + b); }
};

// The greatest; NaN where one is.
struct Greatest {
    template <class T> static __device__ __forceinline__ T identity() { return lowest<T>(); }
    template <class T> static __device__ __forceinline__ T join(T a, T b) { return dp_maximum(a, b); }
};

// A score and its place: the first of the greatest; NaN counts as the greatest, as in NumPy's argmax.
template <class T> struct Best {
    T score;
    long long place;  // -1: none seen yet

    __device__ __forceinline__ Best(T score, long long place) : score(score), place(place) {}
    // Field by field: nothing writes the bytes between them.
    __device__ __forceinline__ Best(const Best &other) : score(other.score), place(other.place) {}
    __device__ __forceinline__ Best &operator=(const Best &other) {
        score = other.score;
        place = other.place;
        return *this;
    }
};

struct First {
    template <class B> static __device__ __forceinline__ B identity() { return B(lowest<decltype(B::score)>(), -1); }
    // Which is better is decided first and fields are chosen then: nvcc would put structs between `?` and `:` into local memory.
    template <class B> static __device__ __forceinline__ B join(B a, B b) {
        const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
        const bool equal = a.score == b.score || (a_is_nan && b_is_nan);
        const bool a_is_better = equal ? a.place < b.place : a_is_nan || (!b_is_nan && a.score > b.score);
        const bool takes_a = b.place < 0 || (a.place >= 0 && a_is_better);
        return B(takes_a ? a.score : b.score, takes_a ? a.place : b.place);
    }
};

// Shuffles move 4 or 8 bytes: narrower types travel as int.
template <class T> __device__ __forceinline__ T from_lane(T value, int distance) {
    if constexpr (sizeof(T) < 4) return (T)__shfl_xor_sync(ALL_LANES, (int)value, distance);
    else return __shfl_xor_sync(ALL_LANES, value, distance);
}
template <class T> __device__ __forceinline__ Best<T> from_lane(Best<T> best, int distance) {
    return Best<T>{from_lane(best.score, distance), from_lane(best.place, distance)};
}

// Over the lanes of a warp, the same on all lanes: each step joins the same two numbers on both sides.
template <class Join, class T> __device__ __forceinline__ T warp_join(T value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = Join::join(value, from_lane(value, distance));
    return value;
}

template <class T> __device__ __forceinline__ T warp_sum(T value) { return warp_join<Sum>(value); }
template <class T> __device__ __forceinline__ T warp_max(T value) { return warp_join<Greatest>(value); }

// Over the threads of a block, the same on all threads. `shared` holds a number for each warp, and is free again when
// this returns.
template <class Join, class T> __device__ __forceinline__ T block_join(T value, void *shared) {
    T *of_warps = (T *)shared;
    value = warp_join<Join>(value);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = of_warps[0];
    for (int warp = 1; warp < (int)blockDim.x / WARP; ++warp) value = Join::join(value, of_warps[warp]);
    __syncthreads();
    return value;
}


// The threads that work together on what a block does: all of them.
struct WholeBlock {
    __device__ __forceinline__ int count() const { return (int)blockDim.x; }
    __device__ __forceinline__ int number() const { return (int)threadIdx.x; }
    __device__ __forceinline__ void meet() { __syncthreads(); }
};

// Whether this block is the last of `blocks` to get here, which then sees what the others have written before. The
// counter is zero again afterwards.
template <class Team = WholeBlock>
__device__ __forceinline__ bool is_last_block(unsigned int *arrived, unsigned int blocks, void *shared,
                                              Team &&team = Team()) {
    unsigned int *before = (unsigned int *)shared;
    team.meet();
    if (team.number() == 0) {
        __threadfence();  // what the block has written comes before its arrival,
        *before = atomicAdd(arrived, 1u);
        if (*before == blocks - 1) *arrived = 0;
        __threadfence();  // and what the others have written, before what the last one reads
    }
    team.meet();
    const bool last = *before == blocks - 1;
    team.meet();
    return last;
}

// What the blocks have left, joined in the order of their numbers by one block; the same on all threads.
template <class Join, class T> __device__ __forceinline__ T join_parts(const T *parts, int blocks, void *shared) {
    T value = Join::template identity<T>();
    constexpr int AHEAD = 4;  // are on their way at once, each with a condition: the rest of an unrolled loop would wait for each
#pragma unroll 1
    for (int block = threadIdx.x; block < blocks; block += AHEAD * (int)blockDim.x) {
#pragma unroll
        for (int own = 0; own < AHEAD; ++own)
            if (own == 0 || block + own * (int)blockDim.x < blocks) value = Join::join(value, parts[block + own * (int)blockDim.x]);
    }
    return block_join<Join>(value, shared);
}

// The index of a row; the nearest one if it is out of range.
template <class T> __device__ __forceinline__ Index row_at(T place, Index rows) {
    const long long row = (long long)place;
    return row < 0 ? 0 : row >= rows ? rows - 1 : (Index)row;
}

// The same; also sets `outside` to 1 if it is out of range, which is read with the step's results.
template <class T> __device__ __forceinline__ Index row_at(T place, Index rows, int *outside) {
    const long long row = (long long)place;
    if (row < 0 || row >= rows) atomicExch(outside, 1);
    return row_at(place, rows);
}

// Four elements that lie side by side: of float, what a thread loads or stores at once.
template <class T> struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Quad {
    T of[4];
};

// Elements `first` to first + 3; behind the end, the last one again. `wide`: the array begins at a multiple of 16 bytes.
template <class T> __device__ __forceinline__ Quad<T> load_quad(const T *from, Index first, Index end, bool wide) {
    Quad<T> quad;  // returned in one place: nvcc 13.0 would compile for minutes otherwise
    if (wide && first + 4 <= end) quad = *reinterpret_cast<const Quad<T> *>(from + first);
    else
#pragma unroll
        for (int own = 0; own < 4; ++own) quad.of[own] = from[min(first + own, end - 1)];
    return quad;
}

// Likewise; what is behind the end stays as it is.
template <class T>
__device__ __forceinline__ void store_quad(T *to, Index first, Index end, bool wide, const Quad<T> &quad) {
    if (wide && first + 4 <= end) {
        *reinterpret_cast<Quad<T> *>(to + first) = quad;
        return;
    }
#pragma unroll
    for (int own = 0; own < 4; ++own)
        if (first + own < end) to[first + own] = quad.of[own];
}
