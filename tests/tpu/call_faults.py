"""Wrong and odd arguments, drawn: of pipelines' calls, of models' methods, of what sets the TPU path up.

What is drawn is said in words, and made anew each time that it is asked for: a call may write to its arguments.
"""

import dataclasses
import inspect

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import tiny
from diffusers import tpu


def _raises(*_, **__):
    raise KeyError("a callback's own error")


def _given(answer):
    return lambda pipe, step, time, tensors: answer(tensors)


CALLBACKS = {
    "other latents": _given(lambda tensors: {"latents": tensors["latents"][..., :-1]}),
    "no answer": _given(lambda tensors: None),
    "an unknown answer": _given(lambda tensors: {"nonsense": 1}),
    "scaled latents": _given(lambda tensors: {"latents": tensors["latents"] * 0.5}),
    "raises": _raises,
}
SIZES = (0, -8, 7, 33, 32.0, "32", None, [32], True, 40, 64)
COUNTS = (0, -1, 2, 3, 1.5, "2", None, [1])
VALUES = {
    "height": SIZES,
    "width": SIZES,
    "num_frames": (0, -1, 1, 2, 5.0, "5", None, 9),
    "num_inference_steps": (0, -1, 1, 2.5, "2", None, [2]),
    "guidance_scale": ("4", None, float("nan"), float("inf"), [4.0], -1.0, 0, torch.tensor(3.0), 1.0),
    "guidance_rescale": ("a", 0.5, None),
    "prompt": (None, 5, "", [], ["a red", "circle moving"], "é \N{SNOWMAN} \0", b"red", ("a", "b"), "left " * 60, [None]),
    "negative_prompt": (5, ["a", "b", "c"], "red", [], b"left", ["red"]),
    "num_images_per_prompt": COUNTS,
    "num_videos_per_prompt": COUNTS,
    "max_sequence_length": (0, -1, 3, 10_000, "16", 16.0, None),
    "output_type": ("xyz", None, 5, "latent", "pt", "pil"),
    "return_dict": (False, None, "yes"),
    "callback_on_step_end": (*CALLBACKS.values(), "callback", 5),
    "callback_on_step_end_tensor_inputs": (["nonsense"], "latents", None, [], 5, ["prompt_embeds", "latents"]),
    "attention_kwargs": ("scale", {"scale": "a"}, {"nonsense": 1}, {"scale": 0.5}, 5),
    "cross_attention_kwargs": ("scale", {"scale": "a"}, {"nonsense": 1}, 5),
    "joint_attention_kwargs": ("scale", {"scale": "a"}, {"nonsense": 1}, 5),
    "sigmas": ([], ["a", "b"], [1.0, 0.5], 5, [float("nan"), 0.5], [0.0, 1.0, 2.0]),
    "timesteps": ([], ["a"], [900, 100], 5, [100, 900], [10_000, 5]),
    "eta": ("a", 0.5, None, -1.0),
    "clip_skip": (1, 99, -1, "a", 1.5),
    "use_dynamic_cfg": (True, "a"),
    "nonsense": (1,),
    "generator": (lambda: [tiny.fresh(5)] * 3, lambda: "seed", lambda: 5, lambda: [tiny.fresh(5)], lambda: []),
    "latents": None,
    "prompt_embeds": None,
    "negative_prompt_embeds": None,
    "pooled_prompt_embeds": None,
}  # fmt: skip
LATENTS = {
    "wan": (1, 16, 2, 4, 6), "sd": (1, 4, 16, 16), "flux": (1, 64, 4), "cogvideox": (1, 2, 4, 4, 4), "hunyuan15": (1, 4, 2, 2, 3),
}  # fmt: skip
EMBEDS = {"wan": (1, 24, 32), "flux": (1, 16, 32), "cogvideox": (1, 16, 32), "hunyuan15": (1, 20, 32)}

