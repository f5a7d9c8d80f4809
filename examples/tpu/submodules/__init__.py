"""One component in two forms, submodule by submodule: `diffusers-tpu compare MODEL --component NAME`.

The wheel does not contain it. In the order of a comparison: `forms` and `nnx` run a component and capture its submodules' values, `marks`
and `intermediates` make values of a traced program its outputs, `matching` brings values to one layout, `modules` computes errors and
limits, `page` writes the report, `command` prints tables. For `compare --trace`: `obstacles`, `trace`, `trace_command`.
"""

from .forms import Form, run_form  # noqa: F401
from .modules import compare_component  # noqa: F401
