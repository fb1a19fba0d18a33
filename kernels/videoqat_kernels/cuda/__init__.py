"""Attention in NVFP4 on the tensor cores' own FP4 (sm_120a, sm_121a), or with their product emulated (any GPU from sm_80), in CUDA C++.

`build.py` makes the libraries (`make kernels`), `library.py` loads them, `attention.py` calls them. Of the sources, `layout.cuh` is the one to
read first.
"""
