"""The parts of a step's time, and how much of its communication nothing was computed beside."""

import time

import pytest
import torch

from videoqat.training.trace import Clock, _gpu_kind, exposed, merged, traced_communication


def test_each_stretch_of_time_goes_to_its_part() -> None:
    clock = Clock(torch.device("cpu"))
    started = time.perf_counter()
    for part, seconds in (("data", 0.02), ("forward", 0.01), ("backward", 0.03), ("forward", 0.01)):
        time.sleep(seconds)
        clock.mark(part)
    found = clock.seconds()
    assert list(found) == ["data", "forward", "backward", "optimizer"]
    assert found["optimizer"] == 0
    assert all(found[part] >= seconds for part, seconds in (("data", 0.02), ("forward", 0.02), ("backward", 0.03)))
    assert sum(found.values()) <= time.perf_counter() - started + 1e-3


def test_spans_by_hand() -> None:
    assert merged([(4, 5), (0, 2), (1, 3), (3, 4), (7, 8)]) == [(0, 5), (7, 8)]
    assert exposed([(0, 4)], []) == (4, 4)
    assert exposed([(0, 4), (2, 6)], [(1, 3), (2.5, 3.5), (5.5, 9)]) == (6, 3)  # both at once count once; hidden are 1 to 3.5 and 5.5 to 6
    assert exposed([(0, 1), (2, 3), (4, 5)], [(0.5, 4.5)]) == (3, 1)
    assert exposed([], [(0, 1)]) == (0, 0)


def test_without_collectives_there_is_no_communication_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with traced_communication(torch.device("cpu")) as found:
        torch.ones(64, 64) @ torch.ones(64, 64)
        assert found == {}
    assert found == {"communication_seconds": 0, "communication_exposed_seconds": 0}
    assert capfd.readouterr().err == ""


def test_what_is_what_on_a_gpus_time_line() -> None:
    kinds = {
        "communication": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclSymkDevKernel_AllGather_LL"],
        "computing": [
            "void at::native::elementwise_kernel<128, 4>",
            "nvjet_tst_128x256_64x4_2x1_v_bz_TNT",
            "attention_forward",
            "triton_poi_fused_add_0",
        ],
        None: ["nccl:all_gather_into_tensor", "FSDP::pre_forward (blocks.3)", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"],
    }
    assert {name: _gpu_kind(name) for names in kinds.values() for name in names} == {name: kind for kind, names in kinds.items() for name in names}


@pytest.mark.gpu
def test_a_gpus_clock_is_that_of_its_queue() -> None:
    """Work that the host has only queued counts, and reading the clock waits for it."""
    device = torch.device("cuda", 0)
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    x @ x
    torch.cuda.synchronize()
    clock = Clock(device)
    queued = time.perf_counter()
    for _ in range(20):
        y = x @ x
    clock.mark("forward")
    queued = time.perf_counter() - queued
    time.sleep(0.001)
    clock.mark("data")
    found = clock.seconds()
    assert found["forward"] > 2 * queued
    assert found["data"] < 0.5 * found["forward"]  # the GPU didn't wait for the host's nap
    assert y.isfinite().all()
