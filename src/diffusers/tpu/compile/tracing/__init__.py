"""A torch module's method as a pure function of (weights, inputs, numbers), all JAX arrays; equal blocks as one scanned block."""

from .blocks import WeightWritten
from .caches import NotOnce, Step, StepCache, kept_by
from .function import INPUT, Entangled, Opaque, PureFunction, TraceResult, on_every_chip, tracing, undone_trace
from .intermediates import Marked, Tag, capture, capture_p, capturing
from .previous_call import depends_on_previous_call
from .scale import NumberRead
from .video import (
    attention_by_frame,
    doubled,
    in_tiles,
    looking_back,
    normed_by_place,
    on_a_slab,
    over_width,
    scan_alike,
    scan_batches,
    scan_chunks,
)


__all__ = [
    "Entangled",
    "INPUT",
    "StepCache",
    "Marked",
    "NotOnce",
    "NumberRead",
    "Opaque",
    "PureFunction",
    "Step",
    "Tag",
    "TraceResult",
    "WeightWritten",
    "attention_by_frame",
    "capture",
    "capture_p",
    "capturing",
    "doubled",
    "in_tiles",
    "kept_by",
    "depends_on_previous_call",
    "looking_back",
    "normed_by_place",
    "on_a_slab",
    "on_every_chip",
    "over_width",
    "scan_alike",
    "scan_batches",
    "scan_chunks",
    "tracing",
    "undone_trace",
]
