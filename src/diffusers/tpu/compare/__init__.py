"""A model beside upstream's: same weights, same inputs, one process; submodule by submodule.

    compare, compare_each     every module of a pipeline, and its whole result (`pipelines`)
    compare_component         one component, every submodule of it: where two forms of it part (`modules`)

Of the second, in the order that it is made: `forms` (how a component is run, its submodules' values with it), `harvest` (values
out of a traced program), `matching` (one layout, the same calls), `modules` (errors and the ladder), `page` (the report). Of both:
`roundings` (how much wider limits are on a TPU). `kernels`: which of our kernels a trace holds, and models whose traces hold all.
"""

from .forms import Form, forms_of, run_form
from .modules import Comparison, ModuleRow, compare_component, compare_modules
from .pipelines import (
    DTYPES,
    LOW_PRECISION_FACTOR,
    MESHES,
    Call,
    Reference,
    Row,
    compare,
    compare_each,
    compare_on,
    draw_arguments,
    load,
    make_reference,
    modules,
    record,
    relative_error,
)


__all__ = [
    "DTYPES",
    "LOW_PRECISION_FACTOR",
    "MESHES",
    "Call",
    "Comparison",
    "Form",
    "ModuleRow",
    "Reference",
    "Row",
    "compare",
    "compare_component",
    "compare_each",
    "compare_modules",
    "compare_on",
    "draw_arguments",
    "forms_of",
    "load",
    "make_reference",
    "modules",
    "record",
    "relative_error",
    "run_form",
]
