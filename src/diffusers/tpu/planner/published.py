"""Configurations of published models, from which the real pipelines can be built offline. `models/` has one file per family.

A file has `parts`, configurations by name, and `models`, by id. "$NAME" refers to a part. An object with "like": NAME is that part,
with the object's other keys overriding the part's. Every file may refer to the parts of `shared.json`. Figures come from
upstream's conversion scripts, its classes' defaults (diffusers 0.42.1, transformers 5.23), published configs and cards.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


FOLDER = Path(__file__).with_name("models")


@dataclass(frozen=True)
class Configuration:
    """A pipeline's class, components and settings, and the call of its model card.

    `components`: name -> (class, configuration). The configuration goes to `from_config` of a diffusers class, `config_class` of a
    transformers model, or `__init__` of an image processor. Components that the model lacks are left out.
    """

    pipeline: str  # its class in diffusers
    components: dict[str, tuple[str, dict]]
    settings: dict = field(default_factory=dict)  # further arguments of the pipeline's `__init__`
    call: dict = field(default_factory=dict)  # the card's arguments without a prompt; "image": a placeholder
    tokens: dict[str, int] = field(default_factory=dict)  # that each tokenizer pads to in this call, or its maximum
    tiled: bool = False  # whether the card's script decodes in tiles
    billions: dict[str, float] = field(default_factory=dict)  # parameters of components, as the authors state them
    directory: str | None = None  # where it was read from; None: `models/`


def _resolve(value, parts: dict):
    """The value with every reference replaced by its part."""
    if isinstance(value, str) and value.startswith("$"):
        return _resolve(parts[value[1:]], parts)
    if isinstance(value, list):
        return [_resolve(item, parts) for item in value]
    if isinstance(value, dict):
        base = _resolve(parts[value["like"]], parts) if "like" in value else {}
        return base | {name: _resolve(item, parts) for name, item in value.items() if name != "like"}
    return value


def _read_models() -> Iterator[tuple[str, list[str], Configuration]]:
    """Id, aliases and configuration of each model."""
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
