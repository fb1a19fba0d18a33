"""First frames through the commands: what is cached, from there to an exported model's video, batches with pictures, comparisons; what is refused."""

import csv
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pipelines import enliven
from PIL import Image

from videoqat.config import (
    CompareConfig,
    CompareEntry,
    ExampleClipsConfig,
    ExampleModelConfig,
    ExportConfig,
    GenerateConfig,
    GenerationRuntimeConfig,
    LoopConfig,
    ModelConfig,
    PreprocessConfig,
    RuntimeConfig,
    SamplingConfig,
    TrainConfig,
    ValidationConfig,
)
from videoqat.data.dataset import CachedVideos
from videoqat.data.moving_garments import write_clips
from videoqat.data.precompute import plan as plan_preprocess
from videoqat.data.precompute import preprocess
from videoqat.errors import ConfigError, DataError, UserError
from videoqat.evaluation.compare import compare
from videoqat.evaluation.compare import plan as plan_compare
from videoqat.generation.batch import generate, plan
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.training.export import export
from videoqat.training.trainer import plan as plan_train
from videoqat.training.trainer import train

KINDS: dict[str, dict[str, Any]] = {
    "wan": {"image_to_video": True},
    "ti2v": {"expand_timesteps": True},
    "cogvideox": {"family": "cogvideox", "image_to_video": True},
    "text": {},  # takes no image; VAE and text encoder are the same as wan-pair's
    "wan-pair": {"image_to_video": True, "two_transformers": True},
}
SIZES = {"cogvideox": (9, 64, 64)}
CPU = RuntimeConfig(device="cpu")
GENERATING = GenerationRuntimeConfig(device="cpu")


def size_of(name: str) -> tuple[int, int, int]:
    return SIZES.get(name, (5, 32, 32))


