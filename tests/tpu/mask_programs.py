"""Random programs that make attention masks of a model's tensors: one draw of operations, run by torch, numpy or jax.numpy."""

import jax.numpy as jnp
import numpy as np
import torch


LOWEST = float(np.finfo(np.float32).min)
B, N = 2, 3
MASKS = 4  # of one program
SIZES = ((6, 6), (6, 6), (5, 7), (8, 3), (1, 4))


class Numpy:
    """The operations that the three have under different names, on numpy's arrays; `jax.numpy` for traced ones."""

    xp = np
    full = staticmethod(lambda like, shape, value, dtype: np.full(shape, value, dtype))

    def cast(self, x, dtype):
        return x.astype({"bool": bool, "bfloat16": jnp.bfloat16}.get(dtype, dtype))

    def arange(self, like, n):
        return self.xp.arange(n, dtype=np.int32)

    def where(self, b, on, off):
        return self.xp.where(b, on, off)

    def fill(self, x, b, value):
        return self.xp.where(b, value, x)

    def expand(self, x, shape):
        return self.xp.broadcast_to(x, shape)

    def swap(self, x, a, b):
        return self.xp.swapaxes(x, a, b)

    def cat(self, xs, axis):
        return self.xp.concatenate(xs, axis)

    def pad(self, x, axis, before, after, value):
        widths = [(before, after) if a == axis else (0, 0) for a in range(x.ndim)]
        return self.xp.pad(x, widths, constant_values=value)

    def repeat(self, x, reps):
        return self.xp.tile(x, reps)

    def triangle(self, x, k, lower):
        return (self.xp.tril if lower else self.xp.triu)(x, k)

    def any(self, x, axis):
        return self.xp.any(x, axis=axis, keepdims=True)

    def tidy(self, x):
        """numpy's widths to those of the others."""
        return x.astype({"float64": np.float32, "int64": np.int32}.get(str(x.dtype), x.dtype))


class Jax(Numpy):
    xp = jnp
    full = staticmethod(lambda like, shape, value, dtype: jnp.full(shape, value, dtype))

    def tidy(self, x):
        return x


class Torch(Numpy):
    """Of host tensors, and of the bridge's."""

    def full(self, like, shape, value, dtype):
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=like.device)

    def cast(self, x, dtype):
        return x.to(getattr(torch, dtype))

    def arange(self, like, n):
        return torch.arange(n, device=like.device)

    def where(self, b, on, off):
        return torch.where(b, on, off)

    def fill(self, x, b, value):
        return x.masked_fill(b, value)

    def expand(self, x, shape):
        return x.expand(*shape)

    def swap(self, x, a, b):
        return x.transpose(a, b)

    def cat(self, xs, axis):
        return torch.cat(xs, axis)

    def pad(self, x, axis, before, after, value):
        return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - axis) + (before, after), value=value)

    def repeat(self, x, reps):
        return x.repeat(*reps)

    def triangle(self, x, k, lower):
        return (torch.tril if lower else torch.triu)(x, diagonal=k)

    def any(self, x, axis):
        return x.any(axis, keepdim=True)

    def tidy(self, x):
        return x


def is_bool(x) -> bool:
    return str(x.dtype) in ("bool", "torch.bool")


