"""The build backend: setuptools, with the pinned upstream release as one more build requirement.

The requirement is read from `patches/UPSTREAM` instead of being written a second time in pyproject.toml, and it is not asked
for where the release is already in `.upstream/`: a second installation fetches nothing. `setup.py` does the laying.
"""

import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

from upstream import read_pin, store_path


ROOT = Path(__file__).resolve().parents[1]


def _requirements(config_settings=None):
    pin = read_pin(ROOT)
    return [] if store_path(ROOT, pin).exists() else [pin.requirement]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """A wheel of what stands in the tree now: setuptools would ship what an earlier build left behind, too."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = _requirements
