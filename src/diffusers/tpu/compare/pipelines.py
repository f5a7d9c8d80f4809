"""Ours against upstream, module by module and for the whole result: same weights, same inputs, one process.

    error(x) = max over output tensors of |x - oracle| / |oracle|          (Euclidean norms)

The oracle is upstream in float32. A module's inputs are those of its first call in upstream's own run of the pipeline in
the dtype compared, so any pipeline can be compared; for the oracle their values are widened. The whole result is compared
after few steps: samplers are chaotic, and after many steps a bfloat16 video says more about the sampler than about a model.
"""

import contextlib
import copy
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

from ... import DiffusionPipeline, ModelMixin
from .. import install, uninstall
from ..config import TPUConfig
from ..pipelines.attach import target_devices
from ..pipelines.pipeline import installation
from .roundings import widening


MODULE_LIMIT, RESULT_LIMIT = 1e-5, 1e-4
LOW_PRECISION_FACTOR = 1.25
MESHES = ((1, 1, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 3, 1))
DTYPES = (torch.float32, torch.bfloat16)
SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4}
WORDS = (("red", "green", "blue"), ("circle", "square", "cat"), ("left", "right", "up"))
ENTRIES = ("forward", "encode", "decode")


@dataclass(frozen=True)
class Row:
    """One comparison; the module `pipeline` is the whole result. `upstream_error` is upstream's own in this dtype; None in float32, where upstream is the oracle."""

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
    """A call of a module's entry method, its tensors kept as they were."""

    module: str
    entry: str
    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class Reference:
    """What upstream gave in one dtype: each call with the oracle's and its own outputs, and both results."""

    pipe: DiffusionPipeline
    calls: list[tuple[Call, list, list]]
    oracle: list
    own: list


def compare(model, meshes=MESHES, dtypes=DTYPES, arguments: dict | None = None, seed: int | None = None) -> list[Row]:
    """Every row of `compare_each`."""
    return [row for rows in compare_each(model, meshes, dtypes, arguments, seed) for row in rows]


def compare_each(
    model, meshes=MESHES, dtypes=DTYPES, arguments: dict | None = None, seed: int | None = None
) -> Iterator[list[Row]]:
    """The rows of each dtype and mesh, one after another.

    Args:
        model: a model directory, a hub id, or a pipeline without the TPU path, which is left as it is.
        arguments: of the pipeline's call, over those of `draw_arguments`.
        seed: of prompt and noise; None draws one.

    Raises:
        ValueError: a pipeline on the TPU path, a mesh that does not fit the chips.
        RuntimeError: the TPU path is off.
    """
    seed = random.randrange(2**31) if seed is None else seed
    oracle = load(model, torch.float32)
    arguments = {**draw_arguments(type(oracle), seed), **(arguments or {})}
    for dtype in dtypes:
        reference = make_reference(oracle, model, dtype, arguments, seed)
        for mesh in meshes:
            yield compare_on(reference, mesh, dtype, arguments, seed)


