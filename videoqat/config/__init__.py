"""Typed configuration: one dataclass for each command, loaded strictly.

`load(TrainConfig, "train/tiny", ["optimizer.lr=1e-4"])` merges, in this order: the dataclass's defaults, the files that FILE includes
(`include: [model/tiny.yaml]`, relative to the file or to `configs/`), FILE itself, and the `key=value` overrides. An unknown key, a value of
the wrong type or an illegal value raises `ConfigError` with the key, the value and what is legal, before anything is loaded.
No environment variable is read, unless a file or an override asks for one by name (OmegaConf's `${oc.env:NAME}`).
"""

from videoqat.config.attention_only import CompareAttentionConfig
from videoqat.config.bench import (
    ATTENTION_SHAPES,
    AttentionShape,
    BenchAttentionConfig,
    BenchForwardConfig,
    BenchGenerationConfig,
    BenchTrainingConfig,
)
from videoqat.config.checks import check_frames, choice, existing, hub_name, model_folder, parse_bucket, require
from videoqat.config.evidence import EvidenceConfig, JudgeConfig, MeasureConfig, Row, Training, TrainJudgesConfig
from videoqat.config.groups import GenerationRuntimeConfig, ModelConfig, ObjectiveConfig, RuntimeConfig, SamplingConfig, VideoParallelConfig
from videoqat.config.loading import load, to_dict, to_yaml
from videoqat.config.schemas import (
    CompareConfig,
    CompareEntry,
    ConvertConfig,
    DemoConfig,
    DoctorConfig,
    ExampleClipsConfig,
    ExampleModelConfig,
    GenerateConfig,
    PreprocessConfig,
    SensitivityConfig,
)
from videoqat.config.serving import LimitsConfig, MemoryConfig, ServeConfig, ServedModel, ServiceConfig, WorkerConfig
from videoqat.config.training import (
    ExportConfig,
    LoopConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TrainingObjectiveConfig,
    ValidationConfig,
)
from videoqat.files import shipped

__all__ = [
    "ATTENTION_SHAPES",
    "AttentionShape",
    "BenchAttentionConfig",
    "BenchForwardConfig",
    "BenchGenerationConfig",
    "BenchTrainingConfig",
    "CompareAttentionConfig",
    "CompareConfig",
    "CompareEntry",
    "ConvertConfig",
    "DemoConfig",
    "DoctorConfig",
    "EvidenceConfig",
    "ExampleClipsConfig",
    "ExampleModelConfig",
    "ExportConfig",
    "GenerateConfig",
    "GenerationRuntimeConfig",
    "JudgeConfig",
    "LimitsConfig",
    "LoopConfig",
    "MeasureConfig",
    "MemoryConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PreprocessConfig",
    "Row",
    "RuntimeConfig",
    "SamplingConfig",
    "SensitivityConfig",
    "ServeConfig",
    "ServedModel",
    "ServiceConfig",
    "TrainConfig",
    "TrainJudgesConfig",
    "Training",
    "TrainingObjectiveConfig",
    "ValidationConfig",
    "VideoParallelConfig",
    "WorkerConfig",
    "check_frames",
    "choice",
    "existing",
    "hub_name",
    "load",
    "model_folder",
    "parse_bucket",
    "require",
    "shipped",
    "to_dict",
    "to_yaml",
]
