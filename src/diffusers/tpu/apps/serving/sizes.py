"""Sizes of outputs, WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, which of them a server takes, its limits and settings."""

import ipaddress
import re
from dataclasses import dataclass, replace

from ..generation.media import FPS
from ..generation.signature import parameters_of
from .errors import Refused


FORM = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", re.ASCII)


@dataclass(frozen=True)
class Limits:
    """Counts, bytes and seconds; each is at least 1."""

    queue: int = 64  # queued jobs; one more is refused with 429
    prompt_characters: int = 4000  # of prompt and negative prompt each
    body_bytes: int = 16 * 2**20  # of one request
    images: int = 4  # of one request (`n`)
    steps: int = 200  # denoising steps of one job
    side: int = 4096  # of one output in pixels, and its frames, with `any_size`
    frames: int = 1000
    kept_seconds: int = 3600  # finished jobs and their files beyond these are dropped, the oldest first
    kept_bytes: int = 4 * 2**30
    kept_jobs: int = 1000
    connections: int = 512  # open at once; one more gets 503

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"expected the limit {name} to be at least 1, got {value}")


@dataclass(frozen=True)
class Size:
    """Pixels and, of a video, frames."""

    width: int
    height: int
    frames: int | None = None

    def __str__(self) -> str:
        return self.pixels + (f"x{self.frames}" if self.frames else "")

    @property
    def pixels(self) -> str:
        """In the form of OpenAI's `size`."""
        return f"{self.width}x{self.height}"

    def arguments(self) -> dict:
        """The arguments of a pipeline's `__call__`."""
        return {"height": self.height, "width": self.width, **({"num_frames": self.frames} if self.frames else {})}


def parse(text: str, frames: int | None) -> Size:
    """The size that a text names. `frames`: a video's if the text names none; None for images. Raises ValueError."""
    found = FORM.fullmatch(text.strip())
    if found is None or (found[3] and frames is None):
        form = "WIDTHxHEIGHT" if frames is None else "WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES"
        raise ValueError(f"expected a size as {form}, got {text!r}")
    return Size(int(found[1]), int(found[2]), int(found[3]) if found[3] else frames)


def default_frames(pipeline_class: type) -> int | None:
    """A pipeline's default number of frames; None for a pipeline of images."""
    parameter = parameters_of(pipeline_class).get("num_frames")
    return None if parameter is None else parameter.default


def default_size(pipe) -> Size:
    """The pipeline's default size. Raises ValueError if it declares none."""
    takes = parameters_of(type(pipe))
    sides = [takes[name].default if name in takes else None for name in ("width", "height")]
    if not all(isinstance(side, int) for side in sides):
        side, scale = (getattr(pipe, name, None) for name in ("default_sample_size", "vae_scale_factor"))
        if not isinstance(side, int) or not isinstance(scale, int):
            raise ValueError(f"expected --sizes to serve: {type(pipe).__name__} tells no default")
        sides = [side * scale] * 2
    return Size(*sides, default_frames(type(pipe)))


@dataclass(frozen=True)
class Sizes:
    """The sizes that are served, the default one first. `any_size`: others too, each compiled at its first request."""

    served: tuple[Size, ...]
    any_size: bool
    fps: int
    limits: Limits

    @property
    def are_videos(self) -> bool:
        return self.served[0].frames is not None

    def choose(self, size: str | None, seconds: float | None = None, frames: int | None = None) -> Size:
        """The size of a request. Raises Refused with the list of those that are served."""
        first = self.served[0]
        if seconds is not None and frames is not None:
            raise Refused(400, f"expected seconds or num_frames, got both: {seconds:g} and {frames}", param="seconds")
        try:
            wanted = first if size is None else parse(size, first.frames)
        except ValueError as error:
            raise Refused(400, f"{error}; served: {self}", param="size") from error
        if seconds is not None:
            frames = self._frames(wanted, seconds)
        wanted = wanted if frames is None else replace(wanted, frames=frames)
        if wanted in self.served:
            return wanted
        if not self.any_size:
            raise Refused(400, f"expected a size that is compiled ({self}), got {wanted}", param="size", code="size")
        most = {"width": self.limits.side, "height": self.limits.side, "frames": self.limits.frames}
        for name, value in vars(wanted).items():
            if (value or 1) > most[name]:
                raise Refused(400, f"expected {name} up to {most[name]}, got {value}", param="size", code="size")
        return wanted

    def _frames(self, size: Size, seconds: float) -> int:
        """The frames for `seconds`: those of the nearest served video of these pixels within half a second, else by `fps`."""
        away = {s.frames: abs(s.frames / self.fps - seconds) for s in self.served if s.pixels == size.pixels}
        nearest = min(away, key=away.get, default=None)
        return nearest if nearest and away[nearest] <= 0.5 else max(1, round(seconds * self.fps))

    def __str__(self) -> str:
        return ", ".join(f"{s} ({s.frames / self.fps:g} s)" if s.frames else str(s) for s in self.served)


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    model: str  # the name that clients use
    defaults: dict  # arguments of the pipeline unless a request sets them
    sizes: tuple[Size, ...] = ()  # compiled before the first request; none: the pipeline's default
    any_size: bool = False
    max_batch: int = 1
    fps: int = FPS
    grace: float = 30.0  # seconds that a running job has to finish when the server ends, before it is cancelled
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # that clients must send; required unless `host` is loopback
    page: bool = True
    limits: Limits = Limits()

    def __post_init__(self):
        if not is_loopback(self.host) and not self.token:
            raise ValueError(f"expected a token (--token or DIFFUSERS_TPU_TOKEN) with --host {self.host}, got none")
        if self.max_batch < 1 or self.fps < 1 or not self.grace >= 0:
            raise ValueError("expected max_batch and fps of at least 1, and grace of at least 0")
