"""The inputs of one case of `values_at_size.py`: a component with random weights, and the arguments of its first call in a pipeline."""

import io
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field


DRAWN = {  # arguments that a model of zeros has made zeros
    "hidden_states", "sample", "z", "x", "encoder_hidden_states", "encoder_hidden_states_2", "pooled_projections", "text_embeds",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of a model's component.

    Attributes:
        small: changes of the configuration for `--small`.
        what: a name for the record; the case's own if it is empty.
    """

    model: str
    component: str
    entry: str = "forward"
    call: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    small: dict = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeat: bool = True
    steps: int = 0  # of a whole loop; 0: one call
    gradients: bool = False
    clamped: bool = False  # the outputs, to [-1, 1]
    what: str = ""


def recorded(case: Case, device: str, small: bool):
    """Returns (pipeline, args, kwargs, dtypes of their leaves in bfloat16, component); the component is random and on the device."""
    import torch
    from accelerate import init_empty_weights

    from diffusers.tpu.planner import building

    # In another process, as it imports torchax: with that, torch has no gradients on CUDA.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        saved = io.BytesIO(apart.submit(_arguments, case, small).result())
    args, kwargs, narrow = torch.load(saved, weights_only=False)
    pipe = building.build(building.configuration_of(case.model), torch.float32, tiled=False)
    module = getattr(pipe, case.component)
    with init_empty_weights():  # what upstream keeps as plain attributes stays on the host, where all goes later
        # Names of defaults among it would be left out, whatever is said of them.
        config = {name: x for name, x in module.config.items() if name != "_use_default_values"}
        module = type(module).from_config(config | (case.small if small else {}))
    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            owner._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, device=device), requires_grad=False)
    _fill(module.eval().to(device))
    setattr(pipe, case.component, module)
    return pipe, drawn(args, "", case.gradients), drawn(kwargs, "", case.gradients), narrow, module


def _arguments(case: Case, small: bool) -> bytes:
    """Returns what `torch.save` writes of the args and kwargs of the component's first call, and their leaves' dtypes in bfloat16."""
    import torch
    from torch.utils._pytree import tree_leaves

    from diffusers.tpu.planner import building, recording

    class Stop(Exception):
        pass

    class Runner(recording.RecordingRunner):
        def run(self, entry, args, kwargs, back=False):
            if (self.component, entry) == (case.component, case.entry):
                raise Stop(args, kwargs)
            return super().run(entry, args, kwargs)

    configuration = building.configuration_of(case.model)
    call = {**configuration.call, **case.call, "num_inference_steps": 4}
    if small:
        call |= {"height": 64, "width": 96} | ({"num_frames": 9} if "num_frames" in call else {})

    def arguments(dtype):
        try:
            recording.record(building.build(configuration, dtype, tiled=False), call, runner=Runner)
            raise RuntimeError(f"expected a call of {case.component}.{case.entry}")
        except Stop as stop:
            return stop.args

    args, kwargs = arguments(torch.float32)
    narrow = [getattr(leaf, "dtype", None) for leaf in tree_leaves(arguments(torch.bfloat16))]
    saved = io.BytesIO()
    torch.save((args, kwargs, narrow), saved)
    return saved.getvalue()


def _fill(module):
    """Fills weights with random values exact in bfloat16: matrices preserve norms, weights of norms are near one, biases near zero."""
    import torch

    of_norms = (m for m in module.modules() if "norm" in type(m).__name__.lower())
    norms = {id(p) for m in of_norms for p in m.parameters(recurse=False)}
    for name, p in module.named_parameters():
        if p.ndim > 1 and id(p) not in norms:
            p.data.normal_(0, 1 / math.sqrt(max(1, p[0].numel())))
        else:
            p.data.normal_(1.0 if name.endswith(("weight", "gamma")) else 0.0, 0.1)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(torch.bfloat16))


def drawn(given, name: str, gradients: bool):
    """Returns the arguments; those named in `DRAWN` are random, and require gradients if `gradients`."""
    import torch

    if isinstance(given, dict):
        return {key: drawn(x, key, gradients) for key, x in given.items()}
    if isinstance(given, (list, tuple)):
        names = (name or ("hidden_states" if n == 0 else "") for n in range(len(given)))
        return type(given)(drawn(x, name, gradients) for x, name in zip(given, names))
    if isinstance(given, torch.Tensor) and given.is_floating_point():
        if name in DRAWN:
            return torch.randn(given.shape).to(torch.bfloat16).float().requires_grad_(gradients)
        return given.float().contiguous().clone()
    return given.clone() if isinstance(given, torch.Tensor) else given


def placed(given, device, narrow: list, dtype):
    """Returns the arguments on the device in the dtypes of a run in `dtype`; `requires_grad` is kept."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(given)
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            there = leaf.detach().to(device, narrow[n] if dtype == torch.bfloat16 else leaf.dtype)
            leaves[n] = there.requires_grad_(leaf.requires_grad)
    return tree_unflatten(leaves, spec)


def floating(output) -> list:
    """Returns the floating tensors of an output."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
