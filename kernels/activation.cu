// Activations and softmax as ops of their own.
//
// activation_forward:  y[i] = activation(x[i]); y may be x.               Grid-stride over size, any block.
// activation_backward: dx[i] = dy[i] * activation'(y[i]); dx may be dy.   Grid-stride over size, any block.
//                      Of gelu and silu y is the input. alpha is the parameter of leaky_relu and elu.
// softmax_forward:     y_BC = softmax(x_BC) over C; y may be x.           A warp a row: grid ceil(B / 4), block 128.
// softmax_backward:    dx_BC = y * (dy - sum_c y dy); dx may be dy.       A warp a row: grid ceil(B / 4), block 128.
//
// All overwrite. The highest value of a row is subtracted first, so that no exponential overflows. Deterministic: sums
// over a row go through the warp in a fixed order.
#include "common.cuh"

extern "C" __global__ void activation_forward(const float *x, float *y, long long size, int activation,
                                              float alpha) {
    for (long long i = grid_thread(); i < size; i += grid_threads()) y[i] = activate_any(x[i], activation, alpha);
}

extern "C" __global__ void activation_backward(const float *y, const float *dy, float *dx, long long size,
                                               int activation, float alpha) {
    for (long long i = grid_thread(); i < size; i += grid_threads())
        dx[i] = dy[i] * activation_slope(y[i], activation, alpha);
}

extern "C" __global__ void softmax_forward(const float *x_BC, float *y_BC, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const float *x_C = x_BC + b * C;
    float *y_C = y_BC + b * C;
    float highest = -INFINITY;
    for (int c = lane; c < C; c += WARP) highest = fmaxf(highest, x_C[c]);
    highest = warp_max(highest);
    float sum = 0.0f;
    for (int c = lane; c < C; c += WARP) {
        const float e = expf(x_C[c] - highest);
        y_C[c] = e;  // read again by this lane alone
        sum += e;
    }
    sum = warp_sum(sum);
    for (int c = lane; c < C; c += WARP) y_C[c] /= sum;
}

extern "C" __global__ void softmax_backward(const float *y_BC, const float *dy_BC, float *dx_BC, long long B, int C) {
    const long long b = grid_thread() / WARP;
    if (b >= B) return;  // the whole warp
    const int lane = threadIdx.x % WARP;
    const long long row = b * C;
    float sum = 0.0f;
    for (int c = lane; c < C; c += WARP) sum += y_BC[row + c] * dy_BC[row + c];
    sum = warp_sum(sum);
    for (int c = lane; c < C; c += WARP) dx_BC[row + c] = y_BC[row + c] * (dy_BC[row + c] - sum);
}
