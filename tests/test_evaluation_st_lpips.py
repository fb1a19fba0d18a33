"""ST-LPIPS against numbers that its authors' own program gave, and what happens where its weights are not."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.videos import random_st_lpips

from videoqat.errors import CheckpointError, ConfigError, DataError
from videoqat.evaluation import evidence_table, st_lpips
from videoqat.evaluation.fidelity import fidelity, summarise
from videoqat.evaluation.st_lpips import SHAPES, StLpips, load

NEEDS_WEIGHTS = pytest.mark.skipif(st_lpips.installed() is None, reason=f"needs the weights of ST-LPIPS: {st_lpips.HOW}")


def waves(height: int, width: int) -> np.ndarray:
    """Ramps up and down, in another phase for each colour."""
    y, x, c = np.mgrid[:height, :width, :3]
    return np.abs((7 * x + 4 * y + 60 * c) % 510 - 255).astype(np.uint8)


def chirp(height: int, width: int) -> np.ndarray:
    """Stripes that get narrower until nothing but noise is left."""
    y, x, c = np.mgrid[:height, :width, :3]
    return ((3 * x * x + 5 * y * y + 7 * x * y * (c + 1)) % 256).astype(np.uint8)


# What version 0.0.2 of stlpips-pytorch says of these pairs in fp32: LPIPS(net="alex", variant="shift_tolerant"), pictures from -1 to 1.
PAIRS = {
    "a pixel to the right": (waves(48, 64), np.roll(waves(48, 64), 1, axis=1), 0.00682922312989831),
    "under noise": (waves(64, 64), waves(64, 64) // 2 + chirp(64, 64) // 2, 0.8166967630386353),
    "half as bright, of odd size": (waves(37, 90), waves(37, 90) // 2, 0.26836276054382324),
    "another picture, as small as can be": (waves(21, 22), chirp(21, 22), 1.031106948852539),
    "red for blue": (waves(40, 40), waves(40, 40)[..., ::-1], 0.4930942952632904),
}


@pytest.fixture(scope="module")
def network() -> StLpips:
    path = st_lpips.installed()
    assert path is not None
    return StLpips(path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights, for what doesn't depend on them."""
    return random_st_lpips(tmp_path_factory.mktemp("weights") / "drawn.pth")


@NEEDS_WEIGHTS
@pytest.mark.parametrize("name", PAIRS)
def test_distances_are_those_of_the_authors_program(network: StLpips, name: str) -> None:
    a_HWC, b_HWC, expected = PAIRS[name]
    assert network.distances(a_HWC[None], b_HWC[None]) == [pytest.approx(expected, rel=1e-5)]
    assert network.distances(b_HWC[None], a_HWC[None]) == [pytest.approx(expected, rel=1e-5)]


@NEEDS_WEIGHTS
def test_the_wheels_file_is_read_and_its_program_is_not(network: StLpips) -> None:
    assert network.sha256 == "b356b382f96010f77d085ee8343ecd9fd322d0a56e8de2b2d0549fafcad8b9ee"
    assert not any(name.startswith(st_lpips.PACKAGE) for name in sys.modules)
    assert load("auto", [(64, 64)])[1] == load("installed", [(64, 64)])[1] == {"sha256": network.sha256}


@NEEDS_WEIGHTS
def test_weights_in_half_precision_will_do(network: StLpips, tmp_path: Path) -> None:
    weights = torch.load(st_lpips.installed(), map_location="cpu", weights_only=True)
    torch.save({name: value.half() for name, value in weights.items()}, tmp_path / "half.pth")
    half = StLpips(tmp_path / "half.pth")
    assert half.sha256 != network.sha256
    for a_HWC, b_HWC, expected in PAIRS.values():
        assert half.distances(a_HWC[None], b_HWC[None]) == [pytest.approx(expected, rel=1e-3)]


@pytest.mark.gpu
@NEEDS_WEIGHTS
def test_a_gpu_gives_the_same_in_fp32(network: StLpips) -> None:
    on_gpu = StLpips(st_lpips.installed(), "cuda")  # TF32 would be wrong in the fourth digit
    for a_HWC, b_HWC, expected in PAIRS.values():
        assert on_gpu.distances(a_HWC[None], b_HWC[None]) == [pytest.approx(expected, rel=2e-5)]


