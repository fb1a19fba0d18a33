"""A dry run refuses what the run itself refuses before it loads anything, and neither writes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from videoqat.cli import main
from videoqat.commands import COMMANDS
from videoqat.config import ServeConfig, ServedModel
from videoqat.errors import UserError

SMALL = ["sampling.num_frames=5", "sampling.height=32", "sampling.width=32"]
ON_CPU = "runtime.device=cpu"
SDPA = [ON_CPU, "runtime.kernel=sdpa"]
NO_FOLDER, NO_KERNEL, NO_GPU = "can't be written: ", "kernel='sdpa' can't serve recipe 'attn_qat' on cpu", "runtime.device='cuda:97' is not legal"
TORN = "no_weights/transformer has no"
BENCH = ["model=tiny", "size=5x32x32", ON_CPU]
TABLE = ["base={model}", "cache={cache}", "held_out={cache}", "rows=[{{name: base}}, {{name: more, recipe: attn_qat, training: more}}]"]
MEASURE = ["model={model}", "cache={cache}", "out={new}"]
SHOWN = [*MEASURE, "prompts={prompts}", "sampling.height=32", "sampling.width=32"]

# command, settings, what it says
CASES: list[tuple[str, list[str], str]] = [
    ("demo", ["out={taken}/x"], NO_FOLDER),
    ("demo", ["out={other}"], "holds no demo"),
    ("demo", ["out={new}", "recipe={keeps_steps}"], "num_inference_steps"),
    ("example-clips", ["out={taken}/x"], NO_FOLDER),
    ("example-clips", ["out={other}"], "holds something else than the clips"),
    ("example-clips", ["out={new}", "photos={other}"], "train-images-idx3-ubyte.gz' does not exist"),
    ("example-clips", ["out={new}", "leave_out=[a hat moves up]"], "a hat moves up"),
    ("example-model", ["out={taken}/x"], NO_FOLDER),
    ("preprocess", ["model.path={model}", "source={clips}", "buckets=[5x32x32]", "out={taken}/x"], NO_FOLDER),
    ("preprocess", ["model.path={model}", "source={clips}", "buckets=[5x32x32]", "out={new}", "runtime.device=cuda:97"], NO_GPU),
    (
        "preprocess",
        ["model.path={no_encoder}", "source={clips}", "buckets=[5x32x32]", "out={new}"],
        "is no complete pipeline's folder: text_encoder/ is not there",
    ),
    ("train", ["model.path={model}", "cache={cache}", "out={taken}/x", "train.steps=1"], NO_FOLDER),
    ("convert", ["model={model}", "transformer_file={model}/transformer/diffusion_pytorch_model.safetensors", "out={taken}/x"], NO_FOLDER),
    ("generate", ["model={model}", "prompt=a cat", "out={taken}/x.mp4", *SMALL], NO_FOLDER),
    ("generate", ["model={model}", "prompts={prompts}", "out={taken}/x", *SMALL], NO_FOLDER),
    ("generate", ["model={no_weights}", "prompt=a cat", "out={new}.mp4", *SMALL], TORN),
    ("generate", ["model={no_weights}", "prompts={prompts}", "out={new}", *SMALL], TORN),
    ("compare", ["entries=[{{name: a, model: '{model}'}}, {{name: b, model: '{no_weights}'}}]", "prompts={prompts}", "out={new}", *SMALL], TORN),
    ("compare-attention", ["model={no_weights}", "prompts={prompts}", "out={new}", *SMALL], TORN),
    ("evidence measure", ["model={no_weights}", "cache={cache}", "out={new}"], TORN),
    ("evidence run", ["base={no_weights}", *TABLE[1:], "trainings=[{{name: more}}]", "out={new}"], TORN),
    ("convert", ["model={no_vae}", "transformer_file={model}/transformer/diffusion_pytorch_model.safetensors", "out={new}"], "no_vae/vae has no"),
    ("compare", ["entries=[{{name: a, model: '{model}'}}, {{name: b, model: '{model}'}}]", "prompts={prompts}", "out={taken}/x", *SMALL], NO_FOLDER),
    ("compare-attention", ["model={model}", "prompts={prompts}", "out={taken}/x", "sampling.num_inference_steps=2", *SMALL], NO_FOLDER),
    ("sensitivity", ["model={no_weights}", "cache={cache}", "out={new}"], TORN),
    ("sensitivity", ["model={model}", "cache={cache}", "out={taken}/x"], NO_FOLDER),
    ("serve", ["folder={taken}/x", "devices=[cpu]", "port=0"], NO_FOLDER),
    ("worker", ["folder={taken}/x", ON_CPU], NO_FOLDER),
    ("doctor", ["model=wan3"], "model='wan3' is not legal"),
    ("bench attention", ["recipe=attn_qat", *SDPA], NO_KERNEL),
    ("bench attention", ["recipe=attn_qat", "runtime.device=cuda:97"], NO_GPU),
    ("bench forward", [*BENCH, "runtime.kernel=sdpa"], NO_KERNEL),
    ("bench forward", [*BENCH, "recipes=[{keeps_layers}]"], "names block 70"),
    ("bench generation", [*BENCH, "runtime.kernel=sdpa"], NO_KERNEL),
    ("bench generation", [*BENCH, "recipes=[{keeps_steps}]"], "num_inference_steps"),
    ("bench training", [*BENCH, "work={taken}/x"], NO_FOLDER),
    ("bench training", [*BENCH, "work={new}", "runtime.kernel=sdpa"], NO_KERNEL),
    ("bench training", [*BENCH, "work={new}", "overrides=[train.step=4]"], "did you mean train.steps"),
    ("bench training", [*BENCH, "work={new}", "layouts=[1x1x3]"], "parallel.sp=3 does not divide"),
    ("bench training", ["model=tiny", ON_CPU, "work={new}", "size=5x30x32"], "size"),
    ("bench training", [*BENCH, "work={new}", "recipes=[{keeps_layers}]"], "names block 70"),
    ("evidence run", [*TABLE, "trainings=[{{name: more}}]", "out={taken}/x"], NO_FOLDER),
    ("evidence run", [*TABLE, "trainings=[{{name: more}}]", "out={new}", *SDPA], NO_KERNEL),
    ("evidence run", [*TABLE, "trainings=[{{name: more, recipe: attn_qat, settings: [runtime.kernel=sdpa]}}]", "out={new}", ON_CPU], NO_KERNEL),
    ("evidence run", [*TABLE, "trainings=[{{name: more}}]", "out={new}", "runtime.device=cuda:97"], NO_GPU),
    ("evidence run", [*TABLE, "trainings=[{{name: more}}]", "out={table}"], "samples=256 is not legal; legal: 7, as in"),
    ("evidence measure", ["model={model}", "cache={cache}", "out={taken}/x"], NO_FOLDER),
    ("evidence measure", ["model={model}", "cache={other}", "out={new}"], "is no finished cache"),
    ("evidence measure", ["model={no_encoder}", "cache={cache}", "out={new}"], "is no complete pipeline's folder"),
    ("evidence measure", [*MEASURE, "recipe=attn_qat", *SDPA], NO_KERNEL),
    ("evidence measure", [*MEASURE, "runtime.device=cuda:97"], NO_GPU),
    ("evidence measure", [*MEASURE, "recipe={keeps_layers}"], "names block 70"),
    ("evidence measure", [*MEASURE, "recipe={keeps_steps}"], "num_inference_steps"),
    ("evidence measure", [*SHOWN, "sampling.height=30"], "30"),
    ("evidence measure", [*SHOWN, "reference={other}"], "has no videos/000.mp4"),
    ("evidence measure", [*SHOWN, "st_lpips={taken}"], "holds no weights of ST-LPIPS"),
    ("evidence measure", [*SHOWN, "sampling.num_frames=5"], "17, which the judges look at"),
    ("evidence judge", ["videos={other}"], "is no folder that generate prompts=FILE wrote"),
    ("evidence judge", ["videos={videos}"], "b.mp4 of its manifest is not there"),
    ("evidence judge", ["videos={videos}/whole", "judges={taken}"], "holds no judges"),
    ("evidence train-judges", ["out={new}.bin"], "ends in .safetensors"),
    ("evidence train-judges", ["out={taken}/x.safetensors"], NO_FOLDER),
    ("evidence train-judges", ["out={new}.safetensors", "photos={other}"], "t10k-images-idx3-ubyte.gz' does not exist"),
]
LOADING = (
    "models.wan.WanFamily.load_pipeline", "models.wan.WanFamily.load_encoders", "training.trainer.make_engine", "models.convert._mapping",
    "models.tiny._wan_pipeline", "models.bench.random_transformer", "generation.bench.random_transformer", "training.bench.write_cache",
    "attention.bench._inputs", "evaluation.judges._trained", "evaluation.judges.read_video", "evaluation.evidence_run._Runner",
    "data.moving_garments._draw_file", "demo._stage",
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths by the names that CASES have for them; `new` is not there."""
    root = tmp_path_factory.mktemp("places")
    found = {name: root / name for name in ("new", "taken", "other", "no_encoder", "prompts", "keeps_steps", "keeps_layers", "videos", "table")}
    found |= {"model": tiny_pipeline, "cache": tiny_cache, "clips": tiny_cache.parent / "clips"}
    for suffix in ("prompts", "keeps_steps", "keeps_layers"):
        found[suffix] = found[suffix].with_suffix(".txt" if suffix == "prompts" else ".yaml")
    found["taken"].write_text("a file")
    found["prompts"].write_text("a bag moves up\n")
    found["keeps_steps"].write_text("base: attn_qat\nname: mine\nkeep_first_steps: 30\n")
    found["keeps_layers"].write_text("base: attn_qat\nname: mine\nkeep_layers: [70]\n")
    for folder in ("other", "videos/whole", "table"):
        (root / folder).mkdir(parents=True)
    (found["other"] / "mine").touch()
    (found["table"] / "settings.json").write_text('{"samples": 7}')
    (found["videos"] / "whole" / "a.mp4").touch()
    (found["videos"] / "a.mp4").touch()
    video = {"video": "a.mp4", "prompt": "a bag moves up"}
    (found["videos"] / "whole" / "manifest.json").write_text(json.dumps({"videos": [video]}))
    (found["videos"] / "manifest.json").write_text(json.dumps({"videos": [video, video | {"video": "b.mp4"}]}))
    for name, part in (("no_weights", "transformer"), ("no_vae", "vae")):
        found[name] = root / name
        shutil.copytree(tiny_pipeline, found[name])
        (found[name] / part / "diffusion_pytorch_model.safetensors").unlink()
    shutil.copytree(tiny_pipeline, found["no_encoder"], ignore=shutil.ignore_patterns("text_encoder"))
    return found


