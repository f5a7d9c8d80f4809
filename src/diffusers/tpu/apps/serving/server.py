"""Makes, runs and ends a server: the application with its page, in one process, whose threads end with it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import uvicorn

from ...chips.figures import generation_of
from .api import make_app
from .guard import Guard
from .jobs import Jobs, Metrics
from .requests import Reader
from .sizes import Settings, Sizes, default_size
from .worker import Worker


def about(pipe) -> str:
    """One line about the pipeline and its chips."""
    if (state := getattr(pipe, "_tpu", None)) is None:
        return f"{type(pipe).__name__} without the TPU path"
    devices, degrees = state.mesh.devices.flatten(), " x ".join(f"{name} {n}" for name, n in state.mesh.shape.items())
    kind = f"TPU {name}" if (name := generation_of(devices[0])) else "simulated"
    return f"{type(pipe).__name__} on {len(devices)} {kind} chip{'s' * (len(devices) > 1)} ({degrees})"


class Service:
    """Queue, worker and application of one pipeline, and a temporary folder for its files, which `end` removes."""

    def __init__(self, pipe, settings: Settings):
        self.settings = settings
        served = settings.sizes or (default_size(pipe),)
        self.sizes = Sizes(served, settings.any_size, settings.fps, settings.limits)
        self.jobs = Jobs(settings.limits)
        self.metrics = Metrics(self.jobs)
        prefix = f"diffusers-tpu-serve-{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.worker = Worker(pipe, self.jobs, self.folder, settings)
        self.reader = Reader(type(pipe), settings.model, settings.defaults, self.sizes)
        app = self.api = make_app(self.jobs, self.worker, self.reader, self.metrics)
        if settings.page:
            from . import page

            app = page.mounted(app, self.jobs, self.reader, self.folder, settings.token, about(pipe))
        self.app = Guard(app, settings, self.metrics, uploads=settings.page and self.reader.takes_picture)

    def start(self):
        """Compile every size, then start the worker."""
        for size in self.sizes.served:
            self.worker.warm_up(size)
        self.worker.start()

    def end(self, grace: float = 0.0):
        """Cancel queued jobs at once and running ones after `grace` seconds; return when the worker's thread has ended."""
        self.jobs.close()
        if not self.jobs.wait_idle(grace):
            for job in self.jobs.running():
                self.jobs.cancel(job)
        if self.worker.is_alive():
            self.worker.join()
        self._folder.cleanup()


class Server(uvicorn.Server):
    """uvicorn's server, which ends jobs before connections, as these may wait for jobs. `told` is called with the address."""

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
        """The second signal cancels the running jobs without waiting for `grace`."""
        if self.should_exit:
            for job in self.service.jobs.all():
                job.cancelling = True
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address, which does not listen yet. Raises ValueError if the address is not free."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ValueError(f"expected a free address, got {host}:{port}: {error}; choose another --port") from error
    return bound


def run(pipe, settings: Settings, bound: socket.socket, told) -> None:
    """Serve until SIGTERM or SIGINT, then return; no thread of the server is left."""
    service = Service(pipe, settings)
    said = {"log_level": "warning", "access_log": False, "server_header": False}
    limits = {"limit_concurrency": settings.limits.connections, "timeout_graceful_shutdown": 5}
    config = uvicorn.Config(service.app, ws="none", **said, **limits)
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        for number in (signal.SIGTERM, signal.SIGINT):  # until uvicorn handles them, they end the start
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: sys.exit(0)))
        service.start()
        Server(config, service, told).run(sockets=[bound])
