// What generated code for the CPU stands on, besides scalar.h: the context, reductions in a fixed order, products, loops
// that threads share.
//
// A sum along a row adds up 16 interleaved partial sums and then these, whatever the width of the CPU's vectors; one over
// rows adds up the sums of blocks of rows, whichever threads make them. So its bits depend on nothing but the numbers.
#ifndef DPTRAIN_NATIVE_H
#define DPTRAIN_NATIVE_H

#include <stdlib.h>
#include <time.h>

#include <limits>
#include <type_traits>

#ifdef __clang__
#define DP_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define DP_LOOP _Pragma("GCC ivdep")
#endif

typedef int64_t Index;  // into arrays

// Those of native_threads.h, native_product.h, native_convolution.h and native_winograd.h, which are compiled once for all
// programs.
typedef void dp_Part(void *data, int64_t part);
typedef void dp_Parallel(int64_t threads, int64_t parts, dp_Part *f, void *data);
typedef void dp_Range(void *context, int64_t low, int64_t high);
template <class F, class T>
using dp_Multiply = bool(dp_Parallel *parallel, int64_t threads, bool at, bool bt, int64_t m, int64_t n, int64_t k,
                         const F *a, int64_t lda, const F *b, int64_t ldb, T *out, bool add, dp_Range *epilogue,
                         void *context, int64_t step, int64_t operations);
template <class T>
using dp_Convolution = bool(dp_Parallel *parallel, int64_t threads, dp_Makes makes, const dp_Window *w, int64_t B,
                            int64_t I, int64_t O, const T *one, const T *other, T *out, dp_Range *epilogue,
                            void *context, int64_t step, int64_t operations);

// Types of factors, in the order of the table in dptrain/runtime/types.py.
enum dp_Factor { DP_FLOAT16, DP_FLOAT32, DP_FLOAT64, DP_BFLOAT16, DP_FACTORS };
static inline constexpr dp_Factor dp_factor(const dp_float16 *) { return DP_FLOAT16; }
static inline constexpr dp_Factor dp_factor(const float *) { return DP_FLOAT32; }
static inline constexpr dp_Factor dp_factor(const double *) { return DP_FLOAT64; }
static inline constexpr dp_Factor dp_factor(const dp_bfloat16 *) { return DP_BFLOAT16; }

struct Context {
    char **p;           // where roots lie
    const int64_t *n;   // rows of tables from which rows are gathered
    const uint64_t *seeds;
    int64_t R, F, G;    // rows of this rank, the first of them, rows of the global batch
    int64_t *outside;   // set to 1 if an index is out of range
    int64_t *stopped;   // not 0 once a signal has ended a loop of unknown length
    int64_t (*asks)(void);  // lets Python handle signals; not 0 if the program ends
    int64_t asked;      // when it did, in ms
    int64_t threads;    // that a loop or a product may use
    dp_Parallel *parallel;
    void *functions[DP_IMPLEMENTATIONS][DP_FACTORS];  // products and convolutions; null if the program has none such
    const struct dp_Message *const *messages;               // of native_ranks.h
    int64_t (*sum)(const struct dp_Message *message);       // over the ranks; not 0 where that fails
    char *sums;         // of blocks of rows, in the loop that is executed
    int64_t finished;   // steps of this call that have ended
    int64_t *marks;     // of a profile: pairs of a kernel and when it has ended, in ns; `marked` so far
    int64_t marked;
    const uint64_t *parameters;  // numbers by which programs of one text differ
};

// One of these: the bits of an integer, or of a double.
template <class T>
static inline T dp_parameter(const Context &c, int number) {
    if constexpr (std::is_floating_point_v<T>) {
        double value;
        memcpy(&value, c.parameters + number, sizeof(value));
        return (T)value;
    } else {
        return (T)c.parameters[number];
    }
}

// Notes for a profile that a kernel has ended, or that a step begins (-1).
static inline void dp_mark(Context &c, int64_t kernel) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t *mark = c.marks + 2 * c.marked++;
    mark[0] = kernel, mark[1] = 1000000000 * (int64_t)now.tv_sec + now.tv_nsec;
}

// Rows whose sums are added up before those of blocks are: a number that depends on that of all rows alone.
static inline int64_t dp_block(int64_t rows) { return rows <= 64 * 16 ? 16 : (rows + 63) / 64; }

