"""The tables of upstream.json, which examples/tpu/results/upstream/run.py writes: upstream's own tests with the TPU path on."""

import re

from table_words import markdown


TRAINING = "training"
REASONS = {  # what a lost test ended in, or its name: the class of it
    r"goes back through compiled calls": TRAINING,
    r"Cosmos.*test_mixed_precision_training: NameError: name 'transforms'": TRAINING,  # asks for torchvision; returns early on the CPU
}


def reason(name: str, end: str) -> str | None:
    """Returns why a test is not expected to pass, None if it should."""
    return next((why for pattern, why in REASONS.items() if re.search(pattern, f"{name}: {end}")), None)


def room(file: str) -> str:
    """Returns the name of a file's row: `pipelines`, `schedulers`, or a kind of models."""
    first, second, *_ = file.split("/")
    return f"{first}/{second}" if first == "models" else first


def counts(record: dict) -> list[str]:
    """Returns a table with a row for each kind of upstream's tests."""
    rows = {}
    for file, found in record.items():
        reasons = [reason(name, end) for name, end in found["lost"].items()]
        training, open_ = reasons.count(TRAINING), reasons.count(None)
        more = (found["passes"], found["passes"] - len(reasons), training, len(reasons) - training - open_, open_)
        for name in (room(file), "all"):
            rows[name] = [a + b for a, b in zip(rows.get(name, [0] * len(more)), more)]
    rows["all"] = rows.pop("all", [0] * 5)
    head = ("tests of", "upstream passes", "passed here", "training", "of no meaning here", "lost")
    return markdown(head, [(name, *map(str, numbers)) for name, numbers in rows.items()])


def lost(record: dict) -> list[str]:
    """Returns a table of every lost test, without those of training."""
    rows = []
    for file, found in record.items():
        for name, end in found["lost"].items():
            why = reason(name, end)
            if why != TRAINING:
                rows.append((f"{file}::{name}", why or "lost", end.replace("|", "\\|")[:200]))
    return markdown(("test", "why", "ended in"), rows)
