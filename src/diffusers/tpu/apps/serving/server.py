"""A server from start to end: everything made, the page mounted, one process, threads that end with it."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ..generation import media
from .api import make_app
from .guard import Guard, is_loopback
from .jobs import Jobs
from .metrics import Metrics
from .requests import Reader
from .sizes import Limits, Size, Sizes, default_size
from .worker import Worker


@dataclass(frozen=True)
class Settings:
    """What a server is started with.

    Attributes:
        model: the name that clients use.
        defaults: arguments of the pipeline where a request says nothing else.
        sizes: compiled before the first request; none: the pipeline's default.
        grace: seconds that a running job has to finish when the server ends, before it is cancelled.
        token: what clients show; needed where `host` is not loopback.
    """

    model: str
    defaults: dict
    sizes: tuple[Size, ...] = ()
    any_size: bool = False
    max_batch: int = 1
    fps: int = media.FPS
    grace: float = 30.0
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    page: bool = True
    limits: Limits = Limits()

    def __post_init__(self):
        if not is_loopback(self.host) and not self.token:
            raise ValueError(
                f"expected a token to be reached from elsewhere: --token or DIFFUSERS_TPU_TOKEN, got none with --host {self.host}"
            )
        if self.max_batch < 1 or self.fps < 1 or self.grace < 0:
            raise ValueError("expected max_batch and fps of at least 1, and grace of at least 0")


class Service:
    """Queue, worker and application around one pipeline; files lie in a folder that goes with it."""

    def __init__(self, pipe, settings: Settings):
        self.settings = settings
        name, defaults, limits, fps = settings.model, settings.defaults, settings.limits, settings.fps
        self.sizes = Sizes(settings.sizes or (default_size(pipe),), settings.any_size, fps, limits)
        self.jobs = Jobs(limits)
        self.metrics = Metrics(self.jobs)
        prefix = f"diffusers-tpu-serve-{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.worker = Worker(pipe, self.jobs, self.folder, defaults=defaults, max_batch=settings.max_batch, fps=fps)
        self.reader = Reader(type(pipe), name, defaults, self.sizes)
        app = self.api = make_app(self.jobs, self.worker, self.reader, self.metrics)
        if settings.page:
            from . import page

            app = page.mounted(app, self.jobs, self.reader, self.folder, settings.token)
        local, most = is_loopback(settings.host), limits.body_bytes
        self.app = Guard(app, token=settings.token, loopback=local, body_bytes=most, metrics=self.metrics)

    def start(self):
        """Compile every size, then start the worker."""
        for size in self.sizes.served:
            self.worker.warm_up(size)
        self.worker.start()

    def end(self, grace: float = 0.0):
        """Cancel what waits at once and what runs after `grace` seconds; return when the worker's thread has ended."""
        self.jobs.close()
        if not self.jobs.wait_idle(grace):
            for job in self.jobs.running():
                self.jobs.cancel(job)
        if self.worker.is_alive():
            self.worker.join()
        self._folder.cleanup()


class Server(uvicorn.Server):
    """uvicorn's server, which ends jobs before connections, as these may wait for jobs.

    Args:
        told: called with the address when requests are taken.
    """

    def __init__(self, config: uvicorn.Config, service: Service, told):
        super().__init__(config)
        self.service, self.told = service, told

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self.told(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets=None):
        for server in self.servers:
            server.close()
        await asyncio.to_thread(self.service.end, self.service.settings.grace)
        await super().shutdown(sockets)

    def handle_exit(self, sig, frame):
        """The second signal ends the running job's time to finish."""
        if self.should_exit:
            for job in self.service.jobs.all():
                job.cancelling = True
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address, which takes nothing yet. Raises ValueError where that is not free."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"expected a free address, got {host}:{port}: {error}; choose another --port") from error
    return bound


def run(pipe, settings: Settings, bound: socket.socket, told) -> None:
    """Serve until SIGTERM or SIGINT, then return; no thread of ours is left."""
    service = Service(pipe, settings)
    config = uvicorn.Config(
        service.app,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        limit_concurrency=settings.limits.connections,
        timeout_graceful_shutdown=5,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        for number in (signal.SIGTERM, signal.SIGINT):  # until uvicorn takes them, they end the start
            stack.callback(signal.signal, number, signal.signal(number, _stop))
        service.start()
        Server(config, service, told).run(sockets=[bound])


def _stop(number, frame):
    raise SystemExit(0)
