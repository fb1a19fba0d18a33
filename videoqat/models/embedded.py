"""The embedded checkpoint: a small Wan, trained from scratch on moving garments, whose videos show what was asked for.

`assets/garments.safetensors` holds its transformer, bf16, and the text encoder that it was trained with, float32; `assets/garments.json` its hash and
what is known of it, of which its card, `assets/garments.md`, is made. The rest of the pipeline is that of every tiny Wan (`tiny.build_pipeline`,
which puts these weights in). Another checkpoint takes its place by

    python -m videoqat.models.embedded --base FOLDER --run FOLDER --clips FOLDER --judged judged.json

where `base` is what `export dtype=bfloat16` wrote, `run` the training's folder, `clips` that of its clips, `judged.json` what `evidence judge` said.
"""

import argparse
import hashlib
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videoqat.config import ExampleModelConfig, require
from videoqat.errors import CheckpointError
from videoqat.files import atomic_path, write_json

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ASSETS = Path(__file__).parent / "assets"
ASSET = ASSETS / "garments.safetensors"
NAME = "garments"
# A few of the captions that it was trained on, for whoever wants to see something.
CAPTIONS = ("a sneaker moves left", "a dress moves right", "a bag moves up", "an ankle boot moves down")
MOST_BYTES = 16 * 2**20
PARTS = ("transformer", "text_encoder")
SIZES = ("num_layers", "num_heads", "head_dim")
WORDS = "a t-shirt trousers pullover dress coat sandal shirt sneaker bag an ankle boot moves move left right up down"  # what captions are made of


def known() -> dict[str, Any]:
    """What assets/garments.json says: `sha256`, `sizes` (num_layers, num_heads, head_dim), `training`, `judged`, and more."""
    found: dict[str, Any] = json.loads(ASSET.with_suffix(".json").read_text())
    return found


def sized(config: ExampleModelConfig) -> dict[str, int]:
    """The sizes of the embedded weights.

    Raises:
        ConfigError: `config` asks for others.
    """
    sizes: dict[str, int] = known()["sizes"]
    for key, own in sizes.items():
        require(getattr(config, key) in (0, own), key, getattr(config, key), f"{own} with weights=embedded (or left out)")
    return sizes


def put_weights(pipeline: "DiffusionPipeline") -> dict[str, Any]:
    """Puts the embedded weights into a tiny Wan pipeline of their sizes; returns what belongs into its videoqat.json.

    Raises:
        CheckpointError: the file is not the one that garments.json describes, or VAE or tokens are not those that it was trained with.
    """
    from safetensors.torch import load

    from videoqat.models.tiny_vae import ASSET as VAE

    card, content = known(), ASSET.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != card["sha256"]:
        raise CheckpointError(f"{ASSET} has the hash {found[:16]}..., not {card['sha256'][:16]}...: it is torn, or not the one that ships")
    if _sha256(VAE) != card["vae_sha256"]:
        raise CheckpointError(f"{VAE} is not the VAE to whose latents {ASSET.name} was trained")
    if pipeline.tokenizer(WORDS).input_ids != card["token_ids"]:
        raise CheckpointError(f"captions have other tokens here than {ASSET.name} was trained with: the tokenizers library divides them otherwise")
    weights = load(content)
    for part in PARTS:
        own = {name.partition(".")[2]: tensor for name, tensor in weights.items() if name.startswith(f"{part}.")}
        parameters = dict(getattr(pipeline, part).named_parameters())
        if own.keys() != parameters.keys():
            raise CheckpointError(f"{ASSET} doesn't fit this pipeline's {part}: {sorted(own.keys() ^ parameters.keys())[0]}")
        for name, parameter in parameters.items():
            parameter.data = own[name]
    origin = {"embedded": NAME, "sha256": card["sha256"], "card": "videoqat/models/assets/garments.md"}
    return {**card["record"], "origin": origin}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- another checkpoint in its place


