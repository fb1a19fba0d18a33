"""Video files in and out, through PyAV or, where that is not installed, imageio-ffmpeg: the two engines that `imageio[pyav,ffmpeg]` brings.

Both are used below imageio's plugins, because the plugins hide what matters here: each frame's time stamp on the way in, and the encoder's
quality on the way out. Whichever engine reads, frames come in the order of their time stamps, in RGB by the colour matrix that the file names,
and upright: the rotation that a phone writes into its file is applied.
"""

import importlib.util
import itertools
import math
import re
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from videoqat.errors import DataError, UserError
from videoqat.files import atomic_path

CRF = 14  # x264's constant rate factor: no visible loss
X264_PARAMS = "mbtree=0"  # x264 steers small frames by memory that it never wrote: with it, the same frames give other files now and then
ENGINES = ("pyav", "ffmpeg")


class Frame(NamedTuple):
    """One decoded frame.

    Attributes:
        time: seconds since the first frame of the file.
        duration: seconds the container gives the frame; 0.0 where it gives none.
        image: uint8 (H, W, 3), RGB.
        pixel_aspect: width of a pixel as a multiple of its height, as it is to be shown; 1.0 but for anamorphic video.
    """

    time: float
    duration: float
    image: NDArray[np.uint8]
    pixel_aspect: float


class VideoReadError(DataError):
    """A file that can't be decoded as video. `str(error)` says why."""


def find_engine() -> str:
    """The engine that is installed: `pyav`, else `ffmpeg`.

    Raises:
        UserError: neither is.
    """
    if importlib.util.find_spec("av") is not None:
        return "pyav"
    if importlib.util.find_spec("imageio_ffmpeg") is not None:
        return "ffmpeg"
    raise UserError("no video engine is installed: pip install 'imageio[pyav]' or 'imageio[ffmpeg]'")


def iterate_frames(path: str | Path, engine: str | None = None, seconds: float | None = None) -> Iterator[Frame]:
    """The frames of the first video stream in presentation order; at least those of the first `seconds`, all if that is None.

    Raises:
        VideoReadError: not a video, no video stream, or damaged where it was read.
    """
    path = Path(path)
    if not path.is_file():
        raise VideoReadError(f"no such file {str(path)!r}")
    if path.stat().st_size == 0:
        raise VideoReadError("the file is empty")
    engine = engine or find_engine()
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is none of {', '.join(ENGINES)}")
    yield from _pyav_frames(path) if engine == "pyav" else _ffmpeg_frames(path, seconds)


def _pyav_frames(path: Path) -> Iterator[Frame]:
    """Packets are decoded one by one because Theora's empty ones (the frame before stays) must be left out; the last, without dts, flushes."""
    import av

    try:
        # Titles in some other encoding must not make a video unreadable. PyAV 19 knows no other way.
        lenient = {} if int(av.__version__.partition(".")[0]) >= 19 else {"metadata_errors": "ignore"}
        with av.open(str(path), **lenient) as container:
            if not container.streams.video:
                raise VideoReadError("the file holds no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            promised = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            aspect = float(stream.sample_aspect_ratio or 1)
            start: float | None = None
            end = previous = 0.0
            packets = (packet for packet in container.demux(stream) if packet.size or packet.dts is None)
            for frame in itertools.chain.from_iterable(packet.decode() for packet in packets):
                if frame.time is None:
                    raise VideoReadError("a frame carries no time stamp")
                if frame.is_corrupt:
                    raise VideoReadError(f"damaged at {frame.time:.2f} s")
                start = frame.time if start is None else start
                duration = float(frame.duration * frame.time_base) if frame.duration else 0.0
                time = frame.time - start
                end = time + (duration or time - previous)
                previous = time
                turns = round(frame.rotation / 90) % 4  # counter-clockwise, as np.rot90 turns
                image = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))
                yield Frame(time, duration, image, 1 / aspect if turns % 2 else aspect)
    except (av.FFmpegError, UnicodeError) as error:
        raise VideoReadError(getattr(error, "strerror", None) or str(error)) from error
    _check_complete(start is not None, end, promised)


