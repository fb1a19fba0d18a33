"""Comparisons: videos of one prompt and seed under several recipes. What separates them, and which people prefer without knowing which is which."""

import math
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sqlalchemy import Connection as Database
from sqlalchemy import Engine, func, insert, select, update

from app.jobs import Row, new_id
from app.tables import ENDED, ballots, comparisons, now, videos, writing

CHOICES = ("a", "b", "tie")
Z95 = 1.959964  # the normal distribution's 97.5 % point


class Comparisons:
    """The comparisons and votes of one database.

    Args:
        engine: from `tables.open_database`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.write = writing(engine)

    def get(self, comparison: str) -> Row | None:
        """A comparison's row with its `videos` (rows, the reference first); None: there is none of that id."""
        with self.engine.begin() as connection:
            row = connection.execute(select(comparisons).where(comparisons.c.id == comparison)).mappings().one_or_none()
            return None if row is None else _with_videos(connection, [dict(row)])[0]

    def page(self, *, after: str | None, limit: int, newest_first: bool) -> tuple[list[Row], bool] | None:
        """At most `limit` comparisons behind `after`, and whether more follow; None: there is no comparison `after`."""
        with self.engine.begin() as connection:
            query = select(comparisons)
            if after is not None:
                seq = connection.execute(select(comparisons.c.seq).where(comparisons.c.id == after)).scalar()
                if seq is None:
                    return None
                query = query.where(comparisons.c.seq < seq if newest_first else comparisons.c.seq > seq)
            order = comparisons.c.seq.desc() if newest_first else comparisons.c.seq
            rows = [dict(row) for row in connection.execute(query.order_by(order).limit(limit + 1)).mappings()]
            return _with_videos(connection, rows[:limit]), len(rows) > limit

    def unmeasured(self) -> list[Row]:
        """Comparisons, with their videos, that have ended, with at least two videos to compare, and haven't been measured."""
        unfinished = select(videos.c.comparison_id).where(videos.c.status.not_in(ENDED), videos.c.comparison_id.is_not(None))
        done = select(videos.c.comparison_id).where(videos.c.status == "completed").group_by(videos.c.comparison_id).having(func.count() > 1)
        query = select(comparisons).where(
            comparisons.c.differences.is_(None),
            comparisons.c.id.not_in(unfinished),
            comparisons.c.id.in_(done.where(videos.c.comparison_id.is_not(None))),
        )
        with self.engine.begin() as connection:
            return _with_videos(connection, [dict(row) for row in connection.execute(query.order_by(comparisons.c.seq)).mappings()])

    def measured(self, comparison: str, differences: dict[str, Any]) -> None:
        """Keeps what was measured."""
        with self.write.begin() as connection:
            connection.execute(update(comparisons).where(comparisons.c.id == comparison).values(differences=differences))

    # Votes

    def ballot(self, comparison: Row) -> str | None:
        """A new ballot: two of the comparison's videos, in random order under the names a and b. None: it hasn't two that can be shown."""
        shown = [video for video in comparison["videos"] if video["status"] == "completed" and video["comparison_index"] != comparison["floor_index"]]
        if len(shown) < 2:
            return None
        pair = [shown[0], random.choice(shown[1:])]  # the reference, and one of the others
        random.shuffle(pair)
        values = {f"video_{name}": video["id"] for name, video in zip("ab", pair, strict=True)}
        values |= {f"label_{name}": label(video) for name, video in zip("ab", pair, strict=True)}
        ballot = new_id("ballot")
        with self.write.begin() as connection:
            connection.execute(insert(ballots).values(id=ballot, comparison_id=comparison["id"], created_at=now(), **values))
        return ballot

    def get_ballot(self, ballot: str) -> Row | None:
        """A ballot's row."""
        with self.engine.begin() as connection:
            row = connection.execute(select(ballots).where(ballots.c.id == ballot)).mappings().one_or_none()
            return None if row is None else dict(row)

    def vote(self, ballot: str, choice: str) -> bool:
        """Fills in a ballot. False: it has been filled in before, or there is none."""
        cast = update(ballots).where(ballots.c.id == ballot, ballots.c.choice.is_(None)).values(choice=choice, voted_at=now())
        with self.write.begin() as connection:
            return connection.execute(cast).rowcount == 1

    def results(self) -> list[Row]:
        """For each pair of (model, attention) that was voted on: `first`, `second`, how often each was `better`, `ties`, and the first's share."""
        query = select(ballots.c.label_a, ballots.c.label_b, ballots.c.choice, func.count()).where(ballots.c.choice.is_not(None))
        with self.engine.begin() as connection:
            counted = connection.execute(query.group_by(ballots.c.label_a, ballots.c.label_b, ballots.c.choice)).all()
        pairs: dict[tuple[str, str], list[int]] = {}
        for label_a, label_b, choice, count in counted:
            first, second = sorted((label_a, label_b))
            wins = pairs.setdefault((first, second), [0, 0, 0])
            chosen = {"a": label_a, "b": label_b}.get(choice)
            wins[2 if chosen is None else 0 if chosen == first else 1] += count
        return [_result(first, second, *wins) for (first, second), wins in sorted(pairs.items())]


