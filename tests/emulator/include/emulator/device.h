// The CUDA language for g++: what nvcc's own headers and compiler supply to device code. Included before every
// source that the nvcc stand-in compiles. It keeps its own includes few, because every kernel pays for them.
#pragma once

// C's own headers where the source needs no others (nvcc.py): libstdc++ wraps math.h in templates that take a while.
#ifdef EMU_C_HEADERS
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include "emulator/abi.h"

// __global__, __shared__, __launch_bounds__ and __cluster_dims__ are no macros: the stand-in rewrites them.
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __constant__ __attribute__((section(".emu.constant")))
#define __managed__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __maxnreg__(count)
#define __nv_is_extended_device_lambda_closure_type(type) false
#ifndef __CUDACC_RTC__
#define CUDART_CB
#endif

#define EMU_INLINE static inline __attribute__((always_inline))
#define EMU_SITE EmuSite emu_site = {__builtin_FILE(), __builtin_LINE()}
#ifdef EMU_CHECKED
// Code that must not be seen by the checks; a call of its own, since the compiler only instruments whole functions.
#define EMU_UNSEEN __attribute__((noinline, no_sanitize("thread", "alignment")))
#else
#define EMU_UNSEEN __attribute__((always_inline))
#endif
#define EMU_RAW static inline EMU_UNSEEN

// What <type_traits> and <utility> have, of which these few lines are needed.
namespace emu {
template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;
template <class T> inline constexpr bool is_signed = T(-1) < T(0);
template <class T> struct Plain { using type = T; };
template <class T> struct Plain<const T> { using type = T; };
template <size_t... I> struct Indices {};
}  // namespace emu

// ---------------------------------------------------------------- vector types

#define EMU_VECTORS(type, base, a1, a2, a3, a4)                                                            \
    struct base##1 { type x; };                                                                            \
    struct __attribute__((aligned(a2))) base##2 { type x, y; };                                            \
    struct __attribute__((aligned(a3))) base##3 { type x, y, z; };                                         \
    struct __attribute__((aligned(a4))) base##4 { type x, y, z, w; };                                      \
    EMU_INLINE base##1 make_##base##1(type x) { return {x}; }                                              \
    EMU_INLINE base##2 make_##base##2(type x, type y) { return {x, y}; }                                   \
    EMU_INLINE base##3 make_##base##3(type x, type y, type z) { return {x, y, z}; }                        \
    EMU_INLINE base##4 make_##base##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMU_VECTORS(signed char, char, 1, 2, 1, 4)
EMU_VECTORS(unsigned char, uchar, 1, 2, 1, 4)
EMU_VECTORS(short, short, 2, 4, 2, 8)
EMU_VECTORS(unsigned short, ushort, 2, 4, 2, 8)
EMU_VECTORS(int, int, 4, 8, 4, 16)
EMU_VECTORS(unsigned, uint, 4, 8, 4, 16)
EMU_VECTORS(long, long, 8, 16, 8, 16)
EMU_VECTORS(unsigned long, ulong, 8, 16, 8, 16)
EMU_VECTORS(long long, longlong, 8, 16, 8, 16)
EMU_VECTORS(unsigned long long, ulonglong, 8, 16, 8, 16)
EMU_VECTORS(float, float, 4, 8, 4, 16)
EMU_VECTORS(double, double, 8, 16, 8, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return uint3{x, y, z}; }
};

// ---------------------------------------------------------------- where a thread is

#define threadIdx (*reinterpret_cast<const uint3 *>(&emu_self->thread_idx))
#define blockIdx (*reinterpret_cast<const uint3 *>(&emu_self->block_idx))
#define blockDim (*reinterpret_cast<const dim3 *>(&emu_self->block_dim))
#define gridDim (*reinterpret_cast<const dim3 *>(&emu_self->grid_dim))
#define warpSize 32

