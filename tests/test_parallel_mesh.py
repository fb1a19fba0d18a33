"""Layouts, process groups, and what happens when ranks disagree or die."""

import pytest
import torch
from helpers.ranks import run_ranks

from videoqat.config import ParallelConfig
from videoqat.parallel.mesh import open_mesh


def _place(config: ParallelConfig) -> tuple:
    with open_mesh(config, torch.device("cpu"), num_heads=4) as mesh:
        mesh.steady()
        value = torch.tensor([float(mesh.dp_rank + 1)])
        return (
            mesh.rank,
            mesh.dp_rank,
            mesh.sp_rank,
            mesh.sum_over_dp(value).item(),
            mesh.mean_over_dp(value).item(),
            mesh.any(mesh.rank == 1),
            mesh.gather_objects(mesh.rank),
            tuple(mesh.fsdp_mesh.shape),
            tuple(mesh.device_mesh.shape),
        )


def test_one_process_many_times() -> None:
    for _ in range(3):
        assert _place(ParallelConfig()) == (0, 0, 0, 1.0, 1.0, False, [0], (1,), (1, 1, 1))


@pytest.mark.dist
def test_places_of_four() -> None:
    print(run_ranks(_place, 4, ParallelConfig(dp_replicate=2, sp=2)))
    print(run_ranks(_place, 4, ParallelConfig(sp=2)))
