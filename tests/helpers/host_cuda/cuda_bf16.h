#pragma once
#include <cuda_runtime.h>

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat16 nearest_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    return {static_cast<uint16_t>(x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {nearest_bf16(x), nearest_bf16(y)}; }
