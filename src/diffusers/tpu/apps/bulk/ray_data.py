"""Bulk work by Ray Data: one actor per slice takes prompts when it is free; an actor that dies is restarted.

Ray assigns prompts to actors; the directory's records and locks work as without Ray. All hosts see one directory and one model.
"""

import os
from collections.abc import Callable
from dataclasses import asdict

import ray
from ray.data import ActorPoolStrategy, DataContext

from .directory import Directory
from .prompts import Prompt
from .work import Work


PASSED_ON = "DIFFUSERS_TPU"  # prefix of the environment variables that actors get


class Actor:
    """A process with a pipeline."""

    def __init__(self, path, load: Callable, pipeline_class: type, settings: dict):
        self.work = Work(Directory(path), load, pipeline_class, **settings)

    def __call__(self, rows: dict) -> dict:
        self.work.run([Prompt(**prompt) for prompt in rows["prompt"]])
        return {"id": [prompt["id"] for prompt in rows["prompt"]]}


def run(
    directory: Directory, load: Callable, cls: type, prompts: list[Prompt], actors: int, resources: dict, **settings
):
    """Return when every prompt has a record.

    Args:
        load: returns the pipeline, of class `cls`, in an actor's process.
        resources: of one actor, such as {"TPU": 8}; simulated chips need none.
        settings: as `Work`'s.
    """
    variables = {n: v for n, v in os.environ.items() if n.startswith(PASSED_ON) and not n.endswith("_TOKEN")}
    waiting = [prompt for prompt in prompts if directory.record(prompt) is None or prompt.id in settings["retry"]]
    started_here, batch = not ray.is_initialized(), settings["batch"]
    if started_here:
        ray.init(runtime_env={"env_vars": variables}, log_to_driver=False, include_dashboard=False)
    try:
        DataContext.get_current().enable_progress_bars = False
        if waiting:
            items = [{"prompt": asdict(prompt)} for prompt in waiting]
            done = ray.data.from_items(items, override_num_blocks=-(-len(waiting) // batch)).map_batches(
                Actor,
                fn_constructor_args=(directory.path.resolve(), load, cls, settings),
                compute=ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
                batch_size=batch,
                resources=resources,
            )
            for _ in done.iter_rows():
                pass
    finally:
        if started_here:
            ray.shutdown()
