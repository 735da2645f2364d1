// The batch: rows picked by the epoch's order, cast and scaled.
//
// gather_<type>:   out_BF[b, f] = x_NF[rows_B[b], f] * scale + offset, from the stored type to float32.
//                  Grid (B, ceil(F / blockDim.x)), any block; overwrites.
// gather_bytes_<n>: out[b, f] = y[rows_B[b], f] for elements of n bytes, without a cast. Same geometry.
//
// A row outside 0..N-1 is taken as the nearest one, as NumPy's mode="clip". Types of up to 16 bits and float32 are scaled
// in float32, wider ones in float64 and then rounded. Deterministic: every element is written by one thread.
#include "common.cuh"

template <typename T> struct Scaling { typedef double type; };
template <> struct Scaling<unsigned char> { typedef float type; };
template <> struct Scaling<signed char> { typedef float type; };
template <> struct Scaling<unsigned short> { typedef float type; };
template <> struct Scaling<short> { typedef float type; };
template <> struct Scaling<float> { typedef float type; };

__device__ inline long long clipped(long long row, long long N) {
    return row < 0 ? 0 : row >= N ? N - 1 : row;
}

template <typename T>
__device__ inline void gather(const T *x_NF, const long long *rows_B, float *out_BF, double scale, double offset,
                              long long N, int F) {
    typedef typename Scaling<T>::type Wide;
    const int f = blockIdx.y * blockDim.x + threadIdx.x;
    if (f >= F) return;
    const long long b = blockIdx.x;
    const T stored = x_NF[clipped(rows_B[b], N) * F + f];
    out_BF[b * F + f] = (float)((Wide)stored * (Wide)scale + (Wide)offset);
}

template <typename T>
__device__ inline void gather_bytes(const T *y_NF, const long long *rows_B, T *out_BF, long long N, int F) {
    const int f = blockIdx.y * blockDim.x + threadIdx.x;
    if (f >= F) return;
    const long long b = blockIdx.x;
    out_BF[b * F + f] = y_NF[clipped(rows_B[b], N) * F + f];
}

#define GATHER(NAME, T)                                                                                        \
    extern "C" __global__ void gather_##NAME(const T *x_NF, const long long *rows_B, float *out_BF,            \
                                             double scale, double offset, long long N, int F) {                \
        gather<T>(x_NF, rows_B, out_BF, scale, offset, N, F);                                                  \
    }
#define GATHER_BYTES(SIZE, T)                                                                                  \
    extern "C" __global__ void gather_bytes_##SIZE(const T *y_NF, const long long *rows_B, T *out_BF,          \
                                                   long long N, int F) {                                       \
        gather_bytes<T>(y_NF, rows_B, out_BF, N, F);                                                           \
    }

GATHER(uint8, unsigned char)
GATHER(int8, signed char)
GATHER(uint16, unsigned short)
GATHER(int16, short)
GATHER(uint32, unsigned int)
GATHER(int32, int)
GATHER(uint64, unsigned long long)
GATHER(int64, long long)
GATHER(float32, float)
GATHER(float64, double)
GATHER_BYTES(1, unsigned char)
GATHER_BYTES(2, unsigned short)
GATHER_BYTES(4, unsigned int)
GATHER_BYTES(8, unsigned long long)