// Whether a loop of unknown length goes on. Ten times a second Python handles signals, and may end it.
static inline bool dp_goes_on(Context &c, const bool *condition) {
    if (!*condition || *c.stopped) return false;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ms = 1000 * (int64_t)now.tv_sec + now.tv_nsec / 1000000;
    if (ms - c.asked >= 100) c.asked = ms, *c.stopped = c.asks();
    return !*c.stopped;
}

static inline void dp_swap(char *&a, char *&b) {
    char *c = a;
    a = b, b = c;
}

static inline int64_t dp_least(int64_t a, int64_t b) { return a < b ? a : b; }

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

// The sum of a number for each row, in the order of a loop over rows.
template <class T> struct dp_RowSum {
    int64_t block, left;
    T total_ = 0, own = 0;
    explicit dp_RowSum(int64_t rows) : block(dp_block(rows)), left(block) {}
    void add(const T *v, int64_t n) {
        for (int64_t k = 0; k < n; ++k) {
            own += v[k];
            if (--left == 0) total_ += own, own = 0, left = block;
        }
    }
    T total() { return left == block ? total_ : total_ + own; }
};

template <class T> DP_INLINE T dp_lowest() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
}

template <class T, int lanes> struct dp_Max {
    T lane[lanes];
    dp_Max() {
        for (int l = 0; l < lanes; ++l) lane[l] = dp_lowest<T>();
    }
    // Begin by vectors, which no compiler makes of dp_maximum, and return how many elements that were: 0 where one is NaN.
    int64_t begin(const T *v, int64_t n) {
        constexpr int W = dp_BYTES / sizeof(T), vectors = lanes / W;
        if constexpr (std::numeric_limits<T>::has_infinity && vectors) {
            typedef T Vector __attribute__((vector_size(dp_BYTES), aligned(sizeof(T)), may_alias));
            Vector most[vectors];
            for (int m = 0; m < vectors; ++m) most[m] = ((const Vector *)lane)[m];
            auto nan = most[0] != most[0];
            int64_t k = 0;
            for (; k + lanes <= n; k += lanes)
                for (int m = 0; m < vectors; ++m) {
                    const Vector line = ((const Vector *)(v + k))[m];
                    nan |= line != line;
                    most[m] = most[m] > line ? most[m] : line;
                }
            bool any = false;
            for (int m = 0; m < vectors; ++m) nan |= most[m] != most[m];
            for (int l = 0; l < W; ++l) any |= nan[l] != 0;
            if (any) return 0;
            for (int m = 0; m < vectors; ++m) ((Vector *)lane)[m] = most[m];
            return k;
        }
        return 0;
    }
    void add(const T *v, int64_t n) {
        int64_t k = begin(v, n);
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

// The index of a row, checked against the table's length.
template <class T> DP_INLINE int64_t dp_row(T asked, int64_t length, int64_t *outside) {
    const int64_t row = (int64_t)asked;
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

// A loop over rows, and the end of its sums over blocks of them; `s` are the numbers that they read.
typedef void dp_Loop(Context &c, const int *s, int64_t low, int64_t high);
typedef void dp_Ending(Context &c, const int *s, int64_t blocks);

// Do rows 0 to `rows` of a loop whose rows do not need each other, on several threads where that pays, which get multiples of
// `step` rows. An operation on an element takes some 0.1 ns, handing a part over 1 us.
static inline void dp_rows(Context &c, const int *s, dp_Loop *loop, int64_t rows, int64_t operations, int64_t step = 1) {
    struct Shared {
        Context &c;
        const int *s;
        dp_Loop *loop;
        int64_t rows, step, steps, parts;
        int64_t begin(int64_t part) const { return dp_least(steps * part / parts * step, rows); }
    } shared{c, s, loop, rows, step, (rows + step - 1) / step, operations >> 15};
    shared.parts = dp_least(shared.parts, dp_least(shared.steps, 4 * c.threads));
    if (shared.parts > c.threads) shared.parts -= shared.parts % c.threads;  // of three parts one of two threads has two
    if (c.threads < 2 || shared.parts < 2) return loop(c, s, 0, rows);
    c.parallel(c.threads, shared.parts, [](void *data, int64_t part) {
        const Shared &own = *(Shared *)data;
        own.loop(own.c, own.s, own.begin(part), own.begin(part + 1));
    }, &shared);
}

// The steps of a loop whose rows do not need each other, for rows `low` to `high`.
typedef void dp_Steps(Context &whole, int64_t low, int64_t high);

// A context of some of the rows, as a rank's, and of one thread where others have the rest; pointers become `p`.
static inline Context dp_of_rows(const Context &whole, char **p, int64_t low, int64_t high) {
    Context c = whole;
    c.p = p, c.R = high - low, c.F = whole.F + low;
    if (c.R < whole.R) c.threads = 1;
    return c;
}

// Do a loop's steps, each thread all of them for its rows, where most threads get `least` of them.
static inline void dp_steps(Context &c, dp_Steps *steps, int64_t least) {
    struct Shared {
        Context &c;
        dp_Steps *steps;
        int64_t parts;
    } shared{c, steps, dp_least(c.threads, c.R / least)};
    if (shared.parts < 2 || 2 * shared.parts < c.threads) return steps(c, 0, c.R);
    c.parallel(c.threads, shared.parts, [](void *data, int64_t part) {
        const Shared &own = *(Shared *)data;
        own.steps(own.c, own.c.R * part / own.parts, own.c.R * (part + 1) / own.parts);
    }, &shared);
}

// Memory of a thread's own, which grows; std::vector would take longer to compile than most programs.
struct dp_Memory {
    char *data = nullptr;
    int64_t size = 0;
    ~dp_Memory() { free(data); }
    // The first of so many bytes, with nothing that was there before.
    char *of(int64_t bytes) {
        if (bytes > size) {
            free(data);
            size = (bytes + 63) / 64 * 64;
            if (!(data = (char *)aligned_alloc(64, size))) abort();
        }
        return data;
    }
};

// Let a loop have memory for the sums of its blocks of rows, so many bytes each; return how many blocks.
static inline int64_t dp_blocks(Context &c, int64_t rows, int64_t bytes) {
    static thread_local dp_Memory memory;
    const int64_t blocks = (rows + dp_block(rows) - 1) / dp_block(rows);
    c.sums = memory.of(blocks * bytes);
    return blocks;
}

// The same for a loop that sums blocks of rows, and then their sums.
static inline void dp_summed(Context &c, const int *s, dp_Loop *loop, dp_Ending *ending, int64_t rows, int64_t operations,
                             int64_t bytes) {
    const int64_t blocks = dp_blocks(c, rows, bytes);
    dp_rows(c, s, loop, rows, operations, dp_block(rows));
    ending(c, s, blocks);
}

template <class F> static inline auto dp_multiply(const Context &c, const F *a) {
    return (dp_Multiply<F, typename dp_Computed<F>::type> *)c.functions[DP_PRODUCT][dp_factor(a)];
}

// What threads do next with rows of a result that they have just computed, multiples of `step` of them; and its operations
// on single elements.
struct dp_Epilogue {
    dp_Range *f;
    void *context;
    int64_t step, operations;
};

// out (m, n) = a (m, k) times b (k, n), each transposed or not, with lda, ldb and n elements between the lines; or is
// added to it. Returns whether the epilogue has been executed.
template <class F, class T>
static bool dp_product(Context &c, bool at, bool bt, int64_t m, int64_t n, int64_t k, const F *a, int64_t lda,
                       const F *b, int64_t ldb, T *out, bool add = false, const dp_Epilogue &then = {nullptr, nullptr, 1, 0}) {
    if (m == 0 || n == 0 || k == 0) {
        if (!add) dp_fill(out, m * n, (T)0);
        return false;
    }
    auto *const multiply = dp_multiply(c, a);
    return multiply(c.parallel, c.threads, at, bt, m, n, k, a, lda, b, ldb, out, add, then.f, then.context, then.step,
                    then.operations);
}

// Make something of so many rows, and then execute a loop over them in which none needs another: as the epilogue, where
// `make` returns that it has executed it.
template <dp_Loop *loop, class F>
static void dp_then(Context &c, const int *s, int64_t rows, int64_t operations, F make, int64_t step = 1) {
    struct Called {
        Context &c;
        const int *s;
    } called{c, s};
    dp_Range *const epilogue = [](void *context, int64_t low, int64_t high) {
        loop(((Called *)context)->c, ((Called *)context)->s, low, high);
    };
    if (!make(dp_Epilogue{epilogue, &called, step, operations})) dp_rows(c, s, loop, rows, operations, step);
}

// And the end of its sums, if it sums blocks of rows.
template <dp_Loop *loop, dp_Ending *ending, class F>
static void dp_then_summed(Context &c, const int *s, int64_t rows, int64_t operations, int64_t bytes, F make) {
    const int64_t blocks = dp_blocks(c, rows, bytes);
    dp_then<loop>(c, s, rows, operations, make, dp_block(rows));
    ending(c, s, blocks);
}

#endif
