"""What all tests share: one torch thread a worker, and tests that need a GPU skip where there is none."""

from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist divide the cores among them; torch's own threads on top would only fight for them."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


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
