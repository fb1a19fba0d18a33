"""Many videos by one command: files of prompts, names, seeds, going on, failures, and the same videos from any number of processes."""

import dataclasses
import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from helpers.pipelines import change_weights, enliven
from helpers.ranks import outcomes, run_ranks

from videoqat.cli import main
from videoqat.config import GenerateConfig, GenerationRuntimeConfig, SamplingConfig, VideoParallelConfig
from videoqat.errors import NonFiniteVideo, UserError
from videoqat.generation import batch, single
from videoqat.generation.batch import generate, plan
from videoqat.generation.engine import Engine
from videoqat.generation.prompts import Line, read_lines, videos

SAMPLING = SamplingConfig(num_frames=5, height=32, width=32, num_inference_steps=2, max_text_tokens=16)
PROMPTS = ["a sneaker moves left", "a bag/box moves up", "a dress"]
NAMES = ["a sneaker moves left", "a bag_box moves up", "a dress"]


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory) -> Path:
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


def config_for(model: Path, prompts: Path, out: Path, **changes) -> GenerateConfig:
    settings = {
        "model": str(model),
        "prompts": str(prompts),
        "out": str(out),
        "sampling": SAMPLING,
        "runtime": GenerationRuntimeConfig(device="cpu"),
        "seed": 7,
    }
    return GenerateConfig(**{**settings, **changes})


