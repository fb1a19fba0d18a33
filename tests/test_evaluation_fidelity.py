"""PSNR, SSIM and flicker against numbers worked out by hand."""

import json
import math

import numpy as np
import pytest

from videoqat.errors import ConfigError, DataError
from videoqat.evaluation.fidelity import LUMA, fidelity, flicker, summarise


def video(*levels: int, size: int = 16) -> np.ndarray:
    """Grey frames, one for each level."""
    return np.stack([np.full((size, size, 3), level, np.uint8) for level in levels])


def test_psnr_by_hand():
    found = fidelity(video(100, 100, 100), video(100, 105, 110))
    # 20 log10(255 / error)
    assert found["psnr"] == [None, pytest.approx(20 * math.log10(255 / 5)), pytest.approx(20 * math.log10(255 / 10))]
    assert found["psnr_min"] == pytest.approx(28.1308, abs=1e-4)
    assert found["psnr_mean"] == pytest.approx((34.1514 + 28.1308) / 2, abs=1e-4)
    assert (found["identical"], found["identical_frames"]) == (False, 1)


def test_ssim_of_flat_frames_by_hand():
    # No variance: only the luminance term (2 a b + c1) / (a^2 + b^2 + c1) is left, c1 = (0.01 * 255)^2.
    a, b, c1 = 60.0, 120.0, (0.01 * 255) ** 2
    found = fidelity(video(60, 60), video(120, 60))
    assert found["ssim"] == [pytest.approx((2 * a * b + c1) / (a * a + b * b + c1), abs=1e-6), 1.0]
    assert found["ssim_min"] == found["ssim"][0]
    assert found["ssim_mean"] == pytest.approx((found["ssim"][0] + 1) / 2)


def ssim_by_definition(a_HW: np.ndarray, b_HW: np.ndarray) -> float:
    """Wang et al. 2004: Gaussian window of sd 1.5 over 11x11 pixels, means over the pixels whose window lies inside."""
    offsets = np.arange(-5, 6)
    line = np.exp(-(offsets**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for y in range(5, a_HW.shape[0] - 5):
        for x in range(5, a_HW.shape[1] - 5):
            a, b = (frame[y - 5 : y + 6, x - 5 : x + 6] for frame in (a_HW, b_HW))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a, var_b = (window * a * a).sum() - mean_a**2, (window * b * b).sum() - mean_b**2
            cov = (window * a * b).sum() - mean_a * mean_b
            values.append((2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    return float(np.mean(values))


def test_ssim_by_definition():
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (1, 16, 20, 3), dtype=np.uint8)
    b = np.clip(a + rng.normal(0, 30, a.shape), 0, 255).astype(np.uint8)
    expected = np.mean([ssim_by_definition(a[0, ..., c].astype(float), b[0, ..., c].astype(float)) for c in range(3)])
    assert fidelity(a, b)["ssim_mean"] == pytest.approx(expected, abs=1e-5)


def test_identical_videos_are_json():
    found = fidelity(video(1, 2, 3), video(1, 2, 3))
    assert (found["identical"], found["psnr_mean"], found["psnr_min"], found["ssim_mean"]) == (True, None, None, 1.0)
    json.dumps(found, allow_nan=False)
    json.dumps(summarise([found, found]), allow_nan=False)


def test_many_videos():
    same, near, far = (fidelity(video(100), video(level)) for level in (100, 105, 110))
    found = summarise([same, near, far])
    assert (found["videos"], found["identical_videos"]) == (3, 1)
    assert found["psnr_mean"] == pytest.approx((near["psnr_mean"] + far["psnr_mean"]) / 2)
    assert found["psnr_min"] == far["psnr_min"]
    assert found["ssim_mean"] == pytest.approx((1 + near["ssim_mean"] + far["ssim_mean"]) / 3)


def test_flicker_by_hand():
    assert flicker(video(7, 7, 7, 7)) == 0
    assert flicker(video(0, 40, 80, 120)) == pytest.approx(0, abs=1e-9)  # a steady fade
    assert flicker(video(0, 40, 0)) == pytest.approx(80)
    assert flicker(video(0, 40, 0, 0)) == pytest.approx((80 + 40) / 2)
    assert flicker(video(0, 40)) is None
    green = video(0, 0, 0)
    green[1, ..., 1] = 100
    assert flicker(green) == pytest.approx(2 * 100 * LUMA[1])
    half = video(0, 0, 0)
    half[1, :, :8] = 40
    assert flicker(half) == pytest.approx(40)  # along time, not along space


@pytest.mark.parametrize(
    ("a", "b"), [(video(1, 2), video(1)), (video(1), video(1, size=32)), (video(1), video(1).astype(float)), (video(1)[0], video(1)[0])]
)
def test_what_is_no_pair_of_videos_is_refused(a, b):
    with pytest.raises(DataError, match="legal"):
        fidelity(a, b)


def test_videos_smaller_than_the_window_of_ssim_are_refused():
    assert fidelity(video(1, size=11), video(2, size=11))["ssim_min"] < 1
    with pytest.raises(ConfigError, match="height x width='10x10' is not legal; legal: 11 or more of each"):
        fidelity(video(1, size=10), video(2, size=10))
