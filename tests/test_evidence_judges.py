"""The judges of generated garments: what ships is right on real clips, what is told of a folder follows its captions, and intervals are Wilson's."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from videoqat.config import JudgeConfig, TrainJudgesConfig
from videoqat.data.clips import write_video
from videoqat.data.moving_garments import caption_of, draw_clip, draw_views, read_photos
from videoqat.errors import CheckpointError, ConfigError, DataError
from videoqat.evaluation import judges as module
from videoqat.evaluation.judges import ASSET, CAPTIONS, MAKERS, Judges, accuracies, judge, seen_by_judges, train_judges, wilson


def real_clip(index: int, seed: int = 77) -> np.ndarray:
    """Of the embedded photos that are held out from generators. Four of five of the photos the judges that ship were trained on, in other clips."""
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
    assert told["garment"]["right"] >= 34
    assert told["direction"]["right"] >= 39
    assert sum(map(sum, told["confusion"])) == 40
    assert told["real_clips"]["videos"] >= 1000
    assert told["real_clips"]["garment"]["share"] >= 0.85
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


def test_what_ships_was_made_by_the_code_as_it_is() -> None:
    """The command of the card has no setting but its paths, and the networks are those of the code (`load` wants their very weights)."""
    judges = Judges.load()
    program, *words, out, photos = sorted(
        shlex.split(judges.card["provenance"]["command"]), key=lambda word: word.partition("=")[0] in ("out", "photos")
    )
    assert [program, *words] == ["videoqat", "evidence", "train-judges"]
    assert {word.partition("=")[0] for word in (out, photos)} == {"out", "photos"}
    assert judges.card["parameters"] == {kind: sum(p.numel() for p in make().parameters()) for kind, make in MAKERS.items()}
    assert judges.card["seed"] == TrainJudgesConfig(out="a.safetensors").seed


def test_blur_and_noise_change_little() -> None:
    """As a VAE blurs, on pixels of 4x4 halved in size, and with the noise of a model that is not done."""
    judges, rng = Judges.load(), np.random.default_rng(0)
    right = [0, 0]
    for i in range(0, 40, 2):
        frames = torch.from_numpy(real_clip(i)).permute(0, 3, 1, 2).float()
        blurred = torch.nn.functional.interpolate(torch.nn.functional.avg_pool2d(frames, 4), scale_factor=4.0, mode="bilinear")
        noisy = blurred.permute(0, 2, 3, 1).numpy() + rng.normal(0, 10, (17, 128, 128, 3))
        found = judges.judge(noisy.clip(0, 255).astype(np.uint8))
        right = [n + (f == a) for n, f, a in zip(right, found, CAPTIONS[caption_of(i)], strict=True)]
    assert right[0] >= 15
    assert right[1] >= 19


def test_the_garment_is_found_where_it_is() -> None:
    """By the judges that ship, in frames whose garments' places are known, near the borders, too. Cutting one out shows what a window there shows."""
    photos, _ = read_photos("embedded", "held_out")
    garment = Judges.load().networks["garment"]
    assert isinstance(garment, module.GarmentJudge)
    places = module._places(np.random.default_rng(1), 200)
    whole = module.WHOLE.repeat(200, 0)
    frames = draw_views(photos, places, whole, size=64, rng=np.random.default_rng(2))
    with torch.no_grad():
        found = garment.find(torch.nn.functional.avg_pool2d(frames, 2))
    assert (found - torch.from_numpy(places)).abs().mean(0).max() < 0.05  # in halves of a frame; guessing the middle: 0.2
    windows = draw_views(photos, places, places * [1, 1, module.MARGIN], size=module.CUT_SIZE, rng=np.random.default_rng(2))
    cut = module.cut_out(frames, torch.from_numpy(places).float())
    inside = slice(4, -4)  # the border of a frame is beyond none of these
    assert (cut - windows)[..., inside, inside].abs().mean() < 0.03
    assert (cut.roll(1, 0) - windows)[..., inside, inside].abs().mean() > 0.15


