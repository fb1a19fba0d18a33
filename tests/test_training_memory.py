"""The estimate of memory, held against what training really allocates; warnings; and the numbers in the documentation."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engines import tiny_job
from helpers.pipelines import weightless_wan

from videoqat.config import DoctorConfig, ExampleModelConfig, LoopConfig, ParallelConfig, TrainConfig, load
from videoqat.doctor import doctor
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import Layout, open_mesh, resolve_layout
from videoqat.recipes import get_recipe
from videoqat.training import memory, trainer
from videoqat.training.engines import Engine, make_engine
from videoqat.training.memory import GIB, memory_per_gpu
from videoqat.training.throughput import forward_cost

BUCKET, TEXT = "9x128x128", 226

ROOT = Path(__file__).resolve().parent.parent
# Configuration, size of the model, bucket: the rows of docs/parallelism.md's first table.
SHIPPED = [
    *((f"train/wan2.1-1.3b-{name}", "1.3b", "77x480x832") for name in ("1gpu", "80gb", "4gpu", "8gpu", "16gpu")),
    ("train/wan2.1-14b-64gpu", "14b", "77x720x1280"),
]


@pytest.fixture(scope="module", params=["wan", "cogvideox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("memory") / request.param
    build_pipeline(ExampleModelConfig(out=str(out), family=request.param, num_layers=3, num_heads=2, head_dim=32))
    return out


class _Allocated:
    """Bytes that torch allocated in a block and didn't free, and the most that there were at a time."""

    def __enter__(self) -> "_Allocated":
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        events = [event for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        self.left = self.most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.most = max(self.most, self.left)


def _forward(engine: Engine, job: Any, folder: Path) -> torch.Tensor:
    geometry = job.family.geometry(folder)
    size = tuple(map(int, BUCKET.split("x")))
    condition = {"text": torch.zeros(2, TEXT, geometry.text_dim)}
    return job.family.forward(engine.transformer, torch.zeros(2, *geometry.latent_shape(*size)), torch.full((2,), 0.5), condition)


CASES = [("bf16", "bfloat16", "none"), ("bf16", "bfloat16", "full"), ("bf16", "float32", "keep_attention"), ("attn_qat", "bfloat16", "none"),
         ("attn_qat", "bfloat16", "keep_attention")]  # fmt: skip


@pytest.mark.parametrize(("recipe", "dtype", "mode"), CASES)
def test_the_estimate_is_near_what_is_allocated(folder: Path, recipe: str, dtype: str, mode: str) -> None:
    changes = {"train__compute_dtype": dtype, "train__activation_checkpointing": mode, "train__batch_size": 2}
    job = tiny_job(folder, recipe, from_scratch=True, **changes)
    cost = forward_cost(str(folder), "transformer", BUCKET, TEXT, get_recipe(recipe), dtype)
    estimate = memory_per_gpu(
        cost, job.recipe, Layout(1, 1, 1), job.config.train, job.config.parallel, ema=False, kernel="sdpa" if recipe == "bf16" else "torch"
    )
    with open_mesh(job.config.parallel, torch.device("cpu")) as mesh:
        engine = make_engine(job, mesh)
        with _Allocated() as forward:
            loss = _forward(engine, job, folder).float().square().mean()
        with _Allocated() as backward:
            engine.backward(loss, last=True)
        del engine
    kept = estimate["activations"]
    if mode != "none":  # the block that is computed again is not there yet
        kept -= 2 * max(part.kept_bytes for part in cost.blocks)
    gathered = (2 if dtype == "bfloat16" else 4) * cost.parameters
    assert forward.left - gathered == pytest.approx(kept, rel=0.1)
    if recipe == "bf16":  # the emulation's own buffers are large beside so small a model
        most = forward.left + backward.most
        expected = estimate["activations"] + estimate["gathered"] + estimate["gradients"]
        assert 0.6 * expected < most < 1.1 * expected


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "full", "keep_attention"])
@pytest.mark.parametrize("recipe", ["bf16", "attn_qat"])
def test_the_estimate_is_near_what_a_gpu_allocates(tmp_path: Path, recipe: str, mode: str) -> None:
    out = tmp_path / "wan"
    build_pipeline(ExampleModelConfig(out=str(out), num_layers=8, num_heads=8, head_dim=128))
    changes = {"train__compute_dtype": "bfloat16", "train__activation_checkpointing": mode, "runtime__device": "cuda"}
    job = tiny_job(out, recipe, from_scratch=True, **changes)
    geometry = job.family.geometry(out)
    cost = forward_cost(str(out), "transformer", "61x256x256", 512, get_recipe(recipe))
    estimate = memory_per_gpu(
        cost, job.recipe, Layout(1, 1, 1), job.config.train, job.config.parallel, ema=False, kernel="sdpa" if recipe == "bf16" else "triton"
    )
    with open_mesh(job.config.parallel, torch.device("cuda")) as mesh:
        engine = make_engine(job, mesh)
        x_BCFHW = torch.zeros(1, *geometry.latent_shape(61, 256, 256), device=mesh.device)
        condition = {"text": torch.zeros(1, 512, geometry.text_dim, device=mesh.device)}
        for last in (False, True, False, True):  # two steps of two micro-batches
            torch.cuda.reset_peak_memory_stats()
            prediction = job.family.forward(engine.transformer, x_BCFHW, torch.full((1,), 0.5, device=mesh.device), condition)
            engine.backward(prediction.float().square().mean(), last=last)
            if last:
                engine.update(1e-6, engine.gradient_norm(), 1)
        most = torch.cuda.max_memory_allocated()
        del engine
    assert most == pytest.approx(estimate["total"], rel=0.2)


