// Batch normalization: statistics of the columns of x_BF over all ranks, and what they make of x.
//
// batch_sums:          partials[z] (F,)    = sum of x over rows 256 z to 256 z + 255, float64.
// batch_squares:       partials[z] (F,)    = the same of (x - mean)^2, mean = totals_F1[f] / totals_F1[F], float64.
// batch_gradient_sums: partials[z] (2, F)  = the same of dy and of dy xhat, float64; xhat = (x - mean) / deviation.
//                      Grid (ceil(F / 32), ceil(B / 256), 1 at least), block (32, 8). Overwrite.
// batch_totals:        sums[i] = sum_z partials[z][i], in order, for i below F or 2 F; as float32 also first[i] for i
//                      below F and second[i - F] for the others, where these are not null. Grid-stride. Overwrites.
// batch_statistics:    mean = totals[f] / totals[F], variance = squares / totals[F],
//                      moving = moving momentum + it (1 - momentum). Grid-stride over F. Overwrites.
// batch_normalize:     y = (x - mean) gamma / deviation + beta; null gamma is 1, null beta 0; y may be x.
// batch_normalize_backward: dx = (dy - sums[f] / n - xhat sums[F + f] / n) gamma / deviation, n = totals[F]; with null
//                      sums dx = dy gamma / deviation; dx may be dy. Both grid-stride over B F, any block. Overwrite.
//
// deviation is sqrt(variance + epsilon). Between a rank's sums and what is made of them the sums go over the ranks,
// n with them. Two passes for the variance: the squares of large means do not cancel.
// Deterministic: rows are summed in a fixed order that depends on B alone; no row gives zeros.
// Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015.
#include "common.cuh"

// Rows whose terms a block of COLUMNS x LANES threads adds, a lane every LANES-th of them.
#define ROWS 256
#define COLUMNS 32
#define LANES 8

// The column of this thread in `column_sums`, the last one for threads beyond it, which add nothing.
__device__ inline int own_column(int F) { return min((int)(blockIdx.x * COLUMNS + threadIdx.x), F - 1); }

// partials[blockIdx.y] (SUMS, F) = sums over a block's rows of what `term(i, sums)` adds for element i of its column.
template <int SUMS, typename Term>
__device__ inline void column_sums(double *partials, long long B, int F, Term term) {
    __shared__ double shared[SUMS][LANES][COLUMNS + 1];
    const int f = blockIdx.x * COLUMNS + threadIdx.x;
    double sums[SUMS];
    for (int s = 0; s < SUMS; ++s) sums[s] = 0.0;
    if (f < F) {
        const long long end = min((long long)(blockIdx.y + 1) * ROWS, B);
        for (long long b = (long long)blockIdx.y * ROWS + threadIdx.y; b < end; b += LANES) term(b * F + f, sums);
    }
    for (int s = 0; s < SUMS; ++s) shared[s][threadIdx.y][threadIdx.x] = sums[s];
    __syncthreads();
    if (threadIdx.y != 0 || f >= F) return;
    for (int s = 0; s < SUMS; ++s) {
        double sum = sums[s];
        for (int lane = 1; lane < LANES; ++lane) sum += shared[s][lane][threadIdx.x];
        partials[((long long)blockIdx.y * SUMS + s) * F + f] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(COLUMNS *LANES)
    batch_sums(const float *x_BF, double *partials, long long B, int F) {
    column_sums<1>(partials, B, F, [=](long long i, double *sums) { sums[0] += x_BF[i]; });
}

extern "C" __global__ void __launch_bounds__(COLUMNS *LANES)
    batch_squares(const float *x_BF, const double *totals_F1, double *partials, long long B, int F) {
    const double mean = totals_F1[own_column(F)] / totals_F1[F];
    column_sums<1>(partials, B, F, [=](long long i, double *sums) {
        const double difference = x_BF[i] - mean;
        sums[0] += difference * difference;
    });
}

extern "C" __global__ void __launch_bounds__(COLUMNS *LANES)
    batch_gradient_sums(const float *x_BF, const float *dy_BF, const float *mean_F, const float *variance_F,
                        float epsilon, double *partials, long long B, int F) {
    const float mean = mean_F[own_column(F)], inverse = 1.0f / sqrtf(variance_F[own_column(F)] + epsilon);
    column_sums<2>(partials, B, F, [=](long long i, double *sums) {
        sums[0] += dy_BF[i];
        sums[1] += dy_BF[i] * ((x_BF[i] - mean) * inverse);
    });
}

extern "C" __global__ void batch_totals(const double *partials, double *sums, float *first_F, float *second_F, int F,
                                        int columns, int count) {
    for (long long i = grid_thread(); i < columns; i += grid_threads()) {
        double sum = 0.0;
        for (int z = 0; z < count; ++z) sum += partials[(long long)z * columns + i];
        sums[i] = sum;
        if (i < F) {
            if (first_F != nullptr) first_F[i] = (float)sum;
        } else if (second_F != nullptr) {
            second_F[i - F] = (float)sum;
        }
    }
}

extern "C" __global__ void batch_statistics(const double *totals_F1, const double *squares_F, float momentum,
                                            float rest, float *moving_mean_F, float *moving_variance_F, float *mean_F,
                                            float *variance_F, int F) {
    for (long long f = grid_thread(); f < F; f += grid_threads()) {
        const float mean = (float)(totals_F1[f] / totals_F1[F]), variance = (float)(squares_F[f] / totals_F1[F]);
        moving_mean_F[f] = moving_mean_F[f] * momentum + mean * rest;
        moving_variance_F[f] = moving_variance_F[f] * momentum + variance * rest;
        mean_F[f] = mean;
        variance_F[f] = variance;
    }
}

extern "C" __global__ void batch_normalize(const float *x_BF, const float *mean_F, const float *variance_F,
                                           const float *gamma_F, const float *beta_F, float epsilon, float *y_BF,
                                           long long size, int F) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) {
        const int f = (int)(i % F);
        const float gamma = gamma_F == nullptr ? 1.0f : gamma_F[f], beta = beta_F == nullptr ? 0.0f : beta_F[f];
        y_BF[i] = (x_BF[i] - mean_F[f]) * (gamma / sqrtf(variance_F[f] + epsilon)) + beta;
    }
}

extern "C" __global__ void batch_normalize_backward(const float *x_BF, const float *dy_BF, const float *mean_F,
                                                    const float *variance_F, const float *gamma_F, float epsilon,
                                                    const double *sums_2F, const double *totals_F1, float *dx_BF,
                                                    long long size, int F) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) {
        const int f = (int)(i % F);
        const float deviation = sqrtf(variance_F[f] + epsilon), gamma = gamma_F == nullptr ? 1.0f : gamma_F[f];
        float gradient = dy_BF[i];
        if (sums_2F != nullptr) {
            const float xhat = (x_BF[i] - mean_F[f]) / deviation;
            const float mean_dy = (float)(sums_2F[f] / totals_F1[F]);
            const float mean_dy_xhat = (float)(sums_2F[F + f] / totals_F1[F]);
            gradient = gradient - mean_dy - xhat * mean_dy_xhat;
        }
        dx_BF[i] = gradient * (gamma / deviation);
    }
}
