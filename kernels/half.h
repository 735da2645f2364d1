// Half precision and float8: storage of numbers in two bytes or one. All that is computed of them is computed in float, so
// these types convert and no more. Rounding is to the nearest, to even between two, as by NumPy and ml_dtypes: of a double to
// float16 at once, to the others by way of float.
#ifndef DPTRAIN_HALF_H
#define DPTRAIN_HALF_H

#ifdef __CUDACC__
#define DP_MEMBER __device__ __forceinline__
#define DP_AS_BITS(x) ((unsigned int)__float_as_int(x))
#define DP_OF_BITS(x) __int_as_float((int)(x))
#define DP_COPIED(T)
#else
#define DP_MEMBER inline
#define DP_AS_BITS(x) ((unsigned int)dp_float_to_bits(x))
#define DP_OF_BITS(x) dp_bits_to_float((int32_t)(x))
// Copied as a number: GCC vectorizes no loop that copies a struct.
#define DP_COPIED(T)                 \
    T(const T &x) : bits(x.bits) {}  \
    T &operator=(const T &x) { return bits = x.bits, *this; }
#endif

// The upper half of a float: 8 bits of exponent, 7 of mantissa.
struct dp_bfloat16 {
    unsigned short bits;
    dp_bfloat16() = default;
    DP_COPIED(dp_bfloat16)
    DP_MEMBER dp_bfloat16(float x) {
        const unsigned int whole = DP_AS_BITS(x), rounded = whole + 0x7fffu + (whole >> 16 & 1u);
        bits = (unsigned short)(x != x ? (whole >> 16 & 0x8000u) | 0x7fc0u : rounded >> 16);
    }
    DP_MEMBER operator float() const { return DP_OF_BITS((unsigned int)bits << 16); }
};

// IEEE 754's binary16: 5 bits of exponent, 10 of mantissa.
struct dp_float16 {
    unsigned short bits;
    dp_float16() = default;
    DP_COPIED(dp_float16)
    template <typename T> DP_MEMBER dp_float16(T x) : dp_float16((float)x) {}
    // By way of a float that is rounded to odd, so that the second rounding is the double's own (S. Boldo, G. Melquiond,
    // "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    DP_MEMBER dp_float16(double x) {
        const float near = (float)x;
        const bool exact = near == x, above = (near < 0 ? -near : near) > (x < 0 ? -x : x);
        *this = dp_float16(exact ? near : DP_OF_BITS((DP_AS_BITS(near) - (above ? 1u : 0u)) | 1u));
    }
    DP_MEMBER dp_float16(float x) {
        const unsigned int whole = DP_AS_BITS(x), sign = whole >> 16 & 0x8000u, size = whole & 0x7fffffffu;
        if (size > 0x7f800000u) {
            bits = (unsigned short)(sign | 0x7e00u);
        } else if (size >= 0x477ff000u) {  // from 65520 on it rounds to infinity
            bits = (unsigned short)(sign | 0x7c00u);
        } else if (size < 0x38800000u) {  // below 2^-14 its steps are 2^-24: those of the mantissa of 0.5
            const float shifted = DP_OF_BITS(size) + 0.5f;
            bits = (unsigned short)(sign | (DP_AS_BITS(shifted) - 0x3f000000u));
        } else {
            bits = (unsigned short)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
        }
    }
    DP_MEMBER operator float() const {
        const unsigned int sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
        if (size >= 0x7c00u) return DP_OF_BITS(sign | 0x7f800000u | (size & 0x3ffu) << 13);
        if (size >= 0x400u) return DP_OF_BITS(sign | ((size << 13) + 0x38000000u));
        return DP_OF_BITS(sign | DP_AS_BITS((float)size * 5.9604644775390625e-08f));
    }
};

// The 8-bit numbers of P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433: 4 bits of exponent, 3 of
// mantissa, no infinities. What would round beyond 448 is NaN, as in JAX. Emulated only: no instruction of a GPU converts.
struct dp_float8_e4m3fn {
    unsigned char bits;
    dp_float8_e4m3fn() = default;
    DP_COPIED(dp_float8_e4m3fn)
    DP_MEMBER dp_float8_e4m3fn(float x) {
        const unsigned int whole = DP_AS_BITS(x), sign = whole >> 24 & 0x80u, size = whole & 0x7fffffffu;
        if (size > 0x43e80000u) {  // above 464
            bits = (unsigned char)(sign | 0x7fu);
        } else if (size < 0x3c800000u) {  // below 2^-6 its steps are 2^-9: those of the mantissa of 2^14
            const float shifted = DP_OF_BITS(size) + 16384.0f;
            bits = (unsigned char)(sign | (DP_AS_BITS(shifted) - 0x46800000u));
        } else {
            bits = (unsigned char)(sign | ((size - 0x3c000000u + 0x7ffffu + (size >> 20 & 1u)) >> 20));
        }
    }
    DP_MEMBER operator float() const {
        const unsigned int sign = (bits & 0x80u) << 24, size = bits & 0x7fu;
        if (size == 0x7fu) return DP_OF_BITS(sign | 0x7fc00000u);
        if (size >= 8u) return DP_OF_BITS(sign | ((size << 20) + 0x3c000000u));
        return DP_OF_BITS(sign | DP_AS_BITS((float)size * 0.001953125f));
    }
};

// The same with 5 bits of exponent and 2 of mantissa: the upper half of a float16.
struct dp_float8_e5m2 {
    unsigned char bits;
    dp_float8_e5m2() = default;
    DP_COPIED(dp_float8_e5m2)
    DP_MEMBER dp_float8_e5m2(float x) {
        const unsigned int whole = DP_AS_BITS(x), sign = whole >> 24 & 0x80u, size = whole & 0x7fffffffu;
        if (size > 0x7f800000u) {
            bits = (unsigned char)(sign | 0x7eu);
        } else if (size >= 0x47700000u) {  // from 61440 on it rounds to infinity
            bits = (unsigned char)(sign | 0x7cu);
        } else if (size < 0x38800000u) {  // below 2^-14 its steps are 2^-16: those of the mantissa of 2^7
            const float shifted = DP_OF_BITS(size) + 128.0f;
            bits = (unsigned char)(sign | (DP_AS_BITS(shifted) - 0x43000000u));
        } else {
            bits = (unsigned char)(sign | ((size - 0x38000000u + 0xfffffu + (size >> 21 & 1u)) >> 21));
        }
    }
    DP_MEMBER operator float() const {
        const unsigned int sign = (bits & 0x80u) << 24, size = bits & 0x7fu;
        if (size >= 0x7cu) return DP_OF_BITS(sign | 0x7f800000u | (size & 3u) << 21);
        if (size >= 4u) return DP_OF_BITS(sign | ((size << 21) + 0x38000000u));
        return DP_OF_BITS(sign | DP_AS_BITS((float)size * 1.52587890625e-05f));
    }
};

// The type in which numbers of T are computed and added up: narrow ones are rounded once, at the end.
template <class T> struct dp_Computed { typedef T type; };
template <> struct dp_Computed<dp_bfloat16> { typedef float type; };
template <> struct dp_Computed<dp_float16> { typedef float type; };
template <> struct dp_Computed<dp_float8_e4m3fn> { typedef float type; };
template <> struct dp_Computed<dp_float8_e5m2> { typedef float type; };

#endif
