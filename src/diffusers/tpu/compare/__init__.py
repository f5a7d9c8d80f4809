"""A model beside upstream's: same weights, same inputs, one process.

`pipelines`: every module of a pipeline, and its whole result; `roundings`: how much wider limits are on a TPU. One component, submodule by
submodule, is `examples/tpu/submodules/`.
"""

from .pipelines import (  # noqa: F401
    DTYPES,
    LOW_PRECISION_FACTOR,
    MESHES,
    Call,
    Row,
    compare,
    compare_each,
    compare_on,
    draw_arguments,
    load,
    make_reference,
    record,
    relative_error,
)
