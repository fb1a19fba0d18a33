"""`videoqat sensitivity`: which layers a recipe hurts, and which to keep in bf16 so that little is lost.

For each transformer of the model, on the same clips, noise and times:

1. each layer's and head's own error, on the activations that bf16 has there;
2. the error at the transformer's output with all layers by the recipe, with all but one block, and with one block alone;
3. the same for sets of kept blocks that grow, one block at a time: the one next whose own part of the output's error (2) is largest. That is greedy:
   every set's error is measured, but another set of that size may do better.

Transformers of a pair never run on the same input, so each is measured by itself, and the errors of both add up, squared.

The output folder holds `sensitivity.json`, `report.html`, `recipe.yaml` (where a limit was given), and what makes an interrupted measurement go on:
`settings.json` and `parts/`. Limits aren't among the settings: with other limits the same folder answers at once.
"""

import dataclasses
import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from videoqat.attention.backends import record_receipts, resolve
from videoqat.config import SensitivityConfig, require, to_dict
from videoqat.console import progress, say
from videoqat.data.dataset import CachedVideos
from videoqat.errors import ConfigError
from videoqat.evaluation import sensitivity_report
from videoqat.evaluation.probe import Choice, Point, Probe, figures, points_of, with_formats
from videoqat.evaluation.resume import SETTINGS, check_out
from videoqat.files import atomic_path, check_writable, file_stats, writable_folder, write_json
from videoqat.generation.engine import choose_recipe
from videoqat.models.hub import check_weights, origin
from videoqat.models.install import check_policy
from videoqat.models.spec import AttentionLayer, family_of
from videoqat.parallel.mesh import world_size_from_launcher
from videoqat.provenance import device_name, provenance, versions
from videoqat.recipes import CHOICE_KEYS, AttentionRecipe, choose_kept, get_recipe, kept_fields
from videoqat.training import validation
from videoqat.training.objective import resolve as resolve_objective

VARIANTS = (("bf16", None), (None, "bf16"), ("mxfp8", None), (None, "mxfp8"), ("mxfp8", "mxfp8"))  # formats of QK and of PV; None: the recipe's


@dataclass
class _Component:
    """One transformer of the model, what is to be measured on it, and what is known by now: one dict of `Probe.measure` for each point."""

    name: str
    layers: list[AttentionLayer]
    points: list[Point]
    found: list[dict[str, Any]]
    ranking: list[int] = dataclasses.field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """The blocks that the recipe covers: what can be kept."""
        return sorted({layer.index for layer in self.layers})

    def sums(self, choice: Choice) -> list[dict[str, Any]]:
        """`SUMS` and losses of each point under `choice`; of a transformer that the recipe doesn't cover, those of the reference."""
        return [found["choices"][choice.name] if self.layers else found["reference"] for found in self.found]

    def error(self, choice: Choice) -> float:
        return sum(sum(sums["error"]) for sums in self.sums(choice))


def _choices(recipe: AttentionRecipe, blocks: list[int], variants: list[AttentionRecipe]) -> list[Choice]:
    """All blocks by the recipe, all but one, one alone; and all by each variant."""
    every = frozenset(blocks)
    alone, without = [Choice(recipe, every - {block}) for block in blocks], [Choice(recipe, frozenset({block})) for block in blocks]
    return list(dict.fromkeys([Choice(recipe), *alone, *without, *(Choice(variant) for variant in variants)])) if blocks else []


def _variants(recipe: AttentionRecipe) -> list[AttentionRecipe]:
    """`recipe` with Q and K, P and V, or all of them, in more bits. INT8 is for all operands together."""
    if recipe.qk == "int8":
        return []
    formats = dict.fromkeys((qk or recipe.qk, pv or recipe.pv) for qk, pv in VARIANTS)
    return [with_formats(recipe, f"{qk} Q K, {pv} P V", qk, pv) for qk, pv in formats if (qk, pv) not in ((recipe.qk, recipe.pv), ("bf16", "bf16"))]


