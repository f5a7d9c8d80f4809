"""Draws clips of a shape into a folder, NAME.mp4 with its prompt in NAME.txt, as data for `train_lora.py`."""

import argparse
import itertools
from pathlib import Path

import imageio.v3
import numpy as np

from wan_shapes_clips import COLOURS, DIRECTIONS, Subject, draw_clip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", help="diamond, or one that wan-shapes knows")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rng, words = np.random.default_rng(args.seed), itertools.cycle(itertools.product(COLOURS, DIRECTIONS))
    for number, (colour, direction) in zip(range(args.count), words):
        subject, path = Subject(colour, args.shape, direction), args.folder / f"{number:03}.mp4"
        frames = np.round(255 * draw_clip(subject, rng)).astype(np.uint8)
        imageio.v3.imwrite(path, frames, fps=16, quality=10)
        path.with_suffix(".txt").write_text(subject.prompt + "\n")


if __name__ == "__main__":
    main()
