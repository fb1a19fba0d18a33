"""The built libraries, seen from Python: their C interface (interface.h), without torch's ABI in between."""

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p

from videoqat_kernels.cuda.build import library_path, source_digest

MAX_DIVISORS = 8


class LibraryError(RuntimeError):
    """A library that is not there, or is not of these sources; or a launch that failed."""


class QuantizeArguments(ctypes.Structure):
    """Mirrors the structure of that name in interface.h, where the fields are explained."""

    _fields_ = (
        ("x", c_void_p),
        ("operand", c_void_p),
        ("lengths", c_void_p),
        ("mean", c_void_p),
        ("stride_b", c_int64),
        ("stride_n", c_int64),
        ("stride_h", c_int64),
        ("B", c_int32),
        ("N", c_int32),
        ("H", c_int32),
        ("head_dim", c_int32),
        ("mean_tokens", c_int32),
        ("is_half", c_int32),
        ("num_divisors", c_int32),
        ("inverse_divisors", c_float * MAX_DIVISORS),
    )


class AttentionArguments(ctypes.Structure):
    """Mirrors the structure of that name in interface.h, where the fields are explained."""

    _fields_ = (
        ("q", c_void_p),
        ("kv", c_void_p),
        ("kv_len", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("m", c_void_p),
        ("l", c_void_p),
        ("lse", c_void_p),
        ("stride_b", c_int64),
        ("stride_n", c_int64),
        ("stride_h", c_int64),
        ("B", c_int32),
        ("Nq", c_int32),
        ("Nk", c_int32),
        ("H", c_int32),
        ("H_kv", c_int32),
        ("head_dim", c_int32),
        ("first_query", c_int32),
        ("num_queries", c_int32),
        ("bias_blocks", c_int32),
        ("is_half", c_int32),
        ("causal", c_int32),
        ("quantised_sum", c_int32),
        ("maximum_first", c_int32),
        ("log2_scale", c_float),
        ("gain", c_float),
    )


_FUNCTIONS = {
    "videoqat_quantize_q": QuantizeArguments,
    "videoqat_quantize_k": QuantizeArguments,
    "videoqat_quantize_v": QuantizeArguments,
    "videoqat_attention": AttentionArguments,
}


@functools.cache
def load(product: str) -> ctypes.CDLL:
    """The library of `product` (native or emulated).

    Raises:
        LibraryError: it is not built, can't be loaded, or was built from other sources than those beside it. Says how to mend that.
    """
    path = library_path(product)
    if not path.is_file():
        raise LibraryError(f"{path.name} is not built: make kernels, or python -m videoqat_kernels.cuda.build")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} can't be loaded: {error}") from error
    library.videoqat_sources.restype = c_char_p
    library.videoqat_error.restype = c_char_p
    library.videoqat_error.argtypes = (c_int,)
    if library.videoqat_sources().decode() != source_digest():
        raise LibraryError(f"{path.name} was built from other sources: make kernels, or python -m videoqat_kernels.cuda.build")
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = (POINTER(arguments), c_void_p)
    return library


def call(product: str, function: str, arguments: ctypes.Structure, stream: int) -> None:
    """Launches on the current device and on `stream` (cudaStream_t).

    Raises:
        LibraryError: the launch failed; says why.
    """
    library = load(product)
    code = getattr(library, function)(ctypes.byref(arguments), stream)
    if code != 0:
        raise LibraryError(f"{function} ({product}): {library.videoqat_error(code).decode()}")
