// Softmax, cross-entropy of integer labels and the place of the highest logit in one pass over each row.
//
// rows_2B[b] = -log softmax(logits_BC)[b, labels_B[b]]
// rows_2B[B + b] = 1 where the highest of logits_BC[b] (the first of equals; NaN is highest) is at the label, else 0
// dlogits_BC = softmax(logits_BC) - onehot(labels_B), where dlogits is not null; it may be logits.
//
// A warp a row: grid ceil(B / 4), block 128. Overwrites rows_2B and dlogits. `sum_rows` (metrics.cu) adds each half of
// rows_2B to its total in a fixed order afterwards: deterministic. A label outside 0..C-1 matches no class and reads
// nothing. Whether a row is right costs no pass of its own: the highest logit is needed against overflow anyway.
#include "common.cuh"

extern "C" __global__ void softmax_cross_entropy(const float *logits_BC, const long long *labels_B, float *dlogits_BC,
                                                 float *rows_2B, long long B, int C) {
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
        rows_2B[b] = logf(sum) - at_label;
        rows_2B[B + b] = best.place == label ? 1.0f : 0.0f;
    }
    if (dlogits_BC == nullptr) return;
    float *dx_C = dlogits_BC + b * C;
    for (int c = lane; c < C; c += WARP) dx_C[c] = expf(x_C[c] - best.score) / sum - (c == label ? 1.0f : 0.0f);
}
