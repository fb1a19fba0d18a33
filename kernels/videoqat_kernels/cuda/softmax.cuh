// From scores to an operand: the online softmax of 16 rows and 128 keys of a warp, and P in NVFP4 (docs/numerics.md, section 2).
//
// A lane holds rows g and g + 8, and of each 32 keys eight neighbours (layout.cuh); the other half of their block of 16 is one lane away.
// Work that is once for a row or block is divided: after the first exchange, lanes with an even q care for row g and odd ones for row g + 8.
// "Own" is that row. Maxima are taken on t, before exp2, which is monotonic: the same number serves the running maximum and the scales of P.
#pragma once
#include "rounding.cuh"

namespace vq {

// Below every logit: the running maximum before the first key, and that of a row without keys. Finite, so that no inf - inf arises.
constexpr float kNoMaximum = -1.0e30f;

VQ_INLINE float from_neighbour(float x, int distance) { return __shfl_xor_sync(~0u, x, distance); }

struct Softmax {
    float log2_scale, gain;
    float own_maximum = kNoMaximum;  // an integer, once there was a key
    float sum[2] = {0.0f, 0.0f};     // l of rows g and g + 8: this lane's share
    bool odd;
    uint32_t interleave;             // how the bytes of two lanes make a k-step's scales

    VQ_INLINE Softmax(float log2_scale, float gain, int q)
        : log2_scale(log2_scale), gain(gain), odd(q & 1), interleave(q < 2 ? 0x5140 : 0x1504) {}

    // Scores of a tile whose keys at or past limit[row] are not to be seen become -inf. `first_key`: this lane's in the tile's first 32.
    static VQ_INLINE void mask(float (&t)[16][4], int first_key, const int (&limit)[2]) {
#pragma unroll
        for (int tile = 0; tile < 16; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = first_key + 32 * (tile >> 2) + 2 * (tile & 3) + (i & 1);
                if (key >= limit[i >> 1]) t[tile][i] = -INFINITY;
            }
        }
    }

    // Own row's largest score in each of its four blocks of 16 keys that this pair of lanes holds.
    VQ_INLINE void block_maxima(const float (&t)[16][4], float (&largest)[4]) const {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            float of_row[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                of_row[row] = fmaxf(t[4 * block][2 * row], t[4 * block][2 * row + 1]);
#pragma unroll
                for (int tile = 1; tile < 4; ++tile) {
                    of_row[row] = fmaxf(of_row[row], fmaxf(t[4 * block + tile][2 * row], t[4 * block + tile][2 * row + 1]));
                }
            }
            const float received = from_neighbour(odd ? of_row[0] : of_row[1], 1);
            largest[block] = fmaxf(odd ? of_row[1] : of_row[0], received);
        }
    }

    // The running maximum takes the tile in. Returns what it was.
    VQ_INLINE float raise_maximum(const float (&largest)[4]) {
        const float before = own_maximum;
        float tile = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        tile = fmaxf(tile, from_neighbour(tile, 2));
        own_maximum = fmaxf(before, ceilf(__fmul_rn(tile, log2_scale)));
        return before;
    }

    // A number of the own row, for both rows.
    VQ_INLINE void both(float own, float (&of_row)[2]) const {
        const float other = from_neighbour(own, 1);
        of_row[0] = odd ? other : own;
        of_row[1] = odd ? own : other;
    }

    // Scores to P in NVFP4, as A operand of two k-steps of 64 keys; what has been summed so far is rescaled to the new maximum.
    template <int kTiles>
    VQ_INLINE void step(const float (&t)[16][4], float (&out)[kTiles][4], float (&ones)[4], uint32_t (&p)[2][4], uint32_t (&scales)[2]) {
        float largest[4];
        block_maxima(t, largest);
        const float before = raise_maximum(largest);
        if (__any_sync(~0u, own_maximum != before)) {
            float factor[2];
            both(exp2_approximate(before - own_maximum), factor);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                sum[row] *= factor[row];
#pragma unroll
                for (int i = 2 * row; i < 2 * row + 2; ++i) {
                    ones[i] *= factor[row];
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile) out[tile][i] *= factor[row];
                }
            }
        }
        const float own_shift = gain - own_maximum;
        float shift[2];
        both(own_shift, shift);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            // The scales of the own row's two blocks, and what to multiply with, for both rows.
            const float amax[2] = {exp2_approximate(fmaf(largest[2 * step], log2_scale, own_shift)),
                                   exp2_approximate(fmaf(largest[2 * step + 1], log2_scale, own_shift))};
            const uint32_t pair = e4m3_pair(__fmul_rn(amax[0], 0x1.555556p-3f), __fmul_rn(amax[1], 0x1.555556p-3f));  // fp32(1/6)
            const float2 of_blocks = e4m3_values(pair);
            float r[2][2];
            both(e4m3_reciprocal(of_blocks.x) * kCodeUnit, r[0]);
            both(e4m3_reciprocal(of_blocks.y) * kCodeUnit, r[1]);
            // Lanes q < 2 have bytes 0 and 2, the others 1 and 3; lanes 4g and 4g + 1 are asked for rows g and g + 8.
            scales[step] = __byte_perm(pair, __shfl_xor_sync(~0u, pair, 2), interleave);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float y[8];
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float weight = exp2_approximate(fmaf(t[8 * step + 4 * half + (e >> 1)][2 * row + (e & 1)], log2_scale, shift[row]));
                        sum[row] += weight;
                        y[e] = __fmul_rn(weight, r[half][row]);
                    }
                    p[step][2 * half + row] = e2m1_codes(y);
                }
            }
        }
    }
};

}  // namespace vq
