"""What Prometheus is told, by its own library, in a registry of the server's own."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .jobs import Job, Jobs


SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters and clocks of one server and its jobs."""

    def __init__(self, jobs: Jobs):
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "diffusers_tpu"}
        self.finished = Counter("jobs", "Jobs that finished, by outcome.", ["outcome"], **made)
        self.seconds = Histogram("job_seconds", "From a job's start to its end.", buckets=SECONDS, **made)
        self.waited = Histogram("queue_seconds", "A job's time in the queue.", buckets=SECONDS, **made)
        self.responses = Counter("http_responses", "Answers, by status.", ["status"], **made)
        Gauge("queue_length", "Jobs that wait.", **made).set_function(lambda: len(jobs))
        Gauge("jobs_running", "Jobs of the call that runs.", **made).set_function(lambda: len(jobs.running()))
        jobs.told = self._finished

    def _finished(self, job: Job):
        self.finished.labels(job.state).inc()
        self.waited.observe((job.started_at or time.monotonic()) - job.queued_at)
        if job.started_at is not None:
            self.seconds.observe(job.finished_at - job.started_at)

    def text(self) -> bytes:
        return generate_latest(self.registry)
