"""The tables of the page READY.md: the time of a start, and the host's time in a step."""

import json
from pathlib import Path

from table_words import markdown

from diffusers.tpu.kernels.attention.softmax_modes import BOUND


FOLDER = Path(__file__).resolve().parent
DISK, SMALL = 5e9, 0.2  # bytes a second that are assumed of a local disk; seconds of a small program's compilation


def host(rows: list[dict]) -> list[str]:
    head = (
        "scheduler | simulated chips | a step, ms | the model's program, ms | the host, ms | executables of its steps"
    )
    lines = []
    for row in rows:
        times = (f"{row[f'{name}_milliseconds']:.1f}" for name in ("step", "program", "host"))
        lines.append((row["scheduler"], str(row["chips"]), *times, str(row["scheduler_programs"])))
    return markdown(head.split(" | "), lines)


def ready(rows: list[dict]) -> list[str]:
    head = "process | packages imported, s | weights placed, s | first step done, s | traces of models"
    head += " | compilations of models | small programs compiled | read"
    lines = []
    for row in rows:
        times = (f"{row[name]:.1f}" for name in ("imported", "placed", "stepped"))
        counts = (str(row[name]) for name in ("traces", "compilations", "compiled_small", "read_small"))
        lines.append((row["name"], *times, *counts))
    return markdown(head.split(" | "), lines)


def compiled(rows: list[dict]) -> list[str]:
    head = ("program", "calls side by side", "seconds", "MB")
    (row,) = rows
    parts = [*row["programs"], {**row, "name": "all, with recording the run", "branches": ""}]
    lines = [
        (one["name"], str(one["branches"]), f"{one['seconds']:.0f}", f"{one['bytes'] / 1e6:.1f}") for one in parts
    ]
    return markdown(head, lines)


def until_first_step(rows: list[dict]) -> list[str]:
    """Returns the seconds until the first step of the large model, partly as measured on the shipped model's second process."""
    (row,) = rows
    second = json.loads((FOLDER / "ready.json").read_text())[1]
    plan = json.loads((FOLDER / "plan-wan2.1-t2v-14b-v6e-8.json").read_text())
    weights, step = sum(row["weights"].values()), plan["by_way"][BOUND]["slower"]
    text = next(part["seconds"] for part in plan["parts"] if part["stage"] == "text")
    small = second["compiled_small"] + second["read_small"]
    of_executables = f"{row['bytes'] / 1e6:.0f} MB, while weights load; their loading is not known without a TPU"
    of_small = f"{small} of the shipped model's run, {SMALL} s each as compiled for v6e here"
    lines = [
        ("packages imported", f"{second['imported']:.1f}", "measured, on two cores"),
        ("weights from a local disk to the chips", f"{weights / DISK:.1f}", f"{weights / 1e9:.1f} GB at 5 GB/s"),
        ("executables read", f"{row['bytes'] / DISK:.2f}", of_executables),
        ("small programs, the first time only", f"{small * SMALL:.1f}", of_small),
        ("text encoder, both prompts", f"{2 * text:.2f}", "modelled"),
        ("the first step", f"{step:.2f}", "planned, of a chip that waits more"),
    ]
    total = sum(float(seconds) for _, seconds, _ in lines)
    lines.append(("until the first step is done", f"{total:.0f}", "their sum: one after the other"))
    return markdown(("what", "seconds", "of"), lines)
