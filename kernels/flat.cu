// Elementwise ops on buffers of any shape, taken as flat, and sums over one.
//
// fill_float32, fill_float64:             out[i] = value
// add_float32, add_float64, add_float32_float64: out[i] += source[i]; the last adds float32 to float64. Adds.
// affine:                                 y[i] = x[i] * scale + offset
// axpby:                                  out[i] = a x[i] + b y[i]
// multiply, divide, maximum, minimum:     out[i] = a[i] op b[i step]; step 0 takes b[0] for all, else step is 1
// absolute, sign, square_root:            out[i] = op x[i]
// clip:                                   out[i] = x[i], but low below low and high above high
// clip_divisors:                          divisors[e] = max(sqrt(squares[e]), weight[0] limit) / limit in float64; NaN
//                                         where the root is not finite
//
// Grid-stride over size, any block. They overwrite unless it says "adds"; the output may be an operand of its own size.
// Deterministic: elementwise. NaN stays NaN, where fmaxf and fminf would drop it.
//
// sum, squared_norm, count_nonfinite: partials[c] = the float64 sum of x[i], of x[i]^2, or of 1 where x[i] is NaN or
//                                     infinite, over the c-th `chunk` elements. Any grid: blocks stride over the
//                                     chunks; block 256. Overwrites all ceil(size / chunk) partials.
// regularize: partials[c] = weight[1] * the float64 sum of l1 |p[i]| + l2 p[i]^2, launched as these, and
//             gradient[i] += weight[0] * (l1 sign(p[i]) + 2 l2 p[i]), where gradient is not null. Adds to it.
// sum_chunks:                         total[0] += sum_c partials[c]. One block of 256. Adds.
//
// Deterministic: who adds what to what, and in which order, depends on size and chunk alone, not on the grid.
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

extern "C" __global__ void affine(const float *x, float *y, long long size, float scale, float offset) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) y[i] = x[i] * scale + offset;
}

extern "C" __global__ void axpby(const float *x, const float *y, float *out, long long size, float a, float b) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) out[i] = a * x[i] + b * y[i];
}

#define BINARY(NAME, VALUE)                                                                                       \
    extern "C" __global__ void NAME(const float *a_P, const float *b_P, float *out, long long size, int step) {  \
        for (long long i = grid_thread(); i < size; i += grid_threads()) {                                       \
            const float a = a_P[i], b = b_P[i * step];                                                           \
            out[i] = VALUE;                                                                                      \
        }                                                                                                        \
    }

BINARY(multiply, a * b)
BINARY(divide, a / b)
BINARY(maximum, a >= b || isnan(a) ? a : b)
BINARY(minimum, a <= b || isnan(a) ? a : b)

#define UNARY(NAME, VALUE)                                                                                        \
    extern "C" __global__ void NAME(const float *x_P, float *out, long long size) {                              \
        for (long long i = grid_thread(); i < size; i += grid_threads()) {                                       \
            const float x = x_P[i];                                                                              \
            out[i] = VALUE;                                                                                      \
        }                                                                                                        \
    }

UNARY(absolute, fabsf(x))
UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x)
UNARY(square_root, sqrtf(x))

extern "C" __global__ void clip(const float *x, float *out, long long size, float low, float high) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) {
        const float value = x[i];
        out[i] = value < low ? low : value > high ? high : value;
    }
}

extern "C" __global__ void clip_divisors(const double *squares, const float *weight, float *divisors, long long size,
                                         double limit) {
    const double least = weight[0] * limit;
    for (long long e = grid_thread(); e < size; e += grid_threads()) {
        const double norm = sqrt(squares[e]);
        divisors[e] = isfinite(norm) ? (float)((norm > least ? norm : least) / limit) : NAN;
    }
}

// partials[c] = the sum of term(i) over the elements i of chunk c.
template <typename Term>
__device__ inline void chunk_sums(double *partials, long long size, int chunk, Term term) {
    __shared__ double sums[SUM_THREADS];
    const long long chunks = (size + chunk - 1) / chunk;
    for (long long c = blockIdx.x; c < chunks; c += gridDim.x) {
        const long long end = min((c + 1) * chunk, size);
        double sum = 0.0;
        for (long long i = c * chunk + threadIdx.x; i < end; i += SUM_THREADS) sum += term(i);
        sum = block_sum(sum, sums);
        if (threadIdx.x == 0) partials[c] = sum;
    }
}

#define CHUNK_SUMS(NAME, TERM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(SUM_THREADS) NAME(const float *x, double *partials,             \
                                                                   long long size, int chunk) {                  \
        chunk_sums(partials, size, chunk, [=](long long i) {                                                     \
            const float value = x[i];                                                                            \
            return TERM;                                                                                         \
        });                                                                                                      \
    }

CHUNK_SUMS(sum, (double)value)
CHUNK_SUMS(squared_norm, (double)value * value)
CHUNK_SUMS(count_nonfinite, isfinite(value) ? 0.0 : 1.0)

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    regularize(const float *p, float *gradient, const float *weight, double *partials, long long size, int chunk,
               float l1, float l2) {
    const float divisor = weight[0], rows = weight[1];
    chunk_sums(partials, size, chunk, [=](long long i) {
        const float value = p[i];
        const float sign = value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : value;  // of zero zero, of NaN NaN
        if (gradient != nullptr) gradient[i] += divisor * (l1 * sign + 2.0f * l2 * value);
        double term = 0.0;
        if (l1 != 0.0f) term += l1 * fabs((double)value);
        if (l2 != 0.0f) term += l2 * ((double)value * (double)value);
        return rows * term;
    });
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_chunks(const double *partials, double *total,
                                                                     long long chunks) {
    __shared__ double sums[SUM_THREADS];
    double sum = 0.0;
    for (long long c = threadIdx.x; c < chunks; c += SUM_THREADS) sum += partials[c];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) total[0] += sum;
}
