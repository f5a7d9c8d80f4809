"""Ours against upstream, module by module and for the whole result: same weights, same inputs, one process.

    error(x) = max over output tensors of |x - oracle| / |oracle|          (Euclidean norms; the oracle is upstream in float32)

Inputs are those of upstream's own run. The result is compared after few steps: after many, it says more of the sampler.
"""

import copy
import functools
import inspect
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ... import DiffusionPipeline
from .. import install, uninstall
from ..common.config import TPUConfig
from ..compile.state.watch import replaced
from ..pipelines.components import modules_of
from ..pipelines.pipeline import installation
from ..planner.building import cast_module
from .roundings import widening_here


MODULE_LIMIT, RESULT_LIMIT = 1e-5, 1e-4
LOW_PRECISION_FACTOR = 1.25
MESHES = ((1, 1, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 3, 1))
DTYPES = (torch.float32, torch.bfloat16)
SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4}
WORDS = (("red", "green", "blue"), ("circle", "square", "cat"), ("left", "right", "up"))
ENTRIES = ("forward", "encode", "decode")
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """One comparison. `module`: "pipeline" is the whole result. `upstream_error`: upstream's in this dtype; None in float32."""

    module: str
    entry: str
    dtype: str
    mesh: tuple[int, int, int]
    error: float
    upstream_error: float | None
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN is not."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Call:
    """A recorded call of a module's entry method, with the values that its tensors had then."""

    module: str
    entry: str
    args: tuple
    kwargs: dict

    def copied(self, widen: bool = False) -> "Call":
        """A copy with cloned tensors. `widen`: bfloat16 and float16 become float32 of the same values."""
        given = tree_map_only(torch.Tensor, torch.clone, (self.args, self.kwargs))
        if widen:
            given = tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in NARROW else t, given)
        return Call(self.module, self.entry, *given)


@dataclass(frozen=True)
class Reference:
    """Upstream's outputs in one dtype: each call with the oracle's and its own outputs, and both results of the pipeline."""

    pipe: DiffusionPipeline
    calls: list[tuple[Call, list, list]]
    oracle: list
    own: list


def compare_each(model, meshes, dtypes, arguments: dict, seed: int) -> Iterator[list[Row]]:
    """The rows of each dtype and mesh, one after another.

    Args:
        model: a model directory, a hub id, or a pipeline without the TPU path, which is copied.
        arguments: of the pipeline's call, such as `draw_arguments` returns.
        seed: of the noise.

    Raises:
        ValueError: a pipeline on the TPU path, a mesh that does not fit the chips.
        RuntimeError: the TPU path is off.
    """
    oracle = load(model, torch.float32)
    for dtype in dtypes:
        reference = make_reference(oracle, model, dtype, arguments, seed)
        for mesh in meshes:
            yield compare_on(reference, mesh, dtype, arguments, seed)


def load(model, dtype: torch.dtype) -> DiffusionPipeline:
    """A new pipeline in this dtype, without the TPU path."""
    if isinstance(model, (str, os.PathLike)):
        pipe = uninstall(DiffusionPipeline.from_pretrained(model, dtype=dtype))
    elif installation(model) is not None:
        raise ValueError(
            "expected a pipeline without the TPU path, got one with it: call diffusers.tpu.uninstall(pipe)"
        )
    else:
        pipe = copy.deepcopy(model)
        for module in modules_of(pipe).values():
            uninstall(module)  # a copy of a model that was installed by itself is installed too
            cast_module(module, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_arguments(pipeline_class: type, seed: int) -> dict:
    """A small call of this pipeline: a prompt of random words, and a random image if it takes one."""
    draw = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 256, (SMALL["height"], SMALL["width"], 3), np.uint8)
    colour, shape, direction = (draw.choice(words) for words in WORDS)
    known = {
        **SMALL,
        "prompt": f"a {colour} {shape} moving {direction}",
        "image": PIL.Image.fromarray(noise),
        "output_type": "np",
    }
    takes = inspect.signature(pipeline_class.__call__).parameters
    return {name: value for name, value in known.items() if name in takes}


def make_reference(oracle, model, dtype: torch.dtype, arguments: dict, seed: int) -> Reference:
    """Upstream's outputs in this dtype, and the oracle's for the same inputs."""
    pipe = oracle if dtype == torch.float32 else load(model, dtype)
    calls, own = record(pipe, arguments, seed)
    outputs = [(call, run_call(oracle, call.copied(widen=True)), run_call(pipe, call)) for call in calls]
    return Reference(pipe, outputs, own if pipe is oracle else run_pipeline(oracle, arguments, seed), own)


