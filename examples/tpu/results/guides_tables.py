"""The table that compares figures of the guides from which this project started with ours of the same work.

The guides' figures are typed here, each with the guide that states it. Ours come from the records, "no record" where there is none.
"""

import json
from collections.abc import Callable
from pathlib import Path

from table_words import markdown


FOLDER = Path(__file__).resolve().parent
WAN, IMAGE_TO_VIDEO, HUNYUAN = "wan2.1-t2v-14b", "wan2.1-i2v-14b-720p", "hunyuanvideo-1.5-720p-t2v"
COGVIDEOX = "cogvideox-5b@CogVideoXVideoToVideoPipeline"
NONE = "no record"


def _rows(record: str, **wanted) -> list[dict]:
    rows = json.loads((FOLDER / f"{record}.json").read_text())
    return [row for row in rows if wanted.items() <= row.items()]


def _span(least: float, most: float) -> str:
    return f"{least:.3g} to {most:.3g} s"


def _steps(model: str, topology: str, count: int) -> str:
    """Returns the seconds of `count` steps at 720p with all heads bounded, without text encoder and VAE."""
    rows = _rows("step", model=model, topology=topology, height=720, variant="ours", way="bound")
    return f"{_span(count * rows[0]['seconds_per_step'], count * rows[0]['slower'])}, steps alone" if rows else NONE


def _run(model: str, topology: str, key: str = "", steps: int | None = None) -> str:
    """Returns the seconds of a run, or of a first run if `key` is given; of `steps` alone where there is no record.

    Args:
        steps: their number, if it is not the record's.
    """
    row = next(iter(_rows("run", model=model, topology=topology, way="bound")), None)
    if row is None:
        return _steps(model, topology, steps or 50)
    least, most = (
        (row["first_run_seconds"], row["first_run_slower"]) if key else (row["seconds"]["total"], row["slower"])
    )
    left_out = 1 - steps / row["steps"] if steps else 0
    spent = row["seconds"]["steps"]
    return _span(least - left_out * spent, most - left_out * spent * most / least)


def _vae(frames: int) -> str:
    rows = _rows("vae", model=COGVIDEOX, topology="v6e-1", num_frames=frames, variant="ours")
    said = (
        f"{row['entry']} {_span(row['seconds'], row['slower'] or row['seconds']) if row['seconds'] else 'no room'}"
        for row in rows
    )
    return f"{frames} frames: {', '.join(said)}" if rows else NONE


def _attention() -> str:
    (row,) = _rows("step", model=WAN, topology="v6e-8", height=720, variant="ours", way="bound")
    return f"{100 * row['seconds']['attention'] / row['seconds']['total']:.1f} %; of the step {100 * row['mfu']:.0f} %"


PORT, COMPLETE, FASTER, IN_JAX = "HunyuanVideo-1.5 port", "Wan, complete", "Wan 2.1, faster", "CogVideoX VAE"
SLICE, CHIP = "v6e-8", "v6e-1"

# Guide; what; slice; its figures; ours of the same work.
FIGURES: list[tuple[str, str, str, str, Callable[[], str]]] = [
    (PORT, "5 frames, 5 steps, a first run", SLICE, "578 s", lambda: NONE),
    (PORT, "720p x 121, 50 steps, a first run", SLICE, "1,010 s", lambda: _run(HUNYUAN, SLICE, key="first")),
    (
        COMPLETE,
        "Wan 2.1 14B, 720p x 81, 50 steps: standard attention; JAX's splash; with base 2; with another scheduler",
        SLICE,
        "428; 285; 265; 245 s",
        lambda: _run(WAN, SLICE),
    ),
    (COMPLETE, "the same, all that it has", "see below", "125 s", lambda: _steps(WAN, "v6e-16", 50) + ", v6e-16"),
    (COMPLETE, "image-to-video 14B: before; after", "not said", "450; 94.5 s", lambda: _run(IMAGE_TO_VIDEO, SLICE)),
    (COMPLETE, "attention's share of a step; its MFU", SLICE, "66.8 %; 37 %", _attention),
    (
        FASTER,
        "3 steps, text, VAE: JAX's splash; with base 2; with another order of axes",
        SLICE,
        "27.57; 25.80; 24.80 s",
        lambda: _run(WAN, SLICE, steps=3),
    ),
    (IN_JAX, "768 x 1360 x 4: eager; compiled (112 x)", CHIP, "23,140; 206 ms", lambda: _vae(5)),
    (IN_JAX, "8 frames: eager; compiled", CHIP, "out of memory; 1,286 ms", lambda: _vae(9)),
    (IN_JAX, "16 frames, compiled", CHIP, "out of memory", lambda: "17 frames: out of memory"),
]


def beside(rows: list[dict]) -> list[str]:
    """Returns the table. `rows` are those of run.json; other records are read from their files."""
    head = ("guide", "what", "slice", "theirs, measured", "ours, compiled")
    return markdown(head, [(guide, what, slice_, theirs, ours()) for guide, what, slice_, theirs, ours in FIGURES])
