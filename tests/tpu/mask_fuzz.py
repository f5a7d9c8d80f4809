"""Random programs of mask operations, traced and classified by their lineage, against the same programs eagerly.

A program draws operations on arrays [2|1, 3|1, T|1, S|1]. It is run twice: eagerly by torch, whose dense mask is the oracle, and in a
trace through the bridge, where `classify` reads the lineage; the parts that it finds are compiled, computed and spread out again. So
are those that `classify` finds in the dense mask's values. All must allow the same pairs, with the same bias up to a number per row,
which a softmax does not see.
"""

import jax
import numpy as np
import torch
import torch.nn.functional as F

from attention_masks import LOWEST
from conftest import QUICKLY
from diffusers.tpu import bridge
from diffusers.tpu.kernels.attention.masks import BELOW, Mask, classify


B, N = 2, 3
MASKS = 4  # of one program
SIZES = ((6, 6), (6, 6), (5, 7), (8, 3), (1, 4))


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
    if mask.product is not None:
        by_query, by_key = mask.product
        assert by_query.shape[2:] == (shape[2], 1) and by_key.shape[2:] == (1, shape[3])
        bias = bias + as_bias(np.asarray(by_query) * np.asarray(by_key))
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

    every, answers = jax.jit(traced, compiler_options=QUICKLY)(given), []
    for found, mask in zip(every, eager):
        if mask.dtype == bool or not np.isnan(mask.astype(np.float32)).any():
            expected = np.broadcast_to(as_bias(mask), (B, N, t, s))
            kind = "none" if found is None else found.kind
            both = (found, classify(mask, B, N, t, s))
            answers.append((kind, any(differ(spread(parts, expected.shape), expected) for parts in both)))
    return answers


# Programs


def is_bool(x) -> bool:
    return x.dtype == torch.bool


