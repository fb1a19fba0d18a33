#pragma once
#include <cuda_runtime.h>

struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
inline float2 __half22float2(__half2 h) { return {static_cast<float>(same_bits<_Float16>(h.x.bits)), static_cast<float>(same_bits<_Float16>(h.y.bits))}; }
inline __half2 __floats2half2_rn(float x, float y) {
    return {{same_bits<uint16_t>(static_cast<_Float16>(x))}, {same_bits<uint16_t>(static_cast<_Float16>(y))}};
}