def embed(base: Path, run: Path, clips: Path, judged: Path, assets: Path = ASSETS, *, note: str = "") -> dict[str, Any]:
    """Writes garments.safetensors, garments.json and garments.md.

    Args:
        base: a pipeline's folder, its transformer in bf16, with the videoqat.json of `export`.
        run: with log.jsonl and provenance.json of its training.
        clips: with set.json of what it was trained on.
        judged: the JSON of `evidence judge`, of its videos.
        assets: where they go.
        note: what else the card must say of how the weights came about.

    Raises:
        CheckpointError: it is too large for a repository, as one in fp32 is; nothing is written.
    """
    from diffusers import WanPipeline
    from safetensors.torch import load_file, save

    from videoqat.models.tiny_vae import ASSET as VAE
    from videoqat.models.weights import weight_files

    pipeline = WanPipeline.from_pretrained(base, local_files_only=True)
    # The transformer as it lies there: diffusers would load some of its weights in more bits.
    parts = {"transformer": {}, "text_encoder": dict(pipeline.text_encoder.named_parameters())}
    for file in weight_files(base / "transformer"):
        parts["transformer"] |= load_file(file)
    weights = {f"{part}.{name}": tensor.detach().contiguous() for part, tensors in parts.items() for name, tensor in tensors.items()}
    config = pipeline.transformer.config
    record = json.loads((base / "videoqat.json").read_text())
    path, content = assets / ASSET.name, save(weights, {"format": "pt"})
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{base} comes to {len(content):,} bytes; legal: at most {MOST_BYTES:,}, as `export dtype=bfloat16` writes it")
    with atomic_path(path) as aside:
        aside.write_bytes(content)
    card = {
        "sha256": _sha256(path),
        "bytes": path.stat().st_size,
        "weights": sum(p.numel() for p in pipeline.transformer.parameters()),
        "sizes": dict(zip(SIZES, (config.num_layers, config.num_attention_heads, config.attention_head_dim), strict=True)),
        "vae_sha256": _sha256(VAE),
        "token_ids": pipeline.tokenizer(WORDS).input_ids,
        "clips": {key: value for key, value in json.loads((clips / "set.json").read_text()).items() if key != "photos"},
        "training": _training(run, record),
        "judged": _judged(json.loads(judged.read_text())),
        "note": note,
        "record": _without(record, str(Path(record["training"]["base"]).parent) + "/"),
    }
    write_json(path.with_suffix(".json"), card)
    path.with_suffix(".md").write_text(describe(card))
    return card


def describe(card: dict[str, Any]) -> str:
    """The text of garments.md."""
    import jinja2

    template = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.from_string((ASSETS / "garments.md.j2").read_text()).render(**card)


def _training(run: Path, record: dict[str, Any]) -> dict[str, Any]:
    """In short, from log and provenance."""
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    sessions = json.loads((run / "provenance.json").read_text())["sessions"]
    steps, settings = record["training"]["steps"], record["training"]["config"]["train"]
    return {
        "steps": steps,
        "samples": steps * settings["global_batch_size"],
        "loss_first": log[0]["loss"],
        "loss_last": statistics.mean(line["loss"] for line in log[-10:]),  # of single steps: one alone says little
        "step_seconds": statistics.median(line["step_time"] for line in log),
        "device": sessions[-1]["device"],
        "layout": sessions[-1]["layout"],
        "date": sessions[-1]["date"][:10],
        "versions": sessions[-1]["versions"],
    }


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    """Counts and shares alone, and how often the judges are right on real clips."""
    kept = {key: result[key] for key in ("videos", "garment", "direction", "both", "by_garment", "by_direction")}
    real = {key: value for key, value in result["real_clips"].items() if key in ("videos", "garment", "direction")}
    return kept | {"real_clips": real}


def _without(value: Any, prefix: str) -> Any:
    """`value` (JSON) without `prefix` in its texts: where on the training's machine something lay is nobody's business."""
    if isinstance(value, dict):
        return {key: _without(item, prefix) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, prefix) for item in value]
    return value.replace(prefix, "") if isinstance(value, str) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put another checkpoint in the place of the embedded one.")
    for name, what in (("base", "the exported folder"), ("run", "its training's folder"), ("clips", "its clips"), ("judged", "judged.json")):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    parser.add_argument("--note", default="", help="what else the card must say of how the weights came about")
    embed(**vars(parser.parse_args()))
