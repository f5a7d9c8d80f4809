"""Which of our kernels a trace holds, and small models whose traces together hold every one on a TPU.

Kernels leave short calls to the compiler (`LEAST_ROWS` in `linear`): a check at a tiny size would run none of them.
"""

from collections.abc import Iterator

import torch
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from ..compile.module import CompiledModule
from ..config import TPUConfig
from ..pipelines.plans import module_plan


TOKENS = 4096  # of a chip: of fewer, linear layers of `WIDTH` channels would wait for their weights
WIDTH, HEAD = 2048, 128
EDGE = 64  # of latents


def kernels_in(program: ClosedJaxpr | Jaxpr) -> set[str]:
    """Names of the Pallas kernels of a traced program, also inside of loops, branches and parts of one chip."""
    found = set()
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "pallas_call":
            found.add(equation.params["name"])
        else:
            found.update(*map(kernels_in, _programs(equation.params.values())))
    return found


def _programs(values) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in values:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _programs(value)


def denoiser(chips: int) -> tuple[torch.nn.Module, dict]:
    """A Wan transformer of one block and a call of it: attention, linear layers, norm with rotation; of several chips, exchanges."""
    from ... import WanTransformer3DModel

    dims = {"num_attention_heads": WIDTH // HEAD, "attention_head_dim": HEAD, "ffn_dim": 2 * WIDTH, "num_layers": 1}
    model = WanTransformer3DModel(**dims, text_dim=64, freq_dim=64, in_channels=16, out_channels=16).bfloat16().eval()
    frames = chips * TOKENS // (EDGE // 2) ** 2
    latents = torch.zeros(1, 16, frames, EDGE, EDGE, dtype=torch.bfloat16)
    text = torch.zeros(1, 128, 64, dtype=torch.bfloat16)
    call = {"hidden_states": latents, "timestep": torch.tensor([500]), "encoder_hidden_states": text}
    return model, {**call, "return_dict": False}


def unet() -> tuple[torch.nn.Module, dict]:
    """A UNet of maps and a call of it, on one chip: convolutions."""
    from ... import UNet2DConditionModel

    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "norm_num_groups": 16}
    model = UNet2DConditionModel(**kinds, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=64)
    sample = torch.zeros(1, 4, EDGE, EDGE, dtype=torch.bfloat16)
    text = torch.zeros(1, 8, 64, dtype=torch.bfloat16)
    call = {"sample": sample, "timestep": torch.tensor(500), "encoder_hidden_states": text, "return_dict": False}
    return model.bfloat16().eval(), call


def kernels_of(
    module: torch.nn.Module, entry: str, call: dict, mesh: Mesh, config: TPUConfig = TPUConfig()
) -> set[str]:
    """Those of the program that a run would compile of this call on these chips; nothing is placed."""
    runner = CompiledModule(module, module_plan(module), mesh, config)
    runner.attach()
    try:
        taken = runner.flatten_call(entry, (), call)
        runner.current()
        return kernels_in(runner.trace(taken, 1).traced.jaxpr)
    finally:
        runner.detach()
