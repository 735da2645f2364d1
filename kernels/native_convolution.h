// Convolutions and their gradients for generated code on a CPU, as products of matrices of which one is never written.
//
// Letters as in dptrain/ops/nn/convolution.py: B images, H and W of the image, P and Q of what comes out, I channels in, O out,
// R and S of the kernel. With strides sh and sw, dilation dh and dw, and bh and bw zeros before the image:
//
//   y (B P Q, O) = patches of x (B P Q, R S I) times the kernel (R S I, O)
//   dkernel (R S I, O) = patches of x, transposed, times dy (B P Q, O)
//   dx (B H W, I) = patches of dy (B H W, R S O) times the kernel, transposed for each element of R S
//
// With strides, dx is a product for each phase: the pixels (h, w) whose h and w have one remainder by the strides meet the
// same elements of the kernel, so that no term is 0 by the strides.
//
// A patch is read where it lies: one table says how far each of its elements is from its first, and the first ones of pixels
// side by side lie one stride apart. So a register tile is that of native_product.h, which looks up a place for each line.
// Images that need zeros around them are copied into a frame of zeros, some rows at a time, which the second cache holds. A
// tile's rows are pixels of one row of the result, or, where that is short, of several images. Where channels that come out
// are few, vectors hold pixels instead (native_planes.h), as the caller says.
//
// A thread runs the `epilogue`, what is computed from y or dx next, on images that it has just made; of dx with strides in
// the last phase.
//
// Threads share images, or rows of them; what they compute for dkernel is added up in the end, in an order, and in parts,
// that the shapes alone decide. Every element of y and dx is a chain of fused multiply-adds per block of lines, so that its
// bits depend on its patch and on the kernel's column alone, as in native_product.h. Zeros around the image are multiplied:
// an infinite weight makes NaN of them.
//
// Source: M. Dukhan, "The Indirect Convolution Algorithm", arXiv:1907.02129, 2019. Its pointers are a table of
// distances and a stride here.
#ifndef DPTRAIN_NATIVE_CONVOLUTION_H
#define DPTRAIN_NATIVE_CONVOLUTION_H

namespace {
// Rows of a result that are shorter are computed for several images at once.
const int64_t dp_SHORT = 6;
// Parts of a kernel's gradient, and elements of all of them, at most.
const int64_t dp_SUMS = 16, dp_SUMMED = 1 << 18;
// Multiplications that take longer than handing a part over.
const int64_t dp_HANDED = 1 << 19;
// Elements of a result that the second cache holds until the epilogue reads them.
const int64_t dp_NEAR = 1 << 17;

// A register tile: row r, line l of a stands at a + place[l] + r * step.
template <class T> struct dp_Lines {
    typedef typename dp_Chains<T>::Vector Vector;
    static const int W = dp_Chains<T>::W, NR = dp_Chains<T>::NR;
    typedef void Tile(int64_t, const int64_t *, const T *, int64_t, const T *, int64_t, T *, int64_t, bool);

    template <int rows, int vectors>
    static void tile(int64_t k, const int64_t *place, const T *a, int64_t step, const T *b, int64_t ldb, T *out, int64_t n,
                     bool add) {
        Vector sum[rows][vectors];
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) sum[r][v] = Vector{};
        for (int64_t l = 0; l < k; ++l) {
            const T *const from = a + place[l];
            Vector line[vectors];
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) line[v] = *(const Vector *)(b + l * ldb + v * W);
            DP_UNROLL
            for (int r = 0; r < rows; ++r)
                DP_UNROLL
                for (int v = 0; v < vectors; ++v) sum[r][v] = dp_fma(from[r * step], line[v], sum[r][v]);
        }
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) {
                Vector *to = (Vector *)(out + r * n + v * W);
                *to = add ? *to + sum[r][v] : sum[r][v];
            }
    }

    template <int vectors, int... less> static Tile *of(int64_t rows, std::integer_sequence<int, less...>) {
        static Tile *const tiles[] = {tile<less + 1, vectors>...};
        return tiles[rows - 1];
    }

    // So many rows and columns of out, whose lines are n elements apart; `wide` columns of b are filled up.
    static void compute(int64_t rows, int64_t columns, int64_t wide, int64_t k, const int64_t *place, const T *a, int64_t step,
                        const T *b, int64_t ldb, T *out, int64_t n, bool add) {
        const auto all = std::make_integer_sequence<int, dp_MR>();
        Tile *const tile = wide == NR ? of<2>(rows, all) : of<1>(rows, all);
        if (columns == wide) return tile(k, place, a, step, b, ldb, out, n, add);
        alignas(64) T edge[dp_MR * NR];
        tile(k, place, a, step, b, ldb, edge, wide, false);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t q = 0; q < columns; ++q)
                out[r * n + q] = add ? out[r * n + q] + edge[r * wide + q] : edge[r * wide + q];
    }
};

