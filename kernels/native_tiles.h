// Products of bfloat16 matrices in the tiles of a CPU with AMX, for generated code; where `dp_has_tiles` (native_cpu.h).
//
// A tile has 16 rows of 64 bytes: 16 x 16 sums; of a, 16 rows and 32 of k; of b, 16 columns and as many of k, which lie in
// pairs. `_tile_dpbf16ps` adds the product of two to the sums. Four tiles of sums, 32 x 32, stay in registers while k goes
// by. All factors are copied (packed) into tiles, filled up with zeros.
//
// Every element is, per 32 of k, in order: two chains of multiply-adds from 0, of the even and of the odd k, whose sum is
// added to the element. Products of two bfloat16 are exact in float32; sums are rounded to the nearest, to even between two;
// denormal numbers are 0. So bits depend only on a row of a and a column of b, as those of native_product.h do; they are
// other bits.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#ifndef DPTRAIN_NATIVE_TILES_H
#define DPTRAIN_NATIVE_TILES_H

namespace {
// As `dp_Chains`.
struct dp_Tiles {
    typedef dp_bfloat16 Factor, Packed;
    typedef float Sum;
    static const int W = 16, MR = 16, NR = 32;
    static const int64_t PART = 1 << 22;
    // Rows of a that are packed at a time, and how much of k: the second cache holds them beside two tiles' columns of b.
    static const int64_t HEIGHT = 128, DEPTH = 1024;
    // Of k in a tile, and elements of one.
    static const int64_t LINE = 32, TILE = 512;

    bool at, bt, add;
    int64_t m, n, k;
    const Factor *a;
    int64_t lda;
    const Factor *b;
    int64_t ldb;
    float *out;

    bool reads_b() const { return false; }  // it is always packed

    // Elements of columns n0 to n1 when they are packed.
    int64_t size(int64_t n0, int64_t n1) const { return tiles(k) * ((n1 - n0 + W - 1) / W) * TILE; }
    static int64_t tiles(int64_t length) { return (length + LINE - 1) / LINE; }

