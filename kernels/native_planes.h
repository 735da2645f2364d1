// Convolutions with few channels for generated code on a CPU: their vectors hold pixels side by side.
//
// Letters as in native_convolution.h, whose vectors hold channels: of six, ten lanes of sixteen are idle. Here the images
// are copied into a frame of planes, one for each channel and, with strides, for each remainder of a column by them: what
// an element of the kernel meets along a row of places then lies side by side. A register tile has some channels that come
// out and some vectors of places; the kernel is read one number at a time. It is transposed as it is stored.
//
// Every element of y and dx is the same chain as in native_convolution.h, with the same bits. The kernel's gradient sums
// LANES chains, whatever the width of vectors, and adds them up at the end.
#ifndef DPTRAIN_NATIVE_PLANES_H
#define DPTRAIN_NATIVE_PLANES_H

namespace {
// Images in planes: element i of plane (c, f) is column left + f + i * sw of channel c.
template <class T> struct dp_Planes {
    static const int64_t LANES = 16;

    // Elements of a plane's line, and of a frame's, which has all planes.
    int64_t length, line;

    explicit dp_Planes(const dp_Patches<T> &from)
        : length(from.Q + (from.right - from.left) / from.sw), line(length * from.C * from.sw) {}

    // Rows of places whose frame the second cache holds, at least one.
    int64_t fitting(const dp_Patches<T> &from) const {
        return std::max((int64_t)1, std::min(from.P, (dp_FRAME / line - from.bottom + from.top - 1) / from.sh + 1));
    }

    // How far a patch's elements are from where the frame begins, for the first place of its first row.
    std::vector<int64_t> places(const dp_Patches<T> &from) const {
        std::vector<int64_t> found;
        found.reserve(from.depth());
        for (const dp_Tap<T> &tap : from.taps) {
            const int64_t column = tap.column - from.left, plane = column % from.sw * length + column / from.sw;
            for (int64_t c = 0; c < from.C; ++c)
                found.push_back((tap.row - from.top) * line + c * from.sw * length + plane);
        }
        return found;
    }

    // The frame of rows p to p1 of image b. A vector that reads past a plane finds numbers that belong elsewhere.
    T *stand(const dp_Patches<T> &from, int64_t b, int64_t p, int64_t p1) const {
        T *const frame = dp_scratch<T, 4>(from.lines(p1 - p) * line + LANES), *to = frame;
        for (int64_t h = p * from.sh + from.top; h <= (p1 - 1) * from.sh + from.bottom; ++h, to += line) {
            if (h < 0 || h >= from.H) {
                std::fill(to, to + line, (T)0);
                continue;
            }
            const T *const of = from.images + (b * from.H + h) * from.W * from.C;
            for (int64_t f = 0; f < from.sw; ++f) {
                const int64_t first = from.left + f;
                const int64_t low = std::min(length, first < 0 ? (from.sw - 1 - first) / from.sw : 0);
                const int64_t inside = first < from.W ? (from.W - first + from.sw - 1) / from.sw : 0;
                const int64_t high = std::max(low, std::min(length, inside));
                T *const plane = to + f * length;
                const int64_t pitch = from.sw * length, step = from.sw * from.C;
                const T *pixel = of + (first + low * from.sw) * from.C;
                for (int64_t c = 0; c < from.C; ++c) {
                    std::fill(plane + c * pitch, plane + c * pitch + low, (T)0);
                    std::fill(plane + c * pitch + high, plane + c * pitch + length, (T)0);
                }
                if (step == 1)
                    std::copy(pixel, pixel + high - low, plane + low);
                else
                    for (int64_t i = low; i < high; ++i, pixel += step)
                        for (int64_t c = 0; c < from.C; ++c) plane[c * pitch + i] = pixel[c];
            }
        }
        return frame;
    }
};

// What comes out of patches in planes; `own` is a dp_Convolved.
template <class T> struct dp_PlanesTile {
    typedef typename dp_Chains<T>::Vector Vector;
    static const int W = dp_Chains<T>::W;

    // Channels at most, of which many more compute no faster; and vectors of places: enough sums to hide how long an addition
    // takes.
    static const int CHANNELS = dp_MR < 6 ? dp_MR : 6;
    static constexpr int vectors(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

    // How many channels the next tile has, of those that are left.
    static int64_t next(int64_t left) {
        const int64_t tiles = (left + CHANNELS - 1) / CHANNELS;
        return (left + tiles - 1) / tiles;
    }

    // Take up k lines, of which the kernel has `rows` numbers each, in `sums` or besides them.
    template <int rows>
    static void chains(int64_t k, const int64_t *place, const T *const *from, const T *kernel, T *sums, bool add) {
        const int count = vectors(rows);
        Vector sum[rows][count];
        const T *at[count];
        DP_UNROLL
        for (int v = 0; v < count; ++v) at[v] = from[v];
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < count; ++v) sum[r][v] = Vector{};
        for (int64_t l = 0; l < k; ++l, kernel += rows) {
            Vector line[count];
            DP_UNROLL
            for (int v = 0; v < count; ++v) line[v] = *(const Vector *)(at[v] + place[l]);
            DP_UNROLL
            for (int r = 0; r < rows; ++r)
                DP_UNROLL
                for (int v = 0; v < count; ++v) sum[r][v] = dp_fma(kernel[r], line[v], sum[r][v]);
        }
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < count; ++v) {
                Vector *to = (Vector *)(sums + (r * count + v) * W);
                *to = add ? *to + sum[r][v] : sum[r][v];
            }
    }

