"""ST-LPIPS: how different two pictures look, judged by features that a shift of a pixel or two hardly moves.

Ghildyal and Liu, "Shift-tolerant Perceptual Similarity Metric", ECCV 2022 (arXiv 2207.13686). Like LPIPS (Zhang et al. 2018) it takes the outputs
of AlexNet's five convolutions at each pixel as vectors of length one, squares their differences, weighs the channels, and adds up the layers' means.
What makes it tolerant: no convolution or pooling leaves places out; each is made at every place, and its output is halved through a binomial filter
(Zhang, "Making Convolutional Networks Shift-Invariant Again", ICML 2019), mirrored at the borders.

The weights are the authors' (`alex_shift_tolerant.pth`, 9.4 MiB, BSD 2-Clause), as they lie in the wheel `stlpips-pytorch`. That file alone is read;
the wheel's program, a part of which has a non-commercial licence, is neither imported nor copied.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from videoqat.config import require
from videoqat.data.precompute import file_hash
from videoqat.errors import CheckpointError, DataError

PACKAGE, FILE = "stlpips_pytorch", "weights/vST0.0/alex_shift_tolerant.pth"
HOW = f"pip install 'videoqat[metrics]' brings them; or st_lpips=PATH, where {Path(FILE).name} of the wheel stlpips-pytorch lies"
SMALLEST = 21  # pixels in height and width: below, the last filter would have to mirror more pixels than there are
PIXELS_AT_ONCE = 2**16  # in each of the two videos, unless one frame has more: on a CPU, larger batches leave its caches

CONVOLUTIONS = {  # name in the file -> shape (channels out, channels in, height, width)
    "net.slice1.0": (64, 3, 11, 11),
    "net.slice2.5": (192, 64, 5, 5),
    "net.slice3.9": (384, 192, 3, 3),
    "net.slice4.11": (256, 384, 3, 3),
    "net.slice5.13": (256, 256, 3, 3),
}
PADDING = (2, 2, 1, 1, 1)
SHAPES = {
    **{f"{name}.weight": shape for name, shape in CONVOLUTIONS.items()},
    **{f"{name}.bias": shape[:1] for name, shape in CONVOLUTIONS.items()},
    **{f"lin{i}.model.1.weight": (1, shape[0], 1, 1) for i, shape in enumerate(CONVOLUTIONS.values())},
    "scaling_layer.shift": (1, 3, 1, 1),
    "scaling_layer.scale": (1, 3, 1, 1),
}


def _halve(x_BCHW: Tensor) -> Tensor:
    """Every second pixel of the picture under the binomial filter (1 2 1) / 4 in height and width, with two mirrored pixels around."""
    channels, line = x_BCHW.shape[1], torch.tensor([0.25, 0.5, 0.25], device=x_BCHW.device)
    return F.conv2d(F.pad(x_BCHW, (2, 2, 2, 2), mode="reflect"), torch.outer(line, line).expand(channels, 1, 3, 3), stride=2, groups=channels)


class StLpips:
    """The network, in fp32.

    Args:
        path: the authors' `alex_shift_tolerant.pth`, or a file of the same tensors in any floating-point dtype.
        device: where it computes.

    Attributes:
        sha256: of the file.

    Raises:
        CheckpointError: the file holds something else.
    """

    def __init__(self, path: str | Path, device: str | torch.device = "cpu") -> None:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            shapes = {name: tuple(found[name].shape) for name in SHAPES}
        except Exception as error:  # whatever unpickling meets in a file that is torn, or none
            raise CheckpointError(f"{path} holds no weights of ST-LPIPS: {type(error).__name__}: {error}") from error
        for name, shape in SHAPES.items():
            if shapes[name] != shape:
                raise CheckpointError(f"{path} holds no weights of ST-LPIPS: {name} has shape {shapes[name]}, not {shape}")
        self.device = torch.device(device)
        self.sha256 = file_hash(Path(path))
        self._weights = {name: found[name].to(self.device, torch.float32) for name in SHAPES}

    def _features(self, x_BCHW: Tensor) -> list[Tensor]:
        """Of pictures (B, 3, H, W), the outputs of the five layers, vectors along the channels of length one."""
        features = []
        for layer, (name, padding) in enumerate(zip(CONVOLUTIONS, PADDING, strict=True)):
            if layer in (1, 2):
                x_BCHW = _halve(F.max_pool2d(x_BCHW, 3, stride=1))
            x_BCHW = F.conv2d(x_BCHW, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], padding=padding)
            x_BCHW = F.relu(_halve(x_BCHW) if layer == 0 else x_BCHW)
            features.append(x_BCHW / (x_BCHW.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return features

    @torch.inference_mode()
    def distances(self, reference_FHWC: NDArray[np.uint8], frames_FHWC: NDArray[np.uint8]) -> list[float]:
        """ST-LPIPS of each frame to the same frame of the reference: 0 for equal frames (which aren't looked at), more for what looks less alike.

        Args:
            reference_FHWC, frames_FHWC: uint8 of one shape, (frames, height, width, 3), at least 21 pixels high and wide.

        Raises:
            DataError: smaller frames.
        """
        height, width = frames_FHWC.shape[1:3]
        if min(height, width) < SMALLEST:
            raise DataError(f"ST-LPIPS can't take frames of {height}x{width} pixels; legal: at least {SMALLEST} in height and width")
        step, found = max(1, PIXELS_AT_ONCE // (height * width)), [0.0] * len(frames_FHWC)
        differing = [i for i, (a, b) in enumerate(zip(reference_FHWC, frames_FHWC, strict=True)) if not np.array_equal(a, b)]
        # TF32, which torch lets convolutions use on a GPU, has 10 bits. Nor may the algorithm be chosen by timing.
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            for first in range(0, len(differing), step):
                some = differing[first : first + step]
                a_BHWC, b_BHWC = (torch.from_numpy(video[some]).to(self.device) for video in (reference_FHWC, frames_FHWC))
                for frame, distance in zip(some, self._distances(a_BHWC, b_BHWC).tolist(), strict=True):
                    found[frame] = distance
        return found

    def _distances(self, a_BHWC: Tensor, b_BHWC: Tensor) -> Tensor:
        # Of shape (B, C, H, W), and laid out as they came: channels last is faster on a CPU.
        x_BCHW = torch.cat([a_BHWC, b_BHWC]).permute(0, 3, 1, 2).float() / 127.5 - 1
        x_BCHW = (x_BCHW - self._weights["scaling_layer.shift"]) / self._weights["scaling_layer.scale"]
        total_B = torch.zeros(len(a_BHWC), device=self.device)
        for layer, feature in enumerate(self._features(x_BCHW)):
            a_BCHW, b_BCHW = feature.chunk(2)
            total_B += F.conv2d((a_BCHW - b_BCHW).square(), self._weights[f"lin{layer}.model.1.weight"]).mean((1, 2, 3))
        return total_B


def installed() -> Path | None:
    """Where the installed wheel has the weights, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    paths = [Path(folder) / FILE for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((path for path in paths if path.is_file()), None)


def load(setting: str, sizes: Iterable[tuple[int, int]], device: str | torch.device = "cpu") -> tuple[StLpips | None, dict[str, str]]:
    """The network that the setting `st_lpips` asks for, for videos of these sizes (height, width).

    Returns:
        The network and {"sha256": of its weights}. Or None and {"absent": why}: the setting is `none`; or it is `auto` and there are no weights, or a
        size is too small.

    Raises:
        ConfigError: another setting, and it can't be had. CheckpointError: a file that holds something else.
    """
    if setting == "none":
        return None, {"absent": "st_lpips=none"}
    path = installed() if setting in ("auto", "installed") else Path(setting)
    smallest = min(sizes, key=min)
    large = min(smallest) >= SMALLEST
    if setting == "auto" and not (path and large):
        why = f"its weights are not installed ({HOW})" if large else f"{smallest[0]}x{smallest[1]} pixels are too few; it takes {SMALLEST} or more"
        return None, {"absent": why}
    require(path is not None, "st_lpips", setting, f"auto or none where the weights are not installed; {HOW}")
    legal = f"auto or none for videos of {smallest[0]}x{smallest[1]}: it takes {SMALLEST} pixels or more in height and width"
    require(large, "st_lpips", setting, legal)
    assert path is not None
    network = StLpips(path, device)
    return network, {"sha256": network.sha256}