def _estimate(folder: Path, layout: tuple[int, int, int], mode: str = "full", **loop: Any) -> dict[str, int]:
    cost = forward_cost(str(folder), "transformer", BUCKET, TEXT, get_recipe("attn_qat"))
    parallel = ParallelConfig(**loop.pop("parallel", {}))
    settings = LoopConfig(activation_checkpointing=mode, **loop)
    return memory_per_gpu(cost, get_recipe("attn_qat"), Layout(*layout), settings, parallel, ema=True, kernel="triton")


def test_each_degree_divides_what_it_should(folder: Path) -> None:
    one = _estimate(folder, (1, 1, 1))
    for layout in ((1, 4, 1), (1, 2, 2), (8, 4, 1)):
        sharded = _estimate(folder, layout)
        for part in ("weights", "gradients", "moments", "ema"):
            assert sharded[part] == one[part] // 4
        assert sharded["activations"] == pytest.approx(one["activations"] / layout[2], abs=1)
        assert sharded["gathered"] < one["gathered"]
    assert _estimate(folder, (8, 1, 1)) == one
    assert _estimate(folder, (1, 1, 1), batch_size=3)["activations"] == 3 * one["activations"]


def test_modes_of_checkpointing_are_in_order(folder: Path) -> None:
    none, kept, full, away = (
        _estimate(folder, (1, 1, 1), mode, offload_block_inputs=offload)["activations"]
        for mode, offload in (("none", False), ("keep_attention", False), ("full", False), ("full", True))
    )
    assert none > kept > full > away


def test_zero_stages(folder: Path) -> None:
    first, second, third = (_estimate(folder, (1, 4, 1), parallel={"engine": "deepspeed", "zero_stage": stage}) for stage in (1, 2, 3))
    assert first["weights"] == second["weights"] > third["weights"]
    assert first["gradients"] == 4 * second["gradients"]
    assert first["moments"] == second["moments"] == third["moments"] == _estimate(folder, (1, 4, 1))["moments"]


