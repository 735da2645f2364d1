// Products of matrices for generated code on a CPU.
//
// out (m, n) = a (m, k) times b (k, n), or is added to it; lda, ldb and n elements lie between the lines. With `at`, a is
// stored as (k, m); with `bt`, b as (n, k). Overwrites out, or adds to it.
//
// A register tile of MR rows and two vectors of columns stays in registers while k goes by: a column of a is read one
// number at a time, a row of b one vector at a time. Columns of b are copied side by side (packed) where many rows of a
// meet them, where b is transposed, and where they fill no vector; a batch of 32 reads them where they lie. Rows of a
// transposed a are packed as well where many columns meet them: what a tile reads one after the other lies a line apart,
// on more pages than the TLB holds. Blocks: DEPTH of k and WIDTH columns of b fit into the second cache beside HEIGHT
// rows of a, one tile's columns into the first.
//
// Compiled beside native_threads.h, and so that a product and a sum become one instruction.
//
// Every element is one chain of fused multiplications and additions a block of k, in order, whatever the tile, the
// thread and the other rows: its bits depend on the two vectors alone, and on whether the CPU has such an instruction.
//
// Source of the blocking: K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 34(3), 2008.
#ifndef DPTRAIN_NATIVE_PRODUCT_H
#define DPTRAIN_NATIVE_PRODUCT_H

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)  // 32 registers
static const int dp_BYTES = 64, dp_MR = 8;
#elif defined(__AVX__)  // 16
static const int dp_BYTES = 32, dp_MR = 6;
#elif defined(__aarch64__)  // 32
static const int dp_BYTES = 16, dp_MR = 8;
#else
static const int dp_BYTES = 16, dp_MR = 4;
#endif

static const int64_t dp_DEPTH = 256, dp_WIDTH = 512, dp_HEIGHT = 128;
// So few rows read b where it lies.
static const int64_t dp_FEW = 64;
// From so many tiles and lines on it pays to pack the rows of a transposed a.
static const int64_t dp_MANY = 12, dp_LONG = 64;
// From so many multiplications on a thread's part takes longer than handing it over (some 10 us of one core).
static const int64_t dp_PART = 1 << 19;

