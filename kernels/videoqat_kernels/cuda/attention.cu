// O = softmax(scale * Q K^T) V, both products in NVFP4, for operands that quantize.cu wrote.
//
// A block of eight warps takes 128 queries of one head through all keys, 128 at a time; each warp has 16 rows of its own. The warps form two
// groups, four each, one warp of either on each of the processor's four tensor cores. They take turns: while one group multiplies (S of the
// next tile, and O of this one), the other does its softmax, so that the tensor cores do not wait for exp2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "interface.h"
#include "launch.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "softmax.cuh"

namespace vq {
namespace {

using Product = VIDEOQAT_PRODUCT;  // Native or Emulated; given by build.py

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSlots = 4;  // pairs of tiles

template <int D>
using Pairs = Ring<pair_bytes(D), kSlots, kWarps>;

VQ_INLINE uint4 load_unit(const unsigned char* units, int unit, int lane) {
    return *reinterpret_cast<const uint4*>(units + unit * kUnit + lane * 16);
}

template <int kUnits>
VQ_INLINE void load_scales(const unsigned char* from, int lane, uint32_t (&words)[4 * kUnits]) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
        const uint4 x = load_unit(from, unit, lane);
        words[4 * unit] = x.x, words[4 * unit + 1] = x.y, words[4 * unit + 2] = x.z, words[4 * unit + 3] = x.w;
    }
}

// This warp's 16 queries.
template <int D>
struct Queries {
    uint32_t words[D / 64][4];
    uint32_t scales;

    VQ_INLINE void load(const unsigned char* from, int lane) {
#pragma unroll
        for (int s = 0; s < D / 64; ++s) {
            const uint4 x = load_unit(from, s, lane);
            words[s][0] = x.x, words[s][1] = x.y, words[s][2] = x.z, words[s][3] = x.w;
        }
        scales = *reinterpret_cast<const uint32_t*>(from + 8 * D + lane * 4);
    }
};

// t (which holds what is to be added: 0, or smooth_q's share) += Q K^T, 16 queries by 128 keys.
template <int D>
VQ_INLINE void multiply_keys(float (&t)[16][4], const Queries<D>& q, const unsigned char* keys, int lane) {
    constexpr int kSteps = D / 64;
    uint32_t scales[4 * kSteps];
    load_scales<kSteps>(keys + 64 * D, lane, scales);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        uint32_t b[4][2 * kSteps];  // four n-tiles
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
            const uint4 x = load_unit(keys, 2 * kSteps * u + i, lane);
            uint32_t* to = &b[0][0] + 4 * i;
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
            for (int T = 0; T < 4; ++T) {
                Product::multiply(t[4 * u + T], q.words[s], b[T][2 * s], b[T][2 * s + 1], q.scales, s, scales[u * kSteps + s], T);
            }
        }
    }
}

// out += P V, 16 queries by D channels.
template <int D>
VQ_INLINE void multiply_values(float (&out)[D / 8][4], const uint32_t (&p)[2][4], const uint32_t (&p_scales)[2], const unsigned char* values, int lane) {
    uint32_t scales[D / 16];
    load_scales<D / 64>(values + 64 * D, lane, scales);
#pragma unroll
    for (int u = 0; u < D / 32; ++u) {
        uint4 b[4];
#pragma unroll
        for (int T = 0; T < 4; ++T) b[T] = load_unit(values, 4 * u + T, lane);
#pragma unroll
        for (int T = 0; T < 4; ++T) Product::multiply(out[4 * u + T], p[0], b[T].x, b[T].y, p_scales[0], 0, scales[2 * u], T);
#pragma unroll
        for (int T = 0; T < 4; ++T) Product::multiply(out[4 * u + T], p[1], b[T].z, b[T].w, p_scales[1], 0, scales[2 * u + 1], T);
    }
}

// The row sums of quantised P: a product with a column of ones. (Code 2 is 1; so is scale 0x38.)
VQ_INLINE void multiply_ones(float (&ones)[4], const uint32_t (&p)[2][4], const uint32_t (&p_scales)[2]) {
    Product::multiply(ones, p[0], 0x22222222, 0x22222222, p_scales[0], 0, 0x38383838, 0);
    Product::multiply(ones, p[1], 0x22222222, 0x22222222, p_scales[1], 0, 0x38383838, 0);
}