def label(video: Row) -> str:
    """What was compared, apart from prompt and seed: model and recipe."""
    return f"{video['model']}: {video['attention']}"


def _result(first: str, second: str, first_better: int, second_better: int, ties: int) -> Row:
    """One line of the table of votes. A tie counts half for each; the interval is Wilson's, for 95 %."""
    n = first_better + second_better + ties
    share = (first_better + ties / 2) / n
    centre, spread = share + Z95**2 / (2 * n), Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + Z95**2 / n) for sign in (-1, 1))
    counts = {"votes": n, "first_better": first_better, "second_better": second_better, "ties": ties}
    return {"first": first, "second": second, **counts, "first_share": share, "interval_95": [max(0.0, low), min(1.0, high)]}


def _with_videos(connection: Database, rows: list[Row]) -> list[Row]:
    wanted = [row["id"] for row in rows]
    found = connection.execute(select(videos).where(videos.c.comparison_id.in_(wanted)).order_by(videos.c.comparison_index)).mappings().all()
    return [row | {"videos": [dict(video) for video in found if video["comparison_id"] == row["id"]]} for row in rows]


def measure_into(sending: Connection, folder: str, files: list[tuple[str, str]]) -> None:
    """Sends what `measure` finds, or why it finds nothing, in `error`."""
    try:
        sending.send(measure(folder, files))
    except Exception as error:  # a file that was deleted meanwhile, say
        sending.send({"error": f"{type(error).__name__}: {error}"})


def measure(folder: str, files: list[tuple[str, str]]) -> dict[str, Any]:
    """What separates each video from the first: PSNR and SSIM (`evaluation.fidelity`), and flicker of each. Takes seconds: for a process of its own.

    They are measured on the mp4s, as people see them, so both carry what its compression did.

    Args:
        folder: where the files are.
        files: (video's id, file's name), the reference first.

    Returns:
        `reference` (its id) and `videos`: id -> `flicker`, and of all but the first `identical`, `psnr_mean`, `psnr_min`, `ssim_mean`, `ssim_min`.
    """
    from videoqat.data.video_io import read_video
    from videoqat.evaluation.fidelity import fidelity, flicker

    reference = read_video(Path(folder) / files[0][1])[0]
    found: dict[str, Any] = {files[0][0]: {"flicker": flicker(reference)}}
    for video, file in files[1:]:
        frames = read_video(Path(folder) / file)[0]
        differences = fidelity(reference, frames)
        found[video] = {"flicker": flicker(frames)} | {key: value for key, value in differences.items() if key not in ("psnr", "ssim")}
    return {"reference": files[0][0], "videos": found}