// out, at pixels of its own, = patches times their taps' matrices (C, N), or (N, C) where `bt`.
template <class T, bool planar> struct dp_Convolved {
    static const int W = dp_Chains<T>::W, NR = dp_Chains<T>::NR;

    dp_Patches<T> patches;
    bool bt;
    int64_t N;
    T *out;
    // Elements of out between images, rows and columns of places.
    int64_t image, row, column;
    // In which vectors of pixels lie.
    dp_Planes<T> planes{patches};
    std::vector<int64_t> place = planar ? planes.places(patches) : patches.places();
    const T *packed = nullptr;
    // What is computed at once: so many images, and rows of each; in how many parts threads share that; and of how many
    // images the cache holds what comes out.
    bool across = !planar && patches.Q < dp_SHORT && patches.Q < patches.B;
    int64_t rows, together, parts, near;
    dp_Range *epilogue = nullptr;
    void *context = nullptr;

    static void pack(void *data, int64_t number) {
        const dp_Convolved &own = *(const dp_Convolved *)data;
        const dp_Patches<T> &p = own.patches;
        const int64_t j = number * NR, nr = std::min((int64_t)NR, own.N - j), wide = nr > W ? NR : W;
        T *to = (T *)own.packed + j * p.depth();
        for (const dp_Tap<T> &tap : p.taps) {
            const dp_Chains<T> lines{false, own.bt, false, 0, own.N, p.C, nullptr, 0, tap.matrix, own.bt ? p.C : own.N};
            lines.pack(to, 0, p.C, j, nr, wide);
            to += p.C * wide;
        }
    }

    // The numbers of each line that a tile of planes reads, side by side.
    void pack_numbers(T *to) const {
        for (int64_t j = 0, count; j < N; j += count) {
            count = dp_PlanesTile<T>::next(N - j);
            for (const dp_Tap<T> &tap : patches.taps)
                for (int64_t c = 0; c < patches.C; ++c)
                    for (int64_t n = j; n < j + count; ++n) *to++ = tap.matrix[bt ? n * patches.C + c : c * N + n];
        }
    }

    static void part(void *data, int64_t number) {
        const dp_Convolved &own = *(const dp_Convolved *)data;
        const int64_t of_image = (own.patches.P + own.rows - 1) / own.rows;
        const int64_t units = (own.patches.B + own.together - 1) / own.together * of_image;
        for (int64_t unit = units * number / own.parts; unit < units * (number + 1) / own.parts; ++unit)
            own.compute(unit / of_image * own.together, own.patches.B, unit % of_image * own.rows);
    }

    // The same with an epilogue, for which a part has whole images.
    static void part_then(void *data, int64_t number) {
        const dp_Convolved &own = *(const dp_Convolved *)data;
        const int64_t all = (own.patches.B + own.near - 1) / own.near;
        const int64_t from = all * number / own.parts * own.near;
        const int64_t to = std::min(all * (number + 1) / own.parts * own.near, own.patches.B);
        for (int64_t first = from; first < to; first += own.near) {
            const int64_t end = std::min(first + own.near, to);
            for (int64_t b = first; b < end; b += own.together)
                for (int64_t p = 0; p < own.patches.P; p += own.rows) own.compute(b, end, p);
            own.epilogue(own.context, first, end);
        }
    }

    // Images from b on, together if there are so many before `end`, and their rows from p0 on.
    void compute(int64_t b, int64_t end, int64_t p0) const {
        const int64_t b1 = std::min(b + together, end), p1 = std::min(p0 + rows, patches.P);
        if constexpr (planar)
            compute_planes(b, p0, p1);
        else
            compute_lines(b, b1, p0, p1);
    }

    void compute_planes(int64_t b, int64_t p0, int64_t p1) const {
        const T *const frame = planes.stand(patches, b, p0, p1);
        const auto all = std::make_integer_sequence<int, dp_PlanesTile<T>::CHANNELS>();
        for (int64_t j = 0, count; j < N; j += count) {
            count = dp_PlanesTile<T>::next(N - j);
            dp_PlanesTile<T>::template of<dp_Convolved>(count, all)(*this, frame, b, p0, p1, j);
        }
    }

    void compute_lines(int64_t b, int64_t b1, int64_t p0, int64_t p1) const {
        const dp_Patches<T> &from = patches;
        const int64_t pitch = from.pitch(p1 - p0);
        const T *const a = from.stand(b, b1, p0, p1);
        const int64_t k = from.depth(), blocks = (k + dp_DEPTH - 1) / dp_DEPTH, depth = (k + blocks - 1) / blocks;
        const int64_t length = across ? b1 - b : from.Q;
        const int64_t step = across ? pitch : from.sw * from.C, line = across ? image : column;
        for (int64_t l = 0; l < k; l += depth)
            for (int64_t j = 0; j < N; j += NR) {
                const int64_t nr = std::min((int64_t)NR, N - j), wide = nr > W ? NR : W;
                const T *const panel = packed + j * k + l * wide;
                for (int64_t p = p0; p < p1; ++p)
                    for (int64_t q = 0; q < (across ? from.Q : 1); ++q)
                        for (int64_t i = 0, count; i < length; i += count) {
                            count = dp_Chains<T>::next(length - i);
                            const T *const of = a + ((p - p0) * from.sh * from.columns + q * from.sw) * from.C + i * step;
                            T *const to = out + b * image + p * row + q * column + i * line + j;
                            dp_Lines<T>::compute(count, nr, wide, std::min(depth, k - l), place.data() + l, of, step, panel,
                                                 wide, to, line, l > 0);
                        }
            }
    }

    // Whether the epilogue has been executed.
    bool run(dp_Parallel *parallel, int64_t threads, dp_Range *then = nullptr, void *of = nullptr, int64_t step = 1,
             int64_t operations = 0) {
        const int64_t k = patches.depth(), work = patches.B * patches.P * patches.Q * k * N + operations * 16;
        const int64_t wanted = threads < 2 ? 1 : std::max(std::min(4 * threads, work / dp_HANDED), (int64_t)1);
        const int64_t steps = (patches.B + step - 1) / step;
        epilogue = wanted > 1 && steps < 2 * threads ? nullptr : then, context = of;
        near = step * std::max((int64_t)1, std::min(dp_NEAR / (step * image), steps / wanted));
        rows = across ? patches.P : planar ? planes.fitting(patches) : patches.fitting();
        if (!epilogue && !across && patches.B < wanted)
            rows = std::max((int64_t)1, std::min(rows, patches.P * patches.B / wanted));
        together = across ? std::max((int64_t)1, std::min(patches.together(rows), patches.B / wanted)) : 1;
        const int64_t units = (patches.B + together - 1) / together * ((patches.P + rows - 1) / rows);
        parts = std::min(wanted, epilogue ? (patches.B + near - 1) / near : units);
        const int64_t panels = (N + NR - 1) / NR;
        T *const numbers = dp_scratch<T, 2>(k * ((N + W - 1) / W * W));
        packed = numbers;
        if constexpr (planar)
            pack_numbers(numbers);
        else
            parallel(k * N > dp_COPIED ? threads : 1, panels, pack, this);
        parallel(threads, parts, epilogue ? part_then : part, this);
        return epilogue;
    }
};

