"""The meshes that a slice allows, ranked by an estimate before anything is compiled."""

import math
from dataclasses import dataclass

from ..chips.figures import Topology
from ..chips.sharding import ModelPlan
from ..kernels.attention.parallel import plan_ring
from .work import Work


@dataclass(frozen=True)
class Denoiser:
    """Facts of a denoiser for the ranking: its plan, the work of one call, guidance branches of a step, bytes of its weights."""

    plan: ModelPlan
    work: Work
    batch: int | None
    branches: int
    weight_bytes: int


def allowed(topology: Topology, denoisers: list[Denoiser]) -> list[tuple[int, int, int]]:
    """Every (dp, sp, tp) of all the slice's devices that splits batch and heads evenly."""
    n = topology.devices
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    meshes = [(dp, sp, n // dp // sp) for dp in divisors for sp in divisors if n // dp % sp == 0]
    return [mesh for mesh in meshes if all(refusal(mesh, d, topology.slices) is None for d in denoisers)]


def refusal(mesh: tuple[int, int, int], denoiser: Denoiser, slices: int = 1) -> str | None:
    """Why this mesh cannot be used, or None."""
    dp, sp, tp = mesh
    if slices > 1 and sp % (slices // math.gcd(dp, slices)):
        return f"expected dp, or dp and sp, to be multiples of the {slices} slices, got dp {dp} and sp {sp}"
    rows = (denoiser.batch or 1) * denoiser.branches
    if rows % dp:
        return f"expected dp to divide the {rows} rows of a step (prompts times guidance branches), got dp {dp}"
    heads = sorted({heads for _, heads, _, _, _ in denoiser.work.calls})
    if any(h % tp for h in heads):
        return f"expected tp to divide the attention heads ({', '.join(map(str, heads))}), got tp {tp}; use sp in its place"
    return None


def guess(mesh: tuple[int, int, int], denoiser: Denoiser, topology: Topology) -> float:
    """Estimated seconds of a step: work divided by the chips that share it, plus each chip's bytes over one link."""
    dp, sp, tp = mesh
    chip, branches = topology.chip, denoiser.branches
    if denoiser.plan.activation_spec is None:
        return branches * denoiser.work.seconds(chip, 1)  # no sharding of activations: every chip does all
    sent = denoiser.weight_bytes * (1 - 1 / (dp * sp)) / tp
    for (batch, heads, queries, keys, size), runs in denoiser.work.calls.items():
        row = runs * branches * batch * heads * size * 2 / dp  # bytes of one token, all heads
        if queries == keys and sp > 1:
            ring, ulysses = plan_ring(sp, heads // tp, heads // tp)
            # Four exchanges, each across the middle of a line of chips; keys and values once around the ring.
            sent += row / tp * (queries * (ulysses > 1) / ring + 2 * keys * (ring - 1) / sp)
        sent += 4 * row * queries / sp * (1 - 1 / tp)
    return branches * denoiser.work.seconds(chip, dp * sp * tp) + sent / chip.link_bandwidth


def rank(topology: Topology, denoisers: list[Denoiser]) -> list[tuple[float, tuple[int, int, int]]]:
    """(guessed seconds of a step, mesh), fastest first."""
    meshes = allowed(topology, denoisers)
    return sorted((sum(guess(mesh, d, topology) for d in denoisers) / len(denoisers), mesh) for mesh in meshes)
