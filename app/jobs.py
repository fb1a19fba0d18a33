"""The state of every video, and the only ways in which it changes.

    queued ------ claim ------> in_progress ------ complete ------> completed
      |  ^                        |   |   |
      |  +------ release ---------+   |   +------- fail ----------> failed
      |  +------ reap (a retry) ------+   +------- reap (no more) -> failed
      |                               |
      +-- cancel -> cancelled <-------+  (complete, fail, release and reap, where cancel_requested)

Every change is one conditional UPDATE, so that of two who want to make it one does and the other is told that it came too late; nobody reads first
and writes then. A worker that claims a video gets a lease, a name that nobody else knows; all it reports later holds only while that lease is on
the row. A worker that was thought dead and comes back therefore changes nothing: its lease is gone. A deleted video is a row that isn't there,
which its worker learns in the same way. Files are named by lease, so two attempts never write to one.

A video whose cancelling was acknowledged never becomes `completed`.
"""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Update, and_, case, delete, func, insert, literal, null, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from app.tables import ENDED, ballots, comparisons, now, totals, videos, workers, writing

Row = dict[str, Any]
Sum = tuple[str, str, float]  # name, values of its labels with tabs between, what is added


class QueueFull(Exception):
    """As many videos wait as may wait."""


@dataclass(frozen=True)
class Order:
    """A video that is wanted, checked and complete."""

    prompt: str
    model: str
    attention: str
    seed: int
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """A video whose state has changed, and its new one."""

    id: str
    status: str


def new_id(kind: str) -> str:
    """A name that can't be guessed, such as `video_8f...`."""
    return f"{kind}_{secrets.token_hex(16)}"


def new_identity(device: str) -> str:
    """What a worker is called, by database and people: where it runs, and something of its own."""
    return f"{socket.gethostname()}:{device}:{secrets.token_hex(4)}"