namespace emu {

// A group of __shared__ variables that one declaration makes. The driver decides where it lies.
template <class T, unsigned Id>
struct StaticShared {
    struct Entry : EmuSharedSlot {
        Entry() : EmuSharedSlot{"", sizeof(T), alignof(T), Id, 0, nullptr} {
            emu_register_slot(this);
        }
    };
    static inline Entry entry;
    static T &get() { return *reinterpret_cast<T *>(emu_self->shared_static + entry.offset); }
};

// `extern __shared__ T name[];` at file scope.
template <class T>
struct DynamicShared {
    operator T *() const { return reinterpret_cast<T *>(emu_self->shared_dynamic); }
};

template <class To, class From>
EMU_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    __builtin_memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace emu

// ---------------------------------------------------------------- barriers, votes, shuffles

EMU_INLINE void __syncthreads(EMU_SITE) { emu_block_barrier(EMU_COUNT, 0, emu_site); }
EMU_INLINE int __syncthreads_count(int predicate, EMU_SITE) { return emu_block_barrier(EMU_COUNT, predicate, emu_site); }
EMU_INLINE int __syncthreads_and(int predicate, EMU_SITE) { return emu_block_barrier(EMU_AND, predicate, emu_site); }
EMU_INLINE int __syncthreads_or(int predicate, EMU_SITE) { return emu_block_barrier(EMU_OR, predicate, emu_site); }
EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { emu_warp_barrier(mask, emu_site); }
EMU_INLINE unsigned __activemask() { return emu_active_mask(); }

namespace emu {

template <class T>
struct ShuffleLane {
    T value;
    unsigned source;  // lane to read from
    T result;
};

template <class T>
void shuffle_combine(void **lanes, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        auto *mine = static_cast<ShuffleLane<T> *>(lanes[lane]);
        if (mask >> mine->source & 1)
            mine->result = static_cast<ShuffleLane<T> *>(lanes[mine->source])->value;
        else
            __builtin_memset(static_cast<void *>(&mine->result), 0x7f, sizeof(T));  // undefined on a GPU: large or NaN
    }
}

template <class T>
EMU_INLINE T shuffle(unsigned mask, T value, unsigned source, const char *what, EmuSite site) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 2, 4 or 8 bytes");
    ShuffleLane<T> lane{value, source & 31, value};
    emu_warp_collective(mask, &lane, shuffle_combine<T>, what, site);
    return lane.result;
}

EMU_INLINE unsigned lane() { return emu_self->lane; }

struct VoteLane {
    int predicate;
    unsigned ballot;
};

inline void vote_combine(void **lanes, unsigned mask) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && static_cast<VoteLane *>(lanes[lane])->predicate) ballot |= 1u << lane;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<VoteLane *>(lanes[lane])->ballot = ballot;
}

struct MatchLane {
    unsigned long long value;
    unsigned any;
    int all;
};

inline void match_combine(void **lanes, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        auto *mine = static_cast<MatchLane *>(lanes[lane]);
        mine->any = 0;
        for (unsigned other = 0; other < 32; ++other)
            if (mask >> other & 1 && static_cast<MatchLane *>(lanes[other])->value == mine->value) mine->any |= 1u << other;
        mine->all = mine->any == mask;
    }
}

template <class T, class Op>
struct ReduceLane {
    T value;
};

template <class T, class Op>
void reduce_combine(void **lanes, unsigned mask) {
    // Pairs at distance 16, 8, .. 1, as cooperative groups do it in the hardware's way for floats.
    T values[32];
    bool have[32];
    for (unsigned lane = 0; lane < 32; ++lane) {
        have[lane] = mask >> lane & 1;
        if (have[lane]) values[lane] = static_cast<ReduceLane<T, Op> *>(lanes[lane])->value;
    }
    for (unsigned distance = 16; distance; distance /= 2)
        for (unsigned lane = 0; lane < distance; ++lane) {
            if (!have[lane + distance]) continue;
            values[lane] = have[lane] ? Op{}(values[lane], values[lane + distance]) : values[lane + distance];
            have[lane] = true;
        }
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<ReduceLane<T, Op> *>(lanes[lane])->value = values[0];
}

template <class Op, class T>
EMU_INLINE T reduce(unsigned mask, T value, const char *what, EmuSite site) {
    ReduceLane<T, Op> lane{value};
    emu_warp_collective(mask, &lane, reduce_combine<T, Op>, what, site);
    return lane.value;
}

struct Add { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

}  // namespace emu

