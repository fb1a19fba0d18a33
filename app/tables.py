"""The tables, and how their database is opened: SQLite in WAL mode, or PostgreSQL.

All times are seconds since 1970 by the database's own clock (`now()`), so that machines whose clocks differ agree about who is late.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Engine, Integer, MetaData, String, Table, Text, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from videoqat.config.serving import without_password
from videoqat.errors import UserError

STATUSES = ("queued", "in_progress", "completed", "failed", "cancelled")
ENDED = ("completed", "failed", "cancelled")
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 10_000  # how long one writer of an SQLite file waits for another

metadata = MetaData()

videos = Table(
    "videos",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),  # the order of arrival, which is the order of work
    Column("id", String(64), nullable=False, unique=True),
    Column("status", String(16), nullable=False, index=True),
    Column("prompt", Text, nullable=False),
    Column("model", String(64), nullable=False),
    Column("attention", String(200), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("sampling", JSON, nullable=False),
    Column("comparison_id", String(64), index=True),
    Column("comparison_index", Integer),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double, index=True),
    Column("step", Integer, nullable=False, default=0),
    Column("stage", String(16)),
    Column("lease", String(64), unique=True),  # of the worker that is making it: whoever holds it may report, nobody else
    Column("lease_until", Double),
    Column("worker", String(200)),
    Column("crashes", Integer, nullable=False, default=0),
    Column("cancel_requested", Boolean, nullable=False, default=False),
    Column("file", String(200)),  # name in the service's folder of videos; only of a completed one
    Column("result", JSON),
    Column("error_code", String(64)),
    Column("error_message", Text),
    sqlite_autoincrement=True,
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("host", String(200), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("device", String(200), nullable=False),
    Column("state", String(16), nullable=False),  # starting, ready, busy
    Column("started_at", Double, nullable=False),
    Column("alive_until", Double, nullable=False),
    Column("models", JSON, nullable=False),  # names of those on its device
)

comparisons = Table(
    "comparisons",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("floor_index", Integer),  # which of its videos is the first one's second rendering
    Column("differences", JSON),  # of each video to the first
    sqlite_autoincrement=True,
)

ballots = Table(
    "ballots",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("comparison_id", String(64), nullable=False, index=True),
    Column("video_a", String(64), nullable=False),
    Column("video_b", String(64), nullable=False),
    Column("label_a", String(300), nullable=False),  # model and attention: the vote counts when the videos are long gone
    Column("label_b", String(300), nullable=False),
    Column("choice", String(8), index=True),  # a, b, tie; none yet
    Column("created_at", Double, nullable=False),
    Column("voted_at", Double),
)

# Sums that only grow, for /metrics: rows of videos expire.
totals = Table(
    "totals", metadata, Column("name", String(64), primary_key=True), Column("labels", String(400), primary_key=True), Column("value", Double)
)

versions = Table("schema_version", metadata, Column("version", Integer, primary_key=True))


class now(FunctionElement[float]):  # noqa: N801 - reads as SQL's functions do
    """This moment by the database's clock, in seconds since 1970."""

    type = Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _now_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _now_postgresql(*_: Any, **__: Any) -> str:
    return "cast(extract(epoch from clock_timestamp()) as double precision)"


def open_database(url: str) -> Engine:
    """The database of `url`, with its tables made where they are missing.

    Raises:
        UserError: it can't be reached, or its tables are of another version of this program.
    """
    try:
        if url.startswith("sqlite"):
            engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        else:
            engine = create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=30)
        with writing(engine).begin() as connection:
            if not url.startswith("sqlite"):
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7617462)")  # two servers that start at once
            metadata.create_all(connection)
            found = connection.execute(versions.select()).scalar()
            if found is None:
                connection.execute(versions.insert().values(version=SCHEMA_VERSION))
    except (SQLAlchemyError, ImportError) as error:
        cause = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise UserError(f"database={without_password(url)} can't be used: {cause}") from error
    if found not in (None, SCHEMA_VERSION):
        raise UserError(f"database={without_password(url)} has tables of version {found}; this program's are of version {SCHEMA_VERSION}")
    return engine


def writing(engine: Engine) -> Engine:
    """The same database for transactions that write. SQLite must know it from the start: one that reads first and writes then can't wait its turn."""
    return engine.execution_options(writes=True)


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own; `_begin_sqlite` does
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # what was accepted is on disk
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _begin_sqlite(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")
