// Ops that are no loops over single elements, for generated code on a CPU: random bits, rows that are added to a table,
// convolutions and pooling. Each overwrites its output. All are deterministic.
//
// Letters as in dptrain/ops/nn/convolution.py: B images, H and W of the image, P and Q of what comes out of a window, I
// channels in, O out, R and S of the kernel; sh, sw strides, dh, dw dilation, bh, bw rows and columns of zeros before.
#ifndef DPTRAIN_NATIVE_CALLS_H
#define DPTRAIN_NATIVE_CALLS_H

// Philox4x64-10 as in NumPy: block k of a row has key (seed, purpose) and counter (row * blocks + k + 1, count, number).
// Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
static void dp_random_bits(uint32_t *out, int64_t rows, int64_t features, uint64_t seed, uint64_t purpose,
                           uint64_t count, uint64_t number, uint64_t first_row) {
    const uint64_t M0 = 0xD2E7470EE14C6C93ull, M1 = 0xCA5A826395121157ull;
    const int64_t blocks = (features + 7) / 8;
    for (int64_t i = 0; i < rows * blocks; ++i) {
        uint64_t c0 = first_row * blocks + i + 1, c1 = count + (c0 == 0), c2 = number + (c0 == 0 && c1 == 0), c3 = 0;
        uint64_t k0 = seed, k1 = purpose;
        for (int round = 0; round < 10; ++round) {
            const unsigned __int128 product0 = (unsigned __int128)M0 * c0, product1 = (unsigned __int128)M1 * c2;
            c0 = (uint64_t)(product1 >> 64) ^ c1 ^ k0;
            c1 = (uint64_t)product1;
            c2 = (uint64_t)(product0 >> 64) ^ c3 ^ k1;
            c3 = (uint64_t)product0;
            k0 += 0x9E3779B97F4A7C15ull;
            k1 += 0xBB67AE8584CAA73Bull;
        }
        const uint64_t words[4] = {c0, c1, c2, c3};
        const int64_t row = i / blocks, first = i % blocks * 8;
        for (int64_t part = 0; part < 8 && first + part < features; ++part)
            out[row * features + first + part] = (uint32_t)(words[part / 2] >> (part % 2 * 32));
    }
}

// out (length, width) = zeros to whose rows `places` the n rows of `values` are added, in order. Threads share the rows of
// out: each looks at all places, which pays where rows are long.
template <class T, class P>
static void dp_add_rows(Context &c, T *out, int64_t length, int64_t width, const T *values, const P *places, int64_t n) {
    struct Shared {
        Context &c;
        T *out;
        int64_t length, width;
        const T *values;
        const P *places;
        int64_t n, parts;
    } shared{c, out, length, width, values, places, n, width < 16 ? 1 : dp_least(c.threads, (length + n) * width >> 16)};
    if (shared.parts < 1) shared.parts = 1;
    c.parallel(c.threads, shared.parts, [](void *data, int64_t part) {
        const Shared &s = *(Shared *)data;
        const int64_t first = s.length * part / s.parts, end = s.length * (part + 1) / s.parts, width = s.width;
        dp_fill(s.out + first * width, (end - first) * width, (T)0);
        for (int64_t k = 0; k < s.n; ++k) {
            const int64_t row = dp_row(s.places[k], s.length, s.c.outside);
            if (row < first || row >= end) continue;
            T *to = s.out + row * width;
            const T *of = s.values + k * width;
            DP_LOOP
            for (int64_t j = 0; j < width; ++j) to[j] += of[j];
        }
    }, &shared);
}

template <class T> static T *dp_scratch(int64_t size) {
    static thread_local dp_Memory memory;
    return (T *)memory.of(size * sizeof(T));
}

template <class T> static inline auto dp_convolution(const Context &c, dp_Implementation by, const T *x) {
    return (dp_Convolution<T> *)c.functions[by][dp_factor(x)];
}

static inline bool dp_is_empty(const dp_Window &w, int64_t B, int64_t I, int64_t O) {
    return B * I * O * w.H * w.W * w.P * w.Q * w.R * w.S == 0;
}

