"""One component in two forms, submodule by submodule: `diffusers-tpu compare MODEL --component NAME`.

Part of the repository, not of the wheel. In the order that a comparison is made: `forms` and `nnx` (how a component is run, values of
submodules with it), `marks` and `intermediates` (values out of a traced program), `matching` (one layout, the same calls), `modules` (errors and the
ladder), `page` (the report), `command`. Of `compare --trace`: `obstacles`, `trace`, `trace_command`.
"""

from .forms import Form, run_form  # noqa: F401
from .modules import compare_component  # noqa: F401
