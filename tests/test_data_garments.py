"""The embedded set: what its captions say is what its frames show."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from videoqat.config import ExampleClipsConfig
from videoqat.data.moving_garments import SUBSET, caption_of, draw_clip, read_photos, write_clips, write_subset
from videoqat.data.video_io import read_video
from videoqat.errors import ConfigError, DataError, UserError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def draw(index: int, seed: int = 0, split: str = "train", size: int = 64) -> np.ndarray:
    return draw_clip(*read_photos("embedded", split), index, num_frames=17, size=size, seed=seed, split=split)


def centroids(frames: np.ndarray) -> np.ndarray:
    """(F, 2): x and y of what is brighter than the darkest that a pixel ever is, which is the dim canvas wherever the garment leaves it."""
    light = frames.astype(np.float64).sum(-1)
    light -= light.min(0)
    light[light < 60] = 0  # compression noise
    y, x = np.mgrid[: light.shape[1], : light.shape[2]]
    return np.stack([(light * axis).sum((1, 2)) / light.sum((1, 2)) for axis in (x, y)], axis=1)


@pytest.mark.parametrize("index", range(40))
def test_garment_moves_as_its_caption_says(index: int) -> None:
    track = centroids(draw(index))
    moved = track[-1] - track[0]
    step = np.array(STEPS[caption_of(index).split()[-1]])
    assert moved @ step > 12  # pixels of 64
    assert abs(moved @ step[::-1]) < 0.35 * (moved @ step)
    assert np.all(np.diff(track @ step)[2:-2] > 0)  # in every frame


def test_ten_garments_and_four_directions_take_turns() -> None:
    captions = Counter(caption_of(index) for index in range(80))
    assert len(captions) == 40
    assert set(captions.values()) == {2}
    assert caption_of(7) == "a sneaker moves left"
    assert caption_of(31) == "trousers move down"


def test_garment_is_of_the_class_that_the_caption_names() -> None:
    """Photos of one class only: every clip must be drawn from its own class's photos, so blanking the others changes nothing."""
    photos, labels = read_photos("embedded", "train")
    for index in (3, 17, 28):
        blanked = np.where((labels == index % 10)[:, None, None], photos, 0)
        kept = draw_clip(blanked, labels, index, num_frames=5, size=64, seed=0, split="train")
        assert np.array_equal(kept, draw_clip(photos, labels, index, num_frames=5, size=64, seed=0, split="train"))


def test_clip_is_a_pure_function_of_seed_split_and_index() -> None:
    assert np.array_equal(draw(5), draw(5))
    others = [draw(5, seed=1), draw(45), draw(5, split="held_out")]
    assert all(np.abs(draw(5).astype(int) - other).mean() > 5 for other in others)


def test_captions_can_be_left_out_and_the_other_clips_stay_the_same(tmp_path: Path) -> None:
    common = {"num_frames": 5, "size": 32}
    without = ["a sneaker moves left", "a t-shirt moves left"]
    write_clips(ExampleClipsConfig(out=str(tmp_path / "some"), num_clips=9, leave_out=without, **common))
    write_clips(ExampleClipsConfig(out=str(tmp_path / "all"), num_clips=11, **common))
    some, every = ([json.loads(line) for line in (tmp_path / name / "metadata.jsonl").read_text().splitlines()] for name in ("some", "all"))
    assert some == [line for line in every if line["caption"] not in without]
    assert len(some) == 9
    for line in some[:2]:
        assert (tmp_path / "some" / line["file"]).read_bytes() == (tmp_path / "all" / line["file"]).read_bytes()


@pytest.mark.parametrize(("without", "words"), [(["a hat moves left"], "a hat moves left"), ([caption_of(i) for i in range(40)], "all 40")])
def test_what_can_not_be_left_out_is_refused(without: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        write_clips(ExampleClipsConfig(out=str(tmp_path / "clips"), leave_out=without))
    assert not (tmp_path / "clips").exists()


def test_several_processes_draw_what_one_draws(tmp_path: Path) -> None:
    common = {"num_clips": 5, "num_frames": 5, "size": 32}
    for workers in (1, 2):
        write_clips(ExampleClipsConfig(out=str(tmp_path / str(workers)), workers=workers, **common))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("1", "2"))
    assert one == two
    assert len(one) == 7
    assert write_clips(ExampleClipsConfig(out=str(tmp_path / "1"), workers=2, **common))["reused"]


