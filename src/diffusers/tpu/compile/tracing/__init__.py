"""A torch module's method as a pure function of (weights, inputs, numbers), all JAX arrays; equal blocks as one scanned block."""

from ...kernels.video.halo import NotByShards, keys_here
from .caches import Step, StepCache, kept_by
from .function import PureFunction, on_every_chip, tracing
from .functional import NumberRead, undone_trace
from .previous_call import depends_on_previous_call
from .results import PLAIN, TENSOR, NoProgram, TraceResult, WeightWritten
from .user_code import hooks_of, replaced_parts
from .video import (
    attention_by_frame,
    behind,
    causal_pad,
    doubled,
    in_tiles,
    keeping_last,
    normed_by_place,
    on_a_shard,
    on_one_chip,
    scan_alike,
    scan_batches,
    scan_chunks,
    shard_maps,
    shard_width,
)
