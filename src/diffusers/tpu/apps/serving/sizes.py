"""Sizes of outputs, WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, and which of them a server takes."""

import re
from dataclasses import dataclass

from ..generation.signature import parameters_of
from .errors import Refused
from .limits import Limits


FORM = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", re.ASCII)


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
        """As OpenAI's `size`."""
        return f"{self.width}x{self.height}"

    def arguments(self) -> dict:
        """Of a pipeline's `__call__`."""
        return {"height": self.height, "width": self.width, **({"num_frames": self.frames} if self.frames else {})}


def parse(text: str, frames: int | None) -> Size:
    """A size; of a video `frames` where the text names none. Raises ValueError."""
    found = FORM.fullmatch(text.strip())
    if found is None or (found[3] and frames is None):
        form = "WIDTHxHEIGHT" if frames is None else "WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES"
        raise ValueError(f"expected a size as {form}, got {text!r}")
    return Size(int(found[1]), int(found[2]), int(found[3]) if found[3] else frames)


def default_frames(pipeline_class: type) -> int | None:
    """Frames of a video where nobody says; None of a pipeline of images."""
    parameter = parameters_of(pipeline_class).get("num_frames")
    return None if parameter is None else parameter.default


def default_size(pipe) -> Size:
    """What the pipeline makes where nobody says. Raises ValueError where it does not tell."""
    takes = parameters_of(type(pipe))
    sides = [takes[name].default if name in takes else None for name in ("width", "height")]
    if not all(isinstance(side, int) for side in sides):
        side = getattr(pipe, "default_sample_size", None)
        scale = getattr(pipe, "vae_scale_factor", None)
        if not isinstance(side, int) or not isinstance(scale, int):
            raise ValueError(
                f"expected sizes to serve: {type(pipe).__name__} tells no default; name them with --sizes"
            )
        sides = [side * scale] * 2
    return Size(*sides, default_frames(type(pipe)))


@dataclass(frozen=True)
class Sizes:
    """The sizes that are served, the default one first; `any_size`: others too, each compiled when it first comes."""

    served: tuple[Size, ...]
    any_size: bool
    fps: int
    limits: Limits

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
        wanted = Size(wanted.width, wanted.height, frames) if frames is not None else wanted
        if wanted in self.served:
            return wanted
        if not self.any_size:
            raise Refused(400, f"expected a size that is compiled ({self}), got {wanted}", param="size", code="size")
        self._check(wanted)
        return wanted

    def _frames(self, size: Size, seconds: float) -> int:
        """Of the served video of these pixels that is nearest, within half a second; else of the seconds alone."""
        near = [s.frames for s in self.served if s.pixels == size.pixels and abs(s.frames / self.fps - seconds) <= 0.5]
        return min(
            near, key=lambda frames: abs(frames / self.fps - seconds), default=max(1, round(seconds * self.fps))
        )

    def _check(self, size: Size):
        for name, value, most in (
            ("width", size.width, self.limits.side),
            ("height", size.height, self.limits.side),
            ("frames", size.frames or 1, self.limits.frames),
        ):
            if value > most:
                raise Refused(400, f"expected {name} up to {most}, got {value}", param="size", code="size")

    def __str__(self) -> str:
        if self.served[0].frames is None:
            return ", ".join(map(str, self.served))
        return ", ".join(f"{size} ({size.frames / self.fps:g} s)" for size in self.served)
