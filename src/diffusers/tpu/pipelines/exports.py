"""Exports of the modules beside upstream's: `NAME_flax` exports every name of upstream's `NAME`."""

import importlib.util
from collections.abc import Callable


def upstream_names(module: str) -> Callable:
    """`__getattr__` for the module of this name. Names that it does not define come from upstream's module, `Flax...` from
    `NAME_nnx_flax`; pipelines of upstream's module install themselves."""
    upstream = module.removesuffix("_flax")
    in_jax = f"{upstream}_nnx_flax"

    def __getattr__(name: str):
        is_flax = name.startswith("Flax") and importlib.util.find_spec(in_jax) is not None
        found = getattr(importlib.import_module(in_jax if is_flax else upstream), name)
        if name.endswith("Pipeline") and found.__module__ == upstream:
            from .pipeline import self_installing

            return self_installing(found, module)
        return found

    return __getattr__