def test_photos_of_the_package_are_balanced_and_held_out_ones_are_others() -> None:
    (train, train_labels), (held_out, held_out_labels) = read_photos("embedded", "train"), read_photos("embedded", "held_out")
    assert np.bincount(train_labels).tolist() == [60] * 10
    assert np.bincount(held_out_labels).tolist() == [20] * 10
    assert not {photo.tobytes() for photo in train} & {photo.tobytes() for photo in held_out}
    assert SUBSET.stat().st_size < 700_000
    assert "Copyright © 2017 Zalando SE" in (SUBSET.parent / "NOTICE.fashion-mnist").read_text()


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason=f"needs Debian's dataset-fashion-mnist in {FASHION_MNIST}")
def test_subset_is_made_from_the_full_set_and_the_full_set_can_be_used(tmp_path: Path) -> None:
    write_subset(str(FASHION_MNIST), tmp_path / "subset.npz")
    assert (tmp_path / "subset.npz").read_bytes() == SUBSET.read_bytes()
    photos, labels = read_photos(str(FASHION_MNIST), "train")
    assert photos.shape == (60_000, 28, 28)
    assert np.bincount(labels).tolist() == [6_000] * 10


def test_written_files_hold_the_drawn_frames(tmp_path: Path) -> None:
    result = write_clips(ExampleClipsConfig(out=str(tmp_path / "clips"), num_clips=12))
    assert result["reused"] is False
    rows = [json.loads(line) for line in (tmp_path / "clips/metadata.jsonl").read_text().splitlines()]
    assert [row["caption"] for row in rows] == [caption_of(index) for index in range(12)]
    assert json.loads((tmp_path / "clips/set.json").read_text())["num_photos"] == 600
    for index, row in enumerate(rows):
        frames, times = read_video(tmp_path / "clips" / row["file"])
        drawn = draw(index)
        assert frames.shape == drawn.shape  # 64 x 64, not blown up to what a codec likes
        np.testing.assert_allclose(times, np.arange(17) / 16)
        psnr = 10 * np.log10(255**2 / np.mean((frames.astype(float) - drawn) ** 2))
        assert psnr > 32


def test_same_settings_reuse_the_folder_and_others_refuse_it(tmp_path: Path) -> None:
    config = ExampleClipsConfig(out=str(tmp_path / "clips"), num_clips=2, size=32)
    write_clips(config)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "clips").rglob("*")}
    assert write_clips(config)["reused"] is True
    config.seed = 1
    with pytest.raises(UserError, match="holds something else"):
        write_clips(config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "clips").rglob("*")} == written

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="holds something else"):
        write_clips(ExampleClipsConfig(out=str(foreign), num_clips=2))
    assert [path.name for path in foreign.iterdir()] == ["letter.txt"]

    (tmp_path / "clips/clips/000001.mp4").unlink()  # no longer whole, so no longer taken for the set
    config.seed = 0
    with pytest.raises(UserError, match="holds something else"):
        write_clips(config)


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    assert write_clips(ExampleClipsConfig(out=str(tmp_path / "clips"), num_clips=1, size=32))["num_clips"] == 1


def test_bad_photos_and_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        write_clips(ExampleClipsConfig(out=str(tmp_path / "a"), photos=str(tmp_path)))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"no idx file at all")
    with pytest.raises(DataError, match="can't be read"):
        write_clips(ExampleClipsConfig(out=str(tmp_path / "a"), photos=str(tmp_path)))
    with pytest.raises(ConfigError, match="num_frames=16"):
        write_clips(ExampleClipsConfig(out=str(tmp_path / "a"), num_frames=16))
    assert not (tmp_path / "a").exists()
