// Tiles on their way from memory to shared memory: a ring of slots, filled ahead of their use by asynchronous copies.
//
// Each slot has two barriers: `full` (its copy has arrived) and `empty` (all warps have read it).
#pragma once
#include <ptx.cuh>

namespace vq {

template <int kBytes, int kSlots, int kWarps>
class Ring {
   public:
    static constexpr int kSharedBytes = kSlots * kBytes + kSlots * 16;

    VQ_INLINE explicit Ring(unsigned char* shared) : tiles_(shared), barriers_(shared_address(shared + kSlots * kBytes)) {
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < kSlots; ++slot) {
                barrier_init(full(slot), kCopyEngine ? 1 : kWarps * 32);
                barrier_init(empty(slot), kWarps);
            }
            barrier_init_done();
        }
        __syncthreads();
    }

    // All threads: start copying bytes `begin` to `end` of a tile into the next slot, once that is empty.
    VQ_INLINE void fill(const unsigned char* source, int begin, int end) {
        if (!kCopyEngine || threadIdx.x == 0) {
            const int slot = filled_ % kSlots;
            barrier_wait(empty(slot), filled_ / kSlots + 1);  // the phase before the first counts as complete
            copy_async(shared_address(tiles_) + slot * kBytes + begin, source + begin, end - begin, full(slot));
        }
        ++filled_;
    }

    // The oldest tile not yet taken, when it has arrived.
    VQ_INLINE const unsigned char* take() {
        const int slot = taken_ % kSlots;
        barrier_wait(full(slot), taken_ / kSlots);
        ++taken_;
        return tiles_ + slot * kBytes;
    }

    // All lanes of a warp: done with the oldest tile not yet released.
    VQ_INLINE void release() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty(released_ % kSlots));
        ++released_;
    }

   private:
    VQ_INLINE uint32_t full(int slot) const { return barriers_ + 16 * slot; }
    VQ_INLINE uint32_t empty(int slot) const { return barriers_ + 16 * slot + 8; }

    unsigned char* tiles_;
    uint32_t barriers_;
    uint32_t filled_ = 0, taken_ = 0, released_ = 0;
};

}  // namespace vq
