"""Clips and captions to latents and text embeddings, once: `videoqat preprocess`.

A cache folder holds `index.json` (settings, geometry and the list of samples; written last), `shards/` (the tensors, see `shards`) and
`report.json` (what was skipped and why). A sample is known by a hash of everything it was made from: the content of its file, its caption, the
settings and the encoders' files. So a second run makes only what is new or changed, leaves out what has vanished, and goes on where a killed one
stopped; touching a file changes nothing. Until the new index is in place, the old one and its shards stay valid.

Clips are hashed and decoded in `workers` threads (decoders let go of Python's lock); the encoders run in the main thread, `batch_size` clips of one
bucket at a time, each by itself as far as the arithmetic goes. At most workers + 1 decoded clips wait at any time, and batch_size of each bucket.

Under torchrun each process takes every world-size-th clip, with an encoder on its own device (there may be more processes than GPUs), and writes
shards of its own. When all are done, the first one writes index and report. A sample is the same whoever made it (to the last bit, where
batch_size is 1), so the number of processes may change from one run to the next.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from videoqat.config import ParallelConfig, PreprocessConfig, parse_bucket, require, to_dict
from videoqat.console import progress, say
from videoqat.data.clips import SUFFIXES, ClipEntry, ClipProblem, decode_to_bucket, find_clips, reason
from videoqat.data.dataset import INDEX, INDEX_FORMAT
from videoqat.data.encoder import Encoder
from videoqat.data.shards import ShardStore, all_finite
from videoqat.errors import CheckpointError, DataError
from videoqat.files import check_writable, write_json
from videoqat.models.hub import origin
from videoqat.models.spec import Geometry, ModelFamily, family_of, read_model_json
from videoqat.parallel.folder import check_ours, sole_user
from videoqat.parallel.mesh import LONGEST_WAIT_S, Mesh, collective_errors, open_mesh, shared_device
from videoqat.provenance import provenance

MARK = ".videoqat-cache"  # says that the folder is ours to change, and is what its lock hangs on

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Prepared:
    """What a worker makes of a clip: its key, and its frames unless the cache holds the key; or a problem."""

    entry: ClipEntry
    key: str = ""
    bucket: str = ""
    frames: np.ndarray | None = None
    problem: str | None = None


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _encoder_files(folder: Path) -> list[Path]:
    """The files of everything in a pipeline's folder that encodes: VAE, text encoders, tokenizers; not transformers and scheduler.

    Raises:
        CheckpointError: a part has none.
    """
    others = {*family_of(folder).components(folder), "scheduler"}
    parts = [name for name, kind in read_model_json(folder, "model_index.json").items() if isinstance(kind, list) and kind[0] and name not in others]
    files = []
    for part in sorted(parts):
        found = sorted(path for path in (folder / part).rglob("*") if path.is_file())
        if not found:
            raise CheckpointError(f"{folder} is no complete pipeline's folder: {part}/ is not there or empty")
        files += found
    return files


def encoder_fingerprint(folder: str | Path) -> str:
    """SHA-256 over the files of everything in a pipeline's folder that encodes (`_encoder_files`)."""
    folder = Path(folder)
    total = hashlib.sha256()
    for path in progress(_encoder_files(folder), desc="hashing encoders", unit="file"):
        total.update(f"{path.relative_to(folder).as_posix()} {file_hash(path)}\n".encode())
    return total.hexdigest()


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _bucket_name(bucket: tuple[int, int, int]) -> str:
    return "x".join(map(str, bucket))


def _checked_geometry(config: PreprocessConfig) -> tuple[ModelFamily, Geometry, dict[str, tuple[int, int, int]]]:
    """The model's family and sizes, and the buckets by name; raises ConfigError for a bucket that the model can't take. Loads no weights."""
    family = family_of(config.model.path)
    geometry = family.geometry(config.model.path, config.model.component)
    buckets = {}
    for text in config.buckets:
        bucket = parse_bucket("buckets", text)
        geometry.check_size("buckets", *bucket)
        buckets[_bucket_name(bucket)] = bucket
    return family, geometry, buckets