template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
    unsigned lane = emu::lane(), w = static_cast<unsigned>(width);
    return emu::shuffle(mask, value, (lane & ~(w - 1)) | (static_cast<unsigned>(source) & (w - 1)), "__shfl_sync",
                        emu_site);
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    unsigned lane = emu::lane(), inside = lane & (static_cast<unsigned>(width) - 1);
    return emu::shuffle(mask, value, inside < delta ? lane : lane - delta, "__shfl_up_sync", emu_site);
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
    unsigned lane = emu::lane(), w = static_cast<unsigned>(width), inside = lane & (w - 1);
    return emu::shuffle(mask, value, inside + delta >= w ? lane : lane + delta, "__shfl_down_sync", emu_site);
}
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_SITE) {
    unsigned lane = emu::lane(), other = lane ^ static_cast<unsigned>(bits), w = static_cast<unsigned>(width);
    // A lane of a later segment is out of reach, one of an earlier segment is not.
    return emu::shuffle(mask, value, (other & ~(w - 1)) > (lane & ~(w - 1)) ? lane : other, "__shfl_xor_sync", emu_site);
}
EMU_INLINE unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    emu::VoteLane lane{predicate, 0};
    emu_warp_collective(mask, &lane, emu::vote_combine, "__ballot_sync", emu_site);
    return lane.ballot;
}
EMU_INLINE int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    emu::VoteLane lane{predicate, 0};
    emu_warp_collective(mask, &lane, emu::vote_combine, "__any_sync", emu_site);
    return lane.ballot != 0;
}
EMU_INLINE int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    emu::VoteLane lane{!predicate, 0};
    emu_warp_collective(mask, &lane, emu::vote_combine, "__all_sync", emu_site);
    return lane.ballot == 0;
}
template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value, EMU_SITE) {
    emu::MatchLane lane{0, 0, 0};
    __builtin_memcpy(&lane.value, &value, sizeof value);
    emu_warp_collective(mask, &lane, emu::match_combine, "__match_any_sync", emu_site);
    return lane.any;
}
template <class T>
EMU_INLINE unsigned __match_all_sync(unsigned mask, T value, int *predicate, EMU_SITE) {
    emu::MatchLane lane{0, 0, 0};
    __builtin_memcpy(&lane.value, &value, sizeof value);
    emu_warp_collective(mask, &lane, emu::match_combine, "__match_all_sync", emu_site);
    *predicate = lane.all;
    return lane.all ? lane.any : 0;
}
#define EMU_REDUCE(name, type, op) \
    EMU_INLINE type name(unsigned mask, type value, EMU_SITE) { return emu::reduce<emu::op>(mask, value, #name, emu_site); }
EMU_REDUCE(__reduce_add_sync, unsigned, Add)
EMU_REDUCE(__reduce_add_sync, int, Add)
EMU_REDUCE(__reduce_min_sync, unsigned, Min)
EMU_REDUCE(__reduce_min_sync, int, Min)
EMU_REDUCE(__reduce_max_sync, unsigned, Max)
EMU_REDUCE(__reduce_max_sync, int, Max)
EMU_REDUCE(__reduce_and_sync, unsigned, And)
EMU_REDUCE(__reduce_or_sync, unsigned, Or)
EMU_REDUCE(__reduce_xor_sync, unsigned, Xor)

EMU_INLINE void __threadfence() { emu_fence(); }
EMU_INLINE void __threadfence_block() { emu_fence_block(); }
EMU_INLINE void __threadfence_system() { emu_fence(); }
EMU_INLINE void __nanosleep(unsigned) { for (int i = 0; i < 256; ++i) emu_spin(); }
EMU_INLINE void __trap(EMU_SITE) { emu_trap(emu_site); }
EMU_INLINE void __brkpt() {}

// ---------------------------------------------------------------- atomics

namespace emu {

template <size_t Bytes> struct WordOf { using type = uint64_t; };
template <> struct WordOf<4> { using type = uint32_t; };
template <> struct WordOf<2> { using type = uint16_t; };
template <class T>
using Word = typename WordOf<sizeof(T)>::type;

template <class T>
EMU_RAW bool exchange_if(T *address, T &expected, T desired) {
    using W = Word<T>;
    W old = bits<W>(expected);
    bool done = __atomic_compare_exchange_n(reinterpret_cast<W *>(address), &old, bits<W>(desired), false,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    expected = bits<T>(old);
    return done;
}

template <class T>
EMU_RAW T load(const T *address) {
    return bits<T>(__atomic_load_n(reinterpret_cast<const Word<T> *>(address), __ATOMIC_SEQ_CST));
}

template <class T, class Change>
EMU_INLINE T atomic(T *address, Change change) {
#ifdef EMU_CHECKED
    emu_check(address, sizeof(T), EMU_ATOMIC);
#endif
    emu_spin();
    T old = load(address);
    while (!exchange_if(address, old, static_cast<T>(change(old)))) {
    }
    return old;
}

}  // namespace emu

#define EMU_ATOMIC_SUFFIXES(name, type, parameters, arguments)                  \
    EMU_INLINE type name##_block parameters { return name arguments; }          \
    EMU_INLINE type name##_system parameters { return name arguments; }
#define EMU_ATOMIC_OP(name, type, expression)                                                              \
    EMU_INLINE type name(type *address, type value) {                                                      \
        return emu::atomic(address, [=](type old) -> type { return expression; });                         \
    }                                                                                                      \
    EMU_ATOMIC_SUFFIXES(name, type, (type *address, type value), (address, value))

EMU_ATOMIC_OP(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value)))
EMU_ATOMIC_OP(atomicAdd, unsigned, old + value)
EMU_ATOMIC_OP(atomicAdd, unsigned long long, old + value)
EMU_ATOMIC_OP(atomicAdd, float, old + value)
EMU_ATOMIC_OP(atomicAdd, double, old + value)
EMU_ATOMIC_OP(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(value)))
EMU_ATOMIC_OP(atomicSub, unsigned, old - value)
#define EMU_ATOMIC_INTEGERS(name, expression)                 \
    EMU_ATOMIC_OP(name, int, expression)                      \
    EMU_ATOMIC_OP(name, unsigned, expression)                 \
    EMU_ATOMIC_OP(name, unsigned long long, expression)
