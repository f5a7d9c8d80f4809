"""The one thread that runs the pipeline: jobs of equal arguments in one call, each with its own noise."""

import functools
import itertools
import logging
import threading
from pathlib import Path

from PIL import Image

from ..generation import media
from ..generation.call import Request, generate
from ..generation.signature import parameters_of, takes_batches
from .jobs import CANCELLED, COMPLETED, FAILED, Job, Jobs
from .preview import Colours, Steps
from .sizes import Settings, Size


logger = logging.getLogger(__name__)
BAD_INPUT = (ValueError, TypeError, NotImplementedError)
WARM_STEPS = 4


class Stopped(Exception):
    """All jobs of a call are cancelled."""


class Worker(threading.Thread):
    """Runs jobs until the queue is closed; their files are written to `folder`.

    A call has one job, or `max_batch` prompts with padding, so that each size needs only two programs.
    """

    def __init__(self, pipe, jobs: Jobs, folder: Path, settings: Settings):
        super().__init__(name="diffusers-tpu-worker")
        self.pipe, self.jobs, self.folder, self.settings = pipe, jobs, folder, settings
        self.max_batch = settings.max_batch if takes_batches(type(pipe)) else 1
        self.colours = Colours()

    def warm_up(self, size: Size):
        """Compile what jobs of this size need, in the calling thread, before the first job: with a picture and without, if both may come."""
        arguments = {**self.settings.defaults, **size.arguments()}
        takes = parameters_of(type(self.pipe))
        if "num_inference_steps" in takes:
            steps = arguments.get("num_inference_steps") or takes["num_inference_steps"].default or WARM_STEPS
            arguments["num_inference_steps"] = min(WARM_STEPS, steps)
        ways = [{"image": Image.new("RGB", (size.width, size.height))}] if "image" in takes else [{}]
        if "image" in takes and takes["image"].default is None and size.frames is None:
            ways.append({})
        for batch, way in itertools.product(sorted({1, self.max_batch}), ways):
            seen, request = Steps(), Request("a", 0, {**arguments, **way})
            (values,) = generate(self.pipe, [request], batch, functools.partial(self._see, [seen]))
            self.colours.learn(seen.last(), values[0])

    def run(self):
        while (jobs := self.jobs.take(self.max_batch)) is not None:
            self._answer(jobs)

    def _see(self, seen: list[Steps], step: int, steps: int, tensors: dict):
        """Keep the latents of a step for previews, which are computed in the threads that request them."""
        if (latents := tensors.get("latents")) is not None and len(latents) >= len(seen):
            for place, its in enumerate(seen):
                its.add(latents[place], getattr(self.pipe, "scheduler", None), step, steps)

    def _answer(self, jobs: list[Job]):
        """Run jobs in one call, or one by one if it fails. Every job is finished afterwards, whatever happens."""

        seen = [Steps() for _ in jobs]

        def on_step(step: int, steps: int, tensors: dict):
            self._see(seen, step, steps, tensors)
            for job, its in zip(jobs, seen):
                job.step, job.steps = step, steps
                job.preview = functools.partial(self.colours.picture, its)
                job.tell()
            if all(job.cancelling for job in jobs):
                raise Stopped

        try:
            if all(job.cancelling for job in jobs):
                return
            requests, size = [job.request for job in jobs], self.max_batch if len(jobs) > 1 else 1
            for job, its, values in zip(jobs, seen, generate(self.pipe, requests, size, on_step)):
                self.colours.learn(its.last(), values[0])
                given = values, self.folder / f"{job.id}.png", self.settings.fps
                self.jobs.finish(job, COMPLETED, [] if job.cancelling else media.write(*given))
        except Stopped:
            pass
        except Exception as error:
            if len(jobs) > 1:  # one of them may be the cause
                for job in (job for job in jobs if not job.finished):
                    self._answer([job])
            else:
                logger.error("%s failed", jobs[0].id, exc_info=error)
                code = "invalid_request" if isinstance(error, BAD_INPUT) else "server_error"
                message = " ".join(str(error).split()) or type(error).__name__
                self.jobs.finish(jobs[0], FAILED, error={"code": code, "message": message})
        finally:
            for job in jobs:
                if not job.finished:
                    job.cancelling = True
                    self.jobs.finish(job, CANCELLED)