// out (taps C, N) = patches, transposed, times dy (B P Q, N).
template <class T, bool planar> struct dp_KernelGradient {
    static const int W = dp_Chains<T>::W, NR = dp_Chains<T>::NR;

    dp_Patches<T> patches;
    int64_t N;
    const T *dy;
    T *out;
    // In which vectors of pixels lie; each sum is so many, side by side.
    dp_Planes<T> planes{patches};
    static const int64_t lanes = planar ? dp_Planes<T>::LANES : 1;
    std::vector<int64_t> place = planar ? planes.places(patches) : patches.places();
    // Rows of a tile: the first, their number, and where they stand.
    struct Rows {
        int64_t first, count, place;
    };
    std::vector<Rows> tiles;
    int64_t rows, together, chunks, slices;
    T *sums = nullptr;

    static void part(void *data, int64_t number) {
        const dp_KernelGradient &own = *(const dp_KernelGradient *)data;
        const dp_Patches<T> &from = own.patches;
        const int64_t chunk = number / own.slices, slice = number % own.slices, tiles = (int64_t)own.tiles.size();
        const int64_t begin = from.B * chunk / own.chunks, end = from.B * (chunk + 1) / own.chunks;
        const Rows *const first = own.tiles.data() + tiles * slice / own.slices;
        const Rows *const last = own.tiles.data() + tiles * (slice + 1) / own.slices;
        T *const to = own.sums ? own.sums + chunk * from.depth() * own.N * own.lanes : own.out;
        bool add = false;
        for (int64_t b = begin; b < end; b += own.together)
            for (int64_t p = 0; p < from.P; p += own.rows, add = true) {
                const int64_t b1 = std::min(b + own.together, end), p1 = std::min(p + own.rows, from.P);
                if constexpr (planar)
                    own.compute_planes(b, p, p1, first, last, to, add);
                else
                    own.compute(b, b1, p, p1, first, last, to, add);
            }
    }

    // Take up rows p0 to p1 of an image.
    void compute_planes(int64_t b, int64_t p0, int64_t p1, const Rows *first, const Rows *last, T *to, bool add) const {
        const dp_PlanesSums<T> of(patches, p1 - p0, N);
        const T *const frame = planes.stand(patches, b, p0, p1);
        const T *const transposed = of.transposed(dy + (b * patches.P + p0) * patches.Q * N, patches.Q, N);
        for (const Rows *tile = first; tile < last; ++tile)
            of.compute(tile->count, N, place.data() + tile->first, frame, transposed, to + tile->first * N * lanes, add);
    }

    // Take up rows p to p1 of images b to b1.
    void compute(int64_t b, int64_t b1, int64_t p0, int64_t p1, const Rows *first, const Rows *last, T *to, bool add) const {
        const int64_t pitch = patches.pitch(p1 - p0), lines = (b1 - b) * (p1 - p0) * patches.Q;
        const T *const a = patches.stand(b, b1, p0, p1);
        int64_t *const place = dp_scratch<int64_t, 5>(lines), *one = place;
        for (int64_t n = 0; n < b1 - b; ++n)
            for (int64_t p = 0; p < p1 - p0; ++p)
                for (int64_t q = 0; q < patches.Q; ++q)
                    *one++ = n * pitch + (p * patches.sh * patches.columns + q * patches.sw) * patches.C;
        const T *const of = dy + (b * patches.P + p0) * patches.Q * N;
        const int64_t blocks = (lines + dp_DEPTH - 1) / dp_DEPTH, depth = (lines + blocks - 1) / blocks;
        for (int64_t l = 0; l < lines; l += depth) {
            const int64_t kc = std::min(depth, lines - l);
            for (int64_t j = 0; j < N; j += NR) {
                const int64_t nr = std::min((int64_t)NR, N - j), wide = nr > W ? NR : W;
                const T *panel = of + l * N + j;
                int64_t ldb = N;
                if (nr != wide) {
                    T *const edge = dp_scratch<T, 1>(dp_DEPTH * NR);
                    dp_Chains<T>{false, false, false, 0, N, 0, nullptr, 0, of, N}.pack(edge, l, kc, j, nr, wide);
                    panel = edge, ldb = wide;
                }
                for (const Rows *tile = first; tile < last; ++tile)
                    dp_Lines<T>::compute(tile->count, nr, wide, kc, place + l, a + tile->place, 1, panel, ldb,
                                         to + tile->first * N + j, N, add || l > 0);
            }
        }
    }

    static void total(void *data, int64_t number) {
        const dp_KernelGradient &own = *(const dp_KernelGradient *)data;
        const int64_t k = own.patches.depth(), all = k * own.N * own.lanes;
        const int64_t from = k * number / own.slices * own.N, to = k * (number + 1) / own.slices * own.N;
        T *const sums = planar ? own.sums : own.out;
        if (!planar) std::copy(own.sums + from, own.sums + to, sums + from);
        for (int64_t chunk = 1; chunk < own.chunks; ++chunk)
            for (int64_t i = from * own.lanes; i < to * own.lanes; ++i) sums[i] += own.sums[chunk * all + i];
        for (int64_t i = from; planar && i < to; ++i) {
            T *const lane = sums + i * own.lanes;
            for (int64_t half = own.lanes / 2; half; half /= 2)
                for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
            own.out[i] = lane[0];
        }
    }

    void run(dp_Parallel *parallel, int64_t threads) {
        const int64_t k = patches.depth(), size = k * N, work = patches.B * patches.P * patches.Q * size;
        for (int64_t i = 0, end, count; i < k; i = end) {  // tiles of elements side by side, which those of planes need not be
            for (end = i + 1; end < k && (planar || place[end] == place[end - 1] + 1);) ++end;
            for (int64_t from = i; from < end; from += count) {
                count = planar ? dp_PlanesSums<T>::next(end - from) : dp_Chains<T>::next(end - from);
                tiles.push_back({from, count, place[from]});
            }
        }
        chunks = std::max((int64_t)1, std::min({dp_SUMS, patches.B, dp_SUMMED / (size * lanes), work / dp_HANDED}));
        const int64_t wanted = threads < 2 ? 1 : std::max(std::min(4 * threads, work / dp_HANDED), (int64_t)1);
        slices = std::max((int64_t)1, std::min((wanted + chunks - 1) / chunks, (int64_t)tiles.size()));
        rows = planar ? planes.fitting(patches) : patches.fitting();
        together = planar || rows < patches.P ? 1 : patches.together(rows);
        if (chunks > 1 || planar) sums = dp_scratch<T, 2>(chunks * size * lanes);
        parallel(threads, chunks * slices, part, this);
        if (!sums) return;
        slices = std::min(k, size * chunks * lanes > dp_COPIED ? 4 * threads : 1);
        parallel(threads, slices, total, this);
    }
};