    // Transpose the sums of so many places: two channels at a time, since single numbers take as long to store.
    template <int rows> static void store(const T *sums, int64_t places, T *out, int64_t column) {
        const int pitch = vectors(rows) * W;
        for (int r = 0; r + 1 < rows; r += 2, sums += 2 * pitch) {
            alignas(64) T pairs[2 * W];
            for (int q = 0; q < W; ++q) pairs[2 * q] = sums[q], pairs[2 * q + 1] = sums[pitch + q];
            for (int64_t q = 0; q < places; ++q) memcpy(out + q * column + r, pairs + 2 * q, 2 * sizeof(T));
        }
        for (int64_t q = 0; rows % 2 && q < places; ++q) out[q * column + rows - 1] = sums[q];
    }

    // Channels j to j + rows of rows p0 to p1 of an image.
    template <int rows, class Convolved>
    static void compute(const Convolved &own, const T *frame, int64_t b, int64_t p0, int64_t p1, int64_t j) {
        const int count = vectors(rows);
        const int64_t k = own.patches.depth(), blocks = (k + dp_DEPTH - 1) / dp_DEPTH, depth = (k + blocks - 1) / blocks;
        const int64_t across = (own.patches.Q + W - 1) / W, all = (p1 - p0) * across;
        const int64_t line = own.planes.line * own.patches.sh;
        alignas(64) T sums[rows * count * W];
        for (int64_t n = 0; n < all; n += count) {
            const T *from[count];
            for (int v = 0; v < count; ++v) {
                const int64_t one = std::min(n + v, all - 1);
                from[v] = frame + one / across * line + one % across * W;
            }
            for (int64_t l = 0; l < k; l += depth)
                chains<rows>(std::min(depth, k - l), own.place.data() + l, from, own.packed + j * k + l * rows, sums, l > 0);
            for (int v = 0; v < count && n + v < all; ++v) {
                const int64_t p = p0 + (n + v) / across, q = (n + v) % across * W;
                T *const to = own.out + b * own.image + p * own.row + q * own.column + j;
                store<rows>(sums + v * W, std::min((int64_t)W, own.patches.Q - q), to, own.column);
            }
        }
    }

    template <class Convolved>
    using Compute = void(const Convolved &, const T *, int64_t, int64_t, int64_t, int64_t);

    template <class Convolved, int... less>
    static Compute<Convolved> *of(int64_t rows, std::integer_sequence<int, less...>) {
        static Compute<Convolved> *const all[] = {compute<less + 1, Convolved>...};
        return all[rows - 1];
    }
};

