// Sums over the samples of a batch, in two passes: a value for each row, then their sum in a fixed order.
//
// count_correct:  rows_B[b] = 1 where the highest of scores_BC[b] (the first of equals; NaN is highest) is at the label.
// squared_error:  rows_B[b] = mean_f (y - target)^2; dy_BF = 2 (y - target) / F, where dy is not null; it may be y.
// absolute_error: rows_B[b] = mean_f |y - target|.
//                 A warp a row: grid ceil(B / 4), block 128. They overwrite.
// sum_rows:       first[0] += sum_b rows_2B[b], second[0] += sum_b rows_2B[B + b], summed in float64: a block each, so a
//                 grid of one makes the first sum alone. Grid 1 or 2, block 256. Adds.
//
// Deterministic: every sum has a fixed order.
#include "common.cuh"

extern "C" __global__ void count_correct(const float *scores_BC, const long long *labels_B, float *rows_B, long long B,
                                         int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float *scores_C = scores_BC + b * C;
    Best best;
    for (int c = lane; c < C; c += WARP) best.see(scores_C[c], c);
    best = warp_best(best);
    if (lane == 0) rows_B[b] = best.place == labels_B[b] ? 1.0f : 0.0f;
}

extern "C" __global__ void squared_error(const float *y_BF, const float *target_BF, float *dy_BF, float *rows_B,
                                         long long B, int F) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float twice = 2.0f / F;
    float sum = 0.0f;
    for (int f = lane; f < F; f += WARP) {
        const float difference = y_BF[b * F + f] - target_BF[b * F + f];
        sum += difference * difference;
        if (dy_BF != nullptr) dy_BF[b * F + f] = twice * difference;
    }
    sum = warp_sum(sum);
    if (lane == 0) rows_B[b] = sum / F;
}

extern "C" __global__ void absolute_error(const float *y_BF, const float *target_BF, float *rows_B, long long B, int F) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    float sum = 0.0f;
    for (int f = lane; f < F; f += WARP) sum += fabsf(y_BF[b * F + f] - target_BF[b * F + f]);
    sum = warp_sum(sum);
    if (lane == 0) rows_B[b] = sum / F;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_rows(const float *rows_2B, float *first, float *second,
                                                                    long long B) {
    __shared__ double sums[SUM_THREADS];
    const float *rows_B = rows_2B + blockIdx.x * B;
    double sum = 0.0;
    for (long long b = threadIdx.x; b < B; b += SUM_THREADS) sum += rows_B[b];
    sum = block_sum(sum, sums);
    float *total = blockIdx.x == 0 ? first : second;
    if (threadIdx.x == 0) total[0] += (float)sum;
}
