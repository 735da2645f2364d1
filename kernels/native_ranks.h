// Sums over the ranks of a node, in memory that all of them see: without messages, copies or Python.
//
// Each rank writes its summand there and arrives; once all have, it adds up its share of the elements for all, and arrives
// again. Who waits looks at every turn at first, then lets others have the core, then sleeps for moments, and asks `attend`
// now and then whether to go on.
#ifndef DPTRAIN_NATIVE_RANKS_H
#define DPTRAIN_NATIVE_RANKS_H

#include <sched.h>
#include <time.h>

// A sum of arrays of `count` elements, each rank's and where it goes.
struct dp_Message {
    int64_t ranks, rank, count;
    char **given;
    char *found;
    int64_t *arrived;    // how often each rank has arrived, DP_APART numbers apart
    int64_t *own;        // of this rank's record (runtime/watch/records.py): how far it has come, and what it is in
    int64_t *beside[2];  // the same of its neighbours, or null
    int64_t call[5];     // what it is in here
    int64_t turns;       // of looking out before others may have the core
    void (*summed)(const dp_Message *m, int64_t low, int64_t high);
    int64_t (*attend)();  // not 0: give up
};

static const int64_t DP_APART = 8, DP_SUMMED = 512;
static const int DP_YIELDS = 1000, DP_ATTENDED = 32, DP_DEEPEST = 64;

static inline int64_t dp_seen(const int64_t *of) { return __atomic_load_n(of, __ATOMIC_ACQUIRE); }

// Whether a neighbour is in a collective of arrays too, but in another one: `Record.meets_otherwise`.
static inline bool dp_differs(const dp_Message *m, const int64_t *beside) {
    if (!beside || dp_seen(beside) != *m->own || !beside[3]) return false;
    bool differs = false;
    for (int n = 0; n < 5; ++n) differs |= beside[1 + n] != m->call[n];
    return differs && dp_seen(beside) == *m->own;
}

// Wait until all ranks have arrived; return whether to give up.
static inline bool dp_meet(const dp_Message *m) {
    int64_t *own = m->arrived + m->rank * DP_APART;
    const int64_t now = *own + 1;
    __atomic_store_n(own, now, __ATOMIC_RELEASE);
    for (int64_t r = 0, turn = 0; r < m->ranks; ++r)
        for (; dp_seen(m->arrived + r * DP_APART) < now; ++turn) {
            if (turn < m->turns) {
                DP_PAUSE();
            } else if (turn < m->turns + DP_YIELDS) {
                sched_yield();
            } else {
                const timespec moment = {0, 50000};
                nanosleep(&moment, nullptr);
                if (turn % DP_ATTENDED == 0 && m->attend()) return true;
            }
        }
    return false;
}

template <class T, class A, class S>
static inline void dp_add_two(S *__restrict out, const T *__restrict one, const T *__restrict other, int64_t n) {
    for (int64_t k = 0; k < n; ++k) out[k] = (S)((A)one[k] + (A)other[k]);
}

// In the tree of `TreeSum` (comm/node_sum.py).
template <class T> static void dp_add(const dp_Message *m, int64_t low, int64_t high) {
    typedef typename dp_Computed<T>::type A;
    const T *const *given = (const T *const *)m->given;
    T *found = (T *)m->found;
    if (m->ranks == 2) return dp_add_two<T, A>(found + low, given[0] + low, given[1] + low, high - low);
    A sums[DP_DEEPEST][DP_SUMMED];  // of subtrees
    int64_t sizes[DP_DEEPEST];
    for (int64_t at = low; at < high; at += DP_SUMMED) {
        const int64_t n = high - at < DP_SUMMED ? high - at : DP_SUMMED;
        int depth = 0;
        const auto merge = [&] {
            --depth;
            for (int64_t k = 0; k < n; ++k) sums[depth - 1][k] = sums[depth - 1][k] + sums[depth][k];
            sizes[depth - 1] += sizes[depth];
        };
        for (int64_t r = 0; r < m->ranks; r += 2) {
            if (r + 1 < m->ranks)
                dp_add_two<T, A>(sums[depth], given[r] + at, given[r + 1] + at, n);
            else
                for (int64_t k = 0; k < n; ++k) sums[depth][k] = (A)given[r][at + k];
            sizes[depth++] = r + 1 < m->ranks ? 2 : 1;
            while (depth > 1 && sizes[depth - 2] == sizes[depth - 1]) merge();
        }
        while (depth > 1) merge();
        for (int64_t k = 0; k < n; ++k) found[at + k] = (T)sums[0][k];
    }
}

// Exports the sum of a type, for each that dptrain/backend/cpu/compile.py names.
#define DP_ADD(T, NAME) \
    extern "C" void dp_add_##NAME(const dp_Message *m, int64_t low, int64_t high) { dp_add<T>(m, low, high); }

// Put the sum of all ranks' summands where it goes; return whether the ranks have given up.
extern "C" int64_t dp_sum(const dp_Message *m) {
    for (int n = 0; n < 5; ++n) m->own[1 + n] = m->call[n];
    __atomic_store_n(m->own, *m->own + 1, __ATOMIC_SEQ_CST);
    bool failed = (dp_differs(m, m->beside[0]) || dp_differs(m, m->beside[1])) && m->attend();
    failed = failed || dp_meet(m);
    if (!failed) {
        const int64_t step = (m->count / m->ranks + 63) / 64 * 64, low = m->rank * step;  // whole cache lines
        const int64_t high = m->rank == m->ranks - 1 || low + step > m->count ? m->count : low + step;
        if (low < high) m->summed(m, low, high);
        failed = dp_meet(m);
    }
    __atomic_store_n(m->own, *m->own + 1, __ATOMIC_RELEASE);
    return failed;
}

#endif
