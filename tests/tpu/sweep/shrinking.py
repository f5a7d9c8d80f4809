"""Tiny models of upstream's classes: of `sizes.json`, what a constructor takes by the names of its parameters, and what a class needs.

Every width of text is `WIDTH`, every head 16 wide, and heads times their width is `WIDTH` again, so that models of one pipeline fit
each other without knowing of each other.
"""

import contextlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path

import torch

import tiny as parts


SIZES = json.loads(Path(__file__).with_name("sizes.json").read_text())
BY_NAME, BY_CLASS = SIZES["by_name"], SIZES["by_class"]
LARGEST = 10_000_000  # parameters


def tiny(cls: type, **changes) -> torch.nn.Module:
    """A tiny model of this class with random weights; `changes` are what it is given beside what its class and names say."""
    takes = inspect.signature(cls.__init__).parameters
    of_class = BY_CLASS.get(cls.__name__, {})  # several share what some of them do not take
    wanted = {**{name: value for name, value in of_class.items() if name in takes}, **changes}
    for name, parameter in takes.items():
        if name in BY_NAME and parameter.default is not None:  # None: off
            wanted.setdefault(name, BY_NAME[name])
    return small(lambda: cls(**wanted).eval(), cls)


def of_transformers(cls: type, **changes) -> torch.nn.Module:
    """The same of transformers': a class without a row has of its configuration what `of_language_models` knows by name."""
    config, wanted = cls.config_class, SIZES["of_transformers"].get(cls.__name__)
    if wanted is None:
        known = inspect.signature(config.__init__).parameters.keys() | vars(config()).keys()
        wanted = {name: value for name, value in SIZES["of_language_models"].items() if name in known}
    wanted = {name: parts.id_of(value) if value in parts.SPECIALS else value for name, value in wanted.items()}
    if "text_config" in wanted:
        changes = {"text_config": {**wanted["text_config"], **changes}}
    return small(lambda: cls(config(**{**wanted, **changes})).eval(), cls)


def small(make: Callable[[], torch.nn.Module], cls: type) -> torch.nn.Module:
    """What `make` makes, filled; it is first made without memory. Raises TypeError where it would not be tiny."""
    with contextlib.suppress(RuntimeError, NotImplementedError), torch.device("meta"):  # constructors that want values
        numbers = sum(parameter.numel() for parameter in make().parameters())
        if numbers > LARGEST:
            raise TypeError(
                f"expected a tiny model, got {numbers / 1e6:.0f} million parameters: of {cls.__name__} too little is known"
            )
    return filled(make())


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """The model; parameters that upstream begins with one number all over, or leaves as memory is, have values of their own.

    What begins with zeros (a ControlNet's last layers, gates of a block) would hide what comes before it.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            uneven = not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3
            if uneven or (parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all()):
                one = 1.0 if not uneven and parameter.flatten()[0] == 1 else 0.0
                parameter.copy_(one + 0.2 * torch.randn_like(parameter))
    return model
