"""What 4-bit attention does to one transformer, layer by layer and at its output, on a fixed set of forwards.

A *point* is one forward: a cached clip at a few flow times. At each point the transformer first runs with every layer in bf16, the reference; what
goes into each attention meanwhile is also attended with by the recipe, and the two results are compared, head by head, before the next layer runs.
Then it runs again under one *choice* after the other (all layers by the recipe, all but one, one alone ...), and its output is held against the
reference's. What is kept of all that are sums: memory holds one transformer, one reference output, and one layer's attention at a time.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from videoqat.attention.functional import attention
from videoqat.config import ObjectiveConfig
from videoqat.data.dataset import CachedVideos
from videoqat.errors import NonFiniteLoss
from videoqat.models.install import computing_by, install, observe
from videoqat.models.spec import AttentionLayer, ModelFamily, family_of
from videoqat.recipes import BLOCK_FORMATS, PRODUCT_OF, RECIPES, AttentionRecipe
from videoqat.training.validation import stratified_noise, stratified_times

# Of an output and a reference: the squared difference, the squared reference, their product, the squared output, and how many numbers they are. Every
# figure follows from these, for any group of clips, times or heads.
SUMS = ("error", "reference", "dot", "output", "count")
Sums = dict[str, list[float]]  # one of each for each flow time, or each head


@dataclass(frozen=True)
class Point:
    """One forward: clip `sample` of the cache (row `row` of those chosen) at those of its flow times whose indices are `part`."""

    row: int
    sample: int
    part: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"clip{self.row:03d}-times{'-'.join(map(str, self.part))}"


@dataclass(frozen=True)
class Choice:
    """Which layers compute by what: `recipe` in all that the probe's recipe covers, but for those in blocks `kept`, which compute in bf16.

    With `installed`, `recipe` is installed as whoever uses it would, and decides by itself which layers it keeps.
    """

    recipe: AttentionRecipe
    kept: frozenset[int] = frozenset()
    installed: bool = False

    @property
    def name(self) -> str:
        """Tells it from all other choices of one probe."""
        if self.installed:
            return f"installed {self.recipe.as_json}"
        return f"{self.recipe.name}, kept {' '.join(map(str, sorted(self.kept))) or 'nothing'}"


def points_of(
    family: ModelFamily, folder: str | Path, component: str, objective: ObjectiveConfig, samples: list[int], num_times: int, batch_size: int
) -> list[Point]:
    """The forwards of one transformer: of each clip the stratified times that this transformer serves, at most `batch_size` at once."""
    low, high = family.flow_time_range(folder, component)
    points = []
    for row, sample in enumerate(samples):
        times = stratified_times(objective, sample, num_times)
        mine = [k for k, t in enumerate(times) if low <= t < high or (t >= high == 1.0)]
        for at in range(0, len(mine), batch_size):
            part = tuple(mine[at : at + batch_size])
            points.append(Point(row, sample, part, tuple(times[k] for k in part)))
    return points


def sums_of(output: Tensor, reference: Tensor, dim: int) -> Sums:
    """`SUMS` of two tensors for each index of `dim`, summed in fp64 over all else."""
    rows: list[Tensor] = []
    for index in range(reference.shape[dim]):  # one at a time: fp64 copies of all heads together would be gigabytes
        a, b = output.select(dim, index).double(), reference.select(dim, index).double()
        rows.append(torch.stack([(a - b).square().sum(), b.square().sum(), (a * b).sum(), a.square().sum()]))
    counts = [float(reference.select(dim, 0).numel())] * len(rows)
    return dict(zip(SUMS, [*torch.stack(rows).T.tolist(), counts], strict=True))


class Probe:
    """One transformer, loaded once, and what is measured on it.

    Args:
        folder, component: of the model.
        recipe: what its layers are to compute by.
        kernel: that computes it; see `attention`.
        cache: the clips.
        num_times: stratified times of each clip.
        device, dtype: of the transformer.
    """

    def __init__(
        self,
        folder: str | Path,
        component: str,
        recipe: AttentionRecipe,
        kernel: str,
        cache: CachedVideos,
        num_times: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._folder, self.component, self._recipe, self._kernel = folder, component, recipe, kernel
        self._cache, self._num_times, self._device = cache, num_times, device
        self._family = family_of(folder)
        self._schedule = self._family.noise_schedule(folder)
        self._transformer: nn.Module = self._family.load_transformer(folder, component, dtype=dtype).to(device)
        self._layers = self._install(recipe)

    @torch.no_grad()
    def measure(self, point: Point, choices: list[Choice], found: dict[str, Any], done: Callable[[], None]) -> dict[str, Any]:
        """Runs the forwards of `choices` at `point`, and that of the reference.

        Args:
            point: where.
            choices: under which to run.
            found: what an earlier call returned for this point, or nothing. What is in it isn't measured again.
            done: called after each forward.

        Returns:
            `attention`: layer -> `SUMS` by head of the layers that the recipe covers; `flops`: layer -> those of its two matrix products, of all
            layers; `reference` and `choices` (name -> ...): `SUMS` and `losses` by time. JSON-able.

        Raises:
            NonFiniteLoss: an output holds NaN or inf.
        """
        inputs, target, given = self._inputs(point)
        result = {"choices": {}, **found}

        def compared(output: Tensor, by: str) -> dict[str, Any]:
            if not output.isfinite().all():
                where = f"clip {self._cache.samples[point.sample].id}, flow times {list(point.times)}"
                raise NonFiniteLoss(f"{self._folder}: {self.component} yields NaN or inf, {by}: {where}")
            losses = (output - target)[:, :, given:].double().square().mean(dim=(1, 2, 3, 4))
            return {**sums_of(output[:, :, given:], reference[:, :, given:], 0), "losses": losses.tolist()}

        bf16 = Choice(RECIPES["bf16"])
        if found:
            reference = self._forward(bf16, inputs)
        else:
            with self._watching() as (result["attention"], result["flops"]):
                reference = self._forward(bf16, inputs)
            result["reference"] = compared(reference, "recipe bf16")
        done()
        for choice in choices:
            if choice.name not in result["choices"]:
                result["choices"][choice.name] = compared(self._forward(choice, inputs), f"recipe {choice.name}")
            done()
        return result

    def _inputs(self, point: Point) -> tuple[tuple[Tensor, Tensor, Any], Tensor, int]:
        """What the transformer is given, what it is to predict, and how many latent frames are given."""
        sample = self._cache.load(point.sample)
        latents_CFHW = sample.pop("latents")
        noise_BCFHW = stratified_noise(point.sample, latents_CFHW, self._num_times)[list(point.part)].to(self._device)
        latents_BCFHW = latents_CFHW.expand(len(point.part), *latents_CFHW.shape).to(self._device)
        t_B = torch.tensor(point.times, device=self._device)
        conditions = self._family.batch_conditions([sample], int(self._cache.settings["max_text_tokens"]))
        condition = {name: x.expand(len(point.part), *x.shape[1:]).to(self._device) for name, x in conditions.items()}
        x_BCFHW = self._schedule.add_noise(latents_BCFHW, noise_BCFHW, t_B)
        target_BCFHW = self._schedule.target(latents_BCFHW, noise_BCFHW, t_B)
        return (x_BCFHW, t_B, condition), target_BCFHW, self._family.given_frames(condition)

    def _forward(self, choice: Choice, inputs: tuple[Tensor, Tensor, Any]) -> Tensor:
        with self._under(choice):
            return self._family.forward(self._transformer, *inputs).float()

    def _install(self, recipe: AttentionRecipe) -> list[AttentionLayer]:
        return install(self._transformer, recipe, kernel=self._kernel, family=self._family, component=self.component)

    @contextlib.contextmanager
    def _under(self, choice: Choice) -> Iterator[None]:
        if choice.installed:
            self._install(choice.recipe)
            try:
                yield
            finally:
                self._layers = self._install(self._recipe)
            return
        kept = [layer for layer in self._layers if layer.index in choice.kept]
        others = [layer for layer in self._layers if layer.index not in choice.kept]
        kernel = self._kernel if choice.recipe == self._recipe else "auto"
        with computing_by(kept, RECIPES["bf16"]), computing_by(others, choice.recipe, kernel):
            yield

    @contextlib.contextmanager
    def _watching(self) -> Iterator[tuple[dict[str, Sums], dict[str, float]]]:
        """Within the block both dicts fill, `SUMS` of each covered layer's attention by the recipe against bf16, and FLOPs of every layer."""
        found: dict[str, Sums] = {}
        flops: dict[str, float] = {}
        covered = {layer.name for layer in self._layers}

        def observer(layer: str, q_BNHD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor) -> None:
            batch, num_queries, num_heads, head_dim = q_BNHD.shape
            flops[layer] = flops.get(layer, 0.0) + 4.0 * batch * num_queries * k_BNHD.shape[1] * num_heads * head_dim
            if layer in covered:
                exact = attention(q_BNHD, k_BNHD, v_BNHD, RECIPES["bf16"])
                sums = sums_of(attention(q_BNHD, k_BNHD, v_BNHD, self._recipe, kernel=self._kernel), exact, 2)
                before = found.get(layer)  # attention that looks at an image, too, or at padded samples one by one, comes here several times
                found[layer] = sums if before is None else {name: [a + b for a, b in zip(before[name], sums[name], strict=True)] for name in SUMS}

        observe(self._transformer, observer)
        try:
            yield found, flops
        finally:
            observe(self._transformer, None)


