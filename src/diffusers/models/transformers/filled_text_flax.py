"""Texts that pipelines give as long as they are, filled up with padding, which is masked: prompts that differ in length by little have one
program, and the two calls of a guided step are alike, so that they can run side by side."""

import torch

from ...tpu.compile.call import asked_once


WORDS = 128  # a text's length is a multiple of


def filled_up(tensor: torch.Tensor) -> torch.Tensor:
    """[B, L, ...] with zeros behind, if any."""
    return _with_zeros(tensor) if tensor.shape[1] % WORDS else tensor


@asked_once
def all_words(text: torch.Tensor) -> torch.Tensor:
    """Of a text [B, L, C] before it is filled up a mask [B, L] of what is filled up: ones for its words."""
    return filled_up(text.new_ones(text.shape[:2], dtype=torch.long))


@asked_once
def _with_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], -tensor.shape[1] % WORDS, *tensor.shape[2:])], dim=1)
