// Convolutions of 3x3 kernels by Winograd's F(2x2, 3x3), and their gradients in the images, for generated code on a CPU.
//
// A tile of 2x2 pixels of the result needs 4x4 pixels of the image. With d these of one channel, g a kernel's 3x3 elements
// and y the tile,
//
//   y = A' [(G g G') * (B' d B)] A, where * multiplies element by element:
//
//   B' = 1  0 -1  0     G =  1   0   0     A' = 1  1  1  0
//        0  1  1  0         1/2 1/2 1/2         0  1 -1 -1
//        0 -1  1  0         1/2-1/2 1/2
//        0  1  0 -1          0   0   1
//
// Over channels, each of the 16 elements is a product of matrices, tiles x C times C x N: 16 multiplications where the sum
// over the kernel takes 36. All else is additions, and exact halves.
//
// Letters: images (B, H, V, C) give (B, P, Q, N), with bh and bw zeros before. The gradient in the images is the same of dy,
// with the kernel turned by half a circle and its channels exchanged.
//
// The kernel is transformed once a call, into columns side by side as tiles of native_product.h read them. Then some rows of
// tiles at a time, which the second cache holds: transform what they read, multiply, transform back. Neighbours share two of
// their columns, which stay in registers. Pixels outside of the image are a line of zeros. Channels fill vectors without a
// rest, as the caller says.
//
// A thread runs the `epilogue`, what is computed from the result next, on images that it has just made.
//
// Every element of a product is a chain of fused multiply-adds per block of C, as in native_product.h, and transforms add in
// one order. So bits depend on a tile's own pixels and on the kernel alone. A pixel takes part in the whole tile, not only in
// the windows that see it: an infinite one makes NaN of all four, and rounding is relative to the greatest of them.
//
// Source: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308, 2015.
#ifndef DPTRAIN_NATIVE_WINOGRAD_H
#define DPTRAIN_NATIVE_WINOGRAD_H