template <class T>
dp_Patches<T> dp_patches_of(const dp_Window &w, int64_t B, int64_t I, int64_t O, const T *x, const T *kernel) {
    dp_Patches<T> found{B, w.H, w.W, I, w.P, w.Q, w.sh, w.sw, x};
    for (int64_t r = 0; r < w.R; ++r)
        for (int64_t s = 0; s < w.S; ++s)
            found.taps.push_back({r * w.dh - w.bh, s * w.dw - w.bw, kernel ? kernel + (r * w.S + s) * I * O : nullptr});
    found.measure();
    return found;
}

// What threads do next with images of the result: `f` with `context`, for multiples of `step` images; and its operations.
struct dp_Then {
    dp_Range *f;
    void *context;
    int64_t step, operations;
};

// Whether what comes next has been done, here and below.
template <bool planar, class T>
bool dp_convolve(dp_Parallel *parallel, int64_t threads, const dp_Window &w, int64_t B, int64_t I, int64_t O, const T *x,
                 const T *kernel, T *y, const dp_Then &then) {
    const dp_Patches<T> from = dp_patches_of(w, B, I, O, x, kernel);
    dp_Convolved<T, planar> made{from, false, O, y, w.P * w.Q * O, w.Q * O, O};
    return made.run(parallel, threads, then.f, then.context, then.step, then.operations);
}

