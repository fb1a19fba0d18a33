"""The short version of the evidence, on the embedded model: losses fall, and 4-bit training brings the loss under 4 bits below what it was."""

from pathlib import Path

import pytest
from helpers.evidence import in_this_process

from videoqat.config import EvidenceConfig, ExampleClipsConfig, ExampleModelConfig, ModelConfig, PreprocessConfig, load
from videoqat.data.moving_garments import write_clips
from videoqat.data.precompute import preprocess
from videoqat.evaluation.evidence_run import run
from videoqat.evaluation.evidence_table import summarise
from videoqat.models.tiny import build_pipeline


@pytest.mark.slow
def test_losses_fall_and_training_in_four_bits_helps_in_four_bits(tmp_path: Path) -> None:
    base, clips, cache = (str(tmp_path / name) for name in ("base", "clips", "cache"))
    build_pipeline(ExampleModelConfig(out=base, weights="embedded"))
    write_clips(ExampleClipsConfig(out=clips, num_clips=8, num_frames=5, size=64, seed=1))
    preprocess(PreprocessConfig(model=ModelConfig(path=base), source=clips, out=cache, buckets=["5x64x64"], max_text_tokens=16))
    given = [f"base={base}", f"cache={cache}", f"held_out={cache}", f"out={tmp_path / 'short'}"]
    with in_this_process():
        told = run(load(EvidenceConfig, "evidence/short", given))
    assert told["problems"] == []
    rows = {row["name"]: row for row in summarise(told)}
    assert rows["BF16 trained"]["gap"]["mean"] < -0.05  # a size that the model never saw: there is much to learn at once
    assert rows["NVFP4"]["gap"]["mean"] > 0.004
    assert rows["Attn-QAT"]["recovered"]["mean"] > 0.1  # without training none; 0.6 with the weights that ship