// Sums over places of what lies in planes times dy, in planes too: for each element of the kernel LANES chains, side by side.
template <class T> struct dp_PlanesSums {
    typedef typename dp_Chains<T>::Vector Vector;
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Bits;
    typedef Bits Mask __attribute__((vector_size(dp_BYTES), aligned(sizeof(T)), may_alias));
    static const int W = dp_Chains<T>::W, LANES = dp_Planes<T>::LANES, parts = LANES / W;
    // A register tile has so many channels of dy at most, and so many elements of the kernel, or one.
    static const int REGISTERS = dp_MR < 8 ? 12 : 24, CHANNELS = dp_MR < 14 ? 3 : 6;
    static const int ELEMENTS = REGISTERS > CHANNELS * parts ? REGISTERS / (CHANNELS * parts) : 1;

    static int64_t next(int64_t left) { return left < ELEMENTS ? 1 : ELEMENTS; }

    // Rows of places, vectors of a row, and how many places the last one has.
    int64_t rows, vectors, last;
    // From one row to the next of the frame and of dy, and from one channel of dy to the next.
    int64_t line, of_dy, channel;

    dp_PlanesSums(const dp_Patches<T> &from, int64_t rows, int64_t N)
        : rows(rows), vectors((from.Q + LANES - 1) / LANES), last(from.Q - (vectors - 1) * LANES),
          line(dp_Planes<T>(from).line * from.sh), of_dy(N * vectors * LANES), channel(vectors * LANES) {}

    // dy (rows Q, N) in planes: (rows, N, vectors of places), zeros where there are none.
    const T *transposed(const T *dy, int64_t Q, int64_t N) const {
        T *const planes = dp_scratch<T, 6>(rows * of_dy);
        for (int64_t p = 0; p < rows; ++p)
            for (int64_t q = 0; q < Q; q += LANES)
                for (int64_t c = 0; c < N; c += 2) {  // two channels at a time, as dp_PlanesTile stores them
                    const int64_t places = std::min((int64_t)LANES, Q - q);
                    const T *const of = dy + (p * Q + q) * N + c;
                    T *const to = planes + p * of_dy + c * channel + q, pairs[2 * LANES];
                    if (places < LANES) std::fill(pairs, pairs + 2 * LANES, (T)0);
                    if (c + 1 < N) {
                        for (int64_t i = 0; i < places; ++i) memcpy(pairs + 2 * i, of + i * N, 2 * sizeof(T));
                        for (int64_t i = 0; i < LANES; ++i) to[i] = pairs[2 * i], to[channel + i] = pairs[2 * i + 1];
                    } else {
                        for (int64_t i = 0; i < places; ++i) pairs[i] = of[i * N];
                        std::copy(pairs, pairs + LANES, to);
                    }
                }
        return planes;
    }

    template <int elements, int channels>
    static void tile(const dp_PlanesSums &own, const int64_t *place, const T *frame, const T *dy, T *to, int64_t pitch, bool add) {
        Vector sum[elements][channels][parts];
        Mask inside[parts];
        DP_UNROLL
        for (int e = 0; e < elements; ++e)
            DP_UNROLL
            for (int c = 0; c < channels; ++c)
                DP_UNROLL
                for (int v = 0; v < parts; ++v) sum[e][c][v] = Vector{};
        for (int v = 0; v < parts; ++v)
            for (int i = 0; i < W; ++i) inside[v][i] = v * W + i < own.last ? -1 : 0;
        for (int64_t p = 0; p < own.rows; ++p, frame += own.line, dy += own.of_dy)
            for (int64_t n = 0; n < own.vectors; ++n) {
                const bool ends = n + 1 == own.vectors;  // behind it lie other planes, whose infinities are not to be met
                DP_UNROLL
                for (int v = 0; v < parts; ++v) {
                    Vector of[channels];
                    DP_UNROLL
                    for (int c = 0; c < channels; ++c) of[c] = *(const Vector *)(dy + c * own.channel + n * LANES + v * W);
                    DP_UNROLL
                    for (int e = 0; e < elements; ++e) {
                        Vector one = *(const Vector *)(frame + place[e] + n * LANES + v * W);
                        if (ends) one = (Vector)((Mask)one & inside[v]);
                        DP_UNROLL
                        for (int c = 0; c < channels; ++c) sum[e][c][v] = dp_fma(one, of[c], sum[e][c][v]);
                    }
                }
            }
        DP_UNROLL
        for (int e = 0; e < elements; ++e)
            DP_UNROLL
            for (int c = 0; c < channels; ++c)
                DP_UNROLL
                for (int v = 0; v < parts; ++v) {
                    Vector *const total = (Vector *)(to + e * pitch + c * LANES + v * W);
                    *total = add ? *total + sum[e][c][v] : sum[e][c][v];
                }
    }

    typedef void Tile(const dp_PlanesSums &, const int64_t *, const T *, const T *, T *, int64_t, bool);

    template <int elements, int... less> static Tile *of(int64_t channels, std::integer_sequence<int, less...>) {
        static Tile *const tiles[] = {tile<elements, less + 1>...};
        return tiles[channels - 1];
    }

    // Of ELEMENTS of the kernel, or one, `to` has (elements, N, LANES).
    void compute(int64_t elements, int64_t N, const int64_t *place, const T *frame, const T *dy, T *to, bool add) const {
        const int64_t tiles = (N + CHANNELS - 1) / CHANNELS;
        for (int64_t n = 0; n < tiles; ++n) {
            const int64_t c = N * n / tiles, channels = N * (n + 1) / tiles - c;
            const auto all = std::make_integer_sequence<int, CHANNELS>();
            Tile *const tile = elements == 1 ? of<1>(channels, all) : of<ELEMENTS>(channels, all);
            tile(*this, place, frame, dy + c * channel, to + c * LANES, N * LANES, add);
        }
    }
};
}  // namespace

#endif
