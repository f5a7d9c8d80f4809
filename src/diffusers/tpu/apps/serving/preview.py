"""Previews of running jobs, computed from their latents without a model.

The pipeline's callback gets the latents `x` on the host after every step. With `sigma` of flow matching before and after the step,

    x0 = x + (x - x_before) sigma / (sigma_before - sigma)      the line through two steps, at sigma 0
    colours = [x0, 1] W                                         `W`: least squares on latents and frames of finished calls

There is no preview of packed latents (B N D), or if the fit explains less than `LEAST_FIT` of the colours' variance.
"""

import numpy as np
import torch
from PIL import Image


LEAST_FIT = 0.4
FRAMES = 4  # of one video, that the fit reads
KEPT = 0.7  # the factor of the earlier calls' sums when a call is added
SIDE = 384  # pixels of a preview's longer side


def _rows(latents: torch.Tensor, place: int) -> np.ndarray:
    """One frame of C H W or C F H W as (H W, C + 1), the last column 1."""
    frame = latents if latents.ndim == 3 else latents[:, place]
    columns = frame.float().flatten(1).T.numpy().astype(np.float64)
    return np.concatenate([columns, np.ones((len(columns), 1))], 1)


class Steps:
    """The latents after the last two steps of one output."""

    def __init__(self):
        self._steps: list[tuple[torch.Tensor, float]] = []

    def add(self, latents: torch.Tensor, scheduler, step: int, steps: int):
        """Add the latents after a step, counted from 1. Schedules without flow matching's sigmas have sigma 0."""
        sigmas = getattr(scheduler, "sigmas", ())
        flow = len(sigmas) == steps + 1 and float(sigmas[0]) <= 1
        self._steps = [*self._steps[-1:], (latents, float(sigmas[step]) if flow else 0.0)]

    def last(self) -> torch.Tensor | None:
        return self._steps[-1][0] if self._steps else None

    def clean(self) -> torch.Tensor | None:
        """`x0`; None before the second step."""
        if len(self._steps) < 2:
            return None
        (before, sigma_before), (latents, sigma) = self._steps
        slope = 0.0 if sigma == sigma_before else sigma / (sigma_before - sigma)
        return latents.float() + (latents.float() - before.float()) * slope


class Colours:
    """`W` of one VAE, fitted to the outputs of finished calls."""

    def __init__(self):
        self._sums, self.weights, self.fit = None, None, 0.0

    def learn(self, latents: torch.Tensor | None, value):
        """Add the last latents of a call, C H W or C F H W, with its image or frames; other latents are ignored."""
        if latents is None or latents.ndim not in (3, 4):
            return
        frames = value if isinstance(value, list) else [value]
        count = latents.shape[1] if latents.ndim == 4 else 1
        sums = [0.0] * 4
        for place in np.unique(np.linspace(0, count - 1, min(count, FRAMES)).round().astype(int)):
            frame = frames[round(place * (len(frames) - 1) / max(count - 1, 1))].convert("RGB")
            x = _rows(latents, place)
            y = np.asarray(frame.resize(latents.shape[:-3:-1], Image.Resampling.BOX), np.float64).reshape(-1, 3)
            sums = [a + b for a, b in zip(sums, (x.T @ x, x.T @ y, (y**2).sum(), len(y)))]
        self._sums = sums if self._sums is None else [KEPT * a + b for a, b in zip(self._sums, sums)]
        squares, products, colours, rows = self._sums
        weights = np.linalg.lstsq(squares, products, rcond=1e-9)[0]
        mean = products[-1] / rows
        self.fit = 1 - float((colours - (weights * products).sum()) / max(colours - rows * (mean**2).sum(), 1e-9))
        self.weights = weights

    def picture(self, steps: Steps) -> Image.Image | None:
        """The middle frame of the latest `x0`; None if there is no preview."""
        weights, latents = self.weights, steps.clean()
        if latents is None or weights is None or self.fit < LEAST_FIT or len(latents) + 1 != len(weights):
            return None
        *_, height, width = latents.shape
        colours = _rows(latents, latents.shape[1] // 2) @ weights
        pixels = np.clip(colours, 0, 255).astype(np.uint8).reshape(height, width, 3)
        factor = SIDE / max(width, height)
        size = [round(side * factor) for side in (width, height)]
        return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