class Jobs:
    """The videos of one database.

    Args:
        engine: from `tables.open_database`.
        retries: how often a video is begun again whose worker died.
        lease_s: seconds after its last word that a worker counts as dead.
    """

    def __init__(self, engine: Engine, retries: int, lease_s: float) -> None:
        self.engine = engine
        self.write = writing(engine)
        self.retries = retries
        self.lease_s = lease_s

    # What comes in

    def submit(self, orders: Sequence[Order], max_queued: int, floor_index: int | None = None) -> list[str]:
        """Queues videos, all or none; several belong together as a comparison. Returns their ids.

        Args:
            orders: one, or those of a comparison, its reference first.
            max_queued: how many may wait altogether.
            floor_index: which order repeats the first.

        Raises:
            QueueFull: with these, more would wait than may.
        """
        with self.write.begin() as connection:
            if connection.dialect.name == "postgresql":  # SQLite has one writer at a time anyway
                connection.execute(text("SELECT pg_advisory_xact_lock(7617463)"))
            waiting = connection.execute(select(func.count()).select_from(videos).where(videos.c.status == "queued")).scalar_one()
            if waiting + len(orders) > max_queued:
                raise QueueFull
            comparison = new_id("comparison") if len(orders) > 1 else None
            if comparison:
                connection.execute(insert(comparisons).values(id=comparison, created_at=now(), floor_index=floor_index))
            ids = [new_id("video") for _ in orders]
            for index, (video, order) in enumerate(zip(ids, orders, strict=True)):
                row = {**vars(order), "id": video, "status": "queued", "comparison_id": comparison, "comparison_index": index if comparison else None}
                connection.execute(insert(videos).values(**row, created_at=now()))
        return ids

    def cancel(self, video: str) -> str | None:
        """Ends a waiting video at once, and has the worker of one in progress end it. Returns the status after that; None: there is no such video."""
        with self.write.begin() as connection:
            _changed(connection, _end(videos.c.id == video, videos.c.status == "queued", status="cancelled"))
            connection.execute(update(videos).where(videos.c.id == video, videos.c.status == "in_progress").values(cancel_requested=True))
            return connection.execute(select(videos.c.status).where(videos.c.id == video)).scalar()

    def delete(self, video: str) -> Row | None:
        """Takes a video out, whatever its state; its worker ends it within one step. Returns its `id` and `file`; None: there is no such video."""
        with self.write.begin() as connection:
            gone = connection.execute(
                delete(videos).where(videos.c.id == video).returning(videos.c.id, videos.c.file, videos.c.comparison_id)
            ).mappings()
            row = gone.one_or_none()
            if row is not None and row["comparison_id"]:
                _drop_empty_comparisons(connection)
            return None if row is None else dict(row)

    # What a worker does

    def claim_next(self, worker: str) -> Row | None:
        """Begins the video whose turn it is, as `claim`. None: none waits."""
        while waiting := self.waiting(1):
            row = self.claim(waiting[0], worker)
            if row is not None:  # else another worker was first, and the next one's turn has come
                return row
        return None

    def claim(self, video: str, worker: str) -> Row | None:
        """Begins a waiting video: its row, with a new `lease`. None: it isn't waiting any more."""
        lease = secrets.token_hex(16)
        values = {"status": "in_progress", "lease": lease, "lease_until": now() + self.lease_s, "worker": worker, "step": 0, "stage": "loading"}
        begun = update(videos).where(videos.c.id == video, videos.c.status == "queued").values(**values, started_at=now()).returning(*videos.c)
        with self.write.begin() as connection:
            row = connection.execute(begun).mappings().one_or_none()
            return None if row is None else dict(row)

    def report(self, lease: str, *, stage: str | None = None, step: int | None = None) -> bool:
        """A sign of life, with progress. Returns whether the video is still wanted from whoever holds `lease`."""
        values: Row = {"lease_until": now() + self.lease_s}
        values |= {key: value for key, value in (("stage", stage), ("step", step)) if value is not None}
        beat = update(videos).where(*_held(lease)).values(**values).returning(videos.c.cancel_requested)
        with self.write.begin() as connection:
            return connection.execute(beat).scalar() is False

    def complete(self, lease: str, file: str, result: Row, sums: Sequence[Sum] = ()) -> bool:
        """The video is there, in `file`; `sums` are added if so. False: it isn't wanted any more (and the file is to be removed)."""
        done = _end(*_held(lease), videos.c.cancel_requested.is_(False), status="completed", file=file, result=result)
        with self.write.begin() as connection:
            if not _changed(connection, done):
                return False
            _add(connection, sums)
            return True

    def fail(self, lease: str, code: str, message: str) -> bool:
        """The video can't be made, or is cancelled if that was asked for. False: it isn't wanted any more."""
        wanted = videos.c.cancel_requested.is_(False)
        status = case((wanted, "failed"), else_="cancelled")
        failed = _end(*_held(lease), status=status, error_code=case((wanted, code)), error_message=case((wanted, message)))
        with self.write.begin() as connection:
            return bool(_changed(connection, failed))

    def release(self, lease: str) -> str | None:
        """The worker stops without having finished: the video waits again, or ends if that was asked for. Returns which; None: its lease is gone."""
        with self.write.begin() as connection:
            found = _changed(connection, _back(and_(*_held(lease)), crashed=False, retries=self.retries))
            return found[0].status if found else None

    def reap(self, worker: str | None = None, *, crashed: bool = True) -> list[Ended]:
        """Takes videos from workers that are dead: from `worker`, or without it from all whose leases have run out. Each waits again, or fails; where
        the worker has not `crashed`, but was ended by whoever had started it, that doesn't count against the video (as in `release`)."""
        dead = videos.c.lease_until < now() if worker is None else videos.c.worker == worker
        back = _back(and_(videos.c.status == "in_progress", dead), crashed=crashed, retries=self.retries)
        with self.write.begin() as connection:
            return _changed(connection, back)

    # Who works

    def register(self, worker: str, host: str, pid: int, device: str) -> None:
        """A worker has started."""
        with self.write.begin() as connection:
            connection.execute(delete(workers).where(workers.c.id == worker))
            row = {"id": worker, "host": host, "pid": pid, "device": device, "state": "starting", "models": []}
            connection.execute(insert(workers).values(**row, started_at=now(), alive_until=now() + self.lease_s))

    def alive(self, worker: str, state: str, models: list[str]) -> None:
        """A worker lives."""
        with self.write.begin() as connection:
            values = {"state": state, "models": models, "alive_until": now() + self.lease_s}
            connection.execute(update(workers).where(workers.c.id == worker).values(**values))

    def unregister(self, worker: str) -> None:
        """A worker has ended."""
        with self.write.begin() as connection:
            connection.execute(delete(workers).where(workers.c.id == worker))

    def workers(self) -> list[Row]:
        """Workers that live."""
        with self.engine.begin() as connection:
            found = connection.execute(select(workers).where(workers.c.alive_until >= now()).order_by(workers.c.started_at, workers.c.id))
            return [dict(row) for row in found.mappings()]

    # What is there

    def get(self, video: str) -> Row | None:
        """A video's row."""
        with self.engine.begin() as connection:
            row = connection.execute(select(videos).where(videos.c.id == video)).mappings().one_or_none()
            return None if row is None else dict(row)

    def page(self, *, after: str | None, limit: int, newest_first: bool, status: str | None = None) -> tuple[list[Row], bool] | None:
        """At most `limit` rows behind video `after` in the order asked for, and whether more follow. None: there is no video `after`."""
        with self.engine.begin() as connection:
            query = select(videos)
            if after is not None:
                seq = connection.execute(select(videos.c.seq).where(videos.c.id == after)).scalar()
                if seq is None:
                    return None
                query = query.where(videos.c.seq < seq if newest_first else videos.c.seq > seq)
            if status is not None:
                query = query.where(videos.c.status == status)
            found = connection.execute(query.order_by(videos.c.seq.desc() if newest_first else videos.c.seq).limit(limit + 1)).mappings().all()
            return [dict(row) for row in found[:limit]], len(found) > limit

    def waiting(self, limit: int | None = None) -> list[str]:
        """Ids of waiting videos, in the order in which their turn comes: that of their arrival, also of those that are begun again."""
        with self.engine.begin() as connection:
            return list(connection.execute(select(videos.c.id).where(videos.c.status == "queued").order_by(videos.c.seq).limit(limit)).scalars())

    def counts(self) -> dict[str, int]:
        """Status -> number of videos."""
        with self.engine.begin() as connection:
            counted = connection.execute(select(videos.c.status, func.count()).group_by(videos.c.status))
            return {row[0]: row[1] for row in counted}

    def files(self) -> set[str]:
        """Names of the files that rows name, and leases under which files may be in the making."""
        with self.engine.begin() as connection:
            found = connection.execute(select(videos.c.file, videos.c.lease).where(or_(videos.c.file.is_not(None), videos.c.lease.is_not(None))))
            return {name for row in found for name in row if name}

    def expire(self, keep_s: float) -> list[str]:
        """Takes out videos that ended longer than `keep_s` seconds ago. Returns their files."""
        old = and_(videos.c.status.in_(ENDED), videos.c.ended_at < now() - keep_s)
        with self.write.begin() as connection:
            files = [file for file in connection.execute(delete(videos).where(old).returning(videos.c.file)).scalars() if file]
            _drop_empty_comparisons(connection)
            connection.execute(delete(ballots).where(ballots.c.choice.is_(None), ballots.c.created_at < now() - keep_s))
            connection.execute(delete(workers).where(workers.c.alive_until < now() - keep_s))
        return files

    def totals(self) -> list[Sum]:
        """Every sum that only grows."""
        with self.engine.begin() as connection:
            return [(row.name, row.labels, row.value) for row in connection.execute(select(totals))]


