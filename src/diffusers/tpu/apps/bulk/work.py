"""The work of one process on a directory: lock a free prompt, make it, record it; at the end wait for the other processes."""

import itertools
import time
from collections.abc import Callable, Iterator

from ....utils import load_image
from ..generation import media
from ..generation.call import Request, generate
from ..generation.signature import check_arguments, parameters_of, takes_batches
from .claims import Claims
from .directory import Directory
from .prompts import Prompt


class Work:
    """One process's work on a list of prompts.

    Args:
        load: returns the pipeline; called once there is a prompt to make.
        batch: prompts in one call, if their arguments are equal and the pipeline allows it.
        retry: ids of prompts to make again, once, if their record has an error.
        told: called with the record of each prompt that this process made or failed to make.
    """

    def __init__(self, directory: Directory, load: Callable, cls: type, *, batch=1, fps=None, retry=(), told=None):
        self.directory, self.cls, self.fps, self.told = directory, cls, fps, told or (lambda record: None)
        self.batch = batch if takes_batches(cls) else 1
        self.claims = Claims(directory.path)
        self._load, self._pipe, self._again = load, None, set(retry)

    def run(self, prompts: list[Prompt]):
        """Return when every prompt has a record, made by this process or another."""
        for waits in (False, True):
            taken = self._taken(prompts, waits)
            for _, alike in itertools.groupby(taken, lambda prompt: prompt.arguments):
                while group := [*itertools.islice(alike, self.batch)]:
                    self._make(group, self.batch)

    def _taken(self, prompts: list[Prompt], waits: bool) -> Iterator[Prompt]:
        """Locks prompts without a record and yields them, one by one. `waits`: also those that other processes hold."""
        for prompt in prompts:
            if self._done(prompt):
                continue
            if waits:
                self.claims.wait(prompt.place)
            elif not self.claims.take(prompt.place):
                continue
            if self._done(prompt):  # another process made it before the lock
                self.claims.give_back(prompt.place)
            else:
                yield prompt

    def _done(self, prompt: Prompt) -> bool:
        record = self.directory.record(prompt)
        return record is not None and not (prompt.id in self._again and "error" in record)

    def _make(self, group: list[Prompt], size: int):
        """Make a group in one call of `size` prompts, or one by one if that fails; record each prompt and release its lock."""
        for prompt in group:
            self.directory.clear(prompt)
            self._again.discard(prompt.id)
        self._pipe = self._load() if self._pipe is None else self._pipe  # an error here is not a prompt's
        start = time.perf_counter()
        try:
            made = generate(self._pipe, [self._request(prompt) for prompt in group], size)
        except (OSError, MemoryError):  # of the machine, not of the prompt: all further prompts would fail too
            raise
        except Exception as error:
            if size > 1:
                for prompt in group:
                    self._make([prompt], 1)
                return
            self.directory.write_record(group[0], error=f"{type(error).__name__}: {error}")
        else:
            seconds = round((time.perf_counter() - start) / len(group), 3)
            for prompt, values in zip(group, made):
                files = media.write(values, self.directory.path / f"{prompt.id}.mp4", self.fps)
                self.directory.write_record(prompt, files=[file.name for file in files], seconds=seconds)
        for prompt in group:
            self.claims.give_back(prompt.place)
            self.told(self.directory.record(prompt))

    def _request(self, prompt: Prompt) -> Request:
        """Raises ValueError for arguments that the pipeline does not take, or an `image` that cannot be read as a picture."""
        arguments, image = dict(prompt.arguments), prompt.arguments.get("image")
        if takes_image := isinstance(image, str) and "image" in parameters_of(self.cls):
            del arguments["image"]
        check_arguments(self.cls, arguments)
        try:
            pictures = {"image": load_image(image)} if takes_image else {}
        except media.NO_PICTURE as error:
            raise ValueError(f"expected image to be a picture, got {image!r}: {error}") from error
        return Request(prompt.prompt, prompt.seed, arguments | pictures)
