"""torch_xla, where it is installed too (Colab, Kaggle): upstream's loops would import it and call `mark_step` in each step.

It would take the chips, which one runtime can have. accelerate and transformers ask USE_TORCH_XLA before they import it.
"""

import os

from ...utils import import_utils
from ..notices import warn_once
from .replacing import Replacements


def replace(replacements: Replacements):
    """torch_xla is not there for diffusers, and for what reads the variable from here on."""
    if not import_utils._torch_xla_available:
        return
    replacements.put(import_utils, "_torch_xla_available", False)
    os.environ["USE_TORCH_XLA"] = "0"
    warn_once(
        "torch_xla",
        "torch_xla: on the TPU path models run through JAX, and torch_xla, which would take the chips, is left out"
        " (USE_TORCH_XLA=0). Import diffusers before accelerate; DIFFUSERS_TPU=off leaves the TPU to torch_xla",
    )
