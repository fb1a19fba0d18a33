"""Where a recipe hurts: numbers against an evaluation of its own, the planted bad block, the proposal measured anew, resuming, pairs, families."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from helpers.pipelines import enliven, small_and_alive
from torch import Tensor

from videoqat.attention import reference
from videoqat.config import ExampleClipsConfig, ModelConfig, ObjectiveConfig, PreprocessConfig, RuntimeConfig, SensitivityConfig
from videoqat.data.dataset import CachedVideos
from videoqat.data.moving_garments import write_clips
from videoqat.data.precompute import preprocess
from videoqat.errors import UserError
from videoqat.evaluation import sensitivity as module
from videoqat.evaluation.probe import figures, sums_of
from videoqat.evaluation.sensitivity import plan, sensitivity
from videoqat.models.install import install, uninstall
from videoqat.models.spec import family_of
from videoqat.recipes import RECIPES, get_recipe
from videoqat.training.objective import resolve
from videoqat.training.validation import choose_samples, stratified_noise, stratified_times

LAYERS, BAD = 4, 2
TIMES = 2


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks, of which one has keys that lie far off centre, as K's channel outliers do in real models."""
    folder = tmp_path_factory.mktemp("sensitive") / "model"
    shutil.copytree(tiny_pipeline, folder)
    config = json.loads((folder / "transformer/config.json").read_text()) | {"num_layers": LAYERS, "attention_head_dim": 16}
    torch.manual_seed(0)
    transformer = WanTransformer3DModel.from_config(config)
    with torch.no_grad():
        attention = transformer.blocks[BAD].attn1
        attention.to_k.bias += 4.0  # alike in all channels and tokens, which 4 bits must then spend their range on
        attention.norm_k.weight *= 4.0
    shutil.rmtree(folder / "transformer")
    transformer.save_pretrained(folder / "transformer")
    return folder


def configured(model: Path, cache: Path, out: Path, **changes: Any) -> SensitivityConfig:
    settings = {"recipe": "attn_qat", "samples": 2, "timesteps": TIMES, "runtime": RuntimeConfig(device="cpu")}
    return SensitivityConfig(model=str(model), cache=str(cache), out=str(out), **(settings | changes))


