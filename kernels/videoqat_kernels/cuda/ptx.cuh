// What only the GPU's own instructions can say: asynchronous copies and their barriers, named barriers, fast exp2 and reciprocal, INT8 products.
//
// The rest of the kernels is plain C++ of warps, and includes this file by <ptx.cuh>: tests run it on a CPU with another of that name.
// (Conversions, and the FP4 product itself, stand with the arithmetic that replaces them elsewhere: rounding.cuh, mma.cuh.)
#pragma once
#include "layout.cuh"

namespace vq {

VQ_INLINE unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char shared[];
    return shared;
}

VQ_INLINE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

VQ_INLINE void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barriers were initialised: the copy engine shall see it, too.
VQ_INLINE void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

VQ_INLINE void barrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Until the barrier's phase number `phase` (counted from 0, only its parity matters) is complete.
VQ_INLINE void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
        "@!done bra again; }" ::"r"(barrier), "r"(phase & 1) : "memory");
}

// From sm_90 on one thread asks the copy engine for a tile; before that, every thread copies its share.
#if __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif

// Starts copying to shared memory, and arrives at the barrier, once for each thread that calls, when its bytes have. 16 bytes divide all.
VQ_INLINE void copy_async(uint32_t to, const unsigned char* from, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
#else
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Named barriers: `threads` is how many wait and arrive together.
VQ_INLINE void named_barrier_wait(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
VQ_INLINE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

VQ_INLINE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

VQ_INLINE float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

VQ_INLINE float max_or_nan(float x, float y) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(x), "f"(y));
    return largest;
}

// C[16 x 8] = A[16 x 32] B[32 x 8]. Lane 4g + q holds four neighbours along 32 a word: A rows g and g + 8 at 4q, then at 16 + 4q; B column g.
VQ_INLINE void int8_product(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

}  // namespace vq
