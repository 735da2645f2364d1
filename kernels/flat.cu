// Elementwise ops on buffers of any shape, taken as flat.
//
// fill_float32, fill_float64:             out[i] = value
// add_float32, add_float64, add_float32_float64: out[i] += source[i]; the last adds float32 to float64. Adds.
// multiply:                               out[i] = a[i] * b[i]; out may be either
// affine:                                 y[i] = x[i] * scale + offset; y may be x
//
// Grid-stride over size, any block. They overwrite unless it says "adds". Deterministic: elementwise.
#include "common.cuh"

template <typename T> __device__ inline void fill(T *out, long long size, double value) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) out[i] = (T)value;
}

template <typename S, typename T> __device__ inline void add(const S *source, T *out, long long size) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) out[i] += (T)source[i];
}

extern "C" __global__ void fill_float32(float *out, long long size, double value) { fill<float>(out, size, value); }
extern "C" __global__ void fill_float64(double *out, long long size, double value) { fill<double>(out, size, value); }

extern "C" __global__ void add_float32(const float *source, float *out, long long size) {
    add<float, float>(source, out, size);
}
extern "C" __global__ void add_float64(const double *source, double *out, long long size) {
    add<double, double>(source, out, size);
}
extern "C" __global__ void add_float32_float64(const float *source, double *out, long long size) {
    add<float, double>(source, out, size);
}

extern "C" __global__ void multiply(const float *a, const float *b, float *out, long long size) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) out[i] = a[i] * b[i];
}

extern "C" __global__ void affine(const float *x, float *y, long long size, float scale, float offset) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) y[i] = x[i] * scale + offset;
}
