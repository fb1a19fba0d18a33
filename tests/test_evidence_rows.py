"""The table of the evidence in small: trainings and rows in processes of their own, resumed row by row."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.evidence import in_this_process
from helpers.videos import random_st_lpips
from safetensors.torch import load_file, save

from videoqat.config import EvidenceConfig, MeasureConfig, Row, RuntimeConfig, SamplingConfig, TrainConfig, Training, load, to_dict
from videoqat.errors import AttentionError, ConfigError
from videoqat.evaluation import evidence_run
from videoqat.evaluation.evidence import measure
from videoqat.evaluation.evidence_run import gather, jobs, missing, plan, run, wanted

TRAIN = ["train.batch_size=2", "train.compute_dtype=float32", "train.health_every=0", "train.save_every=100"]
TRAININGS = [Training("bf16", "bf16", 3, 1e-3), Training("qat", "attn_qat", 3, 1e-3)]
ROWS = [Row("NVFP4", "bf16", "attn_qat"), Row("BF16", "bf16", "bf16"), Row("base", "", "bf16"), Row("Attn-QAT", "qat", "attn_qat")]


@pytest.fixture(scope="module")
def made(tiny_pipeline: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[EvidenceConfig, dict]:
    """Two trainings of three steps and four rows, with one video each."""
    out = tmp_path_factory.mktemp("evidence")
    (out / "prompts.txt").write_text("a sneaker moves left\n")
    config = EvidenceConfig(
        base=str(tiny_pipeline), cache=str(tiny_cache), held_out=str(tiny_cache), out=str(out / "table"), trainings=TRAININGS, rows=ROWS,
        reference="BF16", plain="NVFP4", seeds=[3], train=TRAIN, samples=4, timesteps=2, prompts=str(out / "prompts.txt"),
        st_lpips=str(random_st_lpips(out / "st_lpips.pth")), sampling=SamplingConfig(num_frames=17, height=32, width=32, num_inference_steps=1),
    )  # fmt: skip
    assert len(plan(config)["missing"]) == 4
    with in_this_process():
        return config, run(config)


def test_rows_hold_what_the_commands_give(made: tuple[EvidenceConfig, dict]) -> None:
    told = made[1]
    assert told["problems"] == []
    assert told["exit_code"] == 0
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["NVFP4"]["kernels"] == ["sdpa", "torch"]
    assert set(rows) == {"NVFP4", "BF16", "base", "Attn-QAT"}
    losses = {name: row["clip_losses"] for name, row in rows.items()}
    assert all(len(clips) == 4 for clips in losses.values())
    assert losses["BF16"] != losses["NVFP4"]  # the same weights, other attention
    assert losses["BF16"] != losses["base"]  # other weights, the same attention
    assert rows["Attn-QAT"]["recipe"]["name"] == "attn_qat"
    assert {training["name"]: len(training["grad_norm"]) for training in told["trainings"]} == {"bf16": 3, "qat": 3}
    for name, row in rows.items():
        (video,) = row["videos"]
        assert video["seed"] == 3000
        assert video["fidelity"]["identical"] is (name == "BF16")  # the floor: rendered again, the same
        assert row["judged"]["videos"] == 1
        assert (video["fidelity"]["st_lpips_mean"] > 0) is (name != "BF16")
        assert set(row["st_lpips"]) == {"sha256"}
    assert rows["NVFP4"]["videos"][0]["fidelity"]["ssim_mean"] < 1


@pytest.mark.parametrize("negative", ["", 'no "text", no: marks'])
def test_a_row_is_sampled_as_its_table_says(made: tuple[EvidenceConfig, dict], negative: str) -> None:
    sampling = SamplingConfig(17, 32, 32, num_inference_steps=1, negative_prompt=negative, dynamic_guidance=True)
    (job,) = jobs(replace(made[0], rows=[Row("base")], reference="", plain="", seeds=[5], sampling=sampling))
    words = [word for word in job.commands[0][0][2:] if word != evidence_run.DEVICE]
    assert load(MeasureConfig, None, words).sampling == sampling


def test_rows_rendered_in_batches_are_held_against_such_rows_alone(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    config, _ = made
    (tmp_path / "prompts.txt").write_text("a sneaker moves left\na bag moves up\na dress moves left\n")
    given = {"model": config.base, "cache": config.held_out, "samples": 3, "timesteps": 2, "seed": 5, "sampling": config.sampling}
    given |= {"prompts": str(tmp_path / "prompts.txt"), "st_lpips": "none"}
    batched = measure(MeasureConfig(**given, out=str(tmp_path / "batched"), videos_at_once=2, clips_at_once=2))
    single = measure(MeasureConfig(**given, out=str(tmp_path / "single")))
    assert batched["clip_losses"] == pytest.approx(single["clip_losses"], rel=1e-5)
    assert [(video["prompt"], video["seed"]) for video in batched["videos"]] == [(video["prompt"], video["seed"]) for video in single["videos"]]
    assert [video["fidelity"]["identical"] for video in batched["videos"]] == [True] * 3  # the floor is rendered likewise
    assert batched["four_bit_share"] == single["four_bit_share"]
    with pytest.raises(ConfigError, match=r"videos_at_once=1 is not legal; legal: 2, as .*batched was rendered"):
        measure(MeasureConfig(**given, out=str(tmp_path / "other"), reference=str(tmp_path / "batched")))
    (tmp_path / "others.txt").write_text("a sneaker moves left\na bag moves down\n")
    for change, words in (
        ({"seed": 6}, r"video 0=\('a sneaker moves left', 6\) is not legal; legal: \('a sneaker moves left', 5\), as .*single"),
        ({"prompts": str(tmp_path / "others.txt")}, r"video 1=\('a bag moves down', 6\) is not legal; legal: \('a bag moves up', 6\)"),
        (
            {"sampling": replace(config.sampling, guidance_scale=2.0)},
            r"sampling.guidance_scale=2.0 is not legal; legal: 3.0, as .*single was rendered",
        ),
        ({"reference": str(tmp_path / "torn")}, "is no row that `evidence measure` wrote"),
    ):  # PSNR of what has other seeds, captions or guidance says nothing of a recipe
        shutil.copytree(tmp_path / "single", tmp_path / "torn", dirs_exist_ok=True)
        (tmp_path / "torn" / "result.json").write_text("[]")
        with pytest.raises(ConfigError, match=words):
            measure(MeasureConfig(**{**given, "reference": str(tmp_path / "single"), **change}, out=str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()


def test_the_same_command_again_makes_only_what_is_missing(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    config, told = made
    (Path(config.out) / "rows" / "attn-qat-seed3" / "result.json").unlink()
    assert plan(config)["missing"] == [str(Path(config.out) / "rows" / "attn-qat-seed3")]
    with in_this_process() as begun:
        again = run(config)
    assert [words[:2] for words in begun] == [["evidence", "measure"]]
    shutil.copytree(Path(config.out) / "rows", tmp_path / "kept" / "rows")
    other = replace(config, out=str(tmp_path / "kept"), runtime=RuntimeConfig("cpu", kernel="sdpa"))
    assert plan(other)["missing"] == []  # what is measured can be gathered where its kernels can't be had
    with pytest.raises(AttentionError, match="kernel='sdpa' can't serve recipe 'attn_qat'"):
        plan(replace(other, rows=[*ROWS[1:], Row("new", "qat")], plain=""))
    with in_this_process() as begun:  # where nothing but the results was kept
        kept = run(replace(config, out=str(tmp_path / "kept")))
    assert begun == []
    assert [row["name"] for row in kept["rows"]] == [row["name"] for row in told["rows"]]
    assert [training["grad_norm"] for training in kept["trainings"]] == [[], []]
    shutil.copy(Path(config.out) / "evidence.json", tmp_path / "kept")  # and what had been gathered, with logs that are gone
    with in_this_process():
        kept = run(replace(config, out=str(tmp_path / "kept")))
    assert kept["trainings"] == again["trainings"]
    assert [len(training["grad_norm"]) for training in kept["trainings"]] == [3, 3]
    assert [row["clip_losses"] for row in again["rows"]] == [row["clip_losses"] for row in told["rows"]]


def test_what_a_name_stands_for_cannot_change(made: tuple[EvidenceConfig, dict]) -> None:
    config, _ = made
    more = replace(config, rows=[*ROWS, Row("MXFP4", "bf16", "mxfp4")], seeds=[3, 4], minutes=1e-9)
    with pytest.raises(ConfigError, match=r"training 'qat'|trainings 'qat'"):
        run(replace(config, trainings=[TRAININGS[0], replace(TRAININGS[1], steps=4)]))
    with pytest.raises(ConfigError, match="samples=5"):
        run(replace(config, samples=5))
    with pytest.raises(ConfigError, match=r"st_lpips={'absent': 'st_lpips=none'} .*sha256.*or another out"):
        run(replace(config, st_lpips="none"))
    told = run(more)  # no time: nothing is begun, and what is there is gathered
    assert told["exit_code"] == 1
    assert all("the time is over" in problem for problem in told["problems"])
    assert len(told["rows"]) == 4


@pytest.mark.parametrize(("setting", "key", "first"), [("base", "weights", "base"), ("held_out", "clips", "bf16")])
def test_base_and_clips_cannot_change_under_their_paths(
    made: tuple[EvidenceConfig, dict], setting: str, key: str, first: str, tmp_path: Path
) -> None:
    """One small tensor, or one caption: any row's record tells, and so does the table's. What was measured before they did is gone on with."""
    folder, out = tmp_path / setting, tmp_path / "table"
    shutil.copytree(getattr(made[0], setting), folder)
    shutil.copytree(Path(made[0].out) / "rows", out / "rows")
    config = replace(made[0], out=str(out), **{setting: str(folder)})
    results = {file: json.loads(file.read_text()) for file in sorted(out.glob("rows/*/result.json"))}
    weights = {file.parent.name: result["sources"]["weights"]["transformer"] for file, result in results.items()}
    assert weights["bf16-seed3"] == weights["nvfp4-seed3"]  # of one training
    assert len(set(weights.values())) == 3
    assert len({result["sources"]["clips"] for result in results.values()}) == 1
    for shard in folder.glob("shards/*"):  # latents that were made again elsewhere
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert plan(config)["missing"] == []

    file = folder / ("index.json" if key == "clips" else "transformer/diffusion_pytorch_model.safetensors")
    before, changed = file.read_bytes(), file.read_bytes().replace(b"moves left", b"moves down", 1)
    if key == "weights":
        tensors = load_file(file)
        changed = save({**tensors, "blocks.1.norm2.bias": tensors["blocks.1.norm2.bias"] + 1}, {"format": "pt"})
    words = rf"{setting}='{folder}' is not legal; legal: a folder with the {key} that {out}/%s is of; or another out"
    file.write_bytes(changed)
    for refused in (plan, run):
        with pytest.raises(ConfigError, match=words % f"rows/{first}-seed3/result.json"):
            refused(config)
    assert not (out / "settings.json").exists()
    for place, result in results.items():
        place.write_text(json.dumps({name: value for name, value in result.items() if name != "sources"}))
    assert plan(config)["missing"] == []
    file.write_bytes(before)
    run(config)
    file.write_bytes(changed)
    with pytest.raises(ConfigError, match=words % "settings.json"):
        plan(config)
    settings = json.loads((out / "settings.json").read_text())
    del settings["sources"]
    (out / "settings.json").write_text(json.dumps(settings))
    assert len(run(config)["rows"]) == 4


def test_a_recipe_cannot_change_in_its_file(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: attn_qat\nname: mine\n")
    for trained, rows in (("bf16", [*ROWS, Row("mine", "bf16", str(tmp_path / "mine.yaml"))]), (str(tmp_path / "mine.yaml"), ROWS)):
        trainings = [TRAININGS[0], replace(TRAININGS[1], recipe=trained)]
        config = replace(made[0], out=str(tmp_path / trained[-4:]), trainings=trainings, rows=rows, minutes=1e-9)  # no time: nothing is begun
        run(config)
        (tmp_path / "mine.yaml").write_text("base: mxfp4\nname: mine\n")
        with pytest.raises(ConfigError, match=r"recipe of (row 'mine'|training 'qat')={.*'mxfp4'.*legal: {.*'nvfp4'.*as in"):
            run(config)
        (tmp_path / "mine.yaml").write_text("base: attn_qat\nname: mine\n")
        run(config)


def test_a_training_that_fails_in_its_process_is_told(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    broken = Training("broken", "bf16", 1, 1e-3, ["train.batch_size=1000"])
    rows = [Row("broken", "broken"), Row("broken too", "broken", "attn_qat")]
    told = run(replace(made[0], out=str(tmp_path / "table"), trainings=[broken], rows=rows, plain="", reference="", at_once=2))
    assert told["rows"] == []
    (problem,) = told["problems"]
    assert "broken-seed3: train" in problem
    assert "batch_size=1000" in problem
    assert told["exit_code"] == 1


def test_jobs_stand_in_the_order_of_their_urgency(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    """Rows before trainings, the reference's before others; a row needs its weights and, for its videos, the reference's row."""
    more = [Training("longer", "attn_qat", 4)]
    config = replace(made[0], out=str(tmp_path), seeds=[0, 1], trainings=TRAININGS + more, rows=[*ROWS, Row("longer", "longer", videos=False)])
    some = jobs(config)
    rows = ["bf16", "nvfp4", "base", "attn-qat", "longer"]
    assert [job.name for job in some[:10]] == [f"{name}-seed{seed}" for name in rows for seed in (0, 1)]
    assert [job.name for job in some[10:]] == [f"{name}-seed{seed}" for name in ("bf16", "longer", "qat") for seed in (0, 1)]
    needs = {job.name: [str(path.relative_to(tmp_path)) for path in job.needs if tmp_path in path.parents] for job in some}
    assert needs["bf16-seed1"] == []  # the training's: the row of that name comes first
    assert [str(path.relative_to(tmp_path)) for path in some[1].needs] == ["trainings/bf16-seed1/model"]
    assert needs["nvfp4-seed1"] == ["trainings/bf16-seed1/model", "rows/bf16-seed1/result.json"]
    assert needs["base-seed1"] == ["rows/bf16-seed1/result.json"]
    assert needs["longer-seed0"] == []
    assert "prompts" not in " ".join(some[8].commands[0][0])


def test_the_base_is_measured_once_where_no_video_would_differ(made: tuple[EvidenceConfig, dict]) -> None:
    config = replace(made[0], seeds=[0, 1], rows=[*ROWS, Row("base NVFP4", "", "attn_qat", videos=False)])
    assert [seed for row, seed in wanted(config) if row.name == "base"] == [0, 1]
    assert [seed for row, seed in wanted(config) if row.name == "base NVFP4"] == [0]
    assert [seed for row, seed in wanted(replace(config, prompts="")) if row.name == "base"] == [0]


def test_rows_of_weights_that_must_be_trained_again_are_measured_again(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    """BF16 and NVFP4 share weights; of these only the results were kept, and one is missing."""
    shutil.copytree(Path(made[0].out) / "rows", tmp_path / "rows")
    shown = replace(made[0], out=str(tmp_path))
    assert missing(shown) == []
    (tmp_path / "rows" / "nvfp4-seed3" / "result.json").unlink()
    # BF16 is the reference: of its new weights it makes other videos, and nothing may stand that was held against the old ones.
    assert [row.name for row, _ in missing(shown)] == ["BF16", "NVFP4", "base", "Attn-QAT"]
    hidden = [replace(row, videos=row.name in ("BF16", "NVFP4")) for row in shown.rows]
    assert [row.name for row, _ in missing(replace(shown, rows=hidden))] == ["BF16", "NVFP4"]
    config = replace(shown, prompts="")
    assert [row.name for row, _ in missing(config)] == ["BF16", "NVFP4"]
    assert [job.name for job in jobs(config)] == ["bf16-seed3", "nvfp4-seed3", "bf16-seed3"]
    told = run(replace(config, minutes=1e-9))  # no time
    assert [row["name"] for row in told["rows"]] == ["base", "Attn-QAT"]  # the old one is gone: it must not stand beside the new


def test_places_are_filled_as_soon_as_what_a_job_needs_is_there(made: tuple[EvidenceConfig, dict], tmp_path: Path) -> None:
    """Three places: both trainings and the base's row begin at once; what fails blocks only what needs it."""
    order: list[str] = []
    together = threading.Barrier(3, timeout=60)  # passed only if all three are at work at once

    def command(runner: evidence_run._Runner, words: list[str], log: Path) -> str | None:
        order.append(log.parent.name + ("" if words[0] == "evidence" else f" {words[0]}"))
        if order[-1] in ("base-seed3", "bf16-seed3 train", "qat-seed3 train"):
            together.wait()
        if "trainings/qat-seed3" in str(log):
            return "failed"
        target = log.parent / ("result.json" if words[0] == "evidence" else "model")
        if words[0] != "train":
            target.touch()
        return None

    rows = [replace(row, videos=row.name != "base") for row in ROWS]
    config = replace(made[0], out=str(tmp_path), rows=rows, at_once=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence_run._Runner, "_command", command)
        problems = evidence_run._Runner(config).run(jobs(config))
    assert problems == ["qat-seed3: train failed"]
    assert set(order[:3]) == {"base-seed3", "bf16-seed3 train", "qat-seed3 train"}
    assert order[3:] == ["bf16-seed3 export", "bf16-seed3", "nvfp4-seed3"]


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_table_that_is_interrupted_ends_what_it_runs_and_begins_nothing_more(
    made: tuple[EvidenceConfig, dict], at_once: int, wish: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that saves when it is told to stop, in the place of each command."""
    told, program = tmp_path / "told", tmp_path / "training"
    program.write_text(f"#!/bin/sh\ntrap 'echo saved >> {told}; exit 75' TERM\necho begun >> {told}\nfor i in $(seq 100); do sleep 0.1; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def interrupt() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and (not told.exists() or told.read_text().count("begun") < at_once):
            time.sleep(0.02)
        os.kill(os.getpid(), wish)

    some = [evidence_run.Job(f"job {i}", ((["train"], tmp_path / "log"),)) for i in range(4)]
    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        evidence_run._Runner(replace(made[0], at_once=at_once)).run(some)
    assert told.read_text().split() == ["begun"] * at_once + ["saved"] * at_once
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_trained_in_4_bits_from_the_first_step_differs_from_the_base_in_that_alone(tiny_pipeline: Path, tiny_cache: Path) -> None:
    given = [f"{key}={value}" for key, value in {"base": tiny_pipeline, "cache": tiny_cache, "held_out": tiny_cache, "out": "table"}.items()]
    config = load(EvidenceConfig, "evidence/more", given)
    (training,) = [training for training in config.trainings if "from_scratch=true" in training.settings]
    model = [f"model.path={tiny_pipeline}", f"cache={tiny_cache}", "out=run"]
    told = [f"recipe={training.recipe}", f"train.steps={training.steps}", f"optimizer.lr={training.lr}", *config.train, *training.settings]
    mine, base = to_dict(load(TrainConfig, None, [*model, *told])), to_dict(load(TrainConfig, "evidence/base", model))
    assert (mine.pop("recipe"), base.pop("recipe")) == ("attn_qat", "bf16")
    for key in ("log_every", "save_every", "keep_last", "profile_every"):  # what the weights don't depend on
        del mine["train"][key], base["train"][key]
    assert mine == base


@pytest.mark.parametrize("name", ["main", "tuning", "ablations", "options", "more", "short"])
def test_shipped_tables_are_legal(name: str, tiny_pipeline: Path, tiny_cache: Path) -> None:
    given = {"base": tiny_pipeline, "cache": tiny_cache, "held_out": tiny_cache, "out": "table"}
    config = load(EvidenceConfig, f"evidence/{name}", [f"{key}={value}" for key, value in given.items()])
    of_base = sum(not row.training for row in config.rows)
    assert len(wanted(config)) == (len(config.rows) - of_base) * len(config.seeds) + of_base  # without captions
    assert {row.training for row in config.rows} - {""} == {training.name for training in config.trainings}
    # A gap is what attention costs, and not what more steps win, only between weights trained as long; the plain row's, of the same weights.
    steps, rows = {"": 0, **{training.name: training.steps for training in config.trainings}}, {row.name: row for row in config.rows}
    steps |= {training.name: 0 for training in config.trainings if "from_scratch=true" in training.settings}  # as long as the base: see the next test
    distilled = {training.name for training in config.trainings if "objective.distill_weight=1" in training.settings}
    for row in config.rows:
        reference = rows[row.reference or config.reference]
        # In short, BF16 is the base, what 4 bits are distilled from, and the other row shows that losses fall. Where the base's prediction is all
        # that the loss asks for, more steps win nothing but that: the base is what such weights are in BF16 at best.
        as_long = name == "short" or steps[reference.training] == steps[row.training] or (row.training in distilled and not reference.training)
        assert (reference.recipe, as_long) == ("bf16", True), row.name
        if row is not reference:
            plain = rows[row.plain or config.plain]
            assert (plain.recipe, plain.training) == ("attn_qat", reference.training), row.name
    model = [f"model.path={tiny_pipeline}", f"cache={tiny_cache}", "out=run"]
    for training in config.trainings:
        load(TrainConfig, None, [*model, f"recipe={training.recipe}", *config.train, *training.settings])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ROWS[:1]}, "two or more"),
        ({"rows": [ROWS[0], ROWS[0]]}, "names that differ"),
        ({"rows": [ROWS[0], Row("a b"), Row("A_b")]}, "names that differ, not only in capitals"),
        ({"trainings": [*TRAININGS, Training("QAT")]}, "trainings=.* names that differ, not only in capitals"),
        ({"rows": [ROWS[0], Row("x", "nowhere")]}, "training of 'x'='nowhere'"),
        ({"trainings": [TRAININGS[0], replace(TRAININGS[1], settings=["train.step=4"])]}, "trainings: 'qat': .*did you mean train.steps"),
        ({"train": ["optimizer.beta2=2"]}, "trainings: 'bf16': optimizer.beta2=2"),
        ({"reference": "nobody"}, "reference='nobody'"),
        ({"seeds": []}, "seeds"),
        ({"rows": [ROWS[0], Row("a/b")]}, "names of letters"),
        ({"sampling": SamplingConfig(num_frames=5, height=32, width=32)}, "sampling.num_frames=5 is not legal; legal: 17, which the judges"),
    ],
)
def test_bad_tables_are_refused_before_anything_is_begun(made: tuple[EvidenceConfig, dict], change: dict, words: str, tmp_path: Path) -> None:
    config = replace(made[0], out=str(tmp_path / "none"), **{"reference": "", "plain": "", **change})
    with pytest.raises(ConfigError, match=words):
        run(config)
    assert not (tmp_path / "none").exists()


def test_videos_too_small_to_be_compared_are_refused(made: tuple[EvidenceConfig, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = made[0]
    monkeypatch.setattr("videoqat.evaluation.fidelity.SMALLEST", 33)  # as if they were smaller than the window of SSIM
    given = {"model": config.base, "cache": config.held_out, "prompts": config.prompts, "sampling": config.sampling}
    for refused in (lambda: plan(config), lambda: measure(MeasureConfig(**given, out=str(tmp_path / "row")))):
        with pytest.raises(ConfigError, match="height x width='32x32' is not legal; legal: 33 or more"):
            refused()
    assert not (tmp_path / "row").exists()


def test_gathering_needs_no_process(made: tuple[EvidenceConfig, dict]) -> None:
    config, told = made
    assert [row["name"] for row in gather(config)["rows"]] == [row["name"] for row in told["rows"]]
