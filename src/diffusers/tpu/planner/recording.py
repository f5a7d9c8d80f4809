"""What one run of a pipeline asks of its models: upstream's own `__call__`, on models that answer with zeros.

Shapes, dtypes, counts and order come from upstream's code as it is; only what costs and decides no shape is left out:
the models' work (a trace gives the shapes of their outputs), the scheduler's arithmetic, the way from tensors to pictures.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import PIL.Image
import torch

from ...image_processor import VaeImageProcessor
from ..chips.mesh import make_mesh
from ..chips.sharding import ModelPlan
from ..compile.module import Call, CompiledModule
from ..config import TPUConfig
from ..pipelines.plans import module_plan


PROMPT = " ".join(["word"] * 64)


@dataclass
class RecordedCall:
    """A call that a run makes, `count` times; `pairs` of them follow on another of their kind and can run with it."""

    component: str
    call: Call
    count: int = 0
    pairs: int = 0
    traced: object = None
    outputs: list = field(default_factory=list)


@dataclass
class Recording:
    """All calls of one run in the order of their first, the number of scheduler steps, the pipeline and its arguments."""

    pipe: object
    calls: list[RecordedCall]
    steps: int
    arguments: dict = field(default_factory=dict)


def record(
    pipe, arguments: dict, on_progress: Callable[[str], None] = lambda text: None, runner: type | None = None
) -> Recording:
    """The calls of `pipe(**arguments)`. What the pipeline needs and `arguments` do not hold (prompt, image, video) stands in.

    `runner`: what traces a module's calls, a `RecordingRunner`.

    Raises whatever upstream's check of the arguments raises.
    """
    recorder = _Recorder(on_progress)
    modules = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    make = RecordingRunner if runner is None else runner
    runners = [make(name, module, module_plan(module), recorder) for name, module in modules.items()]
    for runner in runners:
        runner.attach()
    pipe.__class__ = _planning_class(type(pipe))
    _quiet(pipe, recorder)
    try:
        pipe(**_complete(pipe, arguments))
    finally:
        for runner in runners:
            runner.detach()
    return Recording(pipe, recorder.calls, recorder.steps)


class _Recorder:
    """The calls so far."""

    def __init__(self, on_progress: Callable[[str], None]):
        self.calls: list[RecordedCall] = []
        self.steps = 0
        self.on_progress = on_progress
        self.last: tuple[RecordedCall, Call] | None = None

    def add(self, runner: "RecordingRunner", call: Call) -> RecordedCall:
        key = (runner.component, call.key)
        found = next((r for r in self.calls if (r.component, r.call.key) == key), None)
        if found is None:
            self.on_progress(f"tracing {runner.component}")
            found = RecordedCall(runner.component, call)
            self.calls.append(found)
            program = runner.trace(call)
            found.traced, found.outputs = program.traced, [program.avals, program.result]
        found.count += 1
        if self.last is not None and self.last[0] is found and call.batch and self.last[1].pairs_with(call):
            found.pairs += 1
            self.last = None
        else:
            self.last = (found, call)
        return found


class RecordingRunner(CompiledModule):
    """Writes calls down in place of running them."""

    def __init__(self, component: str, module: torch.nn.Module, plan: ModelPlan, recorder: _Recorder):
        super().__init__(module, plan, make_mesh(tuple(jax.devices("cpu")[:1]), (1, 1, 1)), TPUConfig())
        self.component, self.recorder = component, recorder

    def run(self, entry: str, args: tuple, kwargs: dict):
        avals, result = self.recorder.add(self, self.flatten_call(entry, args, kwargs)).outputs
        return result.output([torch.zeros((), dtype=_torch_dtype(a.dtype)).expand(a.shape) for a in avals])


def _torch_dtype(dtype) -> torch.dtype:
    return torch.bool if dtype.name == "bool" else getattr(torch, dtype.name)


def _planning_class(cls: type) -> type:
    """`cls`, its glue on the host as with installed host glue."""
    host = property(lambda self: torch.device("cpu"))
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "_execution_device": host, "device": host})


def _quiet(pipe, recorder: _Recorder):
    """Steps that hand the latents on, and pictures that stay the decoder's zeros."""
    pipe.set_progress_bar_config(disable=True)
    for scheduler in (s for s in pipe.components.values() if hasattr(s, "step") and hasattr(s, "set_timesteps")):
        scheduler.step = _step(recorder)
    for processor in (p for p in vars(pipe).values() if isinstance(p, VaeImageProcessor)):
        for name in ("postprocess", "postprocess_video"):
            if hasattr(processor, name):
                setattr(processor, name, _first)


def _first(*args, **kwargs):
    return next(iter((*args, *kwargs.values())))


def _step(recorder: _Recorder) -> Callable:
    def step(model_output, timestep, sample, *args, return_dict=True, **kwargs):
        recorder.steps += 1
        if not isinstance(sample, torch.Tensor):  # CogVideoX's DPM gives its old prediction third
            sample = args[0]
        return (sample, sample)

    return step


def _complete(pipe, arguments: dict) -> dict:
    parameters = inspect.signature(type(pipe).__call__).parameters
    given = dict(arguments)
    if "prompt" in parameters:
        given.setdefault("prompt", PROMPT)
    if "negative_prompt" in parameters and given.get("negative_prompt") is None:
        given["negative_prompt"] = PROMPT
    image = PIL.Image.new("RGB", (given.get("width") or 1280, given.get("height") or 720))
    if "image" in parameters and parameters["image"].default is inspect.Parameter.empty:
        given.setdefault("image", image)
    if "video" in parameters and "num_frames" not in parameters and "num_frames" in given:
        given.setdefault("video", [image] * given.pop("num_frames"))  # as many as are to come out
    if "output_type" in parameters:
        given["output_type"] = "pt"
    return given
