"""Totals of a pipeline's run on one slice and mesh: its programs, their seconds and their bytes on a chip."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from ..chips.figures import GIB, Topology
from ..chips.mesh import AXES
from ..common.config import TPUConfig
from ..compile.optimizers import STATES
from ..kernels.attention.softmax_modes import BOUND, MODES
from ..weights.hbm import room_for_weights, turns
from . import timing
from .aot import CompiledProgram, OutOfMemory
from .measured import Rates
from .recording import RecordedCall, Recording


# By clipping and AdamW, in sizes of the trained weights. Gradients read for the norm, read and written scaled; then weights,
# gradients and two states read; weights and states written.
READ_AND_WRITTEN = 3 + 4 + 3
STAGES = {
    "text_encoder": "text", "image_encoder": "image", "transformer": "denoise", "unet": "denoise", "controlnet": "denoise",
    "vae": "vae",
}  # fmt: skip
LARGEST_MODULES = 12


def stage_of(component: str) -> str:
    """The stage of a run that a component belongs to; its own name if `STAGES` has none."""
    return next((stage for prefix, stage in STAGES.items() if component.startswith(prefix)), component)


@dataclass
class Part:
    """One program of the run: a component's call, of one guidance branch or of several in a batch."""

    recorded: RecordedCall
    branches: int
    planned_weights: int  # bytes on a chip, as `inputs`
    inputs: int
    program_name: str | None = None  # of the lowered program (`kept.name_of`); None: it is modelled
    compiled: CompiledProgram | None = None
    timed: dict[str, timing.Timing] | None = None  # by mode of the attention kernel
    refused: OutOfMemory | None = None
    modelled_seconds: float = 0.0  # an estimate, if it is not compiled
    trace_seconds: float = 0.0
    shared: int = 1  # chips that share the work, if it is not compiled
    layout: str = ""  # where its sharding comes from, `worker.layout_of`
    mesh: dict[str, int] | None = None  # the program's: its batch may use a larger `dp` than the run
    passes: tuple[int, int] = (1, 1)  # multiples of the call's FLOPs: of layers, of attention
    trained: int = 0  # bytes on a chip of weights that an optimizer updates

    @property
    def component(self) -> str:
        return self.recorded.component

    @property
    def name(self) -> str:
        return f"{self.component}.{self.recorded.call.entry}"

    @property
    def stage(self) -> str:
        stage = stage_of(self.component)
        return self.recorded.call.entry if stage == "vae" else stage

    @property
    def runs(self) -> int:
        return self.recorded.runs(self.branches)

    @property
    def seconds(self) -> float:
        """Seconds of one run, with all heads of attention in mode `BOUND`."""
        return self.timed[BOUND].seconds["total"] if self.timed is not None else self.modelled_seconds

    @property
    def weights(self) -> int:
        """Bytes on a chip."""
        return self.planned_weights if self.compiled is None else self.compiled.memory["arguments"] - self.inputs

    @property
    def activations(self) -> int:
        """Bytes on a chip while it runs, without weights and program."""
        if self.compiled is not None:
            m = self.compiled.memory
            return m["arguments"] - self.weights + m["temporaries"] + m["outputs"] - m["aliased"]
        if self.refused is not None and self.refused.asked:
            return max(self.refused.asked - self.weights, 0)
        return self.recorded.work.live // self.shared + self.inputs

    @property
    def program(self) -> int:
        return self.compiled.memory["program"] if self.compiled is not None else 0

    @property
    def digest(self) -> str:
        """A digest of the program's name, its counted work and its use in the run."""
        work = self.recorded.work
        said = [self.name, self.program_name, self.runs, self.branches, self.planned_weights, self.inputs]
        said += [1, work.flops, work.bytes, work.live]  # the 1 is in every recorded digest
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def as_json(self) -> dict:
        work, compiled = self.recorded.work, self.compiled
        hbm = {"weights": self.weights, "activations": self.activations, "program": self.program}
        hbm["peak"] = sum(hbm.values())
        return {
            **{name: getattr(self, name) for name in ("component", "stage", "branches", "runs")},
            "entry": self.recorded.call.entry,
            "layout": self.layout,
            "mesh": self.mesh,
            "scans": work.scans,
            "how": "compiled" if compiled else "refused" if self.refused else "modelled",
            "shapes": [list(t.shape) for t in self.recorded.call.tensors],
            "seconds": None if self.refused else self.seconds,
            "flops": self.branches * work.flops_of(self.passes),
            "flops_by_module": dict(work.by_module.most_common(LARGEST_MODULES)),
            "hbm_gib": {name: amount / GIB for name, amount in hbm.items()},
            "memory_analysis": compiled.memory if compiled else None,
            "compile_seconds": compiled.seconds if compiled else None,
            "trace_seconds": self.trace_seconds if compiled else None,
            "timing": self.timed[BOUND].as_json() if self.timed else None,
            "refused": self.refused and {"message": str(self.refused), "asked": self.refused.asked},
        }


