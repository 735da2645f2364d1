// Products of matrices for generated code on a CPU.
//
// out (m, n) = a (m, k) times b (k, n), or is added to it; lda, ldb and n elements lie between the lines. With `at`, a is
// stored as (k, m); with `bt`, b as (n, k). Overwrites out, or adds to it.
//
// A register tile of MR rows and two vectors of columns stays in registers while k goes by: a column of a is read one
// number at a time, a row of b one vector at a time. Columns of b are copied side by side (packed) where many rows of a
// meet them, where b is transposed, and where they fill no vector; a batch of 32 reads them where they lie. Rows of a
// transposed a are packed as well where several tiles of columns meet them: what a tile reads one after the other lies a
// line apart, on more pages than the TLB holds. Blocks: some DEPTH of k of one tile's columns fit into the first cache,
// HEIGHT rows of a beside all columns of a layer into the second.
//
// Factors of half precision are all packed, and become float on the way: an element has the bits that float32 copies of
// them would give it, without the copies in memory. `dp_Chains` computes blocks of out; `dp_Product` is how threads share
// them, whoever computes them (native_tiles.h).
//
// Threads share the rows of out, after they have packed b together; of few rows, the columns, each packing its own. A
// thread runs the `epilogue`, what is computed from out next, on the rows that it has just made.
//
// A library of its own for each type, which takes long to compile: `parallel` is the threads' (native_threads.h).
//
// Every element is a chain of fused multiply-adds per block of k, in order, whatever the tile, the thread and the other
// rows. Its bits depend only on its row of a and its column of b, and on whether the CPU has FMA: all that have it agree,
// and of factors in half precision, whose products are exact in float, all CPUs.
// `dp_fma` spells the operation out. Left to contraction, a compiler fuses in one tile and not in the next: GCC tuned for
// Zen avoids chains of FMA.
//
// Source of the blocking: K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 34(3), 2008.
#ifndef DPTRAIN_NATIVE_PRODUCT_H
#define DPTRAIN_NATIVE_PRODUCT_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Loops over a tile become single instructions before its sums are given registers.
#define DP_UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)  // 32 registers
static const int dp_MR = 14;
#elif defined(__AVX__)  // 16
static const int dp_MR = 6;
#elif defined(__aarch64__)  // 32
static const int dp_MR = 8;
#else
static const int dp_MR = 4;
#endif

// sum + one * line, of one number or of as many: rounded once with FMA, twice without it.
#if defined(__AVX512F__)
static inline __m512 dp_fma(__m512 one, __m512 line, __m512 sum) { return _mm512_fmadd_ps(one, line, sum); }
static inline __m512d dp_fma(__m512d one, __m512d line, __m512d sum) { return _mm512_fmadd_pd(one, line, sum); }
static inline __m512 dp_fma(float one, __m512 line, __m512 sum) { return _mm512_fmadd_ps(_mm512_set1_ps(one), line, sum); }
static inline __m512d dp_fma(double one, __m512d line, __m512d sum) { return _mm512_fmadd_pd(_mm512_set1_pd(one), line, sum); }
#elif defined(__FMA__)
static inline __m256 dp_fma(__m256 one, __m256 line, __m256 sum) { return _mm256_fmadd_ps(one, line, sum); }
static inline __m256d dp_fma(__m256d one, __m256d line, __m256d sum) { return _mm256_fmadd_pd(one, line, sum); }
static inline __m256 dp_fma(float one, __m256 line, __m256 sum) { return _mm256_fmadd_ps(_mm256_set1_ps(one), line, sum); }
static inline __m256d dp_fma(double one, __m256d line, __m256d sum) { return _mm256_fmadd_pd(_mm256_set1_pd(one), line, sum); }
#elif defined(__aarch64__)
static inline float32x4_t dp_fma(float32x4_t one, float32x4_t line, float32x4_t sum) { return vfmaq_f32(sum, one, line); }
static inline float64x2_t dp_fma(float64x2_t one, float64x2_t line, float64x2_t sum) { return vfmaq_f64(sum, one, line); }
static inline float32x4_t dp_fma(float one, float32x4_t line, float32x4_t sum) { return vfmaq_n_f32(sum, line, one); }
static inline float64x2_t dp_fma(double one, float64x2_t line, float64x2_t sum) { return vfmaq_n_f64(sum, line, one); }
#else  // a macro: GCC makes a tile of inlined functions 10 % slower
#define dp_fma(one, line, sum) ((sum) + (one) * (line))
#endif

