"""Pipeline folders: which family, which sizes, and what is wrong with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.spec import Geometry, family_of, read_recipe
from videoqat.models.wan import FAMILY
from videoqat.recipes import RECIPES, AttentionRecipe

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_pipeline: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pipeline that may be spoiled."""
    return Path(shutil.copytree(tiny_pipeline, tmp_path / "pipeline"))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def load(folder: Path) -> torch.nn.Module:
    return FAMILY.load_transformer(folder, "transformer", dtype=torch.float32)


def test_family_by_class_name(tiny_pipeline: Path) -> None:
    assert family_of(tiny_pipeline) is FAMILY


def test_not_a_pipeline_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"is not a diffusers pipeline's folder: it has no model_index.json"):
            family_of(path)


def test_pipeline_of_no_known_family(folder: Path) -> None:
    edit(folder / "model_index.json", lambda index: index.update(_class_name="HunyuanVideoImageToVideoPipeline"))
    with pytest.raises(
        CheckpointError, match=r"a HunyuanVideoImageToVideoPipeline, which is not supported yet; supported: WanPipeline, .*CogVideoXPipeline"
    ):
        family_of(folder)


@pytest.mark.parametrize(("text", "why"), [("{", "can't be read as JSON"), ("[1]", "must hold a mapping")])
def test_spoiled_model_index(folder: Path, text: str, why: str) -> None:
    (folder / "model_index.json").write_text(text)
    with pytest.raises(CheckpointError, match=why):
        family_of(folder)


@pytest.mark.parametrize("missing", ["transformer/config.json", "vae/config.json"])
def test_missing_configuration(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=f"it has no {missing}"):
        FAMILY.geometry(folder)


def test_configuration_without_a_key(folder: Path) -> None:
    edit(folder / "transformer/config.json", lambda config: config.pop("text_dim"))
    with pytest.raises(CheckpointError, match="transformer or vae lacks 'text_dim'"):
        FAMILY.geometry(folder)


def test_transformer_that_does_not_fit_the_vae(folder: Path) -> None:
    edit(folder / "transformer/config.json", lambda config: config.update(in_channels=36))
    with pytest.raises(CheckpointError, match="in_channels=36, out_channels=16, the VAE's z_dim=16 must be equal"):
        FAMILY.geometry(folder)


def test_two_transformers_without_a_boundary(tiny_pipeline_pair: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_pipeline_pair, tmp_path / "pair"))
    edit(folder / "model_index.json", lambda index: index.update(boundary_ratio=None))
    with pytest.raises(CheckpointError, match="boundary_ratio=None doesn't go with the transformers transformer, transformer_2"):
        FAMILY.components(folder)


def test_scheduler_that_counts_otherwise(folder: Path) -> None:
    edit(folder / "scheduler/scheduler_config.json", lambda config: config.update(num_train_timesteps=100))
    with pytest.raises(CheckpointError, match="num_train_timesteps=100"):
        FAMILY.flow_time_range(folder, "transformer")


