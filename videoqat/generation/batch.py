"""`videoqat generate`: one video, or one for each line of a file, by one process or by many.

Under torchrun the videos that are missing are dealt out, one to each process in turn; every process has an engine on a device of its own and waits
for nobody until its share is done. Where `parallel.sp` or `parallel.cfg` say so, they are dealt out to groups of processes that make each video
together (`generation.division`). A video depends on its prompt, its settings and its seed alone, so the number of processes may change from one run
to the next. What is finished is told by the files: an .mp4 that is whole and a .json that says the same settings. So the same command again, after
whatever ended it, makes what is missing.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from videoqat.config import GenerateConfig, to_dict
from videoqat.console import own_rank, progress, say
from videoqat.data.precompute import file_hash
from videoqat.errors import NonFiniteError, UserError
from videoqat.files import atomic_path, check_writable, file_stats, write_json
from videoqat.generation import single
from videoqat.generation.division import Division, check_division, check_guided, open_division
from videoqat.generation.engine import Engine, check_recipe, check_sampling, choose_recipe, text_tokens
from videoqat.generation.pool import warm_up
from videoqat.generation.prompts import Video, videos
from videoqat.models.hub import check_weights
from videoqat.parallel.folder import check_ours, sole_user
from videoqat.parallel.mesh import Mesh, collective_errors, world_size_from_launcher
from videoqat.provenance import provenance

COMMAND = "generate prompts=FILE"
MARK = ".videoqat-batch"  # says that the folder is ours to change, and is what its lock hangs on
MANIFEST, FAILED = "manifest.json", "failed.jsonl"


def plan(config: GenerateConfig) -> dict[str, Any]:
    """What `generate(config)` would do, checked without loading weights.

    Returns:
        For one video, see `single.plan`. For many: `videos`, `prompts` (how many), `sizes` (frames, height, width, num_tokens; each once), `recipe`,
        `device`, `dtype`, `receipt`, `warnings`.

    Raises:
        UserError: whatever `generate` would refuse before it loads the model.
    """
    config.validate()
    if not config.prompts:
        return single.plan(config)
    planned, _ = plan_folder(config)
    return planned


def plan_folder(config: GenerateConfig) -> tuple[dict[str, Any], list[Video]]:
    """What `plan` says of many videos, and the videos."""
    check_weights(config.model)
    check_division(config.parallel, config.model, world_size_from_launcher(), many=True)
    found = videos(config)
    sizes: dict[str, dict[str, Any]] = {}
    recipe, _ = choose_recipe(config.model, config.recipe)
    for video in found:
        wish = json.dumps(to_dict(video.sampling))
        if wish not in sizes:
            try:
                sizes[wish] = check_sampling(config.model, video.sampling)
                check_recipe(config.model, recipe, video.sampling)
                check_guided(config.parallel, config.model, video.sampling)
            except UserError as error:
                raise type(error)(f"prompts={config.prompts!r}, line {video.line}: {error}") from error
            sizes[wish] |= {key: getattr(video.sampling, key) for key in ("num_frames", "height", "width")}
    check_ours(Path(config.out), MARK, COMMAND)
    check_writable("out", config.out)
    shown = [{key: size[key] for key in ("num_frames", "height", "width", "num_tokens")} for size in sizes.values()]
    planned = {
        "videos": len(found),
        "prompts": len({video.number for video in found}),
        "sizes": [size for i, size in enumerate(shown) if size not in shown[:i]],
        **single.plan_attention(config, next(iter(sizes.values()))["head_dim"]),
    }
    return planned, found


def generate(config: GenerateConfig) -> dict[str, Any]:
    """Makes the video, or the videos, that `config` asks for (`config.prompts`: many).

    Returns:
        For one video what its .json holds (`single.generate`). For many `out`, `videos`, `rendered` (now), `skipped` (they were there), `failed` (how
        many of each), `ranks`, `manifest`, and `exit_code`: 1 where some failed.

    Raises:
        UserError: bad configuration or input; an `out` that holds something else, or videos that were made with other settings; or another
            process at work in it.
        NonFiniteVideo: the model yielded NaN or inf where one video was asked for. Of many, the others go on; failed.jsonl says what happened.
        WorkerLost: under torchrun, another process ended; what is finished stays, and the same command goes on from there.
    """
    if not config.prompts:
        return single.generate(config)
    config.validate()
    planned, found = plan_folder(config)
    with open_crew(config, [config.recipe]) as crew:
        return fill_folder(config, planned, found, crew)


@dataclass
class _Share:
    """What one process did: names of the videos that it rendered, and what failed and how."""

    rendered: list[str] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Crew:
    """All processes of one command.

    Attributes:
        mesh: all of them.
        division: those that make the same videos as this one.
        engine: this process's, loaded when it is first asked for.
    """

    mesh: Mesh
    division: Division
    engine: Callable[[], Engine]


@contextlib.contextmanager
def open_crew(config: GenerateConfig, recipes: list[str]) -> Iterator[Crew]:
    """The processes that make what `config` wants under `recipes`, for as long as the block runs. Collective, and once in a process's life.

    Raises:
        UserError: a recipe that can't be divided so.
        WorkerLost: another process ended.
    """
    chosen = [choose_recipe(config.model, recipe)[0] for recipe in recipes]
    together = open_division(config.parallel, config.model, chosen, config.runtime.resolve()[0], world_size_from_launcher())
    with together as (mesh, division), collective_errors("generate"):
        runtime = dataclasses.replace(config.runtime, device=str(mesh.device))
        yield Crew(mesh, division, functools.cache(lambda: Engine(config.model, runtime, division=division)))


def fill_folder(config: GenerateConfig, planned: dict[str, Any], found: list[Video], crew: Crew) -> dict[str, Any]:
    """Makes what is missing of `config`'s folder, with what `plan_folder` said of it. Collective; returns what `generate` does."""
    out, mesh, stats = Path(config.out), crew.mesh, file_stats(config.model)
    with sole_user(out, MARK, COMMAND, mesh):
        mesh.agree(
            {
                "recipe": planned["recipe"],
                "dtype": planned["dtype"],
                "parallel": to_dict(config.parallel),
                "the videos wanted (hash)": single.digest([dataclasses.asdict(video) for video in found]),
                "the model's files and their sizes (hash)": single.digest({name: size for name, (size, _) in stats.items()}),
            }
        )
        # Rank 0's word counts: copies of a model on several hosts differ in their times.
        fingerprint, pending = mesh.on_rank_zero(lambda: _look_around(config, planned, found))
        if len(pending) < len(found):
            say(f"{len(found) - len(pending)} of {len(found)} videos are there already under the same settings")
        share = [found[at] for at in pending[crew.division.index :: crew.division.count]]
        parts = mesh.gather_objects(_render_share(config, share, fingerprint, crew))
        return mesh.on_rank_zero(lambda: _finish(config, found, pending, parts))


