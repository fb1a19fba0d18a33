// The warp's product C[16 x 8] += A[16 x 64] B[64 x 8] of NVFP4 operands, as a policy: by the tensor core's own instruction, or emulated.
// The fragments (layout.cuh) are the same, so everything around the product is one source, and what is proven with one holds for the other,
// but for the last bits of the fp32 sums.
#pragma once
#include "rounding.cuh"

namespace vq {

// OMMA: only sm_120a and sm_121a know it.
struct Native {
    // ta < 2 and tb < 4 say which lanes of a quad hold the scales (layout.cuh). They are parts of the instruction: known once loops are unrolled.
    static VQ_INLINE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, int ta, uint32_t scales_b, int tb) {
        switch (4 * ta + tb) {
            case 0: return instruction<0, 0>(c, a, b0, b1, scales_a, scales_b);
            case 1: return instruction<0, 1>(c, a, b0, b1, scales_a, scales_b);
            case 2: return instruction<0, 2>(c, a, b0, b1, scales_a, scales_b);
            case 3: return instruction<0, 3>(c, a, b0, b1, scales_a, scales_b);
            case 4: return instruction<1, 0>(c, a, b0, b1, scales_a, scales_b);
            case 5: return instruction<1, 1>(c, a, b0, b1, scales_a, scales_b);
            case 6: return instruction<1, 2>(c, a, b0, b1, scales_a, scales_b);
            case 7: return instruction<1, 3>(c, a, b0, b1, scales_a, scales_b);
        }
    }

   private:
    template <int TA, int TB>
    static VQ_INLINE void instruction(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, uint32_t scales_b) {
#if VQ_HAS_FP4
        asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, %12}, {%11}, {0, %13};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scales_a), "r"(scales_b), "n"(TA), "n"(TB));
#else
        __trap();
#endif
    }
};

// Four INT8 products of twice the elements, one for each 16 of k, so that their integer sums are exact; scaled and added in fp32.
// A function and not inlined: the kernel has a hundred of them.
static __device__ __noinline__ float4 emulated_product(float4 c, uint4 a, uint2 b, uint32_t scales_a, int ta, uint32_t scales_b, int tb);

struct Emulated {
    static VQ_INLINE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t scales_a, int ta, uint32_t scales_b, int tb) {
        const float4 sum = emulated_product(make_float4(c[0], c[1], c[2], c[3]), make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b0, b1), scales_a, ta,
                                            scales_b, tb);
        c[0] = sum.x, c[1] = sum.y, c[2] = sum.z, c[3] = sum.w;
    }
};

// Four E2M1 codes (the lowest 16 bits) to four signed bytes of twice their value, by table: byte permutation picks from 8 of them.
static VQ_INLINE uint32_t doubled(uint32_t codes) {
    uint32_t index = codes & 0x7777;
    uint32_t positive = __byte_perm(0x03020100, 0x0C080604, index);
    uint32_t negative = __byte_perm(0xFDFEFF00, 0xF4F8FAFC, index);
    uint32_t sign = __byte_perm(0x0000FF00, 0, codes >> 3 & 0x1111);
    return (positive & ~sign) | (negative & sign);
}

static __device__ __noinline__ float4 emulated_product(float4 c, uint4 a, uint2 b, uint32_t scales_a, int ta, uint32_t scales_b, int tb) {
    const int lane = threadIdx.x & 31, q = lane & 3;
    // C's rows are g and g + 8, its columns 2q and 2q + 1: fetch their scales from the lanes that hold them.
    const uint32_t sa[2] = {__shfl_sync(~0u, scales_a, (lane & 28) + 2 * ta), __shfl_sync(~0u, scales_a, (lane & 28) + 2 * ta + 1)};
    const uint32_t sb[2] = {__shfl_sync(~0u, scales_b, 8 * q + tb), __shfl_sync(~0u, scales_b, 8 * q + 4 + tb)};
    const uint32_t as[4] = {a.x, a.y, a.z, a.w}, bs[2] = {b.x, b.y};
    float out[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        // A lane holds 8 of each 32 elements of k: lanes with q < 2 the first block of 16, the others the second. The rest counts as zero.
        const uint32_t keep = (q >> 1) == (block & 1) ? ~0u : 0u;
        const uint32_t row0 = as[2 * (block >> 1)], row8 = as[2 * (block >> 1) + 1], column = bs[block >> 1];
        int sum[4];
        int8_product(sum, doubled(row0) & keep, doubled(row8) & keep, doubled(row0 >> 16) & keep, doubled(row8 >> 16) & keep, doubled(column),
                     doubled(column >> 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float scale = e4m3_value(sa[i >> 1] >> 8 * block & 0x7F) * e4m3_value(sb[i & 1] >> 8 * block & 0x7F);
            out[i] = fmaf(0.25f * static_cast<float>(sum[i]), scale, out[i]);
        }
    }
    return make_float4(out[0], out[1], out[2], out[3]);
}

}  // namespace vq