@dataclass(frozen=True)
class PlannedRun:
    """All programs of a run on a mesh of a slice."""

    topology: Topology
    mesh: tuple[int, int, int]
    parts: list[Part]
    recording: Recording
    config: TPUConfig
    rates: Rates | None = None

    @cached_property
    def denoise(self) -> list[Part]:
        return [part for part in self.parts if part.stage == "denoise"]

    @property
    def seconds_per_step(self) -> float:
        return sum(part.runs * part.seconds for part in self.denoise) / self.recording.steps + self.beside

    @property
    def seconds_total(self) -> float:
        """Of the whole run."""
        return sum(part.runs * part.seconds for part in self.parts) + self.beside * self.recording.steps

    @property
    def beside(self) -> float:
        """Seconds of a step outside its programs: of their launches, if measured, and of an optimizer."""
        dispatch = 0.0 if self.rates is None else self.rates.dispatch
        launches = dispatch * sum(part.runs for part in self.denoise) / self.recording.steps
        return launches + READ_AND_WRITTEN * self.trained / self.topology.chip.hbm_bandwidth

    @property
    def trained(self) -> int:
        """Bytes on a chip of the trained weights."""
        return sum(part.trained for part in self.denoise)

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes on a chip by component, in the order of use."""
        weights = {part.component: part.weights for part in self.parts}
        return {call.component: weights[call.component] for call in self.recording.calls if call.component in weights}

    @property
    def room(self) -> int:
        """Bytes of a chip that weights may take."""
        return room_for_weights(self.topology.chip.hbm_bytes, self.config)

    @cached_property
    def at_peak(self) -> tuple[Part, dict[str, int]]:
        """The part that needs the most memory of a chip, and the weights loaded then, by component; others are on the host."""
        held = turns(self.weights, self.room)
        fullest = max(self.parts, key=lambda p: sum(self.weights[n] for n in held[p.component]) + p.activations)
        return fullest, {name: self.weights[name] for name in held[fullest.component]}

    @cached_property
    def hbm(self) -> dict[str, float]:
        """GiB of a chip at its peak."""
        fullest, held = self.at_peak
        sizes = {"weights": sum(held.values()), "activations": fullest.activations}
        sizes |= {"program": sum(part.program for part in self.parts)}
        sizes |= {"optimizer": STATES * self.trained} if self.trained else {}
        sizes |= {"peak": sum(sizes.values()), "limit": self.topology.chip.hbm_bytes}
        return {name: size / GIB for name, size in sizes.items()}

    @property
    def fits(self) -> bool:
        alone = max(self.weights.values()) <= self.room
        return alone and self.hbm["peak"] <= self.hbm["limit"] and not any(part.refused for part in self.parts)

    def _of_a_step(self, seconds: list[dict[str, float]]) -> dict[str, float]:
        """A step's seconds by kind. `seconds`: of one run of each denoising part."""
        shares = [part.runs / self.recording.steps for part in self.denoise]
        sums = {kind: sum(share * of[kind] for share, of in zip(shares, seconds)) for kind in (*timing.KINDS, "total")}
        return {kind: s + (self.beside if kind in ("other", "total") else 0.0) for kind, s in sums.items()}

    def as_json(self) -> dict:
        """The figures of a plan."""
        known = bool(self.denoise) and all(part.timed is not None for part in self.denoise)
        by_way = {
            way: {
                "seconds": self._of_a_step([part.timed[way].seconds for part in self.denoise]),
                "slower": self._of_a_step([part.timed[way].slower for part in self.denoise])["total"],
            }
            for way in (MODES if known else ())
        }
        per_step = by_way[BOUND]["seconds"] if known else dict.fromkeys((*timing.KINDS, "total"))
        flops = sum(part.recorded.count * part.recorded.work.flops_of(part.passes) for part in self.denoise)
        flops /= self.recording.steps
        chip, devices, (fullest, held) = self.topology.chip, self.topology.devices, self.at_peak
        peak_flops = chip.flops * devices
        compiled = {id(part.compiled): part for part in self.parts if part.compiled is not None}.values()
        return {
            "topology": self.topology.name,
            "mesh": dict(zip(AXES, self.mesh)),
            "fits": self.fits,
            "hbm_gib_per_chip": self.hbm,
            "fullest": fullest.name,
            "waiting": [name for name in self.weights if name not in held],
            "seconds_per_step": per_step,
            "way": BOUND,
            "by_way": by_way,
            "seconds_total": self.seconds_total if known else None,
            "flops_per_step": flops,
            "mfu": flops / peak_flops / per_step["total"] if known else None,
            "compile_seconds": sum(part.compiled.seconds for part in compiled),
            "trace_seconds": sum(part.trace_seconds for part in compiled),
            "peak_flops": peak_flops,
            "programs": [part.digest for part in self.parts],
            "steps": self.recording.steps,
            "chip": {"devices": devices, "flops": chip.flops, "hbm": chip.hbm_bytes, "stalls": chip.stalls},
            "parts": [part.as_json() for part in self.parts],
        }