template <bool planar, class T>
bool dp_convolve_input(dp_Parallel *parallel, int64_t threads, const dp_Window &w, int64_t B, int64_t I, int64_t O,
                       const T *dy, const T *kernel, T *dx, const dp_Then &then) {
    bool done = false;
    const int64_t rows = std::min(w.sh, w.H), columns = std::min(w.sw, w.W);
    for (int64_t phase = 0; phase < rows * columns; ++phase) {
        const int64_t h = phase / columns, v = phase % columns;
        const int64_t P = (w.H - h + w.sh - 1) / w.sh, Q = (w.W - v + w.sw - 1) / w.sw;
        dp_Patches<T> from{B, w.P, w.Q, O, P, Q, 1, 1, dy};
        for (int64_t r = 0; r < w.R; ++r)
            for (int64_t s = 0; s < w.S; ++s) {
                const int64_t row = h + w.bh - r * w.dh, column = v + w.bw - s * w.dw;
                if (row % w.sh == 0 && column % w.sw == 0)
                    from.taps.push_back({row / w.sh, column / w.sw, kernel + (r * w.S + s) * I * O});
            }
        T *const to = dx + (h * w.W + v) * I;
        const int64_t image = w.H * w.W * I, row = w.sh * w.W * I, column = w.sw * I;
        if (!from.taps.empty()) {
            from.measure();
            dp_Convolved<T, planar> made{from, true, I, to, image, row, column};
            const bool last = phase + 1 == rows * columns;  // when all others are complete
            done = made.run(parallel, threads, last ? then.f : nullptr, then.context, then.step, then.operations);
            continue;
        }
        for (int64_t b = 0; b < B; ++b)
            for (int64_t p = 0; p < P; ++p)
                for (int64_t q = 0; q < Q; ++q) {
                    T *const pixel = to + b * image + p * row + q * column;
                    std::fill(pixel, pixel + I, (T)0);
                }
    }
    return done;
}