def program(rng, given: dict, t: int, s: int):
    """`MASKS` random masks. Draws depend on shapes and dtypes alone, so that one seed is one program for both."""
    full, keys = (B, N, t, s), given["keys"]
    on = {"device": keys.device}
    rows, columns = torch.arange(t, **on), torch.arange(s, **on)
    pool = [
        keys[:, None, None, :],
        given["queries"][:, None, :, None],
        given["bias"][None, :, None, :],
        rows[None, None, :, None],
        columns[None, None, None, :],
        given["lengths"][:, None, None, None] > columns[None, None, None, :],
        torch.full((1, 1, t, s), bool(rng.random() < 0.5), **on),
    ]
    pool += [pool[0] & pool[1], pool[3] >= pool[4]]

    def draw():
        late = -1 - min(int(rng.geometric(0.25)) - 1, len(pool) - 1)
        return pool[late if rng.random() < 0.6 else rng.integers(len(pool))]

    def flag(x):
        return x if is_bool(x) else x > rng.integers(-3, 4)

    def small():
        x = draw()
        if is_bool(x) or x.is_floating_point() and rng.random() < 0.5:
            # a difference of the lowest number is no int32, as JAX has it
            x = (x if is_bool(x) else x.clamp(-99, 99)).int()
        return torch.where(x < -9, -9, torch.where(x > 9, 9, x)) if rng.random() < 0.3 else x

    def square(x):
        return x.expand(*x.shape[:2], t, s)

    def grown(x):
        return x.expand(*(n if n > 1 or rng.random() < 0.5 else m for n, m in zip(x.shape, full)))

    def number():
        return [0.0, 1.0, -1.0, -1e4, LOWEST, float("-inf"), 0.5][rng.integers(7)]

    def triangle(x):
        return (torch.tril if rng.integers(2) else torch.triu)(x, diagonal=int(rng.integers(-2, 3)))

    def compared():
        a, b, which = small(), small() + int(rng.integers(-2, 3)), rng.integers(6)
        return [a.__lt__, a.__le__, a.__gt__, a.__ge__, a.__eq__, a.__ne__][which](b)

    def cut(x):
        axis = 2 + int(rng.integers(2))
        n, x = full[axis], square(x)
        first = int(rng.integers(0, n))
        last = int(rng.integers(first + 1, n + 1))
        filled = 1 if is_bool(x) and rng.random() < 0.5 else 0
        widths = (0, 0) * (3 - axis) + (first, n - last)
        return F.pad(x.narrow(axis, first, last - first), widths, value=bool(filled) if is_bool(x) else filled)

    def joined(x):
        axis, other = 2 + int(rng.integers(2)), draw()
        other = other.bool() if is_bool(x) else torch.where(flag(other), 1, 0).to(x.dtype)
        at, shape = int(rng.integers(0, full[axis] + 1)), np.broadcast_shapes(x.shape[:2], other.shape[:2])
        x, other = (y.expand(*shape, t, s) for y in (x, other))
        return torch.cat([x.narrow(axis, 0, at), other.narrow(axis, at, full[axis] - at)], axis)

    def outer(x):
        if t != s:
            return flag(x) & flag(draw())
        one = flag(x)[:, :, :1].repeat(1, 1, t if x.shape[2] == 1 or rng.random() < 0.5 else 1, 1)
        return one & one.expand(*one.shape[:2], t, s).transpose(2, 3)

    steps = [
        *[lambda x: flag(x) & flag(draw())] * 3,
        lambda x: flag(x) | flag(draw()),
        lambda x: flag(x) ^ flag(draw()),
        lambda x: ~flag(x),
        lambda x: ~(~flag(x) | ~flag(draw())),
        lambda x: flag(x) * flag(draw()),
        lambda x: small() + small(),
        lambda x: small() - small() * int(rng.integers(-2, 3)),
        *[lambda x: compared()] * 2,
        lambda x: x.to([torch.bool, torch.float32, torch.int32][rng.integers(3)]),
        lambda x: torch.where(flag(x), number(), number()),
        lambda x: torch.where(flag(x), flag(draw()), flag(draw())),
        lambda x: square(x).float().masked_fill(flag(draw()), number()),
        lambda x: grown(flag(x)).masked_fill(flag(draw()), bool(rng.random() < 0.5)),
        lambda x: (1 - flag(x).float()) * [LOWEST, -1e4, -2.0][rng.integers(3)],
        grown,
        lambda x: x.repeat(*(m if n == 1 and rng.random() < 0.5 else 1 for n, m in zip(x.shape, full))),
        lambda x: x.transpose(1, 3)[:, :, :, None][:, :, :, 0].transpose(1, 3),
        lambda x: square(x).transpose(2, 3) if t == s else x,
        lambda x: square(x).reshape(-1, t * s).reshape(*x.shape[:2], t, s),
        lambda x: square(x).reshape(*x.shape[:2], t, 1, s)[:, :, :, 0],
        cut,
        joined,
        *[outer] * 2,
        lambda x: triangle(torch.ones(t, s, dtype=[torch.bool, torch.float32][rng.integers(2)], **on))[None, None],
        lambda x: flag(triangle(square(x))),
        lambda x: torch.full((1, 1, t, s), bool(rng.integers(2)), **on),
        lambda x: flag(x).any(int(rng.integers(4)), keepdim=True),
        lambda x: flag(x) & (rows[:, None] - columns < int(rng.integers(1, 4))),
    ]
    for _ in range(rng.integers(MASKS, 12)):
        pool.append(steps[rng.integers(len(steps))](draw()))
    return [_as_mask(rng, x, flag, draw) for x in pool[-MASKS:]]


def _as_mask(rng, x, flag, draw):
    """A pool's array in one of the forms in which models give masks: bool, or a bias."""
    form = rng.integers(6)
    if form < 2:
        x = flag(x)
    elif form == 2:
        x = torch.where(flag(x), 0.0, float("-inf"))
    elif form == 3:
        x = (1.0 - flag(x).float()) * [LOWEST, -1e4][rng.integers(2)]
    elif form == 4:
        x = torch.where(flag(x), 0, 1).float() * -1.5 + torch.where(flag(draw()), 0.0, LOWEST).float()
    if not is_bool(x):
        x = x.to([torch.float32, torch.float32, torch.bfloat16, torch.float16][rng.integers(4)])
    while x.ndim > 2 and x.shape[0] == 1 and rng.random() < 0.3:
        x = x[0]
    return x


def arguments(rng, t: int, s: int) -> dict[str, np.ndarray]:
    """Values of the model's tensors: at times none or all of the keys are true."""
    share = rng.choice([0.0, 0.6, 0.6, 0.6, 1.0], 2)
    return {
        "keys": rng.random((B, s)) < share[0],
        "queries": rng.random((B, t)) < share[1],
        "lengths": rng.integers(0, s + 1, B).astype(np.int32),
        "bias": rng.integers(-3, 4, (N, s)).astype(np.float32),
    }
