"""Attention with quantised operands: one entry point, the formulas, and the kernels that serve them."""

from videoqat.attention.backends import Receipt, record_receipts, resolve
from videoqat.attention.functional import attention

__all__ = ["Receipt", "attention", "record_receipts", "resolve"]