def test_geometry_needs_no_weights(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    geometry = FAMILY.geometry(folder)
    assert geometry == Geometry(16, 8, 4, (1, 1, 1), 2, 64, 2, 64, pixel_multiple=16)
    assert geometry.latent_shape(17, 64, 64) == (16, 5, 8, 8)
    assert geometry.num_tokens(17, 64, 64) == 320


WAN_14B = Geometry(16, 8, 4, (1, 2, 2), 40, 128, 40, 4096, pixel_multiple=16)


def test_geometry_of_a_real_model() -> None:
    """81 frames of 480x832 are 32,760 tokens, 720p 75,600."""
    assert WAN_14B.num_tokens(81, 480, 832) == 32_760
    assert WAN_14B.num_tokens(77, 480, 832) == 31_200
    assert WAN_14B.num_tokens(81, 720, 1280) == 75_600
    assert WAN_14B.latent_shape(81, 480, 832) == (16, 21, 60, 104)
    WAN_14B.check_size("sampling", 81, 480, 832)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((18, 64, 64), r"sampling: 18 frames don't fit this model; legal: 4n\+1, such as 17 or 21"),
        ((0, 64, 64), r"0 frames.*such as 1 or 5"),
        ((17, 72, 64), r"height 72 doesn't fit this model; legal: multiples of 16, such as 64 or 80"),
        ((17, 64, 500), r"width 500 .*such as 496 or 512"),
        ((17, 8, 64), r"height 8 .*such as 16 or 32"),
    ],
)
def test_sizes_that_do_not_fit_name_their_neighbours(size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WAN_14B.check_size("sampling", *size)


COGVIDEOX_15 = Geometry(16, 8, 4, (2, 2, 2), 48, 64, 42, 4096, frame_multiple=8, max_size=(768, 1360))


def test_tokens_of_two_latent_frames_are_filled_up() -> None:
    """CogVideoX 1.5: the 21 latent frames of 81 become 22, as its pipeline has them, and its VAE decodes 8n+1 frames only."""
    assert COGVIDEOX_15.latent_shape(81, 768, 1360) == (16, 22, 96, 170)
    assert COGVIDEOX_15.num_tokens(81, 768, 1360) == 11 * 48 * 85
    for frames in (1, 9, 81, 161):
        COGVIDEOX_15.check_size("x", frames, 768, 1360)
    for frames in (0, 5, 13, 85):
        with pytest.raises(ConfigError, match=r"legal: 8n\+1"):
            COGVIDEOX_15.check_size("x", frames, 768, 1360)


@pytest.mark.parametrize(("size", "axis"), [((1360, 768), "height 1360"), ((768, 1376), "width 1376")])
def test_more_than_there_are_positions_for(size: tuple[int, int], axis: str) -> None:
    with pytest.raises(ConfigError, match=f"{axis} is more than this model has positions for; legal: multiples of 16 up to"):
        COGVIDEOX_15.check_size("x", 81, *size)


def test_neighbours_that_are_named_are_legal() -> None:
    for geometry in (WAN_14B, Geometry(48, 16, 4, (1, 2, 2), 24, 128, 30, 4096, pixel_multiple=16)):
        step = 32 if geometry.vae_spatial == 16 else 16
        geometry.check_size("x", 5, step, 3 * step)
        with pytest.raises(ConfigError, match=f"such as {step} or {2 * step}"):
            geometry.check_size("x", 5, step + 8, step)


def test_loads_strictly_what_was_saved(tiny_pipeline: Path) -> None:
    saved = load_file(tiny_pipeline / WEIGHTS)
    state = load(tiny_pipeline).state_dict()
    assert set(state) == set(saved)
    assert all(torch.equal(state[key], saved[key]) for key in saved)


def test_missing_weight_is_named(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["blocks.1.attn1.to_k.weight"]
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"weights lack blocks.1.attn1.to_k.weight \(and 0 more\)"):
        load(folder)


def test_weight_of_another_shape_is_named(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["proj_out.bias"] = torch.zeros(7)
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"proj_out.bias has shape \(7,\) where the configuration says \(16,\)"):
        load(folder)


def test_unknown_weight_is_named(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS) | {"module.proj_out.bias": torch.zeros(16)}
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"hold module\.proj_out\.bias"):
        load(folder)


def test_weight_that_diffusers_ignores_is_ignored(folder: Path) -> None:
    save_file(load_file(folder / WEIGHTS) | {"blocks.0.attn2.norm_added_q.weight": torch.zeros(16)}, folder / WEIGHTS)
    assert not any("norm_added_q" in name for name in load(folder).state_dict())


def test_torn_and_missing_weights(folder: Path) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is torn or no safetensors file"):
        load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load(folder)


def test_pipeline_is_loaded_strictly(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["proj_out.bias"]
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"weights lack proj_out\.bias"):
        FAMILY.load_pipeline(folder, device="cpu", dtype=torch.float32)


def test_recipe_of_a_folder(tmp_path: Path) -> None:
    assert read_recipe(tmp_path) is None
    recipe = AttentionRecipe("mine", keep_layers=(1,), scale_divisors=(6, 4))
    path = tmp_path / "videoqat.json"
    path.write_text(json.dumps({"recipe": recipe.to_dict(), "provenance": {}, "training": {}}))
    assert read_recipe(tmp_path) == recipe
    path.write_text(json.dumps({"recipe": RECIPES["bf16"].to_dict()}))
    assert read_recipe(tmp_path) == RECIPES["bf16"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"provenance": {}}, "holds no recipe"),
        ({"recipe": {"name": "x", "qk": "int2"}}, "qk='int2' is not one of"),
        ({"recipe": {"name": "x", "bits": 4}}, "unknown recipe key 'bits'"),
    ],
)
def test_spoiled_recipe_of_a_folder(tmp_path: Path, content: dict, why: str) -> None:
    (tmp_path / "videoqat.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=why):
        read_recipe(tmp_path)
