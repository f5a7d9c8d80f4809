"""A torch module's method as a pure function of (weights, inputs, numbers), all JAX arrays; equal blocks as one scanned block."""

from .caches import Step, StepCache, kept_by
from .function import PureFunction, on_every_chip, tracing
from .functional import NumberRead, undone_trace
from .previous_call import depends_on_previous_call
from .results import PLAIN, TENSOR, NoProgram, TraceResult, WeightWritten
from .user_code import hooks_of, replaced_parts
from .video import in_tiles, scan_batches, scan_chunks, shard_width  # as `examples/tpu/MIGRATION.md` names them
