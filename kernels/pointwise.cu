// Errors between an output y and its target t = keep target + shift, averaged over each row.
//
// values_B[b] = mean_f error(y_BF, t_BF)
// dy_BF = w_b error'(y_BF, t_BF) / F, where dy is not null; it may be y. w_b is weights_B[b], or 1 where weights is null.
//
// The errors are those of `Backend.pointwise_loss`; EQUAL and SAME_SIDE are for metrics and have no gradient.
// A warp a row: grid ceil(B / 4), block 128. Overwrites. Deterministic: sums over a row go through the warp in a fixed
// order.
#include "common.cuh"

// In the order of POINTWISE in dptrain/backend/base.py.
enum Kind { SQUARED = 0, ABSOLUTE = 1, HUBER = 2, BINARY = 3, BINARY_LOGITS = 4, EQUAL = 5, SAME_SIDE = 6 };

struct Error {
    float value, slope;
};

__device__ inline Error error_of(int kind, float y, float t, float parameter) {
    const float e = y - t;
    switch (kind) {
        case SQUARED: return {e * e, 2.0f * e};
        case ABSOLUTE: return {fabsf(e), e > 0.0f ? 1.0f : e < 0.0f ? -1.0f : e};  // 0 and NaN stay
        case HUBER: {
            // e^2 / 2 near, delta |e| - delta^2 / 2 far: both are n (e - n / 2) of the clipped error n.
            const float n = e > parameter ? parameter : e < -parameter ? -parameter : e;
            return {n * (e - 0.5f * n), n};
        }
        case BINARY: {
            const float p = clip_probability(y);
            return {-(t * logf(p) + (1.0f - t) * logf(1.0f - p)), p == y ? (p - t) / (p * (1.0f - p)) : 0.0f};
        }
        case BINARY_LOGITS:
            return {(y < 0.0f ? 0.0f : y) - y * t + log1pf(expf(-fabsf(y))), activate(y, SIGMOID) - t};
        case EQUAL: return {y == t ? 1.0f : 0.0f, 0.0f};
        default: return {(y > parameter ? 1.0f : 0.0f) == t ? 1.0f : 0.0f, 0.0f};
    }
}

extern "C" __global__ void pointwise_loss(const float *y_BF, const float *target_BF, int kind, float parameter,
                                          float keep, float shift, const float *weights_B, float *dy_BF,
                                          float *values_B, long long B, int F) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float weight = weights_B == nullptr ? 1.0f : weights_B[b];
    float sum = 0.0f;
    for (int f = lane; f < F; f += WARP) {
        const Error error = error_of(kind, y_BF[b * F + f], keep * target_BF[b * F + f] + shift, parameter);
        sum += error.value;
        if (dy_BF != nullptr) dy_BF[b * F + f] = weight * error.slope / F;
    }
    sum = warp_sum(sum);
    if (lane == 0) values_B[b] = sum / F;
}
