// Updates of the flat parameter buffer, each in one pass.
//
// g = grads_P / weight[0], where weight[0] is the sum of the sample weights, read from device memory.
// adam:    m += (g - m) one_minus_beta_1, v += (g^2 - v) one_minus_beta_2, p -= alpha m / (sqrt(v) + epsilon)
// rmsprop: v = rho v + take g^2, p -= rate g / sqrt(v + epsilon)
// sgd:     m = momentum m - rate g, p += m; where m is null, p -= rate g
//
// Grid-stride over P, any block. Overwrites p, m, v in place; grads stay. Deterministic: elementwise. The formulas'
// sources are at the ops of dptrain/backend/base.py.
#include "common.cuh"

extern "C" __global__ void adam(float *p_P, const float *grads_P, float *m_P, float *v_P, const float *weight,
                                long long P, float alpha, float one_minus_beta_1, float one_minus_beta_2, float epsilon) {
    const float divide = 1.0f / weight[0];
    for (long long i = grid_thread(); i < P; i += grid_threads()) {
        const float g = grads_P[i] * divide;
        const float m = m_P[i] + (g - m_P[i]) * one_minus_beta_1;
        const float v = v_P[i] + (g * g - v_P[i]) * one_minus_beta_2;
        m_P[i] = m;
        v_P[i] = v;
        p_P[i] -= alpha * m / (sqrtf(v) + epsilon);
    }
}

extern "C" __global__ void rmsprop(float *p_P, const float *grads_P, float *v_P, const float *weight, long long P,
                                   float rate, float rho, float take, float epsilon) {
    const float divide = 1.0f / weight[0];
    for (long long i = grid_thread(); i < P; i += grid_threads()) {
        const float g = grads_P[i] * divide;
        const float v = rho * v_P[i] + take * g * g;
        v_P[i] = v;
        p_P[i] -= rate * g / sqrtf(v + epsilon);
    }
}

extern "C" __global__ void sgd(float *p_P, const float *grads_P, float *m_P, const float *weight, long long P,
                               float rate, float momentum) {
    const float divide = 1.0f / weight[0];
    for (long long i = grid_thread(); i < P; i += grid_threads()) {
        float move = -rate * (grads_P[i] * divide);
        if (m_P != nullptr) {
            move += momentum * m_P[i];
            m_P[i] = move;
        }
        p_P[i] += move;
    }
}
