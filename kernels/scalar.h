// Functions of single elements, for code that is generated from `Element.c`: the C++ of a CPU and CUDA alike.
//
// Semantics are NumPy's: NaN goes through maximum and minimum, integer division rounds down. On a CPU exp, expm1, log,
// log1p, tanh, erf and what is made of them are polynomials without branches, so that loops over them become vector
// instructions; every element has the same bits wherever it stands in a vector. Error of exp and log below 1 ulp, of the others below 2 ulp.
//
// Source of the polynomials, of erf apart: S. Moshier, Cephes mathematical library (expf.c, logf.c, tanhf.c).
#ifndef DPTRAIN_SCALAR_H
#define DPTRAIN_SCALAR_H

#ifdef __CUDACC__
#define DP_INLINE __device__ __forceinline__
#define DP_INFINITY __int_as_float(0x7f800000)
#define DP_NAN __int_as_float(0x7fffffff)
#else
// C's own header: libstdc++ wraps it in templates that take half of a small program's compilation. Others ignore the name.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>
#include <string.h>
#define DP_INLINE static inline
#if defined(__AVX512F__)
static const int dp_BYTES = 64;  // of a vector
#elif defined(__AVX__)
static const int dp_BYTES = 32;
#else
static const int dp_BYTES = 16;
#endif
#define DP_INFINITY __builtin_inff()
#define DP_NAN __builtin_nanf("")
DP_INLINE float dp_bits_to_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
DP_INLINE int32_t dp_float_to_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
#endif

// A whole number as a fraction, of which none is -0.
template <class T, class I> DP_INLINE T dp_number(I whole) {
    const T made = (T)whole;
    return made + (T)0;
}

template <class T> DP_INLINE T dp_maximum(T a, T b) { return (a > b || a != a) ? a : b; }
template <class T> DP_INLINE T dp_minimum(T a, T b) { return (a < b || a != a) ? a : b; }
template <class T> DP_INLINE T dp_absolute(T x) { return x < 0 ? (T)(-x) : x; }
template <class T> DP_INLINE T dp_sign(T x) { return x > 0 ? (T)1 : x < 0 ? (T)(-1) : x == 0 ? (T)0 : x; }

DP_INLINE float dp_absolute(float x) { return fabsf(x); }
DP_INLINE double dp_absolute(double x) { return fabs(x); }

// The greatest integer that is at most a / b; 0 where integers are divided by 0, as NumPy. The least integer over -1 is itself.
template <class T> DP_INLINE T dp_floor_divide(T a, T b) {
    if (b == 0) return 0;
    if ((T)(-1) < (T)0 && b == (T)(-1)) return (T)(0ULL - (unsigned long long)a);
    T quotient = (T)(a / b);
    return (a % b != 0 && (a < 0) != (b < 0)) ? (T)(quotient - 1) : quotient;
}
DP_INLINE double dp_floor_divide(double a, double b) {
    if (b == 0) return a / b;
    double rest = fmod(a, b);
    double quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return copysign(0.0, a / b);
    double whole = floor(quotient);
    return quotient - whole > 0.5 ? whole + 1 : whole;
}
DP_INLINE float dp_floor_divide(float a, float b) {
    if (b == 0) return a / b;
    float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return copysignf(0.0f, a / b);
    float whole = floorf(quotient);
    return quotient - whole > 0.5f ? whole + 1 : whole;
}

// The remainder with a's sign; 0 where integers are divided by 0.
template <class T> DP_INLINE T dp_fmod(T a, T b) {
    return b == 0 || ((T)(-1) < (T)0 && b == (T)(-1)) ? (T)0 : (T)(a % b);
}
DP_INLINE double dp_fmod(double a, double b) { return fmod(a, b); }
DP_INLINE float dp_fmod(float a, float b) { return fmodf(a, b); }

