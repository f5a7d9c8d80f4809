"""Names of the programs behind many questions, from traces without compilation. `make records` compares them with those of its rows."""

import gc
import json
from collections.abc import Callable
from pkgutil import resolve_name

import jax

from diffusers.tpu.planner import Question
from diffusers.tpu.planner.aot import BadRequest, run_in_child


def programs_of(
    questions: list[Question], seconds: float = 3600, on_progress: Callable[[str], None] = lambda text: None
) -> list[dict | None]:
    """Returns the `programs` and `reader` that the answer to each question would have; None for a question that is refused.

    A kept answer with equal `programs` and `reader` is still valid, whatever else of the sources has changed.
    """
    asked = [json.dumps([question.function, question.request], sort_keys=True) for question in questions]
    distinct = [*dict.fromkeys(asked)]
    request = {"questions": [json.loads(text) for text in distinct]}
    found = run_in_child(f"{__name__}:names", request, seconds=seconds, on_progress=on_progress)
    named = dict(zip(distinct, found["programs"]))
    return [named[text] for text in asked]


def names(request: dict, progress: Callable) -> dict:
    """Runs in the compiler's process. Calls the function of each of `questions`, [function, request], with `named` in the request."""
    named = []
    for number, (function, asked) in enumerate(request["questions"], 1):
        progress(f"{number} of {len(request['questions'])}: {function} {asked}")
        try:
            named.append(resolve_name(function)({**asked, "named": True}, lambda text: None))
        except BadRequest:
            named.append(None)
        jax.clear_caches()
        gc.collect()
    return {"programs": named}