ODD = {
    "as it should be": lambda t: t,
    "None": lambda t: None,
    "a text": lambda t: "tensor",
    "a number": lambda t: 3,
    "numpy": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "int64": lambda t: t.long(),
    "int32": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "on meta": lambda t: t.to("meta"),
    "NaN": lambda t: t * float("nan"),
    "infinite": lambda t: t.float() + float("inf"),
    "negative": lambda t: -1 - t,
    "three times": lambda t: t * 3,
    "a leading axis more": lambda t: t[None],
    "a last axis more": lambda t: t[..., None],
    "its first only": lambda t: t[0] if t.ndim else t,
    "twice the batch": lambda t: torch.cat([t, t]) if t.ndim else t.expand(2),
    "three of the batch": lambda t: torch.cat([t] * 3) if t.ndim else t.expand(3),
    "a last entry more": lambda t: torch.cat([t, t[..., :1]], -1) if t.ndim else t,
    "a last entry less": lambda t: t[..., :-1] if t.ndim else t,
    "one more along the second axis": lambda t: torch.cat([t, t[:, :1]], 1) if t.ndim > 1 else t,
    "one less along the second axis": lambda t: t[:, :-1] if t.ndim > 1 else t,
    "nothing along the second axis": lambda t: t[:, :0] if t.ndim > 1 else t[:0] if t.ndim else t,
    "an empty batch": lambda t: t[:0] if t.ndim else t,
    "its axes turned round": lambda t: t.permute(*reversed(range(t.ndim))),
    "flat": lambda t: t.flatten(),
    "with a gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    "not contiguous": lambda t: torch.stack([t, t], -1)[..., 0],
}


def pick(rng, some):
    some = [*some]
    return some[int(rng.integers(len(some)))]


def _odd(rng, shape) -> tuple[str, object]:
    name, seed = pick(rng, ODD), int(rng.integers(1 << 30))
    return name, lambda: ODD[name](torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


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
        made = [ODD[chosen[n]](leaf.clone()) if n in chosen else leaf for n, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(made, spec)
        return dataclasses.replace(call, args=args, kwargs=kwargs)

    return ", ".join(f"tensor {n} {tuple(leaves[n].shape)}: {words}" for n, words in chosen.items()), change


CONFIGS = {
    "mesh": ((3, 3), "2,4", (0, 1, 8), (64, 1, 1), 5, (1.5, 1, 1), (2, 8, 1), [None] * 3, {"dp": 2}, (-1, 1, 1), "a,b,c"),
    "glue": ("device", None, 5),
    "matmul_precision": ("low", None, torch.float32),
    "convolution_precision": ("fastest", 5, ["high"]),
    "attention": ("flash", None, 5, ["kernel"], {}),
    "attention_blocks": ((128,), (0, 1, 1), "auto", (128, 100, 64), 5, (1.5, 2, 2)),
    "attention_window": ((1,), (-1, 2), "all", 5, (0.5, 1)),
    "attention_ring": (0, -1, 1.5, "2", 64),
    "layers": ("fast", None, 3),
    "host": (("nonsense",), (5,), 5, "nonsense", None),
    "hbm_gib": (-1, "16", float("nan"), [1]),
    "reserve_gib": (-1, "all", float("nan")),
    "scan": ("yes", None, 5),
    "attention_smoothing": ("no", None, 2),
    "attention_tally": ("yes", None),
    "sparse_cores": ("off", None),
    "nonsense": (1,),
}  # fmt: skip
SETUPS = {
    "install of a text": lambda pipe: tpu.install("pipe"),
    "install of None": lambda pipe: tpu.install(None),
    "install of a class": lambda pipe: tpu.install(type(pipe)),
    "install of a scheduler": lambda pipe: tpu.install(pipe.scheduler),
    "install with a dictionary": lambda pipe: tpu.install(pipe, {"mesh": (1, 1, 1)}),
    "install with a text": lambda pipe: tpu.install(pipe, "2,4,1"),
    "report of a text": lambda pipe: tpu.report("pipe"),
    "report of None": lambda pipe: tpu.report(None),
    "report of a scheduler": lambda pipe: tpu.report(pipe.scheduler),
    "explain of a number": lambda pipe: tpu.explain(5),
    "explain of a class": lambda pipe: tpu.explain(type(pipe)),
    "uninstall of a text": lambda pipe: tpu.uninstall("pipe"),
    "uninstall of a model of a pipeline": lambda pipe: tpu.uninstall(pipe.vae),
    "to mps": lambda pipe: pipe.to("mps"),
    "to nonsense": lambda pipe: pipe.to("nonsense"),
    "to a list": lambda pipe: pipe.to(["cuda"]),
    "to a number with a point": lambda pipe: pipe.to(1.5),
}


def of_the_setup(rng, pipe) -> tuple[str, object]:
    """In words, and a function that does it."""
    if rng.random() < 0.4:
        name = pick(rng, SETUPS)
        return name, lambda: SETUPS[name](pipe)
    name = pick(rng, CONFIGS)
    value = pick(rng, CONFIGS[name])
    return f"TPUConfig({name}={value!r})", lambda: tpu.install(pipe, tpu.TPUConfig(**{name: value}))