def figures(parts: Iterable[Mapping[str, list[float]]]) -> dict[str, float]:
    """`relative_error` (L2), `cosine` and `rmse` of all these `SUMS` together."""
    parts = list(parts)
    error, reference, dot, output, count = (math.fsum(value for part in parts for value in part[name]) for name in SUMS)
    sizes = (reference * output) ** 0.5
    return {
        "relative_error": (error / reference) ** 0.5 if reference else 0.0,
        "cosine": dot / sizes if sizes else float(reference == output),  # of nothing to something 0, as in `attention.output_error`
        "rmse": (error / count) ** 0.5 if count else 0.0,
    }


def with_formats(recipe: AttentionRecipe, name: str, qk: str, pv: str) -> AttentionRecipe:
    """`recipe` with other formats, without what only goes with those that it had."""
    changes: dict[str, Any] = {"name": name, "qk": qk, "pv": pv}
    if "nvfp4" not in (qk, pv):
        changes["scale_divisors"] = (6.0,)
    if pv != "nvfp4":
        changes["two_level_p"] = False
    if qk not in (*BLOCK_FORMATS, "fp8"):
        changes["rotate_qk"] = False
    changes["twice"] = tuple(operand for operand in recipe.twice if changes[PRODUCT_OF[operand]] == "nvfp4")
    if pv not in BLOCK_FORMATS:
        changes["v_blocks"] = "tokens"
    return dataclasses.replace(recipe, **changes)
