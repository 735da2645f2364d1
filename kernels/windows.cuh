// Windows over two axes of space, depthwise convolutions and pooling: one element of the result, of dense arrays.
//
// Letters as in dptrain/ops/nn/convolution.py: images (B, H, W, C). Plain loops in a fixed order; each thread computes its
// element alone. Convolutions are products: convolution.cuh.
#pragma once

#include "common.cuh"

// How a kernel of R x S goes over an image of H x W and makes one of P x Q.
struct Window {
    int H, W, P, Q, R, S, stride_h, stride_w, dilation_h, dilation_w, before_h, before_w;

    // The place in the image that element r (or s) of the kernel sees from place p (or q) of the output.
    __device__ __forceinline__ int h(int p, int r) const { return p * stride_h + r * dilation_h - before_h; }
    __device__ __forceinline__ int w(int q, int s) const { return q * stride_w + s * dilation_w - before_w; }
    // Its inverse: the output's place that sees h (or w) through r (or s), or -1.
    __device__ __forceinline__ int p(int h, int r) const {
        const int from = h + before_h - r * dilation_h;
        return from >= 0 && from % stride_h == 0 && from / stride_h < P ? from / stride_h : -1;
    }
    __device__ __forceinline__ int q(int w, int s) const {
        const int from = w + before_w - s * dilation_w;
        return from >= 0 && from % stride_w == 0 && from / stride_w < Q ? from / stride_w : -1;
    }
    __device__ __forceinline__ bool has(int h, int w) const { return h >= 0 && h < H && w >= 0 && w < W; }
};

template <class T>
__device__ __forceinline__ T max_pool2d(const T *x, Window g, int C, Index b, int p, int q, int c) {
    T greatest = lowest<T>();
    for (int r = 0; r < g.R; ++r)
        for (int s = 0; s < g.S; ++s) {
            const int h = g.h(p, r), w = g.w(q, s);
            if (g.has(h, w)) greatest = dp_maximum(greatest, x[((b * g.H + h) * g.W + w) * (Index)C + c]);
        }
    return greatest;
}

template <class T, class K>
__device__ __forceinline__ auto depthwise2d(const T *x, const K *kernel, Window g, int C, Index b, int p, int q, int c) {
    decltype(*x * *kernel) sum = 0;
    for (int r = 0; r < g.R; ++r)
        for (int s = 0; s < g.S; ++s) {
            const int h = g.h(p, r), w = g.w(q, s);
            if (g.has(h, w)) sum += x[((b * g.H + h) * g.W + w) * (Index)C + c] * kernel[(r * g.S + s) * (Index)C + c];
        }
    return sum;
}

template <class T, class K>
__device__ __forceinline__ auto depthwise2d_input(const T *dy, const K *kernel, Window g, int C, Index b, int h, int w,
                                                  int c) {
    decltype(*dy * *kernel) sum = 0;
    for (int r = 0; r < g.R; ++r)
        for (int s = 0; s < g.S; ++s) {
            const int p = g.p(h, r), q = g.q(w, s);
            if (p >= 0 && q >= 0)
                sum += dy[((b * g.P + p) * g.Q + q) * (Index)C + c] * kernel[(r * g.S + s) * (Index)C + c];
        }
    return sum;
}

// The place in x of the first of a window's greatest elements, which y has; -1 where there is none (NaN).
template <class T>
__device__ __forceinline__ Index greatest_place(const T *x, const T *y, Window g, int C, Index b, int p, int q, int c) {
    const T greatest = y[((b * g.P + p) * g.Q + q) * (Index)C + c];
    for (int r = 0; r < g.R; ++r)
        for (int s = 0; s < g.S; ++s) {
            const int h = g.h(p, r), w = g.w(q, s);
            const Index place = ((b * g.H + h) * g.W + w) * (Index)C + c;
            if (g.has(h, w) && x[place] == greatest) return place;
        }
    return -1;
}

// Whether none of the elements before (r, s) in the window of place (p, q) is `greatest`.
template <class T>
__device__ __forceinline__ bool is_first(const T *x, T greatest, Window g, int C, Index b, int p, int q, int c, int r, int s) {
    for (int i = 0; i <= r; ++i)
        for (int j = 0; j < (i < r ? g.S : s); ++j) {
            const int h = g.h(p, i), w = g.w(q, j);
            if (g.has(h, w) && x[((b * g.H + h) * g.W + w) * (Index)C + c] == greatest) return false;
        }
    return true;
}

// An element first compares itself with what is greatest in a window, and looks at the elements before it only if it is
// as great: of windows of 2 x 2 a fourth do, so that about as much is read as the arrays have.
template <class T, class V>
__device__ __forceinline__ V max_pool2d_input(const T *x, const T *y, const V *dy, Window g, int C, Index b, int h, int w,
                                              int c) {
    const T own = x[((b * g.H + h) * g.W + w) * (Index)C + c];
    V sum = 0;
    for (int r = 0; r < g.R; ++r)
        for (int s = 0; s < g.S; ++s) {
            const int p = g.p(h, r), q = g.q(w, s);
            if (p < 0 || q < 0) continue;
            const Index place = ((b * g.P + p) * g.Q + q) * (Index)C + c;
            if (own == y[place] && is_first(x, own, g, C, b, p, q, c, r, s)) sum += dy[place];
        }
    return sum;
}

template <class T, class V>
__device__ __forceinline__ V max_pool2d_take(const T *x, const T *y, const V *values, Window g, int C, Index b, int p,
                                             int q, int c) {
    const Index place = greatest_place(x, y, g, C, b, p, q, c);
    return place < 0 ? (V)0 : values[place];
}

// Chains of the places that name the same row of a table: the first that names row l, and the next after `place`; -1
// where there is none.
template <class P> __device__ __forceinline__ int first_place(const P *places, Index count, Index length, Index l) {
    for (Index place = 0; place < count; ++place)
        if (row_at(places[place], length) == l) return (int)place;
    return -1;
}

template <class P>
__device__ __forceinline__ int next_place(const P *places, Index count, Index length, int *outside, Index place) {
    const Index row = row_at(places[place], length, outside);
    while (++place < count)
        if (row_at(places[place], length) == row) return (int)place;
    return -1;
}

// Element f of row l of a table of sums of values (P, F), along that row's chain: in the order of the places.
template <class T>
__device__ __forceinline__ T add_chained_rows(const T *values, const int *first, const int *next, Index F, Index l,
                                              Index f) {
    T sum = 0;
    for (Index place = first[l]; place >= 0; place = next[place]) sum += values[place * F + f];
    return sum;
}

// The same without chains: each element looks at all places, which is better for a table of few rows.
template <class T, class P>
__device__ __forceinline__ T add_rows(const T *values, const P *places, Index count, Index length, Index F,
                                      int *outside, Index l, Index f) {
    T sum = 0;
    for (Index place = 0; place < count; ++place)
        if (row_at(places[place], length, outside) == l) sum += values[place * F + f];
    return sum;
}
