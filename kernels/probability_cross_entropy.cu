// Cross-entropy of outputs y that are probabilities, or shares of their row's sum, of any origin.
//
// p = y_BC / sum_c y_BC, clipped to [EPSILON, 1 - EPSILON] for the logarithm.
// values_B[b] = -sum_c t_c log p_c
// dy_BC = w_b (g_c - sum_c g_c p_c) / sum_c y, g = -t / p where p is inside the bounds, else 0; where dy is not null; it
// may be y. w_b is weights_B[b], or 1 where weights is null.
// t = onehot(labels_B), and a row whose label is `ignored` has value and gradient 0; or, where labels is null,
// t = keep target_BC + shift.
//
// A warp a row: grid ceil(B / 4), block 128. Overwrites. Deterministic: sums over a row go through the warp in a fixed
// order.
#include "common.cuh"

extern "C" __global__ void probability_cross_entropy(const float *y_BC, const long long *labels_B,
                                                     const float *target_BC, float keep, float shift,
                                                     long long ignored, const float *weights_B, float *dy_BC,
                                                     float *values_B, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const bool labelled = labels_B != nullptr;
    const long long label = labelled ? labels_B[b] : 0;
    const bool skipped = labelled && label == ignored;
    const float *y_C = y_BC + b * C;
    float sum = 0.0f;
    for (int c = lane; c < C; c += WARP) sum += y_C[c];
    sum = warp_sum(sum);
    float value = 0.0f, through_sum = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        const float p = y_C[c] / sum, clipped = clip_probability(p);
        const float t = labelled ? (c == label ? 1.0f : 0.0f) : keep * target_BC[b * C + c] + shift;
        value -= t * logf(clipped);
        if (p == clipped) through_sum -= t / p * p;
    }
    value = warp_sum(value);
    through_sum = warp_sum(through_sum);
    if (lane == 0) values_B[b] = skipped ? 0.0f : value;
    if (dy_BC == nullptr) return;
    const float weight = weights_B == nullptr ? 1.0f : weights_B[b];
    for (int c = lane; c < C; c += WARP) {
        const float p = y_C[c] / sum;
        const float t = labelled ? (c == label ? 1.0f : 0.0f) : keep * target_BC[b * C + c] + shift;
        const float slope = p == clip_probability(p) ? -t / p : 0.0f;
        dy_BC[b * C + c] = skipped ? 0.0f : weight * (slope - through_sum) / sum;
    }
}
