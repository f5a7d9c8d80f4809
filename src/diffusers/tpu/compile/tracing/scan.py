"""Equal blocks of a ModuleList, found and stacked: what one scanned block needs in place of L unrolled ones.

A group is a run of neighbours whose modules and weights have the same names, classes, shapes and dtypes, but for LoRA layers
(`adapters`); its weights travel stacked, [L, ...], under names with `*` for the index: `blocks.*.attn1.to_q.weight`. Which of a group's blocks one trace stands
for is another question, asked for every trace: their settings must agree too (`state.signature`).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import torch
from jax import lax

from ..state.adapters import Adapters, lacks, lenders, lent


MIN_BLOCKS = 2


@dataclass(frozen=True)
class Group:
    """Blocks `start` to `stop` of the ModuleList called `path` in its model.

    Attributes:
        layers: (path in a block, number of the block whose LoRA layer there has the terms of all of them), where not all have.
    """

    path: str
    start: int
    stop: int
    label: str
    layers: tuple[tuple[str, int], ...] = ()

    def blocks(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        return [*model.get_submodule(self.path)][self.start : self.stop]

    def sources(self, model: torch.nn.Module, adapters: Adapters) -> dict[str, list[str | None]]:
        """Of each weight of a block its names in the model, first block first; None: the block lacks it, it adds nothing there."""
        of_blocks = [Adapters(block, adapters.order).tensors(block) for block in self.blocks(model)]
        return {
            weight: [
                f"{self.path}.{index}.{names[weight]}" if weight in names else None
                for index, names in enumerate(of_blocks, self.start)
            ]
            for weight in dict.fromkeys(weight for names in of_blocks for weight in names)
        }

    def lent(self, model: torch.nn.Module, block: torch.nn.Module):
        """While this is open, the block of this group has the terms of all of them."""
        full = [(path, self.blocks(model)[number].get_submodule(path)) for path, number in self.layers]
        return lent(block, [(path, layer) for path, layer in full if lacks(block.get_submodule(path), layer)])


def find_groups(model: torch.nn.Module) -> list[Group]:
    """Runs of at least two equal neighbours in the model's ModuleLists of the blocks that its class says are repeated.

    diffusers names them in `_repeated_blocks` and `_no_split_modules`, transformers in the latter. Other lists may
    hold blocks that share state from call to call, as a VAE's with its feature cache. Adapters of some of the blocks part no
    run where zeros can stand for them in the others.
    """
    repeated = {*(getattr(model, "_repeated_blocks", None) or ())}
    if not hasattr(model, "decode"):
        repeated |= {*(getattr(model, "_no_split_modules", None) or ())}
    groups, shared, order = [], _shared(model), Adapters(model).order
    for path, blocks in model.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or not any(type(b).__name__ in repeated for b in blocks):
            continue
        alone = [n if any(id(p) in shared for p in block.parameters()) else None for n, block in enumerate(blocks)]
        bare = [(lone, structure(block, order)) for lone, block in zip(alone, blocks)]
        for start, stop, layers in _lending(bare, blocks, order):
            if stop - start >= MIN_BLOCKS and next(blocks[start].parameters(), None) is not None:
                whole = start == 0 and stop == len(blocks)
                label = f"{path}.*" if whole else f"{path}.[{start}:{stop}]"
                groups.append(Group(path, start, stop, label, tuple(layers.items())))
    return groups


def _lending(bare: list, blocks: torch.nn.ModuleList, order: list[str]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Runs of blocks that are equal but for what they can lend each other, else of those that are equal."""
    for start, stop in _runs(bare):
        layers = lenders(blocks[start:stop], order)
        if layers is not None:
            yield start, stop, layers
        else:
            whole = [structure(block, order, terms=True) for block in blocks[start:stop]]
            yield from ((start + first, start + last, {}) for first, last in _runs(whole))


def _runs(items: list) -> Iterator[tuple[int, int]]:
    """First and behind the last of equal neighbours."""
    for _, run in itertools.groupby(range(len(items)), lambda n: items[n]):
        run = [*run]
        yield run[0], run[-1] + 1


def structure(block: torch.nn.Module, order: list[str], terms: bool = False) -> tuple:
    """What must agree between two blocks for their weights to be stacked. `terms`: what their adapters add too."""
    adapters = Adapters(block, order)
    name_of = adapters.seen if terms else adapters.bare
    tensors = ((name_of(name), t) for name, t in (*block.named_parameters(), *block.named_buffers()))
    weights = [(name, tuple(t.shape), t.dtype) for name, t in tensors if name is not None]
    modules = ((name_of(name), type(module)) for name, module in block.named_modules())
    return tuple(weights), tuple((name, cls) for name, cls in modules if name is not None)


def _shared(model: torch.nn.Module) -> set[int]:
    """Ids of parameters that the model has under more than one name: they are in no stack."""
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {number for number, count in times.items() if count > 1}


def scan_blocks(step: Callable, carry, stacked: dict[str, jax.Array]):
    """`step(carry, weights of one block) -> (carry, kept)` over the leading axis of the weights: the last carry, all kept stacked."""
    return lax.scan(step, carry, stacked)