// A product (B pixels, n) of lines as they lie, whose epilogue goes over images.
template <class T>
static bool dp_product_of_images(Context &c, bool bt, int64_t B, int64_t pixels, int64_t n, int64_t k, const T *a,
                                 const T *b, T *out, const dp_Epilogue &then) {
    struct Images {
        const dp_Epilogue &then;
        int64_t pixels;
    } images{then, pixels};
    dp_Range *const of_rows = [](void *context, int64_t low, int64_t high) {
        const Images &own = *(Images *)context;
        own.then.f(own.then.context, low / own.pixels, high / own.pixels);
    };
    return dp_product(c, false, bt, B * pixels, n, k, a, k, b, bt ? k : n, out, false,
                      dp_Epilogue{then.f ? of_rows : nullptr, &images, then.step * pixels, then.operations});
}

// Each returns whether the epilogue, which goes over images, has been executed.
template <class T>
static bool dp_conv2d(Context &c, dp_Implementation by, const dp_Window &w, int64_t B, int64_t I, int64_t O, const T *x, const T *kernel, T *y,
                      const dp_Epilogue &then = {nullptr, nullptr, 1, 0}) {
    if (dp_is_empty(w, B, I, O)) return dp_fill(y, B * w.P * w.Q * O, (T)0), false;
    if (by == DP_PRODUCT) return dp_product_of_images(c, false, B, w.P * w.Q, O, I, x, kernel, y, then);
    return dp_convolution(c, by, x)(c.parallel, c.threads, DP_PLACES, &w, B, I, O, x, kernel, y, then.f, then.context, then.step,
                                then.operations);
}

template <class T>
static bool dp_conv2d_input(Context &c, dp_Implementation by, const dp_Window &w, int64_t B, int64_t I, int64_t O, const T *dy, const T *kernel,
                            T *dx, const dp_Epilogue &then = {nullptr, nullptr, 1, 0}) {
    if (dp_is_empty(w, B, I, O)) return dp_fill(dx, B * w.H * w.W * I, (T)0), false;
    if (by == DP_PRODUCT) return dp_product_of_images(c, true, B, w.P * w.Q, I, O, dy, kernel, dx, then);
    return dp_convolution(c, by, dy)(c.parallel, c.threads, DP_IMAGES, &w, B, I, O, dy, kernel, dx, then.f, then.context,
                                 then.step, then.operations);
}

template <class T>
static void dp_conv2d_kernel(Context &c, dp_Implementation by, const dp_Window &w, int64_t B, int64_t I, int64_t O, const T *x, const T *dy,
                             T *dkernel) {
    if (dp_is_empty(w, B, I, O)) return dp_fill(dkernel, w.R * w.S * I * O, (T)0);
    dp_convolution(c, by, x)(c.parallel, c.threads, DP_KERNEL, &w, B, I, O, x, dy, dkernel, nullptr, nullptr, 1, 0);
}

// What follows is told in its type how many channels there are, or 0: a convolution only where vectors hold them without
// a rest.
//
// Call f(image) for each of B images, which threads share where these operations on single elements are worth it.
template <class F> static void dp_images(Context &c, int64_t B, int64_t operations, F f) {
    struct Shared {
        const F &f;
        int64_t B, parts;
    } shared{f, B, dp_least(operations >> 15, dp_least(B, 4 * c.threads))};
    if (c.threads < 2 || shared.parts < 2) shared.parts = 1;
    c.parallel(c.threads, shared.parts, [](void *data, int64_t part) {
        const Shared &s = *(Shared *)data;
        for (int64_t b = s.B * part / s.parts; b < s.B * (part + 1) / s.parts; ++b) s.f(b);
    }, &shared);
}

// to (C) = the sum of n rows of numbers, each times one of factors, of which the first stand at `of` and `by`.
template <class T>
static void dp_weighted(int64_t C, int64_t n, const T *const *of, const T *const *by, T *to) {
    const int64_t block = 32;  // sums that stay in registers
    int64_t i = 0;
    for (; i + block <= C; i += block) {
        T sum[block] = {};
        for (int64_t t = 0; t < n; ++t)
            for (int64_t j = 0; j < block; ++j) sum[j] += of[t][i + j] * by[t][i + j];
        memcpy(to + i, sum, sizeof(sum));
    }
    for (int64_t j = i; j < C; ++j) to[j] = 0;
    for (int64_t t = 0; t < n && i < C; ++t) {
        DP_LOOP
        for (int64_t j = i; j < C; ++j) to[j] += of[t][j] * by[t][j];
    }
}

