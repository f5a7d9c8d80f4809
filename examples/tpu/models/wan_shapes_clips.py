"""The procedural clips of wan-shapes: one coloured shape that moves in a named direction, and the words for it.

A clip is drawn from the signed distance `d` of every pixel to the shape's edge: coverage `clip(1/2 - d, 0, 1)` blends
the colour over a plain dark background, which anti-aliases the edge.

Letters: F frames, H height, W width.
"""

import itertools
from typing import NamedTuple

import numpy as np


COLOURS = {
    "red": (0.92, 0.12, 0.12),
    "green": (0.12, 0.80, 0.16),
    "blue": (0.14, 0.24, 0.96),
    "yellow": (0.95, 0.88, 0.10),
    "magenta": (0.92, 0.14, 0.88),
    "cyan": (0.10, 0.86, 0.92),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

NUM_FRAMES, SIZE = 9, 64
RADIUS = (8.5, 12.0)
TRAVEL = (20.0, 30.0)
REACH = 1.35

PHRASES = (
    "a {colour} {shape} moving {direction}",
    "a {colour} {shape} moves {direction}",
    "the {colour} {shape} is moving {direction}",
    "{colour} {shape} moving {direction}",
    "a {colour} {shape} moving {direction} on a dark background",
    "a {shape} moving {direction}, the {shape} is {colour}",
)


class Subject(NamedTuple):
    """What a clip shows, in the words of its prompt."""

    colour: str
    shape: str
    direction: str

    @property
    def prompt(self) -> str:
        return PHRASES[0].format(**self._asdict())


def make_vocabulary() -> list[Subject]:
    """Returns every subject of the model's training: 6 colours x 3 shapes x 4 directions."""
    return [Subject(*words) for words in itertools.product(COLOURS, SHAPES, DIRECTIONS)]


def make_caption(subject: Subject, rng: np.random.Generator) -> str:
    """Returns a caption: the prompt itself most of the time, else another phrase or the prompt as a sentence."""
    phrase = PHRASES[0] if rng.random() < 0.75 else PHRASES[rng.integers(1, len(PHRASES))]
    caption = phrase.format(**subject._asdict())
    return f"{caption[0].upper()}{caption[1:]}." if rng.random() < 0.1 else caption


def signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Returns the distance of the points (x, y) to the shape's edge, negative inside.

    All shapes have about the same area, centre their bounding box on the origin and reach at most
    `REACH * radius` from it along either axis. Outside a corner the distance is that of the nearer edge line, which
    keeps the corner sharp.
    """
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.886 * radius
    if shape == "triangle":
        inradius = 0.78 * radius
        y = y - inradius / 2
        return np.maximum(np.abs(x) * np.sqrt(3) / 2 - y / 2, y) - inradius
    if shape == "diamond":  # which the model does not know
        return (np.abs(x) + np.abs(y)) / np.sqrt(2) - 0.886 * radius
    raise ValueError(f"expected a shape of {SHAPES} or diamond, got {shape!r}")


def draw_clip(
    subject: Subject, rng: np.random.Generator, num_frames: int = NUM_FRAMES, size: int = SIZE
) -> np.ndarray:
    """Returns a clip `F H W 3` in [0, 1], float32: random start, size, speed, shade and background.

    The travel is in the named direction alone and ends inside the picture.
    """
    radius, travel = rng.uniform(*RADIUS), rng.uniform(*TRAVEL)
    direction = np.array(DIRECTIONS[subject.direction], dtype=np.float64)
    margin = REACH * radius
    low = margin + np.maximum(-direction * travel, 0)
    high = size - margin - np.maximum(direction * travel, 0)
    start = rng.uniform(low, high)
    centres = start + direction * travel * np.linspace(0, 1, num_frames)[:, None]

    colour = np.array(COLOURS[subject.colour]) * rng.uniform(0.88, 1.0)
    background = np.clip(rng.uniform(0.04, 0.16) + rng.uniform(-0.015, 0.015, 3), 0, 1)
    axis = np.arange(size) + 0.5
    x = axis[None, None, :] - centres[:, 0, None, None]
    y = axis[None, :, None] - centres[:, 1, None, None]
    coverage = np.clip(0.5 - signed_distance(subject.shape, x, y, radius), 0, 1)[..., None]
    return (background + coverage * (colour - background)).astype(np.float32)


def draw_dataset(count: int, seed: int) -> tuple[np.ndarray, list[Subject]]:
    """Returns `count` clips `N F H W 3` uint8 and their subjects, each subject equally often, in random order."""
    rng = np.random.default_rng(seed)
    vocabulary = make_vocabulary()
    order = rng.permutation(np.arange(count) % len(vocabulary))
    subjects = [vocabulary[i] for i in order]
    clips = np.empty((count, NUM_FRAMES, SIZE, SIZE, 3), np.uint8)
    for clip, subject in zip(clips, subjects):
        clip[...] = np.round(255 * draw_clip(subject, rng))
    return clips, subjects
