"""Wrong and odd arguments, drawn: of pipelines' calls, of models' methods, of what sets the TPU path up.

What is drawn is said in words, and made anew each time that it is asked for: a call may write to its arguments.
"""

import dataclasses
import inspect

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import tiny
from conftest import table
from diffusers import tpu


def _raises(*_):
    raise KeyError("a callback's own error")


CALLBACKS = {
    "other latents": lambda pipe, step, time, tensors: {"latents": tensors["latents"][..., :-1]},
    "no answer": lambda *_: None,
    "an unknown answer": lambda *_: {"nonsense": 1},
    "scaled latents": lambda pipe, step, time, tensors: {"latents": tensors["latents"] * 0.5},
    "raises": _raises,
}
# Python's expressions: values of arguments, what becomes of a tensor `t`, settings, and calls that set a `pipe` up.
TABLE = table("call_faults")
VALUES, CONFIGS = ({key: eval(row) for key, row in TABLE[name].items()} for name in ("values", "configs"))
ODD, SETUPS = TABLE["odd"], TABLE["setups"]
LATENTS = {
    "wan": (1, 16, 2, 4, 6), "sd": (1, 4, 16, 16), "flux": (1, 64, 4), "cogvideox": (1, 2, 4, 4, 4), "hunyuan15": (1, 4, 2, 2, 3),
}  # fmt: skip
EMBEDS = {"wan": (1, 24, 32), "flux": (1, 16, 32), "cogvideox": (1, 16, 32), "hunyuan15": (1, 20, 32)}


def odd(name: str, t: torch.Tensor):
    return eval(ODD[name], {"t": t, "torch": torch})


def pick(rng, some):
    some = [*some]
    return some[int(rng.integers(len(some)))]


def _odd(rng, shape) -> tuple[str, object]:
    name, seed = pick(rng, ODD), int(rng.integers(1 << 30))
    return name, lambda: odd(name, torch.randn(shape, generator=tiny.fresh(seed)))


def _value(rng, name: str, kind: str) -> tuple[str, object]:
    if name == "latents":
        return _odd(rng, LATENTS[kind])
    if name == "pooled_prompt_embeds":
        return _odd(rng, (1, 32))
    if VALUES[name] is None:
        return _odd(rng, EMBEDS.get(kind, (1, 16, 32)))
    value = pick(rng, VALUES[name])
    if name == "generator":
        return str(value()), value
    return getattr(value, "__name__", repr(value)[:60]), lambda: value


def of_a_pipeline(rng, subject) -> tuple[str, object]:
    """In words, and a function that makes the arguments of a call."""
    takes = inspect.signature(type(subject.theirs).__call__).parameters
    names = [name for name in VALUES if name in takes or name == "nonsense"]
    kind = subject.name
    chosen = [pick(rng, names) for _ in range(1 if rng.random() < 0.7 else 2)]
    drawn = {name: _value(rng, name, kind) for name in chosen}
    without_prompt = "prompt_embeds" in drawn and rng.random() < 0.8

    def change() -> dict:
        given = {**subject.given, **{name: make() for name, (_, make) in drawn.items()}}
        if without_prompt and "prompt" not in drawn:
            given["prompt"] = None
        return given

    return ", ".join(f"{name}: {words}" for name, (words, _) in drawn.items()) + " no prompt" * without_prompt, change


def of_a_model(rng, call, signature) -> tuple[str, object]:
    """In words, and a function that makes the call."""
    leaves, spec = tree_flatten((call.args, call.kwargs))
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    way = rng.random()
    if way < 0.12:
        name = pick(rng, [*signature.parameters, "nonsense"])
        value = pick(rng, (None, "text", 5, {"scale": 2.0}, [1], torch.zeros(1)))
        return f"{name}={value}", lambda: dataclasses.replace(call, kwargs={**call.kwargs, name: value})
    if way < 0.18:
        shorter = {"args": call.args[1:]} if call.args else {"kwargs": dict([*call.kwargs.items()][1:])}
        return "without its first argument", lambda: dataclasses.replace(call, **shorter)
    some = rng.choice(tensors, min(len(tensors), 1 + int(way > 0.8)), replace=False)
    chosen = {int(n): pick(rng, ODD) for n in some}

    def change():
        made = [odd(chosen[n], leaf.clone()) if n in chosen else leaf for n, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(made, spec)
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return ", ".join(f"tensor {n} {tuple(leaves[n].shape)}: {words}" for n, words in chosen.items()), change


def of_the_setup(rng, pipe) -> tuple[str, object]:
    """In words, and a function that does it."""
    if rng.random() < 0.4:
        name = pick(rng, SETUPS)
        return name, lambda: eval(SETUPS[name], {"pipe": pipe, "tpu": tpu})
    name = pick(rng, CONFIGS)
    value = pick(rng, CONFIGS[name])
    return f"TPUConfig({name}={value!r})", lambda: tpu.install(pipe, tpu.TPUConfig(**{name: value}))
