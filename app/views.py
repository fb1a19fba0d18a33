"""From rows to what goes over HTTP."""

from typing import Any

from app import api
from app.catalogue import Catalogue
from app.jobs import Row
from app.tables import ENDED


def show_video(row: Row, waiting: list[str], keep_s: float) -> api.Video:
    """A video's row, given all that wait in order."""
    sampling, steps = row["sampling"], row["sampling"]["num_inference_steps"]
    completed, ended = row["status"] == "completed", row["ended_at"]
    result: dict[str, Any] | None = row["result"]
    return api.Video(
        id=row["id"],
        status=row["status"],
        progress=100 if completed else min(99, 100 * row["step"] // steps),
        model=row["model"],
        prompt=row["prompt"],
        size=f"{sampling['width']}x{sampling['height']}",
        seconds=f"{sampling['num_frames'] / sampling['fps']:.4g}",
        created_at=int(row["created_at"]),
        started_at=row["started_at"],
        completed_at=None if ended is None else int(ended),
        expires_at=None if ended is None else int(ended + keep_s),
        error=api.VideoError(code=row["error_code"], message=row["error_message"]) if row["status"] == "failed" else None,
        attention=row["attention"],
        seed=row["seed"],
        queue_position=waiting.index(row["id"]) + 1 if row["id"] in waiting else None,
        stage=api.Stage(name=row["stage"], step=row["step"], steps=steps) if row["status"] == "in_progress" else None,
        cancel_requested=row["cancel_requested"],
        restarts=row["crashes"],
        worker=row["worker"],
        comparison_id=row["comparison_id"],
        content_url=f"/v1/videos/{row['id']}/content" if completed else None,
        result=api.Result(**result) if result else None,
        **{key: sampling[key] for key in ("num_frames", "fps", "num_inference_steps", "guidance_scale", "negative_prompt", "flow_shift")},
    )


def show_comparison(row: Row, waiting: list[str], keep_s: float) -> api.Comparison:
    """A comparison's row with its videos."""
    videos: list[Row] = row["videos"]
    done = [video for video in videos if video["status"] == "completed"]
    ended = all(video["status"] in ENDED for video in videos)
    reference = next((video for video in videos if video["comparison_index"] == 0), None)
    floor = next((video for video in videos if video["comparison_index"] == row["floor_index"]), None)
    speedup = {}
    if reference in done:
        own = reference["result"]["timings"]["denoise_s"]
        speedup = {video["id"]: own / video["result"]["timings"]["denoise_s"] for video in done}
    return api.Comparison(
        id=row["id"],
        created_at=int(row["created_at"]),
        status="in_progress" if not ended else "completed" if len(done) > 1 else "failed",
        prompt=videos[0]["prompt"] if videos else "",
        reference=None if reference is None else reference["id"],
        floor=None if floor is None else floor["id"],
        videos=[show_video(video, waiting, keep_s) for video in videos],
        differences=row["differences"],
        speedup=speedup,
    )


def show_ballot(row: Row, prompt: str | None) -> api.Ballot:
    """A ballot's row; what a and b are is told only to those who have voted."""
    voted = row["choice"] is not None
    return api.Ballot(
        id=row["id"],
        prompt=prompt,
        a=f"/v1/ballots/{row['id']}/a",
        b=f"/v1/ballots/{row['id']}/b",
        choice=row["choice"],
        label_a=row["label_a"] if voted else None,
        label_b=row["label_b"] if voted else None,
    )


def show_models(catalogue: Catalogue, limits: dict[str, int]) -> api.Models:
    """What is on offer, and within which limits."""
    shown = []
    for model in catalogue.models.values():
        defaults = {key: value for key, value in vars(model.sampling).items() if key not in ("width", "height", "max_text_tokens")}
        defaults["size"] = f"{model.sampling.width}x{model.sampling.height}"
        trained_for = None if model.trained_for is None else model.trained_for.name
        shown.append(api.Model(id=model.name, family=model.family, attention=model.attention, trained_for=trained_for, defaults=defaults))
    return api.Models(data=shown, limits=limits)


def show_recipes(catalogue: Catalogue) -> api.Recipes:
    """The recipes on offer."""
    data = [api.Recipe(id=name, quantised=recipe.is_quantised, fields=recipe.to_dict()) for name, recipe in catalogue.recipes.items()]
    return api.Recipes(data=data, compare=list(catalogue.compare))
