"""Keys of executables on disk: named strings that mean the same in every process and on every machine, compared part by part.

Keys within a process hold objects (`state`): a class is itself. Here a class is its name and where the code of its methods is, a
function its code, a tensor its values. Objects without such words (code of a script, a lock, a model from elsewhere) raise
`NotPortable`: their program is not cached on disk, as a match could not be verified.
"""

import enum
import functools
import json
import types
from dataclasses import dataclass

import numpy as np
import torch
from jax.sharding import PartitionSpec
from torch.utils._pytree import TreeSpec

from ...chips.figures import MIB
from ...weights.checkpoint import FileTensor, values
from ..state import Held, Module, class_version
from .disk_cache import DiskCache
from .sources import NotPortable, code_words, digest, function_of, held_words


SUFFIX = ".executable"
PARTS = {
    "state": "the model's attributes, hooks, processors or adapters",
    "weights": "shapes, dtypes or layout of its weights",
    "numbers": "its adapters",
    "plan": "how its class runs on the path",
    "settings": "TPUConfig",
    "mesh": "the chips or their mesh",
    "compiler": "flags of the compiler",
    "versions": "versions",
    "sources": "the code of diffusers or transformers",
}  # parts of a key, as messages name them
# Entries of configurations about their origin and authors, which do not affect what a forward computes.
ORIGIN = frozenset(
    "_name_or_path name_or_path _commit_hash _diffusers_version transformers_version _use_default_values architectures"
    " _attn_implementation_autoset _from_model_config".split()
)
LARGEST_CONSTANT = 256 * MIB
_PLAIN = (bool, int, complex, str, bytes, type(None), range, slice)
_PLAIN += (torch.dtype, torch.device, torch.Size, torch.layout)
_OF_CLASSES = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __qualname__ __annotations__ __abstractmethods__ __parameters__ __orig_bases__"
    " __hash__ __match_args__ __dataclass_fields__ __dataclass_params__ __annotate__ _abc_impl __static_attributes__"
    " __slotnames__ __annotations_cache__ __annotate_func__ __firstlineno__".split()
)


@dataclass(frozen=True)
class Key:
    """The cache key of an executable: part -> its words, for the module as it is now, chips and versions, and the call."""

    model: str
    of_module: dict[str, str]
    of_call: dict[str, str]

    @property
    def family(self) -> str:
        """The start of the names of all executables for the module as it is."""
        return f"{self.model}-{_digest(self.of_module)}-"

    @property
    def name(self) -> str:
        return f"{self.family}{_digest(self.of_call)}{SUFFIX}"

    @property
    def parts(self) -> dict[str, str]:
        return {"model": self.model, **self.of_module, **self.of_call}

    def family_in(self, cache: DiskCache) -> list["Key"]:
        """Keys of the cached executables for the module as it is, the last used first."""
        known = self.parts.keys()
        calls = [{n: x for n, x in head["key"].items() if n not in known} for head in cache.heads(self.family)]
        return [Key(self.model, self.of_module, of_call) for of_call in calls]

    def differs(self, cache: DiskCache) -> tuple[str, bool] | None:
        """How this key differs from the nearest cached one of the same model and call, and whether that was compiled ahead."""
        found = []
        for head in cache.heads(f"{self.model}-"):
            theirs = {name: (head["key"].get(name), here) for name, here in self.of_module.items()}
            theirs = {name: pair for name, pair in theirs.items() if pair[0] != pair[1]}
            if theirs and all(head["key"].get(name) == here for name, here in self.of_call.items()):
                found.append((theirs, head.get("ahead", False)))
        if not found:
            return None
        theirs, ahead = min(found, key=lambda one: (not one[1], len(one[0])))
        return ", ".join(_named(name, *words) for name, words in theirs.items()), ahead


def _digest(parts: dict[str, str]) -> str:
    return digest(json.dumps(sorted(parts.items())).encode())


