"""The key of an executable on disk: named strings, so that two keys can be compared part by part."""

import hashlib
import json
from dataclasses import dataclass

from .disk_cache import DiskCache


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
}  # of a key, for those who read of it


@dataclass(frozen=True)
class Key:
    """The cache key of an executable.

    Attributes:
        of_module: part -> its words, of the module as it is now, of chips and versions.
        of_call: the same of the call.
    """

    model: str
    of_module: dict[str, str]
    of_call: dict[str, str]

    @property
    def family(self) -> str:
        """The start of the names of all executables of the module as it is."""
        return f"{self.model}-{_digest(self.of_module)}-"

    @property
    def name(self) -> str:
        return f"{self.family}{_digest(self.of_call)}{SUFFIX}"

    @property
    def parts(self) -> dict[str, str]:
        return {"model": self.model, **self.of_module, **self.of_call}

    def family_in(self, cache: DiskCache) -> list["Key"]:
        """Keys of the cached executables of the module as it is, the last used first."""
        known = self.parts.keys()
        calls = [{n: x for n, x in head["key"].items() if n not in known} for head in cache.heads(self.family)]
        return [Key(self.model, self.of_module, of_call) for of_call in calls]

    def differs(self, cache: DiskCache) -> tuple[str, bool] | None:
        """How this key differs from the nearest cached one of the same model and call, and whether that was made ahead of a run."""
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
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()[:16]


def _named(part: str, there: str | None, here: str) -> str:
    """A part of a key by name; of versions, which."""
    if part != "versions" or there is None:
        return PARTS.get(part, part)
    former, now = (dict(item.split(" ", 1) for item in words.split(", ")) for words in (there, here))
    names = [name for name in {**former, **now} if former.get(name) != now.get(name)]
    differences = (f"{name} {former.get(name, 'none')} there, {now.get(name, 'none')} here" for name in names)
    return f"versions ({', '.join(differences)})"
