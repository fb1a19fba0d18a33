"""/metrics for Prometheus: what the database says of videos and workers, and how this server's requests went."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.jobs import Jobs
from app.tables import STATUSES

disable_created_metrics()  # a second series beside each counter, which nobody asks for

SUMS = {
    "videos": "videos that ended",
    "stage_seconds": "seconds spent by stage on videos that were completed",
}


class Metrics:
    """Counters of one server.

    Args:
        jobs: the database.
    """

    def __init__(self, jobs: Jobs) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Database(jobs))
        self.requests = Counter("videoqat_requests", "HTTP requests", ["method", "route", "status"], registry=self.registry)
        self.seconds = Histogram("videoqat_request_seconds", "time to answer", ["method", "route"], registry=self.registry)


class _Database(Collector):
    """What is looked up when somebody asks."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        counts = self.jobs.counts()
        videos = GaugeMetricFamily("videoqat_videos_stored", "videos in the database", labels=["status"])
        for status in STATUSES:
            videos.add_metric([status], counts.get(status, 0))
        yield videos
        states = [worker["state"] for worker in self.jobs.workers()]
        workers = GaugeMetricFamily("videoqat_workers", "workers that live", labels=["state"])
        for state in ("starting", "ready", "busy"):
            workers.add_metric([state], states.count(state))
        yield workers
        sums = self.jobs.totals()
        for name, text in SUMS.items():
            family = CounterMetricFamily(f"videoqat_{name}", text, labels=("model", "attention", "outcome" if name == "videos" else "stage"))
            for found, labels, value in sums:
                if found == name:
                    family.add_metric(labels.split("\t"), value)
            yield family
