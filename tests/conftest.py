"""What all tests share: one torch thread a worker, and tests that need a GPU skip where there is none."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

pytest.register_assert_rewrite("helpers")  # so that a failed assertion there, too, shows what it compared

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels on the CPU; it is read when they are imported

# DeepSpeed takes one kind of device in a process, at its import, and transformers imports it where it is installed. Its tests run on the CPU.
os.environ["DS_ACCELERATOR"] = "cpu"

if TYPE_CHECKING:
    from videoqat.config import TrainConfig


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist divide the cores among them; torch's own threads on top would only fight for them.

    The programs that tests start inherit it, too: sums in another number of threads differ in their last bits. They would also inherit that Ctrl-C
    is ignored, as it is in whatever a script has started with `&`; tests of what Ctrl-C does then wait in vain, for minutes.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests skip, saying why, where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Wan pipeline (2 layers, for speed). Shared by the whole session: copy it before changing anything in it."""
    return _build_tiny(tmp_path_factory, two_transformers=False)


@pytest.fixture(scope="session")
def tiny_pipeline_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_pipeline`, with two transformers and a boundary_ratio, as Wan 2.2 A14B has them."""
    return _build_tiny(tmp_path_factory, two_transformers=True)


def _build_tiny(tmp_path_factory: pytest.TempPathFactory, two_transformers: bool) -> Path:
    from videoqat.config import ExampleModelConfig
    from videoqat.models.tiny import build_pipeline

    folder = tmp_path_factory.mktemp("tiny") / "pipeline"
    build_pipeline(ExampleModelConfig(out=str(folder), num_layers=2, two_transformers=two_transformers))
    return folder


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory, tiny_pipeline: Path) -> Path:
    """A cache of six moving garments, 5x32x32 (32 tokens), texts of at most 16 tokens; right for `tiny_pipeline_pair`, too. Shared."""
    from videoqat.config import ExampleClipsConfig, ModelConfig, PreprocessConfig
    from videoqat.data.moving_garments import write_clips
    from videoqat.data.precompute import preprocess

    folder = tmp_path_factory.mktemp("tiny_cache")
    clips, cache = str(folder / "clips"), folder / "cache"
    write_clips(ExampleClipsConfig(out=clips, num_clips=6, num_frames=5, size=32))
    model = ModelConfig(path=str(tiny_pipeline))
    preprocess(PreprocessConfig(model=model, source=clips, out=str(cache), buckets=["5x32x32"], max_text_tokens=16))
    return cache


@pytest.fixture
def make(tiny_pipeline: Path, tiny_cache: Path, tmp_path: Path) -> "Callable[..., TrainConfig]":
    """make(name, train__steps=2, ...): a small training whose `out` is tmp_path / name; see `helpers.training.tiny_config`."""
    from helpers.training import tiny_config

    return lambda name, **changes: tiny_config(tiny_pipeline, tiny_cache, tmp_path / name, **changes)