def test_batches_change_nothing_and_equal_frames_are_zero(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, rng = StLpips(drawn), np.random.default_rng(0)
    a_FHWC = rng.integers(0, 256, (5, 24, 32, 3), dtype=np.uint8)
    b_FHWC = rng.integers(0, 256, a_FHWC.shape, dtype=np.uint8)
    b_FHWC[2] = a_FHWC[2]
    whole = network.distances(a_FHWC, b_FHWC)
    assert whole == [pytest.approx(network.distances(a_FHWC[i : i + 1], b_FHWC[i : i + 1])[0]) for i in range(5)]
    assert whole[2] == 0 < min(whole[:2] + whole[3:])
    assert len(set(whole)) == 5
    sizes: list[int] = []
    original = StLpips._distances
    monkeypatch.setattr(StLpips, "_distances", lambda self, a, b: (sizes.append(len(a)), original(self, a, b))[1])
    monkeypatch.setattr(st_lpips, "PIXELS_AT_ONCE", 3 * 24 * 32)
    assert network.distances(a_FHWC, b_FHWC) == pytest.approx(whole)
    assert sizes == [3, 1]
    monkeypatch.setattr(st_lpips, "PIXELS_AT_ONCE", 1)  # a frame is never divided
    assert network.distances(a_FHWC, b_FHWC) == pytest.approx(whole)


def test_fidelity_has_it_where_there_is_a_network(drawn: Path) -> None:
    network = StLpips(drawn)
    a_FHWC = np.stack([waves(24, 32)] * 3)
    b_FHWC = np.stack([waves(24, 32), chirp(24, 32), waves(24, 32) // 2])
    found = fidelity(a_FHWC, b_FHWC, network)
    assert found["st_lpips"] == network.distances(a_FHWC, b_FHWC)
    assert found["st_lpips_mean"] == pytest.approx(sum(found["st_lpips"]) / 3)
    assert found["st_lpips_max"] == max(found["st_lpips"]) > 0
    assert found.items() >= fidelity(a_FHWC, b_FHWC).items()
    same = fidelity(a_FHWC, a_FHWC, network)
    together = summarise([found, same])
    assert (together["st_lpips_mean"], together["st_lpips_max"]) == (found["st_lpips_mean"] / 2, found["st_lpips_max"])
    assert "st_lpips_mean" not in summarise([found, fidelity(a_FHWC, b_FHWC)])  # a mean over some of the videos would be no mean
    json.dumps([found, same, together], allow_nan=False)


def test_without_weights_it_is_absent_and_says_why_or_is_refused(monkeypatch: pytest.MonkeyPatch, drawn: Path) -> None:
    monkeypatch.setattr(st_lpips, "PACKAGE", "no_such_package")
    network, told = load("auto", [(64, 64)])
    assert network is None
    assert "not installed" in told["absent"]
    assert "pip install 'videoqat[metrics]'" in told["absent"]
    with pytest.raises(ConfigError, match=r"st_lpips='installed'.*pip install 'videoqat\[metrics\]'.*st_lpips=PATH"):
        load("installed", [(64, 64)])
    assert load("none", [(64, 64)]) == (None, {"absent": "st_lpips=none"})
    given, told = load(str(drawn), [(64, 64)])
    assert given is not None
    assert told == {"sha256": given.sha256}


def test_small_videos_are_told(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="20x64: it takes 21 pixels or more"):
        load(str(drawn), [(64, 64), (20, 64)])
    monkeypatch.setattr(st_lpips, "installed", lambda: drawn)
    assert load("auto", [(64, 64), (64, 16)]) == (None, {"absent": "64x16 pixels are too few; it takes 21 or more"})
    network, _ = load("auto", [(21, 21)])
    assert network is not None
    for size, right in ((21, True), (20, False)):
        frames = np.stack([waves(size, 40), chirp(size, 40)])
        if right:
            assert min(network.distances(frames[:1], frames[1:])) > 0
        else:
            with pytest.raises(DataError, match="20x40 pixels; legal: at least 21"):
                network.distances(frames[:1], frames[1:])


def test_files_that_hold_something_else(tmp_path: Path, drawn: Path) -> None:
    torn, other, wrong = (tmp_path / name for name in ("torn.pth", "other.pth", "wrong.pth"))
    torn.write_bytes(drawn.read_bytes()[:5000])
    torch.save({"weight": torch.zeros(3)}, other)
    weights = torch.load(drawn, weights_only=True)
    torch.save({**weights, "lin2.model.1.weight": torch.zeros(1, 64, 1, 1)}, wrong)
    for path, words in (
        (torn, "torn.pth holds no weights"),
        (other, "KeyError.*net.slice1.0.weight"),
        (wrong, r"lin2.*\(1, 64, 1, 1\), not \(1, 384, 1, 1\)"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load(str(path), [(64, 64)])
    assert set(weights) == set(SHAPES)


def test_the_evidence_has_a_column_and_says_where_it_is_missing() -> None:
    def summary(name: str, distance: float | None) -> dict:
        measured = {} if distance is None else {"st_lpips_mean": distance}
        video = {"fidelity": {"psnr_mean": 20.0, "ssim_mean": 0.5, **measured}, "flicker": 1.0}
        told = {"absent": "its weights are elsewhere"} if distance is None else {"sha256": "b356"}
        videos = evidence_table._videos([{"videos": [video, video], "judged": None, "st_lpips": told}])
        return {"name": name, **videos, "psnr_above": None, "flicker_above": None}

    some = evidence_table._video_table([summary("NVFP4", 0.0125), summary("MXFP4", None)])
    assert "| NVFP4 | 2 | 20.00 |  | 0.5000 | 0.0125 |" in some
    assert "| MXFP4 | 2 | 20.00 |  | 0.5000 |  |" in some
    assert some.endswith("ST-LPIPS is missing: its weights are elsewhere.")
    none = evidence_table._video_table([summary("MXFP4", None)])
    assert "ST-LPIPS |" not in none
    assert none.endswith("ST-LPIPS is missing: its weights are elsewhere.")
    assert "missing" not in evidence_table._video_table([summary("NVFP4", 0.0125)])