@pytest.mark.parametrize(("command", "settings", "words"), CASES, ids=[f"{name}-{words[:20]}" for name, _, words in CASES])
def test_a_dry_run_refuses_what_the_run_refuses_before_it_loads(
    command: str, settings: list[str], words: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LOADING:
        monkeypatch.setattr(f"videoqat.{name}", lambda *_, **__: pytest.fail("something was loaded, or begun"))
    root = places["new"].parent
    before = sorted(root.rglob("*"))
    for dry in (["--dry-run"], []):
        code = main([*command.split(), *(setting.format_map(places) for setting in settings), *dry])
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert (code, said.startswith(f"videoqat {command}: ")) == (2, True), (dry, said)
        assert words in said, dry
    assert sorted(root.rglob("*")) == before


def test_weights_that_are_replaced_need_not_be_there(places: dict[str, Path], tmp_path: Path) -> None:
    file = places["model"] / "transformer" / "diffusion_pytorch_model.safetensors"
    words = ["convert", f"model={places['no_weights']}", f"transformer_file={file}", f"out={tmp_path / 'out'}"]
    assert [main([*words, *dry]) for dry in (["--dry-run"], [])] == [0, 0]


def test_every_command_is_asked() -> None:
    assert {command for command, *_ in CASES} | {"export"} == COMMANDS.keys()  # export: tests/test_training_export.py


def test_a_model_that_needs_a_first_frame_is_refused_before_workers_start(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.serve import plan

    monkeypatch.setattr("app.catalogue.family_of", lambda _: SimpleNamespace(takes_image=lambda _: "required"))
    with pytest.raises(UserError, match=r"model mine: .* needs a first frame, and requests have none"):
        plan(ServeConfig(folder=str(tmp_path / "new"), models=[ServedModel("mine", str(tiny_pipeline))], devices=[]))
