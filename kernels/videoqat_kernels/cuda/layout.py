"""Codes in their plain order to the operands that the kernels multiply, and back: layout.cuh once more, as permutations of bytes.

Plain are codes and scales as videoqat/attention/coded.py has them: for q and k codes (B, H, N, d / 2) and scales (B, H, N, d / 16), for v codes
(B, H, N / 2, d) and scales (B, H, N / 16, d), uint8, two codes a byte, here with N padded to whole tiles of 128 tokens.

Axes of the fragments, in the letters of layout.cuh: g lane >> 2, q lane & 3, s k-step, i word (of B), T and u n-tile 4u + T, j byte of a word of
scales, b byte of a word of codes.
"""

import torch
from torch import Tensor

TILE = 128  # queries of a thread block, keys of a tile


def pack_q(codes: Tensor, scales: Tensor) -> Tensor:
    """Q's operand: uint8 (B, H, row tiles of 16, 8 d + 128)."""
    B, H, N, half = codes.shape
    S = half // 32
    fragments = codes.reshape(B, H, N // 16, 2, 8, S, 2, 4, 4)  # row + 8, g, s, i, q, b
    fragments = fragments.permute(0, 1, 2, 5, 4, 7, 6, 3, 8).flatten(3)
    words = scales.reshape(B, H, N // 16, 2, 8, S, 4).expand(-1, -1, -1, -1, -1, S, -1)  # row + 8, g, s, j
    words = words.permute(0, 1, 2, 4, 5, 3, 6)
    if S == 1:  # lanes with q > 1 hold what those with q < 2 hold
        words = words.expand(-1, -1, -1, -1, 2, -1, -1)
    return torch.cat((fragments, words.flatten(3)), dim=3)


def unpack_q(operand: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_q`: codes and scales."""
    B, H, tiles, size = operand.shape
    S = (size - 128) // 512
    fragments = operand[..., : 512 * S].reshape(B, H, tiles, S, 8, 4, 2, 2, 4)
    codes = fragments.permute(0, 1, 2, 7, 4, 3, 6, 5, 8).reshape(B, H, tiles * 16, 32 * S)
    words = operand[..., 512 * S :].reshape(B, H, tiles, 8, 2, 2, 4)[..., :S, :, :]  # g, s, row + 8, j
    return codes, words.permute(0, 1, 2, 5, 3, 4, 6).reshape(B, H, tiles * 16, 4 * S)


def pack_k(codes: Tensor, scales: Tensor) -> Tensor:
    """K's operand: uint8 (B, H, tiles of 128, 72 d). Column 8T + g of 32 holds key 8 (g >> 1) + 2T + (g & 1)."""
    B, H, N, half = codes.shape
    S = half // 32
    fragments = codes.reshape(B, H, N // TILE, 4, 4, 2 * S, 2 // S, 2, S, 2, 4, 4)  # u, g >> 1, T in two parts, g & 1, s, i, q, b
    fragments = fragments.permute(0, 1, 2, 3, 5, 4, 7, 10, 6, 8, 9, 11).flatten(3)
    words = scales.reshape(B, H, N // TILE, 4, 4, 4, 2, S, 4)  # u, g >> 1, T, g & 1, s, j
    words = words.permute(0, 1, 2, 3, 7, 4, 6, 5, 8).reshape(B, H, N // TILE, S, 4, 32, 4)  # unit, word of the unit, lane, j
    return torch.cat((fragments, words.transpose(4, 5).flatten(3)), dim=3)


def unpack_k(operand: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_k`: codes and scales."""
    B, H, tiles, size = operand.shape
    S = size // 72 // 64
    fragments = operand[..., : 4096 * S].reshape(B, H, tiles, 4, 2 * S, 4, 2, 4, 2 // S, S, 2, 4)
    codes = fragments.permute(0, 1, 2, 3, 5, 4, 8, 6, 9, 10, 7, 11).reshape(B, H, tiles * TILE, 32 * S)
    words = operand[..., 4096 * S :].reshape(B, H, tiles, S, 32, 4, 4).transpose(4, 5).reshape(B, H, tiles, 4, S, 4, 2, 4, 4)
    return codes, words.permute(0, 1, 2, 3, 5, 7, 6, 4, 8).reshape(B, H, tiles * TILE, 4 * S)


def pack_v(codes: Tensor, scales: Tensor) -> Tensor:
    """V's operand: uint8 (B, H, tiles of 128, 72 d)."""
    B, H, _, d = scales.shape
    fragments = codes.reshape(B, H, -1, 2, 2, 4, 4, d // 8, 8)  # s, i, q, b, n-tile, g
    fragments = fragments.permute(0, 1, 2, 7, 8, 5, 3, 4, 6).flatten(3)
    words = scales.reshape(B, H, -1, 2, 4, d // 32, 4, 8)  # s, j, u, T, g
    words = words.permute(0, 1, 2, 5, 3, 7, 6, 4).reshape(B, H, -1, d // 64, 4, 32, 4)  # unit, word of the unit, lane, j
    return torch.cat((fragments, words.transpose(4, 5).flatten(3)), dim=3)


def unpack_v(operand: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_v`: codes and scales."""
    B, H, tiles, size = operand.shape
    d = size // 72
    fragments = operand[..., : 64 * d].reshape(B, H, tiles, d // 8, 8, 4, 2, 2, 4)
    codes = fragments.permute(0, 1, 2, 6, 7, 5, 8, 3, 4).reshape(B, H, tiles * TILE // 2, d)
    words = operand[..., 64 * d :].reshape(B, H, tiles, d // 64, 32, 4, 4).transpose(4, 5).reshape(B, H, tiles, d // 32, 2, 8, 4, 4)
    return codes, words.permute(0, 1, 2, 4, 7, 3, 6, 5).reshape(B, H, tiles * 8, d)
