"""What all processes of a run have alike: compared through the key-value store of JAX's runtime, or told by the first one.

Each exchange has a number, the same in all processes, as they run the same script. The first one gathers what all say and tells
them; it waits for those that are slower, not for the dead (`watch`).
"""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ...common import notices
from . import watch


PREFIX = "diffusers_tpu"
ONE_WAIT = 5.0  # seconds, after which is looked whether who is waited for is still there
WORTH_A_WORD = 60.0

_client = None
_number, _count, _exchanges = 0, 1, 0
_names: tuple[str, ...] = ()


def start(client, number: int, count: int, own: str | None = None) -> tuple[str, ...]:
    """Exchanges go through JAX's client from here on; the name of every process, by its number. `own`: this one's."""
    global _client, _number, _count, _exchanges, _names
    _client, _number, _count, _exchanges = client, number, count, 0
    _names = () if own is None else tuple(_exchanged("its name", own))
    return _names


def of_first(value: str) -> str:
    """What the first process says, in every process; `value` itself where this one is alone."""
    return value if _client is None else _exchanged("a value", value if _number == 0 else "")[0]


def agree(what: str, parts: Mapping[str, str]):
    """Compare digests of what all processes are to have alike, by name; nothing where this one is alone. `what`: what every process has
    come to, such as a call of a pipeline. Raises RuntimeError, in all of them: who has what otherwise."""
    if _client is None:
        return
    said = [json.loads(text) for text in _exchanged(what, json.dumps([what, dict(parts)]))]
    for number, (where, digests) in enumerate(said):
        if where != said[0][0]:
            raise RuntimeError(
                f"expected all processes to do the same, got {said[0][0]} in {_name(0)} and {where} in {_name(number)}. Every"
                " process runs the same script on the same arguments: only what happens between calls may differ"
            )
        if names := [name for name in {**said[0][1], **digests} if digests.get(name) != said[0][1].get(name)]:
            raise RuntimeError(
                f"expected {what} to be the same in all processes, got another {', '.join(names)} in {_name(number)} than in"
                f" {_name(0)}. Give all processes the same arguments, seeds, packages and files"
            )


def same(what: str, own: str) -> bool:
    """Whether all processes say the same of what they have come to; true where this one is alone."""
    return _client is None or len(set(_exchanged(what, json.dumps([what, {"": own}])))) == 1


def alike(what: str, arguments: Mapping[str, object]):
    """Before a call: its arguments are alike in all processes, and what it draws will be. Nothing where this one is alone."""
    if _client is not None:
        agree(what, {name: digest(value) for name, value in arguments.items()})
        same_draws()


def same_draws():
    """The random states of torch, numpy and Python are the first process's from here on."""
    mine = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    state, of_numpy, of_python = json.loads(of_first(json.dumps(mine, default=lambda values: values.tolist())))
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
    np.random.set_state(of_numpy)
    random.setstate((of_python[0], tuple(of_python[1]), of_python[2]))


def digest(tree) -> str:
    """Of the values of host tensors, arrays, pictures and plain values, and of where generators are; of the rest, what it is."""
    total = hashlib.sha256()
    for leaf in tree_leaves(tree):
        total.update(_bytes(leaf))
    return total.hexdigest()


def _bytes(leaf) -> bytes:
    kind = type(leaf).__qualname__.encode()
    if isinstance(leaf, torch.Generator):
        return kind + leaf.get_state().numpy().tobytes()
    if isinstance(leaf, torch.Tensor):
        about = f"{tuple(leaf.shape)} {leaf.dtype}".encode()
        plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu"
        return about + (leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain else b"")
    if isinstance(leaf, (str, bytes, int, float, complex, bool, type(None))):
        return kind + repr(leaf).encode()
    if isinstance(leaf, np.ndarray) or hasattr(leaf, "__array_interface__"):
        values = np.asarray(leaf)
        return f"{values.shape} {values.dtype}".encode() + np.ascontiguousarray(values).tobytes()
    return kind


def _exchanged(what: str, own: str) -> list[str]:
    """What every process says: the first one gathers it, and tells all."""
    global _exchanges
    _exchanges += 1
    here = f"{PREFIX}/{_exchanges}"
    if _number:
        _client.key_value_set(f"{here}/{_number}", own)
        return json.loads(_waited_for(f"{here}/all", 0, what))
    said = [own, *(_waited_for(f"{here}/{number}", number, what) for number in range(1, _count))]
    _client.key_value_set(f"{here}/all", json.dumps(said))
    _client.key_value_delete(f"{PREFIX}/{_exchanges - 1}/")  # who said something now has read it
    return said


def _waited_for(key: str, number: int, what: str) -> str:
    import jax

    waited = 0.0
    while True:
        try:
            return _client.blocking_key_value_get(key, int(1000 * ONE_WAIT))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        waited += ONE_WAIT
        watch.still_there(number, what)
        if waited % WORTH_A_WORD < ONE_WAIT:
            notices.warn(f"{what}: waits for {_name(number)} since {waited:.0f} s")


def _name(number: int) -> str:
    return _names[number] if _names else f"process {number}"
