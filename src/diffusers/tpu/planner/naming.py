"""Of which programs the answers to many questions would be, in the compiler's process: `answer` is what `planner.programs_of` asks.

A question with `named` in its request is traced and lowered as it is otherwise, and answered by the names of what would be
compiled.
"""

import gc
from collections.abc import Callable

import jax

from .aot import BadRequest, function_of


def answer(request: dict, progress: Callable) -> dict:
    """For each of `questions`, [function, request], its `programs` and `reader`; None for one that has no answer."""
    named = []
    for number, (function, asked) in enumerate(request["questions"], 1):
        progress(f"{number} of {len(request['questions'])}: {function} {asked}")
        try:
            named.append(function_of(function)({**asked, "named": True}, lambda text: None))
        except BadRequest:
            named.append(None)
        jax.clear_caches()
        gc.collect()
    return {"programs": named}