def program(k: Numpy, rng, given: dict, t: int, s: int):
    """`MASKS` random masks. Draws depend on shapes and dtypes alone, so that one seed is one program for all three."""
    full, keys = (B, N, t, s), given["keys"]
    pool = [
        keys[:, None, None, :],
        given["queries"][:, None, :, None],
        given["bias"][None, :, None, :],
        k.arange(keys, t)[None, None, :, None],
        k.arange(keys, s)[None, None, None, :],
        given["lengths"][:, None, None, None] > k.arange(keys, s)[None, None, None, :],
        k.full(keys, (1, 1, t, s), bool(rng.random() < 0.5), "bool"),
    ]
    pool += [pool[0] & pool[1], pool[3] >= pool[4]]

    def draw():
        return pool[-1 - min(int(rng.geometric(0.25)) - 1, len(pool) - 1) if rng.random() < 0.6 else rng.integers(len(pool))]  # fmt: skip

    def flag(x):
        return x if is_bool(x) else x > rng.integers(-3, 4)

    def small():
        x = draw()
        x = k.cast(x, "int32") if is_bool(x) or "float" in str(x.dtype) and rng.random() < 0.5 else x
        return k.where(x < -9, -9, k.where(x > 9, 9, x)) if rng.random() < 0.3 else x

    def square(x):
        return k.expand(x, (*x.shape[:2], t, s))

    def grown(x):
        return k.expand(x, tuple(n if n > 1 or rng.random() < 0.5 else m for n, m in zip(x.shape, full)))

    def number():
        return [0.0, 1.0, -1.0, -1e4, LOWEST, float("-inf"), 0.5][rng.integers(7)]

    def compared():
        a, b, which = small(), small() + int(rng.integers(-2, 3)), rng.integers(6)
        return [a.__lt__, a.__le__, a.__gt__, a.__ge__, a.__eq__, a.__ne__][which](b)

    def cut(x):
        axis = 2 + int(rng.integers(2))
        n, x = full[axis], square(x)
        first = int(rng.integers(0, n))
        last, take = int(rng.integers(first + 1, n + 1)), [slice(None)] * 4
        take[axis] = slice(first, last)
        filled = 1 if is_bool(x) and rng.random() < 0.5 else 0
        return k.pad(x[tuple(take)], axis, first, n - last, bool(filled) if is_bool(x) else filled)

    def joined(x):
        axis, other = 2 + int(rng.integers(2)), draw()
        other = (
            k.cast(other, "bool") if is_bool(x) else k.cast(k.where(flag(other), 1, 0), str(x.dtype).split(".")[-1])
        )
        at, shape = int(rng.integers(0, full[axis] + 1)), np.broadcast_shapes(x.shape[:2], other.shape[:2])
        x, other = (k.expand(y, (*shape, t, s)) for y in (x, other))
        before, after = [slice(None)] * 4, [slice(None)] * 4
        before[axis], after[axis] = slice(0, at), slice(at, full[axis])
        return k.cat([x[tuple(before)], other[tuple(after)]], axis)

    def outer(x):
        if t != s:
            return flag(x) & flag(draw())
        one = k.repeat(flag(x)[:, :, :1], (1, 1, t if x.shape[2] == 1 or rng.random() < 0.5 else 1, 1))
        return one & k.swap(k.expand(one, (*one.shape[:2], t, s)), 2, 3)

    steps = [
        lambda x: flag(x) & flag(draw()),
        lambda x: flag(x) & flag(draw()),
        lambda x: flag(x) & flag(draw()),
        lambda x: flag(x) | flag(draw()),
        lambda x: flag(x) ^ flag(draw()),
        lambda x: ~flag(x),
        lambda x: ~(~flag(x) | ~flag(draw())),
        lambda x: flag(x) * flag(draw()),
        lambda x: small() + small(),
        lambda x: small() - small() * int(rng.integers(-2, 3)),
        lambda x: compared(),
        lambda x: compared(),
        lambda x: k.cast(x, ["bool", "float32", "int32"][rng.integers(3)]),
        lambda x: k.where(flag(x), number(), number()),
        lambda x: k.where(flag(x), flag(draw()), flag(draw())),
        lambda x: k.fill(k.cast(square(x), "float32"), flag(draw()), number()),
        lambda x: k.fill(grown(flag(x)), flag(draw()), bool(rng.random() < 0.5)),
        lambda x: (1 - k.cast(flag(x), "float32")) * [LOWEST, -1e4, -2.0][rng.integers(3)],
        lambda x: grown(x),
        lambda x: k.repeat(x, tuple(m if n == 1 and rng.random() < 0.5 else 1 for n, m in zip(x.shape, full))),
        lambda x: k.swap(k.swap(x, 1, 3)[:, :, :, None][:, :, :, 0], 1, 3),
        lambda x: k.swap(square(x), 2, 3) if t == s else x,
        lambda x: square(x).reshape(-1, t * s).reshape(*x.shape[:2], t, s),
        lambda x: square(x).reshape(*x.shape[:2], t, 1, s)[:, :, :, 0],
        cut,
        joined,
        outer,
        outer,
        lambda x: k.triangle(k.full(keys, (t, s), 1, ["bool", "float32"][rng.integers(2)]), int(rng.integers(-2, 3)), bool(rng.integers(2)))[None, None],  # fmt: skip
        lambda x: flag(k.triangle(square(x), int(rng.integers(-1, 2)), bool(rng.integers(2)))),
        lambda x: k.full(keys, (1, 1, t, s), bool(rng.integers(2)), "bool"),
        lambda x: k.any(flag(x), int(rng.integers(4))),
        lambda x: flag(x) & (k.arange(keys, t)[:, None] - k.arange(keys, s) < int(rng.integers(1, 4))),
    ]  # fmt: skip
    for _ in range(rng.integers(MASKS, 12)):
        pool.append(k.tidy(steps[rng.integers(len(steps))](draw())))
    return [_as_mask(k, rng, x, flag, draw) for x in pool[-MASKS:]]


def _as_mask(k, rng, x, flag, draw):
    """A pool's array in one of the forms in which models give masks: bool, or a bias."""
    form = rng.integers(6)
    if form < 2:
        x = flag(x)
    elif form == 2:
        x = k.where(flag(x), 0.0, float("-inf"))
    elif form == 3:
        x = (1.0 - k.cast(flag(x), "float32")) * [LOWEST, -1e4][rng.integers(2)]
    elif form == 4:
        x = k.cast(k.where(flag(x), 0, 1), "float32") * -1.5 + k.cast(k.where(flag(draw()), 0.0, LOWEST), "float32")
    if not is_bool(x):
        x = k.cast(x, ["float32", "float32", "bfloat16", "float16"][rng.integers(4)])
    shape = x.shape
    while len(shape) > 2 and shape[0] == 1 and rng.random() < 0.3:
        x, shape = x[0], shape[1:]
    return k.tidy(x)


def arguments(rng, t: int, s: int) -> dict[str, np.ndarray]:
    """Values of the model's tensors: at times none or all of the keys are true."""
    share = rng.choice([0.0, 0.6, 0.6, 0.6, 1.0], 2)
    return {
        "keys": rng.random((B, s)) < share[0],
        "queries": rng.random((B, t)) < share[1],
        "lengths": rng.integers(0, s + 1, B).astype(np.int32),
        "bias": rng.integers(-3, 4, (N, s)).astype(np.float32),
    }