EMU_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
EMU_ATOMIC_INTEGERS(atomicMax, old < value ? value : old)
EMU_ATOMIC_OP(atomicMin, long long, value < old ? value : old)
EMU_ATOMIC_OP(atomicMax, long long, old < value ? value : old)
EMU_ATOMIC_INTEGERS(atomicAnd, (old & value))
EMU_ATOMIC_INTEGERS(atomicOr, (old | value))
EMU_ATOMIC_INTEGERS(atomicXor, (old ^ value))
EMU_ATOMIC_INTEGERS(atomicExch, ((void)old, value))
EMU_ATOMIC_OP(atomicExch, float, ((void)old, value))
EMU_ATOMIC_OP(atomicInc, unsigned, (old >= value ? 0 : old + 1))
EMU_ATOMIC_OP(atomicDec, unsigned, (old == 0 || old > value ? value : old - 1))
#define EMU_ATOMIC_CAS(type)                                                                             \
    EMU_INLINE type atomicCAS(type *address, type compare, type value) {                                 \
        return emu::atomic(address, [=](type old) -> type { return old == compare ? value : old; });     \
    }                                                                                                    \
    EMU_ATOMIC_SUFFIXES(atomicCAS, type, (type *address, type compare, type value), (address, compare, value))
EMU_ATOMIC_CAS(int)
EMU_ATOMIC_CAS(unsigned)
EMU_ATOMIC_CAS(unsigned long long)
EMU_ATOMIC_CAS(unsigned short)

// ---------------------------------------------------------------- loads and stores with cache hints

#define EMU_LOAD(name) \
    template <class T> EMU_INLINE T name(const T *address) { return *address; }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldcv)
EMU_LOAD(__ldlu)
#define EMU_STORE(name) \
    template <class T, class V> EMU_INLINE void name(T *address, V value) { *address = value; }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)

EMU_INLINE size_t __cvta_generic_to_shared(const void *p) {
    return static_cast<size_t>(static_cast<const char *>(p) - emu_self->shared_static);
}
EMU_INLINE int __isShared(const void *p) { return emu_is_shared(p); }
EMU_INLINE int __isGlobal(const void *p) { return !emu_is_shared(p); }

// ---------------------------------------------------------------- arithmetic

