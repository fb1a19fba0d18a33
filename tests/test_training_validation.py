"""The paired validation loss: really paired, independent of batches, right at a value worked out by hand."""

import json

import numpy as np
import pytest
import torch
from helpers.pipelines import enliven
from torch import nn

from videoqat.config import ObjectiveConfig
from videoqat.data.dataset import CachedVideos
from videoqat.errors import DataError, NonFiniteLoss
from videoqat.models.install import install
from videoqat.models.spec import family_of
from videoqat.training.objective import shift_time
from videoqat.training.validation import _alike, check_cache, choose_samples, paired_losses, stratified_noise, stratified_times, summarise

OBJECTIVE = ObjectiveConfig(timestep_sampling="logit_normal", flow_shift=3.0)
UNIFORM = ObjectiveConfig(timestep_sampling="uniform", flow_shift=1.0)


@pytest.fixture(scope="module")
def model(tiny_pipeline, tmp_path_factory):
    return enliven(tiny_pipeline, tmp_path_factory.mktemp("lively") / "model")


@pytest.fixture(scope="module")
def cache(tiny_cache):
    return CachedVideos(tiny_cache)


@pytest.fixture(scope="module")
def transformer(model):
    return family_of(model).load_transformer(model, "transformer", dtype=torch.float32)


def losses(model, transformers, cache, **changes):
    if isinstance(transformers, nn.Module):
        transformers = {"transformer": transformers}
    options = {"samples": [0, 1, 2], "num_times": 4, **changes}
    return paired_losses(family_of(model), model, transformers, cache, OBJECTIVE, **options)


def test_the_same_model_twice_differs_by_exactly_nothing(model, transformer, cache):
    install(transformer, "bf16")
    first = losses(model, transformer, cache)
    install(transformer, "attn_qat")
    quantised = losses(model, transformer, cache)
    install(transformer, "bf16")
    again = losses(model, transformer, cache)
    assert first.shape == (3, 4)
    assert np.array_equal(first, again)
    assert (quantised != first).all()
    assert np.abs(quantised / first - 1).max() < 0.1
    found = summarise({"a": first, "b": again, "q": quantised}, "a")
    assert (found["b"]["difference"], found["b"]["relative"], found["b"]["standard_error"], found["b"]["ci95"]) == (0, 0, 0, [0, 0])
    assert found["q"]["difference"] == pytest.approx((quantised - first).mean())
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("recipe", ["bf16", "attn_qat_search"])
def test_losses_do_not_depend_on_the_batch(model, transformer, cache, batch_size, recipe):
    install(transformer, recipe)
    reference = losses(model, transformer, cache)

    def check(found, expected):
        if recipe == "bf16":
            assert np.allclose(found, expected, rtol=1e-5)
        else:  # products of other shapes differ in their last bits, and now and then that flips a 4-bit code: in few losses, and by little
            assert np.isclose(found, expected, rtol=1e-4).mean() >= 0.75
            assert np.allclose(found, expected, rtol=1e-3)

    check(losses(model, transformer, cache, batch_size=batch_size), reference)
    check(losses(model, transformer, cache, batch_size=batch_size, clips_at_once=2), reference)
    # A clip's losses are its own, whoever is measured beside it.
    check(losses(model, transformer, cache, samples=[2]), reference[2:])


def test_clips_of_one_size_go_together_in_their_order():
    assert _alike(["a", "a", "b", "b", "b", "a"], 2) == [[0, 1], [2, 3], [4], [5]]
    assert _alike(["a", "a", "b"], 1) == [[0], [1], [2]]


def test_value_by_hand(tiny_pipeline, cache):
    """A transformer whose last layer is zero predicts zero: the loss is the mean square of noise - latents, at any time."""
    family = family_of(tiny_pipeline)
    transformer = family.load_transformer(tiny_pipeline, "transformer", dtype=torch.float32)
    for parameter in transformer.proj_out.parameters():
        torch.nn.init.zeros_(parameter)
    found = losses(tiny_pipeline, transformer, cache, samples=[1])
    latents = cache.load(1)["latents"]
    noise = stratified_noise(1, latents, 4)
    assert found[0] == pytest.approx([(noise[k] - latents).square().mean().item() for k in range(4)], rel=1e-5)
    assert len(set(found[0])) == 4


def test_times_are_stratified():
    times = torch.tensor([stratified_times(UNIFORM, i, 8) for i in range(40)])
    for k in range(8):
        assert (times[:, k] >= k / 8).all()
        assert (times[:, k] <= (k + 1) / 8).all()
    assert times[:, 3].std() > 0.02  # drawn within their part, not set
    shifted = stratified_times(ObjectiveConfig(timestep_sampling="uniform", flow_shift=3.0), 5, 8)
    assert shifted == pytest.approx([shift_time(t, 3.0) for t in times[5].tolist()], rel=1e-6)
    # Logit-normal: the logits of many stratified times are normal.
    cfg = ObjectiveConfig(timestep_sampling="logit_normal", flow_shift=1.0, logit_mean=0.4, logit_std=1.5)
    logits = torch.tensor([stratified_times(cfg, i, 8) for i in range(200)]).logit()
    assert logits.mean().item() == pytest.approx(0.4, abs=0.05)
    assert logits.std().item() == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize("time_range", [(0.0, 0.875), (0.875, 1.0)])
