"""HiDream-I1's transformer on TPU. Upstream sorts tokens by expert and reads on the host how many each has. Here every expert
computes every token, with weight zero if not chosen. Weights precede the last layer: chips sum the parts of all experts at once."""

from dataclasses import replace

import torch.nn.functional as F

from ...tpu.chips.sharding import INFERRED, ModelPlan
from ...tpu.kernels.settings import current, using
from .transformer_hidream_image import MOEFeedForwardSwiGLU


def _of_experts(mixture, x):
    """The mixture's output for x [B, T, C]."""
    chosen, given, _ = mixture.gate(x)
    weights = given.new_zeros(len(given), len(mixture.experts)).scatter_add(1, chosen, given).view(*x.shape[:2], -1)
    parts = (F.silu(one.w1(x)) * one.w3(x) * weights[..., n : n + 1] for n, one in enumerate(mixture.experts))
    with using(replace(current(), added=True)):
        return sum(one.w2(part) for one, part in zip(mixture.experts, parts)) + mixture.shared_experts(x)


PLAN = ModelPlan(activation_spec=INFERRED, methods={(MOEFeedForwardSwiGLU, "forward"): _of_experts})
