"""Records the calls of a pipeline's models in one run: upstream's own `__call__` runs on models that return zeros.

Shapes, dtypes, counts and order come from upstream's unchanged code. Costly work that determines no shape is left out: the
models' computation (a trace gives their outputs' shapes), the scheduler's arithmetic, and the conversion of tensors to pictures.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
import PIL.Image
import torch

from ...image_processor import VaeImageProcessor
from ...schedulers.scheduling_ddim import DDIMSchedulerOutput
from ..chips.mesh import make_mesh
from ..chips.sharding import ModelPlan
from ..common.config import TPUConfig
from ..compile.call import Call
from ..compile.module import CompiledModule
from ..compile.programs import Program
from ..pipelines.components import modules_of
from ..pipelines.plans import module_plan
from ..weights.hbm import room_on, storages
from .work import Work, count


PROMPT = " ".join(["word"] * 64)


@dataclass
class RecordedCall:
    """One kind of call of a run. `groups`: the numbers of consecutive such calls within a step that can be batched."""

    component: str
    call: Call
    program: Program
    groups: list[int] = field(default_factory=list)

    def output(self):
        """Zeros in the shapes of the call's outputs."""
        program = self.program
        dtypes = [getattr(torch, aval.dtype.name) for aval in program.avals]
        return program.result.output([torch.zeros((), dtype=d).expand(a.shape) for a, d in zip(program.avals, dtypes)])

    @cached_property
    def work(self) -> Work:
        return count(self.program.traced.jaxpr)

    @property
    def count(self) -> int:
        return sum(self.groups)

    @property
    def branches(self) -> int:
        return max(self.groups)

    def together(self, runner: CompiledModule, resident: bool = True) -> int:
        """How many calls of a step `runner` batches; 1 if it branches on values. `resident`: whether the loop is on the device."""
        alone = self.branches == 1 or not resident or self.program.result.decisions.made
        return 1 if alone else runner.branches.side_by_side(self.call)

    def runs(self, together: int) -> int:
        """How often a program that batches `together` calls runs."""
        return sum(-(-group // together) for group in self.groups)


@dataclass
class Recording:
    """One run of a pipeline: its calls in the order of first use, the steps of each scheduler, and its arguments."""

    pipe: object
    on_progress: Callable[[str], None]
    config: TPUConfig = TPUConfig()
    calls: list[RecordedCall] = field(default_factory=list)
    stepped: Counter = field(default_factory=Counter)  # id of a scheduler -> its steps
    arguments: dict = field(default_factory=dict)
    last: tuple[RecordedCall, Call] | None = None  # the previous call, if of the same step

    @property
    def steps(self) -> int:
        return max(self.stepped.values(), default=0)

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return modules_of(self.pipe)

    def runners(
        self, mesh, config: TPUConfig, trained: bool = False
    ) -> Iterator[tuple[str, CompiledModule, list[RecordedCall]]]:
        """Yields name, compiled module and calls of each model that is called. The compiled module is attached meanwhile."""
        plans = {name: (module, module_plan(module)) for name, module in self.modules.items()}
        stored = storages(plans, mesh, room_on(mesh.devices.flat[0], config)[1], trained)
        for name, (module, plan) in plans.items():
            if calls := [recorded for recorded in self.calls if recorded.component == name]:
                runner = CompiledModule(module, plan, mesh, config)
                runner.storage = stored[name]
                runner.attach()
                try:
                    yield name, runner, calls
                finally:
                    runner.detach()

    def add(self, runner: "RecordingRunner", call: Call) -> RecordedCall:
        """Counts a call and returns its kind's `RecordedCall`; the first call of a kind is traced."""
        found = next((r for r in self.calls if r.component == runner.component and r.call.key == call.key), None)
        if found is None:
            self.on_progress(f"tracing {runner.component}")
            found = RecordedCall(runner.component, call, runner.trace(call))
            self.calls.append(found)
        if self.last is not None and self.last[0] is found and call.batch and self.last[1].pairs_with(call):
            found.groups[-1] += 1
        else:
            found.groups.append(1)
        self.last = (found, call)
        return found

    def __deepcopy__(self, memo):
        return self  # pipelines with audio copy their scheduler, which refers to this

    def step(self, scheduler, *args, return_dict=True, **kwargs):
        """Replaces a scheduler's step: returns the latents unchanged."""
        self.stepped[id(scheduler)] += 1
        self.last = None
        given = inspect.signature(type(scheduler).step).bind(scheduler, *args, **kwargs).arguments
        sample = next(value for name, value in given.items() if name.startswith("sample"))
        return DDIMSchedulerOutput(sample, sample) if return_dict else (sample, sample)


class RecordingRunner(CompiledModule):
    """Records calls instead of running them."""

    def __init__(self, component: str, module: torch.nn.Module, plan: ModelPlan, recording: Recording):
        super().__init__(module, plan, make_mesh(tuple(jax.devices("cpu")[:1]), (1, 1, 1)), recording.config)
        self.component, self.recording = component, recording

    def run(self, entry: str, args: tuple, kwargs: dict, back: bool = False):
        return self.recording.add(self, self.flatten_call(entry, args, kwargs, constants=False)).output()


def record(
    pipe,
    arguments: dict,
    on_progress: Callable[[str], None] = lambda text: None,
    runner: Callable[..., RecordingRunner] = RecordingRunner,
    config: TPUConfig = TPUConfig(),
) -> Recording:
    """The calls of `pipe(**arguments)`, with placeholders for required arguments that are missing (prompt, image, video).

    `runner`: the `RecordingRunner` that traces a module's calls; `config`: the configuration of the traces.

    Raises whatever upstream's check of the arguments raises.
    """
    recording = Recording(pipe, on_progress, config)
    runners = [runner(name, module, module_plan(module), recording) for name, module in recording.modules.items()]
    for one in runners:
        one.attach()
    host = property(lambda self: torch.device("cpu"))  # as with installed host glue
    names = {"__module__": type(pipe).__module__, "_execution_device": host, "device": host}
    pipe.__class__ = type(type(pipe).__name__, (type(pipe),), names)
    pipe.set_progress_bar_config(disable=True)
    for scheduler in (s for s in pipe.components.values() if hasattr(s, "step") and hasattr(s, "set_timesteps")):
        scheduler.step = partial(recording.step, scheduler)
    for processor in (p for p in vars(pipe).values() if isinstance(p, VaeImageProcessor)):
        for name in {"postprocess", "postprocess_video"} & {*dir(processor)}:  # keeps the decoder's zeros
            setattr(processor, name, lambda *args, **kwargs: next(iter((*args, *kwargs.values()))))
    try:
        pipe(**_complete(pipe, arguments))
    finally:
        for one in runners:
            one.detach()
    return recording


def _complete(pipe, arguments: dict) -> dict:
    parameters = inspect.signature(type(pipe).__call__).parameters
    given = dict(arguments)
    if unknown := sorted(given.keys() - parameters.keys() - ({"num_frames"} if "video" in parameters else set())):
        names = ", ".join(name for name in parameters if name not in ("self", "kwargs"))
        raise ValueError(f"expected arguments that {type(pipe).__name__} takes ({names}), got {', '.join(unknown)}")
    prompt = given.setdefault("prompt", PROMPT) if "prompt" in parameters else PROMPT
    if "negative_prompt" in parameters and not isinstance(given.get("negative_prompt"), list):
        negative = given.get("negative_prompt") or PROMPT
        given["negative_prompt"] = [negative] * len(prompt) if isinstance(prompt, list) else negative
    image = PIL.Image.new("RGB", (given.get("width") or 1280, given.get("height") or 720))
    stand_ins = {"image": image, "video": [image] * given.get("segment_frame_length", 1)}
    for name, parameter in parameters.items():
        kind = name.rpartition("_")[2]
        if kind in stand_ins and given.get(name, parameter.default) in (kind, inspect.Parameter.empty):
            given[name] = stand_ins[kind]
    if "video" in parameters and "num_frames" not in parameters and "num_frames" in given:
        given.setdefault("video", [image] * given.pop("num_frames"))  # as many frames as the output has
    if "output_type" in parameters:
        given["output_type"] = "pt"
    return given
