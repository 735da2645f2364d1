// Softmax and cross-entropy of integer labels in one pass over each row.
//
// rows_B[b] = -log softmax(logits_BC)[b, labels_B[b]]
// dlogits_BC = softmax(logits_BC) - onehot(labels_B), where dlogits is not null; it may be logits.
//
// A warp a row: grid ceil(B / 4), block 128. Overwrites rows_B and dlogits. `sum_rows` (metrics.cu) adds rows_B to the
// loss in a fixed order afterwards: deterministic. A label outside 0..C-1 matches no class and reads nothing.
#include "common.cuh"

extern "C" __global__ void softmax_cross_entropy(const float *logits_BC, const long long *labels_B, float *dlogits_BC,
                                                 float *rows_B, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const long long label = labels_B[b];
    const float *x_C = logits_BC + b * C;
    float highest = -INFINITY;
    for (int c = lane; c < C; c += WARP) highest = fmaxf(highest, x_C[c]);
    highest = warp_max(highest);
    float sum = 0.0f, at_label = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        const float shifted = x_C[c] - highest;
        sum += expf(shifted);
        if (c == label) at_label = shifted;
    }
    sum = warp_sum(sum);
    at_label = warp_sum(at_label);  // all lanes but one hold zero
    if (lane == 0) rows_B[b] = logf(sum) - at_label;
    if (dlogits_BC == nullptr) return;
    float *dx_C = dlogits_BC + b * C;
    for (int c = lane; c < C; c += WARP) dx_C[c] = expf(x_C[c] - highest) / sum - (c == label ? 1.0f : 0.0f);
}
