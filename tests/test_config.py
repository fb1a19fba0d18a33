"""Configuration is strict: whatever can't be meant is refused in one line that names the key, the value and what is legal."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from videoqat import config as cfg
from videoqat.commands import COMMANDS
from videoqat.errors import ConfigError
from videoqat.recipes import RECIPES, get_recipe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCHEMAS = {
    "train": cfg.TrainConfig,
    "preprocess": cfg.PreprocessConfig,
    "generate": cfg.GenerateConfig,
    "compare": cfg.CompareConfig,
    "compare-attention": cfg.CompareAttentionConfig,
    "model": cfg.GenerateConfig,
}
EVIDENCE = {
    "base": cfg.TrainConfig,
    "clips": cfg.ExampleClipsConfig,
    "held_out": cfg.ExampleClipsConfig,
    "generate": cfg.GenerateConfig,
    "model": cfg.ExampleModelConfig,
    "preprocess": cfg.PreprocessConfig,
}  # configs/evidence holds files for several commands; the others are tables for `evidence run`


def required(schema: type, folder: Path) -> list[str]:
    """Overrides that give `schema` what it asks for, with things that exist in `folder`."""
    prompts = folder / "prompts.txt"
    prompts.write_text("a cat\n")
    if schema is cfg.TrainConfig:
        return [f"model.path={folder}", f"cache={folder}", f"out={folder / 'out'}"]
    if schema is cfg.PreprocessConfig:
        return [f"model.path={folder}", f"source={folder}", f"out={folder / 'out'}"]
    if schema is cfg.GenerateConfig:
        return [f"model={folder}", "prompt=a cat", f"out={folder / 'out.mp4'}"]
    if schema is cfg.CompareConfig:
        entries = f"[{{name: a, model: '{folder}'}}, {{name: b, model: '{folder}', recipe: attn_qat}}]"
        return [f"entries={entries}", f"prompts={prompts}", f"out={folder / 'out'}"]
    if schema is cfg.CompareAttentionConfig:
        return [f"model={folder}", f"prompts={prompts}", f"out={folder / 'out'}"]
    if schema is cfg.ConvertConfig:
        (folder / "file.safetensors").touch()
        return [f"model={folder}", f"transformer_file={folder / 'file.safetensors'}", f"out={folder / 'out'}"]
    if schema is cfg.ExportConfig:
        return [f"run={folder}", f"out={folder / 'out'}"]
    if schema in (cfg.ExampleClipsConfig, cfg.ExampleModelConfig):
        return [f"out={folder / 'out'}"]
    if schema is cfg.SensitivityConfig:
        return [f"model={folder}", f"cache={folder}", f"out={folder / 'out'}"]
    if schema is cfg.EvidenceConfig:
        return [f"base={folder}", f"cache={folder}", f"held_out={folder}", f"out={folder / 'out'}"]
    if schema is cfg.MeasureConfig:
        return [f"model={folder}", f"cache={folder}", f"out={folder / 'out'}"]
    if schema is cfg.JudgeConfig:
        return [f"videos={folder}"]
    if schema is cfg.TrainJudgesConfig:
        return [f"out={folder / 'judges.safetensors'}"]
    if schema is cfg.BenchTrainingConfig:
        return [f"work={folder / 'work'}"]
    return []


def refusal(schema: type, file: str | None, overrides: list[str]) -> str:
    """The one line with which the configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        cfg.load(schema, file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Loading


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_legal(command: str, tmp_path: Path):
    schema = COMMANDS[command].schema
    rows = ["rows=[{name: a}, {name: b}]"] if schema is cfg.EvidenceConfig else []  # of which there are none by default
    config = cfg.load(schema, None, required(schema, tmp_path) + rows)
    assert isinstance(config, schema)


def test_defaults_then_includes_then_file_then_overrides(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("num_tokens: 1\nnum_heads: 2\nhead_dim: 16\n")
    (tmp_path / "more.yaml").write_text("num_heads: 3\nruntime: {device: cpu}\n")
    (tmp_path / "mine.yaml").write_text("include: [base.yaml, more.yaml]\nhead_dim: 32\nrepeats: 7\n")
    config = cfg.load(cfg.BenchAttentionConfig, str(tmp_path / "mine.yaml"), ["repeats=9"])
    assert (config.batch, config.num_tokens, config.num_heads, config.head_dim, config.repeats) == (1, 1, 3, 32, 9)
    assert (config.runtime.device, config.runtime.dtype) == ("cpu", "auto")


def test_an_include_may_name_a_file_below_configs(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("include: model/wan2.1-1.3b\nsampling: {num_frames: 33}\n")
    config = cfg.load(cfg.GenerateConfig, str(tmp_path / "mine.yaml"), required(cfg.GenerateConfig, tmp_path))
    assert (config.sampling.num_frames, config.sampling.width) == (33, 832)


def test_nested_includes_are_relative_to_the_file_that_includes(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "deep" / "b.yaml").write_text("num_tokens: 48\n")
    (tmp_path / "mine.yaml").write_text("include: deep/a.yaml\n")
    assert cfg.load(cfg.BenchAttentionConfig, str(tmp_path / "mine.yaml"), []).num_tokens == 48


def test_overrides_have_the_type_of_their_key(tmp_path: Path):
    overrides = [*required(cfg.TrainConfig, tmp_path), "optimizer.lr=1e-4", "train.steps=10", "from_scratch=true", "recipe=bf16"]
    config = cfg.load(cfg.TrainConfig, None, overrides)
    assert (config.optimizer.lr, config.train.steps, config.from_scratch) == (1e-4, 10, True)
    seeds = cfg.load(cfg.CompareConfig, None, [*required(cfg.CompareConfig, tmp_path), "seeds=[3, 4]"]).seeds
    assert seeds == [3, 4]


@pytest.mark.parametrize(
    "prompt",
    ["a cat: it runs, fast", "[a] {cat} & 'dog'", "yes", "12", "a=b", "costs ${price}", "# no comment", "größer \\ 5", "\\${a} \\\\${b} \\c"],
)
def test_text_is_taken_as_it_is_typed(prompt: str, tmp_path: Path):
    overrides = [*required(cfg.GenerateConfig, tmp_path), f"prompt={prompt}"]
    assert cfg.load(cfg.GenerateConfig, None, overrides).prompt == prompt


def test_the_resolved_configuration_can_be_loaded_again(tmp_path: Path):
    config = cfg.load(cfg.TrainConfig, "train/tiny", required(cfg.TrainConfig, tmp_path))
    saved = tmp_path / "config.yaml"
    saved.write_text(cfg.to_yaml(config))
    assert cfg.load(cfg.TrainConfig, str(saved), []) == config


def shipped_files() -> list[str]:
    return sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("name", shipped_files())
def test_every_shipped_file_loads(name: str, tmp_path: Path):
    folder = name.split("/")[0]
    if folder == "recipe":
        assert get_recipe(str(CONFIGS / name)).name == Path(name).stem
        return
    schema = EVIDENCE.get(Path(name).stem, cfg.EvidenceConfig) if folder == "evidence" else SCHEMAS[folder]
    if name == "evidence/where.yaml":  # with what it needs, test_evidence_page loads it
        assert "sensitivity='' is no result of `videoqat sensitivity`, which row" in refusal(schema, "evidence/where", required(schema, tmp_path))
        return
    assert isinstance(cfg.load(schema, name.removesuffix(".yaml"), required(schema, tmp_path)), schema)


def test_the_published_wan_recipe(tmp_path: Path):
    config = cfg.load(cfg.TrainConfig, "train/wan2.1-1.3b", required(cfg.TrainConfig, tmp_path))
    optimizer, loop = config.optimizer, config.train
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip_norm) == (1e-6, 0.9, 0.999, 0.01, 1.0)
    assert (loop.global_batch_size, loop.steps, loop.activation_checkpointing) == (16, 4000, "full")
    assert (config.objective.caption_dropout, config.runtime.dtype, loop.compute_dtype) == (0.1, "float32", "bfloat16")


# Refusing


@pytest.mark.parametrize(
    ("schema", "override", "says"),
    [
        (cfg.BenchAttentionConfig, "num_tokenz=5", "unknown key num_tokenz (did you mean num_tokens?); legal keys here: recipe, batch, num_tokens"),
        (cfg.BenchAttentionConfig, "runtime.devise=cpu", "unknown key runtime.devise (did you mean runtime.device?)"),
        (cfg.BenchAttentionConfig, "xyzzy=1", "unknown key xyzzy; legal keys here: recipe"),
        (cfg.BenchAttentionConfig, "num_tokens=abc", "num_tokens: Value 'abc'"),
        (cfg.BenchAttentionConfig, "num_tokens=1.5", "num_tokens: Value '1.5'"),
        (cfg.BenchAttentionConfig, "num_tokens=null", "num_tokens: Incompatible value 'None'"),
        (cfg.BenchAttentionConfig, "num_tokens=[1", "'num_tokens=[1' can't be read as YAML"),
        (cfg.BenchAttentionConfig, "num_tokens=${nothing}", "num_tokens: Interpolation key 'nothing' not found"),
        (cfg.BenchAttentionConfig, "backward=maybe", "backward: Value 'maybe' is not a valid bool"),
        (cfg.BenchAttentionConfig, "runtime=5", "runtime=5 is no value but a group; legal keys: runtime.device, runtime.dtype, runtime.kernel"),
        (cfg.BenchAttentionConfig, "num_tokens", "'num_tokens' is not KEY=VALUE"),
        (cfg.BenchAttentionConfig, "=5", "'=5' is not KEY=VALUE"),
        (cfg.BenchAttentionConfig, "num_heads=0", "num_heads=0 is not legal; legal: at least 1"),
        (cfg.BenchAttentionConfig, "recipe=nope", "recipe 'nope' does not exist; legal: bf16, attn_qat"),
        (cfg.BenchAttentionConfig, "runtime.device=tpu", "runtime.device='tpu' is not legal; legal: auto, cpu, cuda, cuda:N"),
        (cfg.BenchAttentionConfig, "runtime.device=cuda:one", "runtime.device='cuda:one' is not legal"),
        (cfg.BenchAttentionConfig, "runtime.dtype=int8", "runtime.dtype='int8' is not legal; legal: auto, float32, bfloat16, float16"),
        (cfg.ExampleClipsConfig, "num_frames=16", "num_frames=16 is not legal; legal: 4n+1 frames, such as 13 or 17"),
        (cfg.ExampleClipsConfig, "num_frames=0", "num_frames=0 is not legal; legal: 4n+1 frames, such as 1 or 5"),
        (cfg.ExampleClipsConfig, "size=40", "size=40 is not legal; legal: a multiple of 16, at least 32"),
        (cfg.ExampleClipsConfig, "fps=0", "fps=0 is not legal"),
        (cfg.ExampleClipsConfig, "split=test", "split='test' is not legal; legal: train, held_out"),
        (cfg.ExampleClipsConfig, "photos=/nowhere", "photos='/nowhere' is not legal; legal: an existing folder"),
        (cfg.ExampleModelConfig, "head_dim=40", "head_dim=40 is not legal; legal: a multiple of 16"),
        (cfg.ExampleModelConfig, "num_layers=-1", "num_layers=-1 is not legal"),
        (cfg.ExampleModelConfig, "weights=trained", "weights='trained' is not legal; legal: random, embedded"),
        (cfg.PreprocessConfig, "source=/nowhere", "source='/nowhere' is not legal; legal: an existing folder"),
        (cfg.PreprocessConfig, "model.path=/nowhere", "model.path='/nowhere' is not legal; legal: an existing folder"),
        (cfg.PreprocessConfig, "model.component=unet", "model.component='unet' is not legal; legal: transformer, transformer_2"),
        (cfg.ExampleModelConfig, "family=mochi", "family='mochi' is not legal; legal: wan, cogvideox, hunyuanvideo"),
        (cfg.PreprocessConfig, "buckets=[16x64x64]", "buckets=16 is not legal; legal: 4n+1 frames, such as 13 or 17"),
        (cfg.PreprocessConfig, "buckets=[64x64]", "buckets='64x64' is not FRAMESxHEIGHTxWIDTH, such as 17x64x64"),
        (cfg.PreprocessConfig, "buckets=[17x0x64]", "buckets='17x0x64' is not legal; legal: positive height and width"),
        (cfg.PreprocessConfig, "buckets=[]", "buckets=[] is not legal"),
        (cfg.PreprocessConfig, "fps=0", "fps=0.0 is not legal"),
        (cfg.PreprocessConfig, "workers=0", "workers=0 is not legal"),
        (cfg.TrainConfig, "cache=/nowhere", "cache='/nowhere' is not legal; legal: an existing folder"),
        (cfg.TrainConfig, "recipe=int4", "recipe 'int4' does not exist"),
        (cfg.TrainConfig, "objective.flow_shift=-1", "objective.flow_shift=-1.0 is not legal; legal: 0 (the model's own) or above"),
        (cfg.TrainConfig, "objective.timestep_sampling=beta", "objective.timestep_sampling='beta' is not legal; legal: auto, logit_normal, uniform"),
        (cfg.TrainConfig, "objective.logit_std=0", "objective.logit_std=0.0 is not legal"),
        (cfg.TrainConfig, "objective.caption_dropout=1.5", "objective.caption_dropout=1.5 is not legal; legal: 0 to 1"),
        (cfg.TrainConfig, "optimizer.lr=0", "optimizer.lr=0.0 is not legal; legal: above 0"),
        (cfg.TrainConfig, "optimizer.lr=.inf", "optimizer.lr=inf is not legal; legal: a finite number"),
        (cfg.TrainConfig, "optimizer.lr=.nan", "optimizer.lr=nan is not legal; legal: a finite number"),
        (cfg.TrainConfig, "optimizer.beta2=1", "optimizer.beta2=1.0 is not legal; legal: 0 to below 1"),
        (cfg.TrainConfig, "optimizer.eps=0", "optimizer.eps=0.0 is not legal"),
        (cfg.TrainConfig, "optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0 is not legal"),
        (cfg.TrainConfig, "optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1 is not legal"),
        (cfg.TrainConfig, "optimizer.schedule=step", "optimizer.schedule='step' is not legal; legal: constant, cosine, linear"),
        (cfg.TrainConfig, "optimizer.final_lr_ratio=2", "optimizer.final_lr_ratio=2.0 is not legal"),
        (cfg.TrainConfig, "optimizer.clip_norm=0", "optimizer.clip_norm=0.0 is not legal"),
        (cfg.TrainConfig, "optimizer.ema_decay=1", "optimizer.ema_decay=1.0 is not legal"),
        (cfg.TrainConfig, "train.steps=0", "train.steps=0 is not legal; legal: at least 1"),
        (cfg.TrainConfig, "train.global_batch_size=-1", "train.global_batch_size=-1 is not legal; legal: 0, or a multiple of train.batch_size=1"),
        (cfg.TrainConfig, "train.health_every=-1", "train.health_every=-1 is not legal"),
        (cfg.TrainConfig, "train.activation_checkpointing=half", "legal: none, full"),
        (cfg.TrainConfig, "train.compute_dtype=float16", "train.compute_dtype='float16' is not legal; legal: float32, bfloat16"),
        (cfg.TrainConfig, "train.resume=/nowhere", "train.resume='/nowhere' is not legal; legal: an existing folder"),
        (cfg.TrainConfig, "validation.sampling.fps=0", "validation.sampling.fps=0 is not legal; legal: at least 1"),
        (cfg.ExportConfig, "run=/nowhere", "run='/nowhere' is not legal; legal: an existing folder"),
        (cfg.ExportConfig, "weights=best", "weights='best' is not legal; legal: auto, ema, raw"),
        (cfg.ExportConfig, "checkpoint=/nowhere", "checkpoint='/nowhere' is not legal; legal: an existing folder"),
        (cfg.GenerateConfig, "model=/nowhere", "model='/nowhere' is not legal; legal: an existing folder"),
        (cfg.GenerateConfig, "prompt= ", "prompt=' ' is not legal; legal: some text"),
        (cfg.GenerateConfig, "out=video.gif", "out='video.gif' is not legal; legal: a path that ends in .mp4"),
        (cfg.GenerateConfig, "recipe=nope", "recipe 'nope' does not exist"),
        (cfg.GenerateConfig, "sampling.num_frames=80", "sampling.num_frames=80 is not legal; legal: 4n+1 frames, such as 77 or 81"),
        (cfg.GenerateConfig, "sampling.height=0", "sampling.height=0 is not legal"),
        (cfg.GenerateConfig, "sampling.guidance_scale=-1", "sampling.guidance_scale=-1.0 is not legal"),
        (cfg.GenerateConfig, "sampling.flow_shift=-1", "sampling.flow_shift=-1.0 is not legal"),
        (cfg.CompareConfig, "entries=[]", "entries=0 is not legal; legal: two or more (name, model, recipe)"),
        (cfg.CompareConfig, "entries=[5]", "entries[0]: "),
        (cfg.CompareConfig, "entries=5", "entries: "),
        (
            cfg.CompareConfig,
            "entries=[{name: a, modell: x}]",
            "unknown key entries[0].modell (did you mean entries[0].model?); legal keys here: entries[0].name",
        ),
        (cfg.EvidenceConfig, "rows=[{name: a}, {name: b, xyzzy: 1}]", "unknown key rows[1].xyzzy; legal keys here: rows[1].name, rows[1].training"),
        (cfg.CompareConfig, "entries=[{name: a}, {name: b, model: x}]", "missing entries[0].model"),
        (cfg.CompareConfig, "entries=[{name: a, model: /}, {name: a, model: /}]", "entries=['a', 'a'] is not legal; legal: names that differ"),
        (cfg.CompareConfig, "entries=[{name: a, model: /nowhere}, {name: b, model: /}]", "entries[0].model='/nowhere' is not legal"),
        (cfg.CompareConfig, "entries=[{name: a, model: /}, {name: b, model: /, recipe: x}]", "recipe 'x' does not exist"),
        (cfg.CompareConfig, "entries=[{name: a, model: /, run: /nowhere}, {name: b, model: /}]", "entries[0].run='/nowhere' is not legal"),
        (cfg.CompareConfig, "prompts=/nowhere.txt", "prompts='/nowhere.txt' is not legal; legal: an existing file"),
        (cfg.CompareConfig, "seeds=[]", "seeds=[] is not legal"),
        (cfg.CompareConfig, "seeds=[a]", "seeds[0]: Value 'a'"),
        (cfg.CompareConfig, "validation_cache=/nowhere", "validation_cache='/nowhere' is not legal"),
        (cfg.CompareConfig, "validation_samples=0", "validation_samples=0 is not legal"),
        (cfg.DemoConfig, "tune_steps=0", "tune_steps=0 is not legal"),
        (cfg.DemoConfig, "recipe=bf16", "recipe='bf16' is not legal; legal: a recipe that quantises"),
        (cfg.TrainConfig, "out=", "out='' is not legal; legal: a name or a path"),  # of out=$OUT, where OUT isn't set
        (cfg.PreprocessConfig, "source=", "source='' is not legal; legal: a name or a path"),
        (cfg.PreprocessConfig, "model.path=", "model.path='' is not legal; legal: a name or a path"),
        (cfg.CompareConfig, "entries=[{name: a, model: /}, {name: b, model: ''}]", "entries[1].model='' is not legal; legal: a name or a path"),
        (cfg.PreprocessConfig, "buckets=[17x6²x64]", "buckets='17x6²x64' is not FRAMESxHEIGHTxWIDTH"),
        (cfg.BenchTrainingConfig, "resume_onto=2x2", "resume_onto='2x2' is not legal; legal: DP_REPLICATExDP_SHARDxSP"),
        (cfg.ExampleClipsConfig, "num_clips=0", "num_clips=0 is not legal; legal: at least 1"),
        (cfg.ExampleClipsConfig, "workers=0", "workers=0 is not legal; legal: at least 1"),
        (cfg.PreprocessConfig, "max_text_tokens=-1", "max_text_tokens=-1 is not legal; legal: 0 (the model's own) or more"),
        (cfg.PreprocessConfig, "fps=241", "fps=241.0 is not legal; legal: above 0, at most 240"),
        (cfg.ConvertConfig, "transformer_file=/nowhere.safetensors", "transformer_file='/nowhere.safetensors' is not legal; legal: an existing file"),
        (cfg.ConvertConfig, "component=unet", "component='unet' is not legal; legal: transformer, transformer_2"),
        (cfg.ConvertConfig, "out=/", "out='/' is not legal; legal: a folder that is not there yet"),
        (cfg.GenerateConfig, "sampling.true_cfg_scale=0.5", "sampling.true_cfg_scale=0.5 is not legal"),
        (cfg.GenerateConfig, "sampling.max_text_tokens=-1", "sampling.max_text_tokens=-1 is not legal"),
        (cfg.GenerateConfig, "parallel.cfg=3", "parallel.cfg=3 is not legal; legal: 1, 2"),
        (cfg.GenerateConfig, "parallel.sp=0", "parallel.sp=0 is not legal"),
        (cfg.GenerateConfig, "parallel.ulysses_wire=fp8", "parallel.ulysses_wire='fp8' is not legal; legal: auto, bf16, packed"),
        (cfg.GenerateConfig, "runtime.offload=disk", "runtime.offload='disk' is not legal; legal: none, model, sequential"),
        (cfg.GenerateConfig, "st_lpips=/nowhere", "st_lpips='/nowhere' is not legal; legal: auto"),
        (cfg.SensitivityConfig, "samples=0", "samples=0 is not legal"),
        (cfg.SensitivityConfig, "max_error=-1", "max_error=-1.0 is not legal; legal: 0 (no limit) or more"),
        (cfg.SensitivityConfig, "max_kept=-1", "max_kept=-1 is not legal"),
        (cfg.SensitivityConfig, "min_share=2", "min_share=2.0 is not legal; legal: 0 (no limit) to 1"),
        (cfg.TrainConfig, "train.save_every=-1", "train.save_every=-1 is not legal"),
        (cfg.TrainConfig, "train.keep_last=0", "train.keep_last=0 is not legal"),
        (cfg.TrainConfig, "train.trainable=[]", "train.trainable=[] is not legal"),
        (cfg.TrainConfig, "parallel.engine=ddp", "parallel.engine='ddp' is not legal; legal: fsdp, deepspeed"),
        (cfg.TrainConfig, "parallel.zero_stage=0", "parallel.zero_stage=0 is not legal; legal: 1, 2, 3"),
        (cfg.TrainConfig, "parallel.dp_shard=0", "parallel.dp_shard=0 is not legal; legal: -1"),
        (cfg.TrainConfig, "parallel.world_size=-1", "parallel.world_size=-1 is not legal"),
        (cfg.TrainConfig, "validation.every=5", "validation.every=5 is not legal; legal: 0, or give validation.cache"),
        (cfg.TrainConfig, "validation.images=[a.png]", "validation.images=['a.png'] is not legal; legal: none"),
        (cfg.BenchForwardConfig, "repeats=0", "repeats=0 is not legal"),
        (cfg.BenchGenerationConfig, "num_inference_steps=0", "num_inference_steps=0 is not legal"),
        (cfg.BenchTrainingConfig, "steps=3", "steps=3 is not legal; legal: more than warmup=3"),
        (cfg.BenchTrainingConfig, "checkpointing=[half]", "checkpointing='half' is not legal; legal: none, full, keep_attention"),
        (cfg.BenchTrainingConfig, "overrides=[fast]", "overrides=['fast'] is not legal; legal: KEY=VALUE"),
        (cfg.DoctorConfig, "size=16x64x64", "size=16 is not legal; legal: 4n+1 frames"),
        (cfg.DoctorConfig, "model=/nowhere", "model='/nowhere' is not legal"),
    ],
)
def test_bad_values_are_refused(schema: type, override: str, says: str, tmp_path: Path):
    assert says in refusal(schema, None, [*required(schema, tmp_path), override])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["weights=embedded", "seed=1"], "seed=1 is not legal; legal: 0 with weights=embedded"),
        (["weights=embedded", "family=cogvideox"], "family='cogvideox' is not legal; legal: wan with weights=embedded"),
        (["family=cogvideox", "two_transformers=true"], "two_transformers=True is not legal; legal: false with family=cogvideox"),
        (["family=hunyuanvideo", "image_to_video=true"], "image_to_video=True is not legal; legal: false with family=hunyuanvideo"),
        (["expand_timesteps=true", "two_transformers=true"], "expand_timesteps=True is not legal; legal: false, except with family=wan alone"),
    ],
)
def test_example_models_that_there_are_not(overrides: list[str], says: str, tmp_path: Path):
    assert says in refusal(cfg.ExampleModelConfig, None, [*required(cfg.ExampleModelConfig, tmp_path), *overrides])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_seed_that_no_generator_takes_is_refused(command: str, tmp_path: Path):
    schema = COMMANDS[command].schema
    rows = ["rows=[{name: a}, {name: b}]"] if schema is cfg.EvidenceConfig else []
    own = {f.name for f in dataclasses.fields(schema)}
    seed = next((key for key in ("seed", "seeds") if key in own), "train.seed" if schema is cfg.TrainConfig else None)
    for value in ("-1", str(2**63)) if seed else ():
        given = f"[0, {value}]" if seed == "seeds" else value
        assert f"{seed}={given} is not legal; legal: 0 to " in refusal(schema, None, [*required(schema, tmp_path), *rows, f"{seed}={given}"])


