"""The command line: help, dry runs, JSON, and bad input: one line, exit code 2, nothing overwritten."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from videoqat import __version__, cli
from videoqat.cli import main
from videoqat.commands import COMMANDS
from videoqat.provenance import provenance

SMALL = ["sampling.num_frames=5", "sampling.height=32", "sampling.width=32", "sampling.num_inference_steps=1"]
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns (exit code, standard output, standard error)."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> hash of content, for everything below `folder`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path, tiny_cache: Path) -> Path:
    """A run folder with checkpoints of steps 1 and 2. Shared: copy it before changing it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    words = ["train", f"model.path={tiny_pipeline}", f"cache={tiny_cache}", f"out={out}", "recipe=attn_qat", "from_scratch=true"]
    assert main([*words, "train.steps=2", "train.save_every=1", "train.compute_dtype=float32", "train.health_every=0"]) == 0
    return out


def train_words(pipeline: Path, cache: Path, out: Path) -> list[str]:
    """The command that made `trained`, to run on."""
    words = ["train", f"model.path={pipeline}", f"cache={cache}", f"out={out}", "recipe=attn_qat", "from_scratch=true"]
    return [*words, "train.steps=3", "train.save_every=1", "train.compute_dtype=float32", "train.health_every=0"]


# Help


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name.split()[0] in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_every_key(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert COMMANDS[name].example in text
    for key in COMMANDS[name].schema.__dataclass_fields__:
        assert f"  {key}" in text
    assert all(option in text for option in ("--config", "--json", "--dry-run"))


def test_the_program_is_also_a_module():
    result = subprocess.run([sys.executable, "-m", "videoqat", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"videoqat {__version__}"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["trian"])
    assert exit_.value.code == 2
    assert "trian" in capsys.readouterr().err


# Dry runs and JSON


def test_dry_runs_load_no_weights_and_write_nothing(
    run: Run, tiny_pipeline: Path, tiny_cache: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline, model)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    entries = f"entries=[{{name: a, model: '{model}'}}, {{name: b, model: '{model}', recipe: attn_qat}}]"
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").touch()
    (tmp_path / "videos" / "manifest.json").write_text('{"videos": [{"video": "a.mp4", "prompt": "a bag moves up"}]}')
    before = tree(tmp_path)
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_, **__: pytest.fail("weights were loaded"))
    monkeypatch.setattr("videoqat.models.wan.WanFamily.load_pipeline", lambda *_, **__: pytest.fail("a pipeline was loaded"))
    out = tmp_path / "out"
    evidence = ["evidence", "run", f"base={model}", f"cache={tiny_cache}", f"held_out={tiny_cache}", f"out={out}"]
    planned = {
        "demo": ["demo", f"out={out}"],
        "example-clips": ["example-clips", f"out={out}"],
        "example-model": ["example-model", f"out={out}"],
        "preprocess": ["preprocess", f"model.path={model}", f"source={tiny_cache.parent / 'clips'}", f"out={out}", "buckets=[5x32x32]"],
        "train": train_words(model, tiny_cache, out),
        "export": ["export", f"run={trained}", f"out={out}"],
        "convert": ["convert", f"model={model}", f"transformer_file={model / WEIGHTS}", f"out={out}"],
        "generate": ["generate", f"model={model}", "prompt=a cat", f"out={out}.mp4", *SMALL],
        "compare": ["compare", entries, f"prompts={tmp_path / 'prompts.txt'}", f"out={out}", *SMALL],
        "compare-attention": ["compare-attention", f"model={model}", f"prompts={tmp_path / 'prompts.txt'}", f"out={out}", *SMALL],
        "sensitivity": ["sensitivity", f"model={model}", f"cache={tiny_cache}", f"out={out}"],
        "bench attention": ["bench", "attention", "num_tokens=16"],
        "serve": ["serve", f"folder={out}"],
        "worker": ["worker", f"folder={out}"],
        "evidence run": [*evidence, "trainings=[{name: more}]", "rows=[{name: base}, {name: more, recipe: attn_qat, training: more}]"],
        "evidence measure": ["evidence", "measure", f"model={model}", f"cache={tiny_cache}", f"out={out}"],
        "evidence train-judges": ["evidence", "train-judges", f"out={out}.safetensors"],
        "evidence judge": ["evidence", "judge", f"videos={tmp_path / 'videos'}"],
        "bench generation": ["bench", "generation", "model=tiny", "size=5x32x32"],
        "bench forward": ["bench", "forward", "model=tiny", "size=5x32x32"],
        "bench training": ["bench", "training", f"work={out}", "model=tiny", "size=5x32x32"],
        "doctor": ["doctor", f"model={model}", "size=5x32x32"],
    }
    assert planned.keys() == COMMANDS.keys()
    for name, words in planned.items():
        code, stdout, stderr = run(*words, "--dry-run", "--json", "-")
        assert code == 0, stderr
        result = json.loads(stdout)
        assert (result["dry_run"], result["command"]) == (True, name)
        assert f"# videoqat {name} (dry run): resolved configuration" in stderr
        assert result.keys() > {"dry_run", "command", "config"}, f"{name}: the plan says nothing"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("words", [["forward"], ["generation"], ["training", "work=bench-work"]])
def test_a_dry_run_refuses_the_model_that_the_run_would_refuse(words: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(run("bench", *words, "model=wan3", "--dry-run"), f"bench {words[0]}", "model='wan3' is not legal; legal: wan2.1-t2v-1.3b")
    assert tree(tmp_path) == {}


def test_settings_may_stand_before_between_and_behind_options(run: Run, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("num_clips: 2\nsize: 32\n")
    words = ["num_clips=3", f"out={tmp_path / 'a'}", "--config", tmp_path / "mine.yaml", "num_clips=4", "--dry-run", "fps=8", "--json", "-"]
    code, stdout, _ = run("example-clips", *words)
    assert code == 0
    config = json.loads(stdout)["config"]
    assert (config["num_clips"], config["size"], config["fps"]) == (4, 32, 8)


@pytest.mark.parametrize("words", [["--jsn", "a=b"], ["--dry-run", "more"], ["--jsn=x"]])
def test_an_option_that_there_is_not_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "models=false", *words])
    assert f"unrecognized arguments: {' '.join(words[words[0] == '--dry-run' :])}" in capsys.readouterr().err


def test_json_goes_to_a_file_or_to_standard_output(run: Run, tmp_path: Path):
    target = tmp_path / "doctor.json"
    code, stdout, _ = run("doctor", "--json", target)
    assert code == 0
    from_file = json.loads(target.read_text())
    code, stdout, _ = run("doctor", "--json", "-")
    assert code == 0
    assert json.loads(stdout) == from_file
    assert from_file["devices"]["cpu"]["kernels"]["attn_qat"].startswith("torch (emulated")


def test_a_result_carries_its_provenance(run: Run, tmp_path: Path):
    code, stdout, _ = run("bench", "attention", "num_tokens=64", "num_heads=1", "head_dim=16", "repeats=1", "runtime.device=cpu", "--json", "-")
    assert code == 0
    text = json.dumps(json.loads(stdout))
    assert all(word in text for word in ('"commit"', '"versions"', '"torch"'))


def test_the_commit_is_that_of_this_source_not_of_a_project_around_it(tmp_path: Path):
    """A wheel in the environment of somebody's own project lies in that project's checkout."""
    copy = tmp_path / "venv" / "provenance.py"
    copy.parent.mkdir()
    shutil.copy(Path(cli.__file__).with_name("provenance.py"), copy)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]

    def told() -> str:
        spec = importlib.util.spec_from_file_location("copied_provenance", copy)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.commit()

    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "mine"]):
        subprocess.run([*git, *words], check=True)
    assert told() == "unknown"
    for words in (["add", "venv"], ["commit", "-q", "-m", "now it belongs to it"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert told().removesuffix("+changes") == head  # the import may have left a __pycache__


def test_a_result_tells_its_command_without_the_place_it_lay_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/videoqat/__main__.py", "bench", "attention", "shapes=[short]"])
    assert provenance("cpu")["command"] == "videoqat bench attention 'shapes=[short]'"


# Bad input


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n")
    return path


def assert_refused(result: tuple[int, str, str], command: str, *says: str) -> None:
    """Exit code 2; the last line on standard error is the command's and holds all of `says`; no traceback, no result."""
    code, stdout, stderr = result
    assert code == 2, stderr
    assert stdout == ""
    last = stderr.rstrip("\n").splitlines()[-1]
    assert last.startswith(f"videoqat {command}: ")
    for words in says:
        assert words in last
    assert "Traceback" not in stderr


def test_unknown_key(run: Run, tmp_path: Path):
    assert_refused(run("example-clips", f"out={tmp_path / 'c'}", "num_clip=3"), "example-clips", "num_clip", "did you mean num_clips?")
    assert tree(tmp_path) == {}


def test_a_result_that_could_not_be_written_is_refused_before_the_work(run: Run, tmp_path: Path):
    (tmp_path / "results").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for there in (tmp_path / "results", tmp_path / "pipe"):  # a pipe, or /dev/stdout, would be replaced by a file
        assert_refused(run("example-clips", f"out={tmp_path / 'clips'}", "--json", there), "example-clips", "is there and is no file; legal: a file")
    assert not (tmp_path / "clips").exists()
    assert (tmp_path / "pipe").is_fifo()


def test_missing_files(run: Run, tmp_path: Path, prompts: Path):
    assert_refused(run("train", "--config", "nowhere.yaml"), "train", "'nowhere.yaml' does not exist")
    assert_refused(run("generate", "model=/nowhere", "prompt=a", "out=a.mp4"), "generate", "model='/nowhere'", "an existing folder")
    assert_refused(run("doctor", "--json", tmp_path / "no" / "a.json"), "doctor", "its folder does not exist")
    assert_refused(run("export", f"run={tmp_path}", f"out={tmp_path / 'out'}"), "export", str(tmp_path), "no whole checkpoint")
    assert list(tree(tmp_path)) == [prompts.name]


def test_a_model_folder_that_is_none(run: Run, tmp_path: Path):
    assert_refused(run("doctor", f"model={tmp_path}"), "doctor", str(tmp_path), "model_index.json")


def test_a_recipe_that_does_not_exist(run: Run, tiny_pipeline: Path, tmp_path: Path):
    result = run("generate", f"model={tiny_pipeline}", "prompt=a", f"out={tmp_path / 'a.mp4'}", "recipe=int3")
    assert_refused(result, "generate", "recipe 'int3' does not exist", "attn_qat_search")


def test_frames_that_are_not_4n_plus_1(run: Run, tiny_pipeline: Path, tmp_path: Path):
    result = run("generate", f"model={tiny_pipeline}", "prompt=a", f"out={tmp_path / 'a.mp4'}", "sampling.num_frames=16")
    assert_refused(result, "generate", "sampling.num_frames=16", "13 or 17")


@pytest.mark.parametrize(("key", "value"), [("height", 40), ("width", 8)])
def test_a_size_that_the_model_can_not_do(run: Run, tiny_pipeline: Path, tmp_path: Path, key: str, value: int):
    words = ["generate", f"model={tiny_pipeline}", "prompt=a", f"out={tmp_path / 'a.mp4'}", *SMALL, f"sampling.{key}={value}"]
    assert_refused(run(*words), "generate", key, str(value), "multiples of 16")
    assert tree(tmp_path) == {}


def test_a_bucket_that_the_model_can_not_do(run: Run, tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path):
    words = ["preprocess", f"model.path={tiny_pipeline}", f"source={tiny_cache.parent / 'clips'}", f"out={tmp_path / 'out'}"]
    assert_refused(run(*words, "buckets=[5x40x32]"), "preprocess", "height 40", "multiples of 16")


def test_a_head_dim_that_is_not_supported(run: Run, tmp_path: Path):
    assert_refused(run("example-model", f"out={tmp_path / 'm'}", "head_dim=40"), "example-model", "head_dim=40", "a multiple of 16")
    assert_refused(run("bench", "attention", "head_dim=40", "num_tokens=16"), "bench attention", "head_dim=40", "multiple of 16")
    assert tree(tmp_path) == {}


def test_a_kernel_that_does_not_exist_or_can_not_serve(run: Run):
    words = ["bench", "attention", "num_tokens=16", "runtime.device=cpu"]
    assert_refused(run(*words, "runtime.kernel=cuda_fp2"), "bench attention", "kernel='cuda_fp2' does not exist", "torch")
    assert_refused(run(*words, "runtime.kernel=sdpa"), "bench attention", "kernel='sdpa' can't serve recipe 'attn_qat_search'", "would work: torch")


@pytest.mark.parametrize("text", ["", "\n  \n", "# only a comment\n"])
def test_an_empty_prompt_file(run: Run, tiny_pipeline: Path, tmp_path: Path, prompts: Path, text: str):
    prompts.write_text(text)
    entries = f"entries=[{{name: a, model: '{tiny_pipeline}'}}, {{name: b, model: '{tiny_pipeline}', recipe: attn_qat}}]"
    before = tree(tmp_path)
    assert_refused(run("compare", entries, f"prompts={prompts}", f"out={tmp_path / 'out'}", *SMALL), "compare", str(prompts))
    assert tree(tmp_path) == before


WRITERS = ("demo", "example-clips", "example-model", "preprocess", "train", "export", "convert", "generate", "compare", "evidence train-judges")


@pytest.mark.parametrize("command", WRITERS)
def test_an_output_folder_that_can_not_be_written(
    command: str, run: Run, tiny_pipeline: Path, tiny_cache: Path, trained: Path, tmp_path: Path, prompts: Path
):
    """Below a file: not even root can write there."""
    out = prompts / "out"
    entries = f"entries=[{{name: a, model: '{tiny_pipeline}'}}, {{name: b, model: '{tiny_pipeline}', recipe: attn_qat}}]"
    words: dict[str, list[str]] = {
        "demo": [f"out={out}"],
        "example-clips": [f"out={out}", "num_clips=1"],
        "example-model": [f"out={out}"],
        "preprocess": [f"model.path={tiny_pipeline}", f"source={tiny_cache.parent / 'clips'}", f"out={out}", "buckets=[5x32x32]"],
        "train": train_words(tiny_pipeline, tiny_cache, out)[1:],
        "export": [f"run={trained}", f"out={out}"],
        "convert": [f"model={tiny_pipeline}", f"transformer_file={tiny_pipeline / WEIGHTS}", f"out={out}"],
        "generate": [f"model={tiny_pipeline}", "prompt=a", f"out={out / 'a.mp4'}", *SMALL],
        "evidence train-judges": [f"out={out / 'judges.safetensors'}", "steps=40"],
        "compare": [entries, f"prompts={prompts}", f"out={out}", *SMALL],
    }
    before = tree(tmp_path)
    assert_refused(run(*command.split(), *words[command]), command, "out=", str(prompts), "can't be written")
    assert tree(tmp_path) == before


def test_a_model_with_torn_weights(run: Run, tiny_pipeline: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline, model)
    weights = next((model / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    before = tree(tmp_path)
    assert_refused(run("generate", f"model={model}", "prompt=a", f"out={tmp_path / 'a.mp4'}", *SMALL), "generate", weights.name)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.json", ".metadata", "COMMITTED"])
def test_a_checkpoint_torn_in_the_middle(run: Run, tiny_pipeline: Path, tiny_cache: Path, trained: Path, tmp_path: Path, file: str):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    torn = out / "checkpoints" / "step-000002"
    content = (torn / file).read_bytes()
    (torn / file).write_bytes(content[: len(content) // 2])
    before = tree(tmp_path)
    named = [f"train.resume={torn}", f"out={tmp_path / 'other'}"]
    assert_refused(run(*train_words(tiny_pipeline, tiny_cache, out), *named), "train", str(torn), "not a whole checkpoint", file)
    assert_refused(run("export", f"run={out}", f"checkpoint={torn}", f"out={tmp_path / 'exported'}"), "export", str(torn), file)
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    assert tree(tmp_path) == before


def test_a_run_without_a_whole_checkpoint_is_not_started_over(run: Run, tiny_pipeline: Path, tiny_cache: Path, trained: Path, tmp_path: Path):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    for marker in out.glob("checkpoints/*/COMMITTED"):
        marker.unlink()
    before = tree(tmp_path)
    assert_refused(run(*train_words(tiny_pipeline, tiny_cache, out)), "train", "no whole checkpoint", "COMMITTED")
    assert tree(tmp_path) == before


def test_a_checkpoint_of_another_model(run: Run, tiny_pipeline: Path, tiny_cache: Path, trained: Path, tmp_path: Path):
    out, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(trained, out)
    shutil.copytree(tiny_pipeline, other)
    config = json.loads((other / "transformer" / "config.json").read_text())
    (other / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 1}))
    before = tree(tmp_path)
    assert_refused(run(*train_words(other, tiny_cache, out)), "train", "model", str(tiny_pipeline), str(other))
    assert tree(tmp_path) == before


def test_weights_of_another_model(run: Run, tiny_pipeline: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline, model)
    config = json.loads((model / "transformer" / "config.json").read_text())
    (model / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    assert_refused(run("generate", f"model={model}", "prompt=a", f"out={tmp_path / 'a.mp4'}", *SMALL), "generate", "blocks.2")


def test_a_pipeline_of_another_family(run: Run, tiny_pipeline: Path, tmp_path: Path):
    index = json.loads((tiny_pipeline / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))
    assert_refused(run("doctor", f"model={tmp_path}"), "doctor", "StableDiffusionPipeline", "WanPipeline")


def test_no_usable_clip(run: Run, tiny_pipeline: Path, tmp_path: Path):
    source = tmp_path / "clips"
    source.mkdir()
    (source / "a.mp4").write_bytes(b"no video")
    (source / "a.txt").write_text("a cat")
    words = ["preprocess", f"model.path={tiny_pipeline}", f"source={source}", f"out={tmp_path / 'out'}", "buckets=[5x32x32]"]
    assert_refused(run(*words), "preprocess", "cannot decode", "1")


def test_existing_results_are_not_overwritten(run: Run, tiny_pipeline: Path, trained: Path, tmp_path: Path):
    for name in ("a.mp4", "clips/precious", "model/precious", "exported/precious", "demo/precious"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    before = tree(tmp_path)
    assert_refused(run("generate", f"model={tiny_pipeline}", "prompt=a", f"out={tmp_path / 'a.mp4'}", *SMALL), "generate", "overwrite=true")
    assert_refused(run("example-clips", f"out={tmp_path / 'clips'}"), "example-clips", str(tmp_path / "clips"))
    assert_refused(run("example-model", f"out={tmp_path / 'model'}"), "example-model", str(tmp_path / "model"))
    assert_refused(run("export", f"run={trained}", f"out={tmp_path / 'exported'}"), "export", str(tmp_path / "exported"))
    assert_refused(run("demo", f"out={tmp_path / 'demo'}"), "demo", str(tmp_path / "demo"))
    assert tree(tmp_path) == before


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken(config: object) -> dict[str, object]:
        raise RuntimeError("ours")

    monkeypatch.setattr("videoqat.doctor.doctor", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["doctor"])


def test_a_diverged_training_is_one_line_and_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch):
    from videoqat.errors import TrainingDiverged

    def diverge(config: object) -> dict[str, object]:
        raise TrainingDiverged("step 7: loss is nan")

    monkeypatch.setattr("videoqat.doctor.doctor", diverge)
    code, stdout, stderr = run("doctor")
    assert (code, stdout) == (1, "")
    assert stderr.rstrip().splitlines()[-1] == "videoqat doctor: step 7: loss is nan"