// The groups' turns at the tensor cores: named barriers 1 and 2, at which one group waits and the other arrives.
VQ_INLINE void wait_for_turn(int group) { named_barrier_wait(1 + group, kThreads); }
VQ_INLINE void pass_turn(int group) { named_barrier_arrive(2 - group, kThreads); }

VQ_INLINE void store_pair(void* out, int64_t at, float x, float y, bool is_half) {
    if (is_half) {
        *reinterpret_cast<__half2*>(static_cast<__half*>(out) + at) = __floats2half2_rn(x, y);
    } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out) + at) = __floats2bfloat162_rn(x, y);
    }
}

// One block's work: 128 queries of a head.
template <int D, bool kHasBias>
struct Work {
    const AttentionArguments& a;
    Pairs<D>& ring;
    int b, h, first;  // sample, head, first query
    int kv_len, tiles;
    const unsigned char* kv;
    const float* bias = nullptr;
    int pairs = 0;    // asked for so far

    VQ_INLINE Work(const AttentionArguments& a, Pairs<D>& ring, int index) : a(a), ring(ring) {
        const int blocks = ceil_div(a.num_queries, kTileQueries);
        int block = index % blocks;
        if (a.causal) block = blocks - 1 - block;  // the long ones first
        h = index / blocks % a.H;
        b = index / blocks / a.H;
        first = a.first_query + block * kTileQueries;
        kv_len = a.kv_len == nullptr ? a.Nk : a.kv_len[b];
        const int seen = a.causal ? min(kv_len, first + kTileQueries + kv_len - a.Nq) : kv_len;
        tiles = ceil_div(max(seen, 0), kTileKeys);
        const int key_tiles = ceil_div(a.Nk, kTileKeys);
        const int64_t bh = static_cast<int64_t>(b) * a.H + h;
        kv = a.kv + (static_cast<int64_t>(b) * a.H_kv + h / (a.H / a.H_kv)) * (key_tiles + 1) * pair_bytes(D);
        if constexpr (kHasBias) bias = a.bias + (bh * a.bias_blocks + block) * key_tiles * kTileKeys;
    }

    VQ_INLINE int limit(int row) const { return a.causal ? min(kv_len, row + 1 + kv_len - a.Nq) : kv_len; }

    VQ_INLINE int passes() const { return a.maximum_first ? tiles : 0; }

    // Asks for the next pair that will be wanted, if there is one: first, with maximum_first, all of K; then all pairs, of the first and last one
    // the halves that exist.
    VQ_INLINE void fill() {
        const int pair = pairs++ - passes();
        if (tiles == 0 || pair > tiles) return;
        const unsigned char* source = kv + static_cast<int64_t>(pair < 0 ? pair + tiles : pair) * pair_bytes(D);
        ring.fill(source, pair == tiles ? tile_bytes(D) : 0, pair <= 0 ? tile_bytes(D) : pair_bytes(D));
    }

    VQ_INLINE const unsigned char* take() {
        fill();
        return ring.take();
    }

