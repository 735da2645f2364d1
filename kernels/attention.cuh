// Attention without the matrix of scores, and its gradients, on a GPU: memory grows with the length, not with its square.
//
// Of each head y (T, V) = softmax(scale q k' where the mask is true) v. Arrays lie as (B, length, N, width) with N heads.
// Where `causal`, source s takes no part for target t < s. Masked scores are 0.7 of the lowest number, so that where nothing
// takes part all sources count alike.
//
// A block keeps KEPT rows of a head in shared memory, queries or keys, and those of the other side pass by in tiles of
// PASSING. How its threads share the tile of scores, and multiply, is a Tile's matter: `FloatTile` here, which computes in
// float, also of half precision, or `HalfTile` (attention_half.cuh). Both have room for widths up to D, with zeros behind.
//
// The forward pass has for each target the greatest score so far and the sum of the powers e^(score - greatest); where a
// greater score comes, both the sum and y are scaled down. It leaves both, from which the gradients have the same weights
// again. These are two kernels of one body, without atomics: one keeps queries and sums over keys, one keeps keys and sums
// over queries. Shapes alone decide who adds what, in which order.
//
// Source: T. Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning", 2023.
#pragma once

#include "common.cuh"

#define ATTENTION_THREADS 128
// Bytes of shared memory of a FloatTile; four floats behind each row spread the rows over the banks.
#define ATTENTION_SHARED(D, KEPT, PASSING) (4 * ((KEPT + PASSING) * (D + 4) + KEPT * (PASSING + 4)))
#define ATTENTION_GRADIENTS_SHARED(D, KEPT, PASSING) (4 * ((KEPT + PASSING) * 2 * (D + 4) + KEPT * (PASSING + 4)))

struct Attention {
    int N, targets, sources, H, V;  // heads, lengths, widths of queries and of values
    const bool *mask;               // null for none
    Index mask_b, mask_n, mask_t, mask_s;  // elements from one to the next, 0 where it is broadcast
    float scale;
    bool causal;

    // Whether sources after a target have no weight. With a mask they have, where nothing takes part.
    __device__ __forceinline__ bool cuts() const { return causal && !mask; }

    __device__ __forceinline__ bool takes_part(int b, int n, int t, int s) const {
        return (!causal || s <= t) && (!mask || mask[b * mask_b + n * mask_n + t * mask_t + s * mask_s]);
    }

    __device__ __forceinline__ float score(float product, bool counts) const {
        return counts ? product * scale : (float)(-0.7 * 3.4028234663852886e38);
    }
};

// The head of a block, and the first of the rows that it keeps.
struct AttentionHead {
    int N, b, n, first;

    __device__ __forceinline__ AttentionHead(int block, int N, int tiles, int rows) : N(N) {
        const int head = block / tiles;
        b = head / N;
        n = head % N;
        first = block % tiles * rows;
    }

    // Where row `at` of the head is in an array (B, length, N, width).
    __device__ __forceinline__ Index place(int at, int length, int width) const {
        return (((Index)b * length + at) * N + n) * width;
    }
};

