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

// Two codes, that of `low` in the lower byte.
VQ_INLINE uint32_t e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3_code(low) | e4m3_code(high) << 8;
#endif
}

// The values of two codes without sign.
VQ_INLINE float2 e4m3_values(uint32_t pair) {
#if VQ_HAS_FP4
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

// Value of the nearest E2M1 number to y >= 0.
VQ_INLINE float round_e2m1(float y) {
    y = fminf(y, 6.0f);
    float power = power_of_two_part(y, 1.0f);
    return fmaf(power, -6291456.0f, fmaf(power, 6291456.0f, y));  // 1.5 * 2^22: spacing 2^(e-1)
}

// Codes of eight numbers, the first in the lowest four bits. A NaN becomes some code, and leaves its neighbours alone.
VQ_INLINE uint32_t e2m1_codes(const float (&y)[8]) {
#if VQ_HAS_FP4
    uint32_t word;
    asm("{ .reg .b8 a, b, c, d;\n"
        "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
        "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
        "mov.b32 %0, {a, b, c, d}; }"
        : "=r"(word) : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
    return word;
#else
    uint32_t word = 0, signs = 0;
#pragma unroll
    for (int e = 7; e >= 0; --e) {
        float magnitude = fminf(fabsf(y[e]), 6.0f);
        uint32_t bits = __float_as_uint(fmaf(power_of_two_part(magnitude, 1.0f), 6291456.0f, magnitude));
        word = (word << 4) + ((bits >> 22) + (bits & 15) - 299);
        signs = (signs << 4) | (__float_as_uint(y[e]) >> 28 & 8);
    }
    return word | signs;
#endif
}

}  // namespace vq