def _one(config: GenerateConfig, video: Video) -> GenerateConfig:
    """The configuration that makes `video` alone."""
    path = str(Path(config.out) / f"{video.name}.mp4")
    return dataclasses.replace(
        config,
        prompt=video.prompt,
        prompts="",
        image=video.image,
        samples_per_prompt=1,
        vbench=False,
        warm_up=False,
        seed=video.seed,
        out=path,
        overwrite=False,
        sampling=video.sampling,
    )


def _look_around(config: GenerateConfig, planned: dict[str, Any], found: list[Video]) -> tuple[str, list[int]]:
    """On rank 0: the model's fingerprint, and the places in `found` of the videos still to be made.

    Raises:
        UserError: a video is there that was made with other settings, and config.overwrite is false.
    """
    for left_over in Path(config.out).glob(".*.partial.*"):
        left_over.unlink()
    fingerprint = single.model_fingerprint(config.model)
    common = {"model_fingerprint": fingerprint, "recipe": planned["recipe"], "dtype": planned["dtype"]}
    looked_at = progress(found, desc="looking for finished videos", unit="video")
    return fingerprint, [at for at, video in enumerate(looked_at) if not _is_finished(config, video, common)]


def _is_finished(config: GenerateConfig, video: Video, common: dict[str, Any]) -> bool:
    """Whether the video is there, whole, and made with the settings wanted now."""
    path = Path(config.out) / f"{video.name}.mp4"
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        return False
    sampling = to_dict(video.sampling) | {"max_text_tokens": text_tokens(config.model, video.sampling)}
    own = {"prompt": video.prompt, "seed": video.seed, "image_sha256": video.image_sha256, "sampling": sampling}
    own["vae_tiling"] = config.runtime.vae_tiling  # which changes pixels by more than rounding, as nothing else of `runtime` does but the dtype
    wanted: dict[str, Any] = json.loads(json.dumps({**common, **own}))
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8"))
        made = record["config"]
        there = {key: record[key] for key in common} | {"prompt": made["prompt"], "seed": made["seed"]}
        # Records of earlier versions lack what there was no choice of.
        there["image_sha256"] = record.get("image_sha256", "")
        there["vae_tiling"] = made["runtime"].get("vae_tiling", False)
        there["sampling"] = {"guidance_scale_2": 0.0, "true_cfg_scale": 1.0} | made["sampling"] | {"max_text_tokens": record["max_text_tokens"]}
        sha256 = record["video_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        if config.overwrite:
            return False
        raise UserError(f"{sidecar} is none of generate's ({type(error).__name__}: {error}); legal: another out, or overwrite=true") from error
    if there != wanted:
        if config.overwrite:
            return False
        key, old, new = _first_difference(there, wanted)
        raise UserError(f"{path} was made with {key}={old!r}, not {new!r}; legal: another out, or overwrite=true, which makes it again")
    return path.is_file() and file_hash(path) == sha256


def _first_difference(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, Any, Any]:
    key = next(key for key in new if old[key] != new[key])
    if isinstance(new[key], dict) and isinstance(old[key], dict):
        inner = next(k for k in [*new[key], *old[key]] if old[key].get(k) != new[key].get(k))
        return f"{key}.{inner}", old[key].get(inner), new[key].get(inner)
    return key, old[key], new[key]


def _render_share(config: GenerateConfig, share: list[Video], fingerprint: str, crew: Crew) -> _Share:
    """Renders this process's videos. One that can't be made is told at once, and the next one's turn comes."""
    done = _Share()
    if not share:
        return done
    engine, division = crew.engine(), crew.division
    warm: set[tuple[int, int, int]] = set()
    whose = f" (1 of {division.count} shares)" if division.count > 1 else ""
    with progress(total=sum(video.sampling.num_inference_steps for video in share), desc="videos", unit="step") as bar:
        for at, video in enumerate(share, start=1):
            bar.set_description(f"video {at} of {len(share)}{whose}")
            finished_at = bar.n + video.sampling.num_inference_steps
            size = (video.sampling.num_frames, video.sampling.height, video.sampling.width)
            cold = config.warm_up and size not in warm
            warm.add(size)
            failure = _attempt(engine, config, video, fingerprint, lambda *_: bar.update(), cold=cold)
            if division.rank != 0:
                continue  # the first of those who made it together tells
            if failure is None:
                done.rendered.append(video.name)
                continue
            done.failed.append(failure)
            bar.write(f"videoqat generate{own_rank()}: failed: {failure['video']}: {failure['error']}", file=sys.stderr)
            bar.update(finished_at - bar.n)
            if engine.device.type == "cuda":
                torch.cuda.empty_cache()  # where memory ran out, the next video starts with all of it
    return done


def _attempt(
    engine: Engine, config: GenerateConfig, video: Video, fingerprint: str, on_step: Callable[[int, int], None], *, cold: bool
) -> dict[str, Any] | None:
    """Renders one video, `cold` after a warm-up; what happened, if it can't be. What fails for all that follow as well (a disk, a GPU) is raised, and
    so is what one of several ranks may meet alone: the others are still in the middle of the video."""
    try:
        if cold:
            warm_up(engine, video.sampling, [config.recipe])
        single.render(engine, _one(config, video), fingerprint, on_step)
        return None
    except OSError as error:
        raise UserError(f"out={config.out!r}: {video.name} can't be written: {error.strerror or error}; what is finished stays") from error
    except torch.AcceleratorError:
        raise
    except Exception as error:
        foreseen = isinstance(error, UserError | NonFiniteError)
        if engine.division.size > 1 and not isinstance(error, NonFiniteError):
            raise
        said = str(error) if foreseen else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        trace = "" if foreseen or isinstance(error, torch.OutOfMemoryError) else traceback.format_exc()
        what = {"video": f"{video.name}.mp4", "prompt": video.prompt, "line": video.line, "index": video.index, "seed": video.seed}
        return {**what, "error": said, "traceback": trace}


def _finish(config: GenerateConfig, found: list[Video], pending: list[int], parts: list[_Share]) -> dict[str, Any]:
    """On rank 0: manifest and list of failures of what all processes did; returns what `generate` does."""
    out = Path(config.out)
    rendered = {name for part in parts for name in part.rendered}
    place = {f"{video.name}.mp4": at for at, video in enumerate(found)}
    failed = sorted((failure for part in parts for failure in part.failed), key=lambda failure: place[failure["video"]])
    lost = {failure["video"] for failure in failed}
    whole = [video for video in found if f"{video.name}.mp4" not in lost]
    manifest = {
        "prompts": config.prompts,
        "config": to_dict(config),
        "videos": [
            {
                "video": f"{video.name}.mp4",
                "record": f"{video.name}.json",
                "prompt": video.prompt,
                "line": video.line,
                "index": video.index,
                "seed": video.seed,
                "rendered_now": video.name in rendered,
            }
            for video in whole
        ],
        "failed": len(failed),
        "ranks": len(parts),
        "provenance": provenance(str(config.runtime.resolve()[0])),
    }
    (out / FAILED).unlink(missing_ok=True)
    if failed:
        with atomic_path(out / FAILED) as aside:
            aside.write_text("".join(json.dumps(failure, ensure_ascii=False) + "\n" for failure in failed), encoding="utf-8")
    write_json(out / MANIFEST, manifest)
    skipped = len(found) - len(pending)
    said = f"{out}: {len(found)} videos, {len(rendered)} rendered now, {skipped} there already, {len(failed)} failed"
    say(f"{said}: see {out / FAILED}" if failed else said)
    return {
        "out": str(out),
        "videos": len(found),
        "rendered": len(rendered),
        "skipped": skipped,
        "failed": len(failed),
        "ranks": len(parts),
        "manifest": str(out / MANIFEST),
        "exit_code": 1 if failed else 0,
    }
