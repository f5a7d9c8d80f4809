"""Gradients of a compiled call. Torch sees one `autograd.Function` per call; the backward pass is a program of its own.

In training mode the call's program keeps residuals on the chips, and its key names what asks for a gradient. In evaluation mode the
call runs the program without gradients, and the backward pass computes it again: a script that only forgot `torch.no_grad` pays
nothing. Scanned blocks keep their inputs, attention's results and, as far as a chip has room, those of their layers
(`tracing.keeping`), with or without upstream's gradient checkpointing. The rest is computed again.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from ...utils import logging
from .. import bridge
from ..chips.locks import exclusive
from ..chips.sharding import default_spec
from ..weights.hbm import room_for_programs, room_on
from .call import ONLY_BACKWARD, Call
from .chip_arrays import ChipArray, stand, together
from .optimizers import STATES, serve
from .programs import Program
from .tracing.sums import with_wide_sums


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What a call is differentiated by: numbers of its tensors, keys of weights. `room`: bytes of a chip for what scanned blocks
    keep. `keeps`: its program keeps residuals."""

    tensors: tuple[int, ...]
    weights: tuple[str, ...]
    room: float
    keeps: bool

    def of(self, call: Call) -> Call:
        """The same call, with a key that names what is wanted of it."""
        key = *call.key[:-1], ("gradients", *dataclasses.astuple(self)), call.key[-1]
        return dataclasses.replace(call, key=key, wanted=self)


class Differentiable:
    """A traced program's executables for gradients: outputs with residuals, and gradients from these; or the whole backward pass.

    Gradients of weights are sharded as the weights are stored.

    Attributes:
        reached: for each wanted tensor and weight, whether each floating-point output depends on it; without any it has no gradient.
    """

    def __init__(self, program: Program, wanted: Wanted):
        self.program, self.wanted = program, wanted
        self.reached: list[list[bool]] = []
        # Shard residuals like weights without a rule: the compiler's own sharding may be uneven, which JAX refuses.
        self._spread = False
        # The vjp function is a pytree of residuals. Of each: whether it is an argument, and its number among these or the rest.
        self._tree: jax.tree_util.PyTreeDef | None = None
        self._places: list[tuple[bool, int]] = []

    def forward(self, *given) -> tuple[list[jax.Array], list[jax.Array]]:
        """Flat outputs, and residuals. `given`: weights, numbers, inputs."""
        outputs, new = self.run("outputs_and_residuals", *given)
        flat = jax.tree.leaves(given)
        return outputs, [flat[n] if is_given else new[n] for is_given, n in self._places]

    def __getstate__(self) -> dict:
        """Without what only tracing needs."""
        return vars(self) | {"program": None, "_tree": None}

    def run(self, name: str, *arguments):
        """What the method `_name` returns for these arguments, by its executable."""
        self.compile(name, *arguments)
        return self.program.executables[name](*arguments)

    def compile(self, name: str, *arguments) -> bool:
        """Compile the method `_name` for arguments like these; False: that is done already."""
        if name in self.program.executables:
            return False
        start = time.perf_counter()
        lowered = self._lower(name, *arguments)
        try:
            self.program.executables[name] = self.program.compile_lowered(lowered, f", {name}")
        except ValueError as error:
            if type(error).__name__ != "IndivisibleError" or self._spread:
                raise
            self._spread = True
            return self.compile(name, *arguments)
        seconds = time.perf_counter() - start
        self.program.compile_seconds += seconds
        logger.info(f"compiled {self.program.name}.{self.program.entry}, {name}, in {seconds:.1f} s")
        return True

    def lowered(self) -> jax.stages.Lowered:
        """The whole backward pass, lowered from shapes alone."""
        everywhere = NamedSharding(self.program.mesh, PartitionSpec())
        floating = (x for x in self.program.avals if jnp.issubdtype(x.dtype, jnp.inexact))
        gradients = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in floating]
        return self._lower("there_and_back", *self.program.given, gradients)

    def _lower(self, name: str, *arguments) -> jax.stages.Lowered:
        closed, outputs = jax.make_jaxpr(getattr(self, f"_{name}"), return_shape=True)(*arguments)
        run, tree = jaxpr_as_fun(with_wide_sums(closed)), jax.tree.structure(outputs)
        return jax.jit(lambda *given: tree.unflatten(run(*jax.tree.leaves(given)))).trace(*arguments).lower()

    def _outputs_and_residuals(self, *given):
        outputs, back = self._way_back(given)
        residuals, self._tree = jax.tree.flatten(back)
        arguments = {id(x): n for n, x in enumerate(jax.tree.leaves(given))}
        new = [x for x in residuals if id(x) not in arguments]
        if self._spread:
            mesh = self.program.mesh
            where = (NamedSharding(mesh, default_spec(x.shape, mesh)) for x in new)
            new = [jax.lax.with_sharding_constraint(*pair) for pair in zip(new, where)]
        kept = iter(range(len(new)))
        self._places = [(True, arguments[id(x)]) if id(x) in arguments else (False, next(kept)) for x in residuals]
        return outputs, new

    def _back(self, residuals, gradients):
        """Gradients of what is wanted and `reached`, tensors first. `gradients`: of the floating-point outputs."""
        return self._as_stored(jax.tree.unflatten(self._tree, residuals)(gradients)[0])

    def _there_and_back(self, *given_and_gradients):
        """`_back` without residuals: the program's arguments are given instead."""
        *given, gradients = given_and_gradients
        return self._as_stored(self._way_back(given)[1](gradients)[0])

    def _way_back(self, given) -> tuple[list, Callable]:
        """Outputs, and the function from their gradients to the gradients of what is wanted and `reached`."""
        flat, jaxpr = jax.tree.leaves(given), self.program.traced.jaxpr
        numbers = itertools.count()
        weights, _, inputs = jax.tree.map(lambda _: next(numbers), tuple(given))
        places = [inputs[n] for n in self.wanted.tensors] + [weights[key] for key in self.wanted.weights]
        floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jaxpr.out_avals]
        alone = ([n == one for n in range(len(floating))] for one, is_floating in enumerate(floating) if is_floating)
        used = [partial_eval.dce_jaxpr(jaxpr.jaxpr, one)[1] for one in alone]
        self.reached = [[by_output[place] for by_output in used] for place in places]
        places = [*itertools.compress(places, map(any, self.reached))]

        def outputs_of(asked):
            arguments = list(flat)
            for place, x in zip(places, asked):
                arguments[place] = x
            outputs = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *arguments)
            return [*itertools.compress(outputs, floating)], outputs

        _, back, outputs = jax.vjp(outputs_of, [flat[n] for n in places], has_aux=True)
        return outputs, back

    def _as_stored(self, gradients: list) -> list:
        avals, everywhere = self.program.given[0], NamedSharding(self.program.mesh, PartitionSpec())
        there = [everywhere] * len(self.wanted.tensors) + [avals[key].sharding for key in self.wanted.weights]
        there = itertools.compress(there, map(any, self.reached))
        return [jax.lax.with_sharding_constraint(*pair) for pair in zip(gradients, there)]


