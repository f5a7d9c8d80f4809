"""Which models' weights are on the chips: all while they fit, else those whose turn it is; the others wait on the host.

The least recently used model makes room. The model that comes next and is like the one that runs (the second of two experts) is
prefetched while that works: compiled, and moved in if both have room.
"""

import gc
import itertools
import operator
import weakref
from collections.abc import Callable

import jax
import torch
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ...utils import logging
from ..chips import hosts
from ..chips.figures import GIB, TOPOLOGIES, chip_of_kind
from ..chips.mesh import AXES
from ..chips.sharding import STORAGE_AXES, ModelPlan, kind_of, parts_of, storage_axes, stored
from ..common.config import TPUConfig


logger = logging.get_logger(__name__)

RESERVED = 0.25  # of a chip's HBM, for activations and programs, where the configuration does not say
SMALL = 2 / 3  # of what weights may take: what a VAE makes of a video takes more than is reserved
CODE = 1 / 16  # of it, for the code of a model's programs


def room_for_weights(hbm: int, config: TPUConfig) -> int:
    """Bytes of a chip's `hbm` that weights may take; the rest is for activations and programs."""
    kept = RESERVED * hbm if config.reserve_gib is None else config.reserve_gib * GIB
    return max(0, int(hbm - kept))


def room_for_programs(hbm: int | None, config: TPUConfig) -> float | None:
    """Bytes of a chip's `hbm` that the code of a model's programs may take; None: no limit."""
    if config.program_gib is not None:
        return config.program_gib * GIB
    return None if hbm is None else CODE * hbm


def leaving(placed: list, bytes_of: Callable, need: int, limit: int | None, keep=None) -> list:
    """Of what is placed, least recently used first, what leaves so that `need` bytes more are within the limit."""
    gone, held = [], sum(map(bytes_of, placed))
    for one in placed:
        if limit is None or held + need <= limit:
            break
        if one is not keep:
            gone.append(one)
            held -= bytes_of(one)
    return gone


def turns(sizes: dict[str, int], limit: int | None) -> dict[str, list[str]]:
    """Whose weights are on a chip while each model works. `sizes`: bytes on a chip by model, in the order of use."""
    placed: list[str] = []
    for name, size in sizes.items():
        if not leaving(placed, sizes.__getitem__, size, limit) and (limit is None or size <= limit):
            placed.append(name)
    held = {}
    for name, size in sizes.items():
        placed = [other for other in placed if other != name]
        gone = leaving(placed, sizes.__getitem__, size, limit)
        placed = [*(other for other in placed if other not in gone), name]
        held[name] = placed
    return held


Models = dict[str, tuple[torch.nn.Module, ModelPlan]]