// The remainder with b's sign, also that of 0. A sum, not a - b floor(a / b), which leaves [0, b) where the quotient is rounded.
template <class T> DP_INLINE T dp_mod(T a, T b) {
    T rest = dp_fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? (T)(rest + b) : rest;
}
DP_INLINE double dp_mod(double a, double b) {
    double rest = fmod(a, b);
    if (rest == 0) return copysign(0.0, b);
    return (b < 0) != (rest < 0) ? rest + b : rest;
}
DP_INLINE float dp_mod(float a, float b) {
    float rest = fmodf(a, b);
    if (rest == 0) return copysignf(0.0f, b);
    return (b < 0) != (rest < 0) ? rest + b : rest;
}

template <class T> DP_INLINE T dp_power(T a, T b) {
    T result = 1;
    for (; b > 0; b = (T)(b / 2), a = (T)(a * a))
        if (b % 2 != 0) result = (T)(result * a);
    return result;
}
// Exponents of which a compiler that optimizes makes a product or a quotient, with other last bits than pow, are one always.
DP_INLINE float dp_power(float a, float b) { return b == 2 ? a * a : b == -1 ? 1 / a : powf(a, b); }
DP_INLINE double dp_power(double a, double b) { return b == 2 ? a * a : b == -1 ? 1 / a : pow(a, b); }

// Bits that are moved by as many places as there are, or by more, are gone; copies of the sign come in from above.
template <class T> DP_INLINE T dp_left_shift(T a, T b) {
    typedef unsigned long long bits;
    return b >= 0 && (bits)b < 8 * sizeof(T) ? (T)((bits)a << (bits)b) : (T)0;
}
template <class T> DP_INLINE T dp_right_shift(T a, T b) {
    return b >= 0 && (unsigned long long)b < 8 * sizeof(T) ? (T)(a >> b) : a < 0 ? (T)(-1) : (T)0;
}
// The greatest common divisor, by Euclid.
template <class T> DP_INLINE T dp_gcd(T a, T b) {
    while (b != 0) {
        const T rest = (T)(a % b);
        a = b;
        b = rest;
    }
    return a < 0 ? (T)(-a) : a;
}
DP_INLINE float dp_nextafter(float a, float b) { return nextafterf(a, b); }
DP_INLINE double dp_nextafter(double a, double b) { return nextafter(a, b); }
template <class T> DP_INLINE bool dp_signbit(T x) { return x < 0; }
DP_INLINE bool dp_signbit(float x) { return copysignf(1.0f, x) < 0; }
DP_INLINE bool dp_signbit(double x) { return copysign(1.0, x) < 0; }

DP_INLINE double dp_exp(double x) { return exp(x); }
DP_INLINE double dp_expm1(double x) { return expm1(x); }
DP_INLINE double dp_log(double x) { return log(x); }
DP_INLINE double dp_log1p(double x) { return log1p(x); }
DP_INLINE double dp_tanh(double x) { return tanh(x); }
DP_INLINE double dp_sqrt(double x) { return sqrt(x); }
DP_INLINE double dp_sin(double x) { return sin(x); }
DP_INLINE double dp_cos(double x) { return cos(x); }
DP_INLINE double dp_asin(double x) { return asin(x); }
DP_INLINE double dp_acos(double x) { return acos(x); }
DP_INLINE double dp_atan(double x) { return atan(x); }
DP_INLINE double dp_atan2(double y, double x) { return atan2(y, x); }
DP_INLINE double dp_hypot(double a, double b) { return hypot(a, b); }
DP_INLINE double dp_cbrt(double x) { return cbrt(x); }
DP_INLINE double dp_sinh(double x) { return sinh(x); }
DP_INLINE double dp_cosh(double x) { return cosh(x); }
DP_INLINE double dp_asinh(double x) { return asinh(x); }
DP_INLINE double dp_acosh(double x) { return acosh(x); }
DP_INLINE double dp_erf(double x) { return erf(x); }
DP_INLINE double dp_erfc(double x) { return erfc(x); }
DP_INLINE float dp_erfc(float x) { return erfcf(x); }
DP_INLINE float dp_sqrt(float x) { return sqrtf(x); }
DP_INLINE float dp_sin(float x) { return sinf(x); }
DP_INLINE float dp_cos(float x) { return cosf(x); }
DP_INLINE float dp_asin(float x) { return asinf(x); }
DP_INLINE float dp_acos(float x) { return acosf(x); }
DP_INLINE float dp_atan(float x) { return atanf(x); }
DP_INLINE float dp_atan2(float y, float x) { return atan2f(y, x); }
DP_INLINE float dp_hypot(float a, float b) { return hypotf(a, b); }
DP_INLINE float dp_cbrt(float x) { return cbrtf(x); }
// sin(pi x) / (pi x), 1 at 0.
DP_INLINE double dp_sinc(double x) {
    double angle = 3.141592653589793 * x;
    return angle == 0 ? 1 : sin(angle) / angle;
}
DP_INLINE float dp_sinc(float x) {
    float angle = 3.14159265f * x;
    return angle == 0 ? 1 : sinf(angle) / angle;
}

