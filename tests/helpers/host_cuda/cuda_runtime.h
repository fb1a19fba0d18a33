// As much of CUDA as the kernels need to run on a CPU: the threads of a block are fibers, which change places where threads wait for others.
// The order in which warps get on, and how late copies arrive, is drawn anew in every round, so that waiting too little shows.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __trap abort

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }  // compiled with -ffp-contract=off
inline float __fadd_rn(float x, float y) { return x + y; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}
using std::max;
using std::min;

// Threads

namespace host {

constexpr int kMaxThreads = 256, kStack = 1 << 17;

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    bool started, done;
};
struct Barrier {
    int arrived = 0;
    uint64_t generation = 0;
};
struct Warp {
    Barrier barrier;
    uint32_t words[32][6];
};
struct CopyBarrier {
    int arrivals, pending, bytes = 0;
    uint32_t phase = 0;
    void check() {
        if (pending == 0 && bytes == 0) ++phase, pending = arrivals;
    }
};

inline Fiber fibers[kMaxThreads];
inline jmp_buf scheduler;
inline int thread, threads;
inline dim3 block, grid;
inline Warp warps[kMaxThreads / 32];
inline Barrier named[16];
inline std::map<uint32_t, CopyBarrier> copy_barriers;
inline std::vector<std::function<void()>> copies;
inline unsigned char* shared;
inline std::function<void()> kernel;

// Long jumps, because swapcontext asks the kernel for the signal mask every time.
inline void wait() {
    if (_setjmp(fibers[thread].place) == 0) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

inline void meet(Barrier& barrier, int count, bool stay = true) {
    const uint64_t generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (stay && barrier.generation == generation) wait();
}

inline void meet_warp() { meet(warps[thread / 32].barrier, 32); }

template <typename T>
T from_lane(T x, int lane) {
    Warp& warp = warps[thread / 32];
    warp.words[thread % 32][0] = same_bits<uint32_t>(x);
    meet_warp();
    x = same_bits<T>(warp.words[lane & 31][0]);
    meet_warp();
    return x;
}

inline void run_thread() {
    kernel();
    fibers[thread].done = true;
    wait();
}

// Runs a block; false if nothing moves any more, or something is left over.
inline bool run_block() {
    static std::vector<char> stacks(kMaxThreads * kStack);
    static uint32_t random = 1;
    copy_barriers.clear();
    for (int i = 0; i < threads; ++i) {
        getcontext(&fibers[i].start);
        fibers[i].start.uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStack];
        fibers[i].start.uc_stack.ss_size = kStack;
        fibers[i].started = fibers[i].done = false;
        makecontext(&fibers[i].start, run_thread, 0);
    }
    int left = threads;
    for (int64_t round = 0; left > 0; ++round) {
        random = random * 1664525 + 1013904223;
        for (int i = 0; i < threads / 32; ++i) {
            const int warp = (i + (random >> 16)) % (threads / 32);
            if ((random >> (8 + i) & 3) == 0) continue;
            for (thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
                if (fibers[thread].done) continue;
                resume(fibers[thread]);
                left -= fibers[thread].done;
            }
        }
        if (!copies.empty() && random >> 28 < 6) {
            copies.front()();
            copies.erase(copies.begin());
        }
        if (round > 2'000'000) return false;
    }
    return copies.empty() && std::all_of(named, named + 16, [](const Barrier& b) { return b.arrived == 0; });
}

}  // namespace host

struct ThreadIndex {
    struct { operator int() const { return host::thread; } } x;
};
struct BlockSize {
    struct { operator int() const { return host::threads; } } x;
};
inline ThreadIndex threadIdx;
inline BlockSize blockDim;
inline dim3 &blockIdx = host::block, &gridDim = host::grid;

inline void __syncwarp() { host::meet_warp(); }
inline void __syncthreads() { host::meet(host::named[0], host::threads); }
template <typename T>
T __shfl_sync(uint32_t, T x, int lane) { return host::from_lane(x, lane); }
template <typename T>
T __shfl_xor_sync(uint32_t, T x, int distance) { return host::from_lane(x, host::thread % 32 ^ distance); }
inline bool __any_sync(uint32_t, bool x) {
    host::Warp& warp = host::warps[host::thread / 32];
    warp.words[host::thread % 32][0] = x;
    host::meet_warp();
    const bool any = std::any_of(warp.words, warp.words + 32, [](const uint32_t* words) { return words[0] != 0; });
    host::meet_warp();
    return any;
}

// The runtime

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorUnknown = 999 };
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorUnknown ? "stuck" : "invalid"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 2, cudaSuccess; }  // two processors
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <typename... Parameters, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Given&... arguments) {
    std::vector<unsigned char> memory(config->dynamicSmemBytes + 128, 0xEE);
    host::shared = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 127);
    host::kernel = [=] { kernel(arguments...); };
    host::threads = config->blockDim.x;
    host::grid = config->gridDim;
    for (unsigned z = 0; z < host::grid.z; ++z) {
        for (unsigned y = 0; y < host::grid.y; ++y) {
            for (unsigned x = 0; x < host::grid.x; ++x) {
                host::block = dim3(x, y, z);
                if (!host::run_block()) return cudaErrorUnknown;
            }
        }
    }
    return cudaSuccess;
}
