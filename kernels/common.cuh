// What every kernel file shares: sums over a warp and a block in a fixed order, and the activations.
//
// Legend of shape suffixes, as in dptrain/backend/base.py: N rows of the data set, B rows of a batch, F features of a
// sample, I inputs, O outputs of a dense layer, C classes, P elements of a flat buffer. All arrays are dense and
// row-major. No kernel uses floating-point atomics: the same input gives the same bits on every run.
#pragma once

#define WARP 32
#define ALL_LANES 0xffffffffu

// The numbers that dptrain/backend/cuda.py passes for the activations' names.
enum Activation { LINEAR = 0, RELU = 1, SIGMOID = 2, TANH = 3 };

// Sum over the lanes of a warp, the same on all lanes: each step adds the same two numbers on both sides.
__device__ inline float warp_sum(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// Highest value over the lanes of a warp; NaN only where all are.
__device__ inline float warp_max(float value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// activation(x). NaN stays NaN, so that divergence is seen.
__device__ inline float activate(float x, int activation) {
    switch (activation) {
        case RELU: return x < 0.0f ? 0.0f : x;
        case SIGMOID: return 0.5f * tanhf(0.5f * x) + 0.5f;
        case TANH: return tanhf(x);
        default: return x;
    }
}

// The activation's derivative as a function of its output y.
__device__ inline float activation_slope(float y, int activation) {
    switch (activation) {
        case RELU: return y > 0.0f ? 1.0f : 0.0f;
        case SIGMOID: return y - y * y;
        case TANH: return 1.0f - y * y;
        default: return 1.0f;
    }
}

// This thread's number in a one-dimensional grid, and the number of threads.
__device__ inline long long grid_thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline long long grid_threads() { return (long long)gridDim.x * blockDim.x; }
