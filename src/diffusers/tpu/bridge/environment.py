"""torchax's environment with our rules for mixed tensors, random draws and operators."""

import contextlib
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchax.ops import mappings
from torchax.tensor import Environment as _Environment
from torchax.tensor import OperatorNotFound, Tensor

from ..chips.hosts import process_count, put
from ..common import notices
from ..idioms.devices import inside
from ..weights.checkpoint import is_about_values, settled
from ..weights.convert import as_numpy, from_numpy
from . import autocast, functions, host_values, operators, views
from .decisions import decided
from .host_values import READS, plain, usable_outside
from .layers import cast
from .lines import asking_line
from .on_host import drawn, refusal
from .traits import Traits, traits_of


DEVICE = torch.device("jax")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def on_device(x) -> bool:
    return isinstance(x, Tensor)


class Deferred(Tensor):
    """A device tensor of known shape and dtype. `compute()` runs when its value is first needed, and sets it by `settle(value)`.

    `source`: what made it, or (). Its first entry has a method `result(func, args, kwargs)`, which returns the function's result
    without computing this tensor, or NotImplemented where the function needs values.
    """

    def __new__(cls, aval: jax.ShapeDtypeStruct, compute: Callable[[], None], source: tuple = ()):
        return Tensor.__new__(cls, aval, environment())

    def __init__(self, aval: jax.ShapeDtypeStruct, compute: Callable[[], None], source: tuple = ()):
        self._aval, self._env, self._compute, self._array, self.source = aval, environment(), compute, None, source

    @property
    def waits(self) -> bool:
        """Whether its value is still to be computed."""
        return self._array is None and self._compute is not None

    def settle(self, value: jax.Array):
        self._array, self._compute, self.source = value, None, ()

    def become(self, t: Tensor):
        """Become a tensor with the array of `t`; where `t` is a view, the same view of its base."""
        vars(self).update(vars(t))
        self._compute, self.source = None, ()

    @property
    def shape(self):
        return torch.Size((self._aval if self.waits else self._elem).shape)

    ndim = property(lambda self: len(self.shape))

    @property
    def dtype(self):
        return mappings.j2t_dtype((self._aval if self.waits else self._elem).dtype)


