// Q, K and V to NVFP4 operands, one pass over memory each: read with whatever strides, (smooth,) quantise, write in fragment order (layout.cuh).
//
// Codes and scales are those of docs/numerics.md bit by bit: x * r is rounded before it is quantised, and squared errors are summed as a
// balanced tree without fused multiply-adds (x' = c * s is exact, so fma(c, s, -x) is the rounded difference).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "interface.h"
#include "launch.cuh"
#include "rounding.cuh"

namespace vq {
namespace {

VQ_INLINE float2 to_floats(uint32_t pair, bool is_half) {
    if (is_half) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
}

// Half a block of 16: eight neighbours. The other half is in the lane with another lowest bit, and both lanes compute the block's scale.
struct HalfBlock {
    float x[8];

    // Of these eight, quantised with scale s and its reciprocal r. `kSaturate`: some may be 7 s or more.
    template <bool kSaturate>
    VQ_INLINE float squared_error(float s, float r) const {
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float y = __fmul_rn(x[i], r);
            const float d = fmaf(round_e2m1(kSaturate ? saturated(y, 1.0f) : y, 1.0f), s, -x[i]);
            e[i] = __fmul_rn(d, d);
        }
        return __fadd_rn(__fadd_rn(__fadd_rn(e[0], e[1]), __fadd_rn(e[2], e[3])), __fadd_rn(__fadd_rn(e[4], e[5]), __fadd_rn(e[6], e[7])));
    }

    // Of the block, whose largest number is amax. (Where s is 0, so is every c * s, whatever the finite r.)
    VQ_INLINE float squared_error(float s, float amax) const {
        const float r = e4m3_reciprocal(s);
        const float sum = __fmul_rn(amax, r) < 7.0f ? squared_error<false>(s, r) : squared_error<true>(s, r);
        return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    }

    // The divisors' scales are made and tried in pairs; that of an odd number's last is tried twice, which changes nothing.
    VQ_INLINE uint32_t best_scale(const QuantizeArguments& a, float amax, uint32_t first) const {
        float least = INFINITY;
        uint32_t best = first;
#pragma unroll 1
        for (int i = 0; i < a.num_divisors; i += 2) {
            const int j = min(i + 1, a.num_divisors - 1);
            const uint32_t pair = e4m3_pair(__fmul_rn(amax, a.inverse_divisors[i]), __fmul_rn(amax, a.inverse_divisors[j]));
            const float2 s = e4m3_values(pair);
            const float errors[2] = {squared_error(s.x, amax), squared_error(s.y, amax)};
            if (errors[0] < least) least = errors[0], best = pair & 0xFF;
            if (errors[1] < least) least = errors[1], best = pair >> 8;
        }
        return best;
    }

    // The eight codes; `scale` becomes the code of the block's scale.
    VQ_INLINE uint32_t quantize(const QuantizeArguments& a, uint32_t& scale) const {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = max_or_nan(amax, fabsf(x[i]));
        amax = max_or_nan(amax, __shfl_xor_sync(~0u, amax, 1));
        const bool bad = !(amax < INFINITY);
        scale = e4m3_pair(__fmul_rn(amax, a.inverse_divisors[0]), 0.0f);
        if (a.num_divisors > 1) scale = best_scale(a, amax, scale);
        const float r = e4m3_reciprocal(e4m3_values(scale).x) * kCodeUnit;
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(x[i], r);
        const uint32_t codes = e2m1_codes(y);
        if (bad) scale = 0x7F;
        return bad || scale == 0 ? 0 : codes;
    }
};

// One byte a lane for each of two blocks (of lanes q < 2 and q >= 2, in this order) to the four of a k-step, in all four lanes.
VQ_INLINE uint32_t join_scales(uint32_t first, uint32_t second, int q) {
    const uint32_t mine = (first | second << 16) << 8 * (q >> 1);
    return mine | __shfl_xor_sync(~0u, mine, 2);
}

VQ_INLINE void subtract_mean(HalfBlock& block, const float* mean) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 m = *reinterpret_cast<const float4*>(mean + i);
        block.x[i] -= m.x, block.x[i + 1] -= m.y, block.x[i + 2] -= m.z, block.x[i + 3] -= m.w;
    }
}