@pytest.fixture
def config(model, tmp_path) -> GenerateConfig:
    """Three prompts, two videos of each."""
    (tmp_path / "prompts.txt").write_text("# three\n" + "\n".join(PROMPTS) + "\n")
    return config_for(model, tmp_path / "prompts.txt", tmp_path / "out", samples_per_prompt=2)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """The folder of `config`'s videos, rendered by one process. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    result = generate(config_for(model, folder / "prompts.txt", folder / "out", samples_per_prompt=2))
    assert (result["videos"], result["rendered"], result["skipped"], result["failed"], result["exit_code"]) == (6, 6, 0, 0, 0)
    return folder / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.mp4")}


@pytest.fixture
def rendered(monkeypatch) -> list[tuple[str, int]]:
    """(prompt, seed) of each video that an engine of this process renders."""
    seen: list[tuple[str, int]] = []
    original = Engine.generate

    def watched(self, prompt, seed, *args, **options):
        seen.append((prompt, seed))
        return original(self, prompt, seed, *args, **options)

    monkeypatch.setattr(Engine, "generate", watched)
    return seen


# --- what a file says


def test_text_csv_and_jsonl(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes("\ufeff# Kommentar\r\n\r\n  a café, #3 \r\n# no\r\na dog".encode())
    assert read_lines(text) == [Line(3, "a café, #3", {}), Line(5, "a dog", {})]
    table = tmp_path / "a.csv"
    table.write_text('prompt, seed,guidance_scale,negative_prompt\n"a cat, grey",5,,"bad, ugly"\n\na dog,,2,\n"two\nlines",1,1.5,\n')
    cat = Line(2, "a cat, grey", {"seed": 5, "negative_prompt": "bad, ugly"})
    assert read_lines(table) == [cat, Line(4, "a dog", {"guidance_scale": 2.0}), Line(6, "two\nlines", {"seed": 1, "guidance_scale": 1.5})]
    lines = tmp_path / "a.jsonl"
    rows = [{"prompt": " a cat ", "seed": 5, "height": None, "flow_shift": 3}, {"prompt": "a\u2028dog", "negative_prompt": ""}]
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert read_lines(lines) == [Line(1, "a cat", {"seed": 5, "flow_shift": 3.0}), Line(2, "a\u2028dog", {"negative_prompt": ""})]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "# nothing\n\n", ["holds no prompt"]),
        ("a.txt", b"\xff\xfe\x00", ["UTF-8"]),
        ("a.csv", "prompt\n", ["holds no prompt"]),
        ("a.csv", "text,seed\na cat,1\n", ["line 1", "'text'", "prompt, seed"]),
        ("a.csv", "seed\n1\n", ["line 1", "no column 'prompt'"]),
        ("a.csv", "prompt,seed,seed\na,1,2\n", ["line 1", "'seed'", "twice"]),
        ("a.csv", "prompt,seed\na cat,1\na cat, grey,1\n", ["line 3", "3 cells", "2"]),
        ("a.csv", "prompt,seed\na cat,1.5\n", ["line 2", "seed='1.5'", "integer"]),
        ("a.csv", "prompt,seed\na cat,-1\n", ["line 2", "seed=-1", "0 to"]),
        ("a.csv", "prompt,guidance_scale\na cat,nan\n", ["line 2", "guidance_scale='nan'", "finite"]),
        ("a.csv", "prompt,num_frames\na cat,5\na dog,6\n", ["line 3", "num_frames=6", "5 or 9"]),
        ("a.csv", "prompt,height\na cat,32\na dog,40\n", ["line 3", "height", "40", "32 or 48"]),
        ("a.csv", "prompt,flow_shift\na cat,-1\n", ["line 2", "flow_shift=-1.0"]),
        ("a.csv", "prompt,seed\n ,1\n", ["line 2", "prompt is empty"]),
        ("a.csv", 'prompt\n"a cat', ["line 2", "not CSV"]),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ', ["line 2", "not JSON"]),
        ("a.jsonl", '\n["a"]', ["line 2", "not an object"]),
        ("a.jsonl", '{"prompt": "a", "steps": 3}', ["line 1", "'steps'", "num_inference_steps"]),
        ("a.jsonl", '{"prompt": "a", "seed": "3"}', ["line 1", "seed='3'", "integer"]),
        ("a.jsonl", '{"prompt": "a", "fps": true}', ["line 1", "fps=True", "integer"]),
        ("a.jsonl", '{"prompt": 3}', ["line 1", "prompt=3", "text"]),
        ("a.jsonl", '{"prompt": "half \\ud800"}', ["line 1", "prompt=", "text"]),
        ("a.yaml", "a cat", [".yaml", ".txt, .csv, .jsonl"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line_before_anything_is_loaded(model, tmp_path, monkeypatch, name, text, words):
    monkeypatch.setattr(batch, "Engine", None)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for run in (plan, generate):
        with pytest.raises(UserError) as error:
            run(config_for(model, tmp_path / name, tmp_path / "out"))
        assert "\n" not in str(error.value)
        assert all(word in str(error.value) for word in words), error.value
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "a cat"}, "prompt='a cat'.*one of the two"),
        ({"prompts": "", "prompt": ""}, "prompt=''.*prompts=FILE"),
        ({"prompts": "", "prompt": "a cat", "samples_per_prompt": 2, "out": "a.mp4"}, "samples_per_prompt=2"),
        ({"prompts": "", "prompt": "a cat", "samples_per_prompt": 1}, "out=.*mp4, or a folder"),
        ({"prompts": "nowhere.txt"}, "nowhere.txt.*existing file"),
        ({"out": "a.mp4"}, "out='a.mp4'.*a folder"),
        ({"samples_per_prompt": -1}, "samples_per_prompt=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not legal; legal: 0 to 9223372036854775807"),
        ({"seed": 2**63 - 1}, "line 2: seed=9223372036854775807"),  # of several videos of a prompt
        ({"recipe": "fp3"}, "fp3.*attn_qat"),
        ({"recipe": "attn_qat", "runtime": GenerationRuntimeConfig(device="cpu", kernel="sdpa")}, "sdpa"),
    ],
)
def test_settings_that_cannot_be(config, tmp_path, monkeypatch, changes, words):
    monkeypatch.setattr(batch, "Engine", None)
    with pytest.raises(UserError, match=words):
        generate(dataclasses.replace(config, **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_one_video_is_refused_under_torchrun(config, tmp_path, monkeypatch):
    """Each process would render it and write it over the others'."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="prompts=FILE"):
        generate(dataclasses.replace(config, prompts="", prompt="a cat", samples_per_prompt=1, out=str(tmp_path / "a.mp4")))


# --- names and seeds


def names_of(model: Path, tmp_path: Path, prompts: list[str], **changes) -> list[str]:
    path = tmp_path / "names.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return [video.name for video in videos(config_for(model, path, tmp_path / "out", **changes))]


def test_names_are_vbenchs(model, tmp_path):
    prompts = ["A person is brushing teeth.", "it's 5, maybe", "a man - a plan"]
    assert names_of(model, tmp_path, prompts, samples_per_prompt=2) == [f"{prompt}-{index}" for prompt in prompts for index in (0, 1)]


