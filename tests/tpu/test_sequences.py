"""What users do to a pipeline between its calls, drawn: several actions one after another, a call after each.

Oracle: upstream's pipeline, to which the same is done: the same numbers, or an error as in `test_call_fuzz`. Ours has the default
configuration. `sequences.json` has the actions, statements of Python.
"""

import contextlib
import copy  # noqa: F401  in sequences.json
import inspect
import tempfile

import numpy as np
import pytest
import torch

import diffusers  # noqa: F401  in sequences.json
import tiny
from conftest import SEED, table
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig, tpu
from diffusers.models.attention_dispatch import attention_backend
from diffusers.tpu.compare.pipelines import run_pipeline
from test_call_fuzz import OWN_SEED, outcome, wrong


ACTIONS = {f"{kind}: {name}": code for kind, some in table("sequences").items() for name, code in some.items()}
LENGTH = 8
CACHES = (
    lambda pipe: FirstBlockCacheConfig(threshold=0.3),
    lambda pipe: TaylorSeerCacheConfig(
        cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float32
    ),
)
SCHEDULERS = {
    "CogVideoX": ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    "Flow": ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"),
    "UniPC": ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler"),
    "": ("DDIMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "LCMScheduler"),
}  # fmt: skip


class Side:
    """One of two pipelines, and what a script has of it. `ours`: it is on the TPU path."""

    def __init__(self, pipe, ours: bool):
        self.pipe, self.ours, self.given, self.kept, self.hooks = pipe, ours, {}, [], []

    @property
    def model(self) -> torch.nn.Module:
        return denoiser(self.pipe)

    def models(self) -> list[torch.nn.Module]:
        return [m for m in self.pipe.components.values() if isinstance(m, torch.nn.Module)]

    def placed(self, pipe):
        pipe.set_progress_bar_config(disable=True)
        return pipe.to("cuda") if self.ours else tpu.uninstall(pipe)

    def loaded(self, pipe):
        with tempfile.TemporaryDirectory() as folder:
            pipe.save_pretrained(folder)
            return self.placed(type(pipe).from_pretrained(folder))

    def does(self, code: str, seed: int):
        """Runs an action; its draws are of this seed."""
        rng = np.random.default_rng(seed)

        def pick(some):
            some = [*some]
            return some[int(rng.integers(len(some)))]

        def part(*classes):
            named = self.model.named_modules()
            return pick(name for name, m in named if name and isinstance(m, classes or torch.nn.Module))

        def lora(rank: int) -> dict:
            found, prefix = {}, "unet" if hasattr(self.pipe, "unet") else "transformer"
            for name, layer in self.model.named_modules():
                if isinstance(layer, torch.nn.Linear) and name.endswith(("to_q", "to_v", "to_out.0")):
                    found[f"{prefix}.{name}.lora_A.weight"] = 0.1 * torch.randn(rank, layer.in_features)
                    found[f"{prefix}.{name}.lora_B.weight"] = 0.3 * torch.randn(layer.out_features, rank)
            return found

        def blocks():
            named = self.model.named_children()
            lists = [m for name, m in named if isinstance(m, torch.nn.ModuleList) and "block" in name and len(m) > 1]
            return pick(some for some in lists if len({*map(type, some)}) == 1)

        names = {**globals(), **{name: getattr(self, name) for name in dir(self) if not name.startswith("_")}}
        names |= {"rng": rng, "pick": pick, "part": part, "lora": lora, "blocks": blocks}
        names["weight"] = lambda: pick(p for p in pick([self.model, *self.models()]).parameters() if p.ndim > 1)
        names["schedulers"] = lambda: next(
            x for key, x in SCHEDULERS.items() if key in type(self.pipe.scheduler).__name__
        )
        torch.manual_seed(seed)
        with torch.set_grad_enabled("trained" in code):
            exec(code, names)
        self.pipe = names["pipe"]

    def call(self, base: dict) -> list[np.ndarray]:
        given = {
            name: x for name, x in self.given.items() if name in inspect.signature(type(self.pipe).__call__).parameters
        }
        around = self.given.get("_around")
        with attention_backend(around) if around else contextlib.nullcontext():
            return run_pipeline(self.pipe, {**base, **given}, OWN_SEED)


def denoiser(pipe) -> torch.nn.Module:
    return getattr(pipe, "unet", None) or pipe.transformer


def times(output, factor: float):
    if type(output) is tuple:
        return times(output[0], factor), *output[1:]
    return output * factor if isinstance(output, torch.Tensor) and output.is_floating_point() else output


def scaling(factor: float):
    return lambda module, args, output: times(output, factor)


def scaled(forward, factor: float):
    return lambda *args, **kwargs: times(forward(*args, **kwargs), factor)


def drawn(layer: torch.nn.Module) -> torch.nn.Module:
    for p in layer.requires_grad_(False).parameters():
        p.normal_(std=0.05)
    return layer


def trained(model, optimizer):
    model.requires_grad_(True)
    optimizer = optimizer(model.parameters(), 1e-3)
    sum((p**2).sum() for p in [*model.parameters()][:4]).backward()
    optimizer.step()
    model.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(
    "name", "sd sdxl sd3 flux qwen wan wan_vace cogvideox hunyuan15 ltx z_image kandinsky5".split()
)
def test_what_users_do_between_calls(idioms, name, number):
    """Another seed of the run (`SEED`) draws other actions."""
    rng = np.random.default_rng([SEED, number, *name.encode()])
    base = tiny.arguments(name, num_inference_steps=2, generator=None)
    sides = Side(tiny.make(name), False), Side(tpu.install(tiny.make(name)).to("cuda"), True)
    done = []
    for _ in range(LENGTH):
        what, seed = [*ACTIONS][int(rng.integers(len(ACTIONS)))], int(rng.integers(1 << 30))
        (_, theirs), (_, ours) = (outcome(lambda: side.does(ACTIONS[what], seed)) for side in sides)
        done.append(what if theirs is None else f"{what} ({theirs!r})")
        assert not isinstance(theirs, NameError), f"{what}: {theirs!r}"
        assert (theirs is None) == (ours is None), f"{done}: {ours!r} for {theirs!r}"
        expected, found = (outcome(lambda: side.call(base)) for side in sides)
        assert wrong(found, expected) is None, f"{done}: {wrong(found, expected)}"