static const int64_t dp_DEPTH = 272, dp_HEIGHT = 140;
// So many elements of b are packed at a time: the second cache holds a layer of them. Of a gradient of weights, whose k is
// long, fewer would be few columns, for each of which the rows of a are packed anew.
static const int64_t dp_PACKED = 1 << 20;
// So few rows read b where it lies.
static const int64_t dp_FEW = 64;
// From so many columns and lines on it pays to pack the rows of a transposed a.
static const int64_t dp_MANY = 2, dp_LONG = 64;
// What copies so many elements is not worth handing over.
static const int64_t dp_COPIED = 1 << 15;

typedef void dp_Part(void *data, int64_t part);
typedef void dp_Parallel(int64_t threads, int64_t parts, dp_Part *f, void *data);
typedef void dp_Range(void *context, int64_t low, int64_t high);

// Memory of this thread's own, for so many elements.
template <class T, int use> static T *dp_scratch(int64_t size) {
    static thread_local std::vector<T> memory;
    const int64_t line = 64 / sizeof(T);
    if ((int64_t)memory.size() < size + line) memory.resize(size + line);
    return (T *)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

// Internal linkage: a process may load this library as compiled for several CPUs, and tables of tiles must not be shared.
namespace {
// How a thread computes a block of a product of factors F.
template <class F> struct dp_Chains {
    typedef F Factor;
    typedef std::conditional_t<sizeof(F) == 2, float, F> T;
    typedef T Sum, Packed;
    typedef T Vector __attribute__((vector_size(dp_BYTES), aligned(sizeof(T)), may_alias));
    static const int W = dp_BYTES / sizeof(T), MR = dp_MR, NR = 2 * W;
    // From so many multiplications on a thread's part takes longer than handing it over (some 10 us of one core).
    static const int64_t PART = 1 << 19;
    // Tiles read numbers of the type of their sums; others become it as they are packed.
    static const bool WIDENS = !std::is_same<F, T>::value;

    bool at, bt, add;
    int64_t m, n, k;
    const F *a;
    int64_t lda;
    const F *b;
    int64_t ldb;
    T *out;

    // Whether tiles can read b where it lies.
    bool reads_b() const { return !WIDENS && !bt; }

    static void copy(T *__restrict to, const F *__restrict from, int64_t count) {
        if constexpr (WIDENS)
            for (int64_t q = 0; q < count; ++q) to[q] = (T)from[q];
        else
            memcpy(to, from, count * sizeof(T));
    }

    template <int rows, int vectors, bool transposed>
    static void tile(int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T *out, int64_t n, bool add) {
        Vector sum[rows][vectors];
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) sum[r][v] = Vector{};
        for (int64_t l = 0; l < k; ++l) {
            Vector line[vectors];
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) line[v] = *(const Vector *)(b + l * ldb + v * W);
            DP_UNROLL
            for (int r = 0; r < rows; ++r) {
                const T one = transposed ? a[l * lda + r] : a[r * lda + l];
                DP_UNROLL
                for (int v = 0; v < vectors; ++v) sum[r][v] = dp_fma(one, line[v], sum[r][v]);
            }
        }
        DP_UNROLL
        for (int r = 0; r < rows; ++r)
            DP_UNROLL
            for (int v = 0; v < vectors; ++v) {
                Vector *to = (Vector *)(out + r * n + v * W);
                *to = add ? *to + sum[r][v] : sum[r][v];
            }
    }

    typedef void Tile(int64_t, const T *, int64_t, const T *, int64_t, T *, int64_t, bool);

    template <int vectors, bool transposed, int... less> static Tile *of(int64_t rows, std::integer_sequence<int, less...>) {
        static Tile *const tiles[] = {tile<less + 1, vectors, transposed>...};
        return tiles[rows - 1];
    }

    Tile *tile_of(int64_t rows, bool full) const {
        const auto all = std::make_integer_sequence<int, dp_MR>();
        return full ? (at ? of<2, true>(rows, all) : of<2, false>(rows, all))
                    : (at ? of<1, true>(rows, all) : of<1, false>(rows, all));
    }

    // Columns j to j + nr of b, lines l to l + kc, side by side and filled up with zeros.
    void pack(T *to, int64_t l, int64_t kc, int64_t j, int64_t nr, int64_t wide) const {
        if (nr != wide) std::fill(to, to + kc * wide, (T)0);
        if (bt) {  // lines of b in squares that the first cache holds
            for (int64_t from = 0; from < kc; from += W)
                for (int64_t q = 0; q < nr; ++q)
                    for (int64_t line = from; line < std::min(from + W, kc); ++line)
                        to[line * wide + q] = (T)b[(j + q) * ldb + l + line];
            return;
        }
        for (int64_t line = 0; line < kc; ++line) {
            const F *from = b + (l + line) * ldb + j;
            if (nr == NR)
                copy(to + line * NR, from, NR);
            else
                copy(to + line * wide, from, nr);
        }
    }

    // All lines of columns j to j1.
    void pack_columns(T *to, int64_t j, int64_t j1) const {
        for (int64_t nr; j < j1; j += nr, to += nr * k) {
            nr = std::min((int64_t)NR, j1 - j);
            pack(to, 0, k, j, nr, nr > W ? NR : W);
        }
    }

    // How many rows the next tile has, of those that are left: as evenly as tiles can have them.
    static int64_t next(int64_t left) {
        const int64_t tiles = (left + dp_MR - 1) / dp_MR;
        return (left + tiles - 1) / tiles;
    }

    // Copy `count` lines of `rows` elements, which lie `pitch` apart, side by side.
    template <int rows> static void lines(T *to, const F *from, int64_t pitch, int64_t count) {
        for (int64_t line = 0; line < count; ++line) copy(to + line * rows, from + line * pitch, rows);
    }

    typedef void Lines(T *, const F *, int64_t, int64_t);

    template <int... less> static Lines *lines_of(int64_t rows, std::integer_sequence<int, less...>) {
        static Lines *const all[] = {lines<less + 1>...};  // a copy of a length that is known is two instructions
        return all[rows - 1];
    }

    // Rows i to i1 of a, lines l to l + kc; of a transposed one tile by tile.
    void pack_rows(T *to, int64_t i, int64_t i1, int64_t l, int64_t kc) const {
        for (; !at && i < i1; ++i, to += kc) copy(to, a + i * lda + l, kc);
        for (int64_t from = 0; at && from < kc; from += W) {  // a few lines at a time: their pages are all at hand
            T *tile = to;
            for (int64_t row = i, rows; row < i1; row += rows, tile += rows * kc) {
                rows = next(i1 - row);
                Lines *const copies = lines_of(rows, std::make_integer_sequence<int, dp_MR>());
                copies(tile + from * rows, a + (l + from) * lda + row, lda, std::min((int64_t)W, kc - from));
            }
        }
    }

    // Rows m0 to m1 and columns n0 to n1 of the result; b as it lies, or packed from n0 on.
    void block(int64_t m0, int64_t m1, int64_t n0, int64_t n1, const T *packed) const {
        const bool packs_rows = WIDENS || (at && n1 - n0 >= dp_MANY * NR && k >= dp_LONG);
        T *const of_rows = packs_rows ? dp_scratch<T, 0>(dp_HEIGHT * dp_DEPTH) : nullptr;
        const int64_t blocks = (k + dp_DEPTH - 1) / dp_DEPTH, depth = (k + blocks - 1) / blocks;
        for (int64_t i0 = m0; i0 < m1; i0 += dp_HEIGHT) {
            const int64_t i1 = std::min(i0 + dp_HEIGHT, m1);
            for (int64_t l = 0; l < k; l += depth) {
                const int64_t kc = std::min(depth, k - l);
                if (packs_rows) pack_rows(of_rows, i0, i1, l, kc);
                for (int64_t j = n0; j < n1; j += NR) {
                    const int64_t nr = std::min((int64_t)NR, n1 - j), wide = nr > W ? NR : W;
                    const T *panel;
                    int64_t pitch = wide;
                    if (packed) {
                        panel = packed + (j - n0) * k + l * wide;
                    } else if (nr != wide) {
                        T *const edge = dp_scratch<T, 1>(dp_DEPTH * NR);
                        pack(edge, l, kc, j, nr, wide);
                        panel = edge;
                    } else {
                        panel = (const T *)(b + l * ldb + j), pitch = ldb;
                    }
                    tiles(i0, i1, l, kc, of_rows, panel, pitch, j, nr, wide);
                }
            }
        }
    }

    // Rows i to i1 of one tile's columns; of_rows is what pack_rows has made of them, if it has.
    void tiles(int64_t i, int64_t i1, int64_t l, int64_t kc, const T *of_rows, const T *panel, int64_t pitch, int64_t j,
                int64_t nr, int64_t wide) const {
        const bool plus = add || l > 0;
        alignas(64) T edge[dp_MR * NR];
        for (int64_t rows; i < i1; i += rows) {
            rows = next(i1 - i);
            Tile *const tile = tile_of(rows, wide == NR);
            const T *from = of_rows ? of_rows : (const T *)(at ? a + l * lda + i : a + i * lda + l);
            const int64_t line = of_rows ? (at ? rows : kc) : lda;
            if (of_rows) of_rows += rows * kc;
            T *to = out + i * n + j;
            if (nr == wide) {
                tile(kc, from, line, panel, pitch, to, n, plus);
            } else {
                tile(kc, from, line, panel, pitch, edge, wide, false);
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t q = 0; q < nr; ++q)
                        to[r * n + q] = plus ? to[r * n + q] + edge[r * wide + q] : edge[r * wide + q];
            }
        }
    }

    // Elements of columns n0 to n1 when they are packed.
    int64_t size(int64_t n0, int64_t n1) const { return k * ((n1 - n0 + W - 1) / W * W); }
};