// A tile of scores (KEPT, PASSING) by 16 x 8 threads: thread (row, column) has every 16th row and every 8th column, so that
// a row belongs to eight neighbours in a warp. T becomes float on its way into shared memory.
template <class T, int D, int KEPT, int PASSING> struct FloatTile {
    static constexpr int ROWS = KEPT / 16, COLUMNS = PASSING / 8, EACH = D / 8, LANES = 8, BUFFERS = 1;
    static constexpr int PITCH = D + 4, WEIGHTS = PASSING + 4;
    static constexpr int KEPT_BYTES = KEPT * PITCH * 4, PASSING_BYTES = PASSING * PITCH * 4;
    typedef float Scores[ROWS][COLUMNS];
    typedef float Sums[ROWS][EACH];
    float *weights;  // that threads of a row share

    __device__ __forceinline__ FloatTile(char *end) : weights((float *)end) {}

    static __device__ __forceinline__ int row(int i) { return threadIdx.x / 8 + 16 * i; }
    static __device__ __forceinline__ int column(int j) { return threadIdx.x % 8 + 8 * j; }
    static __device__ __forceinline__ float &at(Scores &scores, int i, int j) { return scores[i][j]; }
    static __device__ __forceinline__ float &sum(Sums &sums, int i, int e) { return sums[i][e]; }
    static __device__ __forceinline__ void clear(Sums &sums) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int e = 0; e < EACH; ++e) sums[i][e] = 0.0f;
    }

    template <int PENDING> static __device__ __forceinline__ void wait() { __syncthreads(); }

    static __device__ __forceinline__ void load_kept(char *tile, const T *array, const AttentionHead &head, int length, int width) {
        load<KEPT>((float *)tile, array, head, head.first, length, width);
    }
    static __device__ __forceinline__ void load_passing(char *tile, const T *array, const AttentionHead &head, int from,
                                                        int length, int width) {
        load<PASSING>((float *)tile, array, head, from, length, width);
    }

    template <int COUNT>
    static __device__ __forceinline__ void load(float *tile, const T *array, const AttentionHead &head, int from, int length,
                                                int width) {
        const bool wide = width % 4 == 0 && (size_t)array % sizeof(Quad<T>) == 0;
#pragma unroll
        for (int q = 0; q < COUNT * D / 4 / ATTENTION_THREADS; ++q) {
            const int i = threadIdx.x + q * ATTENTION_THREADS, line = i / (D / 4), at = i % (D / 4) * 4;
            Quad<float> quad = {};
            if (from + line < length) {
                const T *const of_row = array + head.place(from + line, length, width);
                if (wide && at < width) {
                    const Quad<T> loaded = *reinterpret_cast<const Quad<T> *>(of_row + at);
#pragma unroll
                    for (int e = 0; e < 4; ++e) quad.of[e] = (float)loaded.of[e];
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (at + e < width) quad.of[e] = (float)of_row[at + e];
                }
            }
            *reinterpret_cast<Quad<float> *>(tile + line * PITCH + at) = quad;
        }
    }

    // The products of kept rows with passing ones.
    static __device__ __forceinline__ void multiply_rows(Scores &products, const char *kept, const char *passing) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) products[i][j] = 0.0f;
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            Quad<float> a[ROWS], b[COLUMNS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) a[i] = *reinterpret_cast<const Quad<float> *>((const float *)kept + row(i) * PITCH + d);
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                b[j] = *reinterpret_cast<const Quad<float> *>((const float *)passing + column(j) * PITCH + d);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) products[i][j] += a[i].of[e] * b[j].of[e];
        }
    }

    // Adds passing rows times weights, which the threads of a row, all of one warp, give each other; a thread has four
    // adjacent columns of every 32.
    __device__ __forceinline__ void add(Sums &sums, const Scores &factors, const char *passing) const {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) weights[row(i) * WEIGHTS + column(j)] = factors[i][j];
        __syncwarp();
#pragma unroll 1
        for (int p = 0; p < PASSING; p += 4) {
            Quad<float> of_row[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) of_row[i] = *reinterpret_cast<const Quad<float> *>(weights + row(i) * WEIGHTS + p);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int g = 0; g < EACH / 4; ++g) {
                    const Quad<float> values =
                        *reinterpret_cast<const Quad<float> *>((const float *)passing + (p + e) * PITCH + g * 32 + column(0) * 4);
#pragma unroll
                    for (int i = 0; i < ROWS; ++i)
#pragma unroll
                        for (int f = 0; f < 4; ++f) sums[i][4 * g + f] += of_row[i].of[e] * values.of[f];
                }
        }
    }

    // Stores the kept rows of a result (B, length, N, width).
    static __device__ __forceinline__ void store(float *array, const Sums &sums, const AttentionHead &head, int length,
                                                int width) {
        const bool wide = width % 4 == 0 && (size_t)array % sizeof(Quad<float>) == 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            if (head.first + row(i) < length)
#pragma unroll
                for (int g = 0; g < EACH / 4; ++g) {
                    Quad<float> quad;
#pragma unroll
                    for (int e = 0; e < 4; ++e) quad.of[e] = sums[i][4 * g + e];
                    store_quad(array + head.place(head.first + row(i), length, width), g * 32 + column(0) * 4, width, wide, quad);
                }
    }
};