#ifdef __CUDACC__
DP_INLINE float dp_exp(float x) { return expf(x); }
DP_INLINE float dp_log(float x) { return logf(x); }
DP_INLINE float dp_tanh(float x) { return tanhf(x); }
DP_INLINE float dp_erf(float x) { return erff(x); }
DP_INLINE float dp_expm1(float x) { return expm1f(x); }
DP_INLINE float dp_log1p(float x) { return log1pf(x); }
DP_INLINE float dp_sinh(float x) { return sinhf(x); }
DP_INLINE float dp_cosh(float x) { return coshf(x); }
DP_INLINE float dp_asinh(float x) { return asinhf(x); }
DP_INLINE float dp_acosh(float x) { return acoshf(x); }
#else
// e^x = 2^n e^r with |r| <= log(2) / 2, where 2^n = first second: n can be 128.
struct dp_Power {
    float less_one, first, second;  // e^r - 1
};
DP_INLINE dp_Power dp_power_of_e(float x) {
    float inside = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;  // NaN stays
    float rounded = inside * 1.44269504f + 12582912.0f;         // 1.5 2^23: the integer is in the lowest bits
    float n = rounded - 12582912.0f;
    float r = inside - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    int32_t exponent = dp_float_to_bits(rounded) - 0x4b400000;
    int32_t half = exponent >> 1;
    return {p * (r * r) + r, dp_bits_to_float((half + 127) << 23), dp_bits_to_float((exponent - half + 127) << 23)};
}

// Below -87.3 the result is 0, above 88.7 infinity.
DP_INLINE float dp_exp(float x) {
    dp_Power e = dp_power_of_e(x);
    float y = (e.less_one + 1.0f) * e.first * e.second;
    y = x < -87.3f ? 0.0f : y;
    y = x > 88.72283f ? DP_INFINITY : y;
    return x != x ? x : y;
}

// 2^n (e^r - 1) + (2^n - 1), which loses no digits near 0.
DP_INLINE float dp_expm1(float x) {
    dp_Power e = dp_power_of_e(x);
    float power = e.first * e.second;
    float y = e.less_one * power + (power - 1.0f);
    y = x > 40.0f ? (e.less_one + 1.0f) * e.first * e.second : y;
    y = x > 88.72283f ? DP_INFINITY : y;
    y = x == 0.0f ? x : y;  // -0
    return x != x ? x : y;
}

// log(x) = e log(2) + log(m) with m in [sqrt(1/2), sqrt(2)).
DP_INLINE float dp_log(float x) {
    float scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;  // denormal numbers
    int32_t bits = dp_float_to_bits(scaled);
    int32_t shifted = bits - 0x3f3504f3;
    int32_t exponent = shifted >> 23;
    float e = (float)exponent - (x < 1.17549435e-38f ? 23.0f : 0.0f);
    float m = dp_bits_to_float(bits - (int32_t)((uint32_t)exponent << 23)) - 1.0f;
    float z = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * z;
    p = p + e * -2.12194440e-4f;
    p = p - 0.5f * z;
    float y = m + p;
    y = y + e * 0.693359375f;
    y = x == 0.0f ? -DP_INFINITY : y;
    y = x < 0.0f ? DP_NAN : y;
    y = x > 3.4028235e38f ? x : y;
    return x != x ? x : y;
}

