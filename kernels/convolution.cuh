// Convolutions and their gradients as products of matrices that are gathered while a product is computed: implicit GEMM.
//
// Letters as in dptrain/ops/nn/convolution.py: images (B, H, W, I), places (B, P, Q, O), kernels (R, S, I, O). The structs say
// where the elements of a matrix are in memory, as `Dense` of tiles.cuh does; the products are product.cuh's,
// product_tf32.cuh's and product_half.cuh's, and so is the order of sums:
//
//   y_BPQ,O = patches of x (BPQ, RSI) times the kernel as it lies (RSI, O)
//   dkernel_RSI,O = the same patches, transposed, times dy as it lies (BPQ, O)
//   dx_BHW,I = patches of dy (BHW, RSO) times the kernel as `Taps` (RSO, I)
//
// Sizes but that of the batch are numbers in the generated text, so nvcc divides by them with a multiplication, and it moves
// what depends on a row or column that a thread keeps from stage to stage out of the loop.
//
// Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, section 3.
#pragma once

#include "windows.cuh"

// What each place of a window sees of images with C channels: (B P Q, R S C), with zeros outside of an image.
struct Patches {
    static constexpr bool SIDE_BY_SIDE = false;
    Window g;
    Index C;

    // The pixel that the window's first element sees, or how far another element's is from it, and its number.
    struct Pixel {
        int h, w;
        Index at;
    };

    // Unsigned numbers take half the instructions to divide.
    __device__ __forceinline__ Pixel row(unsigned int place, long long) const {
        const unsigned int Q = g.Q, P = g.P, over_q = place / Q;
        const int h = g.h(over_q % P, 0), w = g.w(place % Q, 0);
        return {h, w, (((Index)(over_q / P) * g.H + h) * g.W + w) * C};
    }
    __device__ __forceinline__ Pixel column(unsigned int element) const {
        const unsigned int channels = C, S = g.S, rs = element / channels;
        const int h = (int)(rs / S) * g.dilation_h, w = (int)(rs % S) * g.dilation_w;
        return {h, w, ((Index)h * g.W + w) * C + (Index)(element % channels)};
    }
    __device__ __forceinline__ bool has(Pixel row, Pixel column) const { return g.has(row.h + column.h, row.w + column.w); }
    __device__ __forceinline__ Index at(Pixel row, Pixel column) const { return row.at + column.at; }
};

// Along one axis: which elements first, first + step, ... of a kernel the pixels n stride + phase meet, for n = 0, 1, ...,
// and at which places: n + shift - `dilation` for each further element.
struct Phase {
    int first, step, count, shift, dilation;

    __device__ __forceinline__ Phase(int phase, int stride, int dilation_, int before, int length) {
        int common = stride, rest = dilation_;  // their greatest common divisor
        while (rest) {
            const int left = common % rest;
            common = rest;
            rest = left;
        }
        step = stride / common;
        dilation = dilation_ / common;
        for (first = 0; first < step && (phase + before - first * dilation_) % stride != 0;) ++first;
        count = first < step && first < length ? (length - first + step - 1) / step : 0;
        shift = (phase + before - first * dilation_) / stride;
    }
};

// Those elements of a kernel as (I, R S O), the transposed second factor of the gradient in the images.
struct Taps {
    static constexpr bool SIDE_BY_SIDE = false;
    Phase r, s;
    int S;
    Index I, O;

    __device__ __forceinline__ Index row(int i, long long) const { return i * O; }
    __device__ __forceinline__ Index column(unsigned int element) const {
        const unsigned int channels = O, count = s.count, rs = element / channels;
        const int of_r = r.first + (int)(rs / count) * r.step, of_s = s.first + (int)(rs % count) * s.step;
        return (Index)(of_r * S + of_s) * I * O + (Index)(element % channels);
    }
    __device__ __forceinline__ bool has(Index, Index) const { return true; }
    __device__ __forceinline__ Index at(Index row, Index column) const { return row + column; }
};

// Both factors of the gradient in the images (B, H, W, I), of every stride_h-th row and stride_w-th column of pixels.
//
// The pixels of each of the stride_h stride_w phases meet other elements of the kernel, and all pixels of one the same: no
// term of its product is 0 by the strides. `rows` x `columns` pixels are those of the largest phase.
struct Pixels {
    Window g;
    int of_h, of_w, rows, columns;
    Taps kernel;
    Patches dy;
    int K;

    __device__ __forceinline__ Pixels(Window g, Index I, Index O, int phase)
        : g(g), of_h(phase / g.stride_w), of_w(phase % g.stride_w), rows((g.H + g.stride_h - 1) / g.stride_h),
          columns((g.W + g.stride_w - 1) / g.stride_w),
          kernel{Phase(of_h, g.stride_h, g.dilation_h, g.before_h, g.R),
                 Phase(of_w, g.stride_w, g.dilation_w, g.before_w, g.S), g.S, I, O},
          dy{Window{g.P, g.Q, rows, columns, kernel.r.count, kernel.s.count, 1, 1, -kernel.r.dilation, -kernel.s.dilation,
                    -kernel.r.shift, -kernel.s.shift},
             O},
          K(kernel.r.count * kernel.s.count * (int)O) {}

    // The number among all pixels of row m of the product; -1 where this phase has fewer.
    __device__ __forceinline__ Index pixel(Index m) const {
        const int h = (int)(m / columns % rows) * g.stride_h + of_h, w = (int)(m % columns) * g.stride_w + of_w;
        return h < g.H && w < g.W ? (m / columns / rows * g.H + h) * g.W + w : -1;
    }
};