    // Rows become columns, of 16 x 16 numbers of four bytes: first within pairs, then of pairs, and so on.
    static void transpose(__m512i *row) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        DP_UNROLL
        for (int step = 1; step < 16; step *= 2) {
            const __m512i away = _mm512_set1_epi32(step), other = _mm512_set1_epi32(16);
            const __mmask16 odd = _mm512_test_epi32_mask(lane, away);
            const __m512i low = _mm512_mask_add_epi32(lane, odd, _mm512_sub_epi32(lane, away), other);
            const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, away), odd, lane, other);
            DP_UNROLL
            for (int i = 0; i < 16; ++i)
                if (!(i & step)) {
                    const __m512i one = row[i], two = row[i + step];
                    row[i] = _mm512_permutex2var_epi32(one, low, two);
                    row[i + step] = _mm512_permutex2var_epi32(one, high, two);
                }
        }
    }

    // One tile of a (rows of 32 of k) or of b (`paired`: rows of 16 columns, two of k in each), of x whose lines go along k
    // or, `across`, along the other axis; so much of either as is left.
    static void pack(Factor *to, const Factor *x, int64_t ld, bool across, bool paired, int64_t depth, int64_t width) {
        __m512i row[16];
        if (across) {
            const __mmask16 some = (__mmask16)(width >= 16 ? 0xffff : (1 << width) - 1);
            DP_UNROLL
            for (int i = 0; i < 16; ++i) {
                const __mmask16 first = 2 * i < depth ? some : 0, second = 2 * i + 1 < depth ? some : 0;
                const __m256i even = _mm256_maskz_loadu_epi16(first, x + 2 * i * ld);
                const __m256i odd = _mm256_maskz_loadu_epi16(second, x + (2 * i + 1) * ld);
                const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
                row[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), upper);
            }
        } else {
            const __mmask32 some = depth >= LINE ? ~(__mmask32)0 : ((__mmask32)1 << depth) - 1;
            DP_UNROLL
            for (int i = 0; i < 16; ++i) row[i] = _mm512_maskz_loadu_epi16(i < width ? some : 0, x + i * ld);
        }
        if (across != paired) transpose(row);
        DP_UNROLL
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * LINE, row[i]);
    }

    // All lines of columns j to j1.
    void pack_columns(Factor *to, int64_t j, int64_t j1) const {
        for (; j < j1; j += W)
            for (int64_t l = 0; l < k; l += LINE, to += TILE)
                pack(to, bt ? b + j * ldb + l : b + l * ldb + j, ldb, !bt, true, k - l, j1 - j);
    }

    // Rows i to i1 of a, lines l to l1.
    void pack_rows(Factor *to, int64_t i, int64_t i1, int64_t l0, int64_t l1) const {
        for (; i < i1; i += MR)
            for (int64_t l = l0; l < l1; l += LINE, to += TILE)
                pack(to, at ? a + l * lda + i : a + i * lda + l, lda, at, false, l1 - l, i1 - i);
    }

    // One or two tiles of rows times one or two of columns, `count` tiles deep. The second of rows lies `next_a` elements
    // behind the first, of columns `next_b`; the lines of out lie n elements apart.
    template <bool two_rows, bool two_columns>
    static void multiply(int64_t count, const Factor *a, int64_t next_a, const Factor *b, int64_t next_b, float *out,
                         int64_t n, bool add) {
        const int64_t pitch = n * sizeof(float);
        if (add) {
            _tile_loadd(0, out, pitch);
            if (two_columns) _tile_loadd(1, out + W, pitch);
            if (two_rows) _tile_loadd(2, out + MR * n, pitch);
            if (two_rows && two_columns) _tile_loadd(3, out + MR * n + W, pitch);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t t = 0; t < count * TILE; t += TILE) {
            _tile_loadd(4, a + t, 64);
            _tile_loadd(6, b + t, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (two_columns) _tile_loadd(7, b + next_b + t, 64);
            if (two_columns) _tile_dpbf16ps(1, 4, 7);
            if (two_rows) _tile_loadd(5, a + next_a + t, 64);
            if (two_rows) _tile_dpbf16ps(2, 5, 6);
            if (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, pitch);
        if (two_columns) _tile_stored(1, out + W, pitch);
        if (two_rows) _tile_stored(2, out + MR * n, pitch);
        if (two_rows && two_columns) _tile_stored(3, out + MR * n + W, pitch);
    }

    // Rows m0 to m1 and columns n0 to n1 of the result; b packed from n0 on.
    void block(int64_t m0, int64_t m1, int64_t n0, int64_t n1, const Factor *packed) const {
        alignas(64) struct {  // of eight tiles of 16 rows
            uint8_t palette = 1, first_row = 0, none[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        _tile_loadconfig(&shape);
        Factor *const of_rows = dp_scratch<Factor, 0>(HEIGHT * DEPTH);
        const int64_t blocks = (k + DEPTH - 1) / DEPTH, depth = tiles((k + blocks - 1) / blocks) * LINE;
        for (int64_t i0 = m0; i0 < m1; i0 += HEIGHT) {
            const int64_t i1 = std::min(i0 + HEIGHT, m1);
            for (int64_t l = 0; l < k; l += depth) {
                const int64_t l1 = std::min(l + depth, k), next = tiles(l1 - l) * TILE;
                pack_rows(of_rows, i0, i1, l, l1);
                for (int64_t j = n0; j < n1; j += NR) {
                    const Factor *of_columns = packed + size(n0, j) + l / LINE * TILE;
                    for (int64_t i = i0; i < i1; i += 2 * MR)
                        square(of_rows + (i - i0) / MR * next, next, of_columns, l, l1, i, i1, j, n1);
                }
            }
        }
        _tile_release();
    }

    // Rows i to i1 and columns j to j1, of which 32 are computed; lines l to l1.
    void square(const Factor *of_rows, int64_t next, const Factor *of_columns, int64_t l, int64_t l1, int64_t i, int64_t i1,
                int64_t j, int64_t j1) const {
        const int64_t rows = std::min(i1 - i, (int64_t)2 * MR), columns = std::min(j1 - j, (int64_t)NR);
        const bool plus = add || l > 0, fits = rows % MR == 0 && columns % W == 0;
        alignas(64) float edge[2 * MR * NR];
        float *const from = out + i * n + j, *const to = fits ? from : edge;
        if (!fits && plus)
            for (int64_t r = 0; r < rows; ++r) std::copy(from + r * n, from + r * n + columns, edge + r * NR);
        auto *const of = rows > MR ? (columns > W ? multiply<true, true> : multiply<true, false>)
                                   : (columns > W ? multiply<false, true> : multiply<false, false>);
        of(tiles(l1 - l), of_rows, next, of_columns, tiles(k) * TILE, to, fits ? n : NR, plus);
        if (!fits)
            for (int64_t r = 0; r < rows; ++r) std::copy(edge + r * NR, edge + r * NR + columns, from + r * n);
    }
};
}  // namespace

#endif
