"""One call of upstream's VAE as a run computes it, compiled, in the compiler's process: what `bench vae` asks where no pipeline's run
makes the call, as the encoding of a video."""

from collections.abc import Callable

import torch

import diffusers

from ..aot import BadRequest, Compiler
from ..attention.ways import BOUND
from ..config import TPUConfig
from ..devices import find_topology
from ..mesh import make_mesh, plan_degrees
from ..plans import PipelinePlan, module_plan, plan_of
from ..runner import Runner
from . import ici, kept, reader, timing
from .building import component, configuration_of
from .worker import GIB, versions


def answer(request: dict, progress: Callable) -> dict:
    """Seconds, memory and compilation of one video's decoding or encoding, on the mesh that its pipeline would choose.

    Args:
        request: as of `vae_row.answer`.

    Raises BadRequest for what cannot be planned.
    """
    topology = find_topology(request["topology"])
    dtype, height, width, frames = (
        getattr(torch, request["dtype"]),
        *(request[n] for n in ("height", "width", "num_frames")),
    )
    try:
        configuration = configuration_of(request["model"])
        vae = component(configuration, "vae", dtype)
    except (ValueError, KeyError) as error:
        raise BadRequest(f"expected a model with a VAE: {error}") from error
    plan = plan_of(getattr(diffusers, configuration.pipeline), PipelinePlan())
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices, plan_degrees(topology.devices, None, plan.in_pairs()))
    runner = Runner(vae, module_plan(vae), mesh, TPUConfig())
    runner.attach()
    try:
        progress(f"tracing {type(vae).__name__}.{request['entry']}")
        given = torch.zeros((), dtype=dtype).expand(1, 3, frames, height, width)
        if request["entry"] == "decode":
            given = _latents(vae, given)
        call = runner.take_apart(request["entry"], (given,), {"return_dict": False})
        progress(f"compiling {type(vae).__name__}.{request['entry']} for {topology.name}")
        lowered = runner.trace(call, 1).traced.lower()
        options, weights = runner.compiler_options, runner.plan_weights().coverage.bytes_per_chip
    finally:
        runner.detach()
    of_program = {"programs": [kept.name_of(compiler, lowered, mesh, options)], "reader": reader(__name__)}
    if request.get("named"):
        return of_program
    compiled = kept.compiled(compiler, lowered, mesh, options)
    timed = timing.time_program(compiled, topology.chip, ici.places_of(mesh))[BOUND]
    held = compiled.memory
    activations = held["arguments"] - weights + held["temporaries"] + held["outputs"] - held["aliased"]
    return {
        "how": "compiled",
        "seconds": timed.seconds["total"],
        "slower": timed.slower["total"],
        "seconds_by_kind": timed.seconds,
        "hbm_gib": {
            "weights": weights / GIB,
            "activations": activations / GIB,
            "program": held["program"] / GIB,
            "peak": compiled.peak_bytes / GIB,
        },
        "compile_seconds": compiled.seconds,
        **of_program,
        "versions": versions(),
    }


def _latents(vae: torch.nn.Module, video: torch.Tensor) -> torch.Tensor:
    """Of the shape that the video is encoded to."""
    batch, _, frames, height, width = video.shape
    space = 2 ** (len(vae.config.block_out_channels) - 1)
    time = int(vae.config.temporal_compression_ratio)
    shape = batch, vae.config.latent_channels, 1 + (frames - 1) // time, height // space, width // space
    return torch.zeros((), dtype=video.dtype).expand(shape)
