"""Values that are equal in all processes of a run: compared through the key-value store of JAX's runtime, or set by the first one.

Each exchange has a number, the same in all processes, as they run the same script. The first process gathers the values of all and
distributes them. It waits for slow processes, but not for dead ones (`watch`).
"""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from ...common import notices
from . import watch


PREFIX = "diffusers_tpu"
ONE_WAIT = 5.0  # seconds between checks that the other process is still there
WORTH_A_WORD = 60.0

_client = None
_number, _count, _exchanges = 0, 1, 0
_names: tuple[str, ...] = ()


def start(client, number: int, count: int, own: str | None = None) -> tuple[str, ...]:
    """Exchanges go through JAX's client from here on. Returns the names of all processes by number; `own`: this one's."""
    global _client, _number, _count, _exchanges, _names
    _client, _number, _count, _exchanges = client, number, count, 0
    _names = () if own is None else tuple(_exchanged("its name", own))
    return _names


def of_first(value: str) -> str:
    """The `value` of the first process, in every process; without other processes `value` itself."""
    return value if _client is None else _exchanged("a value", value if _number == 0 else "")[0]


def agree(what: str, parts: Mapping[str, str]):
    """Compares named digests of what must be equal in all processes; does nothing without others. `what`: what every process has
    reached, such as a call of a pipeline. Raises RuntimeError in all of them, with the process and the names that differ."""
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
    """Whether all processes have reached `what` with the same `own`; True without other processes."""
    return _client is None or len(set(_exchanged(what, json.dumps([what, {"": own}])))) == 1


def alike(what: str, arguments: Mapping[str, object]):
    """Before a call, if there are other processes: checks that arguments are equal (raises as `agree`), equalises random states."""
    if _client is not None:
        agree(what, {name: digest(value) for name, value in arguments.items()})
        same_draws()


def same_draws():
    """Sets the random states of torch, numpy and Python to those of the first process."""
    mine = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    state, of_numpy, of_python = json.loads(of_first(json.dumps(mine, default=lambda values: values.tolist())))
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
    np.random.set_state(of_numpy)
    random.setstate((of_python[0], tuple(of_python[1]), of_python[2]))


def digest(tree) -> str:
    """A digest of host tensors, arrays, pictures and plain values, and generators' states, and of the keys and lists that they are in; of
    other leaves only the class."""
    total = hashlib.sha256()
    for path, leaf in tree_leaves_with_path(tree):
        total.update(keystr(path).encode() + _bytes(leaf))
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
    """The values of all processes: the first one gathers and distributes them."""
    global _exchanges
    _exchanges += 1
    here = f"{PREFIX}/{_exchanges}"
    if _number:
        _client.key_value_set(f"{here}/{_number}", own)
        return json.loads(_waited_for(f"{here}/all", 0, what))
    said = [own, *(_waited_for(f"{here}/{number}", number, what) for number in range(1, _count))]
    _client.key_value_set(f"{here}/all", json.dumps(said))
    _client.key_value_delete(f"{PREFIX}/{_exchanges - 1}/")  # processes that have sent a value now have read it
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