def test_names_are_safe_short_and_of_one_video_each(model, tmp_path):
    hostile = ["../../etc/passwd", ".hidden", 'a:b*c?"d"<e>|f\\g', "two\nlines\t\x00", "-", "é" * 500, "é" * 499 + "e", "x" * 180, "x" * 181]
    same = ["a/b", "a\\b", "A_B", "Stra\u00dfe", "STRASSE", "cafe\u0301", "café"]
    names = names_of(model, tmp_path, hostile + same)
    assert names[:5] == ["_._.._etc_passwd-0", "_hidden-0", "a_b_c__d__e__f_g-0", "two_lines__-0", "--0"]
    assert names[7] == "x" * 180 + "-0"
    assert names[9] == "a_b-0"
    assert [name.rpartition("~")[0] for name in names[10:]] == ["a_b", "A_B", "", "STRASSE", "", "café"]
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        assert len(f"{name}.json".encode()) <= 190
        (tmp_path / f"{name}.json").touch()  # the file system agrees
        assert (tmp_path / f"{name}.json").resolve().parent == tmp_path
    assert names_of(model, tmp_path, hostile + same) == names
    assert names_of(model, tmp_path, [*hostile, *same, "new"])[:-1] == names  # lines that are added at the end change no name


def test_a_prompt_that_comes_again_goes_on_counting(model, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,guidance_scale\na cat,1\na dog,1\na cat,5\n")
    found = videos(config_for(model, path, tmp_path / "out", samples_per_prompt=2, seed=10))
    assert [(v.name, v.index, v.seed, v.sampling.guidance_scale) for v in found] == [
        *[("a cat-0", 0, 10, 1), ("a cat-1", 1, 11, 1), ("a dog-0", 0, 12, 1)],
        *[("a dog-1", 1, 13, 1), ("a cat-2", 0, 14, 5), ("a cat-3", 1, 15, 5)],
    ]


def test_a_lines_own_settings_go_before_the_commands(model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "seed": 100, "width": 48, "fps": 8, "negative_prompt": "b"}\n{"prompt": "c"}\n')
    found = videos(config_for(model, path, tmp_path / "out", samples_per_prompt=3, seed=7))
    assert [v.seed for v in found] == [100, 101, 102, 7 + 3, 7 + 4, 7 + 5]
    assert found[0].sampling == dataclasses.replace(SAMPLING, width=48, fps=8, negative_prompt="b")
    assert found[3].sampling == SAMPLING
    planned = json.loads(json.dumps(plan(config_for(model, path, tmp_path / "out", samples_per_prompt=3))))
    assert (planned["videos"], planned["prompts"], planned["recipe"]["name"]) == (6, 2, "bf16")
    assert [(size["width"], size["num_tokens"]) for size in planned["sizes"]] == [(48, 48), (32, 32)]


# --- one process


def test_each_video_is_what_one_command_makes_and_comes_with_all_it_takes(model, finished, tmp_path):
    assert set(contents(finished)) == {f"{name}-{index}.mp4" for name in NAMES for index in (0, 1)}
    record = json.loads((finished / f"{NAMES[1]}-1.json").read_text())
    saved = record["config"]
    assert (saved["prompt"], saved["seed"]) == (PROMPTS[1], 7 + 2 + 1)
    assert {r["kernel"] for r in record["receipts"]} == {"sdpa"}
    groups = {"sampling": SamplingConfig, "runtime": GenerationRuntimeConfig, "parallel": VideoParallelConfig}
    again = saved | {key: group(**saved[key]) for key, group in groups.items()}
    new = single.generate(GenerateConfig(**{**again, "out": str(tmp_path / "again.mp4")}))
    assert (tmp_path / "again.mp4").read_bytes() == contents(finished)[f"{NAMES[1]}-1.mp4"]
    assert len(set(contents(finished).values())) == 6, "seeds that change nothing"
    assert new["video_sha256"] == record["video_sha256"]
    manifest = json.loads((finished / "manifest.json").read_text())
    assert [(v["video"], v["seed"]) for v in manifest["videos"]] == [(f"{NAMES[i // 2]}-{i % 2}.mp4", 7 + i) for i in range(6)]
    assert (manifest["failed"], manifest["ranks"]) == (0, 1)
    assert not (finished / "failed.jsonl").exists()


def test_what_is_there_stays_and_what_is_not_whole_is_made_again(config, finished, rendered, capsys):
    out = Path(config.out)
    one_less = dataclasses.replace(config, samples_per_prompt=1)
    assert generate(one_less)["rendered"] == 3
    rendered.clear()
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    (out / "manifest.json").unlink()
    (out / ".a dress-0.99.partial.mp4").touch()
    assert generate(one_less) | {"out": ""} == {
        **{"out": "", "videos": 3, "rendered": 0, "skipped": 3, "failed": 0, "ranks": 1, "manifest": str(out / "manifest.json"), "exit_code": 0}
    }
    assert rendered == []
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.mp4")} == times
    assert len(json.loads((out / "manifest.json").read_text())["videos"]) == 3
    assert not list(out.glob(".*partial*"))
    (out / "a dress-0.json").unlink()
    (out / f"{NAMES[0]}-0.mp4").unlink()
    torn = out / f"{NAMES[1]}-0.mp4"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert generate(one_less)["skipped"] == 0
    assert rendered == [(PROMPTS[0], 7), (PROMPTS[1], 8), (PROMPTS[2], 9)]
    assert contents(out)[f"{NAMES[0]}-0.mp4"] == contents(finished)[f"{NAMES[0]}-0.mp4"]
    assert "3 of 3 videos are there already" in capsys.readouterr().err


def test_other_settings_are_refused_or_made_again(model, tmp_path, monkeypatch, rendered):
    folder = enliven(model, tmp_path / "model")
    (tmp_path / "p.txt").write_text("a cat")
    config = config_for(folder, tmp_path / "p.txt", tmp_path / "out")
    generate(config)
    before = contents(tmp_path / "out")
    others = {
        "sampling.num_inference_steps=2, not 3": {"sampling": dataclasses.replace(SAMPLING, num_inference_steps=3)},
        "sampling.max_text_tokens=16, not 24": {"sampling": dataclasses.replace(SAMPLING, max_text_tokens=24)},
        "seed=7, not 8": {"seed": 8},
        "recipe.*bf16.*attn_qat": {"recipe": "attn_qat"},
        "dtype='torch.float32', not 'torch.bfloat16'": {"runtime": GenerationRuntimeConfig(device="cpu", dtype="bfloat16")},
    }
    rendered.clear()
    for words, changes in others.items():
        with pytest.raises(UserError, match=f"{words}.*overwrite=true"):
            generate(dataclasses.replace(config, **changes))
    change_weights(folder / "transformer", {"proj_out.bias": lambda w: w + 1})
    with pytest.raises(UserError, match="model_fingerprint"):
        generate(config)
    assert (rendered, contents(tmp_path / "out")) == ([], before)
    assert generate(dataclasses.replace(config, overwrite=True))["rendered"] == 1
    assert contents(tmp_path / "out") != before
    assert generate(dataclasses.replace(config, overwrite=True))["skipped"] == 1  # the same settings now
    (tmp_path / "out" / "a cat-0.json").write_text('{"my": "notes"}')
    with pytest.raises(UserError, match=r"a cat-0\.json is none of generate's"):
        generate(config)


def poison(monkeypatch, errors: dict[tuple[str, int], BaseException]) -> None:
    """Makes the engine raise for some (prompt, seed)."""
    original = Engine.generate

    def poisoned(self, prompt, seed, *args, **options):
        if (prompt, seed) in errors:
            raise errors[prompt, seed]
        return original(self, prompt, seed, *args, **options)

    monkeypatch.setattr(Engine, "generate", poisoned)


def test_failures_are_listed_the_others_go_on_and_the_exit_code_tells(config, tmp_path, monkeypatch, capsys):
    words = ["generate", f"model={config.model}", f"prompts={config.prompts}", f"out={config.out}", "seed=7", "runtime.device=cpu"]
    words += [f"sampling.{key}={getattr(SAMPLING, key)}" for key in ("num_frames", "height", "width", "num_inference_steps", "max_text_tokens")]
    with monkeypatch.context() as patch:
        poison(patch, {(PROMPTS[0], 7): NonFiniteVideo("latents became NaN"), (PROMPTS[2], 9): ZeroDivisionError("in some tokenizer")})
        assert main(words) == 1
    shown = capsys.readouterr()
    assert "failed: a sneaker moves left-0.mp4: latents became NaN" in shown.err
    assert "3 videos, 1 rendered now, 0 there already, 2 failed" in shown.err
    assert "failed: 2" in shown.out
    assert list(contents(tmp_path / "out")) == [f"{NAMES[1]}-0.mp4"]
    first, second = map(json.loads, (tmp_path / "out" / "failed.jsonl").read_text().splitlines())
    assert first == {
        **{"video": f"{NAMES[0]}-0.mp4", "prompt": PROMPTS[0], "line": 2, "index": 0, "seed": 7},
        **{"error": "latents became NaN", "traceback": ""},
    }
    assert second["error"] == "ZeroDivisionError: in some tokenizer"
    assert "poisoned" in second["traceback"]
    assert [v["video"] for v in json.loads((tmp_path / "out" / "manifest.json").read_text())["videos"]] == [f"{NAMES[1]}-0.mp4"]
    assert main(words) == 0
    assert "3 videos, 2 rendered now, 1 there already, 0 failed" in capsys.readouterr().err
    assert not (tmp_path / "out" / "failed.jsonl").exists()


def test_a_full_disk_ends_it_and_what_is_finished_stays(config, monkeypatch):
    written = []

    def full(path, frames, fps):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        Path(path).write_bytes(b"a video")

    monkeypatch.setattr(single, "write_video", full)
    with pytest.raises(UserError, match="a sneaker moves left-1 can't be written: No space left on device; what is finished stays"):
        generate(config)
    assert sorted(path.name for path in Path(config.out).glob("a*")) == [f"{NAMES[0]}-0.json", f"{NAMES[0]}-0.mp4"]


def test_folders_of_others_are_left_alone(config, monkeypatch):
    monkeypatch.setattr(batch, "Engine", None)
    out = Path(config.out)
    out.mkdir()
    (out / f"{NAMES[0]}-0.mp4").write_text("mine")
    for run in (plan, generate):
        with pytest.raises(UserError, match="holds something else"):
            run(config)
    (out / f"{NAMES[0]}-0.mp4").unlink()
    with open(out / batch.MARK, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another generate prompts=FILE is at work"):
            generate(config)
    assert [path.name for path in out.iterdir()] == [batch.MARK]


# --- several processes


def on_ranks(config: GenerateConfig, poisoned: int | None = None, killed: int | None = None) -> tuple[dict, list[int]]:
    """What generate returns on a rank, and the seeds it rendered; seed `poisoned` gives NaN, with seed `killed` the rank ends."""
    seeds: list[int] = []
    original = Engine.generate

    def watched(self, prompt, seed, *args, **options):
        if seed == killed:
            os._exit(9)
        if seed == poisoned:
            raise NonFiniteVideo("latents became NaN")
        seeds.append(seed)
        return original(self, prompt, seed, *args, **options)

    Engine.generate = watched
    return generate(config), seeds


@pytest.mark.dist
def test_two_processes_make_the_videos_of_one(config, finished):
    first, second = run_ranks(on_ranks, 2, config, 8)
    assert first[0] == second[0]
    assert [first[0][key] for key in ("videos", "rendered", "failed", "ranks", "exit_code")] == [6, 5, 1, 2, 1]
    assert (first[1], second[1]) == ([7, 9, 11], [10, 12])
    (failure,) = (Path(config.out) / "failed.jsonl").read_text().splitlines()
    assert json.loads(failure)["seed"] == 8
    first, second = run_ranks(on_ranks, 2, config)
    assert [first[0][key] for key in ("rendered", "skipped", "failed", "exit_code")] == [1, 5, 0, 0]
    assert (first[1], second[1]) == ([8], [])
    assert contents(Path(config.out)) == contents(finished)
    manifest = json.loads((Path(config.out) / "manifest.json").read_text())
    keys = ("video", "record", "prompt", "line", "index", "seed")
    theirs = json.loads((finished / "manifest.json").read_text())["videos"]
    assert [[v[k] for k in keys if k != "line"] for v in manifest["videos"]] == [[v[k] for k in keys if k != "line"] for v in theirs]


@pytest.mark.dist
def test_a_lost_process_ends_all_and_one_goes_on_from_there(config, finished, rendered):
    found = outcomes(on_ranks, 2, config, None, 10)
    assert found[1].exit_code == 9
    assert found[0].exit_code == 1
    assert "WorkerLost: generate: another process ended" in found[0].error
    done = contents(Path(config.out))
    assert {f"{NAMES[0]}-0.mp4", f"{NAMES[0]}-1.mp4"} <= set(done)
    assert f"{NAMES[1]}-1.mp4" not in done
    result = generate(config)
    assert (result["skipped"], result["rendered"]) == (len(done), 6 - len(done))
    assert len(rendered) == 6 - len(done)
    assert contents(Path(config.out)) == contents(finished)