// How threads share a product, whose blocks `Panels` computes.
template <class Panels> struct dp_Product : Panels {
    typedef typename Panels::Factor F;
    typedef typename Panels::Sum T;
    typedef typename Panels::Packed Packed;
    using Panels::MR, Panels::NR, Panels::at, Panels::bt, Panels::add, Panels::m, Panels::n, Panels::k, Panels::out;

    dp_Parallel *parallel;
    // What is done with multiples of `step` rows of out when they are computed, or null; and its operations on single
    // elements.
    dp_Range *epilogue;
    void *context;
    int64_t step, operations;
    // Of the job that threads share now: its parts, its columns, and these packed, tile by tile (null: each packs its own).
    bool by_rows;
    int64_t parts, first, last;
    Packed *packed;

    // Where a part of rows, or one of columns, begins; the next one's begin is its end.
    int64_t row(int64_t number) const { return std::min((m + step - 1) / step * number / parts * step, m); }
    int64_t column(int64_t number) const {
        return std::min((last - first + NR - 1) / NR * number / parts * NR + first, last);
    }

    static void pack_part(void *data, int64_t number) {
        const dp_Product &own = *(const dp_Product *)data;
        const int64_t from = own.column(number), to = own.column(number + 1);
        own.pack_columns(own.packed + own.size(own.first, from), from, to);
    }

    static void part(void *data, int64_t number) {
        const dp_Product &own = *(const dp_Product *)data;
        const int64_t from = own.by_rows ? own.row(number) : own.column(number);
        const int64_t to = own.by_rows ? own.row(number + 1) : own.column(number + 1);
        if (own.by_rows) {
            own.block(from, to, own.first, own.last, own.packed);
        } else if (!own.reads_b() || own.m > dp_FEW) {
            for (int64_t j = from, j1; j < to; j = j1) {
                j1 = std::min(j + own.together(), to);
                Packed *const packed = dp_scratch<Packed, 2>(own.size(j, j1));
                own.pack_columns(packed, j, j1);
                own.block(0, own.m, j, j1, packed);
            }
        } else {
            own.block(0, own.m, from, to, nullptr);
        }
        if (own.epilogue && own.last == own.n) own.epilogue(own.context, from, to);
    }

    // How many columns are packed at a time.
    int64_t together() const { return std::max(dp_PACKED / k / NR, (int64_t)1) * NR; }

    // The transposed product, b' a, whose lines are long where out has hardly a column.
    void run_transposed(int64_t threads) {
        T *const transposed = dp_scratch<T, 3>(m * n);
        const Panels swapped{!bt, false, false, n, m, k, this->b, this->ldb, this->a, this->lda, transposed};
        dp_Product{swapped, parallel, nullptr, nullptr, 1}.run(threads);
        for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j) out[i * n + j] = transposed[j * m + i];
    }

    // Whether the epilogue has been executed.
    bool run(int64_t threads) {
        if (at && !add && n < NR && n % Panels::W && m >= dp_MANY * NR) return run_transposed(threads), false;
        if (m <= dp_FEW) epilogue = nullptr;
        by_rows = epilogue || (m > dp_FEW && m / MR > n / NR);
        // Of rows a part has four tiles where that is enough for all threads, else two, which are as long as tiles can be.
        const int64_t tiles = m / (4 * MR) < threads ? 2 : 4, rows = m / std::max(tiles * MR, step);
        const int64_t most = std::min(by_rows ? rows : (n + NR - 1) / NR, 4 * threads);
        const int64_t shared = threads < 2 ? 1 : std::max(std::min(most, (m * n * k + operations * 16) / Panels::PART), (int64_t)1);
        first = 0, last = n, packed = nullptr, parts = shared;
        if (!by_rows) parallel(threads, parts, part, this);
        const bool lies = this->reads_b() && n <= NR && n % Panels::W == 0 && this->ldb == n;  // as if it were packed
        if (by_rows && lies) parallel(threads, parts, part, this);
        for (; by_rows && !lies && first < n; first = last) {
            last = std::min(first + together(), n);
            packed = dp_scratch<Packed, 2>(this->size(first, last));
            parts = shared > 1 && this->size(first, last) > dp_COPIED ? std::min((last - first + NR - 1) / NR, 2 * threads) : 1;
            parallel(threads, parts, pack_part, this);
            parts = shared;
            parallel(threads, parts, part, this);
        }
        return epilogue;
    }
};
}  // namespace

// Export products of factors F, whose blocks `Panels` computes, as dp_product_F.
#define DP_EXPORT(F, Panels)                                                                                              \
    extern "C" bool dp_product_##F(dp_Parallel *parallel, int64_t threads, bool at, bool bt, int64_t m, int64_t n,        \
                                   int64_t k, const F *a, int64_t lda, const F *b, int64_t ldb, Panels::Sum *out,         \
                                   bool add, dp_Range *epilogue, void *context, int64_t step, int64_t operations) {       \
        const Panels panels{at, bt, add, m, n, k, a, lda, b, ldb, out};                                                   \
        return dp_Product<Panels>{panels, parallel, epilogue, context, step, operations}.run(threads);                    \
    }
#define DP_PRODUCT(F) DP_EXPORT(F, dp_Chains<F>)

#endif
