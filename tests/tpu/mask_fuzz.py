"""Random programs of mask operations, traced and classified by their lineage, against the same programs eagerly.

A program draws operations on arrays [2|1, 3|1, T|1, S|1]. It is run twice: eagerly by torch, whose dense mask is the oracle, and in a
trace through the bridge, where `classify` reads the lineage; the parts that it finds are computed, by numpy as the jaxpr says, and
spread out again. So are those that `classify` finds in the dense mask's values. All must allow the same pairs, with the same bias up
to a number per row, which a softmax does not see.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core

from diffusers.tpu import bridge
from diffusers.tpu.kernels.attention.masks import BELOW, Mask, classify
from mask_programs import SIZES, B, N, arguments, program


def as_bias(values) -> np.ndarray:
    """What the mask adds to scores, -inf where a key takes no part."""
    values = np.asarray(values)
    if values.dtype == bool:
        return np.where(values, 0.0, -np.inf)
    values = values.astype(np.float64)
    return np.where(values <= BELOW, -np.inf, values)


def spread(mask: Mask | None, shape) -> np.ndarray:
    """`as_bias` of the whole mask that the parts are of."""
    bias = np.zeros(shape)
    if mask is None:
        return bias
    for values, length in ((mask.keys, shape[3]), (mask.dense, shape[3]), (mask.queries, 1)):
        if values is not None:
            assert values.shape[3] == length and values.shape[2] in ((1,) if values is mask.keys else (shape[2],))
            bias = bias + as_bias(values)
    assert mask.queries is None or mask.queries.dtype == bool
    if mask.band is not None:
        ahead = np.arange(shape[3]) // mask.frame[1] - np.arange(shape[2])[:, None] // mask.frame[0]
        left, right = (np.inf if side is None else side for side in mask.band)
        bias[..., (ahead < -left) | (ahead > right)] = -np.inf
    return bias


def differ(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether other pairs are allowed, or the bias of a row differs by more than one number for all of its keys."""
    allowed = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(ours), allowed):
        return True
    apart = np.where(allowed, np.where(allowed, ours, 0) - np.where(allowed, theirs, 0), np.nan)
    rows = apart.reshape(-1, apart.shape[-1])
    return any(np.ptp(row[~np.isnan(row)]) != 0 for row in rows if not np.isnan(row).all())


def computed(closed, *arguments) -> list:
    """The results of a jaxpr, by numpy, only what they need; operations that are not in `RULES` by JAX."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments]))
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def value(atom):
        if isinstance(atom, core.Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        if atom not in values:
            eqn = makers[atom]
            values.update(zip(eqn.outvars, _apply(eqn, [value(x) for x in eqn.invars])))
        return np.asarray(values[atom])

    return [value(atom) for atom in jaxpr.outvars]


def _apply(eqn, operands) -> list:
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "closed_call", "custom_jvp_call"):
        return computed(params.get("jaxpr") or params["call_jaxpr"], *operands)
    if name in RULES:
        aval = eqn.outvars[0].aval
        with np.errstate(all="ignore"):
            return [np.asarray(RULES[name](operands, params, aval)).astype(aval.dtype).reshape(aval.shape)]
    out = eqn.primitive.bind(*map(jnp.asarray, operands), **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def _broadcast(operands, params, aval):
    shape = [1] * len(aval.shape)
    for axis, n in zip(params["broadcast_dimensions"], operands[0].shape):
        shape[axis] = n
    return np.broadcast_to(operands[0].reshape(shape), aval.shape)


def _sliced(operands, params, aval):
    bounds = zip(params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(aval.shape))
    return operands[0][tuple(slice(*b) for b in bounds)]


def _padded(operands, params, aval):
    if any(inside or before < 0 or after < 0 for before, after, inside in params["padding_config"]):
        raise NotImplementedError(f"a padding of {params['padding_config']}")
    widths = [(before, after) for before, after, _ in params["padding_config"]]
    return np.pad(operands[0], widths, constant_values=operands[1])


def _two(function):
    return lambda operands, params, aval: function(*operands)


def _iota(operands, params, aval):
    along = [-1 if axis == params["dimension"] else 1 for axis in range(len(aval.shape))]
    return np.broadcast_to(np.arange(aval.shape[params["dimension"]]).reshape(along), aval.shape)


RULES = {
    **{name: _two(getattr(np, name)) for name in ("add", "subtract", "multiply", "maximum", "minimum", "abs")},
    **{"sub": _two(np.subtract), "mul": _two(np.multiply), "max": _two(np.maximum), "min": _two(np.minimum)},
    **{"and": _two(np.bitwise_and), "or": _two(np.bitwise_or), "xor": _two(np.bitwise_xor), "not": _two(np.invert)},
    **{"eq": _two(np.equal), "ne": _two(np.not_equal), "lt": _two(np.less), "le": _two(np.less_equal)},
    **{"gt": _two(np.greater), "ge": _two(np.greater_equal), "neg": _two(np.negative), "copy": _two(np.array)},
    "select_n": lambda operands, params, aval: np.select([operands[0] == n for n in range(len(operands) - 1)], operands[1:]),
    **dict.fromkeys(("convert_element_type", "reshape", "squeeze"), _two(np.asarray)),
    "broadcast_in_dim": _broadcast,
    "slice": _sliced,
    "pad": _padded,
    "reduce_or": lambda operands, params, aval: np.any(operands[0], params["axes"]),
    "transpose": lambda operands, params, aval: operands[0].transpose(params["permutation"]),
    "concatenate": lambda operands, params, aval: np.concatenate(operands, params["dimension"]),
    "iota": _iota,
    "tile": lambda operands, params, aval: np.tile(operands[0], params["reps"]),
}  # fmt: skip


def check(seed: int) -> list[tuple[str, bool]]:
    """(kind of the mask that was found, whether it differs) of each mask of a program, but those with a NaN."""
    rng = np.random.default_rng(seed)
    t, s = SIZES[rng.integers(len(SIZES))]
    given, draws = arguments(rng, t, s), int(rng.integers(1 << 30))

    def run(given):
        return program(np.random.default_rng(draws), given, t, s)

    eager = [bridge.as_numpy(x) for x in run({name: torch.from_numpy(x) for name, x in given.items()})]

    def traced(given):
        with bridge.environment(), bridge.quiet_integers():
            masks = run({name: bridge.to_torch(x) for name, x in given.items()})
            return [classify(mask.jax(), B, N, t, s) for mask in masks]

    closed, shape = jax.make_jaxpr(traced, return_shape=True)(given)
    every = jax.tree.unflatten(jax.tree.structure(shape), computed(closed, *jax.tree.leaves(given)))
    answers = []
    for found, mask in zip(every, eager):
        if mask.dtype == bool or not np.isnan(mask.astype(np.float32)).any():
            expected = np.broadcast_to(as_bias(mask), (B, N, t, s))
            kind = "none" if found is None else found.kind
            both = (found, classify(mask, B, N, t, s))
            answers.append((kind, any(differ(spread(parts, expected.shape), expected) for parts in both)))
    return answers
