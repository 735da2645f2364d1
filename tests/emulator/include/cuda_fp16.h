// IEEE half precision; the compiler's _Float16 does the rounding. Arithmetic rounds after every operation.
#pragma once

#include "emulator/device.h"

struct __half {
    _Float16 emu_value;
    __half() = default;
    __half(float x) : emu_value(static_cast<_Float16>(x)) {}
    __half(double x) : emu_value(static_cast<_Float16>(x)) {}
    __half(int x) : emu_value(static_cast<_Float16>(x)) {}
    operator float() const { return static_cast<float>(emu_value); }
};
using half = __half;
struct __attribute__((aligned(4))) __half2 {
    __half x, y;
};
using half2 = __half2;

EMU_INLINE __half __float2half(float x) { return __half(x); }
EMU_INLINE __half __float2half_rn(float x) { return __half(x); }
EMU_INLINE float __half2float(__half x) { return x; }
EMU_INLINE __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
EMU_INLINE __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
EMU_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
EMU_INLINE float2 __half22float2(__half2 v) { return {v.x, v.y}; }
EMU_INLINE unsigned short __half_as_ushort(__half x) { return emu::bits<unsigned short>(x); }
EMU_INLINE __half __ushort_as_half(unsigned short x) { return emu::bits<__half>(x); }
#define EMU_HALF(name, expression) \
    EMU_INLINE __half name(__half a, __half b) { return __half(expression); }
EMU_HALF(__hadd, float(a) + float(b))
EMU_HALF(__hsub, float(a) - float(b))
EMU_HALF(__hmul, float(a) * float(b))
EMU_HALF(__hdiv, float(a) / float(b))
EMU_HALF(operator+, float(a) + float(b))
EMU_HALF(operator-, float(a) - float(b))
EMU_HALF(operator*, float(a) * float(b))
EMU_HALF(operator/, float(a) / float(b))