def _named(part: str, there: str | None, here: str) -> str:
    """The name of a key's part; for versions also which ones differ."""
    if part != "versions" or there is None:
        return PARTS.get(part, part)
    former, now = (dict(item.split(" ", 1) for item in words.split(", ")) for words in (there, here))
    names = [name for name in {**former, **now} if former.get(name) != now.get(name)]
    differences = (f"{name} {former.get(name, 'none')} there, {now.get(name, 'none')} here" for name in names)
    return f"versions ({', '.join(differences)})"


class StableKey:
    """Turns the objects of one key into words."""

    def __init__(self):
        self._known: dict[int, tuple[tuple, str]] = {}

    def of(self, x) -> str:
        """The words of x: equal for equal objects, also between processes. Raises NotPortable."""
        if isinstance(x, enum.Enum):
            return f"{_class_words(type(x))}.{x.name}"
        if type(x) is float or isinstance(x, _PLAIN):
            return repr(x)
        if isinstance(x, tuple):
            return self._tuple(x)
        if isinstance(x, (frozenset, set)):
            return "{" + ", ".join(sorted(map(self.of, x))) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(self.of, x)) + "]"
        if isinstance(x, dict):
            return "{" + ", ".join(f"{self.of(k)}: {self.of(v)}" for k, v in x.items()) + "}"
        if isinstance(x, Held):
            return self.of(x.thing)
        if isinstance(x, type):
            return _class_words(x)
        if isinstance(x, types.CodeType):
            return code_words(x)
        if isinstance(x, functools.partial):
            return f"partial({self.of(x.func)}, {self.of(x.args)}, {self.of(x.keywords)})"
        if isinstance(x, (np.ndarray, np.generic)):
            return f"array({x.dtype.str}, {x.shape}, {digest(x.tobytes())})"
        if isinstance(x, torch.Tensor):
            return _tensor(x)
        if isinstance(x, torch.Generator):
            return f"Generator({x.device})"
        if isinstance(x, (TreeSpec, PartitionSpec, types.BuiltinFunctionType)) and " at 0x" not in repr(x):
            return repr(x)
        found = function_of(x)  # without its defaults, which are read on their own where they count
        if found is None:
            raise NotPortable(f"a {type(x).__module__}.{type(x).__qualname__}: {x!r:.80}")
        return code_words(found.__code__)

    def _tuple(self, x: tuple) -> str:
        if id(x) not in self._known:
            # What is beside a class or a module is its version, which means nothing in another process.
            if len(x) == 2 and isinstance(x[0], Held) and isinstance(x[0].thing, type):
                text = _class_words(x[0].thing)
            elif len(x) == 2 and isinstance(x[0], Module):
                text = str(x[0])
            else:
                text = "(" + ", ".join(self.of(item) for item in x if not _names_origin(item)) + ")"
            if len(text) > 200:  # of a class, say, which every module repeats
                text = digest(text.encode())
            self._known[id(x)] = x, text  # with x, so that nothing else gets its id
        return self._known[id(x)][1]


def _names_origin(item) -> bool:
    """Whether an item (name, value) of a configuration says where it came from; the name is ("name") or (str, "name")."""
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    name = item[0][1] if isinstance(item[0], tuple) and len(item[0]) == 2 and item[0][0] is str else item[0]
    return isinstance(name, str) and name in ORIGIN


def _tensor(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.device.type != "cpu" or tensor.nbytes > LARGEST_CONSTANT:
        raise NotPortable(f"a tensor {[*tensor.shape]} on {tensor.device}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, FileTensor):
        raise NotPortable(f"a {type(tensor).__name__}")
    raw = values(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor({tensor.dtype}, {[*tensor.shape]}, {digest(raw)})"


def _class_words(cls: type) -> str:
    return _words_of(cls, class_version(cls))


@functools.cache
def _words_of(cls: type, version: dict) -> str:
    """A class's name, and a digest of its attributes. `version`: which state of these attributes this is, for the cache."""
    held = [(name, held_words(value)) for name, value in sorted(vars(cls).items()) if name not in _OF_CLASSES]
    return f"{cls.__module__}.{cls.__qualname__}<{digest(repr(held).encode())}>"
