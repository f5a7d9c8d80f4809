"""One question to the planner, answered in the compiler's process: `answer` is what `planner.plan` runs in a child."""

import contextlib
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..chips.figures import TOPOLOGIES, Topology, find_topology
from ..chips.mesh import make_mesh, plan_degrees
from ..chips.sharding import ModelPlan
from ..compile.module import CompiledModule
from ..config import TPUConfig
from ..kernels.attention.softmax_modes import BOUND, WAYS
from ..pipelines.plans import module_plan, pipeline_plan
from ..weights.hbm import room_for_weights, turns
from . import READER, aot, ici, kept, meshes, sources, timing
from .aot import BadRequest, CompiledProgram, Compiler, OutOfMemory
from .building import build, configuration_of
from .recording import RecordedCall, Recording, record
from .work import Work, count


GIB = 2**30
STAGES = {"text_encoder": "text", "image_encoder": "image", "transformer": "denoise", "unet": "denoise", "vae": "vae"}
TRIED_MESHES = 3
TRIED_SLICES = 2
VERSIONS = ("diffusers", "torch", "torchax", "jax", "libtpu", "transformers")


@dataclass
class Part:
    """One program of the run: a component's call, alone or as the two branches of guidance, on one mesh.

    `timed`: by way of the attention kernel. `is_of`: a digest of the program, or of what was counted of it, and of what the
    run does with it.
    """

    recorded: RecordedCall
    branches: int
    runs: int
    work: Work
    weights: int
    inputs: int
    is_of: str = ""
    compiled: CompiledProgram | None = None
    timed: dict[str, timing.Timing] | None = None
    refused: OutOfMemory | None = None
    modelled_seconds: float = 0.0
    trace_seconds: float = 0.0
    shared: int = 1

    @property
    def name(self) -> str:
        return f"{self.recorded.component}.{self.recorded.call.entry}"

    @property
    def stage(self) -> str:
        stage = stage_of(self.recorded.component)
        return self.recorded.call.entry if stage == "vae" else stage

    @property
    def seconds(self) -> float:
        """Of one run, all heads of attention bound."""
        return self.timed[BOUND].seconds["total"] if self.timed is not None else self.modelled_seconds

    @property
    def activations(self) -> int:
        """Bytes on a chip beyond weights and program while it runs."""
        if self.compiled is not None:
            m = self.compiled.memory
            return m["arguments"] - self.weights + m["temporaries"] + m["outputs"] - m["aliased"]
        if self.refused is not None and self.refused.asked:
            return max(self.refused.asked - self.weights, 0)
        return self.work.live // self.shared + self.inputs

    @property
    def program(self) -> int:
        return self.compiled.memory["program"] if self.compiled is not None else 0


def answer(request: dict, progress: Callable) -> dict:
    """The plan of one request on one topology.

    Args:
        request: `model`, `topology`, `mesh` (None: as the pipeline would choose; "auto"; or degrees), `dtype`, `batch`,
            `arguments` of the pipeline's call, `everything` (compile more than the denoiser), `tiling` (None: as the card), `config` (further fields
            of TPUConfig), `only` (components), `within` (see `request_of`), `named` (see `naming`).

    Raises BadRequest for what cannot be planned.
    """
    topology = find_topology(request["topology"])
    progress(f"building {request['model']} without weights")
    recording = recording_of(request, progress)
    with aot.function_of(request["within"])() if request.get("within") else contextlib.nullcontext():
        return _answer(request, topology, recording, progress)


def _answer(request: dict, topology: Topology, recording: Recording, progress: Callable) -> dict:
    works = {id(r): count(r.traced.jaxpr) for r in recording.calls}
    planner = _Planner(request, topology, recording, works, progress)
    if request.get("named"):
        return {"programs": planner.named(), "reader": READER}
    chosen, ranking = planner.choose()
    result = planner.as_json(*chosen)
    result["ranking"] = ranking
    if not result["fits"]:
        result["advice"] = planner.advice(*chosen)
    return result


def stage_of(component: str) -> str:
    """What part of a run a component does; its own name where that is not known."""
    return next((stage for prefix, stage in STAGES.items() if component.startswith(prefix)), component)


def versions() -> dict[str, str]:
    """Of what decides a plan."""
    return {**{name: importlib.metadata.version(name) for name in VERSIONS}, "sources": sources()}


