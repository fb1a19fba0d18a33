"""SageBwd once more, in loops over heads and blocks, in fp64 with integer codes; nothing masked and nothing padded, slices instead.

Written from docs/numerics.md, section 7, alone, and sharing nothing with the package: rounding is numpy's, products are sums of integers.
"""

import math

import numpy as np

BLOCK = 64


def quantise(x, dtype=np.float64):
    """Codes and scale of one whole block; `dtype` is that of the arithmetic."""
    x = np.asarray(x, dtype=dtype)
    scale = np.abs(x).max() / dtype(127)
    if scale < 2.0**-126:
        return np.zeros(x.shape, dtype=np.int64), 0.0
    return np.rint(x * (dtype(1) / scale)).astype(np.int64), float(scale)


def blocks(n):
    """Slices of 64 and what is left."""
    return [slice(i, min(i + BLOCK, n)) for i in range(0, n, BLOCK)]


class NaiveSageBwd:
    """One call: inputs (B, N, H, d) torch tensors; `forward()`, then `backward(grad_out)`."""

    def __init__(self, q, k, v, smooth_k=True, scale=None, kv_len=None, causal=False):
        self.q, self.k, self.v = (x.detach().float().cpu().numpy() for x in (q, k, v))
        self.smooth_k, self.causal = smooth_k, causal
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.group = q.shape[2] // k.shape[2]
        self.lengths = [k.shape[1]] * q.shape[0] if kv_len is None else kv_len.tolist()
        self.heads = [(b, h) for b in range(q.shape[0]) for h in range(q.shape[2])]

    def _scores(self, b, h):
        """Natural-log scores of one head (Nq, keys of the sample), -inf where a row may not look; codes and scales of Q and K by block."""
        n, num_queries = self.lengths[b], self.q.shape[1]
        k = self.k[b, :n, h // self.group]
        mean = k.sum(0, dtype=np.float32) / np.float32(max(n, 1)) if self.smooth_k else np.zeros_like(self.q[b, 0, h])
        q_blocks = [(i, *quantise(self.q[b, i, h], np.float32)) for i in blocks(num_queries)]
        k_blocks = [(j, *quantise(k[j] - mean, np.float32)) for j in blocks(n)]
        s = np.full((num_queries, n), -np.inf)
        for i, q_codes, q_scale in q_blocks:
            for j, k_codes, k_scale in k_blocks:
                s[i, j] = (q_codes @ k_codes.T) * (q_scale * k_scale * self.scale)
        if self.causal:
            s[np.arange(n)[None] > np.arange(num_queries)[:, None] + n - num_queries] = -np.inf
        return s, q_blocks, k_blocks, mean

    def forward(self):
        """out (B, N, H, d) and lse (B, H, N), fp64."""
        B, num_queries, H, d = self.q.shape
        self.out, self.lse = np.zeros((B, num_queries, H, d)), np.full((B, H, num_queries), -np.inf)
        for b, h in self.heads:
            s, _, k_blocks, mean = self._scores(b, h)
            v_blocks = [quantise(self.v[b, : self.lengths[b], h // self.group][j], np.float32) for j, _, _ in k_blocks]
            for i in range(num_queries):
                if not np.isfinite(s[i]).any():
                    continue
                m = s[i].max()
                total = np.exp(s[i] - m).sum()
                self.lse[b, h, i] = m + math.log(total) + self.scale * (self.q[b, i, h].astype(np.float64) @ mean)
                for (j, _, _), (v_codes, v_scale) in zip(k_blocks, v_blocks, strict=True):
                    top = s[i, j].max()
                    if np.isfinite(top):
                        codes = np.rint(127 * np.exp(s[i, j] - top)).astype(np.int64)
                        self.out[b, i, h] += (codes @ v_codes) * (v_scale * math.exp(top - m) / 127 / total)
        return self.out, self.lse

    def backward(self, grad_out):
        """dQ, dK, dV, fp64."""
        grad_out = grad_out.detach().float().cpu().numpy()
        dq = np.zeros(self.q.shape)
        dk, dv = np.zeros(self.k.shape), np.zeros(self.k.shape)
        for b, h in self.heads:
            s, q_blocks, k_blocks, _ = self._scores(b, h)
            seen = np.isfinite(s)
            top = np.where(seen.any(1), np.max(s, axis=1, initial=-np.inf), 0.0)
            e = np.exp(s - top[:, None])
            p = e / np.maximum(e.sum(1, keepdims=True), 1e-300)
            do = grad_out[b, :, h].astype(np.float64)
            delta = (do * self.out[b, :, h]).sum(1)
            for i, q_codes, q_scale in q_blocks:
                do_codes, do_scale = quantise(grad_out[b, i, h], np.float32)
                for j, k_codes, k_scale in k_blocks:
                    v = self.v[b, j, h // self.group].astype(np.float64)
                    p_codes, p_scale = quantise(p[i, j])
                    dv[b, j, h // self.group] += (p_codes.T @ do_codes) * (p_scale * do_scale)
                    ds_codes, ds_scale = quantise(p[i, j] * (do[i] @ v.T - delta[i, None]))
                    dq[b, i, h] += (ds_codes @ k_codes) * (ds_scale * k_scale * self.scale)
                    dk[b, j, h // self.group] += (ds_codes.T @ q_codes) * (ds_scale * q_scale * self.scale)
        return dq, dk, dv