template <bool planar, class T>
bool dp_convolve_kernel(dp_Parallel *parallel, int64_t threads, const dp_Window &w, int64_t B, int64_t I, int64_t O,
                        const T *x, const T *dy, T *dkernel) {
    dp_KernelGradient<T, planar> made{dp_patches_of<T>(w, B, I, O, x, nullptr), O, dy, dkernel};
    made.run(parallel, threads);
    return false;
}
}  // namespace

// Export the convolutions of numbers T whose vectors hold channels or pixels; only images have an epilogue.
#define DP_EXPORT_CONVOLUTION(T, vectors, planar)                                                                      \
    extern "C" bool dp_##vectors##_##T(dp_Parallel *parallel, int64_t threads, dp_Makes makes, const dp_Window *w,     \
                                       int64_t B, int64_t I, int64_t O, const T *one, const T *other, T *out,          \
                                       dp_Range *epilogue, void *context, int64_t step, int64_t operations) {          \
        const dp_Then then{epilogue, context, step, operations};                                                       \
        if (makes == DP_PLACES) return dp_convolve<planar>(parallel, threads, *w, B, I, O, one, other, out, then);     \
        if (makes == DP_IMAGES) return dp_convolve_input<planar>(parallel, threads, *w, B, I, O, one, other, out, then); \
        return dp_convolve_kernel<planar>(parallel, threads, *w, B, I, O, one, other, out);                            \
    }
// Each is a library of its own, as few programs need both.
#define DP_CONVOLUTION_CHANNELS(T) DP_EXPORT_CONVOLUTION(T, channels, false)
#define DP_CONVOLUTION_PIXELS(T) DP_EXPORT_CONVOLUTION(T, pixels, true)

#endif
