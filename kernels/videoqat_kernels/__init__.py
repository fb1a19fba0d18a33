"""Kernels of 4-bit attention. They know torch and Triton, and nothing of videoqat."""