def _gives_images(config: PreprocessConfig, family: ModelFamily) -> bool:
    """Whether samples hold what the model is told of their first frames.

    Raises:
        ConfigError: it is asked for, and the model takes none.
    """
    takes = family.takes_image(config.model.path)
    legal = f"false for {config.model.path}, which makes videos from text alone"
    require(takes != "no" or not config.image_to_video, "image_to_video", config.image_to_video, legal)
    return takes == "required" or config.image_to_video


def _describe_buckets(geometry: Geometry, buckets: dict[str, tuple[int, int, int]]) -> dict[str, dict[str, Any]]:
    return {name: {"latent_shape": list(geometry.latent_shape(*size)), "tokens": geometry.num_tokens(*size)} for name, size in buckets.items()}


def _counts(problems: Iterable[str]) -> dict[str, int]:
    """Problems by reason, the most frequent first."""
    return dict(Counter(reason(problem) for problem in problems).most_common())


def _phrase(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _nothing_usable(source: str, skipped: list[ClipEntry]) -> DataError:
    if not skipped:
        return DataError(f"source={source!r} holds no clips; legal: video files ({', '.join(SUFFIXES)}) with captions")
    counts = _counts(entry.problem or "" for entry in skipped)
    first = skipped[0]
    return DataError(f"source={source!r} holds no usable clip: {_phrase(counts)}; the first: {first.id}: {first.problem}")


def plan(config: PreprocessConfig) -> dict[str, Any]:
    """What `preprocess` would do, as far as can be said without decoding a clip or loading a weight.

    Returns {"clips", "with_caption", "skipped": {reason: count}, "buckets": {name: {"latent_shape", "tokens"}}, "geometry", "image_to_video"}.

    Raises:
        UserError: settings that can't be used, or no clip that might be.
    """
    config.validate()
    family, geometry, buckets = _checked_geometry(config)
    family.text_tokens(config.model.path, config.max_text_tokens)
    gives_images = _gives_images(config, family)
    config.runtime.resolve()
    _encoder_files(Path(config.model.path))
    check_ours(Path(config.out), MARK, "preprocess")
    check_writable("out", config.out)
    entries = find_clips(config.source)
    skipped = [entry for entry in entries if entry.problem]
    if len(skipped) == len(entries):
        raise _nothing_usable(config.source, skipped)
    return {
        "clips": len(entries),
        "with_caption": len(entries) - len(skipped),
        "skipped": _counts(entry.problem or "" for entry in skipped),
        "buckets": _describe_buckets(geometry, buckets),
        "geometry": dataclasses.asdict(geometry),
        "image_to_video": gives_images,
    }


def preprocess(config: PreprocessConfig) -> dict[str, Any]:
    """Makes the folder `config.out` the cache of `config.source`, reusing what is there and still right. Under torchrun all processes share the work.

    Returns {"out", "samples", "encoded" (made now), "reused", "skipped": {reason: count}, "buckets": {name: {"samples", "tokens", "latent_shape"}}}.

    Raises:
        UserError: settings that can't be used, a model folder that can't be loaded, no usable clip at all (counts by reason), an `out` that holds
            something else, or another process at work in it.
        WorkerLost: under torchrun, another process ended; what was written stays, and the same command goes on from there.
    """
    config.validate()
    family, geometry, buckets = _checked_geometry(config)
    device, dtype = config.runtime.resolve()
    out = Path(config.out)
    check_ours(out, MARK, "preprocess")
    entries = find_clips(config.source)
    if all(entry.problem for entry in entries):
        raise _nothing_usable(config.source, entries)
    settings: dict[str, Any] = {
        "family": family.name,
        "buckets": list(buckets),
        "fps": config.fps,
        "max_text_tokens": family.text_tokens(config.model.path, config.max_text_tokens),
        "image_to_video": _gives_images(config, family),
        "dtype": str(dtype).removeprefix("torch."),
        "encoder_fingerprint": encoder_fingerprint(config.model.path),
        "format": INDEX_FORMAT,
    }
    settings["settings_key"] = _digest(settings)
    patient = ParallelConfig(start_timeout_s=LONGEST_WAIT_S)
    # The processes only tell each other what they made, on the host. So they may share a GPU: decoding clips keeps many cores busy.
    device = shared_device(device)
    with open_mesh(patient, torch.device("cpu")) as mesh, collective_errors("preprocess"), sole_user(out, MARK, "preprocess", mesh):
        mesh.agree({"settings": settings, "clips": [(entry.id, entry.caption) for entry in entries]})
        encode = Encoder(config.model.path, settings, family, geometry, device, dtype)
        mine = _make_samples(config, buckets, settings["settings_key"], entries, encode, mesh)
        parts = mesh.gather_objects(mine)
        return mesh.on_rank_zero(lambda: _merge(config, geometry, buckets, settings, entries, parts))


@dataclass
class _Made:
    """What one process made of its share of the clips, by their place in the list of all."""

    keys: dict[int, str]
    problems: dict[int, str]
    encoded: int
    cut_captions: set[str]


def _make_samples(
    config: PreprocessConfig, buckets: dict[str, tuple[int, int, int]], settings_key: str, entries: list[ClipEntry], encode: Encoder, mesh: Mesh
) -> _Made:
    """Encodes this process's share, every world-size-th of the usable clips, into shards of its own."""
    if mesh.rank == 0:
        ShardStore.clean(Path(config.out))
    mesh.barrier()
    store = ShardStore(Path(config.out), config.shard_samples)
    mesh.barrier()  # nobody writes before all have removed what is damaged: made anew it has the same name, and a late one would remove that
    made = _Made({}, {}, 0, encode.cut_captions)
    null_key = _null_key(settings_key)
    if mesh.rank == 0 and null_key not in store.shard_of:
        store.add(null_key, "", encode.prompt(""))
        store.flush()
    share = [place for place, entry in enumerate(entries) if not entry.problem][mesh.rank :: mesh.world_size]
    prepare = functools.partial(_prepare, config=config, buckets=buckets, settings_key=settings_key, store=store)
    shared = f" (1 of {mesh.world_size} shares)" if mesh.world_size > 1 else ""
    waiting: dict[str, dict[str, _Prepared]] = {bucket: {} for bucket in buckets}  # by key
    broken = set()  # keys

    def encode_waiting(bucket: str) -> None:
        clips = [(key, prepared.entry.caption, prepared.frames) for key, prepared in waiting[bucket].items() if prepared.frames is not None]
        for (key, caption, frames), latents in zip(clips, encode.video([frames for *_, frames in clips]), strict=True):
            tensors = {"latents": latents, **encode.prompt(caption), **encode.image(frames)}
            if all_finite(tensors):
                store.add(key, bucket, tensors)
                made.encoded += 1
            else:
                broken.add(key)
        waiting[bucket].clear()

    with progress(total=len(share), desc=f"encoding clips{shared}", unit="clip") as bar:
        for place, prepared in zip(share, _map_in_order(prepare, [entries[place] for place in share], config.workers), strict=True):
            bar.update()
            if prepared.problem:
                made.problems[place] = prepared.problem
                continue
            made.keys[place] = prepared.key
            if prepared.key not in store.bucket_of:
                waiting[prepared.bucket][prepared.key] = prepared
                if len(waiting[prepared.bucket]) == config.batch_size:
                    encode_waiting(prepared.bucket)
        for bucket in buckets:
            if waiting[bucket]:  # else nothing need be loaded that encodes
                encode_waiting(bucket)
    store.flush()
    for place in [place for place, key in made.keys.items() if key in broken]:
        del made.keys[place]
        made.problems[place] = f"not finite: the encoders gave NaN or inf in {str(encode.dtype).removeprefix('torch.')}"
    return made


def _merge(
    config: PreprocessConfig,
    geometry: Geometry,
    buckets: dict[str, tuple[int, int, int]],
    settings: dict[str, Any],
    entries: list[ClipEntry],
    parts: list[_Made],
) -> dict[str, Any]:
    """Report and index of what all processes made; returns what `preprocess` does."""
    out, device = Path(config.out), str(config.runtime.resolve()[0])
    store = ShardStore(out, config.shard_samples)
    keys, problems = ({place: value for part in parts for place, value in getattr(part, kind).items()} for kind in ("keys", "problems"))
    samples = [(entries[place], keys[place]) for place in sorted(keys)]
    found = [dataclasses.replace(entry, problem=problems.get(place, entry.problem)) for place, entry in enumerate(entries)]
    skipped = [entry for entry in found if entry.problem]
    _write_report(out, config, entries, skipped, device)
    if not samples:
        raise _nothing_usable(config.source, skipped)
    null_key = _null_key(settings["settings_key"])
    in_bucket = Counter(store.bucket_of[key] for _, key in samples)
    index: dict[str, Any] = {
        "format": INDEX_FORMAT,
        "settings": settings | {"model": config.model.path, "source": config.source},
        "geometry": dataclasses.asdict(geometry),
        "buckets": {name: {"samples": in_bucket[name], **about} for name, about in _describe_buckets(geometry, buckets).items()},
        "null_condition": {"key": null_key, "shard": store.shard_of[null_key]},
        "shards": store.sizes({null_key, *(key for _, key in samples)}),
        "samples": [
            {
                "id": entry.id,
                "bucket": store.bucket_of[key],
                "caption": entry.caption,
                "source": str(entry.path),
                "key": key,
                "shard": store.shard_of[key],
            }
            for entry, key in samples
        ],
        "provenance": provenance(device),
    }
    write_json(out / INDEX, index)
    store.drop_others(index["shards"])
    encoded = sum(part.encoded for part in parts)
    counts = _counts(entry.problem or "" for entry in skipped)
    said = f"{out}: {len(samples)} samples ({encoded} encoded now)"
    say(f"{said}, {len(skipped)} skipped: {_phrase(counts)}; see {out / 'report.json'}" if skipped else f"{said}, none skipped")
    cut_captions = set().union(*(part.cut_captions for part in parts))
    if cut_captions:
        say(f"{len(cut_captions)} captions are longer than max_text_tokens={settings['max_text_tokens']} and were cut")
    reused = len(samples) - encoded
    return {"out": str(out), "samples": len(samples), "encoded": encoded, "reused": reused, "skipped": counts, "buckets": index["buckets"]}


def _null_key(settings_key: str) -> str:
    return _digest([settings_key, "null condition"])


def _prepare(
    entry: ClipEntry, *, config: PreprocessConfig, buckets: dict[str, tuple[int, int, int]], settings_key: str, store: ShardStore
) -> _Prepared:
    """In a worker: hash the clip and, unless the cache holds it, decode it. Whatever is wrong with a clip becomes its problem."""
    assert entry.path is not None
    try:
        key = _digest([settings_key, file_hash(entry.path), entry.caption])
        if key in store.bucket_of:
            return _Prepared(entry, key)
        bucket, frames = decode_to_bucket(entry.path, list(buckets.values()), config.fps)
    except ClipProblem as problem:
        return _Prepared(entry, problem=str(problem))
    except Exception as error:  # decoders fail in ways that can't be listed; one odd clip must not end a run of days
        return _Prepared(entry, problem=f"cannot decode: {type(error).__name__}: {error}")
    return _Prepared(entry, key, _bucket_name(bucket), frames)


def _map_in_order(function: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`map` in `workers` threads that runs at most one item ahead of them, so that results don't pile up."""
    waiting: collections.deque[concurrent.futures.Future[R]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _write_report(out: Path, config: PreprocessConfig, entries: list[ClipEntry], skipped: list[ClipEntry], device: str) -> None:
    report = {
        "source": config.source,
        "clips": len(entries),
        "usable": len(entries) - len(skipped),
        "skipped": _counts(entry.problem or "" for entry in skipped),
        "skipped_clips": [{"id": entry.id, "problem": entry.problem} for entry in skipped],
        "config": to_dict(config),
        "model": origin(config.model.path),
        "provenance": provenance(device),
    }
    write_json(out / "report.json", report)
