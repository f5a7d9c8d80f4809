"""Runs requests of equal arguments in one call of a pipeline, each with its own prompt and noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch

from . import media
from .signature import parameters_of


@dataclass(frozen=True)
class Request:
    """One prompt; `seed` of its noise; `arguments` of the pipeline's `__call__` without prompt and generator."""

    prompt: str
    seed: int
    arguments: dict = field(default_factory=dict, hash=False)


def generate(
    pipe, requests: Sequence[Request], size: int = 1, on_step: Callable[[int, int, dict], None] | None = None
) -> list[list]:
    """The results of one call for each request: lists of images, or of videos.

    Args:
        requests: of equal arguments; more than one only if `takes_batches` is true of the pipeline.
        size: prompts of the call. Requests are repeated to fill it, so that one program serves any number of requests.
        on_step: called after each denoising step with the number of steps done, their total, and the tensors that upstream's
            callback gets (`latents`), on the host. An error that it raises ends the call.
    """
    filled = list(islice(cycle(requests), max(size, len(requests))))
    takes = parameters_of(type(pipe))
    given = {"prompt": [request.prompt for request in filled]}
    if "generator" in takes:
        given["generator"] = [torch.Generator().manual_seed(request.seed) for request in filled]
    if len(filled) == 1:
        given = {name: values[0] for name, values in given.items()}
    if "output_type" in takes:
        given["output_type"] = "pil"
    if on_step is not None and "callback_on_step_end" in takes:

        def step_ends(pipe, step: int, timestep, tensors: dict) -> dict:
            on_step(step + 1, max(getattr(pipe, "num_timesteps", 0) or 0, step + 1), tensors)
            return {}

        given["callback_on_step_end"] = step_ends
    values = media.pictures(pipe(**{**requests[0].arguments, **given}))
    each = len(values) // len(filled)
    return [values[each * i : each * (i + 1)] for i in range(len(requests))]