#ifdef EMU_C_HEADERS  // C++ overloads these, C does not
#define EMU_OF_FLOAT(name) EMU_INLINE constexpr float name(float x) { return __builtin_##name##f(x); }
#define EMU_OF_FLOATS(name) EMU_INLINE constexpr float name(float x, float y) { return __builtin_##name##f(x, y); }
EMU_OF_FLOAT(acos) EMU_OF_FLOAT(acosh) EMU_OF_FLOAT(asin) EMU_OF_FLOAT(asinh) EMU_OF_FLOAT(atan) EMU_OF_FLOAT(atanh)
EMU_OF_FLOAT(cbrt) EMU_OF_FLOAT(ceil) EMU_OF_FLOAT(cos) EMU_OF_FLOAT(cosh) EMU_OF_FLOAT(erf) EMU_OF_FLOAT(erfc)
EMU_OF_FLOAT(exp) EMU_OF_FLOAT(exp2) EMU_OF_FLOAT(expm1) EMU_OF_FLOAT(fabs) EMU_OF_FLOAT(floor) EMU_OF_FLOAT(lgamma)
EMU_OF_FLOAT(log) EMU_OF_FLOAT(log10) EMU_OF_FLOAT(log1p) EMU_OF_FLOAT(log2) EMU_OF_FLOAT(nearbyint) EMU_OF_FLOAT(rint)
EMU_OF_FLOAT(round) EMU_OF_FLOAT(sin) EMU_OF_FLOAT(sinh) EMU_OF_FLOAT(sqrt) EMU_OF_FLOAT(tan) EMU_OF_FLOAT(tanh)
EMU_OF_FLOAT(tgamma) EMU_OF_FLOAT(trunc)
EMU_OF_FLOATS(atan2) EMU_OF_FLOATS(copysign) EMU_OF_FLOATS(fdim) EMU_OF_FLOATS(fmax) EMU_OF_FLOATS(fmin)
EMU_OF_FLOATS(fmod) EMU_OF_FLOATS(hypot) EMU_OF_FLOATS(pow) EMU_OF_FLOATS(remainder)
EMU_INLINE float fma(float x, float y, float z) { return fmaf(x, y, z); }
EMU_INLINE float abs(float x) { return fabsf(x); }
EMU_INLINE double abs(double x) { return fabs(x); }
EMU_INLINE long abs(long x) { return labs(x); }
EMU_INLINE long long abs(long long x) { return llabs(x); }
#endif

// glibc declares some of these names itself, so they are macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define __fdividef(x, y) ((x) / (y))
#define __fadd_rn(x, y) emu_add_rn(x, y)
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define __fma_rn(x, y, z) fma(x, y, z)

// Never contracted into a fused multiply-add: that is what they are for.
__attribute__((optimize("fp-contract=off"), noinline)) static float emu_mul_rn(float x, float y) { return x * y; }
__attribute__((optimize("fp-contract=off"), noinline)) static float emu_add_rn(float x, float y) { return x + y; }
EMU_INLINE float __fmul_rn(float x, float y) { return emu_mul_rn(x, y); }
EMU_INLINE float __fsub_rn(float x, float y) { return emu_add_rn(x, -y); }
EMU_INLINE float __fdiv_rn(float x, float y) { return x / y; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
EMU_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
EMU_INLINE float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
EMU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMU_INLINE float rsqrt(float x) { return rsqrtf(x); }
EMU_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
EMU_INLINE float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
EMU_INLINE float sinpif(float x) { return static_cast<float>(sin(M_PI * static_cast<double>(x))); }
EMU_INLINE float cospif(float x) { return static_cast<float>(cos(M_PI * static_cast<double>(x))); }
EMU_INLINE void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }
EMU_INLINE void sincos(float x, float *s, float *c) { sincosf(x, s, c); }
EMU_INLINE float fdividef(float x, float y) { return x / y; }

