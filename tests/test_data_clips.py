"""Finding clips with their captions, and decoding them by time stamps, upright and to size."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.videos import ffmpeg, gradient_frames, numbers_of, write_numbered

from videoqat.data.clips import ClipProblem, crop_resize, decode_clip, decode_to_bucket, find_clips, rank_buckets, reason, resample
from videoqat.data.video_io import ENGINES, Frame, VideoReadError, read_video, write_video
from videoqat.errors import DataError, UserError

FRAMES = gradient_frames(9, 32, 48)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 frames of 32 x 48 at 16 a second."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_video(path, FRAMES, 16)
    return path


# --- finding


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def listing(folder: Path) -> list[tuple[str, str, str | None]]:
    return [(entry.id, entry.caption, entry.problem and reason(entry.problem)) for entry in find_clips(folder)]


def test_jsonl_with_every_key_and_every_problem(tmp_path: Path) -> None:
    make_files(tmp_path, "a.mp4", "sub/b.mkv", "c.mov", "d.webm", "e.avi", "f.mp4", "unnamed.mp4", "zero.mp4", "elsewhere.txt")
    (tmp_path / "zero.mp4").write_bytes(b"")
    lines = [
        '{"file": "a.mp4", "caption": "  one \\n"}',
        '{"file_name": "sub/b.mkv", "text": "two"}',
        "",
        '{"video": "c.mov", "prompt": "drei: ä, 三"}',
        '{"path": "' + str(tmp_path / "d.webm") + '", "caption": "absolute"}',
        '{"file": "e.avi"}',
        '{"file": "f.mp4", "caption": "   "}',
        '{"file": "gone.mp4", "caption": "x"}',
        '{"file": "./a.mp4", "caption": "again"}',
        '{"file": "a.mp4", "caption": ',
        '["a.mp4", "x"]',
        '{"caption": "no file"}',
        '{"file": "zero.mp4", "caption": "x"}',
        '{"file": "sub", "caption": "a folder"}',
        '{"file": "h.mp4", "caption": ["a", "list"]}',
        '{"file": 7, "caption": "number"}',
        '{"file": "i\\ud83d.mp4", "caption": "half of an emoji in the name"}',
        '{"file": "j.mp4", "caption": "half of an emoji: \\ud83d"}',
    ]
    (tmp_path / "metadata.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"file": "a.mp4", "caption": "\xff"}\n')
    assert listing(tmp_path) == [
        ("a.mp4", "one", None),
        ("sub/b.mkv", "two", None),
        ("c.mov", "drei: ä, 三", None),
        (str(tmp_path / "d.webm"), "absolute", None),
        ("e.avi", "", "no caption"),
        ("f.mp4", "", "empty caption"),
        ("gone.mp4", "x", "missing file"),
        ("./a.mp4", "", "duplicate"),
        ("metadata.jsonl line 10", "", "bad metadata line"),
        ("metadata.jsonl line 11", "", "bad metadata line"),
        ("metadata.jsonl line 12", "", "bad metadata line"),
        ("zero.mp4", "x", "empty file"),
        ("sub", "a folder", "missing file"),
        ("h.mp4", "", "bad metadata line"),
        ("metadata.jsonl line 16", "", "bad metadata line"),
        ("metadata.jsonl line 17", "", "bad metadata line"),
        ("j.mp4", "", "bad metadata line"),
        ("metadata.jsonl line 19", "", "bad metadata line"),
        ("unnamed.mp4", "", "no caption"),
    ]
    problems = {entry.id: entry.problem for entry in find_clips(tmp_path)}
    assert problems["./a.mp4"] == "duplicate: metadata.jsonl line 9 names the clip of line 1 again"
    assert "line 10" in str(problems["metadata.jsonl line 10"])


def test_csv(tmp_path: Path) -> None:
    make_files(tmp_path, "a.mp4", "b.mp4", "c.mp4")
    text = '\ufefffile_name,ignored,text\r\na.mp4,1,"one, with a comma"\r\nb.mp4,2,"two\nlines"\r\nc.mp4,3\r\n'
    (tmp_path / "metadata.csv").write_text(text, encoding="utf-8", newline="")
    assert listing(tmp_path)[:2] == [("a.mp4", "one, with a comma", None), ("b.mp4", "two\nlines", None)]
    bad = find_clips(tmp_path)[2]
    assert bad.problem == "bad metadata line: line 5: another number of columns than the first line"


@pytest.mark.parametrize("text", ["clip,caption\na.mp4,x\n", "file,words\na.mp4,x\n", ""])
def test_csv_without_the_columns_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metadata.csv").write_text(text)
    with pytest.raises(DataError, match=r"metadata\.csv has columns .* it needs one of"):
        find_clips(tmp_path)


@pytest.mark.parametrize("rest", [b'b.mp4,"not closed\nc.mp4,x\n', b"b.mp4,\xff\n"])
def test_csv_that_cannot_be_read_is_refused_with_the_line(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "metadata.csv").write_bytes(b"file,caption\na.mp4,x\n" + rest)
    with pytest.raises(DataError, match=r"metadata\.csv can't be read as CSV in UTF-8 after line [12]: "):
        find_clips(tmp_path)


def test_two_metadata_files_are_refused(tmp_path: Path) -> None:
    make_files(tmp_path, "metadata.csv", "metadata.jsonl")
    with pytest.raises(DataError, match="one of them"):
        find_clips(tmp_path)


def test_text_files_beside_the_clips(tmp_path: Path) -> None:
    make_files(tmp_path, "b.MP4", "deep/er/a.ogv", "c.mpeg", "d.mov", "e.mp4", ".hidden.mp4", "._a.mp4", ".cache/x.mp4", "notes.md", "f.mp4")
    for name, words in {"b": "B\n", "deep/er/a": "\ufeffA", "d": " \n"}.items():
        (tmp_path / f"{name}.txt").write_text(words, encoding="utf-8")
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "f.txt").mkdir()
    assert listing(tmp_path) == [
        ("b.MP4", "B", None),
        ("c.mpeg", "", "no caption"),
        ("d.mov", "", "empty caption"),
        ("deep/er/a.ogv", "A", None),
        ("e.mp4", "", "no caption"),
        ("f.mp4", "", "no caption"),
    ]


def test_relative_paths_survive_a_move(tmp_path: Path) -> None:
    make_files(tmp_path, "here/clips/a.mp4")
    (tmp_path / "here/metadata.jsonl").write_text(json.dumps({"file": "clips/a.mp4", "caption": "x"}))
    before = listing(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert listing(tmp_path / "there") == before == [("clips/a.mp4", "x", None)]


# --- resampling


def resampled(times: list[float], durations: list[float], fps: float, limit: int) -> list[int]:
    stamps = enumerate(zip(times, durations, strict=True))
    frames = (Frame(time, duration, np.full((1, 1, 3), number, np.uint8), 1.0) for number, (time, duration) in stamps)
    return [int(frame.image[0, 0, 0]) for frame in resample(frames, fps, limit)]


def test_same_rate_keeps_every_frame_once() -> None:
    assert resampled([i / 16 for i in range(9)], [1 / 16] * 9, 16, 99) == list(range(9))
    assert resampled([round(i / 24, 3) for i in range(40)], [0.042] * 40, 24, 99) == list(range(40))  # Matroska's milliseconds


def test_half_and_double_rate() -> None:
    assert resampled([i / 16 for i in range(9)], [1 / 16] * 9, 8, 99) == [0, 2, 4, 6, 8]
    assert resampled([i / 8 for i in range(3)], [1 / 8] * 3, 16, 99) == [0, 0, 1, 1, 2, 2]


def test_variable_rate_shows_the_latest_frame_whose_time_has_come() -> None:
    times = [0, 0.03, 0.05, 0.40, 0.45, 0.81]
    #        0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9
    assert resampled(times, [0] * 6, 10, 99) == [0, 2, 2, 2, 3, 4, 4, 4, 4, 5, 5, 5]  # the last lasts 0.36 s, as the one before
    assert resampled(times, [0] * 5 + [0.05], 10, 99) == [0, 2, 2, 2, 3, 4, 4, 4, 4]
    assert resampled(times, [0] * 6, 10, 5) == [0, 2, 2, 2, 3]


def test_a_still_is_one_frame_and_nothing_is_none() -> None:
    assert resampled([0], [0], 16, 9) == [0]
    assert resampled([], [], 16, 9) == []


def test_decoding_stops_when_it_has_enough() -> None:
    def endless():
        number = 0
        while True:
            assert number < 7
            yield Frame(number / 16, 1 / 16, np.zeros((1, 1, 3), np.uint8), 1.0)
            number += 1

    assert len(list(resample(endless(), 16, 5))) == 5


IRREGULAR = [0.0, 0.02, 0.05, 0.3, 0.31, 0.36, 0.5, 0.9, 0.91, 0.92, 1.3, 1.34, 1.5]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["vfr.mp4", "vfr.mkv"])
def test_variable_frame_rate_file(tmp_path: Path, engine: str, name: str) -> None:
    """Every frame carries its number, so what was picked can be read from the pixels."""
    write_numbered(tmp_path / name, IRREGULAR)
    frames, times = read_video(tmp_path / name, engine)
    assert numbers_of(frames) == list(range(len(IRREGULAR)))
    np.testing.assert_allclose(times, IRREGULAR, atol=1e-3)
    for fps, count in ((16, 21), (25, 33), (4, 5)):
        expected = [max(i for i, time in enumerate(IRREGULAR) if time <= n / fps + 5e-4) for n in range(count)]
        assert numbers_of(decode_clip(tmp_path / name, count, fps, 48, 64, engine)) == expected


# --- geometry


def test_crop_takes_the_middle_and_resize_keeps_the_axes() -> None:
    frame = gradient_frames(1, 60, 100)[0]
    square = crop_resize(frame, 30, 30)
    expected = frame[:, 20:80].reshape(30, 2, 30, 2, 3).mean((1, 3))
    assert square.shape == (30, 30, 3)
    assert np.abs(square[2:-2, 2:-2] - expected[2:-2, 2:-2]).max() < 2
    tall = crop_resize(frame, 60, 30)
    assert np.array_equal(tall, frame[:, 35:65])
    assert crop_resize(frame, 16, 64).shape == (16, 64, 3)
    assert crop_resize(frame, 128, 256).shape == (128, 256, 3)
    assert crop_resize(frame[:1, :7], 32, 32).shape == (32, 32, 3)


def test_resize_does_not_alias() -> None:
    """Noise is averaged away: 16 pixels become one, so its deviation falls to about a quarter. Picking pixels would leave it as it is."""
    noise = np.random.default_rng(0).normal(128, 30, (64, 64, 3)).astype(np.uint8)
    assert crop_resize(noise, 16, 16).std() < 12


def test_bucket_is_the_nearest_in_shape_then_the_longest_then_the_largest_that_does_not_enlarge() -> None:
    buckets = [(17, 480, 832), (81, 480, 832), (17, 832, 480), (17, 480, 480), (17, 240, 416)]
    assert rank_buckets(buckets, 1080, 1920) == [(81, 480, 832), (17, 480, 832), (17, 240, 416)]
    assert rank_buckets(buckets, 300, 500) == [(81, 480, 832), (17, 240, 416), (17, 480, 832)]
    assert rank_buckets(buckets, 1920, 1080) == [(17, 832, 480)]
    assert rank_buckets(buckets, 100, 110) == [(17, 480, 480)]


def test_a_clip_takes_the_longest_bucket_that_it_fills(clip: Path) -> None:
    bucket, frames = decode_to_bucket(clip, [(13, 32, 48), (5, 32, 48), (9, 64, 96), (9, 96, 32)], 16)
    assert bucket == (9, 64, 96)
    assert frames.shape == (9, 64, 96, 3)
    with pytest.raises(ClipProblem, match=r"too short: 9 frames at 16 fps \(0\.56 s\), needs 13 \(0\.81 s\)"):
        decode_to_bucket(clip, [(13, 32, 48), (17, 64, 96), (5, 96, 32)], 16)


@pytest.mark.parametrize("engine", ENGINES)
def test_decoded_frames_are_the_written_ones(clip: Path, engine: str) -> None:
    assert np.abs(decode_clip(clip, 9, 16, 32, 48, engine).astype(int) - FRAMES).mean() < 3
    frames, times = read_video(clip, engine)
    assert np.abs(frames.astype(int) - FRAMES).mean() < 3
    np.testing.assert_allclose(times, np.arange(9) / 16, atol=1e-4)
    assert np.abs(decode_clip(clip, 5, 8, 32, 48, engine).astype(int) - FRAMES[::2]).mean() < 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_of_phone_clips_is_honoured(clip: Path, tmp_path: Path, engine: str, degrees: int) -> None:
    ffmpeg("-display_rotation", str(degrees), "-i", str(clip), "-c", "copy", str(tmp_path / "turned.mp4"))
    upright = np.rot90(FRAMES, degrees // 90, axes=(1, 2))  # ffmpeg's option counts counter-clockwise, as numpy does
    frames, _ = read_video(tmp_path / "turned.mp4", engine)
    assert frames.shape == upright.shape
    assert np.abs(frames.astype(int) - upright).mean() < 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("degrees", [0, 90])
def test_pixels_that_are_not_square_are_made_square(clip: Path, tmp_path: Path, engine: str, degrees: int) -> None:
    """32 x 48 pixels, each twice as wide as high, are shown as 32 x 96; turned, as 96 x 32."""
    wide, path = tmp_path / "wide.mp4", tmp_path / "anamorphic.mp4"
    ffmpeg("-i", str(clip), "-c", "copy", "-bsf:v", "h264_metadata=sample_aspect_ratio=2/1", str(wide))
    ffmpeg("-display_rotation", str(degrees), "-i", str(wide), "-c", "copy", str(path))
    size = (32, 96) if degrees == 0 else (96, 32)
    bucket, frames = decode_to_bucket(path, [(9, 48, 48), (9, *size), (9, *size[::-1])], 16, engine)
    assert bucket == (9, *size)
    shown = np.rot90(np.repeat(FRAMES, 2, axis=2), degrees // 90, axes=(1, 2))
    assert np.abs(frames.astype(int) - shown).mean() < 3
    square = crop_resize(FRAMES[0], 32, 32, pixel_aspect=2)  # the middle third of the width
    assert np.abs(square.astype(int) - np.repeat(FRAMES[0][:, 16:32], 2, axis=1)).max() < 6


# --- containers and damage


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.mov", "libx264"), ("a.mkv", "libx264"), ("a.avi", "mpeg4"), ("a.webm", "libvpx"), ("a.mpeg", "mpeg2video"), ("a.ogv", "libtheora")],
)
def test_containers(tmp_path: Path, engine: str, name: str, codec: str) -> None:
    source = gradient_frames(24, 48, 64)
    write_video(tmp_path / "source.mp4", source, 24)
    ffmpeg("-i", str(tmp_path / "source.mp4"), "-c:v", codec, "-b:v", "2M", str(tmp_path / name))
    frames = decode_clip(tmp_path / name, 9, 12, 48, 64, engine)
    assert np.abs(frames.astype(int) - source[:18:2]).mean() < 6


def damaged(kind: str, clip: Path, path: Path) -> None:
    whole = clip.read_bytes()
    if kind == "text":
        path.write_text("I am a letter, not a video.\n" * 50)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "index lost":  # mp4 with its index at the end, cut off
        ffmpeg("-i", str(clip), "-c", "copy", "-movflags", "-faststart", str(path))
        path.write_bytes(path.read_bytes()[:-400])
    elif kind == "truncated":  # the index is whole, the pictures are not
        path.write_bytes(whole[: len(whole) * 6 // 10])
    elif kind == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(5000))
    elif kind == "header only":
        path.write_bytes(whole[:40])
    elif kind == "sound only":
        ffmpeg("-f", "lavfi", "-i", "sine=duration=1", str(path))


KINDS = ["text", "empty", "index lost", "truncated", "noise", "header only", "sound only"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_problems_and_not_crashes(clip: Path, tmp_path: Path, engine: str, kind: str) -> None:
    path = tmp_path / "broken.mp4"
    damaged(kind, clip, path)
    with pytest.raises(ClipProblem, match=r"^cannot decode: .+"):
        decode_clip(path, 9, 16, 32, 48, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_flipped_bytes_never_crash(clip: Path, tmp_path: Path, engine: str) -> None:
    rng = np.random.default_rng(1)
    for i in range(12):
        broken = bytearray(clip.read_bytes())
        for place in rng.integers(0, len(broken), 30):
            broken[place] = int(rng.integers(256))
        path = tmp_path / f"{i}.mp4"
        path.write_bytes(broken)
        with contextlib.suppress(ClipProblem):  # and no other exception
            assert decode_clip(path, 9, 16, 32, 48, engine).shape == (9, 32, 48, 3)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VideoReadError, match=r"no such file .*gone\.mp4"):
        read_video(tmp_path / "gone.mp4")


# --- writing


@pytest.mark.parametrize("engine", ENGINES)
def test_written_file_is_h264_yuv420p_of_the_same_size(tmp_path: Path, engine: str) -> None:
    import av

    source = gradient_frames(5, 50, 34)  # no multiples of 16
    write_video(tmp_path / "a.mp4", source, 30000 / 1001, engine)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt, stream.height, stream.width) == ("h264", "yuv420p", 50, 34)
        assert float(stream.average_rate) == pytest.approx(30000 / 1001, rel=1e-4)
    frames, _ = read_video(tmp_path / "a.mp4")
    assert np.abs(frames.astype(int) - source).mean() < 3
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_frames_that_cannot_be_written_are_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"mine")
    for frames, words in (
        (np.zeros((2, 33, 32, 3), np.uint8), "33x32.*even"),
        (np.zeros((2, 32, 31, 3), np.uint8), "32x31.*even"),
        (np.zeros((2, 32, 32, 3), np.float32), "uint8"),
        (np.zeros((2, 3, 32, 32), np.uint8), "uint8"),
        (np.zeros((0, 32, 32, 3), np.uint8), "uint8"),
    ):
        with pytest.raises(UserError, match=words):
            write_video(path, frames, 16)
    with pytest.raises(UserError, match="fps=0"):
        write_video(path, np.zeros((2, 32, 32, 3), np.uint8), 0)
    assert path.read_bytes() == b"mine"
