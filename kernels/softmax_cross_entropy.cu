// Softmax and cross-entropy in one pass over each row of logits.
//
// softmax_cross_entropy: of integer labels, and the place of the highest logit.
//     values_B[b] = -log softmax(logits_BC)[b, labels_B[b]]
//     dlogits_BC = w_b (softmax(logits_BC) - onehot(labels_B)), where dlogits is not null; it may be logits
//     correct_B[b] = 1 where the highest of logits_BC[b] (the first of equals; NaN is highest) is at the label, else 0,
//     where correct is not null
//     A row whose label is `ignored` has value and gradient 0. Any other label outside 0..C-1 matches no class and reads
//     nothing. Whether a row is right costs no pass of its own: the highest logit is needed against overflow anyway.
// dense_cross_entropy: of targets t = keep target_BC + shift.
//     values_B[b] = -sum_c t_c log softmax(logits_BC)[b, c]
//     dlogits_BC = w_b (softmax(logits_BC) sum_c t_c - t), where dlogits is not null; it may be logits
//
// w_b is weights_B[b], or 1 where weights is null; values are not weighted: `sum_rows` (metrics.cu) does that.
// A warp a row: grid ceil(B / 4), block 128. They overwrite. Deterministic: sums over a row go through the warp in a
// fixed order.
#include "common.cuh"

extern "C" __global__ void softmax_cross_entropy(const float *logits_BC, const long long *labels_B,
                                                 const float *weights_B, long long ignored, float *dlogits_BC,
                                                 float *values_B, float *correct_B, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const long long label = labels_B[b];
    const float *x_C = logits_BC + b * C;
    Best best;
    for (int c = lane; c < C; c += WARP) best.see(x_C[c], c);
    best = warp_best(best);
    float sum = 0.0f, at_label = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        const float shifted = x_C[c] - best.score;
        sum += expf(shifted);
        if (c == label) at_label = shifted;
    }
    sum = warp_sum(sum);
    at_label = warp_sum(at_label);  // all lanes but one hold zero
    if (lane == 0) {
        values_B[b] = label == ignored ? 0.0f : logf(sum) - at_label;
        if (correct_B != nullptr) correct_B[b] = best.place == label ? 1.0f : 0.0f;
    }
    if (dlogits_BC == nullptr) return;
    const float weight = weights_B == nullptr ? 1.0f : weights_B[b];
    float *dx_C = dlogits_BC + b * C;
    for (int c = lane; c < C; c += WARP) {
        const float slope = expf(x_C[c] - best.score) / sum - (c == label ? 1.0f : 0.0f);
        dx_C[c] = label == ignored ? 0.0f : weight * slope;
    }
}

extern "C" __global__ void dense_cross_entropy(const float *logits_BC, const float *target_BC, float keep, float shift,
                                               const float *weights_B, float *dlogits_BC, float *values_B, long long B,
                                               int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float *x_C = logits_BC + b * C, *target_C = target_BC + b * C;
    Best best;
    for (int c = lane; c < C; c += WARP) best.see(x_C[c], c);
    best = warp_best(best);
    float sum = 0.0f, t_sum = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        sum += expf(x_C[c] - best.score);
        t_sum += keep * target_C[c] + shift;
    }
    sum = warp_sum(sum);
    t_sum = warp_sum(t_sum);
    const float log_sum = logf(sum), weight = weights_B == nullptr ? 1.0f : weights_B[b];
    float value = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        const float t = keep * target_C[c] + shift, shifted = x_C[c] - best.score;
        value += t * (log_sum - shifted);
        if (dlogits_BC != nullptr) dlogits_BC[b * C + c] = weight * (t_sum * (expf(shifted) / sum) - t);
    }
    value = warp_sum(value);
    if (lane == 0) values_B[b] = value;
}
