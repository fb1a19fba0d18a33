"""Activation checkpointing: the gradients are those of no checkpointing, and each mode keeps and computes again what it says."""

import functools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import accumulate, loss_of, plain_gradients, tiny_job, worst_gradient
from helpers.pipelines import small_and_alive
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from videoqat.attention import torch_backend
from videoqat.config import LoopConfig, ParallelConfig
from videoqat.errors import ConfigError
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.parallel import checkpointing
from videoqat.parallel.checkpointing import checkpoint_blocks
from videoqat.parallel.mesh import open_mesh
from videoqat.training.engines import make_engine

MODES = [("full", False), ("full", True), ("keep_attention", False), ("keep_attention", True)]
NUM_LAYERS = 3


@pytest.fixture(scope="module", params=["wan", "cogvideox"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_and_alive(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_and_alive(tmp_path_factory.mktemp("wan"), "wan")


def checkpointed(folder: Path, recipe: str, mode: str, offload: bool) -> nn.Module:
    """The transformer in training, without FSDP."""
    family = family_of(folder)
    transformer = family.load_transformer(folder, "transformer", dtype=torch.float32).train()
    install(transformer, recipe)
    checkpoint_blocks(family.blocks(transformer), mode, offload=offload)
    return transformer


def gradients(folder: Path, transformer: nn.Module, backward: Any = Tensor.backward) -> dict[str, Tensor]:
    backward(loss_of(family_of(folder), transformer, folder, [0, 1]).mean())
    return {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("mode", "offload"), MODES)
@pytest.mark.parametrize("recipe", ["attn_qat", "bf16"])
def test_gradients_are_those_of_no_checkpointing_bit_for_bit(folder: Path, recipe: str, mode: str, offload: bool) -> None:
    _, expected = plain_gradients(folder, recipe, 2)
    transformer = checkpointed(folder, recipe, mode, offload)
    assert transformer.state_dict().keys() == checkpointed(folder, recipe, "none", False).state_dict().keys()
    for _ in range(2):  # the second time must not find anything of the first
        found = gradients(folder, transformer)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], g) for name, g in expected.items())
        transformer.zero_grad()


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the forwards of quantised attention from now on."""
    count = [0]
    forward = torch_backend.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(torch_backend, "forward", counting)
    return count


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("full", 2), ("keep_attention", 1)])
@pytest.mark.parametrize("offload", [False, True])
def test_quantised_attention_is_computed_again_or_kept(folder: Path, mode: str, times: int, offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count = calls(monkeypatch)
    gradients(folder, checkpointed(folder, "attn_qat", mode, offload and mode != "none"))
    assert count[0] == times * NUM_LAYERS


@pytest.mark.parametrize(("mode", "video", "text"), [("none", 1, 1), ("full", 2, 2), ("keep_attention", 1, 2)])
def test_plain_attention_is_kept_where_keys_are_as_many_as_queries(wan: Path, mode: str, video: int, text: int) -> None:
    """Of Wan: self-attention is kept, attention to a text of 7 tokens costs nothing and is computed again."""
    transformer = checkpointed(wan, "bf16", mode, False)
    keys = []

    class Counting(TorchDispatchMode):  # outside of checkpointing's own modes: sees what is really computed
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_scaled_dot_product" in operator.name() and "backward" not in operator.name():
                keys.append(args[1].shape[2])
            return operator(*args, **(kwargs or {}))

    with Counting():
        gradients(wan, transformer)
    assert (keys.count(27), keys.count(7)) == (video * NUM_LAYERS, text * NUM_LAYERS)


def packed_step(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """On one of two ranks that exchange codes: how often attention from codes was computed, and all gradients."""
    count, forward = [0], torch_backend.forward_coded

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return forward(*args, **kwargs)

    torch_backend.forward_coded = counting
    with open_mesh(ParallelConfig(sp=2), torch.device("cpu")) as mesh:
        wire = {"parallel__sp": 2, "parallel__ulysses_wire": "packed"}
        job = tiny_job(folder, train__activation_checkpointing="keep_attention", train__batch_size=2, **wire)
        engine = make_engine(job, mesh)
        accumulate(engine, job, mesh, 2)
        found = {name: p.grad.full_tensor() for name, p in engine.transformer.named_parameters()}  # type: ignore[union-attr]
        del engine
    return count[0], found


@pytest.mark.dist
def test_attention_from_exchanged_codes_is_kept_too(wan: Path) -> None:
    _, expected = plain_gradients(wan, "attn_qat", 2)
    for count, found in run_ranks(packed_step, 2, wan):
        assert count == NUM_LAYERS
        assert worst_gradient(found, expected)[0] < 5e-6


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_inputs_leave_their_device_until_the_backward_needs_them(folder: Path, offload: bool) -> None:
    family = family_of(folder)
    transformer = checkpointed(folder, "attn_qat", "full", offload)
    inputs: list[weakref.ref[Tensor]] = []
    blocks = family.blocks(transformer)
    for block in blocks[:-1]:  # a block's output is the next one's input

        def remember(module: nn.Module, args: Any, output: Any) -> None:
            inputs.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

        block.register_forward_hook(remember)
    loss = loss_of(family, transformer, folder, [0]).mean()
    assert [ref() is None for ref in inputs] == [offload] * (NUM_LAYERS - 1)
    loss.backward()
    assert all(ref() is None for ref in inputs)


def test_what_comes_back_for_the_backward_goes_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only with the loss, on which the whole graph hangs."""
    fetched: list[Any] = []
    fetch = checkpointing._Away.fetch
    monkeypatch.setattr(checkpointing._Away, "fetch", lambda away: (fetch(away), fetched.append(away)))
    loss = loss_of(family_of(folder), checkpointed(folder, "attn_qat", "full", True), folder, [0]).mean()
    loss.backward()
    assert len(fetched) >= NUM_LAYERS
    assert all(away.here is None for away in fetched)


