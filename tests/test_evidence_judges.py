"""The judges of generated garments: what ships is right on real clips, what is told of a folder follows its captions, and intervals are Wilson's."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from videoqat.config import JudgeConfig, TrainJudgesConfig
from videoqat.data.clips import write_video
from videoqat.data.moving_garments import caption_of, draw_clip, read_photos
from videoqat.errors import CheckpointError, ConfigError, DataError
from videoqat.evaluation.judges import ASSET, CAPTIONS, Judges, accuracies, judge, seen_by_judges, train_judges, wilson


def real_clip(index: int, seed: int = 77) -> np.ndarray:
    """Of the embedded photos that are held out from generators. Half of the photos the judges that ship were trained on, in other clips."""
    return draw_clip(*read_photos("embedded", "held_out"), index, num_frames=17, size=128, seed=seed, split="held_out")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty real clips, as if generated: each caption once."""
    out = tmp_path_factory.mktemp("videos")
    videos = []
    for i in range(40):
        write_video(out / f"{i}.mp4", real_clip(i), 16)
        videos.append({"video": f"{i}.mp4", "prompt": caption_of(i)})
    (out / "manifest.json").write_text(json.dumps({"videos": videos}))
    return out


def relabelled(folder: Path, shift: int, tmp_path: Path) -> str:
    """The same videos under captions that are `shift` further."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for i, video in enumerate(manifest["videos"]):
        video |= {"prompt": caption_of(i + shift), "video": str(folder / video["video"])}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return str(tmp_path)


def test_what_ships_is_right_on_real_clips(folder: Path) -> None:
    """A network that has learned nothing is right on 10 % and 25 %."""
    told = judge(JudgeConfig(videos=str(folder)))
    assert told["videos"] == 40
    assert told["garment"]["right"] >= 30
    assert told["direction"]["right"] >= 39
    assert sum(map(sum, told["confusion"])) == 40
    assert told["real_clips"]["garment"]["share"] >= 0.8
    assert told["real_clips"]["direction"]["share"] >= 0.99
    assert ASSET.stat().st_size < 1_000_000
    assert Judges.load().card == json.loads(ASSET.with_suffix(".json").read_text())  # what people read is what the weights carry


def test_other_captions_are_not_what_is_seen(folder: Path, tmp_path: Path) -> None:
    """Another garment in the same direction, and the same garment in another direction: each judge minds its own business."""
    other_garment = judge(JudgeConfig(videos=relabelled(folder, 1, tmp_path)))
    assert other_garment["garment"]["right"] < 10
    assert other_garment["direction"]["right"] > 25  # of 40: every tenth caption changes its direction, too
    other_direction = judge(JudgeConfig(videos=relabelled(folder, 10, tmp_path)))
    assert other_direction["direction"]["right"] <= 1
    assert other_direction["garment"]["right"] >= 30


def test_a_video_backwards_goes_the_other_way() -> None:
    judges = Judges.load()
    for index, other in ((0, 1), (10, 0), (20, 3), (30, 2)):
        assert judges.judge(real_clip(index))[1] == index // 10
        assert judges.judge(real_clip(index)[::-1].copy())[1] == other


def test_training_learns_saves_and_tells_how_well(tmp_path: Path) -> None:
    out = tmp_path / "judges.safetensors"
    card = train_judges(TrainJudgesConfig(out=str(out), num_clips=80, num_test_clips=40, size=64, steps=40, batch_size=16))
    assert card["real_clips"]["videos"] == 40
    assert card["real_clips"]["direction"]["right"] >= 24  # chance: 10
    loaded = Judges.load(out)
    assert loaded.card == card
    assert json.loads((tmp_path / "judges.json").read_text()) == card
    out.write_bytes(out.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="holds no judges"):
        Judges.load(out)


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder that generate prompts=FILE wrote"):
        judge(JudgeConfig(videos=str(tmp_path)))
    (tmp_path / "manifest.json").write_text(json.dumps({"videos": [{"video": "a.mp4", "prompt": "a hat moves left"}]}))
    with pytest.raises(DataError, match="no judge knows 'a hat moves left'"):
        judge(JudgeConfig(videos=str(tmp_path)))
    with pytest.raises(DataError, match="videos of 17 frames"):
        seen_by_judges(np.zeros((5, 64, 64, 3), np.uint8))
    config = TrainJudgesConfig(out=str(tmp_path / "judges.bin"))
    with pytest.raises(ConfigError, match=r"judges.bin.*ends in .safetensors"):
        train_judges(config)
    with pytest.raises(ConfigError, match="lr=0"):
        replace(config, lr=0).validate()


def test_intervals_and_counts() -> None:
    """Wilson's interval of 8 of 10 and 0 of 10, as any table of them has it."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    told = accuracies([(1, 2), (3, 0), (4, 1)], [(1, 2), (3, 1), (5, 1)])
    assert (told["garment"]["right"], told["direction"]["right"], told["both"]["right"]) == (2, 2, 1)
    assert CAPTIONS["an ankle boot moves down"] == (9, 3)
    assert len(CAPTIONS) == 40
