"""From a request to orders that can be queued: checked against the model, the limits and the recipes on offer, before anything is kept.

What a request says wins over the operator's configuration, which wins over the model's defaults.
"""

import dataclasses
import math
import secrets
from typing import Any

from app.api import Compared, CreateVideo
from app.catalogue import Catalogue, Model
from app.jobs import Order
from videoqat.config import LimitsConfig, SamplingConfig
from videoqat.errors import UserError
from videoqat.generation.engine import check_recipe, check_sampling
from videoqat.models.spec import family_of


class BadRequest(Exception):
    """A field that can't be used.

    Args:
        param: its name.
        message: what is legal.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def orders_of(request: CreateVideo, catalogue: Catalogue, limits: LimitsConfig) -> tuple[list[Order], int | None]:
    """The videos that a request wants, the reference first, and which of them repeats the reference.

    Raises:
        BadRequest: something that can't be made here.
    """
    _check_text("prompt", request.prompt, limits.max_prompt_characters)
    if not request.prompt.strip():
        raise BadRequest("prompt", "prompt is empty; legal: some text")
    _check_text("negative_prompt", request.negative_prompt or "", limits.max_prompt_characters)
    model = _model(catalogue, "model", request.model)
    sides = _sides(request, catalogue, model, limits)
    seed = request.seed if request.seed is not None else secrets.randbelow(2**32)
    sampling = _sampling(request, model, limits)
    orders = []
    for side_model, attention in sides:
        _check_fit(catalogue, side_model, attention, sampling)
        orders.append(Order(request.prompt, side_model.name, attention, seed, dataclasses.asdict(sampling)))
    wanted = [*orders, orders[0]] if request.floor else orders
    if len(wanted) > limits.max_queued:  # which is told now: a 429 would have it tried again for ever
        raise BadRequest("compare", f"compare makes {len(wanted)} videos; legal: at most {limits.max_queued}, as many as may wait here")
    return wanted, len(orders) if request.floor else None


def _check_text(param: str, value: str, longest: int) -> None:
    if len(value) > longest:
        raise BadRequest(param, f"{param} has {len(value)} characters; legal: at most {longest}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(param, f"{param} is no Unicode text: {error.reason}") from error
    if "\0" in value:
        raise BadRequest(param, f"{param} holds a NUL character; legal: text")


def _model(catalogue: Catalogue, param: str, name: str | None) -> Model:
    if name is None:
        return catalogue.default
    if name not in catalogue.models:
        raise BadRequest(param, f"model {name!r} does not exist; legal: {', '.join(catalogue.models)}")
    return catalogue.models[name]


def _attention(catalogue: Catalogue, param: str, name: str) -> str:
    if name != "checkpoint" and name not in catalogue.recipes:
        raise BadRequest(param, f"attention {name!r} does not exist; legal: checkpoint, {', '.join(catalogue.recipes)}")
    return name


def _sides(request: CreateVideo, catalogue: Catalogue, model: Model, limits: LimitsConfig) -> list[tuple[Model, str]]:
    """Model and attention of each video wanted."""
    attention = None if request.attention is None else _attention(catalogue, "attention", request.attention)
    compare = request.compare
    if not compare:
        if isinstance(compare, list):
            raise BadRequest("compare", "compare is an empty list; legal: true, false, or two or more recipes")
        if request.floor:
            raise BadRequest("floor", "floor=true goes with compare: it renders a comparison's reference a second time")
        return [(model, attention or model.attention)]
    if compare is True:
        sides = [(model, name) for name in (("bf16", attention) if attention else catalogue.compare)]
        if attention and "bf16" not in catalogue.recipes:
            raise BadRequest("compare", "this service does not offer bf16; legal: a list of its recipes")
    else:
        if attention:
            raise BadRequest("attention", "attention and a list to compare exclude each other")
        named = [Compared(attention=side, model=None) if isinstance(side, str) else side for side in compare]
        sides = [
            (_model(catalogue, "compare", side.model) if side.model else model, _attention(catalogue, "compare", side.attention)) for side in named
        ]
    if len(sides) < 2:
        raise BadRequest("compare", "compare holds one recipe; legal: two or more")
    if len(sides) + request.floor > limits.max_compared:
        raise BadRequest("compare", f"compare makes {len(sides) + request.floor} videos; legal: at most {limits.max_compared}")
    if len({(side.name, name) for side, name in sides}) < len(sides):
        raise BadRequest("compare", "compare holds the same model and recipe twice; legal: ones that differ (floor=true repeats the reference)")
    return sides


def _sampling(request: CreateVideo, model: Model, limits: LimitsConfig) -> SamplingConfig:
    """The request's settings over the model's."""
    keys = ("fps", "num_inference_steps", "guidance_scale", "negative_prompt", "flow_shift", "num_frames")
    given: dict[str, Any] = {key: getattr(request, key) for key in keys if getattr(request, key) is not None}
    if "guidance_scale" in given or "flow_shift" in given:
        given |= {key: float(given[key]) for key in ("guidance_scale", "flow_shift") if key in given}
    if request.size is not None:
        width, height = (int(side) for side in request.size.split("x"))
        given |= {"width": width, "height": height}
    sampling = dataclasses.replace(model.sampling, **given)
    if request.seconds is not None:
        if request.num_frames is not None:
            raise BadRequest("seconds", "seconds and num_frames exclude each other")
        sampling = dataclasses.replace(sampling, num_frames=_frames(request.seconds, sampling.fps, model))
    too_large = sampling.width * sampling.height > limits.max_pixels
    if too_large:
        raise BadRequest(
            "size", f"size {sampling.width}x{sampling.height} has more than {limits.max_pixels} pixels, which is what this service allows"
        )
    if sampling.num_frames > limits.max_frames:
        param = "num_frames" if request.seconds is None else "seconds"
        raise BadRequest(param, f"{sampling.num_frames} frames are more than {limits.max_frames}, which is what this service allows")
    if sampling.num_inference_steps > limits.max_steps:
        raise BadRequest(
            "num_inference_steps", f"{sampling.num_inference_steps} steps are more than {limits.max_steps}, which is what this service allows"
        )
    return sampling


def _frames(seconds: str | float, fps: int, model: Model) -> int:
    """The nearest number of frames that the model can do, at least one step beyond a single one."""
    try:
        wanted = float(seconds)
    except ValueError:
        wanted = -1.0
    if not 0 < wanted <= 3600:
        raise BadRequest("seconds", f"seconds={seconds!r} is not legal; legal: above 0, at most 3600")
    geometry = family_of(model.path).geometry(model.path)
    step = math.lcm(geometry.vae_temporal, geometry.frame_multiple)
    return max(1, round(wanted * fps / step)) * step + 1


def _check_fit(catalogue: Catalogue, model: Model, attention: str, sampling: SamplingConfig) -> None:
    """That this model can be sampled so, under this recipe."""
    try:
        sampling.validate()
        check_sampling(model.path, sampling)
    except UserError as error:
        message = catalogue.hide_paths(str(error))
        words = ("num_frames", "frames", "height", "width", "flow_shift")
        found = next((word for word in words if word in message), None)
        param = {"frames": "num_frames", "height": "size", "width": "size"}.get(found or "", found)
        raise BadRequest(param or "size", message.replace("sampling.", "").replace("sampling: ", "")) from error
    try:
        check_recipe(model.path, catalogue.recipe_spec(attention, model), sampling)
    except UserError as error:
        raise BadRequest("attention", catalogue.hide_paths(str(error))) from error