def sampling(name: str) -> SamplingConfig:
    frames, height, width = size_of(name)
    return SamplingConfig(num_frames=frames, height=height, width=width, num_inference_steps=2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines by the names of `KINDS`, and two pictures, one in a folder of its own."""
    root = tmp_path_factory.mktemp("first frames")
    for name, kind in KINDS.items():
        build_pipeline(ExampleModelConfig(out=str(root / "built" / name), num_layers=1, head_dim=16, **kind))
        enliven(root / "built" / name, root / name)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    (root / "pictures").mkdir()
    Image.fromarray(pixels[0]).save(root / "one.png")
    Image.fromarray(pixels[1]).save(root / "pictures" / "two.jpg")
    (root / "torn.png").write_bytes((root / "one.png").read_bytes()[:500])
    write_clips(ExampleClipsConfig(out=str(root / "clips"), num_clips=2, num_frames=9, size=64))
    return root


def preprocess_config(root: Path, name: str, out: Path, **changes: Any) -> PreprocessConfig:
    model = ModelConfig(path=str(root / name))
    tokens = 16 if name in ("ti2v", "text", "wan-pair") else 0
    bucket = "x".join(map(str, size_of(name)))
    config = PreprocessConfig(model=model, source=str(root / "clips"), out=str(out), buckets=[bucket], max_text_tokens=tokens, runtime=CPU)
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def caches(root: Path) -> dict[str, Path]:
    """Of each model; TI2V's with first frames, and without as `ti2v-text`."""
    for name in KINDS:
        preprocess(preprocess_config(root, name, root / "caches" / name, image_to_video=name == "ti2v"))
    preprocess(preprocess_config(root, "ti2v", root / "caches" / "ti2v-text"))
    return {path.name: path for path in (root / "caches").iterdir()}


def test_samples_hold_what_the_model_is_told_of_their_first_frames(root: Path, caches: dict[str, Path]) -> None:
    held = {name: {part: tuple(tensor.shape) for part, tensor in CachedVideos(path).load(0).items()} for name, path in caches.items()}
    parts = {name: {part: shape for part, shape in sample.items() if part.startswith("image_")} for name, sample in held.items()}
    assert parts == {
        "wan": {"image_latents": (16, 2, 4, 4), "image_embedding": (5, 32)},
        "wan-pair": {"image_latents": (16, 2, 4, 4)},
        "ti2v": {"image_frame": (16, 1, 4, 4)},
        "ti2v-text": {},
        "cogvideox": {"image_latents": (4, 1, 16, 16)},
        "text": {},
    }
    cache = CachedVideos(caches["ti2v"])
    for index in range(len(cache)):  # the VAE looks at no later frame
        sample = cache.load(index)
        torch.testing.assert_close(sample["image_frame"], sample["latents"][:, :1], atol=1e-4, rtol=1e-4)
    assert cache.fingerprint != CachedVideos(caches["ti2v-text"]).fingerprint
    assert set(cache.null_condition) == {"text"}
    embeddings = [CachedVideos(caches["wan"]).load(index)["image_embedding"] for index in range(2)]
    assert not torch.equal(*embeddings)


def test_preprocess_says_whether_first_frames_are_given(root: Path, tmp_path: Path) -> None:
    plans = {name: plan_preprocess(preprocess_config(root, name, tmp_path / name))["image_to_video"] for name in ("wan", "ti2v", "text")}
    assert plans == {"wan": True, "ti2v": False, "text": False}
    with pytest.raises(ConfigError, match=r"image_to_video=True is not legal.*false for .*text alone"):
        plan_preprocess(preprocess_config(root, "text", tmp_path / "x", image_to_video=True))


def train_config(root: Path, name: str, cache: Path, out: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        model=ModelConfig(path=str(root / name)),
        cache=str(cache),
        out=str(out),
        recipe="attn_qat",
        train=LoopConfig(steps=2, compute_dtype="bfloat16", health_every=0),
        runtime=CPU,
    )
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("model", "cache"), [("wan-pair", "text"), ("text", "wan-pair")], ids=["images that the cache lacks", "images that the model doesn't take"]
)
def test_caches_of_the_other_task_are_refused(model: str, cache: str, root: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    """VAE and text encoder are the same: only the first frames tell."""
    with pytest.raises(DataError, match=r"does not fit .*first frame sample .* holds .*the model is told .*run preprocess"):
        plan_train(train_config(root, model, caches[cache], tmp_path / "run"))
    validation = ValidationConfig(every=1, cache=str(caches[cache]))
    with pytest.raises(DataError, match=r"validation\.cache=.*does not fit"):
        plan_train(train_config(root, model, caches[model], tmp_path / "run", validation=validation))


def test_samples_of_a_training_want_their_images(root: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    for name, images, message in (
        ("wan", [], r"validation\.images is missing.*from a first frame"),
        ("wan", [str(root / "nothing.png")], r"validation\.images='.*nothing\.png' is not legal.*exists"),
        ("text", [str(root / "one.png")], r"validation\.images='.*one\.png' is not legal for .*text alone"),
    ):
        validation = ValidationConfig(every=1, prompts=["a bag moves up"], images=images, sampling=sampling(name))
        with pytest.raises(UserError, match=message):
            plan_train(train_config(root, name, caches[name], tmp_path / "run", validation=validation))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["wan", "ti2v", "cogvideox"])
def test_from_the_cache_to_an_exported_models_video(name: str, device: str, root: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    image, runtime = str(root / "one.png"), RuntimeConfig(device=device)
    validation = ValidationConfig(
        every=2, cache=str(caches[name]), samples=1, timesteps=2, prompts=["a bag moves up"], images=[image], sampling=sampling(name)
    )
    config = train_config(root, name, caches[name], tmp_path / "run", validation=validation, runtime=runtime)
    planned = plan_train(config)
    assert planned["parameters"] == sum(
        p.numel() for p in family_of(root / name).load_transformer(root / name, "transformer", dtype=torch.float32).parameters()
    )
    train(config)
    record = json.loads(next((tmp_path / "run" / "samples").rglob("*.json")).read_text())
    assert record["image"] == image
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "model")))
    before, after = (
        family_of(root / name).load_transformer(folder, "transformer", dtype=torch.float32) for folder in (root / name, tmp_path / "model")
    )
    assert any(not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True))
    out = str(tmp_path / "video.mp4")
    made = generate(
        GenerateConfig(
            model=str(tmp_path / "model"),
            prompt="a bag moves up",
            image=image,
            out=out,
            sampling=sampling(name),
            runtime=GenerationRuntimeConfig(device=device),
        )
    )
    assert made["image_sha256"] == hashlib.sha256(Path(image).read_bytes()).hexdigest()
    assert made["config"]["image"] == image
    assert made["recipe"]["name"] == "attn_qat"
    assert json.loads((tmp_path / "video.json").read_text()) == json.loads(json.dumps(made))


def generate_config(root: Path, name: str, out: Path, **changes: Any) -> GenerateConfig:
    return dataclasses.replace(GenerateConfig(model=str(root / name), out=str(out), sampling=sampling(name), runtime=GENERATING), **changes)


