"""The states of a video: every transition, those that come too late, and two who want the same one at once. On SQLite and on PostgreSQL."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.service import postgresql_server
from sqlalchemy import update

from app.comparisons import Comparisons
from app.jobs import Ended, Jobs, Order, QueueFull
from app.tables import metadata, open_database, videos, workers
from videoqat.errors import UserError

ORDER = Order("a dress moves up", "tiny", "bf16", 3, {"num_frames": 5, "fps": 16, "num_inference_steps": 4})
LEASE_S = 60.0  # far more than a test takes, however busy the machine
WORKER = "here:cpu:1"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        yield f"sqlite:///{folder / 'service.db'}"
    else:
        with postgresql_server(folder / "cluster") as found:
            yield found


@pytest.fixture
def jobs(url) -> Iterator[Jobs]:
    engine = open_database(url)
    with engine.begin() as connection:
        for table in metadata.sorted_tables:
            if table.name != "schema_version":
                connection.execute(table.delete())
    yield Jobs(engine, retries=1, lease_s=LEASE_S)
    engine.dispose()


def submit(jobs: Jobs) -> str:
    return jobs.submit([ORDER], 100)[0]


def claimed(jobs: Jobs) -> tuple[str, str]:
    video = submit(jobs)
    row = jobs.claim(video, WORKER)
    assert row is not None
    return video, row["lease"]


def counted(outcome: str, count: int) -> tuple[str, str, float]:
    """As /metrics finds it."""
    return "videos", f"{ORDER.model}\t{ORDER.attention}\t{outcome}", float(count)


def pass_time(jobs: Jobs, seconds: float) -> None:
    """As if so much more time had gone by since every sign of life."""
    with jobs.write.begin() as connection:
        connection.execute(update(videos).values(lease_until=videos.c.lease_until - seconds))
        connection.execute(update(workers).values(alive_until=workers.c.alive_until - seconds))


def status(jobs: Jobs, video: str) -> str:
    row = jobs.get(video)
    assert row is not None
    return str(row["status"])


def test_a_video_from_queued_to_completed(jobs):
    video = submit(jobs)
    before = jobs.get(video)
    assert (before["status"], before["started_at"], before["step"]) == ("queued", None, 0)
    row = jobs.claim(video, WORKER)
    assert (row["status"], row["worker"], row["prompt"], row["sampling"]) == ("in_progress", WORKER, ORDER.prompt, ORDER.sampling)
    assert jobs.report(row["lease"], stage="denoising", step=2)
    assert (jobs.get(video)["stage"], jobs.get(video)["step"]) == ("denoising", 2)
    assert jobs.complete(row["lease"], "file.mp4", {"a": 1}, [("seconds", "x", 1.0), ("seconds", "x", 2.0)])
    after = jobs.get(video)
    assert (after["status"], after["file"], after["result"], after["lease"], after["stage"]) == ("completed", "file.mp4", {"a": 1}, None, None)
    assert before["created_at"] <= after["started_at"] <= after["ended_at"] <= time.time() + 1
    assert sorted(jobs.totals()) == [("seconds", "x", 3.0), counted("completed", 1)]


def test_what_comes_too_late_changes_nothing(jobs):
    video, lease = claimed(jobs)
    assert jobs.claim(video, "another") is None
    assert jobs.complete(lease, "file.mp4", {})
    for late in (jobs.report(lease), jobs.complete(lease, "other.mp4", {}), jobs.fail(lease, "x", "x"), jobs.release(lease)):
        assert not late
    assert jobs.cancel(video) == "completed"
    assert (status(jobs, video), jobs.get(video)["file"], jobs.totals()) == ("completed", "file.mp4", [counted("completed", 1)])
    assert jobs.claim("video_none", WORKER) is None
    assert jobs.cancel("video_none") is None
    assert jobs.delete("video_none") is None


def test_cancelling(jobs):
    waiting = submit(jobs)
    assert jobs.cancel(waiting) == "cancelled"
    assert jobs.claim(waiting, WORKER) is None
    for end in (
        lambda lease: jobs.complete(lease, "f", {}) or jobs.release(lease),  # finished in the same moment: what was promised counts
        lambda lease: jobs.fail(lease, "code", "message"),
        jobs.release,
        lambda _: jobs.reap(WORKER),
    ):
        video, lease = claimed(jobs)
        assert jobs.cancel(video) == "in_progress"
        assert jobs.report(lease) is False
        end(lease)
        row = jobs.get(video)
        assert (row["status"], row["error_code"], row["file"]) == ("cancelled", None, None)


def test_failing_and_letting_go(jobs):
    video, lease = claimed(jobs)
    assert jobs.fail(lease, "non_finite", "NaN")
    row = jobs.get(video)
    assert (row["status"], row["error_code"], row["error_message"]) == ("failed", "non_finite", "NaN")
    video, lease = claimed(jobs)
    jobs.report(lease, stage="denoising", step=3)
    assert jobs.release(lease) == "queued"
    row = jobs.get(video)
    assert (row["status"], row["step"], row["worker"], row["crashes"], row["started_at"]) == ("queued", 0, None, 0, None)
    assert jobs.report(lease) is False


def test_a_dead_workers_video_is_begun_again_once(jobs):
    video, first = claimed(jobs)
    assert jobs.reap() == []  # the lease still holds
    pass_time(jobs, LEASE_S * 2 / 3)
    assert jobs.report(first)
    pass_time(jobs, LEASE_S * 2 / 3)
    assert jobs.reap() == []  # a sign of life prolonged it
    pass_time(jobs, LEASE_S / 3 + 1)
    assert jobs.reap() == [Ended(video, "queued")]
    assert jobs.report(first) is False
    second = jobs.claim(video, "another")["lease"]
    assert not jobs.complete(first, "file.mp4", {})  # the one that was thought dead comes back
    assert status(jobs, video) == "in_progress"
    assert jobs.reap("another") == [Ended(video, "failed")]
    row = jobs.get(video)
    assert (row["error_code"], row["crashes"]) == ("worker_lost", 2)
    assert "2 times" in row["error_message"]
    assert jobs.report(second) is False


def test_what_is_begun_again_keeps_its_place(jobs):
    ids = [submit(jobs) for _ in range(3)]
    assert jobs.claim_next(WORKER)["id"] == ids[0]
    assert jobs.claim_next("another")["id"] == ids[1]
    assert jobs.reap(WORKER) == [Ended(ids[0], "queued")]
    assert jobs.waiting() == [ids[0], ids[2]]
    assert [jobs.claim_next("another")["id"] for _ in range(2)] == [ids[0], ids[2]]
    assert jobs.claim_next("another") is None


def test_many_workers_share_out_what_waits(jobs):
    ids = [submit(jobs) for _ in range(6)]
    rows = at_once(8, lambda n: jobs.claim_next(f"worker{n}"))
    assert sorted(row["id"] for row in rows if row) == sorted(ids)


def test_without_retries_a_dead_workers_video_fails(jobs):
    strict = Jobs(jobs.engine, retries=0, lease_s=LEASE_S)
    video, _ = claimed(strict)
    assert strict.reap("someone else") == []
    assert strict.reap(WORKER) == [Ended(video, "failed")]


def test_every_end_is_counted_as_what_it_is(jobs):
    """Whoever brings it about: also a video whose worker died, which that worker can't count, and one that failed when it was cancelled already."""
    strict = Jobs(jobs.engine, retries=0, lease_s=LEASE_S)
    claimed(strict)
    strict.reap(WORKER)
    _, lease = claimed(jobs)
    jobs.fail(lease, "code", "message")
    assert jobs.totals() == [counted("failed", 2)]
    jobs.cancel(submit(jobs))
    for end in (lambda lease: jobs.fail(lease, "code", "message"), jobs.release, lambda _: jobs.reap(WORKER)):
        video, lease = claimed(jobs)
        jobs.cancel(video)
        end(lease)
    assert sorted(jobs.totals()) == [counted("cancelled", 4), counted("failed", 2)]
    _, lease = claimed(jobs)
    assert jobs.release(lease) == "queued"  # which is no end
    assert sorted(jobs.totals()) == [counted("cancelled", 4), counted("failed", 2)]


