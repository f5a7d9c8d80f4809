"""A step of training in place of a run: the denoiser there and back, compiled as one program; clipping and AdamW by what they read and
write of a chip's memory."""

import jax

from ..compile.call import Call
from ..compile.gradients import Differentiable, DifferentiatedCall
from ..compile.module import CompiledModule
from ..pipelines.components import modules_of
from .recording import Recording
from .runs import stage_of


RANK = 16
PROJECTIONS = ["to_q", "to_k", "to_v", "to_out.0"]  # of upstream's scripts for LoRA
# Of the call's FLOPs of layers and of attention: itself, gradients of activations, those of weights; not what is computed again.
# Each of attention's two products has two gradients, whatever is trained.
PASSES = {"lora": (2, 3), "full": (3, 3)}


def prepare(pipe, kind: str, arguments: dict):
    """Denoisers as a training script has them, and a call without guidance.

    Raises ValueError for a denoiser without such projections.
    """
    if kind == "lora":
        from peft import LoraConfig  # an extra's

    arguments["guidance_scale"] = 1.0
    for name, module in modules_of(pipe).items():
        if stage_of(name) != "denoise":
            continue
        module.requires_grad_(kind == "full").train()
        if kind == "lora":
            module.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=PROJECTIONS))


def one_step(recording: Recording):
    """Only denoisers are called, each once."""
    recording.calls = [call for call in recording.calls if stage_of(call.component) == "denoise"]
    recording.stepped.clear()
    recording.stepped[0] = 1
    for call in recording.calls:
        call.groups = [1]


def lowered(runner: CompiledModule, call: Call) -> tuple[jax.stages.Lowered, int]:
    """There and back, and how many bytes of a chip the weights take that are trained."""
    runner.current()
    differentiated = DifferentiatedCall(runner, call)
    wanted = differentiated.wanted
    return Differentiable(runner.trace(wanted.of(call)), wanted).lowered(), differentiated.trained