def _changed(connection: Connection, change: Update) -> list[Ended]:
    """Makes a change. Returns the videos that it has met; those that have come to their end with it, however that is, are counted for /metrics."""
    found = connection.execute(change.returning(videos.c.id, videos.c.status, videos.c.model, videos.c.attention)).all()
    ended = [f"{row.model}\t{row.attention}\t{row.status}" for row in found if row.status in ENDED]
    _add(connection, [("videos", labels, 1.0) for labels in sorted(ended)])  # in order: else two such changes could wait for each other
    return [Ended(row.id, row.status) for row in found]


def _add(connection: Connection, sums: Sequence[Sum]) -> None:
    insert_into = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    for name, labels, value in sums:
        added = insert_into(totals).values(name=name, labels=labels, value=value)
        connection.execute(added.on_conflict_do_update(index_elements=["name", "labels"], set_={"value": totals.c.value + added.excluded.value}))


def _held(lease: str) -> tuple[ColumnElement[bool], ...]:
    return videos.c.lease == lease, videos.c.status == "in_progress"


def _end(*conditions: ColumnElement[bool], status: Any, **values: Any) -> Update:
    """The change of a video to a state that is for good."""
    given_up = {"lease": None, "lease_until": None, "stage": None}
    return update(videos).where(*conditions).values(status=status, ended_at=now(), **given_up, **values)


def _back(condition: ColumnElement[bool], *, crashed: bool, retries: int) -> Update:
    """The change of a video that its worker leaves unfinished. What stands in `case` is the row as it was."""
    spent = and_(literal(crashed), videos.c.crashes >= retries)
    cancelled = videos.c.cancel_requested
    lost = "its worker ended without a word (killed, or out of memory)"
    return (
        update(videos)
        .where(condition)
        .values(
            status=case((cancelled, "cancelled"), (spent, "failed"), else_="queued"),
            ended_at=case((or_(cancelled, spent), now()), else_=null()),
            error_code=case((cancelled, null()), (spent, "worker_lost"), else_=null()),
            error_message=case((cancelled, null()), (spent, f"{lost}, {retries + 1} time{'s' if retries else ''}"), else_=null()),
            crashes=videos.c.crashes + int(crashed),
            lease=None,
            lease_until=None,
            worker=None,
            stage=None,
            step=0,
            started_at=case((or_(cancelled, spent), videos.c.started_at), else_=null()),
        )
    )


def _drop_empty_comparisons(connection: Connection) -> None:
    left = select(videos.c.comparison_id).where(videos.c.comparison_id.is_not(None))
    connection.execute(delete(comparisons).where(comparisons.c.id.not_in(left)))
