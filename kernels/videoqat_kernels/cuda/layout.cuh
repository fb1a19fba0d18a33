// Where a number lies: in a warp's registers when it is multiplied, and in memory before that.
//
// A warp's product (mma.cuh) is C[16 x 8] += A[16 x 64] B[64 x 8], with 4-bit elements and one scale for 16 neighbours along the 64. Lane
// 4g + q (g < 8, q < 4) holds
//     A word i < 4:  row g + 8 (i & 1),  k = 32 (i >> 1) + 8q ... + 7      eight elements, the first in the lowest four bits
//     B word i < 2:  column g,           k = 32 i + 8q ... + 7
//     C i < 4:       row g + 8 (i >> 1), column 2q + (i & 1)
//     scales of A:   lane 4g + 2T: row g; lane 4g + 2T + 1: row g + 8      four bytes, byte j for k = 16j ... 16j + 15; T < 2 is chosen
//     scales of B:   lane 4g + T: column g                                 by the instruction, and T < 4
//
// The quantisers write operands in just that order, so that attention loads 16 bytes a lane, side by side, and needs no address arithmetic:
// memory is a sequence of units of 512 bytes, in which lane l owns bytes 16 l ... 16 l + 15.
//
//     Q, 16 queries:   D / 64 units, one a k-step s, with A's four words; then 128 bytes, a word a lane: the scales of row g + 8 (q & 1) and
//                      k-step q >> 1.
//     K, 128 keys:     units of four words a lane: B of n-tile t (8 keys), word 2s + i for each k-step s (D = 128), or of n-tiles 2t and
//                      2t + 1 (D = 64); then the scales (below).
//     V, 128 tokens:   here columns are channels and k runs through tokens: one unit for 8 channels, word 2s + i; then the scales.
//     scales of K, V:  for each four n-tiles u and k-step s a word a lane: lane 4g + T has those of n-tile 4u + T, column g. Four such words
//                      (u * S + s, S k-steps) make a unit.
//
// A tile of K or V takes 72 D bytes: 4.5 bits a number. In memory, and so in the slots of attention's ring, K of tile t is neighbour to V of
// tile t - 1, because S of one tile is computed together with O of the one before: pair p holds K of tile p, then V of tile p - 1, and there is
// one pair more than there are tiles. The first pair's V and the last one's K are never read.
//
// P goes from C to A without leaving its lane if K's columns are in the right order: in each 32 keys, column p is key `key_of_column(p)`.
// Then the 8 numbers that lane (g, q) finds in row g of four n-tiles are keys 8q ... 8q + 7 of the 32, as A wants them.
#pragma once
#include <cstdint>

#define VQ_INLINE __device__ __forceinline__

namespace vq {

constexpr int kTileQueries = 128;  // of a thread block
constexpr int kTileKeys = 128;
constexpr int kUnit = 512;

__host__ __device__ constexpr int tile_bytes(int D) { return 72 * D; }          // K or V, 128 tokens
__host__ __device__ constexpr int pair_bytes(int D) { return 2 * tile_bytes(D); }
__host__ __device__ constexpr int query_bytes(int D) { return 8 * D + 128; }    // Q, 16 rows
__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

VQ_INLINE int key_of_column(int p) { return (p & ~31) + 8 * ((p & 7) >> 1) + 2 * ((p >> 3) & 3) + (p & 1); }

// Byte of scale word i (u * S + s) of a lane, from the start of a tile's scales.
VQ_INLINE int scale_word(int i, int lane) { return (i >> 2) * kUnit + lane * 16 + (i & 3) * 4; }

}  // namespace vq
