"""Plans a training step instead of a run. The denoiser's forward and backward pass are compiled as one program; clipping and AdamW
are estimated from the bytes that they read and write."""

import jax

from ..compile.call import Call
from ..compile.gradients import Differentiable, DifferentiatedCall
from ..compile.module import CompiledModule
from ..pipelines.components import modules_of
from .recording import Recording
from .runs import stage_of


RANK = 16
PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]  # of upstream's scripts for LoRA
# Multiples of the call's FLOPs (layers, attention): forward, gradients of activations, gradients of weights; no recomputation.
# Each of attention's two products has two gradients, whichever weights are trained.
PASSES = {"lora": (2, 3), "full": (3, 3)}


def prepare(pipe, kind: str, arguments: dict):
    """Sets up denoisers as a training script does, and `arguments` for a call without guidance.

    Raises ValueError if `kind` is "lora" and a denoiser has none of `PROJECTIONS`.
    """
    if kind == "lora":
        from peft import LoraConfig  # an optional dependency

    arguments["guidance_scale"] = 1.0
    for name, module in modules_of(pipe).items():
        if stage_of(name) != "denoise":
            continue
        module.requires_grad_(kind == "full").train()
        if kind == "lora":
            module.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS))


def one_step(recording: Recording):
    """Keeps only the calls of denoisers, each once, in a single step."""
    recording.calls = [call for call in recording.calls if stage_of(call.component) == "denoise"]
    recording.stepped.clear()
    recording.stepped[0] = 1
    for call in recording.calls:
        call.groups = [1]


def lowered(runner: CompiledModule, call: Call) -> tuple[jax.stages.Lowered, int]:
    """The lowered forward and backward pass, and the bytes per chip of the weights that are trained."""
    runner.current()
    differentiated = DifferentiatedCall(runner, call)
    wanted = differentiated.wanted
    return Differentiable(runner.trace(wanted.of(call)), wanted).lowered(), differentiated.trained