def test_images_that_cannot_be_used_are_refused_before_weights_are_loaded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videoqat.models.loading.load_transformer", lambda *_, **__: pytest.fail("weights were loaded"))
    one = str(root / "one.png")
    for name, image, message in (
        ("text", one, r"image='.*one\.png' is not legal for .*text alone.*legal: no image"),
        ("wan", "", r"image is missing: .*from a first frame; legal: a path"),
        ("cogvideox", "", r"image is missing"),
        ("wan", str(root / "nothing.png"), r"image='.*nothing\.png' is not legal; legal: .*exists"),
        ("wan", str(root / "torn.png"), r"image='.*torn\.png' can't be read as an image"),
        ("ti2v", str(root / "clips" / "metadata.jsonl"), r"can't be read as an image"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            generate(generate_config(root, name, tmp_path / "x.mp4", prompt="a bag", image=image))
        assert "\n" not in str(caught.value)
    second = dataclasses.replace(sampling("wan"), guidance_scale_2=2.0)
    with pytest.raises(ConfigError, match=r"guidance_scale_2=2\.0 is not legal.*one transformer"):
        generate(generate_config(root, "wan", tmp_path / "x.mp4", prompt="a bag", image=one, sampling=second))
    (tmp_path / "prompts.txt").write_text("a bag\n")
    with pytest.raises(ConfigError, match=r"image=.* is not legal.*a column `image`"):
        plan(generate_config(root, "wan", tmp_path / "videos", prompts=str(tmp_path / "prompts.txt"), image=one))
    with pytest.raises(UserError, match=r"prompts=.*line 1: image is missing"):
        plan(generate_config(root, "wan", tmp_path / "videos", prompts=str(tmp_path / "prompts.txt")))
    assert not (tmp_path / "videos").exists()


def test_a_file_of_prompts_with_images(root: Path, tmp_path: Path) -> None:
    """Paths are seen from the file's folder; TI2V does with and without; a picture that changed isn't taken for the one there was."""
    shutil.copytree(root / "pictures", tmp_path / "in" / "pictures")
    shutil.copy(root / "one.png", tmp_path / "in" / "one.png")
    rows = [
        {"prompt": "a bag moves up", "image": "one.png"},
        {"prompt": "a bag moves up", "image": "pictures/two.jpg"},
        {"prompt": "a top", "image": ""},
    ]
    with open(tmp_path / "in" / "prompts.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "image"])
        writer.writeheader()
        writer.writerows(rows)
    config = generate_config(root, "ti2v", tmp_path / "videos", prompts=str(tmp_path / "in" / "prompts.csv"))
    assert plan(config)["videos"] == 3
    assert generate(config)["rendered"] == 3
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "videos").glob("a *.json")}
    hashes = {name: record["image_sha256"] for name, record in records.items()}
    files = {"a bag moves up-0": "one.png", "a bag moves up-1": "pictures/two.jpg"}
    assert hashes == {name: hashlib.sha256((tmp_path / "in" / file).read_bytes()).hexdigest() for name, file in files.items()} | {"a top-0": ""}
    assert records["a bag moves up-0"]["video_sha256"] != records["a bag moves up-1"]["video_sha256"]
    assert generate(config)["skipped"] == 3

    Image.fromarray(np.zeros((32, 32, 3), dtype=np.uint8)).save(tmp_path / "in" / "one.png")
    with pytest.raises(UserError, match=r"moves up-0\.mp4 was made with image_sha256=.*overwrite"):
        generate(config)
    assert generate(dataclasses.replace(config, overwrite=True))["rendered"] == 1
    (tmp_path / "in" / "one.png").unlink()
    with pytest.raises(UserError, match=r"prompts=.*line 2: image='.*one\.png' is not legal"):
        plan(config)


def test_a_comparison_with_images(root: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    lines = [{"prompt": "a bag moves up", "image": "one.png"}]
    shutil.copy(root / "one.png", tmp_path / "one.png")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = [CompareEntry(recipe, str(root / "wan"), recipe) for recipe in ("bf16", "attn_qat")]
    config = CompareConfig(
        entries=entries, prompts=str(tmp_path / "prompts.jsonl"), out=str(tmp_path / "out"), sampling=sampling("wan"), runtime=GENERATING,
        validation_cache=str(caches["wan"]), validation_samples=1, validation_timesteps=1,
    )  # fmt: skip
    report = compare(config)
    assert {video["image_sha256"] for video in report["videos"]} == {hashlib.sha256((root / "one.png").read_bytes()).hexdigest()}
    assert all(entry["validation"]["loss"] > 0 for entry in report["entries"])
    with pytest.raises(UserError, match=r"'a bag moves up': image='.*one\.png' is not legal for .*text alone"):
        plan_compare(dataclasses.replace(config, entries=[entries[0], CompareEntry("text", str(root / "text"))], out=str(tmp_path / "other")))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(lines[0] | {"seed": 3}))
    with pytest.raises(UserError, match=r"line 1: seed can't be set here.*legal: image"):
        plan_compare(config)
    shutil.copy(root / "pictures" / "two.jpg", tmp_path / "one.png")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match=r"holds a comparison with images"):
        plan_compare(config)


def test_tiny_models_for_images_that_there_are_not(tmp_path: Path) -> None:
    for changes, message in (
        ({"family": "cogvideox", "expand_timesteps": True}, "expand_timesteps=True is not legal"),
        ({"image_to_video": True, "expand_timesteps": True}, "expand_timesteps=True is not legal"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_pipeline(ExampleModelConfig(out=str(tmp_path / "x"), **changes))  # type: ignore[arg-type]