def compare_on(reference: Reference, mesh, dtype: torch.dtype, arguments: dict, seed: int) -> list[Row]:
    """The rows of one mesh. The TPU path is uninstalled from the pipeline afterwards."""
    pipe, wider, name = reference.pipe, widening_here(), str(dtype).removeprefix("torch.")

    def row(module: str, entry: str, ours: list, oracle: list, own: list, limit: float) -> Row:
        upstream = None if dtype == torch.float32 else relative_error(own, oracle)
        limit = limit if upstream is None else LOW_PRECISION_FACTOR * upstream
        return Row(module, entry, name, tuple(mesh), relative_error(ours, oracle), upstream, limit)

    try:
        install(pipe, TPUConfig(mesh=mesh))
        modules, rows = modules_of(pipe), []
        for of, *outputs in reference.calls:
            limit = MODULE_LIMIT * wider.of(modules[of.module])
            rows.append(row(of.module, of.entry, run_call(pipe, of), *outputs, limit))
        ours, limit = run_pipeline(pipe, arguments, seed), RESULT_LIMIT * wider.convolutions
        return [*rows, row("pipeline", "forward", ours, reference.oracle, reference.own, limit)]
    finally:
        uninstall(pipe)


def record(pipe, arguments: dict, seed: int) -> tuple[list[Call], list]:
    """The first call of every entry method of every module in one run, and the run's result.

    If the run used a VAE to decode only, its own output is a call of `encode`.
    """
    calls: dict[tuple[str, str], Call] = {}
    decoded: dict[str, torch.Tensor] = {}

    def recorder(name: str, entry: str, method):
        @functools.wraps(method)
        def run(*args, **kwargs):
            if new := (name, entry) not in calls:
                calls[name, entry] = Call(name, entry, args, kwargs).copied()
            output = method(*args, **kwargs)
            if new and entry == "decode":
                decoded[name] = tree_leaves(output)[0].clone()
            return output

        return run

    entries = [(name, m, entry) for name, m in modules_of(pipe).items() for entry in ENTRIES if hasattr(m, entry)]
    with replaced((vars(m), entry, recorder(name, entry, getattr(m, entry))) for name, m, entry in entries):
        result = run_pipeline(pipe, arguments, seed)
    for name, video in decoded.items():
        if hasattr(modules_of(pipe)[name], "encode"):
            calls.setdefault((name, "encode"), Call(name, "encode", (video,), {}))
    return list(calls.values()), result


def run_call(pipe, call: Call) -> list:
    """The output tensors of a recorded call, repeated on this pipeline's module."""
    call = call.copied()
    with torch.no_grad():
        output = getattr(modules_of(pipe)[call.module], call.entry)(*call.args, **call.kwargs)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def run_pipeline(pipe, arguments: dict, seed: int) -> list[np.ndarray]:
    """The arrays of one run with this seed: videos, images, sounds, embeddings."""
    takes = {*inspect.signature(pipe.__call__).parameters, *getattr(getattr(pipe, "blocks", None), "input_names", ())}
    generator = {"generator": torch.Generator().manual_seed(seed)} if "generator" in takes else {}
    with _OneNoise(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for upstream's random numbers without a generator
        return values_of(pipe(**arguments, **generator))


def values_of(output) -> list[np.ndarray]:
    """Floating point arrays, tensors (also of tokens) and pictures in a pipeline's output, in order, as arrays."""
    if isinstance(output, PIL.Image.Image):
        return [np.asarray(output, np.float32) / 255]
    if isinstance(output, torch.Tensor):
        output = output.detach().float().cpu().numpy() if output.dtype != torch.bool else None
    if isinstance(output, np.ndarray):
        return [output] if np.issubdtype(output.dtype, np.floating) else []
    output = [*output.values()] if isinstance(output, dict) else output
    return [found for part in output for found in values_of(part)] if isinstance(output, (list, tuple)) else []


class _OneNoise(TorchFunctionMode):
    """Draws noise in float32 and rounds it: torch does not always draw the same numbers in a lower precision."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if function is torch.randn and dtype in NARROW:
            return function(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
        return function(*args, **kwargs)


def relative_error(values: list, oracle: list) -> float:
    """The largest |x - o| / |o| over pairs of arrays; |x| where o is zero. Raises ValueError for other shapes."""
    pairs = [tuple(np.asarray(torch.as_tensor(x).to(torch.float64)) for x in pair) for pair in zip(values, oracle)]
    if len(values) != len(oracle) or any(x.shape != o.shape for x, o in pairs):
        raise ValueError(
            f"expected outputs of the oracle's shapes, got {[x.shape for x, _ in pairs]} for {[o.shape for _, o in pairs]}"
        )
    errors = [np.linalg.norm(x - o) / (np.linalg.norm(o) or 1.0) for x, o in pairs]
    return float(max(errors, default=0.0) if not np.isnan(errors).any() else np.nan)