def test_an_expert_is_asked_for_times_of_its_part(time_range):
    """What it serves of the distribution, stratified within: the shares of the whole distribution that lie below, conditioned on the part."""
    times = torch.tensor([stratified_times(ObjectiveConfig(timestep_sampling="logit_normal", flow_shift=5.0), i, 4, time_range) for i in range(300)])
    assert ((times >= time_range[0]) & (times <= time_range[1])).all()
    everything = torch.tensor(
        [stratified_times(ObjectiveConfig(timestep_sampling="logit_normal", flow_shift=5.0), i, 4) for i in range(300)]
    ).flatten()
    mine = everything[(everything >= time_range[0]) & (everything < time_range[1])]
    for k in range(4):
        assert times[:, k].median().item() == pytest.approx(mine.quantile((k + 0.5) / 4).item(), abs=0.02)
        assert k == 0 or times[:, k].min() >= times[:, k - 1].max()


def test_draws_are_a_function_of_the_clip():
    latents = torch.zeros(2, 1, 2, 2)
    noise = stratified_noise(7, latents, 4)
    assert torch.equal(noise, stratified_noise(7, latents, 4))
    assert stratified_times(UNIFORM, 7, 4) == stratified_times(UNIFORM, 7, 4) != stratified_times(UNIFORM, 8, 4)
    assert not torch.equal(noise, stratified_noise(8, latents, 4))
    assert noise.shape == (4, 2, 1, 2, 2)
    assert not torch.equal(noise[0], noise[1])


def test_each_transformer_of_a_pair_is_asked_for_its_times(tiny_pipeline_pair, tmp_path, cache):
    folder = enliven(tiny_pipeline_pair, tmp_path / "pair")
    family = family_of(folder)
    pair = {name: family.load_transformer(folder, name, dtype=torch.float32) for name in family.components(folder)}
    asked: dict[str, list[float]] = {name: [] for name in pair}
    for name, transformer in pair.items():
        transformer.register_forward_pre_hook(lambda _, args, name=name: asked[name].extend((args[1] / 1000).tolist()))
    found = losses(folder, pair, cache, num_times=8)
    assert (found > 0).all()
    assert len(asked["transformer"]) + len(asked["transformer_2"]) == 24
    assert min(asked["transformer"]) >= 0.875 > max(asked["transformer_2"])


def test_samples_are_spread_over_the_cache():
    assert choose_samples(10, 5) == [0, 2, 4, 6, 8]
    assert choose_samples(3, 64) == [0, 1, 2]
    assert choose_samples(7, 3) == [0, 2, 4]


def test_error_and_interval_by_hand():
    reference = np.zeros((4, 2)) + 2.0
    entry = reference + np.array([[0.1, 0.3], [0.0, 0.0], [0.2, 0.2], [0.4, 0.4]])  # clips' means: 0.2, 0, 0.2, 0.4
    found = summarise({"a": reference, "b": entry}, "a")["b"]
    assert found["loss"] == pytest.approx(2.2)
    assert found["difference"] == pytest.approx(0.2)
    assert found["relative"] == pytest.approx(0.1)
    assert found["standard_error"] == pytest.approx(np.std([0.2, 0, 0.2, 0.4], ddof=1) / 2)
    low, high = found["ci95"]
    assert 0 <= low < 0.2 < high <= 0.4
    assert summarise({"a": reference, "b": entry}, "a")["b"] == found  # the resamples are the same every time
    single = summarise({"a": reference[:1], "b": entry[:1]}, "a")["b"]
    assert (single["standard_error"], single["ci95"]) == (None, None)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = summarise({"a": np.zeros((40, 1)) + 1, "b": 1 + rng.normal(0.3, 1.0, (40, 1))}, "a")["b"]["ci95"]
        covered += found[0] <= 0.3 <= found[1]
    assert 178 <= covered <= 199


def test_nan_is_an_error(model, transformer, cache, monkeypatch):
    monkeypatch.setattr(transformer.proj_out.bias, "data", torch.full_like(transformer.proj_out.bias.data, torch.nan))
    with pytest.raises(NonFiniteLoss, match=r"clips/0"):
        losses(model, transformer, cache)


def test_a_cache_of_another_encoder_is_refused(model, tiny_cache, tmp_path):
    check_cache(str(tiny_cache), [str(model)])
    other = enliven(model, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    config["latents_mean"][0] += 0.5
    (other / "vae" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="another VAE"):
        check_cache(str(tiny_cache), [str(model), str(other)])
    with pytest.raises(DataError, match="no finished cache"):
        check_cache(str(tmp_path), [str(model)])