def test_a_layout_that_can_not_fit_is_told(make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planned = trainer.plan(make("run"))
    assert planned["memory_limit_bytes"] == 79 * GIB
    assert "WARNING" not in capsys.readouterr().err
    monkeypatch.setattr(memory, "ASSUMED_GPU", ("a small GPU", planned["memory_bytes"]["total"] - 1))
    trainer.plan(make("run"))
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "WARNING: this layout (1 = dp_replicate 1 * dp_shard 1 * sp 1) needs about 0 GiB on each GPU (weights 0.0, gradients 0.0, " in said
    assert "a small GPU has 0 GiB; what would help: a larger parallel.dp_shard" in said


def test_the_limit_is_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * GIB))
    monkeypatch.setattr(memory, "device_name", lambda _: "NVIDIA H200")
    assert memory.gpu_limit(torch.device("cuda")) == memory.Limit("NVIDIA H200", 141 * GIB)


def test_doctor_tells_degrees_and_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = doctor(DoctorConfig(model=str(folder), size="9x64x64"))["transformer"]
    assert described["sequence_parallel_degrees"] == [1, 2]
    rows = described["training_memory"]
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8, 8, 16, 64, 64]
    for row in rows:
        assert 0 < row["bytes"]["full"] < row["bytes"]["keep_attention"] < row["bytes"]["none"]
        shards = row["layout"]["dp_shard"] * row["layout"]["sp"]
        assert row["teacher_bytes"] == 2 * described["parameters"] // shards
    assert "64 = dp_replicate 8 * dp_shard 4 * sp 2: full 0.0, keep_attention 0.0, none 0.0; a teacher adds 0.0" in capsys.readouterr().err


def _matrix(tmp_path: Path) -> list[str]:
    """The table of the shipped configurations, from what the estimate says of them."""
    lines = [
        "| configuration | GPUs | dp_replicate x dp_shard x sp | samples a step | checkpointing | GiB on each GPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, size, bucket in SHIPPED:
        model = tmp_path / size
        if not model.exists():
            weightless_wan(model, size)
        config = load(TrainConfig, name, [f"model.path={model}", f"cache={tmp_path}", "out=run"])
        loop, layout = config.train, resolve_layout(config.parallel, config.parallel.world_size, {"1.3b": 12, "14b": 40}[size])
        recipe = get_recipe(config.recipe)
        cost = forward_cost(str(model), "transformer", bucket, 512, recipe)
        ema = config.optimizer.ema_decay > 0
        total = memory_per_gpu(cost, recipe, layout, loop, config.parallel, ema=ema, kernel="triton")["total"]
        accumulation = loop.global_batch_size // (loop.batch_size * layout.dp)
        samples = f"{loop.global_batch_size} = {loop.batch_size} x {layout.dp} x {accumulation}"
        degrees = f"{layout.dp_replicate} x {layout.dp_shard} x {layout.sp}"
        lines.append(f"| `{name}` | {layout.world_size} | {degrees} | {samples} | {loop.activation_checkpointing} | {total / GIB:.1f} |")
    return lines


def test_the_documented_matrix_is_what_the_estimate_says(tmp_path: Path) -> None:
    documented = {row.split("|")[1]: row for row in (ROOT / "docs/parallelism.md").read_text().splitlines() if row.startswith("| `train/wan")}
    table = _matrix(tmp_path)
    said = "docs/parallelism.md should hold:\n" + "\n".join(table)
    for row in table[2:]:
        ours, theirs = ([cell.strip() for cell in line.split("|")] for line in (row, documented.pop(row.split("|")[1], "")))
        assert ours[:-2] == theirs[:-2], said
        assert float(theirs[-2]) == pytest.approx(float(ours[-2]), rel=0.02), said  # torch keeps a little more or less from version to version
    assert not documented
    for row in (ROOT / "README.md").read_text().splitlines():
        if row.startswith("| `train/wan"):
            assert row in (ROOT / "docs/parallelism.md").read_text()