def recording_of(request: dict, progress: Callable) -> Recording:
    """The calls of the run that is asked for. Raises BadRequest for what cannot be."""
    try:
        configuration = configuration_of(request["model"])
        if request.get("tiling") is not None:
            configuration = replace(configuration, tiled=request["tiling"])
        pipe = build(configuration, getattr(torch, request["dtype"]))
        arguments = {**configuration.call, **request["arguments"]}
        if request["batch"] > 1:
            arguments["prompt"] = ["word"] * request["batch"]
        recording = record(pipe, arguments, progress)
    except (ValueError, TypeError) as error:
        raise BadRequest(" ".join(str(error).split())) from error
    if not recording.steps:
        raise BadRequest(f"expected a pipeline that denoises in steps, got {type(pipe).__name__} without any")
    _check_size(arguments, recording)
    recording.arguments = {k: v for k, v in arguments.items() if isinstance(v, (int, float, str, bool))}
    return recording


def _check_size(arguments: dict, recording: Recording):
    """Upstream rounds some sizes in silence: what was asked for must be what comes out."""
    decoded = [r for r in recording.calls if r.call.entry == "decode"]
    if not decoded:
        return
    shape, pipe = decoded[-1].outputs[0][0].shape, recording.pipe
    ratio = getattr(pipe, "vae_scale_factor_temporal", getattr(pipe, "vae_temporal_compression_ratio", 1))
    frames = arguments.get("num_frames")
    if len(shape) == 5 and frames and (frames - 1) % ratio:
        below = (frames - 1) // ratio * ratio + 1
        raise BadRequest(
            f"expected a num_frames that the VAE can take, {ratio}k+1, got {frames}; ask for {below} or {below + ratio}"
        )
    for name, size in (("height", shape[-2]), ("width", shape[-1])):
        asked = arguments.get(name)
        if asked is not None and asked != size:
            raise BadRequest(f"expected a {name} that the VAE can take, got {asked}; it would give {size}")


