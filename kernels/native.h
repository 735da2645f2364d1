// What generated code for the CPU stands on, besides scalar.h: the context, reductions in a fixed order, products, loops
// that threads share.
//
// A sum adds up 16 interleaved partial sums and then these, whatever the width of the CPU's vectors, so that its bits
// depend on nothing but the numbers.
#ifndef DPTRAIN_NATIVE_H
#define DPTRAIN_NATIVE_H

#include <limits>

#ifdef __clang__
#define DP_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define DP_LOOP _Pragma("GCC ivdep")
#endif

// Those of native_threads.h and native_product.h, which are compiled once for all programs.
typedef void dp_Part(void *data, int64_t part);
typedef void dp_Parallel(int64_t threads, int64_t parts, dp_Part *f, void *data);
typedef void dp_Range(void *context, int64_t low, int64_t high);
template <class T>
using dp_Multiply = bool(int64_t threads, bool at, bool bt, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda,
                         const T *b, int64_t ldb, T *out, bool add, dp_Range *tail, void *context, bool by_rows,
                         int64_t operations);

struct Context {
    char **p;           // where roots lie
    const int64_t *n;   // rows of tables from which rows are gathered
    int64_t R, F, G;    // rows of this rank, the first of them, rows of the global batch
    int64_t *outside;   // set to 1 where a row is asked for that a table does not have
    int64_t threads;    // that a loop or a product may use
    dp_Parallel *parallel;
    dp_Multiply<float> *multiply_float;
    dp_Multiply<double> *multiply_double;
};

template <class T, int lanes> struct dp_Sum {
    T lane[lanes];
    dp_Sum() {
        for (int l = 0; l < lanes; ++l) lane[l] = 0;
    }
    void add(const T *v, int64_t n) {
        int64_t k = 0;
        for (; k + lanes <= n; k += lanes)
            for (int l = 0; l < lanes; ++l) lane[l] += v[k + l];
        for (int l = 0; k + l < n; ++l) lane[l] += v[k + l];
    }
    T total() {
        for (int half = lanes / 2; half; half /= 2)
            for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
        return lane[0];
    }
};

template <class T> DP_INLINE T dp_lowest() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
}

template <class T, int lanes> struct dp_Max {
    T lane[lanes];
    dp_Max() {
        for (int l = 0; l < lanes; ++l) lane[l] = dp_lowest<T>();
    }
    void add(const T *v, int64_t n) {
        int64_t k = 0;
        for (; k + lanes <= n; k += lanes)
            for (int l = 0; l < lanes; ++l) lane[l] = dp_maximum(lane[l], v[k + l]);
        for (int l = 0; k + l < n; ++l) lane[l] = dp_maximum(lane[l], v[k + l]);
    }
    T total() {
        for (int half = lanes / 2; half; half /= 2)
            for (int l = 0; l < half; ++l) lane[l] = dp_maximum(lane[l], lane[l + half]);
        return lane[0];
    }
};

// The first place of the greatest element; NaN is greater than all others.
template <class T> struct dp_Argmax {
    T best;
    int64_t place = 0, seen = 0;
    void add(const T *v, int64_t n) {
        for (int64_t k = 0; k < n; ++k)
            if ((seen == 0 && k == 0) || v[k] > best || (v[k] != v[k] && best == best)) best = v[k], place = seen + k;
        seen += n;
    }
    int64_t total() { return place; }
};

// A row of a table with `length` of them, counted from the end where it is negative.
template <class T> DP_INLINE int64_t dp_row(T asked, int64_t length, int64_t *outside) {
    int64_t row = (int64_t)asked;
    if (std::numeric_limits<T>::is_signed && row < 0) row += length;
    if (row < 0 || row >= length) {
        *outside = 1;
        return 0;
    }
    return row;
}

// Ask for a row that is read next: no hardware foresees which one of a table it will be, but it follows a long one.
template <class T> DP_INLINE void dp_prefetch(const T *row, int64_t length) {
    const int64_t size = length * sizeof(T) < 2048 ? length * sizeof(T) : 2048;
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch((const char *)row + at);
}

template <class T> DP_INLINE void dp_fill(T *v, int64_t n, T value) {
    for (int64_t k = 0; k < n; ++k) v[k] = value;
}

// Do rows 0 to `rows` of a loop whose rows do not need each other, on several threads where that pays. An operation on an
// element takes some 0.1 ns, handing a part over 1 us.
static inline void dp_rows(Context &c, void (*loop)(Context &, int64_t, int64_t), int64_t rows, int64_t operations) {
    struct Shared {
        Context &c;
        void (*loop)(Context &, int64_t, int64_t);
        int64_t rows, parts;
    } shared{c, loop, rows, operations >> 15};
    const int64_t most = rows < 4 * c.threads ? rows : 4 * c.threads;
    if (shared.parts > most) shared.parts = most;
    if (c.threads < 2 || shared.parts < 2) return loop(c, 0, rows);
    c.parallel(c.threads, shared.parts, [](void *data, int64_t part) {
        const Shared &s = *(Shared *)data;
        s.loop(s.c, s.rows * part / s.parts, s.rows * (part + 1) / s.parts);
    }, &shared);
}

// out (m, n) = a (m, k) times b (k, n), each transposed or not, with lda, ldb and n elements between the lines; or is
// added to it. A tail may be executed on each range of rows, or of columns, once it has been computed: whether it has been.
template <class T>
static bool dp_product(Context &c, bool at, bool bt, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda,
                       const T *b, int64_t ldb, T *out, bool add = false, dp_Range *tail = nullptr,
                       bool by_rows = false, int64_t operations = 0) {
    if (m == 0 || n == 0 || k == 0) {
        if (!add) dp_fill(out, m * n, (T)0);
        return false;
    }
    if constexpr (sizeof(T) == 4)
        return c.multiply_float(c.threads, at, bt, m, n, k, a, lda, b, ldb, out, add, tail, &c, by_rows, operations);
    else
        return c.multiply_double(c.threads, at, bt, m, n, k, a, lda, b, ldb, out, add, tail, &c, by_rows, operations);
}

// The same, and then a loop over the rows of out, or its columns, in which each needs no other of them.
template <class T, void (*loop)(Context &, int64_t, int64_t)>
static void dp_product_then(Context &c, bool at, bool bt, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda,
                            const T *b, int64_t ldb, T *out, bool by_rows, int64_t operations) {
    dp_Range *const tail = [](void *context, int64_t low, int64_t high) { loop(*(Context *)context, low, high); };
    if (!dp_product<T>(c, at, bt, m, n, k, a, lda, b, ldb, out, false, tail, by_rows, operations))
        dp_rows(c, loop, by_rows ? m : n, operations);
}

#endif