#define EMU_MIN_MAX(type)                                         \
    EMU_INLINE type min(type a, type b) { return b < a ? b : a; } \
    EMU_INLINE type max(type a, type b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
EMU_INLINE unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
EMU_INLINE unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
EMU_INLINE unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
EMU_INLINE unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
EMU_INLINE double min(float a, double b) { return fmin(a, b); }
EMU_INLINE double max(float a, double b) { return fmax(a, b); }

EMU_INLINE int __float_as_int(float x) { return emu::bits<int>(x); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
EMU_INLINE float __int_as_float(int x) { return emu::bits<float>(x); }
EMU_INLINE float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
EMU_INLINE long long __double_as_longlong(double x) { return emu::bits<long long>(x); }
EMU_INLINE double __longlong_as_double(long long x) { return emu::bits<double>(x); }

// Conversions saturate and take NaN to zero, unlike a C cast on the host.
namespace emu {
template <class To, class From>
EMU_INLINE To saturate(From x) {
    if (x != x) return 0;
    constexpr double low = is_signed<To> ? -static_cast<double>(1ull << (sizeof(To) * 8 - 1)) : 0.0;
    constexpr double high = static_cast<double>(1ull << (sizeof(To) * 8 - 1)) * (is_signed<To> ? 1.0 : 2.0);
    if (static_cast<double>(x) < low) return static_cast<To>(is_signed<To> ? To(1) << (sizeof(To) * 8 - 1) : 0);
    if (static_cast<double>(x) >= high) return static_cast<To>(~To(0) ^ (is_signed<To> ? To(1) << (sizeof(To) * 8 - 1) : To(0)));
    return static_cast<To>(x);
}
}  // namespace emu
#define EMU_CONVERT(prefix, from, suffix, to, f)                                                         \
    EMU_INLINE to prefix##2##suffix##_rn(from x) { return emu::saturate<to>(nearbyint##f(x)); }          \
    EMU_INLINE to prefix##2##suffix##_rz(from x) { return emu::saturate<to>(trunc##f(x)); }              \
    EMU_INLINE to prefix##2##suffix##_rd(from x) { return emu::saturate<to>(floor##f(x)); }              \
    EMU_INLINE to prefix##2##suffix##_ru(from x) { return emu::saturate<to>(ceil##f(x)); }
EMU_CONVERT(__float, float, int, int, f)
EMU_CONVERT(__float, float, uint, unsigned, f)
EMU_CONVERT(__float, float, ll, long long, f)
EMU_CONVERT(__double, double, int, int, )
EMU_CONVERT(__double, double, uint, unsigned, )
EMU_CONVERT(__double, double, ll, long long, )
EMU_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }
EMU_INLINE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
EMU_INLINE double __int2double_rn(int x) { return x; }
EMU_INLINE float __double2float_rn(double x) { return static_cast<float>(x); }

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
    return result;
}
EMU_INLINE int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
EMU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
// Every address is one of the host's.
EMU_INLINE void *__cvta_global_to_generic(size_t address) { return reinterpret_cast<void *>(address); }
EMU_INLINE int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
EMU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long all = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned s = selector >> (4 * i) & 15, byte = all >> (8 * (s & 7)) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
EMU_INLINE int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> (8 * i)) * static_cast<signed char>(b >> (8 * i));
    return c;
}
static inline EMU_UNSEEN long long clock64() {
    static long long ticks = 0;
    return __atomic_add_fetch(&ticks, 32, __ATOMIC_RELAXED);
}
EMU_INLINE int clock() { return static_cast<int>(clock64()); }

#ifndef CUDART_INF_F
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#endif

// ---------------------------------------------------------------- trampolines (used by the nvcc stand-in only)

constexpr emu_uint3 emu_cluster() { return {0, 0, 0}; }
constexpr emu_uint3 emu_cluster(unsigned x, unsigned y = 1, unsigned z = 1) { return {x, y, z}; }

namespace emu {

template <auto Function, class Signature = decltype(Function)>
struct Trampoline;

template <auto Function, class... P>
struct Trampoline<Function, void (*)(P...)> {
    static constexpr uint32_t count = sizeof...(P);
    struct Layout {
        uint32_t offsets[count + 1] = {}, sizes[count + 1] = {}, end = 0;
        constexpr Layout() {
            uint32_t aligns[count + 1] = {static_cast<uint32_t>(alignof(P))..., 1};
            uint32_t bytes[count + 1] = {static_cast<uint32_t>(sizeof(P))..., 0};
            for (uint32_t i = 0; i < count; ++i) {
                end = (end + aligns[i] - 1) / aligns[i] * aligns[i];
                offsets[i] = end;
                sizes[i] = bytes[i];
                end += bytes[i];
            }
        }
    };
    static constexpr Layout layout{};

    template <size_t... I>
    static inline EMU_UNSEEN void call(const char *arguments, Indices<I...>) {
        Function(*reinterpret_cast<const typename Plain<P>::type *>(arguments + layout.offsets[I])...);
    }
#ifdef EMU_CHECKED
    __attribute__((no_sanitize("thread", "alignment")))
#endif
    static void entry(const char *arguments) { call(arguments, Indices<__integer_pack(count)...>{}); }
};

struct Registration {
    template <class T>
    Registration(T, const char *name, void *function, unsigned max_threads, emu_uint3 cluster,
                 const uint32_t *shared, uint32_t shared_count, const char *lockstep) {
        EmuKernelInfo info{name,     function,      T::entry,    T::layout.offsets, T::layout.sizes,
                           T::count, T::layout.end, max_threads, cluster,           shared,
                           shared_count, lockstep};
        emu_register_kernel(&info);
    }
};

constexpr unsigned first(unsigned value, ...) { return value; }

}  // namespace emu
