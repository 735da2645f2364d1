// What every kernel file shares: sums over a warp and a block in a fixed order, and the activations.
//
// Legend of shape suffixes, as in dptrain/backend/base.py: N rows of the data set, B rows of a batch, F features of a
// sample, I inputs, O outputs of a dense layer, C classes, P elements of a flat buffer. All arrays are dense and
// row-major. No kernel uses floating-point atomics: the same input gives the same bits on every run.
#pragma once

#define WARP 32
#define ALL_LANES 0xffffffffu

// The numbers that dptrain/backend/cuda/products.py gives for the activations' names.
// Those from ELU on are too long for the end of a matrix product and have a pass of their own.
enum Activation {
    LINEAR = 0, RELU = 1, SIGMOID = 2, TANH = 3, LEAKY_RELU = 4,
    ELU = 5, SELU = 6, SOFTPLUS = 7, EXPONENTIAL = 8, GELU = 9, SILU = 10
};

// As DEFAULT_ALPHA, SELU_SCALE and SELU_ALPHA in dptrain/backend/base.py.
#define LEAKY_RELU_ALPHA 0.2f
#define SELU_SCALE 1.0507009873554805f
#define SELU_ALPHA 1.6732632423543772f

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

// The highest score of a row and its place: the first of equals; NaN counts as the highest, as in NumPy's argmax.
struct Best {
    float score;
    int place;  // -1: no score seen yet, which any score beats

    __device__ inline Best() : score(-INFINITY), place(-1) {}

    // Take a score whose place is higher than all seen before.
    __device__ inline void see(float other, int other_place) {
        if (place < 0 || other > score || (isnan(other) && !isnan(score))) {
            score = other;
            place = other_place;
        }
    }
};

// The best of all lanes' bests, the same on all lanes.
__device__ inline Best warp_best(Best best) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const float score = __shfl_xor_sync(ALL_LANES, best.score, distance);
        const int place = __shfl_xor_sync(ALL_LANES, best.place, distance);
        const bool equal = score == best.score || (isnan(score) && isnan(best.score));
        const bool higher = score > best.score || (isnan(score) && !isnan(best.score));
        if (place >= 0 && (best.place < 0 || higher || (equal && place < best.place))) {
            best.score = score;
            best.place = place;
        }
    }
    return best;
}

// Threads of a block that calls `block_sum`.
#define SUM_THREADS 256

// Sum over a block of SUM_THREADS in a fixed order, in its first thread. `shared` holds SUM_THREADS numbers and may be
// passed again at once: after the last barrier a thread reads no other thread's number.
__device__ inline double block_sum(double value, double *shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (int distance = SUM_THREADS / 2; distance >= WARP; distance /= 2) {
        if (threadIdx.x < distance) shared[threadIdx.x] += shared[threadIdx.x + distance];
        __syncthreads();
    }
    if (threadIdx.x >= WARP) return 0.0;
    value = shared[threadIdx.x];
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// activation(x) of those below FUSED. NaN stays NaN, so that divergence is seen.
__device__ inline float activate(float x, int activation) {
    switch (activation) {
        case RELU: return x < 0.0f ? 0.0f : x;
        case SIGMOID: return 0.5f * tanhf(0.5f * x) + 0.5f;
        case TANH: return tanhf(x);
        case LEAKY_RELU: return x > 0.0f ? x : LEAKY_RELU_ALPHA * x;
        default: return x;
    }
}

// A probability kept from 0 and 1, as EPSILON in dptrain/backend/base.py has it. NaN stays NaN.
__device__ inline float clip_probability(float p) {
    const float low = (float)1e-7, high = (float)(1.0 - 1e-7);
    return p < low ? low : p > high ? high : p;
}

// activation(x) of any; alpha is the parameter of leaky_relu and elu.
__device__ inline float activate_any(float x, int activation, float alpha) {
    switch (activation) {
        case LEAKY_RELU: return x > 0.0f ? x : alpha * x;
        case ELU: return x > 0.0f ? x : alpha * expm1f(x);
        case SELU: return x > 0.0f ? SELU_SCALE * x : SELU_SCALE * SELU_ALPHA * expm1f(x);
        case SOFTPLUS: return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
        case EXPONENTIAL: return expf(x);
        case GELU: return x * (0.5f * erff(x * 0.70710678f) + 0.5f);
        case SILU: return x * (0.5f * tanhf(0.5f * x) + 0.5f);
        default: return activate(x, activation);
    }
}

// The activation's derivative as a function of its output y; of gelu and silu y is the input.
__device__ inline float activation_slope(float y, int activation, float alpha) {
    switch (activation) {
        case RELU: return y > 0.0f ? 1.0f : 0.0f;
        case SIGMOID: return y - y * y;
        case TANH: return 1.0f - y * y;
        case LEAKY_RELU: return y > 0.0f ? 1.0f : alpha;
        case ELU: return y > 0.0f ? 1.0f : y + alpha;
        case SELU: return y > 0.0f ? SELU_SCALE : y + SELU_SCALE * SELU_ALPHA;
        case SOFTPLUS: return -expm1f(-y);
        case EXPONENTIAL: return y;
        case GELU: return 0.5f * erff(y * 0.70710678f) + 0.5f + y * 0.39894228f * expf(-0.5f * y * y);
        case SILU: {
            const float s = 0.5f * tanhf(0.5f * y) + 0.5f;
            return s * (1.0f + y * (1.0f - s));
        }
        default: return 1.0f;
    }
}

// This thread's number in a one-dimensional grid, and the number of threads.
__device__ inline long long grid_thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline long long grid_threads() { return (long long)gridDim.x * blockDim.x; }