def test_what_is_missing_is_named():
    assert refusal(cfg.GenerateConfig, None, []) == "missing model, out: give it in the file or as KEY=VALUE"


def test_an_existing_video_is_not_overwritten_unless_asked(tmp_path: Path):
    overrides = required(cfg.GenerateConfig, tmp_path)
    (tmp_path / "out.mp4").write_text("precious")
    assert "a file that is not there yet, or overwrite=true" in refusal(cfg.GenerateConfig, None, overrides)
    assert cfg.load(cfg.GenerateConfig, None, [*overrides, "overwrite=true"]).overwrite


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_tokens: [1", "can't be read as YAML"),
        ("- 1\n- 2\n", "must hold a mapping"),
        ("num_tokens: 1\nnum_tokens: 2\n", "can't be read as YAML"),
        ("include: nowhere.yaml\n", "include 'nowhere.yaml' is not a file beside it nor in configs/"),
        ("include: 5\n", "include=5 must be a file or a list of files"),
        ("include: [5]\n", "must be a file or a list of files"),
        ("include: mine.yaml\n", "mine.yaml includes itself"),
        ("include: other.yaml\n", "mine.yaml includes itself"),
        ("runtime:\n", "runtime=None is no value but a group"),
        ("num_tokenz: 5\n", "unknown key num_tokenz (did you mean num_tokens?)"),
        ("5: 5\n", "unknown key 5"),
    ],
)
def test_a_bad_file_is_refused(text: str, says: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("include: mine.yaml\n")
    assert says in refusal(cfg.BenchAttentionConfig, str(tmp_path / "mine.yaml"), [])


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00x")
    assert "can't be read as YAML" in refusal(cfg.BenchAttentionConfig, str(tmp_path / "mine.yaml"), [])


def test_a_file_that_is_not_there_is_refused():
    says = refusal(cfg.TrainConfig, "train/nowhere", [])
    assert says == "configuration file 'train/nowhere' does not exist (neither as a path nor below configs/)"


def test_every_setting_is_checked_by_name():
    """`load` calls `validate`, which every configuration must have: a section without one would be a section without checks."""

    def sections(schema: Any) -> list[Any]:
        children = [kind for kind in typing.get_type_hints(schema).values() if dataclasses.is_dataclass(kind)]
        return [schema, *(section for child in children for section in sections(child))]

    for command in COMMANDS.values():
        for section in sections(command.schema):
            assert callable(getattr(section, "validate", None)), section


def test_recipe_examples_in_configs_use_names_of_their_own():
    for path in (CONFIGS / "recipe").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["name"] not in RECIPES
