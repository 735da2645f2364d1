// A number for each sample of a batch, then the sum over the samples in a fixed order.
//
// highest:           places_B[b] = the place of the highest of scores_BC[b]: the first of equals; NaN is highest.
// top1_correct:  values_B[b] = 1 where that place is the label, else 0.
// label_in_top:      values_B[b] = 1 where fewer than k scores are higher than the label's, else 0. NaN is higher than any
//                    number and in no top, and so is no label outside 0..C-1.
// confusion:         the numbers of places where y > threshold and target is not 0 (both_B), where only the first
//                    (predicted_B), and where only the second (missed_B).
//                    A warp a row: grid ceil(B / 4), block 128. They overwrite.
// labels_other_than: values_B[b] = 1 where the label is not `ignored`, else 0. Grid-stride over B, any block. Overwrites.
// sum_rows:          total[0] += sum_b w_b values_B[b] and weight[0] += sum_b w_b, in float64, of up to two arrays: block
//                    0 makes the first total, 1 the first weight, 2 and 3 those of the second. w_b is 1 where weights
//                    is null; what is null is not summed. Grid 1, 2 or 4, block 256. Adds.
// add_totals:        totals += tail, as the op of that name says; a divisor of 0 becomes 1. Grid-stride, any block. Adds.
//
// Deterministic: every sum has a fixed order.
#include "common.cuh"

// As DIVISOR, ROWS, LOSS and FIRST_STATE in dptrain/backend/base.py.
enum Place { DIVISOR = 0, ROWS = 1, LOSS = 2, FIRST_STATE = 3 };

__device__ inline Best best_of_row(const float *scores_C, int C) {
    Best best;
    for (int c = threadIdx.x % WARP; c < C; c += WARP) best.see(scores_C[c], c);
    return warp_best(best);
}

extern "C" __global__ void highest(const float *scores_BC, long long *places_B, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const Best best = best_of_row(scores_BC + b * C, C);
    if (threadIdx.x % WARP == 0) places_B[b] = best.place;
}

extern "C" __global__ void top1_correct(const float *scores_BC, const long long *labels_B, float *values_B,
                                            long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const Best best = best_of_row(scores_BC + b * C, C);
    if (threadIdx.x % WARP == 0) values_B[b] = best.place == labels_B[b] ? 1.0f : 0.0f;
}

extern "C" __global__ void label_in_top(const float *scores_BC, const long long *labels_B, int k, float *values_B,
                                        long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const long long label = labels_B[b];
    const float *scores_C = scores_BC + b * C;
    const float own = label >= 0 && label < C ? scores_C[label] : NAN;
    float higher = 0.0f;  // a count: exact to 2^24
    for (int c = threadIdx.x % WARP; c < C; c += WARP) higher += scores_C[c] > own || isnan(scores_C[c]) ? 1.0f : 0.0f;
    higher = warp_sum(higher);
    if (threadIdx.x % WARP == 0) values_B[b] = higher < k && !isnan(own) ? 1.0f : 0.0f;
}

extern "C" __global__ void confusion(const float *y_BF, const float *target_BF, float threshold, float *both_B,
                                     float *predicted_B, float *missed_B, long long B, int F) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    float both = 0.0f, predicted = 0.0f, missed = 0.0f;  // counts: exact to 2^24
    for (int f = threadIdx.x % WARP; f < F; f += WARP) {
        const bool above = y_BF[b * F + f] > threshold, wanted = target_BF[b * F + f] != 0.0f;
        both += above && wanted ? 1.0f : 0.0f;
        predicted += above && !wanted ? 1.0f : 0.0f;
        missed += !above && wanted ? 1.0f : 0.0f;
    }
    both = warp_sum(both);
    predicted = warp_sum(predicted);
    missed = warp_sum(missed);
    if (threadIdx.x % WARP != 0) return;
    both_B[b] = both;
    predicted_B[b] = predicted;
    missed_B[b] = missed;
}

extern "C" __global__ void labels_other_than(const long long *labels_B, long long ignored, float *values_B,
                                             long long B) {
    for (long long b = grid_thread(); b < B; b += grid_threads()) values_B[b] = labels_B[b] == ignored ? 0.0f : 1.0f;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS)
    sum_rows(const float *values_1, const float *weights_1, float *total_1, float *weight_1, const float *values_2,
             const float *weights_2, float *total_2, float *weight_2, long long B) {
    __shared__ double sums[SUM_THREADS];
    const bool second = blockIdx.x >= 2, weighing = blockIdx.x % 2 == 1;
    const float *values_B = second ? values_2 : values_1, *weights_B = second ? weights_2 : weights_1;
    float *total = second ? (weighing ? weight_2 : total_2) : (weighing ? weight_1 : total_1);
    if (total == nullptr) return;  // the whole block
    double sum = 0.0;
    for (long long b = threadIdx.x; b < B; b += SUM_THREADS) {
        const double weight = weights_B == nullptr ? 1.0 : (double)weights_B[b];
        sum += weighing ? weight : weight * values_B[b];
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) total[0] += (float)sum;
}

extern "C" __global__ void add_totals(float *tail, double *totals, long long size) {
    const long long first = grid_thread();
    if (first == 0) {
        if (tail[DIVISOR] == 0.0f) tail[DIVISOR] = 1.0f;
        const double divisor = tail[DIVISOR], rows = tail[ROWS], loss = tail[LOSS];
        totals[ROWS] += rows;
        // So that no rounding comes between where the loss is a mean over all rows.
        totals[LOSS] += divisor == rows ? loss : loss * rows / divisor;
    }
    for (long long i = FIRST_STATE + first; i < size; i += grid_threads()) totals[i] += tail[i];
}
