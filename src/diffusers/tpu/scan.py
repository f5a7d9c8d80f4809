"""Equal blocks of a ModuleList, found and stacked: what one scanned block needs in place of L unrolled ones.

A group is a run of neighbours whose modules and weights have the same names, classes, shapes and dtypes; its weights travel
stacked, [L, ...], under names with `*` for the index: `blocks.*.attn1.to_q.weight`. Which of a group's blocks one trace stands
for is another question, asked for every trace: their settings must agree too (`state.signature`).
"""

from collections import Counter
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

    diffusers names them in `_repeated_blocks` and `_no_split_modules`, transformers in the latter. Other lists may
    hold blocks that share state from call to call, as a VAE's with its feature cache.
    """
    repeated = {*(getattr(model, "_repeated_blocks", None) or ())}
    if not hasattr(model, "decode"):
        repeated |= {*(getattr(model, "_no_split_modules", None) or ())}
    groups, shared = [], _shared(model)
    for path, blocks in model.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or not any(type(b).__name__ in repeated for b in blocks):
            continue
        start = 0
        alone = [n if any(id(p) in shared for p in block.parameters()) else None for n, block in enumerate(blocks)]
        structures = [*zip(alone, map(structure, blocks))]
        for stop in range(1, len(blocks) + 1):
            if stop < len(blocks) and structures[stop] == structures[start]:
                continue
            if stop - start >= MIN_BLOCKS and next(blocks[start].parameters(), None) is not None:
                whole = start == 0 and stop == len(blocks)
                groups.append(Group(path, start, stop, f"{path}.*" if whole else f"{path}.[{start}:{stop}]"))
            start = stop
    return groups


def structure(block: torch.nn.Module) -> tuple:
    """What must agree between two blocks for their weights to be stacked."""
    weights = [(name, tuple(t.shape), t.dtype) for name, t in (*block.named_parameters(), *block.named_buffers())]
    return tuple(weights), tuple((name, type(module)) for name, module in block.named_modules())


def _shared(model: torch.nn.Module) -> set[int]:
    """Ids of parameters that the model has under more than one name: they are in no stack."""
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {number for number, count in times.items() if count > 1}


def scan_blocks(step: Callable, carry, stacked: dict[str, jax.Array]):
    """`step(carry, weights of one block) -> (carry, kept)` over the leading axis of the weights: the last carry, all kept stacked."""
    return lax.scan(step, carry, stacked)
