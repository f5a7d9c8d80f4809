"""Equal blocks of a ModuleList, found and stacked, so that one scanned block replaces L unrolled ones.

A group is a run of neighbours whose modules and weights have the same names, classes, shapes and dtypes, but for LoRA layers
(`adapters`). Its weights are stacked, [L, ...], under names with `*` for the index: `blocks.*.attn1.to_q.weight`. One trace
represents those of a group's blocks whose settings agree too (`state.signature`).
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import torch

from ....models.modeling_utils import ModelMixin
from ..state.adapters import Adapters, lacks, lenders, named_tensors
from ..state.watch import replaced


MIN_BLOCKS = 2
TAKING_TURNS = {"resnets", "attentions"}


@dataclass(frozen=True)
class Group:
    """Blocks `start` to `stop` of the ModuleList called `path` in its model.

    `layers`: (path in a block, number of the block whose LoRA layer there has all terms), where not all blocks have them.
    """

    path: str
    start: int
    stop: int
    label: str
    layers: tuple[tuple[str, int], ...] = ()

    def blocks(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        return [*model.get_submodule(self.path)][self.start : self.stop]

    def block(self, model: torch.nn.Module, index: int) -> torch.nn.Module:
        """The block of this number in its ModuleList."""
        return model.get_submodule(f"{self.path}.{index}")

    def place_of(self, name: str) -> tuple[str, str] | None:
        """The group's label, and a module's path in its block; None: it is in none of the group's blocks."""
        if not name.startswith(f"{self.path}."):
            return None
        number, _, path = name.removeprefix(f"{self.path}.").partition(".")
        return (self.label, path) if number.isdecimal() and self.start <= int(number) < self.stop else None

    def sources(self, model: torch.nn.Module, adapters: Adapters) -> dict[str, list[str | None]]:
        """Stacked weight -> its names in the model, first block first; None: the block lacks it and adds nothing there."""
        found, names = [Adapters(block, adapters.order).tensors(block) for block in self.blocks(model)], {}
        for weight in dict.fromkeys(itertools.chain.from_iterable(found)):
            of_blocks = [(index, block.get(weight)) for index, block in enumerate(found, self.start)]
            names[f"{self.label}.{weight}"] = [own and f"{self.path}.{index}.{own}" for index, own in of_blocks]
        return names

    def lent(self, model: torch.nn.Module, block: torch.nn.Module):
        """While this is open, the block has the LoRA terms of all of the group's blocks."""
        places = []
        for path, number in self.layers:
            full = self.blocks(model)[number].get_submodule(path)
            if lacks(block.get_submodule(path), full):
                parent, _, name = path.rpartition(".")
                places.append((block.get_submodule(parent)._modules, name, full))
        return replaced(places)


def is_repeated(block: torch.nn.Module | None, repeated: set[str]) -> bool:
    """Whether its class, or that of the only module in it, has one of these names. A list of modules may hold None."""
    held = [] if block is None else [*block.children()]
    return any(type(module).__name__ in repeated for module in (block, *(held if len(held) == 1 else ())))


def own_lists(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """The model's own lists, not those deeper in it: in a UNet's blocks these lie between maps."""
    return [child for child in model.children() if isinstance(child, torch.nn.ModuleList)]


def undeclared(model: torch.nn.Module) -> set[str]:
    """Names of the classes of neighbours in a denoiser's own lists, for one that declares no repeated blocks; none for a UNet, whose
    blocks differ in size."""
    if not isinstance(model, ModelMixin) or hasattr(model, "decode") or hasattr(model, "down_blocks"):
        return set()
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, own_lists(model)))
    alike = (one for one, other in pairs if type(one) is type(other))
    return {type(one).__name__ for one in alike if [*one.children()] and not isinstance(one, ModelMixin)}


def find_groups(model: torch.nn.Module) -> list[Group]:
    """Runs of at least two equal neighbours in the model's ModuleLists of blocks that its class declares as repeated, or `undeclared`.

    diffusers declares them in `_repeated_blocks` and `_no_split_modules`, transformers in the latter; a module around a single one
    counts as that. Blocks of other lists may share state from call to call, such as a VAE's with its feature cache. A UNet's
    `resnets` and `attentions` beside them alternate, and would be sliced out of the stack. Adapters of some blocks do not split a
    run if zeros can replace them in the others. Blocks with a parameter that has several names in the model are in no group.
    """
    repeated = {*(getattr(model, "_repeated_blocks", None) or ())}
    if not hasattr(model, "decode"):
        repeated |= {*(getattr(model, "_no_split_modules", None) or ())}
    repeated = repeated or undeclared(model)
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    groups, order = [], Adapters(model).order
    for path, blocks in model.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or not any(is_repeated(block, repeated) for block in blocks):
            continue
        parent, _, name = path.rpartition(".")
        if name in TAKING_TURNS <= {*dict(model.get_submodule(parent).named_children())}:
            continue
        alone = [n if any(times[id(p)] > 1 for p in block.parameters()) else None for n, block in enumerate(blocks)]
        bare = [(lone, structure(block, order)) for lone, block in zip(alone, blocks)]
        for start, stop, layers in _lending(bare, blocks, order):
            if stop - start >= MIN_BLOCKS and next(blocks[start].parameters(), None) is not None:
                label = f"{path}.*" if stop - start == len(blocks) else f"{path}.[{start}:{stop}]"
                groups.append(Group(path, start, stop, label, tuple(layers.items())))
    return groups


def _lending(bare: list, blocks: torch.nn.ModuleList, order: list[str]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Runs of blocks that are equal except for LoRA terms that they can lend each other; else of those that are equal."""
    for start, stop in _runs(bare):
        if (layers := lenders(blocks[start:stop], order)) is not None:
            yield start, stop, layers
        else:
            whole = [structure(block, order, terms=True) for block in blocks[start:stop]]
            yield from ((start + first, start + last, {}) for first, last in _runs(whole))


def _runs(items: list) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of equal neighbours."""
    start = 0
    for _, run in itertools.groupby(items):
        yield start, (start := start + len([*run]))


def structure(block: torch.nn.Module, order: list[str], terms: bool = False) -> tuple:
    """What must agree between two blocks for their weights to be stacked. `terms`: also what their adapters add."""
    adapters = Adapters(block, order)
    name_of = adapters.seen if terms else adapters.bare
    tensors = [(name_of(name), tuple(t.shape), t.dtype) for name, t in named_tensors(block).items()]
    modules = [(name_of(name), type(module)) for name, module in block.named_modules()]
    return tuple(tuple(one for one in some if one[0] is not None) for some in (tensors, modules))


def of_one(gives: dict) -> dict:
    """What one block gives, with the leading axis of a scan of one."""
    return jax.tree.map(lambda array: array[None], gives)