// Over the neighbours that have a row of scores, the same on all.
template <int LANES, class Join> __device__ __forceinline__ float of_row_of_scores(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value = Join::join(value, from_lane(value, distance));
    return value;
}

// y (B, targets, N, V) and, unless null, sums (B, targets, N, 2): a target's greatest score and its sum of powers.
template <template <class, int, int, int> class Tile, int D, int KEPT, int PASSING, class T>
__device__ __forceinline__ void attention(void *shared, const Attention &of, int block, const T *q, const T *k, const T *v,
                                          float *y, float *sums) {
    typedef Tile<T, D, KEPT, PASSING> Own;
    const AttentionHead head(block, of.N, (of.targets + KEPT - 1) / KEPT, KEPT);
    char *const queries = (char *)shared, *const keys = queries + Own::KEPT_BYTES;
    char *const values = keys + (Own::BUFFERS - 1) * Own::PASSING_BYTES;  // with one buffer, in the place of the keys
    const Own own(values + Own::PASSING_BYTES);
    float greatest[Own::ROWS], whole[Own::ROWS];
    typename Own::Sums result;
#pragma unroll
    for (int i = 0; i < Own::ROWS; ++i) greatest[i] = -DP_INFINITY, whole[i] = 0.0f;
    own.clear(result);
    own.load_kept(queries, q, head, of.targets, of.H);
    const int end = of.cuts() ? min(head.first + KEPT, of.sources) : of.sources;
    for (int begin = 0; begin < end; begin += PASSING) {
        typename Own::Scores scores;
        __syncthreads();
        own.load_passing(keys, k, head, begin, of.sources, of.H);
        if (Own::BUFFERS == 2) own.load_passing(values, v, head, begin, of.sources, of.V);
        own.template wait<Own::BUFFERS - 1>();
        own.multiply_rows(scores, queries, keys);
#pragma unroll
        for (int i = 0; i < Own::ROWS; ++i) {
            const int t = min(head.first + own.row(i), of.targets - 1);
            float most = greatest[i];
#pragma unroll
            for (int j = 0; j < Own::COLUMNS; ++j) {
                const int s = begin + own.column(j);
                float &score = own.at(scores, i, j);
                score = s < of.sources ? of.score(score, of.takes_part(head.b, head.n, t, s)) : -DP_INFINITY;
                most = fmaxf(most, score);
            }
            most = of_row_of_scores<Own::LANES, Greatest>(most);
            const float base = most == -DP_INFINITY ? 0.0f : most, rest = dp_exp(greatest[i] - base);
            greatest[i] = most;
            whole[i] *= rest;
#pragma unroll
            for (int j = 0; j < Own::COLUMNS; ++j) {
                float &score = own.at(scores, i, j);
                score = dp_exp(score - base);
                whole[i] += score;
            }
#pragma unroll
            for (int e = 0; e < Own::EACH; ++e) own.sum(result, i, e) *= rest;
        }
        if (Own::BUFFERS == 1) {
            __syncthreads();
            own.load_passing(values, v, head, begin, of.sources, of.V);
        }
        own.template wait<0>();
        own.add(result, scores, values);
    }
    own.template wait<0>();  // where nothing has passed by
#pragma unroll
    for (int i = 0; i < Own::ROWS; ++i) {
        const int t = head.first + own.row(i);
        whole[i] = of_row_of_scores<Own::LANES, Sum>(whole[i]);
        if (sums && threadIdx.x % Own::LANES == 0 && t < of.targets) {
            float *const of_target = sums + head.place(t, of.targets, 2);
            of_target[0] = greatest[i];
            of_target[1] = whole[i];
        }
        if (of.sources)
#pragma unroll
            for (int e = 0; e < Own::EACH; ++e) own.sum(result, i, e) /= whole[i];
    }
    own.store(y, result, head, of.targets, of.V);
}