class _Call(torch.autograd.Function):
    """A call of a model, between its flat output tensors and those of its arguments and weights that ask for a gradient."""

    @staticmethod
    def forward(ctx, call: "DifferentiatedCall", *asked: torch.Tensor):
        token = torch.empty(0)  # holds what is kept: torch frees it after the backward pass
        outputs, token.kept = call.run()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.mark_non_differentiable(*(t for t in outputs if not _is_floating(t)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise NotImplementedError(ONLY_BACKWARD.format("create_graph=True"))
        (token,) = ctx.saved_tensors
        return None, *ctx.call.back(token.kept, gradients, [node for node, _ in ctx.next_functions])


class DifferentiatedCall:
    """One call of a module's method that torch can differentiate.

    In training mode its program keeps residuals; else the call's values are kept, and it is computed again. The program of other
    calls cannot serve for that where they have sparse attention or 8-bit layers.
    """

    def __init__(self, runner, call: Call):
        serve()
        self.runner, self.call = runner, call
        self.keeps = runner.module.training or call.sparse is not None or runner.settings.linear != "bfloat16"
        self.inputs = {n: t for n, t in enumerate(call.tensors) if t.requires_grad}
        tensors, self.weights = runner.state.now.tensors, {}
        for key, names in runner.plan_weights().sources.items():
            asked = {n: tensors[name] for n, name in enumerate(names) if name and tensors[name].requires_grad}
            self.weights |= {key: asked} if asked else {}
        asked = sum(t.nbytes for some in self.weights.values() for t in some.values())
        whole = sum(t.nbytes for t in tensors.values())
        if 2 * asked > whole:  # gradients and optimizers' states are sharded as weights are
            runner.storage = frozenset()
            runner.plan_weights()
        self.wanted = Wanted((*self.inputs,), (*self.weights,), self._room(), self.keeps)

    def _room(self) -> float:
        """Bytes of a chip that are left by programs, weights, and the gradients and AdamW states of trained weights."""
        runner = self.runner
        hbm, _ = room_on(runner.mesh.devices.flat[0], runner.config)
        if hbm is None:
            return math.inf
        return hbm - room_for_programs(hbm, runner.config) - runner.bytes_per_chip - (1 + STATES) * self.trained

    @property
    def trained(self) -> int:
        """Bytes of a chip that the weights which ask for gradients take."""
        avals = (self.runner.plan_weights().avals[key] for key in self.weights)
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in avals)

    def find(self) -> Program | None:
        """Look up or trace its program; None: the call cannot be compiled."""
        if self.keeps:
            self.call = self.wanted.of(self.call)
        self.program = self.runner.find_program(self.call, 1)
        return self.program

    def ready(self) -> bool:
        """As `CompiledModule.make_ready`."""
        return self.runner.make_ready(self.call, self.program, self._compile if self.keeps else None)

    def _compile(self, program: Program) -> bool:
        with self.runner.within_hbm(lambda: f"to train {self.runner.name} by {program.shapes}"):
            first = self._differentiable(program).compile("outputs_and_residuals", *self._given())
        if first:
            self._count()
        return first

    def _count(self):
        self.runner.compiled += 1
        self.runner.traced.fit()

    def output(self):
        """Upstream's return value."""
        runner, call = self.runner, self.call
        asked = [*self.inputs.values(), *(t for some in self.weights.values() for t in some.values())]
        with torch.enable_grad():  # a VAE's posterior computes when it is made
            return runner.output_of(self.program.result, _Call.apply(self, *asked), call)

    def run(self) -> tuple[list[torch.Tensor], object]:
        """Flat output tensors, and what is kept for `back`."""
        runner, call, program = self.runner, self.call, self.program
        if self.keeps:
            with runner.within_hbm(lambda: f"to train {runner.name} by {program.shapes}"):
                outputs, kept = self._differentiable(program).forward(*self._given())
            program.calls += 1
        else:
            outputs, kept = runner.execute(program, [call])[0], self._given()
        call.values = None  # torch frees what is kept, with its graph
        return [bridge.from_numpy(x) for x in outputs], kept

    def back(self, kept, gradients: tuple[torch.Tensor | None, ...], nodes: list) -> Iterator[torch.Tensor | None]:
        """Gradients of what asked for one, arguments first. None where no output that has a gradient depends on it, and where the
        gradient of a weight stays on the chips. `gradients`: of the flat outputs. `nodes`: where torch passes each gradient on."""
        runner, program, nodes = self.runner, self.program, iter(nodes)
        with torch.inference_mode(False), torch.no_grad(), exclusive.pinned():
            everywhere = NamedSharding(program.mesh, PartitionSpec())
            floating = [(x, g) for x, g in zip(program.avals, gradients) if jnp.issubdtype(x.dtype, jnp.inexact)]
            given = [
                bridge.to_jax(g.contiguous(), everywhere)
                if g is not None
                else jnp.zeros(x.shape, x.dtype, device=everywhere)
                for x, g in floating
            ]
            with runner.within_hbm(lambda: f"to go back through {runner.name} of {program.shapes}"):
                if not self.keeps:
                    program = self._program_again()
                differentiable = self._differentiable(program)
                before = len(program.executables)
                way = ("back", kept) if self.keeps else ("there_and_back", *kept)
                found = differentiable.run(*way, given)
            if len(program.executables) > before:
                self._count()
                runner.executables.keep_program(program)
            computed, found = iter(found), []
            for depends in differentiable.reached:
                x = next(computed) if any(depends) else None
                found.append(x if any(g is not None for _, g in itertools.compress(floating, depends)) else None)
            found = iter(found)
            for t, x, _ in zip(self.inputs.values(), found, nodes):
                yield None if x is None else bridge.from_numpy(x).to(t.dtype)
            for (key, asked), x in zip(self.weights.items(), found):
                there = [next(nodes) for _ in asked]
                held = None if x is None else ChipArray(runner.plan_weights(), key, x)
                if held is None or _kept(held, asked, there):
                    yield from [None] * len(asked)
                else:
                    yield from (held.part(number, t.shape, t.dtype)[...] for number, t in asked.items())

    def _program_again(self) -> Program:
        """The traced program of a call whose values were kept."""
        call = self.wanted.of(self.call)
        self.runner.current()
        if self.runner.state_key != self.call.state:
            raise RuntimeError(
                f"expected {self.runner.name} as it was when it was called, to go back through the call; its Python state has"
                " changed since: call backward() before changing it, or put it into training mode, model.train()"
            )
        return self.runner.find_program(call, 1)

    def _given(self) -> tuple:
        values = self.call.values
        return values.weights, values.numbers, values.inputs

    def _differentiable(self, program: Program) -> Differentiable:
        if program.differentiable is None:
            program.differentiable = Differentiable(program, self.wanted)
        return program.differentiable


def _kept(held: ChipArray, asked: dict[int, torch.Tensor], nodes: list) -> bool:
    """Whether gradients of weights stay on the chips, added to those there. Not if torch passes them on to more than `.grad`."""
    stack, dtype = held.array.shape[: held.placed.is_stacked(held.key)], held.array.dtype
    like = all((*stack, *t.shape) == held.array.shape and t.itemsize == dtype.itemsize for t in asked.values())
    if not like or len(asked) != held.tensors or not all(map(_accumulates, asked.values(), nodes)):
        return False
    former = [t.grad for t in asked.values()]
    if all(t is None for t in former):
        for t, gradient in zip(asked.values(), stand(held, former, asked[0].dtype)):
            t.grad = gradient
        return True
    before = together(former)
    if before is None or (before.placed, before.key) != (held.placed, held.key):
        return False
    before.become(_sum(before.array, held.array))
    return True


def _accumulates(t: torch.Tensor, node) -> bool:
    """Whether torch only adds a gradient that reaches this node to the tensor's."""
    if type(node).__name__ != "AccumulateGrad" or t._backward_hooks or t._post_accumulate_grad_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` does not say for a tensor's own node
        return False


_sum = jax.jit(jnp.add, donate_argnums=0)


def _is_floating(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
