// The library's C interface. Nothing of torch's ABI: addresses, sizes, strides (in elements) and the stream. Every function launches on the
// current device, allocates nothing, and returns 0 or a cudaError_t, whose text `videoqat_error` gives. The structures are mirrored in
// library.py.
#pragma once
#include <cstdint>

#define VIDEOQAT_API extern "C" __attribute__((visibility("default")))


constexpr int kMaxDivisors = 8;

// One of Q, K, V (B, N, H, head_dim) -> an operand (layout.cuh). Channels lie side by side, and rows at multiples of 16 bytes.
struct QuantizeArguments {
    const void* x;
    unsigned char* operand;        // Q: (B, H, ceil(N / 128) * 8, 8 d + 128); K and V share (B, H, ceil(N / 128) + 1, 2, 72 d)
    const int32_t* lengths;        // (B): tokens from there on count as zeros; null: all are real
    const float* mean;             // fp32 (B, H, M, d), subtracted first; or null
    int64_t stride_b, stride_n, stride_h;
    int32_t B, N, H, head_dim;
    int32_t mean_tokens;           // tokens that share a mean; 0: all of them
    int32_t is_half;               // fp16, else bf16
    int32_t num_divisors;
    float inverse_divisors[kMaxDivisors];
};

struct AttentionArguments {
    const unsigned char* q;
    const unsigned char* kv;
    const int32_t* kv_len;         // (B); null: Nk
    const float* bias;             // fp32 (B, H, bias_blocks, Nk padded to 128): added to Q K^T of each 128 queries from `first_query` on; or null
    void* out;                     // (B, Nq, H, head_dim), channels side by side
    float* m;                      // m, l, lse: (B, H, Nq)
    float* l;
    float* lse;
    int64_t stride_b, stride_n, stride_h;
    int32_t B, Nq, Nk, H, H_kv, head_dim;
    int32_t first_query, num_queries;  // the part of the queries to compute; first_query is a multiple of 128
    int32_t bias_blocks;
    int32_t is_half;
    int32_t causal, quantised_sum, maximum_first;
    float log2_scale, gain;        // log2(e) * scale; log2 of the P gain
};

VIDEOQAT_API const char* videoqat_sources();  // digest of what it was built from
VIDEOQAT_API const char* videoqat_error(int code);
VIDEOQAT_API int videoqat_quantize_q(const QuantizeArguments* arguments, void* stream);
VIDEOQAT_API int videoqat_quantize_k(const QuantizeArguments* arguments, void* stream);
VIDEOQAT_API int videoqat_quantize_v(const QuantizeArguments* arguments, void* stream);
VIDEOQAT_API int videoqat_attention(const AttentionArguments* arguments, void* stream);