template <class T> struct dp_Product {
    typedef T Vector __attribute__((vector_size(dp_BYTES), aligned(sizeof(T)), may_alias));
    static const int W = dp_BYTES / sizeof(T), NR = 2 * W;

    bool at, bt, add;
    int64_t m, n, k;
    const T *a;
    int64_t lda;
    const T *b;
    int64_t ldb;
    T *out;
    int64_t parts;
    bool by_rows;

    template <int rows, int vectors, bool transposed>
    static void tile(int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T *out, int64_t n, bool add) {
        Vector sum[rows][vectors];
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) sum[r][v] = Vector{};
        for (int64_t l = 0; l < k; ++l) {
            Vector line[vectors];
            for (int v = 0; v < vectors; ++v) line[v] = *(const Vector *)(b + l * ldb + v * W);
            for (int r = 0; r < rows; ++r) {
                const T one = transposed ? a[l * lda + r] : a[r * lda + l];
                for (int v = 0; v < vectors; ++v) sum[r][v] += one * line[v];
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < vectors; ++v) {
                Vector *to = (Vector *)(out + r * n + v * W);
                *to = add ? *to + sum[r][v] : sum[r][v];
            }
    }

    typedef void Tile(int64_t, const T *, int64_t, const T *, int64_t, T *, int64_t, bool);

    template <int vectors, bool transposed> static Tile *of(int64_t rows) {
        static Tile *const tiles[] = {tile<1, vectors, transposed>, tile<2, vectors, transposed>,
                                      tile<3, vectors, transposed>, tile<4, vectors, transposed>,
                                      tile<5, vectors, transposed>, tile<6, vectors, transposed>,
                                      tile<7, vectors, transposed>, tile<8, vectors, transposed>};
        return tiles[rows - 1];
    }

    // Columns j to j + nr of b, lines l to l + kc, side by side and filled up with zeros.
    void pack(T *to, int64_t l, int64_t kc, int64_t j, int64_t nr, int64_t wide) const {
        if (nr != wide) std::fill(to, to + kc * wide, (T)0);
        for (int64_t line = 0; line < kc; ++line) {
            const T *from = bt ? b + j * ldb + l + line : b + (l + line) * ldb + j;
            if (bt)
                for (int64_t q = 0; q < nr; ++q) to[line * wide + q] = from[q * ldb];
            else if (nr == NR)
                memcpy(to + line * NR, from, NR * sizeof(T));
            else
                std::copy(from, from + nr, to + line * wide);
        }
    }

    // How many rows the next tile has, of those that are left: as evenly as tiles can have them.
    static int64_t next(int64_t left) {
        const int64_t tiles = (left + dp_MR - 1) / dp_MR;
        return (left + tiles - 1) / tiles;
    }

    // Rows i to i1 of a transposed a, lines l to l + kc, tile by tile.
    void pack_rows(T *to, int64_t i, int64_t i1, int64_t l, int64_t kc) const {
        for (int64_t rows; i < i1; i += rows) {
            rows = next(i1 - i);
            for (int64_t line = 0; line < kc; ++line, to += rows)
                std::copy(a + (l + line) * lda + i, a + (l + line) * lda + i + rows, to);
        }
    }

    // Rows m0 to m1 and columns n0 to n1 of the result.
    void block(int64_t m0, int64_t m1, int64_t n0, int64_t n1) const {
        static thread_local std::vector<T> memory, of_rows;
        const bool all = bt || m1 - m0 > dp_FEW;
        const int64_t size = dp_DEPTH * (dp_WIDTH + NR) + W;
        if ((all || (n1 - n0) % W) && (int64_t)memory.size() < size) memory.resize(size);
        const bool packs_rows = at && n1 - n0 >= dp_MANY * NR && k >= dp_LONG;
        if (packs_rows && of_rows.empty()) of_rows.resize(dp_HEIGHT * dp_DEPTH);
        T *const aligned = (T *)(((uintptr_t)memory.data() + dp_BYTES - 1) / dp_BYTES * dp_BYTES);
        for (int64_t j0 = n0; j0 < n1; j0 += dp_WIDTH)
            for (int64_t l = 0; l < k; l += dp_DEPTH) {
                const int64_t j1 = std::min(j0 + dp_WIDTH, n1), kc = std::min(dp_DEPTH, k - l);
                for (int64_t i0 = m0; i0 < m1; i0 += dp_HEIGHT) {
                    const int64_t i1 = std::min(i0 + dp_HEIGHT, m1);
                    if (packs_rows) pack_rows(of_rows.data(), i0, i1, l, kc);
                    for (int64_t j = j0; j < j1; j += NR) {
                        const int64_t nr = std::min((int64_t)NR, j1 - j), wide = nr > W ? NR : W;
                        const T *panel = b + l * ldb + j;
                        int64_t pitch = ldb;
                        if (all || nr != wide) {
                            T *packed = aligned + (j - j0) * kc;
                            if (i0 == m0) pack(packed, l, kc, j, nr, wide);
                            panel = packed, pitch = wide;
                        }
                        column(i0, i1, l, kc, packs_rows ? of_rows.data() : nullptr, panel, pitch, j, nr, wide);
                    }
                }
            }
    }

    // Rows i to i1 of one tile's columns; of_rows is what pack_rows has made of them, if it has.
    void column(int64_t i, int64_t i1, int64_t l, int64_t kc, const T *of_rows, const T *panel, int64_t pitch, int64_t j,
                int64_t nr, int64_t wide) const {
        const bool plus = add || l > 0;
        alignas(64) T edge[dp_MR * NR];
        for (int64_t rows; i < i1; i += rows) {
            rows = next(i1 - i);
            Tile *const tile = wide == NR ? (at ? of<2, true>(rows) : of<2, false>(rows))
                                          : (at ? of<1, true>(rows) : of<1, false>(rows));
            const T *from = of_rows ? of_rows : at ? a + l * lda + i : a + i * lda + l;
            const int64_t line = of_rows ? rows : lda;
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

    static void part(void *data, int64_t number) {
        const dp_Product &own = *(const dp_Product *)data;
        const int64_t length = own.by_rows ? own.m : own.n, step = own.by_rows ? dp_MR : NR;
        const int64_t tiles = (length + step - 1) / step;
        const int64_t from = tiles * number / own.parts * step;
        const int64_t to = std::min(tiles * (number + 1) / own.parts * step, length);
        own.by_rows ? own.block(from, to, 0, own.n) : own.block(0, own.m, from, to);
    }

    void run(int64_t threads) {
        // Few rows read all of b anyway: then threads share its columns.
        by_rows = m > dp_FEW && m / dp_MR > n / NR;
        const int64_t tiles = by_rows ? (m + dp_MR - 1) / dp_MR : (n + NR - 1) / NR;
        parts = threads < 2 ? 1 : std::min({tiles, 2 * threads, std::max(m * n * k / dp_PART, (int64_t)1)});
        dp_parallel(threads, parts, part, this);
    }
};

extern "C" void dp_product_float(int64_t threads, bool at, bool bt, int64_t m, int64_t n, int64_t k, const float *a,
                                 int64_t lda, const float *b, int64_t ldb, float *out, bool add) {
    dp_Product<float>{at, bt, add, m, n, k, a, lda, b, ldb, out, 1, false}.run(threads);
}

extern "C" void dp_product_double(int64_t threads, bool at, bool bt, int64_t m, int64_t n, int64_t k, const double *a,
                                  int64_t lda, const double *b, int64_t ldb, double *out, bool add) {
    dp_Product<double>{at, bt, add, m, n, k, a, lda, b, ldb, out, 1, false}.run(threads);
}

#endif