template <class T, int channels>
static void dp_depthwise2d(Context &c, const dp_Window &w, int64_t B, int64_t given, const T *x, const T *kernel, T *y) {
    const int64_t C = channels ? channels : given;
    dp_images(c, B, 2 * B * w.P * w.Q * w.R * w.S * C, [=, &w](int64_t b) {
        const T **const of = dp_scratch<const T *>(2 * w.R * w.S), **const by = of + w.R * w.S;
        for (int64_t p = 0; p < w.P; ++p)
            for (int64_t q = 0; q < w.Q; ++q) {
                int64_t n = 0;
                for (int64_t r = 0; r < w.R; ++r)
                    for (int64_t s = 0; s < w.S; ++s) {
                        const int64_t h = p * w.sh + r * w.dh - w.bh, v = q * w.sw + s * w.dw - w.bw;
                        if (h < 0 || h >= w.H || v < 0 || v >= w.W) continue;
                        of[n] = x + ((b * w.H + h) * w.W + v) * C, by[n++] = kernel + (r * w.S + s) * C;
                    }
                dp_weighted(C, n, of, by, y + ((b * w.P + p) * w.Q + q) * C);
            }
    });
}

template <class T, int channels>
static void dp_depthwise2d_input(Context &c, const dp_Window &w, int64_t B, int64_t given, const T *dy, const T *kernel,
                                 T *dx) {
    const int64_t C = channels ? channels : given;
    dp_images(c, B, 2 * B * w.P * w.Q * w.R * w.S * C, [=, &w](int64_t b) {
        const T **const of = dp_scratch<const T *>(2 * w.R * w.S), **const by = of + w.R * w.S;
        for (int64_t h = 0; h < w.H; ++h)
            for (int64_t v = 0; v < w.W; ++v) {
                int64_t n = 0;
                for (int64_t r = 0; r < w.R; ++r)
                    for (int64_t s = 0; s < w.S; ++s) {
                        const int64_t row = h + w.bh - r * w.dh, column = v + w.bw - s * w.dw;
                        if (row < 0 || row % w.sh || row / w.sh >= w.P || column < 0 || column % w.sw || column / w.sw >= w.Q)
                            continue;
                        of[n] = dy + ((b * w.P + row / w.sh) * w.Q + column / w.sw) * C, by[n++] = kernel + (r * w.S + s) * C;
                    }
                dp_weighted(C, n, of, by, dx + ((b * w.H + h) * w.W + v) * C);
            }
    });
}

// So that what is known of a window and its channels is constants in the code.
#define DP_FORCED __attribute__((always_inline))

// What of a window lies in the image: `rows` of `columns` pixels, the first of them number `first` of the image's; number
// `out` of the windows.
struct dp_Seen {
    int64_t out, first, rows, columns;
};

// Call f(window) for each window of an image; the commonest size has code of its own.
template <class F> DP_FORCED static inline void dp_each(const dp_Window &w, F f) {
    for (int64_t p = 0; p < w.P; ++p) {
        const int64_t h = p * w.sh - w.bh, top = h < 0 ? 0 : h, rows = dp_least(h + w.R, w.H) - top;
        for (int64_t q = 0; q < w.Q; ++q) {
            const int64_t v = q * w.sw - w.bw, left = v < 0 ? 0 : v, columns = dp_least(v + w.S, w.W) - left;
            const int64_t out = p * w.Q + q, first = top * w.W + left;
            if (rows == 2 && columns == 2)
                f(dp_Seen{out, first, 2, 2});
            else
                f(dp_Seen{out, first, rows, columns});
        }
    }
}

// Numbers side by side, in a vector.
#if defined(__AVX512F__)
static const int dp_VECTOR = 64;
#elif defined(__AVX__)
static const int dp_VECTOR = 32;
#else
static const int dp_VECTOR = 16;
#endif
template <class T, int n> struct dp_Block {
    typedef T Vector __attribute__((vector_size(n * sizeof(T)), aligned(sizeof(T)), may_alias));
    static const int lanes = n;
};
template <class T> struct dp_Block<T, 1> {
    typedef T Vector;
    static const int lanes = 1;
};

// Call f(dp_Block, i) for blocks of C channels from i: vectors as long as they are filled, then halves of them and less. Six
// are a vector of four and one of two. What f has of a block stays in registers all over a window.
template <class T, int lanes = dp_VECTOR / (int)sizeof(T), class F>
DP_FORCED static inline void dp_channels(int64_t C, F f, int64_t i = 0) {
    for (; i + lanes <= C; i += lanes) f(dp_Block<T, lanes>(), i);
    if constexpr (lanes > 1) dp_channels<T, lanes / 2>(C, f, i);
}

