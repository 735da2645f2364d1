// Attention without the matrix of scores, for generated code on a CPU.
//
// Of each head y (T, V) = softmax(scale q k' where the mask is true) v, and the gradients of q (T, H), k (S, H) and v
// (S, V). Arrays lie as (B, T, N, H) with N heads. Where `causal`, source s takes no part for target t < s. Masked scores
// are 0.7 of the lowest number, so that where nothing takes part all sources count alike.
//
// A thread computes heads, block by block of targets. A block has its scores of all sources, which stay in the second
// cache: memory grows with S, not with T S, and a row's maximum and sum are known before it is used. The gradients compute
// scores anew instead of reading them. k and v are transposed once a head, so that products read them where they lie.
// Sums over targets go through blocks in order; blocks depend on lengths alone. So bits depend on nothing else, neither on
// threads nor on what else is computed. Overwrites its outputs.
//
// Source: T. Dao, "FlashAttention-2", 2023, with rows of scores in a CPU's cache in the place of its tiles.
#ifndef DPTRAIN_NATIVE_ATTENTION_H
#define DPTRAIN_NATIVE_ATTENTION_H

struct dp_Mask {
    const bool *at;      // null for none
    int64_t b, n, t, s;  // elements from one to the next, 0 where it is broadcast
};

template <class T> struct dp_Heads {
    Context &c;
    int64_t B, N, targets, sources, H, V;
    const T *q, *k, *v;
    dp_Mask mask;
    T scale;
    bool causal;
    T *y;                      // of the forward pass
    const T *dy;               // of the gradients, each null where nobody asks
    T *dq, *dk, *dv;

    // Where head n of row b of an array (B, length, N, width) begins.
    int64_t head(int64_t b, int64_t n, int64_t length, int64_t width) const { return (b * length * N + n) * width; }

    int64_t blocks() const {
        const int64_t rows = sources <= 1024 ? 56 : 28;  // whole tiles of products, of as many as the cache holds
        return (targets + rows - 1) / rows;
    }
    int64_t begin(int64_t block) const { return targets * block / blocks(); }
    int64_t longest() const { return (targets + blocks() - 1) / blocks(); }

    // How many sources targets up to `end` see at most.
    int64_t seen(int64_t end) const { return causal && !mask.at ? dp_least(end, sources) : sources; }

    void product(bool at, bool bt, int64_t m, int64_t n, int64_t k_, const T *a, int64_t lda, const T *b, int64_t ldb, T *out,
                 bool add) const {
        dp_multiply(c, a)(c.parallel, 1, at, bt, m, n, k_, a, lda, b, ldb, out, add, nullptr, nullptr, 1, 0);
    }

    // to (width, length) = one head of an array (length, N, width), transposed.
    void transpose(T *to, const T *of, int64_t length, int64_t width) const {
        for (int64_t from = 0; from < length; from += 16)
            for (int64_t w = 0; w < width; ++w)
                for (int64_t l = from; l < dp_least(from + 16, length); ++l) to[w * length + l] = of[l * N * width + w];
    }

    bool takes_part(const bool *row, int64_t t, int64_t s) const { return (!row || row[s * mask.s]) && (!causal || s <= t); }

    const bool *row_of_mask(int64_t b, int64_t n, int64_t t) const {
        return mask.at ? mask.at + b * mask.b + n * mask.n + t * mask.t : nullptr;
    }

    // e = exp(score - the greatest) of targets i0 to i1, lines of `count` sources; sum = those of lines.
    void powers(int64_t b, int64_t n, int64_t i0, int64_t i1, int64_t count, const T *kt, T *e, T *sum) const {
        product(false, false, i1 - i0, count, H, q + head(b, n, targets, H) + i0 * N * H, N * H, kt, sources, e, false);
        const T out = (T)-0.7 * std::numeric_limits<T>::max();
        for (int64_t t = i0; t < i1; ++t, e += count) {
            const T factor = scale;
            DP_LOOP
            for (int64_t s = 0; s < count; ++s) e[s] *= factor;
            const bool *const row = row_of_mask(b, n, t);
            if (row) {
                for (int64_t s = 0; s < count; ++s) e[s] = takes_part(row, t, s) ? e[s] : out;
            } else {
                for (int64_t s = t + 1; causal && s < count; ++s) e[s] = out;
            }
            dp_Max<T, 16> most;
            most.add(e, count);
            const T greatest = most.total();
            DP_LOOP
            for (int64_t s = 0; s < count; ++s) e[s] = dp_exp(e[s] - greatest);
            dp_Sum<T, 16> all;
            all.add(e, count);
            sum[t - i0] = all.total();
        }
    }

    // Targets of blocks from `first` to `end` of head n of row b.
    void forward(int64_t b, int64_t n, int64_t first, int64_t end) const {
        const int64_t rows = longest();
        T *const kt = dp_scratch<T>(H * sources + rows * (sources + V + 1)), *const e = kt + H * sources;
        T *const part = e + rows * sources, *const sum = part + rows * V;
        transpose(kt, k + head(b, n, sources, H), sources, H);
        for (int64_t block = first; block < end; ++block) {
            const int64_t i0 = begin(block), i1 = begin(block + 1), count = seen(i1);
            powers(b, n, i0, i1, count, kt, e, sum);
            product(false, false, i1 - i0, V, count, e, count, v + head(b, n, sources, V), N * V, part, false);
            for (int64_t t = i0; t < i1; ++t) {
                T *const to = y + head(b, n, targets, V) + t * N * V;
                const T *const of = part + (t - i0) * V, whole = sum[t - i0];
                DP_LOOP
                for (int64_t j = 0; j < V; ++j) to[j] = of[j] / whole;
            }
        }
    }

    // p = powers over their sums, and ds = scale p (dp - the sum of p dp) where scores are not masked; from e and dp.
    void slopes(int64_t b, int64_t n, int64_t i0, int64_t i1, int64_t count, T *e, T *dp, const T *sum) const {
        for (int64_t t = i0; t < i1; ++t, e += count, dp += count) {
            const T whole = sum[t - i0], factor = scale;
            T lanes[16] = {};
            DP_LOOP
            for (int64_t s = 0; s < count; ++s) e[s] /= whole;
            int64_t s = 0;
            for (; s + 16 <= count; s += 16)
                for (int l = 0; l < 16; ++l) lanes[l] += e[s + l] * dp[s + l];
            for (int l = 0; s + l < count; ++l) lanes[l] += e[s + l] * dp[s + l];
            for (int half = 8; half; half /= 2)
                for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
            const T mean = lanes[0];
            DP_LOOP
            for (int64_t j = 0; j < count; ++j) dp[j] = e[j] * (dp[j] - mean) * factor;
            const bool *const row = row_of_mask(b, n, t);
            for (int64_t j = 0; row && j < count; ++j) dp[j] = takes_part(row, t, j) ? dp[j] : 0;
        }
    }

    void copy(T *to, const T *of, int64_t length, int64_t width) const {
        for (int64_t l = 0; l < length; ++l) memcpy(to + l * N * width, of + l * width, width * sizeof(T));
    }

    void backward(int64_t b, int64_t n) const {
        const int64_t rows = longest();
        T *const kt = dp_scratch<T>(2 * sources * (H + V) + rows * (2 * sources + H + 1)), *const vt = kt + H * sources;
        T *const own_dk = vt + V * sources, *const own_dv = own_dk + sources * H, *const e = own_dv + sources * V;
        T *const dp = e + rows * sources, *const own_dq = dp + rows * sources, *const sum = own_dq + rows * H;
        transpose(kt, k + head(b, n, sources, H), sources, H);
        transpose(vt, v + head(b, n, sources, V), sources, V);
        dp_fill(own_dk, sources * (H + V), (T)0);
        for (int64_t block = 0; block < blocks(); ++block) {
            const int64_t i0 = begin(block), i1 = begin(block + 1), count = seen(i1), m = i1 - i0;
            const T *const of_y = dy + head(b, n, targets, V) + i0 * N * V;
            powers(b, n, i0, i1, count, kt, e, sum);
            if (dq || dk) product(false, false, m, count, V, of_y, N * V, vt, sources, dp, false);
            if (!dq && !dk) dp_fill(dp, m * count, (T)0);
            slopes(b, n, i0, i1, count, e, dp, sum);
            if (dv) product(true, false, count, V, m, e, count, of_y, N * V, own_dv, true);
            if (dk)
                product(true, false, count, H, m, dp, count, q + head(b, n, targets, H) + i0 * N * H, N * H, own_dk, true);
            if (dq) {
                product(false, false, m, H, count, dp, count, k + head(b, n, sources, H), N * H, own_dq, false);
                copy(dq + head(b, n, targets, H) + i0 * N * H, own_dq, m, H);
            }
        }
        if (dk) copy(dk + head(b, n, sources, H), own_dk, sources, H);
        if (dv) copy(dv + head(b, n, sources, V), own_dv, sources, V);
    }

    void clear(T *of, int64_t size) const {
        if (of) dp_fill(of, size, (T)0);
    }

    bool is_empty() const {
        if (B * N * targets * sources * H * V) return false;
        clear(y, B * N * targets * V);
        clear(dq, B * N * targets * H), clear(dk, B * N * sources * H), clear(dv, B * N * sources * V);
        return true;
    }

    // Heads are parts that threads share; of few, blocks of targets as well.
    void run() {
        if (is_empty()) return;
        struct Shared {
            const dp_Heads &own;
            int64_t cuts;
        } shared{*this, 1};
        if (y && c.threads > 1 && B * N < 4 * c.threads) shared.cuts = dp_least(blocks(), (4 * c.threads + B * N - 1) / (B * N));
        c.parallel(c.threads, B * N * shared.cuts, [](void *data, int64_t part) {
            const Shared &s = *(Shared *)data;
            const dp_Heads &own = s.own;
            const int64_t number = part / s.cuts, cut = part % s.cuts, b = number / own.N, n = number % own.N;
            if (own.y)
                own.forward(b, n, own.blocks() * cut / s.cuts, own.blocks() * (cut + 1) / s.cuts);
            else
                own.backward(b, n);
        }, &shared);
    }
};

#endif
