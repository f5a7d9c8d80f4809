"""Compiles one call of a VAE in plain JAX. `bench vae --variant nnx` runs `answer` in the compiler's process."""

import importlib.metadata
import math
from collections.abc import Callable

import diffusers
from diffusers.tpu.chips.figures import GIB, find_topology
from diffusers.tpu.chips.mesh import make_mesh, plan_degrees
from diffusers.tpu.kernels.attention.softmax_modes import BOUND
from diffusers.tpu.pipelines.plans import flax_class, pipeline_plan
from diffusers.tpu.planner import READER, ici, kept, timing
from diffusers.tpu.planner.aot import BadRequest, Compiler
from diffusers.tpu.planner.building import configuration_of
from diffusers.tpu.planner.worker import versions


SIZES = ("height", "width", "num_frames")


def answer(request: dict, progress: Callable) -> dict:
    """Returns seconds, memory and compilation time of decoding or encoding one video, on the mesh that its pipeline would choose.

    Args:
        request: `topology`, `model`, `dtype`, `entry` ("decode" or "encode"); `height`, `width` and `num_frames` of the
            video; `named` (see `naming`).

    Raises:
        BadRequest: a model without a VAE in plain JAX, or a size that the VAE does not take.
    """
    topology, height, width, frames = find_topology(request["topology"]), *(request[n] for n in SIZES)
    try:
        configuration = configuration_of(request["model"])
        name, config = configuration.components["vae"]
        cls = flax_class(name.rpartition(".")[2])
    except (ValueError, KeyError) as error:
        raise BadRequest(f"expected a model with a VAE in plain JAX: {error}") from error
    plan = pipeline_plan(getattr(diffusers, configuration.pipeline))
    compiler = Compiler(topology)
    mesh = make_mesh(compiler.devices, plan_degrees(topology.devices, None, plan.branches()))
    vae = cls.abstract(config, dtype=request["dtype"], mesh=mesh)
    ratio, ratio_in_time = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    if height % ratio or width % ratio or (frames - 1) % ratio_in_time:
        raise BadRequest(
            f"expected a height and width of multiples of {ratio} and {ratio_in_time}k+1 frames, got {request}"
        )
    entry, video = request["entry"], (1, frames, height, width, 3)
    latents = (1, 1 + (frames - 1) // ratio_in_time, height // ratio, width // ratio, vae.latent_channels)
    shape = latents if entry == "decode" else video
    progress(f"compiling {cls.__name__}.{entry} for {topology.name}")
    lowered = vae.lower(entry, shape)
    of_program = {"programs": [kept.name_of(compiler, lowered, mesh)], "reader": READER}
    if request.get("named"):
        return of_program
    compiled = kept.compiled(compiler, lowered, mesh)
    timed = timing.time_program(compiled, topology.chip, ici.places_of(mesh))[BOUND]
    held = compiled.memory
    weights = held["arguments"] - math.prod(shape) * vae.dtype.itemsize
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
            "peak": (weights + activations + held["program"]) / GIB,
        },
        "compile_seconds": compiled.seconds,
        **of_program,
        "versions": {**versions(), "flax": importlib.metadata.version("flax")},
    }