def test_nothing_is_offloaded_where_there_will_be_no_backward(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videoqat.parallel.checkpointing._Away.__init__", lambda *args: pytest.fail("offloaded"))
    with torch.no_grad():
        loss_of(family_of(wan), checkpointed(wan, "attn_qat", "keep_attention", True), wan, [0])


def test_another_recipe_between_forward_and_backward_is_refused(wan: Path) -> None:
    transformer = checkpointed(wan, "attn_qat", "full", False)

    def backward(loss: Tensor) -> None:
        install(transformer, "bf16")
        loss.backward()

    with pytest.raises(RuntimeError, match="another attention recipe was installed between a checkpointed block's forward and its backward"):
        gradients(wan, transformer, backward)


def test_frozen_blocks_take_every_mode(wan: Path) -> None:
    """With only the last block trained, no gradient reaches the others, which then have nothing to keep or fetch."""
    _, expected = plain_gradients(wan, "attn_qat", 2)
    for mode, offload in MODES:
        transformer = checkpointed(wan, "attn_qat", mode, offload)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(name.startswith(f"blocks.{NUM_LAYERS - 1}."))
        found = gradients(wan, transformer)
        assert found
        assert all(torch.equal(g, expected[name]) for name, g in found.items())


@pytest.mark.parametrize(("family", "mode"), [("wan", "full"), ("wan", "keep_attention"), ("cogvideox", "keep_attention")])
def test_compiled_blocks_have_the_same_gradients_in_one_graph(
    family: str, mode: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under FSDP, whole (a break in the graph would raise). The compiler behind it is left out: it is dynamo and autograd that could go wrong."""
    folder, graphs = small_and_alive(tmp_path_factory.mktemp(family), family), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("videoqat.parallel.checkpointing.torch.compile", functools.partial(torch.compile, fullgraph=True, backend=counting))
    torch._dynamo.reset()
    loss, expected = plain_gradients(folder, "attn_qat", 2)
    count = calls(monkeypatch)
    with open_mesh(ParallelConfig(), torch.device("cpu")) as mesh:
        job = tiny_job(folder, train__activation_checkpointing=mode, train__compile=True, train__batch_size=2)
        engine = make_engine(job, mesh)
        assert accumulate(engine, job, mesh, 2) == pytest.approx(loss, rel=1e-6)
        found = {name: p.grad.full_tensor() for name, p in engine.transformer.named_parameters()}  # type: ignore[union-attr]
        del engine
    assert worst_gradient(found, expected)[0] < 5e-6
    assert count[0] == NUM_LAYERS * (2 if mode == "full" else 1)
    assert len(graphs) < NUM_LAYERS  # blocks share their code


def test_offloading_from_compiled_blocks_is_refused() -> None:
    config = LoopConfig(activation_checkpointing="full", offload_block_inputs=True, compile=True)
    with pytest.raises(ConfigError, match=r"^train.offload_block_inputs=True is not legal; legal: false with train.compile=true"):
        config.validate()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["attn_qat", "bf16"])
def test_on_a_gpu_the_inputs_go_to_pinned_memory_and_come_back_in_time(wan: Path, recipe: str) -> None:
    """9,216 tokens, so that copies take longer than it takes to launch what follows. Again and again: a copy that is late shows now and then."""
    family, device = family_of(wan), torch.device("cuda")
    x_BCFHW = torch.randn(1, family.geometry(wan).in_channels, 9, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    t_B, condition = torch.tensor([0.4], device=device), {"text": torch.randn(1, 7, family.geometry(wan).text_dim, device=device)}
    norms, held = {}, {}
    for mode, offload in [("full", False), *MODES]:
        transformer = checkpointed(wan, recipe, mode, offload).to(device, torch.bfloat16)
        for _ in range(5):
            transformer.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = family.forward(transformer, x_BCFHW, t_B, condition).float().square().mean()
            torch.cuda.synchronize()
            held[mode, offload] = torch.cuda.memory_allocated() - before
            loss.backward()
            gradient = torch.cat([p.grad.float().flatten() for p in transformer.parameters() if p.grad is not None])
            expected = norms.setdefault(mode, gradient)
            assert (gradient - expected).norm() < 1e-2 * expected.norm()  # sums in another order differ in bf16
    input_bytes = 9 * 32 * 32 * 32 * 2
    for mode in ("full", "keep_attention"):
        assert held[mode, False] - held[mode, True] >= (NUM_LAYERS - 1) * input_bytes
