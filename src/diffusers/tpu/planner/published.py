"""Configurations of published models, a file a family in `models/`: enough to build the real pipelines offline.

A file has `parts`, configurations by name, and `models`, by id. "$NAME" is that part; an object with "like": NAME is that
part with the object's other keys in place of the part's. Names of `shared.json` are known in every file. Figures come from
upstream's conversion scripts, its classes' defaults (diffusers 0.42.1, transformers 5.23), published configs and cards.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


FOLDER = Path(__file__).with_name("models")


@dataclass(frozen=True)
class Configuration:
    """What a pipeline is made of.

    `components`: name -> (class, configuration): of a diffusers class as `from_config` takes it, of a transformers model as its
    `config_class`, of an image processor as its `__init__`. What the model leaves out is not there.
    """

    pipeline: str  # its class in diffusers
    components: dict[str, tuple[str, dict]]
    settings: dict = field(default_factory=dict)  # further arguments of the pipeline's `__init__`
    call: dict = field(default_factory=dict)  # of its model card; a prompt stands in, and a picture for "image"
    tokens: dict[str, int] = field(default_factory=dict)  # of text that each tokenizer pads to in it, or at most
    tiled: bool = False  # the card's script decodes in tiles
    billions: dict[str, float] = field(default_factory=dict)  # parameters of components, as the authors state them
    directory: str | None = None  # where it was read from; None: `models/`


def _resolve(value, parts: dict):
    """The value with every reference to a part replaced."""
    if isinstance(value, str) and value.startswith("$"):
        return _resolve(parts[value[1:]], parts)
    if isinstance(value, list):
        return [_resolve(item, parts) for item in value]
    if isinstance(value, dict):
        base = _resolve(parts[value["like"]], parts) if "like" in value else {}
        return base | {name: _resolve(item, parts) for name, item in value.items() if name != "like"}
    return value


def _read_models() -> Iterator[tuple[str, list[str], Configuration]]:
    """Id, other names and configuration of each."""
    shared = json.loads((FOLDER / "shared.json").read_text())["parts"]
    for path in sorted(FOLDER.glob("*.json")):
        family = json.loads(path.read_text())
        for name, row in family.get("models", {}).items():
            facts = _resolve(row, shared | family.get("parts", {}))
            aliases, _ = facts.pop("aliases"), facts.pop("source")
            facts["components"] = {key: tuple(value) for key, value in facts["components"].items()}
            yield name, aliases, Configuration(**facts)


_READ = [*_read_models()]
MODELS = {name: configuration for name, _, configuration in _READ}
ALIASES = {alias: name for name, aliases, _ in _READ for alias in aliases}