    // What Q K^T is added to.
    VQ_INLINE void start(float (&t)[16][4], int tile, int q) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float2 x = make_float2(0.0f, 0.0f);
            if constexpr (kHasBias) x = *reinterpret_cast<const float2*>(bias + tile * kTileKeys + 32 * (i >> 2) + 8 * q + 2 * (i & 3));
            t[i][0] = t[i][2] = x.x, t[i][1] = t[i][3] = x.y;
        }
    }

    VQ_INLINE void run() {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, group = warp >> 2;
        const int row = first + 16 * warp;
        const int limits[2] = {limit(row + g), limit(row + g + 8)};
        const int unmasked = max(limit(row), 0) / kTileKeys;  // tiles that every row of the warp sees whole
        Queries<D> queries;
        const int64_t row_tiles = 8 * ceil_div(a.Nq, kTileQueries);
        queries.load(a.q + ((static_cast<int64_t>(b) * a.H + h) * row_tiles + row / 16) * query_bytes(D), lane);

        float t[16][4], out[D / 8][4] = {}, ones[4] = {};
        uint32_t p[2][4], p_scales[2];
        Softmax softmax(a.log2_scale, a.gain, q);
#pragma unroll 1
        for (int i = 0; i < kSlots - 2; ++i) fill();

        for (int tile = 0; tile < passes(); ++tile) {
            start(t, tile, q);
            multiply_keys<D>(t, queries, take(), lane);
            ring.release();
            if (tile >= unmasked) softmax.mask(t, tile * kTileKeys + 8 * q, limits);
            float largest[4];
            softmax.block_maxima(t, largest);
            softmax.raise_maximum(largest);
        }

        if (tiles > 0) {
            start(t, 0, q);
            multiply_keys<D>(t, queries, take(), lane);
            ring.release();
            if (unmasked == 0) softmax.mask(t, 8 * q, limits);
            softmax.step(t, out, ones, p, p_scales);
        }
        for (int tile = 0; tile < tiles - 1; ++tile) {
            start(t, tile + 1, q);
            const unsigned char* pair = take();
            wait_for_turn(group);
            multiply_keys<D>(t, queries, pair, lane);
            multiply_values<D>(out, p, p_scales, pair + tile_bytes(D), lane);
            if (a.quantised_sum) multiply_ones(ones, p, p_scales);
            pass_turn(group);
            ring.release();
            if (tile + 1 >= unmasked) softmax.mask(t, (tile + 1) * kTileKeys + 8 * q, limits);
            softmax.step(t, out, ones, p, p_scales);
        }
        if (tiles > 0) {
            multiply_values<D>(out, p, p_scales, take() + tile_bytes(D), lane);
            if (a.quantised_sum) multiply_ones(ones, p, p_scales);
            ring.release();
        }
        store(out, softmax, ones, row + g, q);
    }

    VQ_INLINE void store(const float (&out)[D / 8][4], Softmax& softmax, const float (&ones)[4], int row, int q) const {
        float maximum[2];
        softmax.both(softmax.own_maximum, maximum);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float l = softmax.sum[i];
            l += from_neighbour(l, 1);
            l += from_neighbour(l, 2);
            if (a.quantised_sum && l == l) l = ones[2 * i];  // a NaN shows in the sum of the unquantised weights only
            const float inverse = l == 0 ? 0.0f : 1.0f / l;
            const int query = row + 8 * i;
            if (query >= a.Nq) continue;
            const int64_t at = b * a.stride_b + query * a.stride_n + h * a.stride_h + 2 * q;
#pragma unroll
            for (int tile = 0; tile < D / 8; ++tile) {
                store_pair(a.out, at + 8 * tile, out[tile][2 * i] * inverse, out[tile][2 * i + 1] * inverse, a.is_half);
            }
            if (q == 0) {
                const int64_t to = (static_cast<int64_t>(b) * a.H + h) * a.Nq + query;
                a.m[to] = l == 0 ? 0.0f : maximum[i];
                a.l[to] = l;
                a.lse[to] = l == 0 ? -INFINITY : (maximum[i] - a.gain + log2f(l)) * 0.693147180559945309f;
            }
        }
    }
};

template <int D, bool kHasBias>
__global__ void __launch_bounds__(kThreads, 1) attention(const __grid_constant__ AttentionArguments a, int works) {
    Pairs<D> ring(dynamic_shared());
    const int group = threadIdx.x / (kThreads / 2);
    if (group == 1) pass_turn(group);  // the first turn is the first group's
    for (int index = blockIdx.x; index < works; index += gridDim.x) {
        Work<D, kHasBias>(a, ring, index).run();
    }
    if (group == 0) wait_for_turn(group);  // takes the turn that nobody needs any more
}

template <int D>
int attend(const AttentionArguments& a, void* stream) {
    const auto kernel = a.bias == nullptr ? attention<D, false> : attention<D, true>;
    const int64_t works = static_cast<int64_t>(ceil_div(a.num_queries, kTileQueries)) * a.H * a.B;
    if (works > INT32_MAX) return cudaErrorInvalidValue;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Pairs<D>::kSharedBytes);
    if (error != cudaSuccess) return error;
    const int blocks = static_cast<int>(works < processors ? works : processors);
    return launch(kernel, dim3(blocks), kThreads, Pairs<D>::kSharedBytes, stream, a, static_cast<int>(works));
}

}  // namespace
}  // namespace vq

#define VIDEOQAT_TEXT(x) #x
#define VIDEOQAT_TEXT_OF(x) VIDEOQAT_TEXT(x)
const char* videoqat_sources() { return VIDEOQAT_TEXT_OF(VIDEOQAT_SOURCES); }

const char* videoqat_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int videoqat_attention(const AttentionArguments* a, void* stream) {
    return a->head_dim == 128 ? vq::attend<128>(*a, stream) : a->head_dim == 64 ? vq::attend<64>(*a, stream) : cudaErrorInvalidValue;
}
