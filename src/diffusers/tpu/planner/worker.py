"""Makes one plan in the compiler's process: `planner.plan` runs `answer` in a child process."""

import contextlib
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import replace
from pkgutil import resolve_name

import torch

from .. import bridge
from ..chips.figures import Topology, find_topology
from ..chips.mesh import AXES, make_mesh
from ..chips.sharding import INFERRED
from ..common.config import TPUConfig
from ..compile.module import CompiledModule
from ..pipelines.attach import degrees_of
from ..pipelines.plans import model_plan, module_plan, pipeline_plan
from . import READER, advice, ici, kept, meshes, sources, timing, training
from .aot import BadRequest, CompiledProgram, Compiler, OutOfMemory
from .building import build, configuration_of
from .measured import Rates
from .recording import RecordedCall, Recording, record
from .runs import Part, PlannedRun, stage_of


TRIED_MESHES = 3
VERSIONS = ("diffusers", "torch", "torchax", "jax", "libtpu", "transformers")
# Files that do not check users' input: an error raised there is a bug.
FAULTS = ("/jax/", "/torchax/", "/tpu/bridge/", "/tpu/compile/", "/tpu/kernels/")


def answer(request: dict, progress: Callable) -> dict:
    """The plan of one request on one topology.

    Args:
        request: as `planner.request_of` makes it; with `named`, only digests of its programs are returned and nothing is compiled.

    Raises BadRequest for a request that cannot be planned.
    """
    topology = find_topology(request["topology"])
    recording = recording_of(request, progress)
    with resolve_name(request["within"])() if request.get("within") else contextlib.nullcontext():
        planner = Planner(request, topology, recording, progress)
        if request.get("named"):  # not for mesh "auto", whose choice needs compiling
            mesh = tuple(request["mesh"] or planner.default_mesh(topology))
            return {"programs": [part.digest for part in planner.plan_on(topology, mesh).parts], "reader": READER}
        run, ranking = planner.choose()
        return {
            "model": request["model"],
            **run.as_json(),
            "reader": READER,
            "versions": versions(),
            "pipeline": type(recording.pipe).__name__,
            "dtype": request["dtype"],
            "call": recording.arguments,
            "measured": request.get("measured"),
            "notes": [*advice.notes(run), *([] if planner.rates is None else [f"rates of {planner.rates}"])],
            "ranking": ranking,
            "advice": [] if run.fits else advice.what_would_fit(planner, run),
        }


def versions() -> dict[str, str]:
    """The versions on which a plan depends."""
    return {**{name: importlib.metadata.version(name) for name in VERSIONS}, "sources": sources()}


def recording_of(request: dict, progress: Callable) -> Recording:
    """The calls of the requested run. Raises BadRequest for an invalid request."""
    progress(f"building {request['model']} without weights")
    try:
        configuration = configuration_of(request["model"])
        pipe = build(configuration, getattr(torch, request["dtype"]), request.get("tiling"))
        arguments = {**configuration.call, **request["arguments"]}
        if train := request.get("train"):
            training.prepare(pipe, train, arguments)
        if request["batch"] > 1:
            arguments["prompt"] = ["word"] * request["batch"]
        by_step = {
            name: value for name, value in request.get("config", {}).items() if name.startswith("attention_spars")
        }
        recording = record(pipe, arguments, progress, config=TPUConfig(**by_step))
    except (ValueError, TypeError) as error:
        if bridge.raised_inside(error, FAULTS):
            raise  # a bug: its traceback says more than its message
        raise BadRequest(" ".join(str(error).split())) from error
    if not recording.steps:
        raise BadRequest(f"expected a pipeline that denoises in steps, got {type(pipe).__name__} without any")
    _check_size(arguments, recording)
    if train:
        training.one_step(recording)
    recording.arguments = {k: v for k, v in arguments.items() if isinstance(v, (int, float, str, bool))}
    return recording


def _check_size(arguments: dict, recording: Recording):
    """Raises BadRequest if the output has another size than was asked for: upstream rounds some sizes silently."""
    if not (decoded := [r for r in recording.calls if r.call.entry == "decode" and "audio" not in r.component]):
        return
    shape, pipe = decoded[-1].program.avals[0].shape, recording.pipe
    ratio = getattr(pipe, "vae_scale_factor_temporal", getattr(pipe, "vae_temporal_compression_ratio", 1))
    frames = arguments.get("num_frames")
    if len(shape) == 5 and frames and (frames - 1) % ratio and frames not in shape[1:3]:  # Allegro's takes 4k too
        below = (frames - 1) // ratio * ratio + 1
        raise BadRequest(
            f"expected a num_frames that the VAE can take, {ratio}k+1, got {frames}; ask for {below} or {below + ratio}"
        )
    for name, size in (("height", shape[-2]), ("width", shape[-1])):
        asked = arguments.get(name)
        if asked is not None and asked != size:
            raise BadRequest(f"expected a {name} that the VAE can take, got {asked}; it would give {size}")


def layout_of(runner: CompiledModule) -> str:
    """Where a model's sharding comes from: "its plan", "inferred" or "the compiler"."""
    if model_plan(type(runner.module)) is not None:
        return "its plan"
    return "inferred" if runner.plan.activation_spec == INFERRED else "the compiler"