def load(model, dtype: torch.dtype) -> DiffusionPipeline:
    """A pipeline of its own in this dtype, without the TPU path."""
    if isinstance(model, (str, os.PathLike)):
        pipe = uninstall(DiffusionPipeline.from_pretrained(model, dtype=dtype))
    elif installation(model) is not None:
        raise ValueError(
            "expected a pipeline without the TPU path, got one with it: diffusers.tpu.uninstall(pipe) first"
        )
    else:
        pipe = copy.deepcopy(model)
        for module in modules(pipe).values():
            uninstall(module)  # copies of models that are on the TPU path by themselves are too
        cast(pipe, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cast(pipe, dtype: torch.dtype):
    """The pipeline with its weights in this dtype, but for what its classes keep in float32, as from_pretrained does it."""
    for module in modules(pipe).values():
        cast_module(module, dtype)
    return pipe


def cast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module with its weights in this dtype, but for what its class keeps in float32."""
    # transformers keeps what the plain list names in float32 for float16 only
    names = "_keep_in_fp32_modules" if isinstance(module, ModelMixin) else "_keep_in_fp32_modules_strict"
    kept, saved = set(getattr(module, names, None) or ()), module.state_dict().keys()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and name in saved and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return module


def draw_arguments(pipeline_class: type, seed: int) -> dict:
    """A small call of this pipeline: a prompt of random words, a random image where it takes one."""
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
    outputs = []
    for call in calls:
        wide = Call(call.module, call.entry, *tree_map_only(torch.Tensor, widened, (call.args, call.kwargs)))
        outputs.append((call, run_call(oracle, wide), run_call(pipe, call)))
    return Reference(pipe, outputs, own if pipe is oracle else run_pipeline(oracle, arguments, seed), own)


def compare_on(reference: Reference, mesh, dtype: torch.dtype, arguments: dict, seed: int) -> list[Row]:
    """The rows of one mesh; the pipeline is without the TPU path again afterwards."""
    pipe, rows = reference.pipe, []
    exact = dtype == torch.float32

    def row(module: str, entry: str, ours: list, oracle: list, own: list, limit: float) -> Row:
        upstream = None if exact else relative_error(own, oracle)
        limit = limit if exact else LOW_PRECISION_FACTOR * upstream
        name = str(dtype).removeprefix("torch.")
        return Row(module, entry, name, tuple(mesh), relative_error(ours, oracle), upstream, limit)

    config = TPUConfig(mesh=mesh)
    wider = widening(target_devices()[0], config.matmul_precision, config.convolution_precision)
    try:
        install(pipe, config)
        for call, oracle, own in reference.calls:
            limit = MODULE_LIMIT * (
                wider.convolutions if has_convolutions(modules(pipe)[call.module]) else wider.plain
            )
            rows.append(row(call.module, call.entry, run_call(pipe, call), oracle, own, limit))
        ours = run_pipeline(pipe, arguments, seed)
        limit = RESULT_LIMIT * wider.convolutions
        rows.append(row("pipeline", "forward", ours, reference.oracle, reference.own, limit))
    finally:
        uninstall(pipe)
    return rows


def has_convolutions(module: torch.nn.Module) -> bool:
    """Whether one of its layers is a convolution, for all that its class tells."""
    return any("conv" in type(layer).__name__.lower() for layer in module.modules())


def record(pipe, arguments: dict, seed: int) -> tuple[list[Call], list]:
    """The first call of every entry method of every module in one run, and the run's result.

    A VAE that only decoded is given its own result to encode.
    """
    calls: dict[tuple[str, str], Call] = {}
    decoded: dict[str, torch.Tensor] = {}

    def recorder(name, module, entry):
        method = getattr(module, entry)

        def run(*args, **kwargs):
            new = (name, entry) not in calls
            if new:
                calls[name, entry] = Call(name, entry, *tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
            output = method(*args, **kwargs)
            if new and entry == "decode":
                decoded[name] = tree_leaves(output)[0].clone()
            return output

        return run

    with contextlib.ExitStack() as stack:
        for name, module in modules(pipe).items():
            for entry in ENTRIES:
                if hasattr(module, entry):
                    setattr(module, entry, recorder(name, module, entry))
                    stack.callback(delattr, module, entry)
        result = run_pipeline(pipe, arguments, seed)
    for name, video in decoded.items():
        if hasattr(modules(pipe)[name], "encode"):
            calls.setdefault((name, "encode"), Call(name, "encode", (video,), {}))
    return list(calls.values()), result


def modules(pipe) -> dict[str, torch.nn.Module]:
    """The pipeline's models by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def run_call(pipe, call: Call) -> list:
    """The output tensors of a recorded call, repeated on this pipeline's module."""
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
    with torch.no_grad():
        output = getattr(modules(pipe)[call.module], call.entry)(*args, **kwargs)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def run_pipeline(pipe, arguments: dict, seed: int) -> list[np.ndarray]:
    """What one run with this seed gives: videos, images, sounds, embeddings."""
    takes = inspect.signature(pipe.__call__).parameters
    generator = {"generator": torch.Generator().manual_seed(seed)} if "generator" in takes else {}
    with _OneNoise(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what upstream draws without a generator
        return values_of(pipe(**arguments, **generator))


def values_of(output) -> list[np.ndarray]:
    """Arrays of numbers, tensors and pictures in what a pipeline returns, in order."""
    if isinstance(output, PIL.Image.Image):
        return [np.asarray(output, np.float32) / 255]
    if isinstance(output, torch.Tensor):
        output = output.detach().float().cpu().numpy() if output.is_floating_point() else None
    if isinstance(output, np.ndarray):
        return [output] if np.issubdtype(output.dtype, np.floating) else []
    if isinstance(output, dict):
        output = [*output.values()]
    return [found for part in output for found in values_of(part)] if isinstance(output, (list, tuple)) else []


class _OneNoise(TorchFunctionMode):
    """Noise is drawn in float32 and rounded; torch does not always draw the same numbers in a lower precision."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if function is torch.randn and dtype in (torch.bfloat16, torch.float16):
            return function(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
        return function(*args, **kwargs)


def widened(t: torch.Tensor) -> torch.Tensor:
    """bfloat16 and float16 as float32, the same values; other dtypes as they are."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def relative_error(values: list, oracle: list) -> float:
    """The largest |x - o| / |o| over pairs of arrays; |x| where o is zero. Raises ValueError for other shapes."""
    pairs = [tuple(np.asarray(torch.as_tensor(x).to(torch.float64)) for x in pair) for pair in zip(values, oracle)]
    if len(values) != len(oracle) or any(x.shape != o.shape for x, o in pairs):
        raise ValueError(
            f"expected outputs of the oracle's shapes, got {[x.shape for x, _ in pairs]} for {[o.shape for _, o in pairs]}"
        )
    errors = [np.linalg.norm(x - o) / (np.linalg.norm(o) or 1.0) for x, o in pairs]
    return float(max(errors, default=0.0) if not np.isnan(errors).any() else np.nan)
