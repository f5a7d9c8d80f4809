"""A model beside upstream's: same weights, same inputs, one process; submodule by submodule.

    compare, compare_each     every module of a pipeline, and its whole result (`pipelines`)
    compare_component         one component, every submodule of it: where two forms of it part (`modules`)

Of the second, in the order that it is made: `forms` and `nnx` (how a component is run, values of submodules with it), `intermediates`
(values out of a traced program), `matching` (one layout, the same calls), `modules` (errors and the ladder), `page` (the report). Of
both: `roundings` (how much wider limits are on a TPU).
"""

from .forms import Form, run_form  # noqa: F401
from .modules import compare_component  # noqa: F401
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