namespace {
// Elements of a block of tiles, transformed, and of their products, that the second cache holds beside the kernel; so many
// tiles, at least, read each element of the kernel.
const int64_t dp_TILED = 1 << 16, dp_LEAST = 112;
// Elements of a result that the second cache holds until the epilogue reads them.
const int64_t dp_LEFT = 1 << 17;

template <class T> struct dp_Winograd {
    typedef dp_Chains<T> Chains;
    typedef typename Chains::Vector Vector;
    static const int LANES = Chains::W, NR = Chains::NR;

    int64_t B, H, V, C, P, Q, N, bh, bw;
    // `flipped`: from its last element to its first, each (N, C).
    const T *images, *kernel;
    bool flipped;
    T *out;
    // Tiles of a column and of a row.
    int64_t down = (P + 1) / 2, along = (Q + 1) / 2;
    // Rows of tiles of a block, and elements from one of its 16 matrices to the next: none begin at the same place of a page.
    int64_t height = 0, tiled = 0, multiplied = 0;
    T *packed = nullptr;
    const T *zeros = nullptr;
    int64_t parts = 1, near = 1;
    dp_Range *epilogue = nullptr;
    void *context = nullptr;

    // Along one axis: B' of four, G of three, A' of four.
    static void of_pixels(const Vector *d, Vector *to) {
        to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
    }
    static void of_kernel(const Vector *g, Vector *to) {
        const Vector ends = g[0] + g[2];
        to[0] = g[0], to[1] = (ends + g[1]) / 2, to[2] = (ends - g[1]) / 2, to[3] = g[2];
    }
    static void of_products(const Vector *m, Vector *to) {
        to[0] = m[0] + m[1] + m[2], to[1] = m[1] - m[2] - m[3];
    }

    // Columns of the kernel's 16 matrices, some lines at a time.
    static void pack(void *data, int64_t number) {
        const dp_Winograd &own = *(const dp_Winograd *)data;
        const int64_t j = number * NR, nr = std::min((int64_t)NR, own.N - j), some = 32;
        T *const taps = dp_scratch<T, 0>(9 * some * NR);
        for (int64_t l = 0, lines; l < own.C; l += lines) {
            lines = std::min(some, own.C - l);
            for (int64_t tap = 0; tap < 9; ++tap) {
                const T *const matrix = own.kernel + (own.flipped ? 8 - tap : tap) * own.C * own.N;
                const int64_t ldb = own.flipped ? own.C : own.N;
                Chains{false, own.flipped, false, 0, own.N, own.C, nullptr, 0, matrix, ldb}.pack(taps + tap * lines * nr, l,
                                                                                                lines, j, nr, nr);
            }
            for (int64_t i = 0; i < lines * nr; i += LANES)
                transform_kernel(taps + i, lines * nr, own.packed + j * own.C + l * nr + i, own.C * own.N);
        }
    }

    static void transform_kernel(const T *taps, int64_t tap, T *to, int64_t matrix) {
        Vector half[3][4];
        DP_UNROLL
        for (int r = 0; r < 3; ++r) {
            Vector g[3];
            DP_UNROLL
            for (int s = 0; s < 3; ++s) g[s] = *(const Vector *)(taps + (r * 3 + s) * tap);
            of_kernel(g, half[r]);
        }
        DP_UNROLL
        for (int s = 0; s < 4; ++s) {
            const Vector column[3] = {half[0][s], half[1][s], half[2][s]};
            Vector made[4];
            of_kernel(column, made);
            DP_UNROLL
            for (int r = 0; r < 4; ++r) *(Vector *)(to + (r * 4 + s) * matrix) = made[r];
        }
    }

    // B' of one column of pixels.
    static inline __attribute__((always_inline)) void column(const T *const *rows, bool inside, int64_t at, Vector *to) {
        Vector d[4];
        DP_UNROLL
        for (int r = 0; r < 4; ++r) d[r] = inside ? *(const Vector *)(rows[r] + at) : Vector{};
        of_pixels(d, to);
    }

    // What a row of tiles reads.
    void transform(int64_t line, T *to) const {
        const int64_t b = line / down, h = line % down * 2 - bh;
        const T *rows[4];
        for (int r = 0; r < 4; ++r) rows[r] = h + r < 0 || h + r >= H ? zeros : images + (b * H + h + r) * V * C;
        for (int64_t c = 0; c < C; c += LANES) {
            Vector v[4][4];
            DP_UNROLL
            for (int s = 0; s < 2; ++s) column(rows, s - bw >= 0 && s - bw < V, (s - bw) * C + c, v[s]);
            T *tile = to + c;
            for (int64_t t = 0; t < along; ++t, tile += C) {
                const int64_t w = t * 2 - bw;
                DP_UNROLL
                for (int s = 2; s < 4; ++s) column(rows, w + s >= 0 && w + s < V, (w + s) * C + c, v[s]);
                DP_UNROLL
                for (int r = 0; r < 4; ++r) {
                    const Vector d[4] = {v[0][r], v[1][r], v[2][r], v[3][r]};
                    Vector made[4];
                    of_pixels(d, made);
                    DP_UNROLL
                    for (int s = 0; s < 4; ++s) *(Vector *)(tile + (r * 4 + s) * tiled) = made[s];
                    v[0][r] = v[2][r], v[1][r] = v[3][r];
                }
            }
        }
    }

    // One of the 16 products.
    void multiply(int64_t tiles, const T *a, const T *b, T *to) const {
        const auto all = std::make_integer_sequence<int, dp_MR>();
        const int64_t blocks = (C + dp_DEPTH - 1) / dp_DEPTH, depth = (C + blocks - 1) / blocks;
        for (int64_t l = 0; l < C; l += depth)
            for (int64_t j = 0; j < N; j += NR) {
                const int64_t wide = std::min((int64_t)NR, N - j);
                for (int64_t i = 0, rows; i < tiles; i += rows) {
                    rows = Chains::next(tiles - i);
                    const auto tile = wide == NR ? Chains::template of<2, false>(rows, all)
                                                 : Chains::template of<1, false>(rows, all);
                    tile(std::min(depth, C - l), a + i * C + l, C, b + j * C + l * wide, wide, to + i * N + j, N, l > 0);
                }
            }
    }

    // The pixels of a row of tiles.
    void join(int64_t line, const T *from) const {
        const int64_t b = line / down, p = line % down * 2, rows = std::min((int64_t)2, P - p);
        for (int64_t t = 0; t < along; ++t, from += N) {
            T *const to = out + ((b * P + p) * Q + t * 2) * N;
            const int64_t columns = std::min((int64_t)2, Q - t * 2);
            for (int64_t n = 0; n < N; n += LANES) {
                Vector half[4][2];
                DP_UNROLL
                for (int r = 0; r < 4; ++r) {
                    Vector m[4];
                    DP_UNROLL
                    for (int s = 0; s < 4; ++s) m[s] = *(const Vector *)(from + (r * 4 + s) * multiplied + n);
                    of_products(m, half[r]);
                }
                DP_UNROLL
                for (int q = 0; q < 2; ++q) {
                    const Vector m[4] = {half[0][q], half[1][q], half[2][q], half[3][q]};
                    Vector y[2];
                    of_products(m, y);
                    DP_UNROLL
                    for (int r = 0; r < 2; ++r)
                        if (r < rows && q < columns) *(Vector *)(to + (r * Q + q) * N + n) = y[r];
                }
            }
        }
    }

    // Rows of tiles.
    void compute(int64_t line, int64_t end) const {
        T *const from = dp_scratch<T, 3>(16 * tiled), *const to = dp_scratch<T, 4>(16 * multiplied);
        for (int64_t lines; line < end; line += lines) {
            lines = std::min(height, end - line);
            for (int64_t l = 0; l < lines; ++l) transform(line + l, from + l * along * C);
            for (int64_t e = 0; e < 16; ++e) multiply(lines * along, from + e * tiled, packed + e * C * N, to + e * multiplied);
            for (int64_t l = 0; l < lines; ++l) join(line + l, to + l * along * N);
        }
    }

    static void part(void *data, int64_t number) {
        const dp_Winograd &own = *(const dp_Winograd *)data;
        const int64_t lines = own.B * own.down;
        own.compute(lines * number / own.parts, lines * (number + 1) / own.parts);
    }

    // The same with an epilogue, for which a part has whole images.
    static void part_then(void *data, int64_t number) {
        const dp_Winograd &own = *(const dp_Winograd *)data;
        const int64_t all = (own.B + own.near - 1) / own.near;
        const int64_t begin = all * number / own.parts * own.near;
        const int64_t end = std::min(all * (number + 1) / own.parts * own.near, own.B);
        for (int64_t b = begin, b1; b < end; b = b1) {
            b1 = std::min(b + own.near, end);
            own.compute(b * own.down, b1 * own.down);
            own.epilogue(own.context, b, b1);
        }
    }

    // Whether the epilogue has been executed.
    bool run(dp_Parallel *parallel, int64_t threads, dp_Range *then, void *of, int64_t step, int64_t operations) {
        const int64_t lines = B * down, work = lines * along * 16 * C * N + operations * 16, steps = (B + step - 1) / step;
        const int64_t wanted = threads < 2 ? 1 : std::max(std::min(4 * threads, work / Chains::PART), (int64_t)1);
        epilogue = wanted > 1 && steps < 2 * threads ? nullptr : then, context = of;
        near = step * std::max((int64_t)1, std::min(dp_LEFT / (step * P * Q * N), steps / wanted));
        parts = std::min(wanted, epilogue ? (B + near - 1) / near : lines);
        height = std::max(dp_LEAST, dp_TILED / (16 * (C + N))) / along;
        height = std::max((int64_t)1, std::min(height, lines));
        tiled = height * along * C + 64 / sizeof(T), multiplied = height * along * N + 64 / sizeof(T);
        packed = dp_scratch<T, 2>(16 * C * N);
        T *const none = dp_scratch<T, 5>(V * C);
        std::fill(none, none + V * C, (T)0);
        zeros = none;
        parallel(C * N > dp_COPIED / 16 ? threads : 1, (N + NR - 1) / NR, pack, this);
        parallel(threads, parts, epilogue ? part_then : part, this);
        return epilogue;
    }
};
}  // namespace

// Export convolutions of numbers T; of kernels there is none.
#define DP_CONVOLUTION_WINOGRAD(T)                                                                                       \
    extern "C" bool dp_winograd_##T(dp_Parallel *parallel, int64_t threads, dp_Makes makes, const dp_Window *w,          \
                                    int64_t B, int64_t I, int64_t O, const T *one, const T *kernel, T *out,              \
                                    dp_Range *epilogue, void *context, int64_t step, int64_t operations) {               \
        dp_Winograd<T> made =                                                                                            \
            makes == DP_PLACES                                                                                           \
                ? dp_Winograd<T>{B, w->H, w->W, I, w->P, w->Q, O, w->bh, w->bw, one, kernel, false, out}                 \
                : dp_Winograd<T>{B, w->P, w->Q, O, w->H, w->W, I, 2 - w->bh, 2 - w->bw, one, kernel, true, out};         \
        return made.run(parallel, threads, epilogue, context, step, operations);                                         \
    }

#endif
