"""Which models' weights are on the chips: all if they fit, else those in use; the others stay on the host.

The least recently used model is evicted first. While a model runs, the next one of its kind (the second of two experts) is
prefetched: compiled, and loaded if both fit.
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
from ..common.errors import OutOfHBM


logger = logging.get_logger(__name__)

RESERVED = 0.25  # of a chip's HBM, for activations and programs, unless configured
SMALL = 2 / 3  # of what weights may take: a VAE's activations of a video take more than is reserved
CODE = 1 / 16  # of a chip's HBM, for the code of a model's programs


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
    """What to evict of `placed`, least recently used first, so that `need` more bytes are within the limit; never `keep`."""
    gone, held = [], sum(map(bytes_of, placed))
    for one in placed:
        if limit is None or held + need <= limit:
            break
        if one is not keep:
            gone.append(one)
            held -= bytes_of(one)
    return gone


def turns(sizes: dict[str, int], limit: int | None) -> dict[str, list[str]]:
    """Model -> the models whose weights are on a chip while it runs. `sizes`: model -> bytes on a chip, in the order of use."""
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
    """The least `tp` with which the weights of `whole` models that have rules for `tp` fit a chip, if all other models are stored
    over all `chips`; 1 if none does, or if there is no such model."""
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
    """Kind of weight -> its bytes on a chip: (stored over these axes, whole), in the module's order."""
    found: dict[str, tuple[int, int]] = {}
    for name, t in itertools.chain(module.named_parameters(), module.named_buffers()):
        ways = (stored(name, tuple(t.shape), plan.rules, mesh, over, whole) for whole in (False, True))
        sizes = (t.nbytes // parts_of(spec, mesh) for spec in ways)
        kind = kind_of(name)
        found[kind] = tuple(map(operator.add, found.get(kind, (0, 0)), sizes))
    return found


def storages(models: Models, mesh: Mesh, limit: int | None, trained: bool = False) -> dict[str, frozenset[str]]:
    """Model -> the kinds of weights that each chip has whole; the others are stored over all chips, and gathered when a block needs
    them. As many are whole as fit, those first that a block needs first: its work hides the gathering of the others.

    Args:
        models: with their plans. First `whole` models, within `limit`; then `parallel` ones, within `SMALL` of it. Models of one
            class, such as two experts, are stored alike.
        limit: bytes of a chip that weights may take; None: not known.
        trained: only `whole` models; training keeps several times as many bytes where its weights are.
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
    """Manages the HBM of some chips for all that runs there, pipelines and single models. `hbm`: bytes of a chip; `limit`: bytes
    that weights may take; None: not known. `orders`: pipeline -> its runners by name, in the order of use."""

    def __init__(self, hbm: int | None, limit: int | None):
        self.hbm, self.limit = hbm, limit
        self.orders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        # Runners, least recently used first, each with an array that is ready once its programs are done.
        self._placed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def use(self, owner, runners, model: str = "MODEL"):
        """Registers a pipeline's (name, runner) pairs, in the order of use. `model`: the planner's name for it, in messages."""
        self.orders[owner] = dict(runners)
        self._models[owner] = model
        self.choose_storage(self.orders[owner])

    def choose_storage(self, runners: dict, trained: bool = False):
        """Chooses which weights each chip has whole, once per runner. `trained`: they may be trained, as a single model's are."""
        if any(runner.storage is None for runner in runners.values()):
            mesh = next(iter(runners.values())).mesh
            models = {name: (runner.module, runner.plan) for name, runner in runners.items()}
            found = storages(models, mesh, self.limit, trained)
            for name, runner in runners.items():
                runner.storage = found[name] if runner.storage is None else runner.storage

    def place(self, runners):
        """Loads weights onto the chips, while there is room. Raises OutOfHBM for a model that does not fit even alone."""
        runners = [*runners]
        for runner in runners:
            runner.executables.expect()
        for runner in runners:
            runner.current()
            self.load(runner) if runner in self._placed or self.free() >= _bytes(runner) else self.check(runner)

    def check_all(self, owner):
        """Raises ValueError for a model of the pipeline that lacks weights, OutOfHBM for one that does not fit even alone."""
        for runner in self.orders[owner].values():
            runner.current()
            self.check(runner)

    def check(self, runner):
        """Raises OutOfHBM where the runner's weights, as last read, do not fit a chip."""
        need = runner.bytes_per_chip
        if self.limit is None or need <= self.limit:
            return
        name, _ = self._name(runner)
        mesh = ", ".join(f"{axis} {degree}" for axis, degree in runner.mesh.shape.items())
        raise OutOfHBM(
            f"expected the weights of {name} to fit a chip, got {need / GIB:.3g} GiB a chip ({runner.mesh.size} chips: {mesh})"
            f" for {self.limit / GIB:.3g} GiB: {self.hbm / GIB:.3g} GiB of HBM less what activations and programs need"
            " (TPUConfig.reserve_gib). Use more chips, a mesh whose dp and sp split weights further, or bfloat16; what would"
            f" fit says: {self.question(runner)}"
        )

    def question(self, runner) -> str:
        """The planner's command that shows which slices the runner's model fits."""
        _, model = self._name(runner)
        chip = chip_of_kind(runner.mesh.devices.flat[0].device_kind)
        larger = [t.name for t in TOPOLOGIES.values() if t.devices > runner.mesh.size]
        larger = [name for name in larger if chip is TOPOLOGIES[name].chip] or larger or ["v6e-32"]
        return f"diffusers-tpu plan {model} --topology {','.join(larger)} --mesh auto"

    def load(self, runner):
        """Loads the runner's weights, as last read, onto the chips; evicts others if it needs their room."""
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
        """The runners of this runner's pipelines whose model has the same class, plan and weight shapes, in the order of use."""
        orders = [order.values() for order in self.orders.values() if any(r is runner for r in order.values())]
        beside = {id(r): r for order in orders for r in order} or {0: runner}
        same = [r for r in beside.values() if type(r.module) is type(runner.module) and r.plan == runner.plan]
        avals = runner.plan_weights().avals
        return [r for r in same if r is runner or r.plan_weights().avals == avals]

    def prefetch(self, runner, calls: tuple | None):
        """Prefetches the next model of the runner's kind, as far as there is room, while the runner executes calls like these."""
        kind = self.kind(runner)
        after = next(iter(kind[kind.index(runner) + 1 :]), None) if runner in kind else None
        if after is not None and calls is not None:
            after.prepare(calls)
        if after is None or after in self._placed or self.limit is None or _bytes(runner) + _bytes(after) > self.limit:
            return  # if it is not on the chips, it is loaded when it is used
        self._make_room(_bytes(after), keep=runner)
        for one in (after, *[*self._placed][-1:]):  # before the one that runs
            self._placed[one] = self._placed.pop(one, None)
        after.place()

    def ready(self):
        """Waits until the placed weights are on the chips."""
        jax.block_until_ready([runner.plan_weights().arrays for runner in self._placed])

    def leave(self, runner):
        """Evicts the runner's weights, once the programs that use them are done."""
        if runner in self._placed:
            jax.block_until_ready(self._placed.pop(runner))
            runner.drop()

    def forget(self, runner):
        """Forgets a runner that has released its weights for good."""
        self._placed.pop(runner, None)
        for owner, order in self.orders.items():
            self.orders[owner] = {name: r for name, r in order.items() if r is not runner}

    def _name(self, runner) -> tuple[str, str]:
        """(a runner's name in its pipeline, the planner's name of that pipeline)."""
        named_by = ((owner, name) for owner, order in self.orders.items() for name, r in order.items() if r is runner)
        owner, name = next(named_by, (None, type(runner.module).__name__))
        return name, "MODEL" if owner is None else self._models[owner]

    def free(self) -> float:
        """Bytes of a chip that weights may still take."""
        return float("inf") if self.limit is None else self.limit - sum(map(_there, self._placed))

    def _make_room(self, need: int, keep=None):
        if hosts.process_count() > 1 and self.free() < need:
            gc.collect()  # so that all processes count the same bytes, whenever they collect garbage
        for runner in leaving([*self._placed], _there, need, self.limit, keep):
            self.leave(runner)
            logger.info(f"{type(runner.module).__name__} waits on the host: another model needs its room on the chips")


_managers: "weakref.WeakValueDictionary[tuple, HbmManager]" = weakref.WeakValueDictionary()


def room_on(device: jax.Device, config: TPUConfig) -> tuple[int | None, int | None]:
    """(bytes of a chip's HBM, bytes that weights may take); None: not known."""
    chip = chip_of_kind(device.device_kind)
    hbm = int(config.hbm_gib * GIB) if config.hbm_gib is not None else chip and chip.hbm_bytes
    return hbm, None if hbm is None else room_for_weights(hbm, config)


def hbm_manager_of(mesh: Mesh, config: TPUConfig) -> HbmManager:
    """The manager of these chips, shared by every mesh of them and every configuration with the same limit."""
    devices = tuple(sorted(mesh.devices.flat, key=lambda device: device.id))
    hbm, limit = room_on(devices[0], config)
    return _managers.setdefault((devices, hbm, limit), HbmManager(hbm, limit))


def _there(runner) -> int:
    """Bytes on a chip of the runner's placed weights, and of what training keeps beside them."""
    return runner.bytes_per_chip + runner.held_per_chip


def _bytes(runner) -> int:
    """Bytes of a chip that the runner's weights will take."""
    runner.plan_weights()
    return runner.bytes_per_chip