class Functions(TorchFunctionMode):
    """Dispatches torch's functions to the environment; a function without an operator there is decomposed by torch."""

    def __init__(self, env: "Environment"):
        self.env = env

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return self.env.dispatch(func, types, args, kwargs)
        except OperatorNotFound:
            pass  # outside of this handler, so that an error below does not name this one as its context
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Dispatches the operators that torch decomposes functions into to the environment."""

    NAMESPACES = ("aten", "torchvision")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # dynamo compiles nothing here, and disabling it around each operator takes time

    def __init__(self, env: "Environment"):
        super().__init__()
        self.env = env

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in self.NAMESPACES:
            return self.env.dispatch(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class Environment(_Environment):
    """torchax's environment, entered around glue and traces.

    - A host tensor in an operation with device tensors is copied to all chips of the mesh in use, whatever its size; torchax fails.
      One that is written to stays on the host. `torch.tensor` of device tensors makes a host tensor unless `device` says otherwise.
    - Random draws come from torch's CPU generators, so that a seed gives the same noise as on a CPU.

    Attributes:
        draws: random draws so far. If a trace changes it, its program would repeat the drawn numbers in every call.
        missing: how often each operator ran on the host because torchax lacks it, by operator and calling line.
        one_at_a_time: block on the result of each operation; None: only on simulated chips of several processes, where two programs
            with collectives would block each other's threads, or run in different orders.
    """

    def __init__(self):
        super().__init__()
        self._function_mode, self._dispatch_mode = Functions(self), Operators(self)
        self.draws = 0
        self.one_at_a_time: bool | None = None
        self.missing: Counter[str] = Counter()

    def enable_torch_modes(self):
        super().enable_torch_modes()
        inside.depth += 1

    def disable_torch_modes(self, *exc):
        super().disable_torch_modes(*exc)
        inside.depth -= 1

    # torchax's name for `active`. torchax sets it for all threads at once, although its modes are per thread.
    enabled = property(lambda self: self.active, lambda self, value: None)

    def _to_copy(self, the_tensor, new_dtype, new_device):
        # The move to the device makes 64-bit numbers 32-bit, so a host tensor is cast before the move, not after
        # (a scheduler's 999.99999999 in float64 is timestep 999, not 1000).
        if new_dtype is not None and not on_device(the_tensor):
            the_tensor = self._on_host(torch.Tensor.to, (the_tensor,), {"dtype": new_dtype})
        if new_device is not None and self._should_use_torchax_tensor(new_device):
            new_device = DEVICE  # under any of its names
        return cast(the_tensor, super()._to_copy(the_tensor, new_dtype, new_device))

    def _torch_Tensor_to(self, args, kwargs):
        result, flags = super()._torch_Tensor_to(args, kwargs), [x for x in args if isinstance(x, bool)]
        copy = kwargs.get("copy", flags[1:] == [True])  # after `non_blocking`
        return result.clone() if copy and result is args[0] else result

    @property
    def waits(self) -> bool:
        """Whether each operation blocks until its result is computed."""
        if self.one_at_a_time is None:
            return process_count() > 1 and jax.default_backend() == "cpu"
        return self.one_at_a_time

    @property
    def active(self) -> bool:
        """Whether this thread is inside of a resident pipeline's call or a trace, where torch computes on the device."""
        return inside.depth > 0

    # torchax traverses arguments and results with torch's pytrees; JAX's take a seventh of the time.

    def t2j_iso(self, torchtensors):
        def elem(x):
            if isinstance(x, Tensor):
                return x.jax()
            return super(Environment, self).t2j_iso(x) if isinstance(x, torch.Tensor) else x

        return jax.tree.map(elem, torchtensors)

    def j2t_iso(self, jaxarray):
        return jax.tree.map(lambda x: Tensor(x, self) if isinstance(x, jax.Array) else x, jaxarray)

    def dispatch(self, func, types, args, kwargs):
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            return func(*args)
        if (given := autocast.given(func, args, kwargs)) is not None:
            with autocast.without():
                return self._given(func, types, *given)
        traits = traits_of(func)
        self.draws += traits.draws
        if traits.draws_new:
            numbers = self._on_host(func, args, {**kwargs, "device": "cpu"})
            return self.moved(numbers) if self._should_use_torchax_tensor(kwargs.get("device")) else numbers
        if traits.lists and args and isinstance(args[0], (list, tuple)):
            if not self._should_use_torchax_tensor(kwargs.get("device")):
                args = tree_map_only(Tensor, self.host, args)
        if isinstance(kwargs.get("out"), torch.Tensor):  # torchax's operator may have no such argument
            rest = {name: value for name, value in kwargs.items() if name != "out"}
            return _written(kwargs["out"], getattr(func, "overloadpacket", func)(*args, **rest))
        tensors = [t for t in jax.tree.leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not tensors and traits.is_overload and "device" not in kwargs:
            try:
                return super().dispatch(func, types, args, kwargs)
            except OperatorNotFound:  # such as a query about dtypes
                return self._on_host(func, args, kwargs)
        for t in tensors:
            if isinstance(t, Deferred) and t.waits:
                if t.source and (result := t.source[0].result(func, args, kwargs)) is not NotImplemented:
                    return result
                t.jax()  # now: inside of an operator torch would not decompose what the computation calls
        if traits.asks and (answering := host_values.asked(args[0])) is not None:
            return self._on_host(func, (answering,), {})
        device = [on_device(t) for t in tensors]
        if tensors and not any(device) and not traits.moves:
            return self._on_host(func, args, kwargs)
        if traits.is_overload and traits.draws:
            return drawn(self, func, args, kwargs, self._on_host)
        if not all(device) and any(device) and not traits.moves:
            if views.WRITES_TO_FIRST.fullmatch(getattr(func, "__name__", "")) and not on_device(args[0]):
                return self._on_host(func, *tree_map_only(Tensor, self.host, (args, kwargs)))
            # A scalar stays on the host: torchax's own rule does not let it widen the other operand, as in torch.
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t if t.ndim == 0 and traits.pointwise else self.moved(t), (args, kwargs)
            )
        if traits.pointwise and (wide := [t.dtype for t in tensors if t.ndim]) and len(wide) < len(tensors):
            args, kwargs = tree_map_only(
                Tensor, functools.partial(_as_scalar, functools.reduce(torch.promote_types, wide)), (args, kwargs)
            )
        try:
            result = self.with_decided(functools.partial(self._computed, func, types, traits), args, kwargs)
        except OperatorNotFound:
            if not traits.is_overload or any(on_device(t) and isinstance(t.jax(), jax.core.Tracer) for t in tensors):
                raise
            result = drawn(self, func, args, kwargs, self._in_place_of_missing)
        except READS:
            raise
        except Exception as error:
            if (refused := refusal(func, args, kwargs, error)) is None:
                raise
            raise refused from None
        host_values.follow(func, args, kwargs, result)
        views.follow(func, args, kwargs, result)
        if self.waits:
            jax.block_until_ready([t.jax() for t in tree_leaves(result) if type(t) is Tensor])
        return result

    def _computed(self, func, types, traits: Traits, args: tuple, kwargs: dict):
        """The result of torchax's operator, without torchax's own traversals of the arguments, which would change nothing here."""
        if traits.constructs or traits.moves:
            return super().dispatch(func, types, args, kwargs)
        operator = self._get_op_or_decomp(func)
        with jax.named_scope(traits.name):
            if operator.needs_env:
                kwargs = {**kwargs, "env": self}
            if operator.is_jax_function:
                args, kwargs = self.t2j_iso((args, kwargs))
                return self.j2t_iso(operator.func(*args, **kwargs))
            with self._dispatch_mode:  # it may call other operators
                return operator.func(*args, **kwargs)

    def _given(self, func, types, args, kwargs):
        """`func` of the cast arguments. A function that has no operator is called, and torch decomposes it."""
        try:
            return self.dispatch(func, types, args, kwargs)
        except OperatorNotFound:
            if isinstance(func, torch._ops.OpOverload):
                raise
            return func(*args, **kwargs)

    def with_decided(self, operator: Callable, args: tuple, kwargs: dict):
        """The operator's result. Where it reads traced values, guards supply booleans, and integers too if those are not enough."""
        try:
            return operator(args, kwargs)
        except READS:
            for kinds in ((torch.bool,), (torch.bool, *INTEGERS)):
                with jax.ensure_compile_time_eval(), contextlib.suppress(*READS):
                    if (given := self._decided(kinds, (args, kwargs))) is not None:
                        return operator(*given)
            raise

    def _decided(self, kinds: tuple, given):
        """`given` with guards' values in place of traced tensors of these dtypes; None where no guard has any."""
        found = []

        def known(t):
            values = decided(t.jax()) if t.dtype in kinds else None
            found.append(values is not None)
            return t if values is None else Tensor(jax.numpy.asarray(values), self)

        given = tree_map_only(Tensor, known, given)
        return given if any(found) else None

    def _in_place_of_missing(self, func: torch._ops.OpOverload, args, kwargs):
        line = asking_line()
        result = self._on_host(func, args, kwargs)
        layouts = {t.layout for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        if layouts - {torch.strided}:
            raise OperatorNotFound(f"{func} gives tensors of {layouts}, which no device tensor can be")
        self.missing[f"torchax lacks {func} ({line})"] += 1
        notices.warn_once(f"missing {func} {line}", f"{func} runs on the host, torchax has no such operator: {line}")
        return result

    @contextlib.contextmanager
    def left(self):
        """A context outside of the environment: torch's own operators, on host tensors."""
        with contextlib.ExitStack() as stack:
            for _ in range(inside.depth):
                self.disable_torch_modes()
                stack.callback(self.enable_torch_modes)
            yield

    @staticmethod
    def _on_host(func, args, kwargs):
        if is_about_values(func):
            settled(args, kwargs)
        with plain():
            return func(*args, **kwargs)

    def deferred(self, aval: jax.ShapeDtypeStruct, compute: Callable[[], None], source: tuple) -> Deferred:
        return Deferred(aval, compute, source)

    def moved(self, t: torch.Tensor) -> torch.Tensor:
        """A host or device tensor as a device tensor."""
        return t if on_device(t) else Tensor(self.t2j_copy(t), self)

    def t2j_copy(self, args):
        """Host tensors as JAX arrays, on every chip of the mesh in use (`override_property(mesh=...)`)."""
        mesh = self.param.mesh

        def there(t: torch.Tensor) -> jax.Array:
            values = as_numpy(t, own=True)
            array = jax.numpy.asarray(values) if mesh is None else put(values, NamedSharding(mesh, PartitionSpec()))
            host_values.remember(array, values)
            return array

        return tree_map_only(torch.Tensor, there, args)

    def j2t_copy(self, args):
        return tree_map_only(jax.Array, from_numpy, args)

    def host(self, t) -> torch.Tensor:
        """A device tensor as a host tensor."""
        values = host_values.of_tensor(t)
        return from_numpy(t.jax() if values is None else values)


def _written(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`out` with the result's values, and its shape. Raises RuntimeError for a dtype that cannot hold them, as torch does."""
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
    if out.shape == result.shape:
        return out.copy_(result)
    if on_device(out):
        out.data = result.to(out.dtype)
        return out
    return out.resize_(result.shape).copy_(result)


@plain()
def _as_scalar(dtype: torch.dtype, t: Tensor) -> Tensor:
    """A tensor without axes, cast to the other operands' dtype unless torch would promote those; other tensors unchanged."""
    if t.ndim or t.dtype == dtype:
        return t
    kinds = torch.empty(1, dtype=dtype), torch.empty((), dtype=t.dtype)
    return Tensor(t.jax().astype(mappings.t2j_dtype(dtype)), t._env) if torch.result_type(*kinds) == dtype else t


_INTEGERS_FIT = ("ignore", re.compile("Explicitly requested dtype.*is not available"), Warning, None, 0)


@contextlib.contextmanager
def quiet_integers():
    """A context without JAX's warning, given once per call site, that torch's int64 becomes int32; indices and ids fit.

    Warning filters are global to the process. Each thread inside has added one, so that threads may leave in any order.
    """
    warnings.filters.insert(0, _INTEGERS_FIT)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the filters were reset meanwhile
            warnings.filters.remove(_INTEGERS_FIT)


@functools.cache
def environment() -> Environment:
    """The environment of this process, with our operators registered."""
    env = Environment()
    operators.register(env)
    functions.register(env)
    usable_outside()
    return env