def _ffmpeg_frames(path: Path, seconds: float | None) -> Iterator[Frame]:
    """Two passes: time stamps from ffmpeg's `showinfo`, then the frames themselves. Both in `passthrough`, so that they agree one to one."""
    import imageio_ffmpeg  # type: ignore[import-untyped]

    # PyAV decodes only as far as somebody listens; ffmpeg must be told. One second more: some files' clocks start late.
    limit = [] if seconds is None else ["-t", f"{seconds + 1:.3f}"]
    passthrough = ["-map", "0:v:0", "-fps_mode", "passthrough"]
    probe = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", *limit, "-i", str(path), *passthrough]
    probe += ["-vf", "showinfo=checksum=0", "-f", "null", "-"]
    done = subprocess.run(probe, capture_output=True, check=False)
    log = done.stderr.decode(errors="replace")
    number = r"(-?[\d.]+|NOPTS)"
    stamps = re.findall(rf"Parsed_showinfo.*\bpts_time:\s*{number}.*?\bduration_time:\s*{number}.*?\bsar:(\d+)/(\d+)", log)
    if not stamps:
        lines = [line for line in log.splitlines() if line.strip()]
        raise VideoReadError(lines[-1].strip() if lines else f"ffmpeg ended with code {done.returncode}")
    if any(time == "NOPTS" for time, *_ in stamps):
        raise VideoReadError("a frame carries no time stamp")
    if re.search(r"Invalid data found|error while decoding|corrupt decoded frame|Error submitting packet|partial file", log):
        raise VideoReadError("damaged: ffmpeg met invalid data")
    start = float(stamps[0][0])
    frames = imageio_ffmpeg.read_frames(str(path), pix_fmt="rgb24", input_params=limit, output_params=passthrough)
    try:
        width, height = next(frames)["size"]
        for time, duration, sar_width, sar_height in stamps:
            image = np.frombuffer(next(frames), dtype=np.uint8).reshape(height, width, 3)
            aspect = int(sar_width) / int(sar_height) if int(sar_width) and int(sar_height) else 1.0
            yield Frame(float(time) - start, 0.0 if duration == "NOPTS" else float(duration), image, aspect)
    except (OSError, RuntimeError, StopIteration) as error:
        raise VideoReadError(f"ffmpeg: {error}") from error
    finally:
        frames.close()


def _check_complete(any_frame: bool, end: float, promised: float) -> None:
    """A file cut off in the middle often decodes without a complaint up to the cut; the container's own duration gives it away."""
    if not any_frame:
        raise VideoReadError("no frame could be decoded")
    if promised - end > max(0.5, 0.1 * promised):
        raise VideoReadError(f"truncated: {end:.2f} s of {promised:.2f} s can be decoded")


def read_video(path: str | Path, engine: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The whole video: frames uint8 (F, H, W, 3) and their times in seconds from the first frame, float64 (F,).

    Raises:
        VideoReadError: the file can't be decoded, or its frames change size.
    """
    times, frames = [], []
    for frame in iterate_frames(path, engine):
        times.append(frame.time)
        frames.append(frame.image)
    if len({image.shape for image in frames}) > 1:
        raise VideoReadError("the frames change size")
    return np.stack(frames), np.array(times)


def write_video(path: str | Path, frames: np.ndarray, fps: float, engine: str | None = None) -> None:
    """`frames` (F, H, W, 3) uint8 as an h264 mp4 in yuv420p that every browser plays; atomic, the size is never changed.

    Raises:
        UserError: frames of another shape or dtype, an odd height or width (yuv420p halves both, so they must be even), or no engine.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise UserError(f"frames are {frames.dtype} {tuple(frames.shape)}; legal: uint8 (frames, height, width, 3), none of them 0")
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise UserError(f"an mp4 in yuv420p can't hold {height}x{width} (height x width); legal: even numbers")
    if not (math.isfinite(fps) and fps > 0):
        raise UserError(f"fps={fps!r} is not legal; legal: above 0")
    engine = engine or find_engine()
    rate = Fraction(fps).limit_denominator(1001)  # 30000/1001 and its kin come out exact
    with atomic_path(path) as aside:
        if engine == "pyav":
            _pyav_write(aside, frames, rate)
        else:
            _ffmpeg_write(aside, frames, rate)


def _pyav_write(path: Path, frames: np.ndarray, rate: Fraction) -> None:
    import av

    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(CRF), "x264-params": X264_PARAMS})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def _ffmpeg_write(path: Path, frames: np.ndarray, rate: Fraction) -> None:
    import imageio_ffmpeg

    height, width = frames.shape[1:3]
    writer = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=float(rate),
        codec="libx264",
        pix_fmt_out="yuv420p",
        quality=None,
        macro_block_size=1,  # its default of 16 would resize the video
        output_params=["-crf", str(CRF), "-x264-params", X264_PARAMS, "-movflags", "+faststart"],
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