// Call f(pixel) for each that a window sees.
template <class F> DP_FORCED static inline void dp_pixels(const dp_Seen &seen, int64_t W, F f) {
    for (int64_t r = 0; r < seen.rows; ++r)
        for (int64_t s = 0; s < seen.columns; ++s) f(seen.first + r * W + s);
}

template <class T, int channels>
static void dp_max_pool2d(Context &c, const dp_Window &w, int64_t B, int64_t given, const T *x, T *y) {
    const int64_t C = channels ? channels : given;
    dp_images(c, B, B * w.P * w.Q * w.R * w.S * C, [=, &w](int64_t b) {
        const T *const image = x + b * w.H * w.W * C;
        T *const out = y + b * w.P * w.Q * C;
        dp_each(w, [=, &w](const dp_Seen &seen) DP_FORCED {
            dp_channels<T>(C, [=, &w, &seen](auto block, int64_t i) DP_FORCED {
                typedef typename decltype(block)::Vector Vector;
                Vector best = Vector{} + dp_lowest<T>();
                dp_pixels(seen, w.W, [&](int64_t at) DP_FORCED {
                    const Vector one = *(const Vector *)(image + at * C + i);
                    const Vector greater = best > one ? best : one;  // dp_maximum
                    best = best != best ? best : greater;
                });
                *(Vector *)(out + seen.out * C + i) = best;
            });
        });
    });
}

// Each element of dy goes to the first of its window's greatest elements.
template <class T, int channels>
static void dp_max_pool2d_input(Context &c, const dp_Window &w, int64_t B, int64_t given, const T *x, const T *y, const T *dy,
                                T *dx) {
    const int64_t C = channels ? channels : given;
    dp_images(c, B, 2 * B * w.P * w.Q * w.R * w.S * C, [=, &w](int64_t b) {
        const int64_t image = b * w.H * w.W * C, places = b * w.P * w.Q * C;
        dp_fill(dx + image, w.H * w.W * C, (T)0);
        dp_each(w, [=, &w](const dp_Seen &seen) DP_FORCED {
            dp_channels<T>(C, [=, &w, &seen](auto block, int64_t i) DP_FORCED {
                typedef typename decltype(block)::Vector Vector;
                const Vector best = *(const Vector *)(y + places + seen.out * C + i), none{};
                Vector left = *(const Vector *)(dy + places + seen.out * C + i);  // not given to a pixel yet
                dp_pixels(seen, w.W, [&](int64_t at) DP_FORCED {
                    const auto chosen = *(const Vector *)(x + image + at * C + i) == best;
                    Vector &to = *(Vector *)(dx + image + at * C + i);
                    to = to + (chosen ? left : none);
                    left = chosen ? none : left;
                });
            });
        });
    });
}

// What of `values` stands at the first of each window's greatest elements.
template <class T, int channels>
static void dp_max_pool2d_take(Context &c, const dp_Window &w, int64_t B, int64_t given, const T *x, const T *y,
                               const T *values, T *taken) {
    const int64_t C = channels ? channels : given;
    dp_images(c, B, 2 * B * w.P * w.Q * w.R * w.S * C, [=, &w](int64_t b) {
        const int64_t image = b * w.H * w.W * C, places = b * w.P * w.Q * C;
        dp_each(w, [=, &w](const dp_Seen &seen) DP_FORCED {
            dp_channels<T>(C, [=, &w, &seen](auto block, int64_t i) DP_FORCED {
                typedef typename decltype(block)::Vector Vector;
                const Vector best = *(const Vector *)(y + places + seen.out * C + i), none{};
                Vector found{}, left = none + (T)1;  // 1 until the window has taken an element
                dp_pixels(seen, w.W, [&](int64_t at) DP_FORCED {
                    const auto chosen = (left != none) & (*(const Vector *)(x + image + at * C + i) == best);
                    const Vector one = *(const Vector *)(values + image + at * C + i);
                    found = found + (chosen ? one : none);
                    left = chosen ? none : left;
                });
                *(Vector *)(taken + places + seen.out * C + i) = found;
            });
        });
    });
}

#endif