def test_deleting_in_every_state(jobs):
    waiting = submit(jobs)
    assert jobs.delete(waiting) == {"id": waiting, "file": None, "comparison_id": None}
    assert jobs.claim(waiting, WORKER) is None
    video, lease = claimed(jobs)
    assert jobs.delete(video)
    assert jobs.report(lease) is False
    assert not jobs.complete(lease, "file.mp4", {})
    video, lease = claimed(jobs)
    jobs.complete(lease, "file.mp4", {})
    assert jobs.delete(video)["file"] == "file.mp4"
    assert jobs.get(video) is None


def at_once(count: int, what: Any) -> list[Any]:
    """What `count` threads get that start in the same moment."""
    barrier = threading.Barrier(count)

    def one(number: int) -> Any:
        barrier.wait()
        return what(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_many_at_once_one_succeeds(jobs):
    for _ in range(5):
        video = submit(jobs)
        rows = at_once(8, lambda n, video=video: jobs.claim(video, f"worker{n}"))
        (winner,) = [row for row in rows if row]
        assert jobs.get(video)["lease"] == winner["lease"]
        outcomes = at_once(4, lambda n, lease=winner["lease"]: jobs.complete(lease, f"file{n}", {}, [("seconds", "x", 1.0)]))
        assert sorted(outcomes) == [False, False, False, True]
        assert sorted(row is not None for row in at_once(4, lambda _, video=video: jobs.delete(video))) == [False, False, False, True]
    assert sorted(jobs.totals()) == [("seconds", "x", 5.0), counted("completed", 5)]


def test_the_queues_limit_holds_with_many_at_once(jobs):
    def one(_: int) -> bool:
        try:
            jobs.submit([ORDER, ORDER], 7)
            return True
        except QueueFull:
            return False

    assert sorted(at_once(8, one)) == [False] * 5 + [True] * 3
    assert len(jobs.waiting()) == 6  # a comparison is queued whole or not at all
    jobs.submit([ORDER], 7)
    with pytest.raises(QueueFull):
        jobs.submit([ORDER], 7)


def test_pages(jobs):
    ids = [submit(jobs) for _ in range(5)]
    assert jobs.waiting() == ids
    rows, more = jobs.page(after=None, limit=2, newest_first=True)
    assert ([row["id"] for row in rows], more) == ([ids[4], ids[3]], True)
    rows, more = jobs.page(after=ids[3], limit=3, newest_first=True)
    assert ([row["id"] for row in rows], more) == ([ids[2], ids[1], ids[0]], False)
    rows, more = jobs.page(after=ids[0], limit=1, newest_first=False)
    assert ([row["id"] for row in rows], more) == ([ids[1]], True)
    jobs.cancel(ids[2])
    rows, _ = jobs.page(after=None, limit=9, newest_first=True, status="cancelled")
    assert [row["id"] for row in rows] == [ids[2]]
    assert jobs.page(after="video_none", limit=1, newest_first=True) is None
    assert jobs.counts() == {"queued": 4, "cancelled": 1}


def test_what_is_old_expires(jobs):
    ids = jobs.submit([ORDER, ORDER], 9)
    for index, video in enumerate(ids):
        jobs.complete(jobs.claim(video, WORKER)["lease"], f"{index}.mp4", {})
    waiting = submit(jobs)
    assert jobs.expire(60.0) == []
    with jobs.write.begin() as connection:
        connection.execute(update(videos).where(videos.c.id == ids[0]).values(ended_at=videos.c.ended_at - 100))
    assert jobs.expire(60.0) == ["0.mp4"]
    assert len(Comparisons(jobs.engine).page(after=None, limit=9, newest_first=True)[0]) == 1
    assert jobs.expire(-1.0) == ["1.mp4"]
    assert Comparisons(jobs.engine).page(after=None, limit=9, newest_first=True)[0] == []  # nothing is left of it
    assert status(jobs, waiting) == "queued"


def test_workers_come_and_go(jobs):
    jobs.register(WORKER, "here", 1, "cpu")
    jobs.register("there:cuda:0", "there", 2, "cuda:0")
    jobs.alive(WORKER, "ready", ["tiny"])
    assert [(row["id"], row["state"], row["models"]) for row in jobs.workers()] == [(WORKER, "ready", ["tiny"]), ("there:cuda:0", "starting", [])]
    jobs.unregister(WORKER)
    pass_time(jobs, LEASE_S + 1)
    assert jobs.workers() == []


def test_votes(jobs):
    votes = Comparisons(jobs.engine)
    ids = jobs.submit([ORDER, Order(**{**vars(ORDER), "attention": "attn_qat"}), ORDER], 9, floor_index=2)
    comparison = jobs.get(ids[0])["comparison_id"]
    for video in ids[:1]:
        jobs.complete(jobs.claim(video, WORKER)["lease"], "a.mp4", {})
    assert votes.ballot(votes.get(comparison)) is None
    for video in ids[1:]:
        jobs.complete(jobs.claim(video, WORKER)["lease"], "a.mp4", {})
    assert [row["id"] for row in votes.unmeasured()] == [comparison]
    votes.measured(comparison, {"x": 1})
    assert votes.unmeasured() == []
    sides = set()
    for number in range(40):
        ballot = votes.ballot(votes.get(comparison))
        row = votes.get_ballot(ballot)
        assert {row["video_a"], row["video_b"]} == set(ids[:2])  # never the reference's second rendering
        sides.add(row["label_a"])
        better = "tie" if number % 4 == 0 else "a" if row["label_a"] == "tiny: attn_qat" else "b"
        assert sorted(at_once(3, lambda _, ballot=ballot, better=better: votes.vote(ballot, better))) == [False, False, True]
    assert sides == {"tiny: bf16", "tiny: attn_qat"}, "which side a recipe is on must not tell which it is"
    (result,) = votes.results()
    assert (result["first"], result["votes"], result["first_better"], result["ties"]) == ("tiny: attn_qat", 40, 30, 10)
    assert result["first_share"] == pytest.approx(0.875)
    assert result["interval_95"] == pytest.approx([0.7389, 0.9454], abs=1e-3)  # Wilson's, by hand
    assert votes.vote("ballot_none", "a") is False


def test_a_database_that_cannot_be_used(url, tmp_path):
    with pytest.raises(UserError, match="database=sqlite:///"):
        open_database(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.db'}")
    with pytest.raises(UserError, match=r"postgresql\+psycopg://\.\.\.@127\.0\.0\.1:1/none") as error:
        open_database("postgresql+psycopg://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(error.value)


def test_tables_of_another_version_are_refused(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'service.db'}"
    engine = open_database(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE schema_version SET version = 99")
    engine.dispose()
    with pytest.raises(UserError, match="version 99"):
        open_database(url)