@pytest.fixture(scope="module")
def out(model: Path, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished measurement. Shared: copy it before changing it."""
    folder = tmp_path_factory.mktemp("sensitivity") / "out"
    sensitivity(configured(model, tiny_cache, folder))
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sensitivity.json").read_text())
    return found


class ByHand:
    """The same clips, noise and times through diffusers' own processors, of which some get attention from the dense fp64 reference."""

    def __init__(self, model: Path, cache: Path) -> None:
        self.family, self.cache = family_of(model), CachedVideos(cache)
        self.transformer = WanTransformer3DModel.from_pretrained(model, subfolder="transformer").eval()
        self.schedule = self.family.noise_schedule(model)
        self.objective = resolve(ObjectiveConfig(), self.schedule)

    @torch.no_grad()
    def outputs(self, recipes: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, dict[int, list[tuple[Tensor, ...]]]]:
        """(clips * times, C, F, H, W): outputs and targets, self-attention of block i by recipes[i]; and each block's q, k, v (B, N, H, d)."""
        from diffusers.models.transformers import transformer_wan

        stock: Callable[..., Tensor] = transformer_wan.dispatch_attention_fn
        calls, seen = [0], {block: [] for block in range(LAYERS)}

        def attend(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
            block, cross = divmod(calls[0] % (2 * LAYERS), 2)
            calls[0] += 1
            if cross:
                return stock(q, k, v, **kwargs)
            seen[block].append((q, k, v))
            return reference.forward(q, k, v, get_recipe(recipes[block]))[0].float() if block in recipes else stock(q, k, v, **kwargs)

        monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", attend)
        outputs, targets = [], []
        for sample in choose_samples(len(self.cache), 2):
            latents = self.cache.load(sample)["latents"]
            noise = stratified_noise(sample, latents, TIMES)
            t = torch.tensor(stratified_times(self.objective, sample, TIMES))
            text = torch.zeros(TIMES, 16, self.cache.load(sample)["text"].shape[1])
            text[:, : self.cache.load(sample)["text"].shape[0]] = self.cache.load(sample)["text"]
            x = (1 - t).view(-1, 1, 1, 1, 1) * latents + t.view(-1, 1, 1, 1, 1) * noise
            outputs.append(self.transformer(x, t * 1000, text, return_dict=False)[0])
            targets.append(noise - latents)
        monkeypatch.undo()
        return torch.cat(outputs).double(), torch.cat(targets).double(), seen


@pytest.fixture(scope="module")
def by_hand(model: Path, tiny_cache: Path) -> ByHand:
    return ByHand(model, tiny_cache)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_layers_and_heads_by_hand(result: dict[str, Any], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch):
    _, _, seen = by_hand.outputs({}, monkeypatch)
    assert [row["layer"] for row in result["attention"]] == [f"blocks.{i}.attn1" for i in range(LAYERS)]
    for row in result["attention"]:
        exact, quantised = [], []
        for q, k, v in seen[row["index"]]:
            weights = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).mul(16**-0.5).softmax(-1)
            exact.append(torch.einsum("bhqk,bkhd->bqhd", weights, v.double()))
            quantised.append(reference.forward(q, k, v, RECIPES["attn_qat"])[0])
        a, b = torch.cat(quantised), torch.cat(exact)
        for found, ours, theirs in [(row, a, b), *((row["heads"][h], a[:, :, h], b[:, :, h]) for h in range(2))]:
            cosine = float((ours * theirs).sum() / (ours.norm() * theirs.norm()))
            assert found["relative_error"] == pytest.approx(relative(ours, theirs), rel=1e-3)
            assert found["cosine"] == pytest.approx(cosine, abs=1e-5)
            assert found["rmse"] == pytest.approx(float((ours - theirs).square().mean().sqrt()), rel=1e-3)
        assert row["heads"][0]["relative_error"] != row["heads"][1]["relative_error"]


def test_blocks_at_the_output_by_hand(result: dict[str, Any], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch):
    exact, target, _ = by_hand.outputs({}, monkeypatch)
    loss = (exact - target).square().mean()
    for block in (1, BAD):
        row = next(row for row in result["layers"] if row["index"] == block)
        for name, blocks in (("only", {block}), ("without", set(range(LAYERS)) - {block})):
            output, _, _ = by_hand.outputs(dict.fromkeys(blocks, "attn_qat"), monkeypatch)
            # A code that falls to the other side of a tie in fp32 moves the output a little.
            assert row[name]["relative_error"] == pytest.approx(relative(output, exact), rel=0.02)
            change = float((output - target).square().mean() / loss - 1)
            assert row[name]["loss_change"] == pytest.approx(change, rel=0.05, abs=1e-6)
    output, _, _ = by_hand.outputs(dict.fromkeys(range(LAYERS), "attn_qat"), monkeypatch)
    assert result["all"]["relative_error"] == pytest.approx(relative(output, exact), rel=0.02)
    assert result["all"]["rmse"] == pytest.approx(float((output - exact).square().mean().sqrt()), rel=0.02)
    for at, time in enumerate(sorted(result["times"], key=lambda row: (row["clip"], row["t"]))):
        assert time["relative_error"] == pytest.approx(relative(output[at], exact[at]), rel=0.02)


def test_the_planted_block_is_the_worst_everywhere(result: dict[str, Any]):
    def worst(rows: list[dict[str, Any]], error: Callable[[dict[str, Any]], float]) -> int:
        return int(max(rows, key=error)["index"])

    assert worst(result["attention"], lambda row: row["relative_error"]) == BAD
    assert worst(result["layers"], lambda row: row["only"]["relative_error"]) == BAD
    assert worst(result["layers"], lambda row: -row["without"]["relative_error"]) == BAD
    assert next(row["rank"] for row in result["layers"] if row["index"] == BAD) == 1
    assert result["path"][1]["kept"] == {"transformer": [BAD]}


def test_the_path_is_measured_set_by_set(result: dict[str, Any], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch):
    path = result["path"]
    assert [step["count"] for step in path] == list(range(LAYERS + 1))
    assert (path[-1]["error"], path[-1]["share"], path[-1]["kept"]) == (0, 0, {"transformer": [0, 1, 2, 3]})
    assert path[0]["error"] == result["all"]["relative_error"]
    exact, _, _ = by_hand.outputs({}, monkeypatch)
    left = set(range(LAYERS)) - set(path[2]["kept"]["transformer"])
    output, _, _ = by_hand.outputs(dict.fromkeys(left, "attn_qat"), monkeypatch)
    assert path[2]["error"] == pytest.approx(relative(output, exact), rel=0.02)
    # 32 video tokens look at 32, and at 16 text tokens by cross-attention, which stays in bf16.
    assert path[1]["share"] == pytest.approx(3 * 32 / (4 * (32 + 16)))


def test_variants_are_the_recipe_with_more_bits(result: dict[str, Any]):
    errors = {(row["qk"], row["pv"]): row["relative_error"] for row in result["variants"]}
    assert set(errors) == {("bf16", "nvfp4"), ("nvfp4", "bf16"), ("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("mxfp8", "mxfp8")}
    assert all(error < result["all"]["relative_error"] for error in errors.values())
    assert errors["mxfp8", "mxfp8"] < min(errors["mxfp8", "nvfp4"], errors["nvfp4", "mxfp8"])
    # The planted keys are what hurts.
    assert errors["bf16", "nvfp4"] < errors["nvfp4", "bf16"]


def test_the_proposal_meets_its_limit_for_whoever_installs_it(
    out: Path, model: Path, tiny_cache: Path, tmp_path: Path, result: dict[str, Any], by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(out, tmp_path / "out")
    limit = (result["path"][1]["error"] + result["path"][2]["error"]) / 2
    found = sensitivity(configured(model, tiny_cache, tmp_path / "out", max_error=limit))
    assert found["exit_code"] == 0
    assert found["proposal"]["count"] == 2  # the smallest that does
    recipe = get_recipe(str(tmp_path / "out" / "recipe.yaml"))
    assert recipe.name == "attn_qat_keep_2"
    assert list(recipe.keep_layers) == found["path"][2]["kept"]["transformer"]
    exact, _, _ = by_hand.outputs({}, monkeypatch)
    install(by_hand.transformer, recipe)
    output, _, _ = by_hand.outputs({}, monkeypatch)
    uninstall(by_hand.transformer)
    assert relative(output, exact) <= limit
    assert found["proposal"]["measured_anew"]["relative_error"] == pytest.approx(relative(output, exact), rel=1e-4)
    assert found["path"] == result["path"]


@pytest.mark.parametrize(("limits", "count"), [({"max_kept": 1}, 1), ({"min_share": 0.3}, 2), ({"max_error": 1.0}, 0)])
def test_other_limits_choose_from_the_same_measurements(out: Path, model: Path, tiny_cache: Path, tmp_path: Path, limits: dict[str, Any], count: int):
    shutil.copytree(out, tmp_path / "out")
    found = sensitivity(configured(model, tiny_cache, tmp_path / "out", **limits))
    assert (found["proposal"]["count"], found["proposal"]["met"]) == (count, True)
    assert (get_recipe(found["proposal"]["file"]) == RECIPES["attn_qat"]) == (count == 0)


def test_limits_that_nothing_meets_are_told(
    out: Path, model: Path, tiny_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "recipe.yaml").write_text("of an earlier call")
    monkeypatch.setattr(module, "Probe", lambda *_, **__: pytest.fail("weights were loaded"))  # all is known already
    found = sensitivity(configured(model, tiny_cache, tmp_path / "out", max_error=1e-6, max_kept=1))
    assert found["exit_code"] == 1
    assert found["proposal"] == {"met": False, "limits": {"max_error": 1e-6, "max_kept": 1}}
    assert "no set of kept layers meets {'max_error': 1e-06, 'max_kept': 1}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "recipe.yaml").exists()
    assert "no set of kept blocks meets the limits" in (tmp_path / "out" / "report.html").read_text()


def test_an_interrupted_measurement_goes_on(
    out: Path, model: Path, tiny_cache: Path, tmp_path: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(out, tmp_path / "out")
    parts = sorted((tmp_path / "out" / "parts").iterdir())
    assert len(parts) == 2
    parts[0].unlink()
    measured: list[str] = []
    measure = module.Probe.measure

    def counted(self: Any, point: Any, *rest: Any) -> Any:
        measured.append(point.name)
        return measure(self, point, *rest)

    monkeypatch.setattr(module.Probe, "measure", counted)
    again = sensitivity(configured(model, tiny_cache, tmp_path / "out"))
    assert set(measured) == {parts[0].stem.removeprefix("transformer-")}
    for key in ("all", "attention", "layers", "variants", "path", "times", "clips", "receipts"):
        assert again[key] == result[key]
    with pytest.raises(UserError, match="holds a sensitivity result with samples=2, not 3; choose another out"):
        plan(configured(model, tiny_cache, tmp_path / "out", samples=3))


def test_the_report_stands_alone(out: Path, result: dict[str, Any]):
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert f"{100 * result['all']['relative_error']:.3g} %" in page
    assert "emulated on this device" in page
    assert {receipt["kernel"] for receipt in result["receipts"]} == {"sdpa", "torch"}


def test_layers_that_the_recipe_keeps_already_stay_kept(model: Path, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.yaml").write_text(f"base: attn_qat\nname: mine\nkeep_layers: [{BAD}]\n")
    config = configured(model, tiny_cache, tmp_path / "out", recipe=str(tmp_path / "mine.yaml"), samples=1, timesteps=1, variants=False, max_kept=1)
    # All, each alone, all but each; then all kept, as other sets are known by now; then the proposal; and before each kind the reference.
    assert plan(config)["components"] == {"transformer": {"blocks": 3, "layers": 3, "points": 1, "forwards": (1 + 7) + (1 + 1) + (1 + 1)}}
    forwards: list[str] = []
    forward = module.Probe._forward
    monkeypatch.setattr(module.Probe, "_forward", lambda self, choice, *rest: (forwards.append(choice.name), forward(self, choice, *rest))[1])
    found = sensitivity(config)
    assert len(forwards) == 12
    assert BAD not in [row["index"] for row in found["layers"]]
    assert found["path"][0]["kept"] == {"transformer": [BAD]}
    kept = get_recipe(found["proposal"]["file"]).keep_layers
    assert BAD in kept
    assert len(kept) == 2
    auto = tmp_path / "auto.yaml"
    auto.write_text("base: attn_qat\nname: served\nkeep_layers: auto\nsensitivity: out/sensitivity.json\nmax_kept: 1\n")
    assert get_recipe(str(auto)).keep_layers == kept


def test_a_pair_is_measured_one_transformer_after_the_other(tiny_pipeline_pair: Path, tiny_cache: Path, tmp_path: Path):
    folder = enliven(tiny_pipeline_pair, tmp_path / "pair")
    with pytest.raises(
        UserError, match=r"timesteps=1 is not legal; legal: more: none of its times falls to transformer, which serves flow times 0\.\d* to 1"
    ):
        plan(configured(folder, tiny_cache, tmp_path / "out", samples=1, timesteps=1))
    found = sensitivity(configured(folder, tiny_cache, tmp_path / "out", samples=1, timesteps=8, variants=False, max_kept=1))
    assert found["components"] == ["transformer", "transformer_2"]
    assert {(row["component"], row["index"]) for row in found["layers"]} == {(name, i) for name in found["components"] for i in range(2)}
    boundary = json.loads((folder / "model_index.json").read_text())["boundary_ratio"]
    assert {row["component"] for row in found["times"]} == set(found["components"])
    assert all((row["t"] >= boundary) == (row["component"] == "transformer") for row in found["times"])
    assert len(found["path"]) == 5
    assert found["path"][-1]["error"] == 0
    added = found["path"][1]["added"]
    recipe = get_recipe(found["proposal"]["file"])
    assert recipe.keep_layers_in == ((added["component"], (added["index"],)),)
    assert found["proposal"]["measured_anew"]["relative_error"] == found["path"][1]["error"]
    (tmp_path / "half.yaml").write_text("base: attn_qat\nname: half\nkeep_components: [transformer]\n")
    half = configured(folder, tiny_cache, tmp_path / "half", samples=1, timesteps=8, variants=False, recipe=str(tmp_path / "half.yaml"))
    assert plan(half)["components"]["transformer"]["forwards"] == plan(half)["components"]["transformer"]["points"]  # nothing but the reference
    halved = sensitivity(half)
    assert {row["component"] for row in halved["layers"]} == {"transformer_2"}
    assert 0 < halved["all"]["relative_error"] < found["all"]["relative_error"]


def test_joint_attention_of_another_family(tmp_path: Path):
    folder = small_and_alive(tmp_path / "cogvideox", "cogvideox", num_layers=2)
    write_clips(ExampleClipsConfig(out=str(tmp_path / "clips"), num_clips=1, num_frames=9, size=32))
    wish = {"source": str(tmp_path / "clips"), "out": str(tmp_path / "cache"), "buckets": ["9x32x32"]}
    preprocess(PreprocessConfig(model=ModelConfig(path=str(folder)), **wish))
    found = sensitivity(configured(folder, tmp_path / "cache", tmp_path / "out", samples=1, timesteps=1, variants=False))
    assert [row["kind"] for row in found["attention"]] == ["joint", "joint"]
    assert found["path"][0]["share"] == 1
    assert 0 < found["path"][1]["error"] < found["path"][0]["error"]
    assert found["proposal"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipe": "bf16"}, "recipe='bf16' is not legal; legal: a recipe that quantises"),
        ({"recipe": "keeps_all.json"}, "recipe='all' is not legal; legal: one that covers a layer of this model"),
        ({"recipe": "deep.json"}, "keep_layers names block 9, but this model has blocks 0 to 3"),
        ({"cache": "empty"}, "is no finished cache"),
        ({"samples": 0}, "samples=0 is not legal"),
        ({"min_share": 2.0}, "min_share=2.0 is not legal"),
        ({"runtime": RuntimeConfig(device="cpu", kernel="sdpa")}, "kernel='sdpa' can't serve recipe 'attn_qat'"),
    ],
)
def test_bad_input_is_one_line_before_weights_are_loaded(
    model: Path, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "Probe", lambda *_, **__: pytest.fail("weights were loaded"))
    Path("empty").mkdir()
    Path("keeps_all.json").write_text(json.dumps({"base": "attn_qat", "name": "all", "keep_layers": [0, 1, 2, 3]}))
    Path("deep.json").write_text(json.dumps({"base": "attn_qat", "name": "deep", "keep_layers": [9]}))
    for command in (plan, sensitivity):
        with pytest.raises(UserError, match=says):
            command(configured(model, changes.get("cache", tiny_cache), tmp_path / "out", **{k: v for k, v in changes.items() if k != "cache"}))
    assert not (tmp_path / "out").exists()


def test_it_runs_in_one_process(model: Path, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="sensitivity runs in one process; legal: without torchrun"):
        plan(configured(model, tiny_cache, tmp_path / "out"))


def test_an_output_of_nothing_is_not_like_what_it_should_be():
    zero, one = torch.zeros(1, 8), torch.ones(1, 8)
    assert figures([sums_of(zero, one, 0)]) == {"relative_error": 1.0, "cosine": 0.0, "rmse": 1.0}
    assert figures([sums_of(zero, zero, 0)]) == {"relative_error": 0.0, "cosine": 1.0, "rmse": 0.0}


@pytest.mark.gpu
def test_a_gpu_finds_the_same(model: Path, tiny_cache: Path, tmp_path: Path, result: dict[str, Any]):
    found = sensitivity(configured(model, tiny_cache, tmp_path / "out", max_kept=1, runtime=RuntimeConfig(device="cuda", dtype="float32")))
    kernels = {receipt["kernel"] for receipt in found["receipts"] if receipt["recipe"] == found["recipe"]["name"]}
    assert kernels == {"triton"}  # variants with blocks of 32 may take another: heads are 16 wide here
    for ours, theirs in zip(found["attention"], result["attention"], strict=True):
        assert ours["relative_error"] == pytest.approx(theirs["relative_error"], rel=0.02)
    assert found["proposal"]["kept"] == {"transformer": [BAD]}
    assert found["proposal"]["measured_anew"]["relative_error"] == pytest.approx(found["path"][1]["error"], rel=1e-3)