def tensor_degree(models: Models, chips: int, limit: int | None) -> int:
    """The least `tp` with which the weights of `whole` models that have rules for `tp` fit a chip beside the others', stored over all
    `chips`; 1 where none does, or where there is no such model."""
    split = {name for name, (_, plan) in models.items() if plan.whole and any("tp" in spec for _, spec in plan.rules)}
    degrees = [n for n in range(1, chips + 1) if chips % n == 0] if split and limit is not None else []

    def need(tp: int) -> int:
        mesh = AbstractMesh((1, chips // tp, tp), AXES)
        kinds = ((name in split, _on_a_chip(*model, mesh, STORAGE_AXES)) for name, model in models.items())
        return sum(one[whole] for whole, some in kinds for one in some.values())

    return next((tp for tp in degrees if need(tp) <= limit), 1)


def _on_a_chip(
    module: torch.nn.Module, plan: ModelPlan, mesh: Mesh | AbstractMesh, over: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    """Bytes on a chip of each kind of weight, in the module's order: stored over these axes, and whole."""
    found: dict[str, tuple[int, int]] = {}
    for name, t in itertools.chain(module.named_parameters(), module.named_buffers()):
        ways = (stored(name, tuple(t.shape), plan.rules, mesh, over, whole) for whole in (False, True))
        sizes = (t.nbytes // parts_of(spec, mesh) for spec in ways)
        kind = kind_of(name)
        found[kind] = tuple(map(operator.add, found.get(kind, (0, 0)), sizes))
    return found


def storages(models: Models, mesh: Mesh, limit: int | None, trained: bool = False) -> dict[str, frozenset[str]]:
    """The kinds of weights that each chip has whole, by model; the others are stored over all chips, and gathered where a block needs
    them. As many as there is room for, those first that a block needs first: behind its work the others are gathered.

    Args:
        models: with their plans. Of `whole` ones as much as leaves room for the others, then of those whose chips share a call, while
            all are small. Models of one class, as two experts are, are stored alike.
        limit: bytes of a chip that weights may take; None: not known.
        trained: what is trained keeps several times as much where its weights are.
    """
    found = dict.fromkeys(models, frozenset())
    if limit is None:
        return found
    over = storage_axes(mesh)
    kinds = {name: _on_a_chip(*model, mesh, over) for name, model in models.items()}
    taken = sum(split for some in kinds.values() for split, _ in some.values())
    first = [name for name in sorted(models) if models[name][1].whole]
    then = [name for name in sorted(models) if models[name][1].parallel and name not in first and not trained]
    for names, room in ((first, limit), (then, SMALL * limit)):
        for cls in dict.fromkeys(type(models[name][0]) for name in names):
            alike, kept = [name for name in names if type(models[name][0]) is cls], set()
            for kind in dict.fromkeys(kind for name in alike for kind in kinds[name]):
                ways = [kinds[name][kind] for name in alike if kind in kinds[name]]
                more = sum(whole - split for split, whole in ways)
                if taken + more <= room:
                    taken += more
                    kept.add(kind)
            found |= dict.fromkeys(alike, frozenset(kept))
    return found


class HbmManager:
    """The room on the chips, one for all that runs there: pipelines, and models by themselves. `hbm`: bytes of a chip; `limit`: what
    weights may take of them; None: not known. `orders`: of each pipeline its runners by name, in the order of their use."""

    def __init__(self, hbm: int | None, limit: int | None):
        self.hbm, self.limit = hbm, limit
        self.orders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Runners, least recently used first, each with an array that is computed when its programs are.
        self._placed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def use(self, owner, runners, model: str = "MODEL"):
        """(name, runner) pairs of a pipeline in its order of use. `model`: what the planner is asked about, in messages."""
        self.orders[owner] = dict(runners)
        self._models[owner] = model
        self.choose_storage(self.orders[owner])

    def choose_storage(self, runners: dict, trained: bool = False):
        """Which weights of these each chip has whole, once of each. `trained`: perhaps, as a model by itself."""
        if any(runner.storage is None for runner in runners.values()):
            mesh = next(iter(runners.values())).mesh
            models = {name: (runner.module, runner.plan) for name, runner in runners.items()}
            found = storages(models, mesh, self.limit, trained)
            for name, runner in runners.items():
                runner.storage = found[name] if runner.storage is None else runner.storage

    def place(self, runners):
        """Weights to the chips, for as long as there is room. Raises ValueError for a model that would not fit even alone."""
        runners = [*runners]
        for runner in runners:
            runner.executables.expect()
        for runner in runners:
            runner.current()
            self.load(runner) if runner in self._placed or self.free() >= _bytes(runner) else self.check(runner)

    def check_all(self, owner):
        """Raises ValueError for a model of the pipeline that lacks weights, and for one that would not fit even alone."""
        for runner in self.orders[owner].values():
            runner.current()
            self.check(runner)

    def check(self, runner):
        """Raises ValueError where the runner's weights, as last read, do not fit a chip."""
        need = runner.bytes_per_chip
        if self.limit is None or need <= self.limit:
            return
        name, _ = self._name(runner)
        mesh = ", ".join(f"{axis} {degree}" for axis, degree in runner.mesh.shape.items())
        raise ValueError(
            f"expected the weights of {name} to fit a chip, got {need / GIB:.3g} GiB a chip ({runner.mesh.size} chips: {mesh})"
            f" for {self.limit / GIB:.3g} GiB: {self.hbm / GIB:.3g} GiB of HBM less what activations and programs need"
            " (TPUConfig.reserve_gib). Use more chips, a mesh whose dp and sp split weights further, or bfloat16; what would"
            f" fit says: {self.question(runner)}"
        )

    def question(self, runner) -> str:
        """What to ask the planner where the runner's model does not fit: the command."""
        _, model = self._name(runner)
        chip = chip_of_kind(runner.mesh.devices.flat[0].device_kind)
        larger = [t.name for t in TOPOLOGIES.values() if t.devices > runner.mesh.size]
        larger = [name for name in larger if chip is TOPOLOGIES[name].chip] or larger or ["v6e-32"]
        return f"diffusers-tpu plan {model} --topology {','.join(larger)} --mesh auto"

    def load(self, runner):
        """The runner's weights, as last read, on the chips; others leave where it needs their room."""
        if self.limit is not None:
            self.check(runner)
            for last in [*self._placed][-1:]:
                if last is not runner:  # a chip runs programs in order
                    self._placed[last] = hosts.put(0, NamedSharding(last.mesh, PartitionSpec())) + 1
        self._placed.pop(runner, None)
        self._make_room(_bytes(runner))
        self._placed[runner] = None
        runner.place(read=False)

    def kind(self, runner) -> list:
        """The runners of models like this one's in its pipelines, itself among them, in the order of use."""
        orders = [order.values() for order in self.orders.values() if any(r is runner for r in order.values())]
        beside = {id(r): r for order in orders for r in order} or {0: runner}
        same = [r for r in beside.values() if type(r.module) is type(runner.module) and r.plan == runner.plan]
        avals = runner.plan_weights().avals
        return [r for r in same if r is runner or r.plan_weights().avals == avals]

    def prefetch(self, runner, calls: tuple | None):
        """The runner works, on calls like these: make the next model of its kind ready, as far as there is room."""
        kind = self.kind(runner)
        after = next(iter(kind[kind.index(runner) + 1 :]), None) if runner in kind else None
        if after is not None and calls is not None:
            after.prepare(calls)
        if after is None or after in self._placed or self.limit is None or _bytes(runner) + _bytes(after) > self.limit:
            return  # if it is not there it moves in when its turn comes
        self._make_room(_bytes(after), keep=runner)
        for one in (after, *[*self._placed][-1:]):  # before the one that works
            self._placed[one] = self._placed.pop(one, None)
        after.place()

    def ready(self):
        """Wait until what is placed has arrived."""
        jax.block_until_ready([runner.plan_weights().arrays for runner in self._placed])

    def leave(self, runner):
        """The runner's weights leave the chips, once what uses them there is done."""
        if runner in self._placed:
            jax.block_until_ready(self._placed.pop(runner))
            runner.drop()

    def forget(self, runner):
        """The runner has let go of its weights, for good."""
        self._placed.pop(runner, None)
        for owner, order in self.orders.items():
            self.orders[owner] = {name: r for name, r in order.items() if r is not runner}

    def _name(self, runner) -> tuple[str, str]:
        """Of a runner, its name in a pipeline and what the planner knows that by."""
        named_by = ((owner, name) for owner, order in self.orders.items() for name, r in order.items() if r is runner)
        owner, name = next(named_by, (None, type(runner.module).__name__))
        return name, "MODEL" if owner is None else self._models[owner]

    def free(self) -> float:
        """Bytes of a chip that weights may still take."""
        return float("inf") if self.limit is None else self.limit - sum(map(_there, self._placed))

    def _make_room(self, need: int, keep=None):
        if hosts.process_count() > 1 and self.free() < need:
            gc.collect()  # what is there is counted alike in all processes: not by when garbage is found
        for runner in leaving([*self._placed], _there, need, self.limit, keep):
            self.leave(runner)
            logger.info(f"{type(runner.module).__name__} waits on the host: another model needs its room on the chips")


_managers: "weakref.WeakValueDictionary[tuple, HbmManager]" = weakref.WeakValueDictionary()


def room_on(device: jax.Device, config: TPUConfig) -> tuple[int | None, int | None]:
    """Bytes of a chip's HBM, and of those that weights may take; None: not known."""
    chip = chip_of_kind(device.device_kind)
    hbm = int(config.hbm_gib * GIB) if config.hbm_gib is not None else chip and chip.hbm_bytes
    return hbm, None if hbm is None else room_for_weights(hbm, config)


def hbm_manager_of(mesh: Mesh, config: TPUConfig) -> HbmManager:
    """The room on these chips, the same one for every mesh of them and every configuration with the same limit."""
    devices = tuple(sorted(mesh.devices.flat, key=lambda device: device.id))
    hbm, limit = room_on(devices[0], config)
    return _managers.setdefault((devices, hbm, limit), HbmManager(hbm, limit))


def _there(runner) -> int:
    """Bytes on a chip; nothing where the model's tensors are no longer those that were placed."""
    return runner.bytes_per_chip + runner.held_per_chip


def _bytes(runner) -> int:
    """What the runner's weights will take of a chip."""
    runner.plan_weights()
    return runner.bytes_per_chip
