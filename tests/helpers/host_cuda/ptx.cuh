// What ptx.cuh of the kernels does by the GPU's own instructions, for a CPU.
#pragma once
#include <cuda_runtime.h>

#include "layout.cuh"

namespace vq {

inline unsigned char* dynamic_shared() { return host::shared; }
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - host::shared); }
inline void barrier_init(uint32_t barrier, uint32_t arrivals) { host::copy_barriers[barrier] = {static_cast<int>(arrivals), static_cast<int>(arrivals)}; }
inline void barrier_init_done() {}
inline void barrier_arrive(uint32_t barrier) {
    host::CopyBarrier& b = host::copy_barriers.at(barrier);
    --b.pending;
    b.check();
}
inline void barrier_wait(uint32_t barrier, uint32_t phase) {
    while ((host::copy_barriers.at(barrier).phase & 1) == (phase & 1)) host::wait();
}

inline bool kCopyEngine = true;  // tests try either way of copying

inline void copy_async(uint32_t to, const unsigned char* from, int bytes, uint32_t barrier) {
    host::CopyBarrier& b = host::copy_barriers.at(barrier);
    auto start = [&](int at, int size) {
        b.bytes += size;
        host::copies.push_back([=] {
            memcpy(host::shared + to + at, from + at, size);
            host::CopyBarrier& b = host::copy_barriers.at(barrier);
            b.bytes -= size;
            b.check();
        });
    };
    if (kCopyEngine) {
        start(0, bytes);
    } else {
        for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) start(i, 16);
    }
    --b.pending;
    b.check();  // a thread may have nothing to copy
}

inline void named_barrier_wait(int id, int threads) { host::meet(host::named[id], threads); }
inline void named_barrier_arrive(int id, int threads) { host::meet(host::named[id], threads, false); }
inline float exp2_approximate(float x) { return std::exp2(x); }
inline float reciprocal_approximate(float x) { return __uint_as_float(__float_as_uint(1.0f / x) + 1); }  // one unit in the last place off

inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : std::max(x, y); }

inline void int8_product(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    host::Warp& warp = host::warps[host::thread / 32];
    const int lane = host::thread % 32, g = lane >> 2, q = lane & 3;
    const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(warp.words[lane], own, sizeof own);
    host::meet_warp();
    auto element = [&](int group, int word, int k) { return static_cast<int8_t>(warp.words[4 * group + (k & 15) / 4][word] >> 8 * (k & 3)); };
    for (int i = 0; i < 4; ++i) {
        c[i] = 0;
        for (int k = 0; k < 32; ++k) c[i] += element(g, (i >> 1) + 2 * (k >> 4), k) * element(2 * q + (i & 1), 4 + (k >> 4), k);
    }
    host::meet_warp();
}

}  // namespace vq

extern "C" __attribute__((used, visibility("default"))) inline void host_copy_engine(bool on) { vq::kCopyEngine = on; }
