"""Pads texts to a multiple of `WORDS`, with the padding masked. Prompts of similar lengths then share a program, and the two calls
of a guided step have equal shapes, so that they can be batched."""

import torch

from ...tpu.compile.call import asked_once


WORDS = 128  # a padded text's length is a multiple of it


def filled_up(tensor: torch.Tensor) -> torch.Tensor:
    """[B, L, ...] padded with zeros to a multiple of `WORDS`."""
    return _with_zeros(tensor) if tensor.shape[1] % WORDS else tensor


@asked_once
def all_words(text: torch.Tensor) -> torch.Tensor:
    """The padded mask of a text [B, L, C] that is not padded yet: ones for its words, zeros for padding."""
    return filled_up(text.new_ones(text.shape[:2], dtype=torch.long))


@asked_once
def _with_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], -tensor.shape[1] % WORDS, *tensor.shape[2:])], dim=1)
