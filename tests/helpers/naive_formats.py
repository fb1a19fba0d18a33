"""A second, slow implementation of the block formats, written from the definition alone.

Elements are found by looking for the nearest value in a table (float64, where all these distances are exact), tables come from the bit
fields, blocks are python loops. Nothing is shared with `videoqat.formats`.
"""

import math

import numpy as np

F32 = np.float32


def e2m1_table() -> list[float]:
    """Value of codes 0..7: 1 exponent-bias, 2 exponent bits, 1 mantissa bit."""
    return [(m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1)) for e in range(4) for m in range(2)]


def e4m3_table() -> list[float]:
    """Value of codes 0..126 (127 is NaN): bias 7, 4 exponent bits, 3 mantissa bits."""
    return [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]


def nearest_code(magnitude: float, table: list[float]) -> int:
    """Index of the nearest entry, the even one of two, the last one from there on."""
    if magnitude >= table[-1]:
        return len(table) - 1
    distances = [abs(float(magnitude) - value) for value in table]
    nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    return nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)


def tree_sum(values: list[F32]) -> F32:
    while len(values) > 1:
        values = [F32(values[i] + values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def quantize_block(x: list[F32], name: str, divisors: tuple[float, ...] = (6.0,)) -> tuple[int, list[int], list[float]]:
    """Scale's code, elements' codes and dequantised values of one whole block."""
    elements, sign_bit = (e4m3_table(), 0x80) if name == "mxfp8" else (e2m1_table(), 0x8)
    if not all(math.isfinite(v) for v in x):
        return (0x7F if name == "nvfp4" else 0xFF), [0] * len(x), [math.nan] * len(x)
    a = max(abs(F32(v)) for v in x)

    def with_scale(scale: float) -> tuple[list[int], list[float]]:
        r = F32(0) if scale == 0 else F32(1) / F32(scale)
        products = [F32(F32(v) * r) for v in x]
        codes = [nearest_code(abs(float(y)), elements) for y in products]
        values = [math.copysign(elements[c] * scale, y) for c, y in zip(codes, products, strict=True)]
        if scale == 0:
            return [0] * len(x), [0.0] * len(x)
        return [c | (sign_bit if np.signbit(y) else 0) for c, y in zip(codes, products, strict=True)], values

    if name != "nvfp4":
        exponent = -127 if a == 0 else math.frexp(float(a))[1] - 1 - (8 if name == "mxfp8" else 2)
        exponent = max(-127, min(127, exponent))
        return exponent + 127, *with_scale(2.0**exponent)

    best = None
    for c in divisors:
        with np.errstate(over="ignore"):
            code = nearest_code(float(F32(a * F32(1.0 / c))), e4m3_table())
            codes, values = with_scale(e4m3_table()[code])
            differences = [F32(F32(v) - F32(w)) for v, w in zip(x, values, strict=True)]
            error = tree_sum([F32(d * d) for d in differences])
        if best is None or error < best[0]:
            best = (error, code, codes, values)
    return best[1:]


def quantize_rows(x: np.ndarray, name: str, divisors: tuple[float, ...] = (6.0,)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale codes, element codes, values) of an fp32 (rows, length) array along its last axis; codes padded, values not."""
    size = 16 if name == "nvfp4" else 32
    padded = np.pad(x.astype(F32), ((0, 0), (0, -x.shape[1] % size)))
    blocks = [[quantize_block(list(row[i : i + size]), name, divisors) for i in range(0, len(row), size)] for row in padded]
    scales = np.array([[b[0] for b in row] for row in blocks], dtype=np.uint8)
    codes = np.array([[c for b in row for c in b[1]] for row in blocks], dtype=np.uint8)
    values = np.array([[v for b in row for v in b[2]] for row in blocks], dtype=np.float64)
    return scales, codes, values[:, : x.shape[1]]
