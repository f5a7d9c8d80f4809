"""HiDream-I1's transformer on TPU. Upstream sorts tokens by expert and reads on the host how many each has; here every expert computes
every token, weighted by zero where it was not chosen."""

from ...tpu.chips.sharding import INFERRED, ModelPlan
from .transformer_hidream_image import MOEFeedForwardSwiGLU


def _of_experts(mixture, x, flat_expert_indices, flat_expert_weights):
    chosen, given = (of.view(len(x), -1) for of in (flat_expert_indices, flat_expert_weights))
    weights = given.new_zeros(len(x), len(mixture.experts)).scatter_add(1, chosen, given)
    return sum(expert(x) * weights[:, n : n + 1] for n, expert in enumerate(mixture.experts))


PLAN = ModelPlan(activation_spec=INFERRED, methods={(MOEFeedForwardSwiGLU, "moe_infer"): _of_experts})
