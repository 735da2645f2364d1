// Joins ranks' elements: sums in the tree of `TreeSum` (dptrain/comm/node_sum.py), with the bits of the sums that the
// host makes, or maxima, NaN where one is.
//
// **Run on the emulated driver only, on no hardware.**
#include "common.cuh"

// The type in which numbers are added up: half precision is rounded once, at the end.
template <class T> struct Summand { typedef T type; };
template <> struct Summand<dp_bfloat16> { typedef float type; };
template <> struct Summand<dp_float16> { typedef float type; };

// Numbers of subtrees that are complete are powers of two: fewer than there are bits in the number of ranks.
#define SUBTREES 24

template <class T, class O>
__device__ __forceinline__ void join_ranks(const T *const given, O *out, long long count, int ranks, bool greatest) {
    typedef typename Summand<T>::type S;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long n = blockIdx.x * (long long)blockDim.x + threadIdx.x; n < count; n += step) {
        if (greatest) {
            S most = (S)given[n];
            for (int rank = 1; rank < ranks; ++rank) most = Greatest::join(most, (S)given[rank * count + n]);
            out[n] = (O)most;
            continue;
        }
        S sums[SUBTREES];
        int trees = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            sums[trees++] = (S)given[rank * count + n];
            for (int whole = rank + 1; !(whole & 1); whole >>= 1, --trees) sums[trees - 2] = sums[trees - 2] + sums[trees - 1];
        }
        for (; trees > 1; --trees) sums[trees - 2] = sums[trees - 2] + sums[trees - 1];
        out[n] = (O)sums[0];
    }
}

// Makes out[n] of given[rank * count + n]. Grid: any number of blocks of any number of threads.
#define SUM(T, O, NAME)                                                                                             \
    extern "C" __global__ void sum_##NAME(const T *given, O *out, long long count, int ranks) {                     \
        join_ranks(given, out, count, ranks, false);                                                                \
    }
#define JOIN(T, NAME)                                                                                               \
    SUM(T, T, NAME)                                                                                                 \
    extern "C" __global__ void max_##NAME(const T *given, T *out, long long count, int ranks) {                     \
        join_ranks(given, out, count, ranks, true);                                                                 \
    }
JOIN(float, float32)
JOIN(double, float64)
JOIN(dp_bfloat16, bfloat16)
JOIN(dp_float16, float16)
JOIN(int, int32)
JOIN(long long, int64)
JOIN(unsigned char, uint8)
JOIN(unsigned int, uint32)
JOIN(unsigned long long, uint64)
// Within a node, and then between nodes: rounded once, by the second.
SUM(dp_bfloat16, float, bfloat16_to_float32)
SUM(float, dp_bfloat16, float32_to_bfloat16)
SUM(dp_float16, float, float16_to_float32)
SUM(float, dp_float16, float32_to_float16)
