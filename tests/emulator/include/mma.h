// nvcuda::wmma: matrix fragments spread over the lanes of a warp.
//
// How elements map to lanes is unspecified in CUDA; here element e of a fragment is x[e / 32] of lane e % 32. Inputs
// are rounded as the tensor core does it: TF32 keeps 10 bits of the mantissa (__float_to_tf32 rounds to nearest, ties
// away; what was not converted is cut off), bf16 and half are exact. Products are summed in double and rounded once
// to float, which is closer than the hardware's order of additions: compare with a tolerance.
#pragma once

#include "emulator/device.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}

template <class T> struct storage_of { using type = T; };
template <> struct storage_of<precision::tf32> { using type = float; };

template <class Use, int M, int N, int K> struct shape;
template <int M, int N, int K> struct shape<matrix_a, M, N, K> { static constexpr int rows = M, columns = K; };
template <int M, int N, int K> struct shape<matrix_b, M, N, K> { static constexpr int rows = K, columns = N; };
template <int M, int N, int K> struct shape<accumulator, M, N, K> { static constexpr int rows = M, columns = N; };

template <class T, int M, int N, int K>
constexpr bool exists = emu::same<T, precision::tf32>
                            ? M == 16 && N == 16 && K == 8
                            : (M == 16 && N == 16 && K == 16) || (M == 32 && N == 8 && K == 16) || (M == 8 && N == 32 && K == 16);

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static_assert(emu::same<Use, accumulator> || exists<T, M, N, K>, "no tensor core has this shape and type");
    using element_type = T;
    using storage_element_type = typename storage_of<T>::type;
    static constexpr int rows = shape<Use, M, N, K>::rows, columns = shape<Use, M, N, K>::columns;
    static constexpr int num_elements = rows * columns / 32;
    static constexpr int num_storage_elements = num_elements;
    storage_element_type x[num_elements];
};

EMU_INLINE float __float_to_tf32(float x) {
    uint32_t u = emu::bits<uint32_t>(x);
    if ((u & 0x7f800000u) != 0x7f800000u) u = (u + 0x1000u) & 0xffffe000u;
    return emu::bits<float>(u);
}

template <class Use, int M, int N, int K, class T, class Layout, class V>
EMU_INLINE void fill_fragment(fragment<Use, M, N, K, T, Layout> &f, V value) {
    for (auto &element : f.x) element = static_cast<typename storage_of<T>::type>(value);
}

namespace emulated {
// What the hardware's loads and stores need: 32 bytes' alignment of the first element, and rows 16 bytes apart or a
// multiple of that.
template <class S>
EMU_INLINE void check_place(const S *place, unsigned stride, const char *what, EmuSite site) {
    if (reinterpret_cast<uintptr_t>(place) % 32 || stride * sizeof(S) % 16)
        emu_misaligned_matrix(place, stride * sizeof(S), what, site);
}

template <class Fragment, class S>
EMU_INLINE void load(Fragment &f, const S *from, unsigned stride, bool by_rows) {
    for (int i = 0; i < Fragment::num_elements; ++i) {
        unsigned e = static_cast<unsigned>(i) * 32 + emu_self->lane;
        unsigned row = e / Fragment::columns, column = e % Fragment::columns;
        f.x[i] = from[by_rows ? row * stride + column : column * stride + row];
    }
}

template <class T> EMU_INLINE double value(typename storage_of<T>::type x) {
    if constexpr (emu::same<T, precision::tf32>)
        return emu::bits<float>(emu::bits<uint32_t>(x) & 0xffffe000u);
    else
        return static_cast<double>(static_cast<float>(x));
}

template <class D, class A, class B, class C>
struct Operands {
    D *d;
    const A *a;
    const B *b;
    const C *c;
};

template <int M, int N, int K, class D, class A, class B, class C>
void multiply(void **lanes, unsigned) {
    using All = Operands<D, A, B, C>;
    auto at = [&](unsigned lane) -> All & { return *static_cast<All *>(lanes[lane]); };
    static thread_local double a[M][K], b[K][N];
    for (unsigned e = 0; e < M * K; ++e)
        a[e / K][e % K] = value<typename A::element_type>(at(e % 32).a->x[e / 32]);
    for (unsigned e = 0; e < K * N; ++e)
        b[e / N][e % N] = value<typename B::element_type>(at(e % 32).b->x[e / 32]);
    for (unsigned e = 0; e < M * N; ++e) {
        double sum = static_cast<double>(static_cast<float>(at(e % 32).c->x[e / 32]));
        for (unsigned k = 0; k < K; ++k) sum += a[e / N][k] * b[k][e % N];
        at(e % 32).d->x[e / 32] = static_cast<typename D::storage_element_type>(static_cast<float>(sum));
    }
}
}  // namespace emulated

template <class Use, int M, int N, int K, class T, class Layout, class S>
EMU_INLINE void load_matrix_sync(fragment<Use, M, N, K, T, Layout> &f, const S *from, unsigned stride, EMU_SITE) {
    static_assert(!emu::same<Use, accumulator>, "an accumulator needs a layout_t");
    emulated::check_place(from, stride, "load_matrix_sync", emu_site);
    emu_warp_collective(0xffffffffu, nullptr, nullptr, "load_matrix_sync", emu_site);
    emulated::load(f, from, stride, emu::same<Layout, row_major>);
}
template <int M, int N, int K, class T, class S>
EMU_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T> &f, const S *from, unsigned stride, layout_t layout,
                                 EMU_SITE) {
    emulated::check_place(from, stride, "load_matrix_sync", emu_site);
    emu_warp_collective(0xffffffffu, nullptr, nullptr, "load_matrix_sync", emu_site);
    emulated::load(f, from, stride, layout == mem_row_major);
}
template <int M, int N, int K, class T, class S>
EMU_INLINE void store_matrix_sync(S *to, const fragment<accumulator, M, N, K, T> &f, unsigned stride, layout_t layout,
                                  EMU_SITE) {
    using F = fragment<accumulator, M, N, K, T>;
    emulated::check_place(to, stride, "store_matrix_sync", emu_site);
    emu_warp_collective(0xffffffffu, nullptr, nullptr, "store_matrix_sync", emu_site);
    for (int i = 0; i < F::num_elements; ++i) {
        unsigned e = static_cast<unsigned>(i) * 32 + emu_self->lane;
        unsigned row = e / F::columns, column = e % F::columns;
        to[layout == mem_row_major ? row * stride + column : column * stride + row] = f.x[i];
    }
}
template <int M, int N, int K, class TD, class TA, class LA, class TB, class LB, class TC>
EMU_INLINE void mma_sync(fragment<accumulator, M, N, K, TD> &d, const fragment<matrix_a, M, N, K, TA, LA> &a,
                         const fragment<matrix_b, M, N, K, TB, LB> &b, const fragment<accumulator, M, N, K, TC> &c,
                         EMU_SITE) {
    using D = fragment<accumulator, M, N, K, TD>;
    using A = fragment<matrix_a, M, N, K, TA, LA>;
    using B = fragment<matrix_b, M, N, K, TB, LB>;
    using C = fragment<accumulator, M, N, K, TC>;
    emulated::Operands<D, A, B, C> operands{&d, &a, &b, &c};
    emu_warp_collective(0xffffffffu, &operands, emulated::multiply<M, N, K, D, A, B, C>, "mma_sync", emu_site);
}

}  // namespace nvcuda::wmma
