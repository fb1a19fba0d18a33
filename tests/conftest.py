"""What all tests share: one torch thread a worker, and tests that need a GPU skip where there is none."""

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
