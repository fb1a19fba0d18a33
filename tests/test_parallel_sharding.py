"""HSDP: how parameters are grouped and in which precision they compute, and how each rank gets its own rows and no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from helpers.engines import accumulate, loss_of, tiny_job
from helpers.pipelines import change_weights, enliven, small_and_alive
from helpers.ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from videoqat.config import ExampleModelConfig, ParallelConfig
from videoqat.errors import CheckpointError, ConfigError
from videoqat.models.spec import family_of
from videoqat.models.tiny import build_pipeline
from videoqat.parallel.mesh import open_mesh
from videoqat.training.engines import make_engine, set_trainable

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["wan", "cogvideox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_and_alive(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_and_alive(tmp_path_factory.mktemp("wan"), "wan")


def test_a_model_is_built_without_numbers_and_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "safe_open", lambda *args, **kwargs: pytest.fail("weights were touched"))
    family = family_of(folder)
    built, whole = family.build(folder, "transformer"), family.load_transformer(folder, "transformer", dtype=torch.float32, from_scratch=True)
    assert {p.device.type for p in built.parameters()} == {"meta"}
    assert {name: (p.shape, p.dtype) for name, p in built.named_parameters()} == {name: (p.shape, p.dtype) for name, p in whole.named_parameters()}
    buffers = dict(built.named_buffers())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in whole.named_buffers())


def test_bf16_computes_in_bf16_except_what_diffusers_keeps_in_fp32(wan: Path) -> None:
    """Weights as a forward sees them; times and rotary angles as they go in; master weights and gradients."""
    seen: dict[str, torch.dtype] = {}
    with open_mesh(ParallelConfig(), CPU) as mesh:
        job = tiny_job(wan, train__compute_dtype="bfloat16", train__batch_size=2)
        engine = make_engine(job, mesh)
        model: Any = engine.transformer

        def look(module: nn.Module, args: Any, output: Any) -> None:
            seen.update({name: p.dtype for name, p in model.named_parameters() if not isinstance(p, DTensor)})

        def inputs(name: str) -> Callable[..., None]:
            return lambda module, args: seen.update({f"{name}[{i}]": x.dtype for i, x in enumerate(args) if isinstance(x, torch.Tensor)})

        model.condition_embedder.register_forward_pre_hook(inputs("time"))
        model.blocks[1].register_forward_pre_hook(inputs("block"))
        model.blocks[1].register_forward_pre_hook(lambda module, args: seen.update(rotary=args[3][0].dtype))
        for module in (model.condition_embedder, model.blocks[1].ffn, model.patch_embedding, model.proj_out, model.rope):
            module.register_forward_hook(look, prepend=True)
        accumulate(engine, job, mesh, 2)
        assert {p.dtype for p in engine.transformer.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in engine.transformer.parameters() if p.grad is not None} == {torch.float32}
        model = None
        del engine
    kept = ("scale_shift_table", "norm2", "time_embedder")
    parameters = {name: dtype for name, dtype in seen.items() if "." in name or name == "scale_shift_table"}
    assert {name for name in parameters if name.startswith("blocks.1.")}
    for name, dtype in parameters.items():
        assert dtype == (torch.float32 if any(part in name.split(".") for part in kept) else torch.bfloat16), name
    assert seen["time[0]"] == seen["rotary"] == torch.float32
    assert seen["time[1]"] == seen["block[0]"] == seen["block[1]"] == torch.bfloat16


class Count(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator.name() == self.name
        return operator(*args, **(kwargs or {}))


def shares(folder: Path) -> dict[str, Any]:
    """On one of two ranks: what was read from the file, what of it this rank holds, and what goes on in a step."""
    read: dict[str, list[int]] = {}
    original = safetensors.safe_open

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = original(*args, **kwargs)

        def __enter__(self) -> Any:
            return self.file.__enter__()  # headers only: models.weights.check_weights

        def __exit__(self, *args: Any) -> Any:
            return self.file.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Any:
            raise AssertionError(f"{name} was read whole")

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)

            class Rows:
                def __getitem__(self, rows: slice) -> Any:
                    read[name] = [rows.start, rows.stop]
                    return part[rows]

            return Rows()

    chain = []
    prefetch = FSDPModule.set_modules_to_forward_prefetch
    FSDPModule.set_modules_to_forward_prefetch = lambda self, following: chain.append((self, following)) or prefetch(self, following)  # type: ignore
    safetensors.safe_open = Spy  # type: ignore[misc, assignment]
    with open_mesh(ParallelConfig(dp_shard=2), CPU) as mesh:
        job = tiny_job(folder)
        engine = make_engine(job, mesh)
        blocks = job.family.blocks(engine.transformer)
        local = {name: p.to_local().clone() for name, p in engine.transformer.named_parameters()}  # type: ignore[attr-defined]
        with Count("c10d::_allgather_base_") as gathers:
            loss = loss_of(job.family, engine.transformer, folder, [0]).mean()
            in_forward = gathers.count
            engine.backward(loss, last=True)
        result = {
            "read": read,
            "local": local,
            "prefetch in order": chain == [(a, [b]) for a, b in zip(blocks, blocks[1:], strict=False)],
            "gathers": (in_forward, gathers.count),
        }
        del engine, blocks, loss
        chain.clear()
    return result


@pytest.mark.dist
def test_each_rank_reads_its_own_rows_and_gathers_block_by_block(wan: Path) -> None:
    ranks = run_ranks(shares, 2, wan)
    whole = load_file(wan / "transformer/diffusion_pytorch_model.safetensors")
    for name, tensor in whole.items():
        half = -(-tensor.shape[0] // 2)
        rows = [[0, half], [half, tensor.shape[0]]]
        for rank in (0, 1):
            first, last = rows[rank]
            assert ranks[rank]["read"].get(name, [first, first]) == [first, last]
            assert torch.equal(ranks[rank]["local"][name], tensor[first:last])
    assert sum(len(rank["read"]) for rank in ranks) < 2 * len(whole)  # of a table with one row the second rank reads nothing
    for rank in ranks:
        assert rank["prefetch in order"]
        # Root, patch embedding, condition embedder, 3 blocks, projection; the root stays gathered for the backward, the others come again.
        assert rank["gathers"] == (7, 13)


def reductions(folder: Path) -> list[int]:
    """Sums over two replicas in each of three micro-batches."""
    with open_mesh(ParallelConfig(dp_replicate=2), CPU) as mesh:
        job = tiny_job(folder)
        engine = make_engine(job, mesh)
        counts = []
        for last in (False, False, True):
            loss = loss_of(job.family, engine.transformer, folder, [0]).mean()
            with Count("c10d::allreduce_") as sums:
                engine.backward(loss, last=last)
            counts.append(sums.count)
        del engine, loss
    return counts


@pytest.mark.dist
def test_replicas_are_summed_once_a_step(wan: Path) -> None:
    assert run_ranks(reductions, 2, wan) == [[0, 0, 7]] * 2  # once for each group


def scratch(folder: Path, layout: tuple[int, int, int]) -> tuple[dict[str, torch.Tensor], int]:
    """Weights from scratch in a layout, gathered, and how many whole models this rank built."""
    replicate, shard, sp = layout
    with open_mesh(ParallelConfig(dp_replicate=replicate, dp_shard=shard, sp=sp), CPU) as mesh:
        job = tiny_job(folder, from_scratch=True, train__seed=3)
        load, built = job.family.load_transformer, []
        job.family.load_transformer = lambda *args, **kwargs: built.append(1) or load(*args, **kwargs)
        engine = make_engine(job, mesh)
        return {name: p.full_tensor() for name, p in engine.transformer.named_parameters()}, len(built)  # type: ignore[attr-defined]


@pytest.mark.dist
def test_from_scratch_gives_the_same_numbers_in_every_layout(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of(wan)
    monkeypatch.setattr(family, "load_transformer", family.load_transformer)  # `scratch` replaces it
    expected = dict(family.load_transformer(wan, "transformer", dtype=torch.float32, from_scratch=True, seed=3).named_parameters())
    for layout in ((1, 1, 1), (2, 1, 2)):
        ranks = run_ranks(scratch, 4, wan, layout) if layout != (1, 1, 1) else [scratch(wan, layout)]
        assert [built for _, built in ranks] == [1] + [0] * (len(ranks) - 1)
        for found, _ in ranks:
            assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
def test_weights_that_do_not_fit_are_refused_before_any_is_read(wan: Path, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = enliven(wan, tmp_path / "copy")
    path = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    changed = {
        "missing": weights | {"proj_out.bias": None},
        "unknown": weights | {"more": torch.zeros(1)},
        "misshapen": weights | {"proj_out.bias": torch.zeros(1)},
    }
    save_file({name: tensor for name, tensor in changed[fault].items() if tensor is not None}, path)
    said = {"missing": "weights lack proj_out.bias", "unknown": "weights hold more", "misshapen": r"proj_out.bias has shape \(1,\)"}
    monkeypatch.setattr("videoqat.training.engine_fsdp.shard", lambda *args: pytest.fail("too late"))
    with open_mesh(ParallelConfig(), CPU) as mesh, pytest.raises(CheckpointError, match=said[fault]):
        make_engine(tiny_job(folder), mesh)


def test_weights_of_16_bits_become_fp32_masters(wan: Path, tmp_path: Path) -> None:
    folder = enliven(wan, tmp_path / "copy")
    change_weights(folder / "transformer", {"proj_out.weight": lambda w: w.to(torch.bfloat16)})
    with open_mesh(ParallelConfig(), CPU) as mesh:
        engine = make_engine(tiny_job(folder), mesh)
        weight = dict(engine.transformer.named_parameters())["proj_out.weight"]
        stored = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")["proj_out.weight"]
        assert weight.dtype == torch.float32
        assert torch.equal(weight.full_tensor(), stored.float())  # type: ignore[attr-defined]
        del engine, weight


def test_persistent_buffers_are_read_too(tmp_path: Path) -> None:
    """CogVideoX 5B I2V has positions that were learned and are no parameters."""
    from videoqat.models.tiny import cogvideox_transformer

    model = cogvideox_transformer(use_learned_positional_embeddings=True, sample_height=6, sample_width=6, sample_frames=9)
    pipeline = ExampleModelConfig(out=str(tmp_path / "built"), family="cogvideox")
    build_pipeline(pipeline)
    model.patch_embed.pos_embedding.normal_()
    model.save_pretrained(tmp_path / "built/transformer")
    with open_mesh(ParallelConfig(), CPU) as mesh:
        engine: Any = make_engine(tiny_job(tmp_path / "built"), mesh)
        assert torch.equal(engine.transformer.patch_embed.pos_embedding, model.patch_embed.pos_embedding)
        assert torch.equal(engine.tensors()["model"]["patch_embed.pos_embedding"], model.patch_embed.pos_embedding)
        del engine


def test_trainable_takes_patterns_and_names_what_is_near_one_that_matches_nothing(wan: Path) -> None:
    transformer = family_of(wan).build(wan, "transformer")
    set_trainable(transformer, ["*.attn1.*", "proj_out.bias"])
    trained = {name for name, p in transformer.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in transformer.named_parameters() if ".attn1." in name or name == "proj_out.bias"}
    with pytest.raises(
        ConfigError, match=r"^train.trainable='\*.attn3.to_q.weight' matches no parameter of this model; near: .*attn[12]\.to_q\.weight"
    ):
        set_trainable(transformer, ["*.attn1.*", "*.attn3.to_q.weight"])
