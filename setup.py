"""Lays upstream's files into src/diffusers (patches/laying.py), then builds the distribution `diffusers` from what stands there.

Upstream's requirements, extras and console script are taken from upstream's own metadata; below is only what we add.
"""

import email
import re
import sys
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "patches"))

from laying import lay  # noqa: E402
from unified import ForkError  # noqa: E402
from upstream import open_store, read_pin  # noqa: E402


REVISION = 1  # of our work on one upstream release
PYTHONS = (11, 12, 13)  # tested, of Python 3

# libtpu has wheels for this platform only; elsewhere the TPU path runs on simulated chips.
HAS_LIBTPU = "sys_platform == 'linux' and platform_machine == 'x86_64'"

REQUIRES = [
    # torchax 0.0.13 needs aten.cholesky and aten.qr when it is imported: torch 2.14 and 2.15 have neither (tried: 2.14.1).
    "torch>=2.6,<=2.13.0",
    "torchax>=0.0.13,<0.0.14",
    "jax>=0.10.2,<0.11",
    f"jax[tpu]>=0.10.2,<0.11; {HAS_LIBTPU}",
    "flax>=0.12,<0.13",
    "flatbuffers>=24",  # jax.export's files
    "jaxtyping>=0.3",
    "transformers>=5.0,<6",  # 5.24.0, the newest, works too (tried)
    "accelerate>=1.0",
    "sentencepiece>=0.2",  # UMT5's tokenizer
    "protobuf>=4",  # the same, where it is converted from the sentencepiece model
    "ftfy>=6",  # Wan's prompt cleaning
    "imageio>=2.30",
    "imageio-ffmpeg>=0.5",
    "jinja2>=3.1",  # the pages of plan and compare
    "rich>=13",
    "tqdm>=4.60",
]
HTTP = ["fastapi>=0.135", "uvicorn>=0.34", "prometheus_client>=0.20", "python-multipart>=0.0.20"]
SERVE = [*HTTP, "gradio>=6,<7"]
RAY = ["ray[data,serve]>=2.55"]
TEST = [
    *HTTP, "peft>=0.17", "pytest>=8", "pytest-xdist>=3.6", "ruff>=0.9", "build>=1", "setuptools>=77", "httpx2>=2",
    "playwright>=1.50", "nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6", "uv>=0.8",
]  # fmt: skip


def upstream_requirements(requirements: list[str]) -> dict[str, list[str]]:
    """Upstream's requirements by extra; those without one under the empty name."""
    by_extra: dict[str, list[str]] = {"": []}
    for requirement in requirements:
        plain, _, extra = requirement.partition("; extra == ")
        by_extra.setdefault(extra.strip("'\""), []).append(plain)
    return by_extra


try:
    lay(ROOT)
except ForkError as error:
    sys.exit(f"\n{error}\n")
pin = read_pin(ROOT)
store = open_store(ROOT)
metadata = email.message_from_bytes(store[pin.dist_info + "METADATA"])
extras = upstream_requirements(metadata.get_all("Requires-Dist"))
always = extras.pop("")
scripts = re.findall(r"^\S+ = \S+$", store[pin.dist_info + "entry_points.txt"].decode(), re.M)
data = [
    path.relative_to(ROOT / "src" / "diffusers").as_posix()
    for path in (ROOT / "src" / "diffusers").rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
]

setup(
    name=pin.name,
    version=f"{pin.version}+tpu.{REVISION}",
    description="diffusers, on TPU: upstream's release with a small set of patches and a TPU path through torchax and JAX.",
    long_description=(ROOT / "README_TPU.md").read_text() if (ROOT / "README_TPU.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=f">=3.{min(PYTHONS)}",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in PYTHONS],
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={pin.name: data},
    install_requires=always + REQUIRES,
    extras_require={**extras, "test": TEST, "serve": SERVE, "ray": RAY},
    entry_points={"console_scripts": [*scripts, "diffusers-tpu = diffusers.tpu.apps.cli:main"]},
    zip_safe=False,
)
