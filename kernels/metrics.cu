// Sums over the samples of a batch, in two passes: a value for each row, then their sum in a fixed order.
//
// count_correct:  rows_B[b] = 1 where the highest of scores_BC[b] (the first of equals; NaN is highest) is at the label.
// squared_error:  rows_B[b] = mean_f (y - target)^2; dy_BF = 2 (y - target) / F, where dy is not null; it may be y.
// absolute_error: rows_B[b] = mean_f |y - target|.
//                 A warp a row: grid ceil(B / 4), block 128. They overwrite.
// sum_rows:       total[0] += sum_b rows_B[b], summed in float64. One block of 256. Adds.
//
// Deterministic: every sum has a fixed order.
#include "common.cuh"

extern "C" __global__ void count_correct(const float *scores_BC, const long long *labels_B, float *rows_B, long long B,
                                         int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float *scores_C = scores_BC + b * C;
    float best = -INFINITY;
    int place = C;  // no class yet: any class beats it
    for (int c = lane; c < C; c += WARP) {
        const float score = scores_C[c];
        if (place == C || score > best || (isnan(score) && !isnan(best))) {
            best = score;
            place = c;
        }
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, distance);
        const int other_place = __shfl_xor_sync(ALL_LANES, place, distance);
        const bool equal = other == best || (isnan(other) && isnan(best));
        const bool higher = other > best || (isnan(other) && !isnan(best));
        if (other_place < C && (place == C || higher || (equal && other_place < place))) {
            best = other;
            place = other_place;
        }
    }
    if (lane == 0) rows_B[b] = place == labels_B[b] ? 1.0f : 0.0f;
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

extern "C" __global__ void __launch_bounds__(256) sum_rows(const float *rows_B, float *total, long long B) {
    __shared__ double sums[256];
    double sum = 0.0;
    for (long long b = threadIdx.x; b < B; b += 256) sum += rows_B[b];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int distance = 128; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
        __syncthreads();
    }
    if (threadIdx.x == 0) total[0] += (float)sums[0];
}