VQ_INLINE const float* mean_of_token(const QuantizeArguments& a, int64_t bh, int token, int D) {
    if (a.mean == nullptr) return nullptr;
    if (a.mean_tokens == 0) return a.mean + bh * D;
    return a.mean + (bh * ceil_div(a.N, a.mean_tokens) + token / a.mean_tokens) * D;
}

constexpr int kThreads = 1280;  // of a processor, at least: for its registers, so that some load while others compute

// Q and K: blocks along channels. A warp quantises 16 rows, 64 channels at a time, which leaves registers for more warps; a lane eight channels of
// every 32, of two rows.
template <int D, bool kIsK>
__global__ void __launch_bounds__(256, kThreads / 256) quantize_rows(const __grid_constant__ QuantizeArguments a) {
    constexpr int kSteps = D / 64;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const int tile = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int64_t bh = static_cast<int64_t>(b) * a.H + h;
    const int length = a.lengths == nullptr ? a.N : a.lengths[b];
    const char* source = static_cast<const char*>(a.x) + 2 * (b * a.stride_b + h * a.stride_h);
    unsigned char* out = kIsK ? a.operand + (bh * (gridDim.x + 1) + tile) * pair_bytes(D) : a.operand + ((bh * gridDim.x + tile) * 8 + warp) * query_bytes(D);
    auto token = [&](int row) {
        const int position = 16 * warp + 8 * row + g;
        return tile * 128 + (kIsK ? key_of_column(position) : position);
    };

    uint32_t before[2][2] = {}, words[2][2];  // of the step before, and of this one
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
        uint4 raw[2][2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                raw[row][i] = make_uint4(0, 0, 0, 0);
                if (token(row) < length) raw[row][i] = *reinterpret_cast<const uint4*>(source + 2 * (token(row) * a.stride_n + 64 * s + 32 * i + 8 * q));
            }
        }

        uint32_t scales[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float* mean = mean_of_token(a, bh, token(row), D);
            uint32_t bytes[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                HalfBlock block;
                const uint32_t pairs[4] = {raw[row][i].x, raw[row][i].y, raw[row][i].z, raw[row][i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 x = to_floats(pairs[j], a.is_half);
                    block.x[2 * j] = x.x, block.x[2 * j + 1] = x.y;
                }
                if (mean != nullptr && token(row) < length) subtract_mean(block, mean + 64 * s + 32 * i + 8 * q);
                before[row][i] = s == 0 ? 0 : words[row][i];
                words[row][i] = block.quantize(a, bytes[i]);
            }
            scales[row] = join_scales(bytes[0], bytes[1], q);
        }

        if constexpr (kIsK) {
            // The warp's n-tiles are 4u + T with T = 2 (warp & 1) + row: lane q = row of each quad writes that row's words.
            const int to = scale_word((warp >> 1) * kSteps + s, 4 * g + 2 * (warp & 1) + q);
            if (q < 2) *reinterpret_cast<uint32_t*>(out + 64 * D + to) = q == 0 ? scales[0] : scales[1];
        } else {
            *reinterpret_cast<uint4*>(out + s * kUnit + lane * 16) = make_uint4(words[0][0], words[1][0], words[0][1], words[1][1]);
            if ((q >> 1) % kSteps == s) *reinterpret_cast<uint32_t*>(out + 8 * D + lane * 4) = (q & 1) == 0 ? scales[0] : scales[1];
        }
    }
    if constexpr (kIsK) {
        if constexpr (D == 128) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                *reinterpret_cast<uint4*>(out + (2 * warp + row) * kUnit + lane * 16) =
                    make_uint4(before[row][0], before[row][1], words[row][0], words[row][1]);
            }
        } else {
            *reinterpret_cast<uint4*>(out + warp * kUnit + lane * 16) = make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]);
        }
    }
}

