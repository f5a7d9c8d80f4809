"""Jobs and their queue, the only state that the worker's thread and the server's share.

A job is `queued`, `in_progress`, then `completed`, `failed` or `cancelled`. Finished jobs are kept for a while, then dropped.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generation.call import Request
from .errors import Refused
from .sizes import Limits, Size


QUEUED, IN_PROGRESS, COMPLETED, FAILED, CANCELLED = "queued", "in_progress", "completed", "failed", "cancelled"
FINISHED = (COMPLETED, FAILED, CANCELLED)
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # buckets of the histograms


@dataclass(eq=False)
class Job:
    """One output to make. Clients see `created_at` and `completed_at`, Unix time; the other times are of the monotonic clock."""

    kind: str  # "video" or "image"; the id begins with it
    request: Request
    size: Size
    id: str = field(init=False)
    state: str = QUEUED
    step: int = 0  # denoising steps that are done, of `steps`
    steps: int = 0
    cancelling: bool = False  # it is to end; if it runs, after the current step
    held: bool = False  # the request that made it will read its files: they are kept beyond the limits
    files: list[Path] = field(default_factory=list)
    file_bytes: int = 0
    error: dict | None = None  # `code` and `message` if it failed
    created_at: int = field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    finished_at: float | None = None
    watchers: set[Callable[[], None]] = field(default_factory=set)  # called after each change
    preview: Callable[[], Image.Image | None] = lambda: None  # a picture of its current state

    def __post_init__(self):
        self.id = f"{self.kind}_{secrets.token_hex(12)}"

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def progress(self) -> int:
        """Percent of the denoising steps; 100 when the file is there."""
        return 100 if self.state == COMPLETED else min(99, 100 * self.step // self.steps) if self.steps else 0

    def tell(self):
        for watcher in tuple(self.watchers):
            watcher()


class Jobs:
    """All jobs of a server; every method may be called from any thread. `told` is called with each job that has finished."""

    def __init__(self, limits: Limits):
        self.limits, self.told, self.closed = limits, lambda job: None, False
        self._changed = threading.Condition()
        self._all: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._seconds = 0.0  # of a job, a running mean

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, *jobs: Job):
        """Queue all of them, or none. Raises Refused: 429 if the queue has no room, 503 while the server ends."""
        with self._changed:
            if self.closed:
                raise Refused(503, "expected a server that takes jobs, got one that ends; try another", code="ending")
            if len(self) + len(jobs) > self.limits.queue:
                wait = str(max(1, round(self._seconds * len(self))))
                room = f"expected room for {len(jobs)} in the queue of {self.limits.queue}, got {len(self)} that wait"
                raise Refused(429, f"{room}; try again in some {wait} s", code="queue_full", Retry_After=wait)
            for job in jobs:
                self._all[job.id] = job
                self._queue.append(job)
            self._changed.notify_all()

    def take(self, most: int) -> list[Job] | None:
        """The next job and up to `most` - 1 more of equal arguments, for one call. Blocks until there is one; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.closed)
            if self.closed:
                return None
            arguments = self._queue[0].request.arguments
            jobs = [job for job in self._queue if job.request.arguments == arguments][:most]
            for job in jobs:
                self._queue.remove(job)
                job.state, job.started_at = IN_PROGRESS, time.monotonic()
        for job in jobs:
            job.tell()
        return jobs

    def finish(self, job: Job, state: str, files: list[Path] = (), error: dict | None = None):
        """End a job in this state. If it was cancelled meanwhile, its state is cancelled and its files are deleted."""
        with self._changed:
            if job.cancelling:
                state, error = CANCELLED, None
            job.files = list(files) if state == COMPLETED else []
            job.file_bytes = sum(file.stat().st_size for file in job.files)
            job.error, job.state, job.preview = error, state, lambda: None
            job.finished_at, job.completed_at = time.monotonic(), int(time.time())
            if state == COMPLETED:
                self._seconds += 0.2 * (job.finished_at - job.started_at - self._seconds)
            self._changed.notify_all()
        for file in set(files) - set(job.files):
            file.unlink(missing_ok=True)
        job.tell()
        self.told(job)
        self.sweep()

    def cancel(self, job: Job):
        """End a job: now if it is queued, after the current step if it runs."""
        with self._changed:
            job.cancelling = True
            if waited := job in self._queue:
                self._queue.remove(job)
        if waited:
            self.finish(job, CANCELLED)

    def ahead(self, job: Job) -> int:
        """How many jobs are in the queue before this one."""
        with self._changed:
            return self._queue.index(job) if job in self._queue else 0

    def end(self, job: Job):
        """Drop a finished job and delete its files; cancel an unfinished one."""
        if not job.finished:
            return self.cancel(job)
        with self._changed:
            self._all.pop(job.id, None)
        for file in job.files:
            file.unlink(missing_ok=True)

    def sweep(self):
        """Drop finished jobs beyond the limits of age, bytes and number, the oldest first."""
        with self._changed:
            finished = [job for job in self._all.values() if job.finished and not job.held]
        finished.sort(key=lambda job: job.finished_at)
        held = sum(job.file_bytes for job in finished)
        for place, job in enumerate(finished):
            old = time.monotonic() - job.finished_at > self.limits.kept_seconds
            if not old and held <= self.limits.kept_bytes and len(finished) - place <= self.limits.kept_jobs:
                break
            held -= job.file_bytes
            self.end(job)

    def get(self, name: str) -> Job | None:
        return self._all.get(name)

    def all(self) -> list[Job]:
        """All jobs, the newest first."""
        with self._changed:
            return list(self._all.values())[::-1]

    def close(self):
        """Take no more jobs. Queued jobs are cancelled; running ones continue."""
        with self._changed:
            self.closed = True
            waiting = list(self._queue)
            self._changed.notify_all()
        for job in waiting:
            self.cancel(job)

    def running(self) -> list[Job]:
        return [job for job in self.all() if job.state == IN_PROGRESS]

    def wait_idle(self, seconds: float) -> bool:
        """Wait until no job runs, for at most `seconds`; returns whether none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.running(), seconds)


class Metrics:
    """Prometheus' metrics of one server and its jobs, in a registry of the server's own."""

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
