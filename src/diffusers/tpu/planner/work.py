"""Counts the work of a trace without compiling it: floating point operations, and estimates of time and memory.

Only products count (a multiplication and an addition each): matrix products, convolutions and attention. Attention's two
products are over all queries and keys, whichever kernel computes them; sparse attention's are over the keys that are seen.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

import jax
from jax.extend import core

from ..chips.figures import Chip
from ..kernels.attention.api import ATTENTION
from .timing import module_of


# Shares of peak rates that compiled programs reach, as seen in those of Wan 14B, 720p, v6e-8: bfloat16 products in blocks,
# the attention kernel, and the bandwidth of operations that are not fused.
PRODUCTS_REACH, ATTENTION_REACH, MEMORY_REACH = 0.6, 0.35, 0.8
KEPT_APART = set("reduce_sum reduce_max concatenate pad gather scatter transpose dynamic_slice sort".split())


@dataclass
class Work:
    """The work of one trace, summed over all devices."""

    products: float = 0.0  # floating point operations, as are `attention` and `by_module`
    attention: float = 0.0
    padded: Counter[int] = field(default_factory=Counter)  # `products`, channels padded to a matrix unit's side
    bytes: float = 0.0  # read and written by operations that are not fused (products, reductions, moves)
    live: int = 0  # the most bytes of intermediate values alive at once
    by_module: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[int, ...]] = field(default_factory=Counter)  # (batch, heads, queries, keys, head size)
    scans: int = 0  # loops, mostly over equal blocks

    @property
    def flops(self) -> float:
        return self.flops_of((1, 1))

    def flops_of(self, passes: tuple[int, int]) -> float:
        """FLOPs with this many passes through layers and through attention."""
        return passes[0] * self.products + passes[1] * self.attention

    def seconds(self, chip: Chip, chips: int) -> float:
        """Estimated seconds if `chips` share the work evenly, without transfers."""
        products = self.padded[chip.matrix_side] / chip.flops / PRODUCTS_REACH
        attention = self.attention / chip.flops / ATTENTION_REACH
        return (products + attention + self.bytes / chip.hbm_bandwidth / MEMORY_REACH) / chips


def count(jaxpr: core.ClosedJaxpr) -> Work:
    """The work of a trace (`jax.stages.Traced.jaxpr`)."""
    work = Work()
    work.live = _count(jaxpr.jaxpr, 1, work, "")
    return work


def _count(jaxpr, runs: int, work: Work, path: str) -> int:
    """Adds a jaxpr's work, `runs` times; returns the peak of its live bytes, without its inputs."""
    last_use = {}
    for n, eqn in enumerate(jaxpr.eqns):
        last_use.update({var: n for var in eqn.invars if isinstance(var, core.Var)})
    made, alive, fullest = {}, 0, 0
    results = {var for var in jaxpr.outvars if isinstance(var, core.Var)}
    for n, eqn in enumerate(jaxpr.eqns):
        inner = _one(eqn, runs, work, f"{path}/{eqn.source_info.name_stack}")
        for var in eqn.outvars:
            made[var] = _bytes(var.aval)
            alive += made[var]
        fullest = max(fullest, alive + inner)
        for var in (*eqn.invars, *eqn.outvars):
            if isinstance(var, core.Var) and var in made and last_use.get(var, n) <= n and var not in results:
                alive -= made.pop(var)
    return fullest


def _one(eqn, runs: int, work: Work, path: str) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name in ("pjit", "jit") and params.get("name", "").startswith(ATTENTION):
        streams = [var.aval for var in eqn.invars[-3 * len(eqn.outvars) :]]  # q, k, v of each, in one softmax
        (batch, heads, _, dim), out_dim = streams[0].shape, streams[2].shape[3]
        queries, keys = (sum(x.shape[2] for x in streams[n::3]) for n in (0, 1))
        share = float(params["name"].removeprefix(ATTENTION).removeprefix("_") or 1)
        pairs = queries * keys - (1 - share) * streams[0].shape[2] ** 2
        flops = runs * 2.0 * batch * heads * pairs * (dim + out_dim)
        work.attention += flops
        work.calls[batch, heads, queries, keys, dim] += runs
        work.by_module[module_of(path)] += flops
        return 0
    kinds = (core.ClosedJaxpr, core.Jaxpr)
    inner = jax.tree.leaves([*params.values()], is_leaf=lambda value: isinstance(value, kinds))
    if inner := [getattr(value, "jaxpr", value) for value in inner if isinstance(value, kinds)]:
        work.scans += name == "scan"
        times = runs * (params.get("length", 1) if name == "scan" else 1)
        return max(_count(x, times, work, path) for x in inner)
    flops, sides = _product(eqn)
    if flops:
        work.products += runs * flops
        work.by_module[module_of(path)] += runs * flops
        for side in (128, 256):
            waste = math.prod(-(-size // side) * side / size for size in sides)
            work.padded[side] += runs * flops * min(waste, side)
    if flops or name in KEPT_APART:
        work.bytes += runs * sum(_bytes(var.aval) for var in (*eqn.invars, *eqn.outvars))
    return 0


def _product(eqn) -> tuple[float, tuple[int, int]]:
    """Floating point operations, and the two sizes that the sides of the matrix unit hold."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
        left, right = (var.aval for var in eqn.invars)
        depth = math.prod(left.shape[axis] for axis in contracted)
        columns = math.prod(right.shape) // max(depth * math.prod(left.shape[a] for a in batched), 1)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * depth, (depth, columns)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        out, inside = kernel[numbers[0]], kernel[numbers[1]]
        taps = math.prod(kernel[axis] for axis in numbers[2:])
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * inside * taps, (inside * taps, out)
    return 0.0, (1, 1)


def _bytes(aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval, "dtype") else 0
