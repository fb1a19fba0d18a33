"""Order and chance: pure functions of their arguments, and different where they should be."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from videoqat.data.dataset import BatchOrder, CachedVideos, sample_generator
from videoqat.errors import ConfigError, DataError


def make_cache(folder: Path, counts: dict[str, int]) -> CachedVideos:
    """A cache folder of random tensors with `counts` samples by bucket, one shard for each bucket; buckets alternate in the index."""
    (folder / "shards").mkdir(parents=True)
    samples, shards = [], {}
    for number, (bucket, count) in enumerate(counts.items()):
        name = f"shards/{number}.safetensors"
        tensors = {}
        for i in range(count):
            key = f"{bucket}-{i}"
            tensors |= {f"{key}.latents": torch.full((2, 1, 2, 2), float(i)), f"{key}.text": torch.full((3, 4), float(number))}
            samples.append({"id": f"{key}.mp4", "bucket": bucket, "caption": "c", "source": f"/s/{key}", "key": key, "shard": name})
        tensors["null.text"] = torch.zeros(1, 4)
        save_file(tensors, folder / name)
        shards[name] = (folder / name).stat().st_size
    samples.sort(key=lambda sample: sample["id"][::-1])
    index = {
        "format": 2,
        "settings": {"settings_key": "s", "max_text_tokens": 8},
        "geometry": {"in_channels": 2},
        "null_condition": {"key": "null", "shard": "shards/0.safetensors"},
        "shards": shards,
        "samples": samples,
    }
    (folder / "index.json").write_text(json.dumps(index))
    return CachedVideos(folder)


@pytest.fixture
def cache(tmp_path: Path) -> CachedVideos:
    return make_cache(tmp_path / "cache", {"17x64x64": 23, "17x32x96": 10, "5x64x64": 7})


def epoch_batches(order: BatchOrder, epoch: int) -> list[list[int]]:
    found = [order.batch(epoch * order.batches_per_epoch + i) for i in range(order.batches_per_epoch)]
    assert {number for number, _ in found} == {epoch}
    return [batch for _, batch in found]


def test_load_gives_the_tensors_of_the_sample(cache: CachedVideos) -> None:
    assert len(cache) == 40
    for index, info in enumerate(cache.samples):
        sample = cache.load(index)
        assert sample["latents"].dtype == torch.float32
        assert torch.equal(sample["latents"], torch.full((2, 1, 2, 2), float(info.key.split("-")[1])))
        assert sample["text"].shape == (3, 4)
    assert torch.equal(cache.null_condition["text"], torch.zeros(1, 4))


def test_every_batch_lies_in_one_bucket_and_no_sample_comes_twice(cache: CachedVideos) -> None:
    order = BatchOrder(cache, 4, seed=0)
    assert order.batches_per_epoch == 23 // 4 + 10 // 4 + 7 // 4
    for epoch in range(3):
        batches = epoch_batches(order, epoch)
        assert all(len(batch) == 4 for batch in batches)
        assert all(len({cache.samples[index].bucket for index in batch}) == 1 for batch in batches)
        flat = list(itertools.chain(*batches))
        assert len(set(flat)) == len(flat)


def test_batch_size_one_visits_every_sample_once(cache: CachedVideos) -> None:
    order = BatchOrder(cache, 1, seed=3)
    assert sorted(itertools.chain(*epoch_batches(order, 2))) == list(range(40))


def test_order_differs_by_epoch_and_by_seed_and_not_otherwise(cache: CachedVideos) -> None:
    order = BatchOrder(cache, 4, seed=0)
    epochs = [epoch_batches(order, epoch) for epoch in range(4)]
    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])
    assert epoch_batches(BatchOrder(cache, 4, seed=1), 0) != epochs[0]
    again = BatchOrder(cache, 4, seed=0)
    backwards = [again.batch(index)[1] for index in reversed(range(4 * order.batches_per_epoch))]
    assert backwards[::-1] == list(itertools.chain(*epochs))


def test_buckets_are_mixed_within_an_epoch(cache: CachedVideos) -> None:
    order = BatchOrder(cache, 2, seed=0)
    buckets = [cache.samples[batch[0]].bucket for batch in epoch_batches(order, 0)]
    assert sum(a != b for a, b in itertools.pairwise(buckets)) > 4


def test_what_one_epoch_leaves_out_another_shows(cache: CachedVideos) -> None:
    order = BatchOrder(cache, 4, seed=0)
    left_out = [set(range(40)) - set(itertools.chain(*epoch_batches(order, epoch))) for epoch in range(12)]
    assert all(len(left) == 40 - 4 * order.batches_per_epoch for left in left_out)
    assert not set.intersection(*left_out)


def test_every_place_in_the_order_is_equally_likely(tmp_path: Path) -> None:
    order = BatchOrder(make_cache(tmp_path / "cache", {"5x32x32": 5}), 1, seed=0)
    first = torch.tensor([order.batch(epoch * 5)[1][0] for epoch in range(1000)])
    assert all(150 < int((first == index).sum()) < 250 for index in range(5))  # 200 +- 4 standard deviations


def test_batch_size_that_no_bucket_fills_is_refused_with_the_counts(cache: CachedVideos, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"batch_size=24 .*17x32x96: 10, 17x64x64: 23, 5x64x64: 7"):
        BatchOrder(cache, 24, seed=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        BatchOrder(cache, 0, seed=0)
    assert BatchOrder(cache, 23, seed=0).batches_per_epoch == 1
    assert "'5x64x64': 7" in capsys.readouterr().err


def test_order_is_pinned(cache: CachedVideos) -> None:
    """A change of this order would make resumed runs see other data: it needs a reason, and a word in the changelog."""
    order = BatchOrder(cache, 4, seed=7)
    assert [order.batch(i) for i in (0, 1, 25)] == [(0, [1, 6, 3, 20]), (0, [19, 10, 5, 23]), (3, [23, 27, 0, 10])]
    assert torch.rand(2, generator=sample_generator(7, 1, 3, "noise")).tolist() == [0.5510370135307312, 0.25873464345932007]


def draw(*arguments: object) -> tuple[float, ...]:
    return tuple(torch.randn(4, generator=sample_generator(*arguments)).tolist())  # type: ignore[arg-type]


def test_sample_generator_depends_on_each_argument_and_on_nothing_else() -> None:
    base = draw(0, 1, 2, "noise")
    torch.manual_seed(123)
    torch.rand(7)
    assert draw(0, 1, 2, "noise") == base
    variants = [draw(1, 1, 2, "noise"), draw(0, 2, 2, "noise"), draw(0, 1, 3, "noise"), draw(0, 1, 2, "time"), draw(0, 12, 2, "noise")]
    swapped = [draw(1, 0, 2, "noise"), draw(0, 2, 1, "noise"), draw(2, 1, 0, "noise"), draw(0, 11, 2, "noise"), draw(0, 1, 12, "noise")]
    assert len({base, *variants, *swapped}) == 11


def test_generators_are_uncorrelated_across_samples_epochs_and_streams() -> None:
    grid = [(epoch, sample, stream) for epoch in range(10) for sample in range(20) for stream in ("noise", "time", "dropout")]
    noise = torch.stack([torch.randn(64, generator=sample_generator(0, *place)) for place in grid])
    normed = noise / noise.norm(dim=1, keepdim=True)
    correlation = (normed @ normed.T).fill_diagonal_(0).abs().max()
    assert correlation < 0.65  # 180,000 pairs of 64 numbers: five standard deviations
    uniform = torch.tensor([torch.rand((), generator=sample_generator(0, epoch, sample, "time")) for epoch in range(25) for sample in range(40)])
    assert abs(uniform.mean() - 0.5) < 0.04
    assert abs(uniform.std() - 12**-0.5) < 0.02


def test_missing_torn_and_foreign_folders_are_named(cache: CachedVideos, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no finished cache.*index\.json"):
        CachedVideos(tmp_path)
    shard = cache.folder / "shards/1.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"1\.safetensors.*torn"):
        CachedVideos(cache.folder)
    shard.unlink()
    with pytest.raises(DataError, match=r"lacks its shard shards/1\.safetensors"):
        CachedVideos(cache.folder)
    shard.write_bytes(b"\xff" * len(whole))  # the right size, and garbage
    with pytest.raises(DataError, match=r"1\.safetensors.*can't be read"):
        garbled = CachedVideos(cache.folder)
        [garbled.load(i) for i in range(len(garbled))]
    index = json.loads((cache.folder / "index.json").read_text())
    (cache.folder / "index.json").write_text(json.dumps(index | {"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        CachedVideos(cache.folder)
    (cache.folder / "index.json").write_text("{")
    with pytest.raises(DataError, match="can't be read"):
        CachedVideos(cache.folder)


def test_fingerprint_tells_other_data_or_order(tmp_path: Path) -> None:
    one = make_cache(tmp_path / "a", {"5x32x32": 3})
    assert make_cache(tmp_path / "b", {"5x32x32": 3}).fingerprint == one.fingerprint
    assert make_cache(tmp_path / "c", {"5x32x32": 4}).fingerprint != one.fingerprint
    index = json.loads((tmp_path / "a/index.json").read_text())
    (tmp_path / "a/index.json").write_text(json.dumps(index | {"samples": index["samples"][::-1]}))
    assert CachedVideos(tmp_path / "a").fingerprint != one.fingerprint
