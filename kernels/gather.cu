// The batch: rows picked by the epoch's order, cast and scaled.
//
// gather_<type>:   out_BF[b, f] = x_NF[rows_B[b], f] * scale + offset, from the stored type to float32.
//                  Grid (B, ceil(F / blockDim.x)), any block; overwrites.
// gather_<type>_quads: the same for one-byte types, four elements a thread, where F is a multiple of 4, x_NF lies at a
//                  multiple of 4 bytes and out_BF at one of 16. Grid (B, ceil(F / 4 / blockDim.x)), any block.
//                  The same bits: both scale by `scaled`.
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

template <typename T> __device__ inline float scaled(T stored, double scale, double offset) {
    typedef typename Scaling<T>::type Wide;
    return (float)((Wide)stored * (Wide)scale + (Wide)offset);
}

template <typename T>
__device__ inline void gather(const T *x_NF, const long long *rows_B, float *out_BF, double scale, double offset,
                              long long N, int F) {
    const int f = blockIdx.y * blockDim.x + threadIdx.x;
    if (f >= F) return;
    const long long b = blockIdx.x;
    out_BF[b * F + f] = scaled(x_NF[clipped(rows_B[b], N) * F + f], scale, offset);
}

// Quad is the vector of four T. A warp reads 128 bytes and writes 512, both without gaps: with 16 bytes a thread its
// stores would leave gaps that the next instructions fill.
template <typename Quad>
__device__ inline void gather_quads(const Quad *x_NQ, const long long *rows_B, float4 *out_BQ, double scale,
                                    double offset, long long N, int Q) {
    const int q = blockIdx.y * blockDim.x + threadIdx.x;
    if (q >= Q) return;
    const long long b = blockIdx.x;
    const Quad stored = x_NQ[clipped(rows_B[b], N) * Q + q];
    out_BQ[b * Q + q] = make_float4(scaled(stored.x, scale, offset), scaled(stored.y, scale, offset),
                                    scaled(stored.z, scale, offset), scaled(stored.w, scale, offset));
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
#define GATHER_QUADS(NAME, Quad)                                                                               \
    extern "C" __global__ void gather_##NAME##_quads(const Quad *x_NQ, const long long *rows_B, float4 *out_BQ,   \
                                                     double scale, double offset, long long N, int Q) {           \
        gather_quads<Quad>(x_NQ, rows_B, out_BQ, scale, offset, N, Q);                                            \
    }
#define GATHER_BYTES(SIZE, T)                                                                                  \
    extern "C" __global__ void gather_bytes_##SIZE(const T *y_NF, const long long *rows_B, T *out_BF,          \
                                                   long long N, int F) {                                       \
        gather_bytes<T>(y_NF, rows_B, out_BF, N, F);                                                           \
    }

GATHER(uint8, unsigned char)
GATHER(int8, signed char)
GATHER_QUADS(uint8, uchar4)
GATHER_QUADS(int8, char4)
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
