// fp32 to E4M3 and E2M1 codes and back: to nearest, ties to the even code, saturating (docs/numerics.md, section 1).
//
// By the hardware's conversions where it has them, otherwise in arithmetic; the codes are the same. The arithmetic adds a number so large that
// its last bit is the grid's spacing: the processor rounds, and the sum's lowest bits are the code within the binade.
#pragma once
#include <cuda_fp16.h>
#include <ptx.cuh>

#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define VQ_HAS_FP4 1
#else
#define VQ_HAS_FP4 0
#endif

namespace vq {

VQ_INLINE float power_of_two_part(float x, float smallest) { return fmaxf(__int_as_float(__float_as_int(x) & 0x7F800000), smallest); }

// E4M3 code of x >= 0. (NaN is the caller's business.)
VQ_INLINE uint32_t e4m3_code(float x) {
    uint32_t bits = __float_as_uint(fmaf(power_of_two_part(x, 0.015625f), 1572864.0f, x));  // 1.5 * 2^20: spacing 2^(e-3)
    return min((bits >> 20) + (bits & 31) - 1132, 0x7Eu);
}

// Value of an E4M3 code without sign; 0x7F is NaN.
VQ_INLINE float e4m3_value(uint32_t code) {
    float value = __uint_as_float(code << 20) * 0x1p120f;  // subnormal codes are subnormal in fp32, too, before the product
    return code == 0x7F ? __int_as_float(0x7FFFFFFF) : value;
}

// Codes of two numbers of either sign, that of `low` in the lower byte.
VQ_INLINE uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3_code(fabsf(low)) | (__float_as_uint(low) >> 24 & 0x80) | e4m3_code(fabsf(high)) << 8 | (__float_as_uint(high) >> 16 & 0x8000);
#endif
}

// The values of two codes without sign.
VQ_INLINE float2 e4m3_values(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
#else
    return make_float2(e4m3_value(pair & 0xFF), e4m3_value(pair >> 8));
#endif
}

// 1/s rounded to nearest for an E4M3 number s > 0, a finite number for s = 0. For these 126 numbers one Newton step after the approximation
// gives the correctly rounded quotient.
VQ_INLINE float e4m3_reciprocal(float s) {
    s = fmaxf(s, 0x1p-9f);
    const float r = reciprocal_approximate(s);
    return fmaf(r, fmaf(-s, r, 1.0f), r);
}

// The nearest number of E2M1's grid, in units of `one`, which is a power of two. Does not saturate: from 7 on it gives 8 and more.
VQ_INLINE float round_e2m1(float y, float one) {
    const float power = power_of_two_part(y, one);
    return fmaf(power, -6291456.0f, fmaf(power, 6291456.0f, y));  // 1.5 * 2^22: spacing 2^(e-1)
}

VQ_INLINE float saturated(float y, float one) { return fminf(fmaxf(y, -6.0f * one), 6.0f * one); }

// In which unit `e2m1_codes` wants its numbers: the caller's factor takes it in at no cost.
constexpr float kCodeUnit = VQ_HAS_FP4 ? 1.0f : 0x1p-6f;

// Codes of eight numbers in units of kCodeUnit, the first in the lowest four bits. A NaN becomes some code, and leaves its neighbours alone.
//
// Without the hardware's conversion: E4M3 below 2^-6 is as coarse as E2M1 below 1, so that an E2M1 number times 2^-6 has its own code in E4M3, two bits
// higher up: s00ccc00. More than 6 shows in the two bits behind the sign.
VQ_INLINE uint32_t e2m1_codes(const float (&y)[8]) {
    uint32_t word;
#if VQ_HAS_FP4
    asm("{ .reg .b8 a, b, c, d;\n"
        "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
        "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
        "mov.b32 %0, {a, b, c, d}; }"
        : "=r"(word) : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
#else
    auto bytes = [&](bool saturate, int first) {  // of each second number
        float c[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float x = y[first + 2 * i];
            c[i] = copysignf(round_e2m1(saturate ? saturated(x, kCodeUnit) : x, kCodeUnit), x);
        }
        return e4m3_pair(c[0], c[1]) | e4m3_pair(c[2], c[3]) << 16;
    };
    uint32_t even = bytes(false, 0), odd = bytes(false, 1);
    if ((even | odd) & 0x60606060) even = bytes(true, 0), odd = bytes(true, 1);
    word = (even >> 2 & 0x07070707) | (even >> 4 & 0x08080808) | (odd << 2 & 0x70707070) | (odd & 0x80808080);
#endif
    return word;
}

}  // namespace vq
