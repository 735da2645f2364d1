// Joins ranks' elements: sums in the tree of `TreeSum` (dptrain/comm/node_sum.py), with the bits of the sums that the
// host makes, or maxima, NaN where one is.
//
// **Run on the emulated driver only, on no hardware.**
#include "common.cuh"

// Numbers of subtrees that are complete are powers of two: fewer than there are bits in the number of ranks.
#define SUBTREES 24

template <class T, class O>
__device__ __forceinline__ void join_ranks(const T *const given, O *out, long long count, int ranks, bool greatest) {
    typedef typename dp_Computed<T>::type S;
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

// Makes out[n] of given[rank * count + n], for each type of which dptrain/backend/cuda/transfers/node_first.py names JOIN.
// Grid: any number of blocks of any number of threads.
#define SUM(T, O, NAME)                                                                                             \
    extern "C" __global__ void sum_##NAME(const T *given, O *out, long long count, int ranks) {                     \
        join_ranks(given, out, count, ranks, false);                                                                \
    }
#define JOIN(T, NAME)                                                                                               \
    SUM(T, T, NAME)                                                                                                 \
    extern "C" __global__ void max_##NAME(const T *given, T *out, long long count, int ranks) {                     \
        join_ranks(given, out, count, ranks, true);                                                                 \
    }
// Sums of half precision within a node, and then between nodes: rounded once, by the second.
#define JOIN_HALVES(T, NAME)                                                                                        \
    SUM(T, float, NAME##_to_float32)                                                                                \
    SUM(float, T, float32_to_##NAME)
