"""What a service offers: models by name with their defaults, and recipes by name. A request never names a path."""

import fcntl
from dataclasses import dataclass, field
from pathlib import Path

from videoqat.config import ExampleModelConfig, SamplingConfig, ServedModel, ServiceConfig
from videoqat.errors import UserError
from videoqat.files import writable_folder
from videoqat.generation.engine import check_sampling
from videoqat.models import embedded
from videoqat.models.spec import family_of, read_recipe
from videoqat.models.tiny import build_pipeline
from videoqat.recipes import AttentionRecipe, get_recipe


@dataclass(frozen=True)
class Model:
    """One model on offer.

    Attributes:
        name: what requests call it.
        path: its diffusers folder.
        attention: name of a recipe, or `checkpoint`, where a request names none.
        sampling: its defaults.
        trained_for: the recipe in its videoqat.json; None where there is none.
        family: name of its family.
        has_flow_shift: whether its noise schedule takes one.
    """

    name: str
    path: str
    attention: str
    sampling: SamplingConfig
    trained_for: AttentionRecipe | None
    family: str
    has_flow_shift: bool


@dataclass(frozen=True)
class Catalogue:
    """Models (the first is the default) and recipes on offer; `compare`: what a plain comparison renders."""

    models: dict[str, Model] = field(default_factory=dict)
    recipes: dict[str, AttentionRecipe] = field(default_factory=dict)
    compare: tuple[str, ...] = ()

    @property
    def default(self) -> Model:
        """The model of requests that name none."""
        return next(iter(self.models.values()))

    def recipe_spec(self, attention: str, model: Model) -> AttentionRecipe:
        """The recipe that `attention` means for a model; `checkpoint`: the one that it was trained for, bf16 where there is none."""
        if attention == "checkpoint":
            return model.trained_for or get_recipe("bf16")
        return self.recipes[attention]

    def hide_paths(self, text: str) -> str:
        """`text` with models' names where their folders stand: what users read needn't tell how this machine is laid out."""
        for model in sorted(self.models.values(), key=lambda model: -len(model.path)):  # /models/wan is also how /models/wan-qat begins
            text = text.replace(model.path, model.name)
        return text


def open_catalogue(config: ServiceConfig) -> Catalogue:
    """What `config` offers. Without models it is the embedded one, built now if need be.

    Raises:
        UserError: a model whose folder or defaults can't be used.
    """
    served = config.models or [ServedModel(embedded.NAME, str(embedded_model(config.folder)), defaults="generate/garments")]
    recipes = {recipe.name: recipe for recipe in map(get_recipe, config.recipes)}
    return Catalogue({model.name: describe(model) for model in served}, recipes, tuple(config.compare))


def describe(served: ServedModel) -> Model:
    """What is offered of a model, from its configurations alone.

    Raises:
        UserError: it can't be; it is named.
    """
    sampling = served.sampled()
    try:
        check_sampling(served.path, sampling)
        family = family_of(served.path)
        if family.takes_image(served.path) == "required":
            raise UserError(f"{served.path} needs a first frame, and requests have none; legal: models that make videos of text alone")
        shifts = family.noise_schedule(served.path).flow_shift is not None
        return Model(served.name, served.path, served.recipe, sampling, read_recipe(served.path), family.name, shifts)
    except UserError as error:
        raise type(error)(f"model {served.name}: {error}") from error


def embedded_model(folder: str | Path) -> Path:
    """The embedded model in the service's folder, unpacked if this one isn't there yet (another release may have another): some seconds, once."""
    path = writable_folder("folder", Path(folder).absolute() / "models") / f"{embedded.NAME}-{embedded.known()['sha256'][:12]}"
    with open(path.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # server and workers start at the same time, and each needs it
        if not path.exists():
            build_pipeline(ExampleModelConfig(out=str(path), weights="embedded"))
    return path
