"""How far one video is from another, frame by frame, and how much a video flickers.

PSNR and SSIM say whether two samplers walked the same path, not which video is better: a tiny change in an early step leads to another video
that may be just as good. ST-LPIPS (`st_lpips.py`), where its weights are, forgives small shifts, but knows no more than one frame either. Read them
beside the floor, the reference rendered twice (`compare.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videoqat.config import require
from videoqat.errors import DataError
from videoqat.evaluation.st_lpips import StLpips

SMALLEST = 11  # pixels in height and width: SSIM's window
LUMA = np.array([0.2126, 0.7152, 0.0722], dtype=np.float64)  # ITU-R BT.709


def _checked(frames_FHWC: NDArray[np.uint8], name: str) -> NDArray[np.uint8]:
    if frames_FHWC.ndim != 4 or frames_FHWC.shape[-1] != 3 or frames_FHWC.dtype != np.uint8:
        raise DataError(f"{name} has shape {frames_FHWC.shape} and dtype {frames_FHWC.dtype}; legal: (frames, height, width, 3) of uint8")
    return frames_FHWC


def check_sizes(sizes: Iterable[tuple[int, int]]) -> None:
    """Requires that videos of these sizes (height, width) can be compared.

    Raises:
        ConfigError: one is smaller than SSIM's window.
    """
    for height, width in sizes:
        size = f"{height}x{width}"
        require(min(height, width) >= SMALLEST, "sampling: height x width", size, f"{SMALLEST} or more of each, for videos that are compared")


def flicker(frames_FHWC: NDArray[np.uint8]) -> float | None:
    """Temporal flicker: the mean of |Y[t+1] - 2 Y[t] + Y[t-1]| over pixels and inner frames, Y being BT.709 luma in 8-bit levels (0 to 255).

    The second difference is zero for a still picture and for brightness that rises or falls steadily, and largest where a pixel jumps up
    and back. Textures in motion contribute too, so the number has meaning beside that of another video of the same prompt and seed.

    Args:
        frames_FHWC: uint8 (frames, height, width, 3).

    Returns:
        Levels, or None for fewer than three frames.
    """
    _checked(frames_FHWC, "the video")
    if len(frames_FHWC) < 3:
        return None
    y_FHW = frames_FHWC.astype(np.float64) @ LUMA
    return float(np.abs(y_FHW[2:] - 2 * y_FHW[1:-1] + y_FHW[:-2]).mean())


def fidelity(reference_FHWC: NDArray[np.uint8], frames_FHWC: NDArray[np.uint8], st_lpips: StLpips | None = None) -> dict[str, Any]:
    """PSNR (dB), SSIM and, with its network, ST-LPIPS of each frame against the same frame of `reference_FHWC`.

    SSIM is that of Wang et al. 2004 (Gaussian window of sd 1.5 pixels, 11 pixels wide), averaged over the colour channels.

    Args:
        reference_FHWC: uint8 (frames, height, width, 3), at least 11 pixels high and wide.
        frames_FHWC: the same shape.
        st_lpips: the network, for videos of at least 21 pixels in height and width.

    Returns:
        `identical`: whether all frames are equal, bit for bit. `identical_frames`: how many are. `psnr`, `ssim`: lists with one number a
        frame; PSNR of an identical frame is infinite, which is no JSON: None. `psnr_mean`, `psnr_min`: over the frames that differ, None if
        there is none. `ssim_mean`, `ssim_min`: over all frames. With `st_lpips`: `st_lpips`, a number a frame (0: identical), `st_lpips_mean`,
        `st_lpips_max`: over all frames.

    Raises:
        DataError: shapes differ, or aren't those of two videos. ConfigError: they are too small.
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    _checked(reference_FHWC, "the reference")
    _checked(frames_FHWC, "the video")
    if reference_FHWC.shape != frames_FHWC.shape:
        raise DataError(f"videos of shapes {reference_FHWC.shape} and {frames_FHWC.shape} can't be compared; legal: equal shapes")
    check_sizes([(frames_FHWC.shape[1], frames_FHWC.shape[2])])
    psnr: list[float | None] = []
    ssim: list[float] = []
    for a_HWC, b_HWC in zip(reference_FHWC, frames_FHWC, strict=True):
        same = np.array_equal(a_HWC, b_HWC)
        psnr.append(None if same else float(peak_signal_noise_ratio(a_HWC, b_HWC, data_range=255)))
        # Arguments as in Wang et al. 2004, the definition other people's figures refer to; scikit-image's defaults are a plain 7x7 window.
        options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
        ssim.append(1.0 if same else float(structural_similarity(a_HWC, b_HWC, channel_axis=-1, data_range=255, **options)))
    differing = [value for value in psnr if value is not None]
    result = {
        "identical": not differing,
        "identical_frames": len(psnr) - len(differing),
        "psnr": psnr,
        "psnr_mean": float(np.mean(differing)) if differing else None,
        "psnr_min": min(differing, default=None),
        "ssim": ssim,
        "ssim_mean": float(np.mean(ssim)),
        "ssim_min": min(ssim),
    }
    if st_lpips is None:
        return result
    distances = st_lpips.distances(reference_FHWC, frames_FHWC)
    return result | {"st_lpips": distances, "st_lpips_mean": float(np.mean(distances)), "st_lpips_max": max(distances)}


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Many videos' `fidelity` as one line: means over videos, the worst frame of all, and how many videos are identical to their reference.

    ST-LPIPS is in it if all of them have it.
    """
    means = [result["psnr_mean"] for result in results if result["psnr_mean"] is not None]
    summary = {
        "videos": len(results),
        "identical_videos": sum(result["identical"] for result in results),
        "psnr_mean": float(np.mean(means)) if means else None,
        "psnr_min": min((result["psnr_min"] for result in results if result["psnr_min"] is not None), default=None),
        "ssim_mean": float(np.mean([result["ssim_mean"] for result in results])),
        "ssim_min": min(result["ssim_min"] for result in results),
    }
    if not all("st_lpips_mean" in result for result in results):
        return summary
    perceptual = {"st_lpips_mean": float(np.mean([r["st_lpips_mean"] for r in results])), "st_lpips_max": max(r["st_lpips_max"] for r in results)}
    return summary | perceptual
