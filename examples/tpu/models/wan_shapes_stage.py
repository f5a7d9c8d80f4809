"""A stage of training that can be stopped at any step: its loop, optimisers, averaged weights and checkpoints."""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from wan_shapes_optimizer import make_optimizers


def load_checkpoint(path: Path) -> dict | None:
    return torch.load(path, weights_only=True) if path.exists() else None


def save_checkpoint(path: Path, state: dict) -> None:
    """Replaces the file as a whole; it is never written in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


class Stage:
    """The training loop of both stages: optimiser, averaged weights, schedule, checkpoints, resumption.

    The learning rate rises over 100 steps and then falls as a cosine of the share of `minutes` used. The average
    `a <- m a + (1 - m) w`, with `m = min(decay, (1 + step) / (10 + step))`, is the result of a stage.
    """

    checkpoint_seconds = 120

    def __init__(self, name: str, modules: torch.nn.ModuleDict, work: Path, minutes: float, rate: float, decay: float):
        self.modules, self.minutes, self.decay = modules, minutes, decay
        self.checkpoint = work / f"{name}.pt"
        self.optimizers = make_optimizers(modules, muon_lr=rate, adam_lr=1e-3)
        for group in self.groups:
            group["peak"] = group["lr"]
        self.average = {key: value.detach().clone() for key, value in modules.state_dict().items()}
        self.step, self.seconds = 0, 0.0
        if state := load_checkpoint(self.checkpoint):
            modules.load_state_dict(state["modules"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            self.average, self.step, self.seconds = state["average"], state["step"], state["seconds"]

    @property
    def groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def progress(self) -> float:
        return min(self.seconds / (60 * self.minutes), 1.0)

    def save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"modules": self.modules.state_dict(), "optimizers": optimizers, "average": self.average}
        save_checkpoint(self.checkpoint, {**state, "step": self.step, "seconds": self.seconds})

    def steps(self) -> Iterator[int]:
        """Yields step numbers until the minutes are used, keeping time and saving every `checkpoint_seconds`."""
        saved = self.seconds
        while self.progress < 1:
            start = time.process_time()
            yield self.step
            self.step += 1
            self.seconds += (time.process_time() - start) / torch.get_num_threads()
            if self.seconds - saved > self.checkpoint_seconds:
                self.save()
                saved = self.seconds
        self.save()

    def freeze(self, *names: str) -> None:
        """Fixes the submodules at their averages."""
        for name in names:
            module = self.modules.get_submodule(name).requires_grad_(False)
            prefix = name + "."
            module.load_state_dict(
                {key.removeprefix(prefix): value for key, value in self.average.items() if key.startswith(prefix)}
            )

    def update(self, loss: torch.Tensor) -> None:
        """Takes one optimiser step down `loss` and moves the average."""
        scale = min(1, (self.step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.progress)))
        for group in self.groups:
            group["lr"] = group["peak"] * scale
        self.modules.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        memory = min(self.decay, (1 + self.step) / (10 + self.step))
        for key, value in self.modules.state_dict().items():
            self.average[key].lerp_(value, 1 - memory)
