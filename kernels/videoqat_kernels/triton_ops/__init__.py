"""Attn-QAT's attention in Triton: quantise (quantize.py), forward and backward (attention.py)."""