class Sensitivity:
    """The work of one `sensitivity` call, checked: everything that can go wrong before weights are loaded goes wrong here.

    Raises:
        UserError: bad configuration or input, or an `out` that holds something else.
    """

    def __init__(self, config: SensitivityConfig) -> None:
        config.validate()
        self.config, self.out = config, Path(config.out)
        if world_size_from_launcher() > 1:
            raise ConfigError("sensitivity runs in one process; legal: without torchrun")
        check_weights(config.model)
        self.recipe, self.warnings = choose_recipe(config.model, config.recipe)
        require(self.recipe.is_quantised, "recipe", self.recipe.name, "a recipe that quantises")
        check_policy(self.recipe, config.model)
        self.device, self.dtype = config.runtime.resolve()
        self.family = family_of(config.model)
        head_dim = self.family.geometry(config.model, self.family.components(config.model)[0]).head_dim
        self.receipt = resolve(self.recipe, self.device, self.dtype, head_dim, config.runtime.kernel)
        self.cache: CachedVideos = validation.check_cache(config.cache, [config.model], "cache")
        self.samples = validation.choose_samples(len(self.cache), config.samples)
        self.variants = _variants(self.recipe) if config.variants else []
        self.components = [self._component(name) for name in self.family.components(config.model)]
        require(any(component.layers for component in self.components), "recipe", self.recipe.name, "one that covers a layer of this model")
        for component in self.components:
            low, high = self.family.flow_time_range(config.model, component.name)
            what = f"more: none of its times falls to {component.name}, which serves flow times {low:g} to {high:g}"
            require(bool(component.points or not component.layers), "timesteps", config.timesteps, what)
        self._probe: Probe | None = None
        self.settings = self._settings()
        check_out(self.out, self.settings, "sensitivity result")
        check_writable("out", self.out)

    def _component(self, name: str) -> _Component:
        """A transformer and its points, with what is known of each from an earlier run in this folder."""
        objective = resolve_objective(self.config.objective, self.family.noise_schedule(self.config.model))
        layers = self.family.attention_layers(self.family.build(self.config.model, name))
        covered = [layer for layer in layers if self.recipe.covers(layer.kind, layer.index, name)]
        config = self.config
        points = points_of(self.family, config.model, name, objective, self.samples, config.timesteps, config.batch_size)
        files = [self._part(name, point) for point in points]
        return _Component(name, covered, points, [json.loads(file.read_text()) if file.is_file() else {} for file in files])

    def _settings(self) -> dict[str, Any]:
        """Everything that the measurements depend on, as JSON gives it back."""
        free = ("out", "batch_size", *CHOICE_KEYS)
        settings = {
            **{key: value for key, value in to_dict(self.config).items() if key not in free},
            "recipe": self.recipe.to_dict(),
            "files": {folder: file_stats(folder) for folder in (self.config.model, self.config.cache)},
            "device": device_name(str(self.device)),
            "dtype": str(self.dtype),
            "versions": versions(),
        }
        loaded: dict[str, Any] = json.loads(json.dumps(settings))
        return loaded

    def _part(self, component: str, point: Point) -> Path:
        return self.out / "parts" / f"{component}-{point.name}.json"

    @property
    def limits(self) -> dict[str, Any]:
        """Those that were given, by which a set of kept blocks is chosen."""
        return {key: value for key in CHOICE_KEYS if (value := getattr(self.config, key))}

    def plan(self) -> dict[str, Any]:
        """What there is to do, for --dry-run; see `plan`."""
        components = {}
        for component in self.components:
            blocks = component.blocks
            choices = _choices(self.recipe, blocks, self.variants)
            growing = {Choice(self.recipe, frozenset(blocks[:count])) for count in range(1, len(blocks) + 1)}  # as many in whatever order
            more = len(growing - {*choices})
            anew = 1 if blocks and self.limits else 0  # the proposal
            # The reference runs before each of the three kinds.
            forwards = len(component.points) * (1 + len(choices) + (1 + more if more else 0) + 2 * anew)
            components[component.name] = {
                "blocks": len(blocks),
                "layers": len(component.layers),
                "points": len(component.points),
                "forwards": forwards,
            }
        return {
            "family": self.family.name,
            "recipe": self.recipe.to_dict(),
            "components": components,
            "device": str(self.device),
            "dtype": str(self.dtype),
            "receipt": self.receipt.to_dict(),
            "warnings": self.warnings,
        }

    def measure(self) -> None:
        """Measures all that isn't known yet, one transformer after the other."""
        for component in self.components:
            self._measure(component, _choices(self.recipe, component.blocks, self.variants), "one block at a time")
            every = frozenset(component.blocks)
            # Of equals the first, so that an interrupted measurement goes on in the same order.
            component.ranking = sorted(component.blocks, key=lambda block: -component.error(Choice(self.recipe, every - {block})))
            if component.blocks:
                self._measure(component, self._growing(component), "growing sets of kept blocks")

    def _growing(self, component: _Component) -> list[Choice]:
        """No block kept, the worst one, the two worst ..., all."""
        return [Choice(self.recipe, frozenset(component.ranking[:count])) for count in range(len(component.blocks) + 1)]

    def _measure(self, component: _Component, choices: list[Choice], what: str) -> None:
        todo = [at for at, found in enumerate(component.found) if not found or any(choice.name not in found["choices"] for choice in choices)]
        if not todo:
            return
        probe = self._probe_of(component.name)
        with progress(total=len(todo) * (1 + len(choices)), desc=f"{component.name}: {what}", unit="forward") as bar:
            for at in todo:
                before = component.found[at]
                with record_receipts() as receipts:
                    component.found[at] = probe.measure(component.points[at], choices, before, bar.update)
                ran = [{key: value for key, value in receipt.to_dict().items() if key != "calls"} for receipt in receipts]
                component.found[at]["receipts"] = [*before.get("receipts", []), *(one for one in ran if one not in before.get("receipts", []))]
                write_json(self._part(component.name, component.points[at]), component.found[at])

    def _probe_of(self, component: str) -> Probe:
        """The transformer in memory, loaded unless it is the one that was measured last."""
        if self._probe is None or self._probe.component != component:
            self._probe = None  # two large transformers need not fit together
            gc.collect()
            config = self.config
            self._probe = Probe(
                config.model, component, self.recipe, config.runtime.kernel, self.cache, config.timesteps, device=self.device, dtype=self.dtype
            )
        return self._probe

    # What follows from the measurements

    def _outcome(self, choices: list[Choice]) -> dict[str, Any]:
        """Figures at the output over all transformers, one choice for each: error, cosine, RMSE, and the loss and its relative change."""
        sums = [sums for component, choice in zip(self.components, choices, strict=True) for sums in component.sums(choice)]
        found: dict[str, Any] = figures(sums)
        losses = {name: self._losses(chosen) for name, chosen in (("bf16", None), ("recipe", choices))}
        loss = validation.summarise(losses, "bf16")["recipe"]
        interval = loss["ci95"] and [bound / float(losses["bf16"].mean()) for bound in loss["ci95"]]
        return {**found, "loss": loss["loss"], "loss_change": loss["relative"], "loss_change_ci95": interval}

    def _losses(self, choices: list[Choice] | None) -> NDArray[np.float64]:
        losses = np.zeros((len(self.samples), self.config.timesteps))
        for at, component in enumerate(self.components):
            parts = [found["reference"] for found in component.found] if choices is None else component.sums(choices[at])
            for point, part in zip(component.points, parts, strict=True):
                losses[point.row, list(point.part)] = part["losses"]
        return losses

    def _everywhere(self, recipe: AttentionRecipe) -> dict[str, Any]:
        return self._outcome([Choice(recipe)] * len(self.components))

    def _block(self, component: _Component, block: int) -> dict[str, Any]:
        """What one block does to its transformer's output, alone and left out."""
        every = frozenset(component.blocks)
        row: dict[str, Any] = {"component": component.name, "index": block, "rank": 1 + component.ranking.index(block)}
        bf16 = sum(sum(found["reference"]["losses"]) for found in component.found)
        for name, kept in (("only", every - {block}), ("without", frozenset({block}))):
            sums = component.sums(Choice(self.recipe, kept))
            row[name] = {**figures(sums), "loss_change": sum(sum(part["losses"]) for part in sums) / bf16 - 1}
        return row

    def _attention(self, component: _Component, layer: AttentionLayer) -> dict[str, Any]:
        """One attention layer's own error, on bf16's activations."""
        parts = [found["attention"][layer.name] for found in component.found]
        heads = [figures({key: [part[key][head]] for key in part} for part in parts) for head in range(layer.num_heads)]
        return {"component": component.name, "layer": layer.name, "index": layer.index, "kind": layer.kind, **figures(parts), "heads": heads}

    def path(self) -> list[dict[str, Any]]:
        """Growing sets of kept blocks over all transformers, each measured: the choices that `recipes.choose_kept` chooses from."""
        flops = [
            {layer: sum(found["flops"][layer] for found in part.found) for layer in part.found[0]["flops"]} for part in self.components if part.found
        ]
        whole = sum(sum(one.values()) for one in flops)
        growing = [self._growing(component) for component in self.components]
        counts = [0] * len(self.components)
        order = [
            (-component.error(Choice(self.recipe, frozenset(component.blocks) - {block})), at, block)
            for at, component in enumerate(self.components)
            for block in component.ranking
        ]
        steps: list[dict[str, Any]] = []
        for added in [None, *sorted(order, key=lambda entry: entry[0])]:
            if added is not None:
                counts[added[1]] += 1
            chosen = [sets[count] for sets, count in zip(growing, counts, strict=True)]
            kept, quantised = {}, 0.0
            for component, choice in zip(self.components, chosen, strict=True):
                own = {*self.recipe.keep_layers, *dict(self.recipe.keep_layers_in).get(component.name, ())}
                kept[component.name] = sorted(own | choice.kept)
                left = [layer.name for layer in component.layers if layer.index not in choice.kept]
                quantised += sum(found["flops"][layer] for found in component.found for layer in left)
            outcome = self._outcome(chosen)
            steps.append(
                {
                    "count": sum(counts),
                    "added": None if added is None else {"component": self.components[added[1]].name, "index": added[2]},
                    "kept": kept,
                    "error": outcome["relative_error"],
                    "share": quantised / whole,
                    **{key: outcome[key] for key in ("cosine", "rmse", "loss", "loss_change", "loss_change_ci95")},
                }
            )
        return steps

    def _times(self) -> list[dict[str, Any]]:
        """The error at the output by flow time, all blocks by the recipe."""
        rows = []
        for component in self.components:
            for point, part in zip(component.points, component.sums(Choice(self.recipe)), strict=True):
                for i, t in enumerate(point.times):
                    one = {key: [values[i]] for key, values in part.items()}
                    rows.append({"t": t, "component": component.name, "clip": point.row, **figures([one])})
        return sorted(rows, key=lambda row: row["t"])

    def receipts(self) -> list[dict[str, Any]]:
        """Which kernels ran, each once."""
        ran = [receipt for component in self.components for found in component.found for receipt in found["receipts"]]
        return [receipt for at, receipt in enumerate(ran) if receipt not in ran[:at]]

    def propose(self, path: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The recipe that meets the limits given, written to recipe.yaml, read back, installed and measured anew; None where no limit was given.

        Returns:
            `met`, `limits`; and where some set meets them `recipe`, `file`, `kept`, `count`, `share`, `error` (of the path), and `measured_anew`: the
            outcome with that very file.
        """
        limits = self.limits
        file = self.out / "recipe.yaml"
        file.unlink(missing_ok=True)
        if not limits:
            return None
        chosen = choose_kept(path, **limits)
        if chosen is None:
            say(f"no set of kept layers meets {limits}")
            return {"met": False, "limits": limits}
        recipe = self.recipe
        if chosen["count"]:
            names = [component.name for component in self.components]
            recipe = dataclasses.replace(recipe, name=f"{recipe.name}_keep_{chosen['count']}", **kept_fields(chosen["kept"], names))
        with atomic_path(file) as aside:
            told = f"relative error at the output {chosen['error']:.4g}, {chosen['share']:.0%} of attention's arithmetic quantised"
            aside.write_text(
                f"# Written by videoqat sensitivity for {self.config.model}: {told}.\n{yaml.safe_dump(recipe.to_dict(), sort_keys=False)}"
            )
        installed = Choice(get_recipe(str(file)), installed=True)
        for component in self.components:
            if component.layers:
                self._measure(component, [installed], "the proposed recipe, anew")
        anew = self._outcome([installed] * len(self.components))
        met = "max_error" not in limits or anew["relative_error"] <= limits["max_error"]
        kept = {key: chosen[key] for key in ("kept", "count", "share", "error")}
        return {"met": met, "limits": limits, "recipe": recipe.to_dict(), "file": str(file), **kept, "measured_anew": anew}


def plan(config: SensitivityConfig) -> dict[str, Any]:
    """What `sensitivity(config)` would do, checked without loading weights.

    Returns:
        `family`, `recipe`, `components` (name -> blocks and attention layers that the recipe covers, points, forwards at most), `device`, `dtype`,
        `receipt` (the kernel that would serve), `warnings`.

    Raises:
        UserError: whatever `sensitivity` would refuse before it loads the model.
    """
    return Sensitivity(config).plan()


def sensitivity(config: SensitivityConfig) -> dict[str, Any]:
    """Measures, proposes and reports; goes on where an interrupted measurement with the same settings stopped.

    Returns:
        What sensitivity.json holds: `all` (the outcome with every covered layer by the recipe), `attention` (each layer's own error, and its heads'),
        `layers` (each block at the output: `only` it, and `without` it), `variants`, `times`, `path` (growing sets of kept blocks), `proposal`,
        `receipts`, `provenance` ...; `report_html`; and `exit_code` 1 where no recipe meets the limits.

    Raises:
        UserError: bad configuration or input, or `out` holds something else; nothing is overwritten.
        NonFiniteLoss: the model yields NaN or inf; what is finished stays.
    """
    work = Sensitivity(config)
    write_json(writable_folder("out", config.out) / SETTINGS, work.settings)
    for warning in work.warnings:
        say(f"warning: {warning}")
    work.measure()
    path = work.path()
    proposal = work.propose(path)
    result = {
        "model": config.model,
        "model_origin": origin(config.model),
        "recipe": work.recipe.to_dict(),
        "components": [component.name for component in work.components],
        "clips": [work.cache.samples[sample].id for sample in work.samples],
        "all": work._everywhere(work.recipe),
        "attention": [work._attention(component, layer) for component in work.components for layer in component.layers],
        "layers": [work._block(component, block) for component in work.components for block in component.blocks],
        "variants": [{"name": variant.name, "qk": variant.qk, "pv": variant.pv, **work._everywhere(variant)} for variant in work.variants],
        "times": work._times(),
        "path": path,
        "limits": work.limits,
        "proposal": proposal,
        "receipts": work.receipts(),
        "warnings": work.warnings,
        "settings": {key: value for key, value in work.settings.items() if key != "files"},
        "provenance": provenance(str(work.device)),
    }
    write_json(work.out / "sensitivity.json", result)
    html = sensitivity_report.write_report(work.out)
    say(f"report: {html}")
    return {**result, "report_html": str(html), "exit_code": 0 if proposal is None or proposal["met"] else 1}
