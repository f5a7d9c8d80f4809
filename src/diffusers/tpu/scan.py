"""Equal blocks of a ModuleList, found and stacked: what one scanned block needs in place of L unrolled ones.

Blocks are equal when their class, their weights' names, shapes and dtypes, and their plain attributes are. A group is a
run of equal neighbours; its weights travel stacked, [L, ...], under names with `*` for the index: `blocks.*.attn1.to_q.weight`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import torch
from jax import lax


MIN_BLOCKS = 2


@dataclass(frozen=True)
class Group:
    """Blocks `start` to `stop` of the ModuleList called `path` in its model."""

    path: str
    start: int
    stop: int
    label: str

    def names(self, weight: str) -> list[str]:
        """Names of one weight of the block (`attn1.to_q.weight`) in the model, first block first."""
        return [f"{self.path}.{index}.{weight}" for index in range(self.start, self.stop)]


def find_groups(model: torch.nn.Module) -> list[Group]:
    """Runs of at least two equal neighbours in the model's ModuleLists of the blocks that its class says are repeated.

    diffusers names them in `_repeated_blocks`, models without it and transformers in `_no_split_modules`. Other lists may
    hold blocks that share state from call to call, as a VAE's with its feature cache.
    """
    repeated = getattr(model, "_repeated_blocks", None) or ()
    if not repeated and not hasattr(model, "decode"):
        repeated = getattr(model, "_no_split_modules", None) or ()
    groups = []
    for path, blocks in model.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or not any(type(b).__name__ in repeated for b in blocks):
            continue
        start = 0
        signatures = [signature(block) for block in blocks]
        for stop in range(1, len(blocks) + 1):
            if stop < len(blocks) and signatures[stop] == signatures[start]:
                continue
            if stop - start >= MIN_BLOCKS and next(blocks[start].parameters(), None) is not None:
                whole = start == 0 and stop == len(blocks)
                groups.append(Group(path, start, stop, f"{path}.*" if whole else f"{path}.[{start}:{stop}]"))
            start = stop
    return groups


def signature(block: torch.nn.Module) -> tuple:
    """What must agree between two blocks for one trace to stand for both."""
    weights = [(name, tuple(t.shape), t.dtype) for name, t in (*block.named_parameters(), *block.named_buffers())]
    settings = [(name, type(m), plain_attributes(m), _processor(m)) for name, m in block.named_modules()]
    return type(block), tuple(weights), tuple(settings)


def plain_attributes(module: torch.nn.Module) -> tuple:
    """The module's own bool, int, float, string and None attributes, sorted by name."""
    plain = (bool, int, float, str, type(None))
    return tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, plain) and k not in _INDICES))


def _processor(module: torch.nn.Module):
    processor = getattr(module, "processor", None)
    return processor and (type(processor), getattr(processor, "_attention_backend", None))


# A block's own number says where it stands, not what it computes.
_INDICES = frozenset({"layer_idx", "layer_index", "block_idx", "block_index"})


def scan_blocks(step: Callable, carry, stacked: dict[str, jax.Array]):
    """`step(carry, weights of one block) -> (carry, kept)` over the leading axis of the weights: the last carry, all kept stacked."""
    return lax.scan(step, carry, stacked)