def test_views_lie_where_they_are_told() -> None:
    """A white square: its tint's channels add up to 2.325, a canvas's to at most 1.8."""
    square = np.full((2, 28, 28), 255, np.uint8)
    places = np.array([[0.25, -0.25, 0.5], [-0.25, 0.5, 0.25]])
    seen = draw_views(square, places, module.WHOLE.repeat(2, 0), size=64, rng=np.random.default_rng(0)).sum(1) > 2.06
    for mask, (left, top, side) in zip(seen, ((24, 8, 32), (16, 40, 16)), strict=True):
        expected = torch.zeros(64, 64, dtype=torch.bool)
        expected[top : top + side, left : left + side] = True
        assert torch.equal(mask, expected)
    square[:, :, 14:] = 0  # its left half
    middle = np.array([[0.0, 0.0, 0.5]] * 2)
    turns = np.array([np.eye(2), np.diag((-1.0, 1.0))])
    seen = draw_views(square, middle, module.WHOLE.repeat(2, 0), size=64, rng=np.random.default_rng(0), turns=turns).sum(1) > 2.06
    for mask, there, elsewhere in zip(seen, (slice(16, 31), slice(33, 48)), (slice(33, 64), slice(0, 31)), strict=True):
        assert mask[16:48, there].all()
        assert not mask[:, elsewhere].any()


def test_a_video_backwards_goes_the_other_way() -> None:
    judges = Judges.load()
    for index, other in ((0, 1), (10, 0), (20, 3), (30, 2)):
        assert judges.judge(real_clip(index))[1] == index // 10
        assert judges.judge(real_clip(index)[::-1].copy())[1] == other


def test_training_learns_saves_and_tells_how_well(tmp_path: Path) -> None:
    out = tmp_path / "judges.safetensors"
    card = train_judges(TrainJudgesConfig(out=str(out), num_clips=80, num_test_clips=40, size=64, steps=120, batch_size=32))
    assert card["real_clips"]["videos"] == 40
    assert card["real_clips"]["garment"]["right"] >= 16  # chance: 4
    assert card["real_clips"]["direction"]["right"] >= 20  # chance: 10
    loaded = Judges.load(out)
    assert loaded.card == card
    assert json.loads((tmp_path / "judges.json").read_text()) == card
    out.write_bytes(out.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="holds no judges"):
        Judges.load(out)


def test_a_seed_makes_the_same_judges_again() -> None:
    photos, labels = read_photos("embedded", "held_out")
    config = TrainJudgesConfig(out="judges.safetensors", num_clips=4, size=64, steps=40, batch_size=2)
    first, again = ({kind: network.state_dict() for kind, network in module._trained(photos, labels, config).items()} for _ in range(2))
    for kind in MAKERS:
        assert all(torch.equal(first[kind][key], again[kind][key]) for key in first[kind])


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder that generate prompts=FILE wrote"):
        judge(JudgeConfig(videos=str(tmp_path)))
    for other in ([], {"videos": 5}, {"videos": [{"prompt": "a bag moves up"}]}, {"videos": [{"video": "a.mp4"}]}):  # some other program's
        (tmp_path / "manifest.json").write_text(json.dumps(other))
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
    with pytest.raises(ConfigError, match=r"steps=39.*at least 40"):
        replace(config, steps=39).validate()


def test_intervals_and_counts() -> None:
    """Wilson's interval of 8 of 10 and 0 of 10, as any table of them has it."""
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert [wilson(0, 40)[0], wilson(80, 80)[1]] == [0, 1]  # to the last bit: a page would say -0%
    told = accuracies([(1, 2), (3, 0), (4, 1)], [(1, 2), (3, 1), (5, 1)])
    assert (told["garment"]["right"], told["direction"]["right"], told["both"]["right"]) == (2, 2, 1)
    assert CAPTIONS["an ankle boot moves down"] == (9, 3)
    assert len(CAPTIONS) == 40