// With what 1 + x loses of x, to first order.
DP_INLINE float dp_log1p(float x) {
    float u = 1.0f + x;
    float y = dp_log(u) + (x - (u - 1.0f)) / u;
    y = u == 0.0f ? -DP_INFINITY : y;
    y = x > 3.4028235e38f ? x : y;
    return x == 0.0f ? x : y;  // -0
}

DP_INLINE float dp_tanh(float x) {
    float a = fabsf(x);
    float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    p = p * z * x + x;
    float far = 1.0f - 2.0f / (dp_exp(2.0f * a) + 1.0f);
    far = x < 0 ? -far : far;
    return a < 0.625f ? p : far;
}

// From 20 on e^-|x| is lost. There the root of e^|x| is squared: e^|x| is infinite before half of it is.
DP_INLINE float dp_sinh(float x) {
    float a = fabsf(x);
    float e = dp_expm1(a);
    float root = dp_exp(0.5f * a);
    return copysignf(a > 20.0f ? 0.5f * root * root : 0.5f * (e + e / (e + 1.0f)), x);
}
DP_INLINE float dp_cosh(float x) {
    float a = fabsf(x);
    float e = dp_exp(a);
    float root = dp_exp(0.5f * a);
    return a > 20.0f ? 0.5f * root * root : 0.5f * (e + 1.0f / e);
}
// From 10^4 on the 1 under the root is lost.
DP_INLINE float dp_asinh(float x) {
    float a = fabsf(x);
    float near = dp_log1p(a + a * a / (1.0f + sqrtf(a * a + 1.0f)));
    return copysignf(a > 1e4f ? dp_log(a) + 0.693147181f : near, x);
}
DP_INLINE float dp_acosh(float x) {
    float t = x - 1.0f;
    float near = dp_log1p(t + sqrtf(t * (t + 2.0f)));
    return x < 1.0f ? DP_NAN : x > 1e4f ? dp_log(x) + 0.693147181f : near;
}

// Near 0, x + x p(x^2); elsewhere 1 - e^-q(|x|), which is 1 from 3.92 on. p and q are least-maximum fits to erf(x) / x - 1 and
// -log(1 - erf(x)).
DP_INLINE float dp_erf(float x) {
    float a = fabsf(x);
    float z = x * x;
    float p = -6.3326076e-4f;
    p = p * z + 5.05427e-3f;
    p = p * z - 2.680457e-2f;
    p = p * z + 1.128277e-1f;
    p = p * z - 3.7612575e-1f;
    p = p * z + 1.2837917e-1f;
    p = x + x * p;
    float inside = a > 4.0f ? 4.0f : a;  // NaN stays
    float q = -2.0367948e-4f;
    q = q * inside + 3.1178785e-3f;
    q = q * inside - 2.2519141e-2f;
    q = q * inside + 1.04526095e-1f;
    q = q * inside + 6.365188e-1f;
    q = q * inside + 1.128061f;
    q = q * inside + 1.0450578e-4f;
    float far = 1.0f - dp_exp(-q);
    far = x < 0 ? -far : far;
    return a < 0.85f ? p : far;
}
#endif

// Without overflow.
template <class T> DP_INLINE T dp_sigmoid(T x) {
    T small = dp_exp(-dp_absolute(x));
    return (x < 0 ? small : (T)1) / ((T)1 + small);
}
template <class T> DP_INLINE T dp_softplus(T x) { return (x < 0 ? (T)0 : x) + dp_log1p(dp_exp(-dp_absolute(x))); }

#endif