// With OF_KEYS the gradients of k (first) and of v (second), else that of q (first); null where nobody asks. From dy,
// `sums` and `means` (B, targets, N), the sums of y dy over V.
template <bool OF_KEYS, template <class, int, int, int> class Tile, int D, int KEPT, int PASSING, class T>
__device__ __forceinline__ void attention_gradients(void *shared, const Attention &of, int block, const T *dy, const T *q,
                                                    const T *k, const T *v, const float *sums, const float *means, float *first,
                                                    float *second) {
    typedef Tile<T, D, KEPT, PASSING> Own;
    constexpr int TARGETS = OF_KEYS ? Own::COLUMNS : Own::ROWS;  // that a thread has scores of
    const int kept = OF_KEYS ? of.sources : of.targets, others = OF_KEYS ? of.targets : of.sources;
    const AttentionHead head(block, of.N, (kept + KEPT - 1) / KEPT, KEPT);
    char *const kept_h = (char *)shared, *const kept_v = kept_h + Own::KEPT_BYTES;
    char *const other_h = kept_v + Own::KEPT_BYTES, *const other_v = other_h + Own::PASSING_BYTES;
    const Own own(other_v + Own::PASSING_BYTES);
    typename Own::Sums of_first, of_second;
    own.clear(of_first);
    own.clear(of_second);
    own.load_kept(kept_h, OF_KEYS ? k : q, head, kept, of.H);
    own.load_kept(kept_v, OF_KEYS ? v : dy, head, kept, of.V);
    const int begin = OF_KEYS && of.cuts() ? head.first : 0;  // from the first target that sees the first key
    const int end = !OF_KEYS && of.cuts() ? min(head.first + KEPT, others) : others;
    for (int passed = begin; passed < end; passed += PASSING) {
        typename Own::Scores weights, slopes;
        float greatest[TARGETS], share[TARGETS], mean[TARGETS];
        __syncthreads();
        own.load_passing(other_h, OF_KEYS ? q : k, head, passed, others, of.H);
        own.load_passing(other_v, OF_KEYS ? dy : v, head, passed, others, of.V);
#pragma unroll
        for (int n = 0; n < TARGETS; ++n) {
            const int t = OF_KEYS ? passed + own.column(n) : head.first + own.row(n);
            const Index place = head.place(min(t, of.targets - 1), of.targets, 1);
            greatest[n] = sums[2 * place];
            share[n] = 1.0f / sums[2 * place + 1];
            mean[n] = means[place];
        }
        own.template wait<0>();
        own.multiply_rows(weights, kept_h, other_h);
        own.multiply_rows(slopes, kept_v, other_v);
#pragma unroll
        for (int i = 0; i < Own::ROWS; ++i)
#pragma unroll
            for (int j = 0; j < Own::COLUMNS; ++j) {
                const int row = head.first + own.row(i), column = passed + own.column(j), n = OF_KEYS ? j : i;
                const int t = OF_KEYS ? column : row, s = OF_KEYS ? row : column;
                const bool is_there = t < of.targets && s < of.sources;
                const bool counts = is_there && of.takes_part(head.b, head.n, t, s);
                float &weight = own.at(weights, i, j), &slope = own.at(slopes, i, j);
                weight = is_there ? dp_exp(of.score(weight, counts) - greatest[n]) * share[n] : 0.0f;
                slope = counts ? weight * (slope - mean[n]) * of.scale : 0.0f;
            }
        if (OF_KEYS && second) own.add(of_second, weights, other_v);
        if (first) own.add(of_first, slopes, other_h);
    }
    own.template wait<0>();
    if (first) own.store(first, of_first, head, kept, of.H);
    if (OF_KEYS && second) own.store(second, of_second, head, kept, of.V);
}
