"""What is drawn for a sample, the loss, and the optimiser's parts, against values worked out by hand or by another road."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from videoqat.config import ObjectiveConfig, OptimizerConfig
from videoqat.errors import ConfigError
from videoqat.models.schedules import FlowMatching, NoiseSchedule, VPrediction, timestep
from videoqat.models.spec import Condition
from videoqat.training.objective import denoising_loss, draw, resolve, shift_time, time_at_quantile, time_quantiles
from videoqat.training.optim import Ema, gradient_norm, learning_rate, make_optimizer

LATENTS = torch.zeros(2, 3, 4, 5)
FLOW = FlowMatching(3.0)
PLAIN = resolve(ObjectiveConfig(), FLOW)  # logit-normal, shift 3


def times(cfg: ObjectiveConfig, count: int = 2000, time_range: tuple[float, float] = (0.0, 1.0)) -> torch.Tensor:
    return torch.tensor([draw(cfg, 0, 0, i, torch.zeros(1), time_range).t for i in range(count)], dtype=torch.float64)


def test_shift_time_by_hand() -> None:
    assert shift_time(0.5, 3.0) == pytest.approx(0.75)
    assert shift_time(0.25, 5.0) == pytest.approx(1.25 / 2)
    assert [shift_time(t, 7.0) for t in (0.0, 1.0)] == [0.0, 1.0]
    assert shift_time(0.3, 1.0) == pytest.approx(0.3)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_times_follow_the_shifted_uniform_distribution(shift: float) -> None:
    t = times(ObjectiveConfig(flow_shift=shift, timestep_sampling="uniform"))
    for level in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert (t < shift_time(level, shift)).double().mean().item() == pytest.approx(level, abs=0.035)


def test_logit_normal_times_follow_their_distribution() -> None:
    cfg = resolve(ObjectiveConfig(flow_shift=3.0, logit_mean=0.4, logit_std=1.5), FLOW)
    t = times(cfg)
    raw = t / (3 - 2 * t)  # the shift undone
    z = (torch.log(raw / (1 - raw)) - 0.4) / 1.5
    assert z.mean().item() == pytest.approx(0, abs=0.08)
    assert z.std().item() == pytest.approx(1, abs=0.06)
    assert (z < -1).double().mean().item() == pytest.approx(0.1587, abs=0.03)  # a normal distribution, not just its first two moments


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
@pytest.mark.parametrize("time_range", [(0.0, 0.875), (0.875, 1.0)])
def test_an_expert_sees_the_whole_distribution_conditioned_on_its_part(sampling: str, time_range: tuple[float, float]) -> None:
    cfg = ObjectiveConfig(flow_shift=5.0, timestep_sampling=sampling)
    mine = times(cfg, time_range=time_range)
    assert mine.min() >= time_range[0]
    assert mine.max() <= time_range[1]
    everything = times(cfg, count=6000)
    expected = everything[(everything >= time_range[0]) & (everything < time_range[1])]
    for quantile in (0.1, 0.5, 0.9):
        assert mine.quantile(quantile).item() == pytest.approx(expected.quantile(quantile).item(), abs=0.03)


def test_a_range_without_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"never drawn.*logit_mean=-50"):
        time_quantiles(resolve(ObjectiveConfig(logit_mean=-50.0, logit_std=0.1), FLOW), (0.9, 1.0))


def test_draws_depend_on_seed_epoch_and_sample_and_on_nothing_else() -> None:
    cfg = PLAIN
    first = draw(cfg, 1, 2, 3, LATENTS, (0.0, 1.0))
    again = draw(cfg, 1, 2, 3, LATENTS, (0.0, 1.0))
    torch.manual_seed(99)
    assert torch.equal(first.noise_CFHW, again.noise_CFHW)
    assert first.t == again.t
    assert first.noise_CFHW.shape == LATENTS.shape
    for other in (draw(cfg, 0, 2, 3, LATENTS, (0, 1)), draw(cfg, 1, 1, 3, LATENTS, (0, 1)), draw(cfg, 1, 2, 4, LATENTS, (0, 1))):
        assert not torch.equal(first.noise_CFHW, other.noise_CFHW)
        assert first.t != other.t


def test_the_dropout_rate_changes_neither_noise_nor_time() -> None:
    few, many = (draw(replace(PLAIN, caption_dropout=p), 0, 0, 0, LATENTS, (0, 1)) for p in (0.0, 1.0))
    assert (few.drop_caption, many.drop_caption) == (False, True)
    assert few.t == many.t
    assert torch.equal(few.noise_CFHW, many.noise_CFHW)


def test_caption_dropout_has_its_rate_and_takes_other_samples_in_another_epoch() -> None:
    cfg = replace(PLAIN, caption_dropout=0.3)
    dropped = [{i for i in range(1000) if draw(cfg, 0, epoch, i, torch.zeros(1), (0, 1)).drop_caption} for epoch in (0, 1)]
    assert [len(d) / 1000 for d in dropped] == pytest.approx([0.3, 0.3], abs=0.05)
    assert len(dropped[0] & dropped[1]) / 1000 == pytest.approx(0.09, abs=0.03)  # independent, not the same clips again


class Recorder:
    """A family whose transformer predicts a constant."""

    def forward(self, transformer: nn.Module, x: torch.Tensor, t: torch.Tensor, condition: Condition) -> torch.Tensor:
        self.x, self.t = x, t
        return torch.full_like(x, 0.5)

    def given_frames(self, condition: Condition) -> int:
        return 0


def loss_of(schedule: NoiseSchedule, data: list[float], noise: list[float], t: list[float]) -> tuple[list[float], list[float]]:
    """What the model saw, and the losses, of samples that are one number each."""
    family = Recorder()
    latents, drawn = (torch.tensor(x).view(-1, 1, 1, 1, 1).expand(-1, 1, 1, 1, 2) for x in (data, noise))
    loss_B = denoising_loss(family, schedule, nn.Identity(), latents, drawn, torch.tensor(t), {})  # type: ignore[arg-type]
    assert loss_B.dtype == torch.float32
    return family.x[:, 0, 0, 0, 0].tolist(), loss_B.tolist()


def test_flow_matching_loss_by_hand() -> None:
    seen, losses = loss_of(FLOW, [3.0, 3.0], [1.0, -1.0], [0.25, 1.0])
    assert seen == [0.75 * 3 + 0.25 * 1, -1.0]
    assert losses == [(0.5 - (1 - 3)) ** 2, (0.5 - (-1 - 3)) ** 2]


def test_v_prediction_loss_by_hand() -> None:
    """a^2 = 0.64 at discrete time 250, 0 at the last, which t = 1 means, too."""
    squares = torch.full((1000,), 0.5)
    squares[250], squares[999] = 0.64, 0.0
    seen, losses = loss_of(VPrediction(squares), [3.0, 3.0, 3.0], [1.0, 1.0, -1.0], [0.2504, 0.9995, 1.0])
    assert seen == pytest.approx([0.8 * 3 + 0.6 * 1, 1.0, -1.0])
    assert losses == pytest.approx([(0.5 - (0.8 * 1 - 0.6 * 3)) ** 2, (0.5 + 3) ** 2, (0.5 + 3) ** 2])


def test_discrete_times_cover_the_schedule_evenly() -> None:
    quantiles = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    counts = torch.bincount(timestep(quantiles))
    assert counts.tolist() == [100] * 1000
    assert timestep(torch.tensor([0.0, 0.0009, 0.0011, 1.0])).tolist() == [0, 0, 1, 999]


def test_what_is_left_to_the_model_is_filled_in() -> None:
    given = ObjectiveConfig(flow_shift=5.0, timestep_sampling="uniform", caption_dropout=0.2)
    assert resolve(given, FLOW) == given
    own = resolve(ObjectiveConfig(), FLOW)
    assert (own.flow_shift, own.timestep_sampling) == (3.0, "logit_normal")
    v_prediction = resolve(ObjectiveConfig(), VPrediction(torch.full((1000,), 0.5)))
    assert (v_prediction.flow_shift, v_prediction.timestep_sampling) == (1.0, "uniform")
    assert time_at_quantile(v_prediction, 0.3) == pytest.approx(0.3)
    assert resolve(v_prediction, VPrediction(torch.full((1000,), 0.5))) == v_prediction


def test_a_flow_shift_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match=r"objective.flow_shift=3 is not legal: this model is trained by v-prediction.*legal: 0"):
        resolve(ObjectiveConfig(flow_shift=3.0), VPrediction(torch.full((1000,), 0.5)))


def test_schedule_values() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="linear", final_lr_ratio=0.2)
    assert [learning_rate(cfg, s, 12) for s in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert [learning_rate(cfg, s, 12) for s in (5, 8, 12)] == pytest.approx([0.9, 0.6, 0.2])
    cosine = OptimizerConfig(lr=2.0, warmup_steps=0, schedule="cosine", final_lr_ratio=0.5)
    assert [learning_rate(cosine, s, 4) for s in (1, 2, 4)] == pytest.approx([1 + (1 + math.cos(math.pi / 4)) / 2, 1.5, 1.0])
    constant = OptimizerConfig(lr=3.0, warmup_steps=2, schedule="constant", final_lr_ratio=0.0)
    assert [learning_rate(constant, s, 10) for s in (1, 2, 3, 10)] == [1.5, 3.0, 3.0, 3.0]
    all_warm = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="cosine")
    assert learning_rate(all_warm, 4, 4) == 1.0


def test_adamw_takes_every_setting() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    cfg = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.6, eps=0.5, weight_decay=0.25)
    optimizer = make_optimizer(cfg, [w])
    expected, m, v = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        w.grad = torch.tensor([gradient])
        optimizer.step()
        expected *= 1 - 0.1 * 0.25
        m, v = 0.8 * m + 0.2 * gradient, 0.6 * v + 0.4 * gradient**2
        expected -= 0.1 * (m / (1 - 0.8**step)) / (math.sqrt(v / (1 - 0.6**step)) + 0.5)
    assert w.item() == pytest.approx(expected, rel=1e-6)


def test_gradient_norm_is_over_all_parameters_and_leaves_gradients_alone() -> None:
    a, b, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])
    assert gradient_norm([a, b, unused]) == 5.0
    assert a.grad.tolist() == [3.0, 0.0]


def test_ema_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    weights = dict(model.named_parameters())
    ema = Ema(weights, 0.75)
    for step, value in ((27, 2.0), (28, 4.0)):  # from step 27 on the decay is that of the configuration
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update(weights, step)
    assert list(ema.tensors) == ["weight"]
    assert ema.tensors["weight"].dtype == torch.float32
    assert ema.tensors["weight"].item() == 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4


def test_a_short_runs_average_forgets_where_it_began() -> None:
    weight = nn.Parameter(torch.zeros(1))
    averages = [Ema({"weight": weight}, decay) for decay in (0.999, 0.5)]
    with torch.no_grad():
        weight.fill_(1.0)
    left = 1.0
    for step in range(1, 101):
        for ema in averages:
            ema.update({"weight": weight}, step)
        left *= step / (step + 9)
    assert averages[0].tensors["weight"].item() == pytest.approx(1 - left, rel=1e-5)
    assert left < 1e-10
    assert averages[1].tensors["weight"].item() == pytest.approx(1)