// V: blocks along tokens. The tile is turned in shared memory; then a lane quantises eight tokens of every 32, of two channels.
template <int D>
__global__ void __launch_bounds__(2 * D, kThreads / (2 * D)) quantize_columns(const __grid_constant__ QuantizeArguments a) {
    constexpr int kPitch = D / 2;  // 32-bit words of a token
    __shared__ __align__(16) uint32_t turned[128 * kPitch];
    const int tile = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int64_t bh = static_cast<int64_t>(b) * a.H + h;
    const int length = a.lengths == nullptr ? a.N : a.lengths[b];
    const char* source = static_cast<const char*>(a.x) + 2 * (b * a.stride_b + h * a.stride_h);
    // Words of tokens 8 apart, which neighbouring lanes read below, would meet in one bank: their place is shifted by 8 words.
    auto place = [](int token, int word) { return token * kPitch + (word ^ (token & 24)); };

    constexpr int kChunks = D / 8;  // of 16 bytes, in a token
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int chunk = threadIdx.x + i * 2 * D, token = chunk / kChunks, column = chunk % kChunks;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (tile * 128 + token < length) x = *reinterpret_cast<const uint4*>(source + 2 * ((tile * 128 + token) * a.stride_n + 8 * column));
        *reinterpret_cast<uint4*>(turned + place(token, 4 * column)) = x;
    }
    __syncthreads();

    const int q = threadIdx.x & 3, pair = threadIdx.x >> 2;
    uint32_t before[2][2] = {}, words[2][2], scales_before[2] = {}, scales[2];  // of tokens 0 to 63, and 64 to 127; of the two channels
#pragma unroll 1
    for (int s = 0; s < 2; ++s) {
        uint32_t bytes[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            HalfBlock even, odd;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float2 x = to_floats(turned[place(64 * s + 32 * i + 8 * q + e, pair)], a.is_half);
                even.x[e] = x.x, odd.x[e] = x.y;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                before[j][i] = s == 0 ? 0 : words[j][i];
                words[j][i] = (j == 0 ? even : odd).quantize(a, bytes[j][i]);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            scales_before[j] = s == 0 ? 0 : scales[j];
            scales[j] = join_scales(bytes[j][0], bytes[j][1], q);
        }
    }

    unsigned char* out = a.operand + (bh * (gridDim.x + 1) + tile + 1) * pair_bytes(D) + tile_bytes(D);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int channel = 2 * pair + j, g = channel & 7, n_tile = channel >> 3;
        *reinterpret_cast<uint4*>(out + n_tile * kUnit + (4 * g + q) * 16) = make_uint4(before[j][0], before[j][1], words[j][0], words[j][1]);
        if (q == j) *reinterpret_cast<uint2*>(out + 64 * D + scale_word((n_tile >> 2) * 2, 4 * g + (n_tile & 3))) = make_uint2(scales_before[j], scales[j]);
    }
}

enum class Operand { kQ, kK, kV };

template <int D>
int quantize(const QuantizeArguments& a, Operand operand, void* stream) {
    const dim3 grid(ceil_div(a.N, 128), a.H, a.B);
    switch (operand) {
        case Operand::kQ: return launch(quantize_rows<D, false>, grid, 256, 0, stream, a);
        case Operand::kK: return launch(quantize_rows<D, true>, grid, 256, 0, stream, a);
        default: return launch(quantize_columns<D>, grid, 2 * D, 0, stream, a);
    }
}

int quantize(const QuantizeArguments& a, Operand operand, void* stream) {
    if (a.num_divisors < 1 || a.num_divisors > kMaxDivisors || a.H > 65535 || a.B > 65535) return cudaErrorInvalidValue;
    return a.head_dim == 128 ? quantize<128>(a, operand, stream) : a.head_dim == 64 ? quantize<64>(a, operand, stream) : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace vq

int videoqat_quantize_q(const QuantizeArguments* a, void* stream) { return vq::quantize(*a, vq::Operand::kQ, stream); }
int videoqat_quantize_k(const QuantizeArguments* a, void* stream) { return vq::quantize(*a, vq::Operand::kK, stream); }
int videoqat_quantize_v(const QuantizeArguments* a, void* stream) { return vq::quantize(*a, vq::Operand::kV, stream); }