class Planner:
    """Compiles the programs of one recorded run for slices and meshes."""

    def __init__(self, request: dict, topology: Topology, recording: Recording, progress: Callable):
        self.request, self.topology, self.recording, self.progress = request, topology, recording, progress
        self.config = TPUConfig(**request.get("config", {}))
        self.rates = Rates(**request["measured"]) if request.get("measured") else None
        self.compiled: dict[int, tuple[CompiledProgram, dict[str, timing.Timing]]] = {}
        modules, denoising = recording.modules, [r for r in recording.calls if stage_of(r.component) == "denoise"]
        if not denoising:
            raise BadRequest(f"expected a pipeline with a transformer or unet, got {sorted(modules)}")
        self.denoisers = []
        for r in denoising:
            module = modules[r.component]
            size = sum(weight.nbytes for weight in module.parameters())
            self.denoisers.append(meshes.Denoiser(module_plan(module), r.work, r.call.batch, r.branches, size))

    def choose(self) -> tuple[PlannedRun, list[dict]]:
        """The run on the requested mesh, or on the fastest of those compiled, and the ranking of meshes."""
        wanted = self.request["mesh"]
        if wanted != "auto":
            mesh = tuple(wanted) if wanted else self.default_mesh(self.topology)
            for denoiser in self.denoisers:
                if wanted and (reason := meshes.refusal(mesh, denoiser, self.topology.slices)):
                    raise BadRequest(reason)
            return self.plan_on(self.topology, mesh), []
        ranked = meshes.rank(self.topology, self.denoisers)
        tried = {mesh: self.plan_on(self.topology, mesh, ("denoise",)) for _, mesh in ranked[:TRIED_MESHES]}
        fitting = [run for run in tried.values() if run.fits] or [*tried.values()]
        best = min(fitting, key=lambda run: run.seconds_per_step)
        untried = {"seconds_per_step": None, "fits": None}
        compiled = {mesh: {name: getattr(run, name) for name in untried} for mesh, run in tried.items()}
        ranking = [
            {"mesh": dict(zip(AXES, mesh)), "guessed_seconds_per_step": guessed, **compiled.get(mesh, untried)}
            for guessed, mesh in ranked
        ]
        return self.plan_on(self.topology, best.mesh), ranking

    def default_mesh(self, topology: Topology) -> tuple[int, int, int]:
        pipe, devices = self.recording.pipe, Compiler(topology).devices
        return degrees_of(self.recording.modules, devices, self.config, None, pipeline_plan(type(pipe)).branches(pipe))

    def plan_on(self, topology: Topology, mesh: tuple[int, int, int], stages: tuple[str, ...] = ()) -> PlannedRun:
        """The run on one mesh, its programs compiled or modelled. `stages`: those to plan; empty: all requested components."""
        compiler, parts, only = Compiler(topology), [], self.request.get("only")
        config = replace(self.config, mesh=mesh, regroup=self.config.regroup and not self.request["mesh"])
        trained = bool(self.request.get("train"))
        for name, runner, calls in self.recording.runners(make_mesh(compiler.devices, mesh), config, trained):
            if (not only or name in only) and (not stages or stage_of(name) in stages):
                parts += [self._part(recorded, runner, compiler) for recorded in calls]
        return PlannedRun(topology, mesh, parts, self.recording, self.config, self.rates)

    def _part(self, recorded: RecordedCall, runner: CompiledModule, compiler: Compiler) -> Part:
        branches = recorded.together(runner)
        inputs = branches * sum(t.nbytes for t in recorded.call.tensors)
        weights = runner.plan_weights().coverage.bytes_per_chip
        part = Part(recorded, branches, weights, inputs, layout=layout_of(runner))
        topology, options = compiler.topology, runner.compiler_options
        if not (part.stage == "denoise" or self.request.get("everything")):
            part.shared = topology.devices if runner.plan.parallel else 1
            part.modelled_seconds = branches * recorded.work.seconds(topology.chip, part.shared)
            return part
        mesh = runner.mesh_of(recorded.call, branches)
        part.mesh = dict(mesh.shape)
        self.progress(f"compiling {part.name} for {topology.name}, mesh {','.join(map(str, part.mesh.values()))}")
        start = time.perf_counter()
        if train := self.request.get("train"):
            lowered, part.trained = training.lowered(runner, recorded.call)
            part.passes = training.PASSES[train]
        else:
            lowered = runner.trace(recorded.call, branches).traced.lower()
        part.trace_seconds = time.perf_counter() - start
        part.program_name = kept.name_of(compiler, lowered, mesh, options)
        if self.request.get("named"):
            return part
        program = hash((topology.name, lowered.as_text()))  # two equal experts share one
        if program not in self.compiled:
            try:
                compiled = kept.compiled(compiler, lowered, mesh, options)
            except OutOfMemory as error:
                if runner.split_weights():
                    return self._part(recorded, runner, compiler)
                part.refused = error
                return part
            timed = timing.time_program(compiled, topology.chip, ici.places_of(mesh), self.rates)
            self.compiled[program] = compiled, timed
        part.compiled, part.timed = self.compiled[program]
        return part
