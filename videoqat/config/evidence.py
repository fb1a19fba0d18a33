"""What the evidence can be told: the table, one of its measurements, and the judges of generated videos."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from videoqat.config.checks import check_seeds, check_st_lpips, choice, existing, model_folder, require
from videoqat.config.groups import RuntimeConfig, SamplingConfig, model_setting
from videoqat.errors import ConfigError
from videoqat.recipes import FORWARD_FIELDS, AttentionRecipe, get_recipe, kept_fields, recipe_from_dict


def name_in_files(name: str) -> str:
    """What folders and files of a row or a training are called."""
    return re.sub(r"[^a-z0-9.+-]+", "-", name.lower())


@dataclass
class TrainJudgesConfig:
    """The networks that judge generated videos of moving garments, trained on real clips on the CPU."""

    out: str = MISSING  # a .safetensors file; a .json beside it says how good they are
    photos: str = "embedded"  # or the path of a folder with Fashion-MNIST's idx files
    num_clips: int = 1200  # to train the judge of directions on; that of garments sees single frames, drawn as it goes
    num_test_clips: int = 1000  # from other photos, through mp4 files
    size: int = 128  # height and width of the clips
    steps: int = 2000  # of what finds and what names the garment; a quarter for directions
    batch_size: int = 128
    lr: float = 3e-3
    seed: int = 0

    def validate(self) -> None:
        for key, least in {"num_clips": 1, "num_test_clips": 1, "steps": 40, "batch_size": 2}.items():
            require(getattr(self, key) >= least, key, getattr(self, key), f"at least {least}")
        require(self.size >= 64 and self.size % 16 == 0, "size", self.size, "a multiple of 16, at least 64")
        require(self.lr > 0, "lr", self.lr, "above 0")
        check_seeds("seed", self.seed)
        if self.photos != "embedded":
            existing("photos", self.photos, folder=True)


@dataclass
class JudgeConfig:
    """Do generated videos show what their captions say? Judged by two small networks."""

    videos: str = MISSING  # a folder that generate prompts=FILE wrote, with captions such as "a sneaker moves left"
    judges: str = ""  # what train-judges wrote; empty: those that ship

    def validate(self) -> None:
        existing("videos", self.videos, folder=True)
        if self.judges:
            existing("judges", self.judges)


@dataclass
class Training:
    """One way to train the base on, done once for each seed."""

    name: str = MISSING
    recipe: str = "bf16"
    steps: int = 1000
    lr: float = 2e-4
    settings: list[str] = field(default_factory=list)  # more `key=value` of `train`


@dataclass
class Row:
    """One line of the table: the weights of a training (or the base itself) under a recipe."""

    name: str = MISSING
    training: str = ""  # a training's name; empty: the base
    recipe: str = "bf16"
    reference: str = ""  # the row that its loss is held against, such as BF16 after as many steps; empty: the table's
    plain: str = ""  # likewise, the row whose gap is what there is to win back
    changes: dict[str, Any] = field(default_factory=dict)  # fields of the recipe that are otherwise
    keep: int = 0  # so many blocks in bf16: the worst ones, as the table's `sensitivity` has them
    videos: bool = True  # whether to make and judge videos, where the table has captions: most of what a row costs

    def resolve(self, sensitivity: str) -> AttentionRecipe:
        """The recipe of this row.

        Args:
            sensitivity: the table's.

        Raises:
            ConfigError: changes that no recipe has; a `sensitivity` that can't be read, of another recipe, or of fewer blocks than are to be kept.
        """
        recipe = get_recipe(self.recipe)
        if self.changes:
            recipe = recipe_from_dict({**recipe.to_dict(), **self.changes, "name": f"{recipe.name}, {self.name}"}, f"rows: changes of {self.name!r}")
        if not self.keep:
            return recipe
        if not sensitivity:
            needs = f"which row {self.name!r} with keep={self.keep} needs; legal: the path of its sensitivity.json"
            raise ConfigError(f"sensitivity='' is no result of `videoqat sensitivity`, {needs}")
        try:
            found = json.loads(Path(sensitivity).read_text())
            measured, components, path = recipe_from_dict(found["recipe"], sensitivity), found["components"], found["path"]
            kept = {step["count"]: kept_fields(step["kept"], components) for step in path}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"sensitivity={sensitivity!r} is no result of `videoqat sensitivity`: {error!r}") from error
        for name in (*FORWARD_FIELDS, "keep_layers", "keep_layers_in", "keep_components"):
            legal = f"a result for {name}={getattr(recipe, name)!r}, as recipe {recipe.name} of row {self.name!r} has it"
            require(getattr(measured, name) == getattr(recipe, name), "sensitivity", sensitivity, legal)
        require(self.keep in kept, f"rows: keep of {self.name!r}", self.keep, f"0 to {max(kept)}: the blocks in {sensitivity}")
        return dataclasses.replace(recipe, name=f"{recipe.name}, {self.name}", **kept[self.keep])


@dataclass
class MeasureConfig:
    """One model under one recipe, as one JSON: its loss on held-out clips, its videos, and what these show."""

    model: str = model_setting()
    recipe: str = "bf16"
    cache: str = MISSING  # held-out clips, as preprocess wrote them with this model
    samples: int = 256  # clips of it, spread evenly
    timesteps: int = 4  # noise levels of each
    clips_at_once: int = 1  # of one size, in one forward: memory and speed
    prompts: str = ""  # a file of captions; empty: no videos
    videos_at_once: int = 1  # rendered in one batch; a row's videos are held against those of a row that were rendered as many at once
    seed: int = 0  # of the first video; each has the next
    out: str = MISSING  # a folder for result.json and videos/
    reference: str = ""  # such a folder of another row: its videos are those that this one's are held against
    st_lpips: str = "auto"  # of the videos: auto (where its weights are installed) | installed (an error where not) | none | a file with its weights
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        model_folder("model", self.model)
        get_recipe(self.recipe)
        existing("cache", self.cache, folder=True)
        for key in ("samples", "timesteps", "clips_at_once", "videos_at_once"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        if self.prompts:
            existing("prompts", self.prompts)
        if self.reference:
            existing("reference", self.reference, folder=True)
        check_seeds("seed", self.seed)
        check_st_lpips(self.st_lpips)
        self.sampling.validate()
        self.runtime.validate()


@dataclass
class EvidenceConfig:
    """A table of what 4-bit attention costs and what training wins back: trainings from one base, and rows that measure them, for several seeds.

    Everything is resumed by the same command: trainings from their checkpoints, rows that are there are not measured again.
    """

    base: str = model_setting()
    cache: str = MISSING  # training clips, as preprocess wrote them
    held_out: str = MISSING  # others, which nothing was tuned on
    out: str = MISSING
    trainings: list[Training] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    reference: str = ""  # the row that losses and videos are held against; empty: the first
    plain: str = ""  # the row whose gap is what there is to win back; empty: the second
    sensitivity: str = ""  # what `videoqat sensitivity` found on other clips than held_out (sensitivity.json): for rows with `keep`
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    train: list[str] = field(default_factory=list)  # `key=value` of `train`, for all trainings
    samples: int = 256
    timesteps: int = 4
    clips_at_once: int = 1  # this and what follows: as `evidence measure` has it
    prompts: str = ""
    videos_at_once: int = 1
    st_lpips: str = "auto"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    at_once: int = 1  # processes on each device
    minutes: float = 0.0  # after which what runs is stopped (a training saves first) and nothing new is begun; 0: no limit
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def validate(self) -> None:
        model_folder("base", self.base)
        existing("cache", self.cache, folder=True)
        existing("held_out", self.held_out, folder=True)
        require(len(self.rows) >= 2, "rows", len(self.rows), "two or more: the reference, and what is held against it")
        names = [row.name for row in self.rows]
        for kind, given in (("rows", names), ("trainings", [training.name for training in self.trainings])):
            files = {name_in_files(name) for name in given}  # of two rows with one folder the second would be taken for measured
            require(len(files) == len(given), kind, given, "names that differ, not only in capitals or in spaces, _ and -")
            require(all(re.fullmatch(r"[\w.+ -]+", name) for name in given), kind, given, "names of letters, digits, spaces and . _ + -")
        trainings = ["", *(training.name for training in self.trainings)]
        for row in self.rows:
            choice(f"rows: training of {row.name!r}", row.training, trainings)
            require(row.keep >= 0, f"rows: keep of {row.name!r}", row.keep, "0 or more")
            row.resolve(self.sensitivity)
            for key in ("reference", "plain"):
                choice(f"rows: {key} of {row.name!r}", getattr(row, key), ["", *names])
        for training in self.trainings:
            get_recipe(training.recipe)
            require(training.steps >= 1, f"trainings: steps of {training.name!r}", training.steps, "at least 1")
        for key in ("reference", "plain"):
            choice(key, getattr(self, key), ["", *names])
        if any(row.keep for row in self.rows):
            # Which blocks are worst must not be chosen by what then shows how good the choice was.
            chosen_on = json.loads(Path(self.sensitivity).read_text())["settings"]["cache"]
            require(Path(chosen_on).resolve() != Path(self.held_out).resolve(), "sensitivity", self.sensitivity, "one of other clips than held_out")
        shown = next(row.videos for row in self.rows if row.name == (self.reference or names[0]))
        require(
            shown or not self.prompts or not any(row.videos for row in self.rows), "rows: videos of the reference", shown, "true, since others have"
        )
        require(len(self.seeds) > 0 and len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "one or more that differ")
        check_seeds("seeds", self.seeds, (2**63 - 1) // 1000)  # the first video of seed s has 1000 s
        for key in ("samples", "timesteps", "clips_at_once", "videos_at_once", "at_once"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        require(self.minutes >= 0, "minutes", self.minutes, "0 (no limit) or more")
        if self.prompts:
            existing("prompts", self.prompts)
        check_st_lpips(self.st_lpips)
        self.sampling.validate()
        self.runtime.validate()