class _Planner:
    def __init__(self, request, topology: Topology, recording: Recording, works: dict, progress: Callable):
        self.request, self.topology, self.recording, self.works = request, topology, recording, works
        self.progress = progress
        self.compiled: dict[int, tuple[CompiledProgram, dict[str, timing.Timing]]] = {}
        self.modules = {n: m for n, m in recording.pipe.components.items() if isinstance(m, torch.nn.Module)}
        self.denoising = [r for r in recording.calls if stage_of(r.component) == "denoise"]
        if not self.denoising:
            raise BadRequest(f"expected a pipeline with a transformer or unet, got {sorted(self.modules)}")

    def _plan(self, recorded: RecordedCall) -> ModelPlan:
        return module_plan(self.modules[recorded.component])

    def _denoisers(self) -> list[meshes.Denoiser]:
        return [
            meshes.Denoiser(
                self._plan(r),
                self.works[id(r)],
                r.call.batch,
                r.pairs > 0,
                sum(p.nbytes for p in self.modules[r.component].parameters()),
            )
            for r in self.denoising
        ]

    def choose(self) -> tuple[tuple, list[dict]]:
        """((mesh, its parts), the ranking): the mesh asked for, or the best of those that were compiled."""
        denoisers, wanted = self._denoisers(), self.request["mesh"]
        if wanted != "auto":
            mesh = tuple(wanted) if wanted else self._default_mesh(self.topology)
            for denoiser in denoisers:
                if wanted and (reason := meshes.refusal(mesh, denoiser, self.topology.slices)):
                    raise BadRequest(reason)
            return (mesh, self.parts(self.topology, mesh)), []
        ranked = meshes.rank(self.topology, denoisers)
        tried = [(mesh, self.parts(self.topology, mesh, only="denoise")) for _, mesh in ranked[:TRIED_MESHES]]
        fitting = [t for t in tried if self._fits(t[1], self.topology)] or tried
        best, _ = min(fitting, key=lambda t: sum(p.runs * p.seconds for p in t[1]))
        compiled = {mesh: parts for mesh, parts in tried}
        ranking = [
            {
                "mesh": dict(zip(("dp", "sp", "tp"), mesh)),
                "guessed_seconds_per_step": guessed,
                "seconds_per_step": self._per_step(compiled[mesh]) if mesh in compiled else None,
                "fits": self._fits(compiled[mesh], self.topology) if mesh in compiled else None,
            }
            for guessed, mesh in ranked
        ]
        rest = self.parts(self.topology, best, only="rest")
        return (best, [*compiled[best], *rest]), ranking

    def named(self) -> list[str]:
        """What the plan is of, nothing compiled. Not for mesh "auto", which the compiler chooses."""
        mesh = tuple(self.request["mesh"] or self._default_mesh(self.topology))
        return [part.is_of for part in self.parts(self.topology, mesh)]

    def _default_mesh(self, topology: Topology) -> tuple[int, int, int]:
        pipe = self.recording.pipe
        return plan_degrees(topology.devices, None, pipeline_plan(type(pipe)).in_pairs(pipe), topology.slices)

    def parts(self, topology: Topology, mesh: tuple[int, int, int], only: str | None = None) -> list[Part]:
        """The programs of the run on one mesh, compiled or modelled. `only` "denoise" or "rest"."""
        compiler = Compiler(topology)
        devices = compiler.devices
        jax_mesh = make_mesh(devices, mesh)
        places = ici.places_of(jax_mesh)
        made = []
        for name, module in self.modules.items():
            calls = [r for r in self.recording.calls if r.component == name]
            if self.request.get("only") and name not in self.request["only"]:
                continue
            if not calls or (only is not None and (stage_of(name) == "denoise") != (only == "denoise")):
                continue
            runner = CompiledModule(module, module_plan(module), jax_mesh, TPUConfig(**self.request.get("config", {})))
            runner.attach()
            try:
                for recorded in calls:
                    made += self._programs(recorded, runner, compiler, places, topology)
            finally:
                runner.detach()
        return made

    def _programs(self, recorded, runner: CompiledModule, compiler, places, topology: Topology) -> list[Part]:
        branches = runner.branches.side_by_side(recorded.call) if recorded.pairs else 1
        runs = recorded.count - (recorded.pairs if branches > 1 else 0)
        inputs = branches * sum(t.nbytes for t in recorded.call.tensors)
        weights = runner.plan_weights().coverage.bytes_per_chip
        part = Part(recorded, branches, runs, self.works[id(recorded)], weights, inputs)
        part.is_of = _digest(part, None)
        self._compile(part, runner, compiler, places, topology)
        return [part]

    def _compile(self, part: Part, runner: CompiledModule, compiler, places, topology: Topology):
        if not (part.stage == "denoise" or self.request.get("everything")):
            part.shared = topology.devices if runner.plan.spread else 1
            part.modelled_seconds = part.branches * part.work.seconds(topology.chip, part.shared)
            return
        self.progress(
            f"compiling {part.name} for {topology.name}, mesh {','.join(map(str, runner.mesh.shape.values()))}"
        )
        start = time.perf_counter()
        lowered = runner.trace(part.recorded.call, part.branches).traced.lower()
        part.trace_seconds = time.perf_counter() - start
        part.is_of = _digest(part, kept.name_of(compiler, lowered, runner.mesh, runner.compiler_options))
        if self.request.get("named"):
            return
        program = hash((topology.name, lowered.as_text()))  # two experts are one program
        if program not in self.compiled:
            try:
                compiled = kept.compiled(compiler, lowered, runner.mesh, runner.compiler_options)
            except OutOfMemory as error:
                part.refused = error
                return
            self.compiled[program] = compiled, timing.time_program(compiled, topology.chip, places)
        part.compiled, part.timed = self.compiled[program]
        part.weights = part.compiled.memory["arguments"] - part.inputs

    # What it comes to

    def _per_step(self, parts: list[Part]) -> float:
        return sum(p.runs * p.seconds for p in parts if p.stage == "denoise") / self.recording.steps

    def _step(self, denoise: list[Part], seconds: Callable[[Part], dict[str, float]]) -> dict[str, float]:
        """By kind, of one step."""
        return {
            kind: sum(p.runs * seconds(p)[kind] for p in denoise) / self.recording.steps
            for kind in (*timing.KINDS, "total")
        }

    def _at_peak(self, parts: list[Part], topology: Topology) -> tuple[Part, dict[str, int]]:
        """The part of the run that needs most of a chip, and the weights there by component: others wait on the host."""
        weights = self._weights(parts)
        held = turns(weights, self._room(topology))
        fullest = max(parts, key=lambda p: sum(weights[n] for n in held[p.recorded.component]) + p.activations)
        return fullest, {name: weights[name] for name in held[fullest.recorded.component]}

    def _weights(self, parts: list[Part]) -> dict[str, int]:
        """Bytes on a chip by component, in the order of use."""
        weights = {p.recorded.component: p.weights for p in parts}
        return {r.component: weights[r.component] for r in self.recording.calls if r.component in weights}

    def _room(self, topology: Topology) -> int:
        return room_for_weights(topology.chip.hbm_bytes, TPUConfig(**self.request.get("config", {})))

    def _hbm(self, parts: list[Part], topology: Topology) -> dict[str, float]:
        fullest, weights = self._at_peak(parts, topology)
        programs, total = sum(p.program for p in parts), sum(weights.values())
        return {
            "weights": total / GIB,
            "activations": fullest.activations / GIB,
            "program": programs / GIB,
            "peak": (total + fullest.activations + programs) / GIB,
            "limit": topology.chip.hbm_bytes / GIB,
        }

    def _fits(self, parts: list[Part], topology: Topology) -> bool:
        hbm = self._hbm(parts, topology)
        alone = max(self._weights(parts).values()) <= self._room(topology)
        return alone and hbm["peak"] <= hbm["limit"] and not any(p.refused for p in parts)

    def as_json(self, mesh: tuple[int, int, int], parts: list[Part]) -> dict:
        """The plan as `plan --json` prints it."""
        topology, steps = self.topology, self.recording.steps
        denoise = [p for p in parts if p.stage == "denoise"]
        known = bool(denoise) and all(p.timed is not None for p in denoise)
        by_way = {
            way: {
                "seconds": self._step(denoise, lambda p, way=way: p.timed[way].seconds),
                "slower": self._step(denoise, lambda p, way=way: p.timed[way].slower)["total"],
            }
            for way in (WAYS if known else ())
        }
        per_step = by_way[BOUND]["seconds"] if known else dict.fromkeys((*timing.KINDS, "total"))
        flops = sum(p.recorded.count * p.work.flops for p in denoise) / steps
        peak_flops = topology.chip.flops * topology.devices
        fullest, held = self._at_peak(parts, topology)
        return {
            "model": self.request["model"],
            "topology": topology.name,
            "mesh": dict(zip(("dp", "sp", "tp"), mesh)),
            "fits": self._fits(parts, topology),
            "hbm_gib_per_chip": self._hbm(parts, topology),
            "fullest": fullest.name,
            "waiting": [name for name in self._weights(parts) if name not in held],
            "seconds_per_step": per_step,
            "way": BOUND,
            "by_way": by_way,
            "seconds_total": sum(p.runs * p.seconds for p in parts) if known else None,
            "flops_per_step": flops,
            "mfu": flops / peak_flops / per_step["total"] if known else None,
            "compile_seconds": sum(
                {id(p.compiled): p.compiled.seconds for p in parts if p.compiled is not None}.values()
            ),
            "trace_seconds": sum({id(p.compiled): p.trace_seconds for p in parts if p.compiled is not None}.values()),
            "peak_flops": peak_flops,
            "programs": [p.is_of for p in parts],
            "reader": READER,
            "versions": versions(),
            "pipeline": type(self.recording.pipe).__name__,
            "dtype": self.request["dtype"],
            "steps": steps,
            "call": self.recording.arguments,
            "chip": {"devices": topology.devices, "flops": topology.chip.flops, "hbm": topology.chip.hbm_bytes},
            "parts": [self._part_json(p) for p in parts],
            "notes": self._notes(topology, mesh, parts),
            "advice": [],
        }

    def _part_json(self, part: Part) -> dict:
        compiled = part.compiled
        return {
            "component": part.recorded.component,
            "entry": part.recorded.call.entry,
            "stage": part.stage,
            "how": "compiled" if compiled else "refused" if part.refused else "modelled",
            "branches": part.branches,
            "runs": part.runs,
            "shapes": [list(t.shape) for t in part.recorded.call.tensors],
            "seconds": None if part.refused else part.seconds,
            "flops": part.branches * part.work.flops,
            "flops_by_module": _largest(part.work.by_module),
            "hbm_gib": {
                "weights": part.weights / GIB,
                "activations": part.activations / GIB,
                "program": part.program / GIB,
                "peak": (part.weights + part.activations + part.program) / GIB,
            },
            "memory_analysis": compiled.memory if compiled else None,
            "compile_seconds": compiled.seconds if compiled else None,
            "trace_seconds": part.trace_seconds if compiled else None,
            "timing": part.timed[BOUND].as_json() if part.timed else None,
            "refused": part.refused and {"message": str(part.refused), "asked": part.refused.asked},
        }

    def _notes(self, topology: Topology, mesh: tuple[int, int, int], parts: list[Part]) -> list[str]:
        notes = []
        for name in sorted({p.name for p in parts if not p.compiled and not p.refused}):
            notes.append(
                f"{name} is modelled from its operations: what is not the denoiser is compiled with --everything only"
                " (a VAE takes the compiler minutes)"
            )
        weights = self._weights(parts)
        if sum(weights.values()) > self._room(topology):
            notes.append(
                f"the weights of {', '.join(weights)} are more than the {self._room(topology) / GIB:.2f} GiB of a chip that"
                " activations and programs leave them (TPUConfig.reserve_gib): those whose turn it is not wait on the host"
            )
        for part in parts:
            if remark := self._plan(part.recorded).remark:
                notes.append(f"{part.recorded.component}: {remark}")
        sp, tp = mesh[1:]
        for recorded in self.denoising:
            heads = {n for _, n, t, s, _ in self.works[id(recorded)].calls if t == s}
            if sp > 1 and any(n // tp % sp for n in heads) and self._plan(recorded).carry:
                notes.append(
                    f"{recorded.component}: {', '.join(map(str, sorted(heads)))} heads do not divide by sp {sp}, so keys"
                    " travel around a ring of chips; a mesh whose sp divides them exchanges less"
                )
            if not self._plan(recorded).spread and self.topology.devices > 1:
                notes.append(
                    f"{recorded.component} has no plan yet: the compiler alone decides how chips share its work"
                )
        return list(dict.fromkeys(notes))

    def advice(self, mesh: tuple[int, int, int], parts: list[Part]) -> list[str]:
        """What would fit, each with its figure."""
        hbm = self._hbm(parts, self.topology)
        over = (hbm["peak"] - hbm["limit"]) * GIB
        fullest, weights = self._at_peak(parts, self.topology)
        found = []
        texts = {n: w for n, w in weights.items() if n.startswith("text_encoder")}
        if texts and sum(texts.values()) >= over:
            found.append(
                f"compute the prompt's embeddings apart and load with text_encoder=None: {sum(texts.values()) / GIB:.2f} GiB"
                " per chip less"
            )
        room = hbm["limit"] - hbm["weights"] - hbm["program"]
        in_tiles = fullest.stage in ("decode", "encode") and not getattr(self.modules["vae"], "use_tiling", True)
        if room > 0 and in_tiles:
            found.append("let the VAE work in tiles, pipe.vae.enable_tiling(): its activations are the largest part")
        if room > 0:
            share = room / hbm["activations"]
            found.append(
                f"ask for less at once: {fullest.name} needs"
                f" {hbm['activations']:.2f} GiB beside the weights and {room:.2f} are left, so about {share:.0%} of the"
                " frames or pixels"
            )
        if self.request["dtype"] == "float32":
            found.append("use bfloat16 (--dtype bfloat16): half the weights")
        slice_ = self._smallest_slice(parts)
        if slice_ is not None:
            found.insert(0, slice_)
        return found

    def _smallest_slice(self, parts: list[Part]) -> str | None:
        """The smallest slice, of this generation first, whose compiled denoiser and the rest fit; compiled to be sure."""
        whole = {
            p.recorded.component: sum(w.nbytes for w in self.modules[p.recorded.component].parameters()) for p in parts
        }
        activations = max(p.activations for p in parts) * self.topology.devices
        spread = self._plan(self.denoising[0]).spread
        same = self.topology.chip.generation
        candidates = sorted(
            (t for t in TOPOLOGIES.values() if t.name != self.topology.name),
            key=lambda t: (t.chip.generation != same, t.devices),
        )
        tried = 0
        for topology in candidates:
            need = sum(whole.values()) / topology.devices
            need += activations / topology.devices if spread else max(p.activations for p in parts)
            if need > topology.chip.hbm_bytes or tried == TRIED_SLICES:
                continue
            tried += 1
            mesh = self._default_mesh(topology)
            made = self.parts(topology, mesh)
            if self._fits(made, topology):
                hbm = self._hbm(made, topology)
                return (
                    f"use {topology.name}: {hbm['peak']:.2f} of {hbm['limit']:.2f} GiB per chip, "
                    f"{self._per_step(made):.2f} s per step (compiled, mesh {','.join(map(str, mesh))})"
                )
        return None


def _digest(part: Part, program: str | None) -> str:
    work = [part.work.flops, part.work.bytes, part.work.live]
    said = [part.name, program, part.runs, part.branches, part.weights, part.inputs, part.shared, *work]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _largest(sums: dict[str, float], kept: int = 12) -> dict[str, float]:
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:kept])
