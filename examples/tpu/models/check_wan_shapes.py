"""Runs WanPipeline on every prompt of the vocabulary and counts what the scorer finds correct.

Prompt `i` of `make_vocabulary()` gets its own CPU generator with seed `--seed` + `i`, so neither the batch size nor the
other prompts change its video.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from diffusers import WanPipeline
from score_wan_shapes import Score, score
from wan_shapes_clips import NUM_FRAMES, SIZE, Subject, make_vocabulary


STEPS, GUIDANCE_SCALE = 16, 2.0


def generate(pipeline: WanPipeline, subjects: list[Subject], seeds: list[int], steps: int, guidance_scale: float):
    """Returns the videos `B F H W 3` in [0, 1] of the subjects' prompts."""
    return pipeline(
        prompt=[subject.prompt for subject in subjects],
        height=SIZE,
        width=SIZE,
        num_frames=NUM_FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
        output_type="np",
    ).frames


def count_right(subjects: list[Subject], scores: list[Score]) -> dict[str, float]:
    """Returns the shares of videos that show the prompt's colour, shape, direction, and colour and direction both."""
    right = np.array([[a == b for a, b in zip(found, subject)] for found, subject in zip(scores, subjects)])
    shares = dict(zip(Subject._fields, right.mean(0)))
    return shares | {"colour and direction": (right[:, 0] & right[:, 2]).mean(), "all three": right.all(1).mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Scores a wan-shapes model on every prompt of its vocabulary.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance-scale", type=float, default=GUIDANCE_SCALE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="take each n-th prompt only")
    parser.add_argument("--batch", type=int, default=12)
    arguments = parser.parse_args()
    pipeline = WanPipeline.from_pretrained(arguments.model)
    pipeline.set_progress_bar_config(disable=True)
    chosen = list(enumerate(make_vocabulary()))[:: arguments.every]
    videos, subjects = [], [subject for _, subject in chosen]
    for start in tqdm(range(0, len(chosen), arguments.batch), desc="prompts", unit="batch"):
        batch = chosen[start : start + arguments.batch]
        seeds = [arguments.seed + index for index, _ in batch]
        videos += list(generate(pipeline, [s for _, s in batch], seeds, arguments.steps, arguments.guidance_scale))
    scores = [score(video) for video in videos]
    for subject, found in zip(subjects, scores):
        if found != subject:
            print(f"{subject.prompt}: found", *(word or "nothing" for word in found))
    print(", ".join(f"{name} {share:.1%}" for name, share in count_right(subjects, scores).items()))


if __name__ == "__main__":
    main()
