// bfloat16: the upper half of a float, rounded to nearest even. Arithmetic rounds after every operation.
#pragma once

#include "emulator/device.h"

struct __nv_bfloat16 {
    unsigned short emu_bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        uint32_t u = emu::bits<uint32_t>(x);
        if ((u & 0x7fffffffu) > 0x7f800000u)
            emu_bits = 0x7fff;  // NaN
        else
            emu_bits = static_cast<unsigned short>((u + 0x7fffu + (u >> 16 & 1)) >> 16);
    }
    __nv_bfloat16(double x) : __nv_bfloat16(static_cast<float>(x)) {}
    __nv_bfloat16(int x) : __nv_bfloat16(static_cast<float>(x)) {}
    operator float() const { return emu::bits<float>(static_cast<uint32_t>(emu_bits) << 16); }
};
using nv_bfloat16 = __nv_bfloat16;
struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
using nv_bfloat162 = __nv_bfloat162;

EMU_INLINE __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
EMU_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
EMU_INLINE float __bfloat162float(__nv_bfloat16 x) { return x; }
EMU_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
EMU_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
EMU_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
EMU_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
EMU_INLINE float __low2float(__nv_bfloat162 v) { return v.x; }
EMU_INLINE float __high2float(__nv_bfloat162 v) { return v.y; }
EMU_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.emu_bits; }
EMU_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 x;
    x.emu_bits = bits;
    return x;
}
#define EMU_BF16(name, expression) \
    EMU_INLINE __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b) { return __nv_bfloat16(expression); }
EMU_BF16(__hadd, float(a) + float(b))
EMU_BF16(__hsub, float(a) - float(b))
EMU_BF16(__hmul, float(a) * float(b))
EMU_BF16(__hdiv, float(a) / float(b))
EMU_BF16(operator+, float(a) + float(b))
EMU_BF16(operator-, float(a) - float(b))
EMU_BF16(operator*, float(a) * float(b))
EMU_BF16(operator/, float(a) / float(b))
