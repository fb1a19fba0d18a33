"""The embedded checkpoint: whole, as its card says, a pipeline like any other; and its videos show what was asked for, in BF16 and in 4 bits."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from videoqat.commands import execute
from videoqat.config import ExampleModelConfig, RuntimeConfig, SamplingConfig
from videoqat.errors import CheckpointError, ConfigError
from videoqat.evaluation.judges import CAPTIONS, Judges
from videoqat.generation.engine import Engine, text_tokens
from videoqat.models import embedded, tiny_vae
from videoqat.models.spec import family_of, read_recipe
from videoqat.models.tiny import build_pipeline

SAMPLING = SamplingConfig(num_frames=17, height=128, width=128, num_inference_steps=3, guidance_scale=3.0)


@pytest.fixture(scope="module")
def garments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, unpacked."""
    folder = tmp_path_factory.mktemp("embedded") / "garments"
    execute("example-model", None, ["weights=embedded", f"out={folder}"], show_config=False)
    return folder


def test_its_videos_go_where_their_captions_say(garments: Path) -> None:
    """Three steps are few, but chance would be right in one of 64 times."""
    engine, judges = Engine(garments, RuntimeConfig(device="cpu")), Judges.load()
    for caption, recipe in (("a dress moves right", "bf16"), ("a dress moves right", "attn_qat_search"), ("a bag moves up", "bf16")):
        video = engine.generate(caption, 0, SAMPLING, recipe)
        assert judges.judge(video.frames)[1] == CAPTIONS[caption][1], (caption, recipe)


def test_it_is_a_pipeline_like_any_other_and_says_what_it_is(garments: Path) -> None:
    recipe = read_recipe(garments)
    assert recipe is not None
    assert recipe.name == "bf16"
    assert text_tokens(garments, SAMPLING) == 32  # as in its training
    card, record = embedded.known(), json.loads((garments / "videoqat.json").read_text())
    assert record["origin"]["sha256"] == card["sha256"]
    assert record["training"]["steps"] == card["training"]["steps"]
    geometry = family_of(garments).geometry(garments)
    assert {key: getattr(geometry, key) for key in embedded.SIZES} == card["sizes"]
    weights = load_file(garments / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == card["weights"]
    for name, tensor in load_file(embedded.ASSET).items():
        part, _, key = name.partition(".")
        if part == "transformer":
            assert torch.equal(weights[key], tensor), name


def test_the_card_is_of_this_file() -> None:
    card, content = embedded.known(), embedded.ASSET.read_bytes()
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (card["sha256"], card["bytes"])
    assert embedded.ASSET.with_suffix(".md").read_text() == embedded.describe(card)
    assert sum(path.stat().st_size for path in embedded.ASSETS.glob("garments.*")) < embedded.MOST_BYTES
    assert "/tmp" not in json.dumps(card), "nobody needs to know where it was trained"
    reached = card["judged"]["garment"]["share"] >= 0.7 and card["judged"]["direction"]["share"] >= 0.9
    assert ("is not reached" not in embedded.describe(card)) is reached


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["num_layers=4"], "num_layers=4 is not legal; legal: 6 with weights=embedded"),
        (["head_dim=32"], "head_dim=32 is not legal; legal: 64 with weights=embedded"),
        (["family=cogvideox"], "family='cogvideox' is not legal; legal: wan with weights=embedded"),
        (["two_transformers=true"], "two_transformers=True is not legal; legal: false with weights=embedded"),
        (["seed=1"], "seed=1 is not legal; legal: 0 with weights=embedded"),
    ],
)
def test_sizes_that_it_does_not_have(settings: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        execute("example-model", None, ["weights=embedded", f"out={tmp_path / 'x'}", *settings], dry_run=True, show_config=False)


def test_sizes_by_default_or_its_own(tmp_path: Path) -> None:
    for settings in ([], ["num_layers=6"]):
        planned = execute("example-model", None, ["weights=embedded", f"out={tmp_path / 'x'}", *settings], dry_run=True, show_config=False)
        assert {key: planned[key] for key in embedded.SIZES} == {"num_layers": 6, "num_heads": 4, "head_dim": 64}
    planned = execute("example-model", None, [f"out={tmp_path / 'x'}"], dry_run=True, show_config=False)
    assert {key: planned[key] for key in embedded.SIZES} == {"num_layers": 4, "num_heads": 2, "head_dim": 64}
    assert list(tmp_path.iterdir()) == []


def refused(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_pipeline(ExampleModelConfig(out=str(tmp_path / "x"), weights="embedded"))
    assert not (tmp_path / "x").exists()
    return str(caught.value)


def test_a_torn_file_another_vae_and_other_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = embedded.known()
    for key, other, says in (
        ("sha256", "0" * 64, "torn, or not the one that ships"),
        ("vae_sha256", "0" * 64, "is not the VAE"),
        ("token_ids", [1, 2, 3], "captions have other tokens"),
    ):
        monkeypatch.setattr(embedded, "known", lambda key=key, other=other: card | {key: other})
        assert says in refused(tmp_path)


def test_another_checkpoint_takes_its_place_by_one_command(garments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that it was unpacked to: the same file, byte for byte, and its card from the new training's records."""
    log = [{"loss": 2.0, "step_time": 0.5}, {"loss": 0.3, "step_time": 0.1}, {"loss": 0.1, "step_time": 0.1}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    session = {
        "device": "a GPU",
        "layout": "2 = 2 * 1 * 1",
        "date": "2026-12-01T00:00:00+00:00",
        "versions": embedded.known()["training"]["versions"],
    }
    (tmp_path / "provenance.json").write_text(json.dumps({"sessions": [session]}))
    (tmp_path / "set.json").write_text(json.dumps({**embedded.known()["clips"], "photos": "/somewhere"}))
    judged = embedded.known()["judged"] | {"garment": {"right": 39, "share": 0.975, "interval": [0.87, 0.99]}, "confusion": []}
    (tmp_path / "judged.json").write_text(json.dumps(judged))
    (tmp_path / "assets").mkdir()
    card = embedded.embed(garments, tmp_path, tmp_path, tmp_path / "judged.json", tmp_path / "assets", note="Its average was mended.")
    assert (tmp_path / "assets" / "garments.safetensors").read_bytes() == embedded.ASSET.read_bytes()
    assert {key: card[key] for key in ("sha256", "sizes", "token_ids", "vae_sha256", "clips")} == {
        key: embedded.known()[key] for key in ("sha256", "sizes", "token_ids", "vae_sha256", "clips")
    }
    assert json.loads((tmp_path / "assets" / "garments.json").read_text()) == card
    assert (card["training"]["loss_first"], card["training"]["loss_last"], card["training"]["step_seconds"]) == (2.0, pytest.approx(0.8), 0.1)
    text = (tmp_path / "assets" / "garments.md").read_text()
    assert "98 % (87 to 99)" in text
    assert "| after training | Its average was mended. |" in text
    assert tiny_vae.ASSET.name.removesuffix(".safetensors") in text

    monkeypatch.setattr(embedded, "MOST_BYTES", 1000)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"bytes; legal: at most 1,000"):
        embedded.embed(garments, tmp_path, tmp_path, tmp_path / "judged.json", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
