"""Random modules of a user's, changed at random between two calls, ours beside upstream's torch: `python tests/tpu/key_fuzz.py [COUNT] [SEED]`.

A world is a script of its own: globals, classes, hooks, a model that reads some of it. It is made twice, once for torch and once for the
chips; both are changed by the same lines. Prints how many worlds differ (0 expected) and how many ran line by line.
"""

import json
import os
import random
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Feature:
    """Something that a user's code reads.

    Attributes:
        made: lines of the script that make it.
        read: an expression, in the place of a factor; `self` is the model, `ctx` an object that it is given.
        changes: lines that change it.
        steady: no call changes it: it need not run line by line.
    """

    made: str
    read: str
    changes: list[str]
    steady: bool = True


TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
FEATURES = {name: Feature(*row) for name, row in TABLE["features"].items()}
PLACES = TABLE["places"]  # where a feature is read
NEEDS_MODEL = {"attribute tensor", "attribute flag"}
GIVEN = {name for name in FEATURES if name.startswith("given")}

SCRIPT = """
import argparse, array, collections, contextvars, dataclasses, enum, functools, itertools, math, os, pathlib, random, sys, types, weakref
import numpy as np, torch
setup = []
class Inner:
  def __init__(self): self.d = {{'s': 1.0}}
class Context:
  def __init__(self): self.s, self.t, self.inner, self.cache, self.seen = 1.0, torch.ones(8), Inner(), {{}}, []
  def cached(self, x):
    if 'k' not in self.cache: self.cache['k'] = x * 2
    return self.cache['k']
  def kept(self, x):
    self.seen = [*self.seen[-2:], x.abs().mean()]
    return sum(self.seen)
CONTEXT = Context()
part_reads = None
class Part(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.linear, self.processor, self.layer_idx = torch.nn.Linear(8, 8), None, 0
  def forward(self, x, ctx):
    y = self.linear(x) * (1 + 0.25 * self.layer_idx)
    if part_reads is not None: y = part_reads(self, y, ctx)
    return y if self.processor is None else self.processor(y, ctx)
{made}
class Model(torch.nn.Module):
  _repeated_blocks = ['Part']
  def __init__(self):
    super().__init__()
    self.linear, self.activation = torch.nn.Linear(8, 8), torch.nn.SiLU()
    self.parts = torch.nn.ModuleList(Part() for _ in range(3))
  def forward(self, x, ctx=None):
    x = self.linear(x){forward}
    for part in self.parts: x = part(x, ctx)
    return self.activation(x)
torch.manual_seed(0)
model = Model().eval()
for f in setup: f(model)
"""


def make_world(names: list[str], place: str, other: str) -> dict:
    """The script's namespace: all features are read in `place`, the first also in `other`."""
    read = " * ".join(f"({FEATURES[name].read})" for name in names)
    made = [FEATURES[name].made for name in names]
    made += [
        PLACES[where].format(read=one)
        for where, one in ((place, read), (other, FEATURES[names[0]].read))
        if PLACES[where]
    ]
    forward = f" * ({read})" if place == "forward" else ""
    module = types.ModuleType("world")
    exec(compile(SCRIPT.format(made="\n".join(made), forward=forward), "<world>", "exec"), vars(module))
    return vars(module)


def draw(rng: random.Random) -> tuple[list[str], str, str]:
    place = rng.choice([*PLACES])
    allowed = [
        n
        for n in FEATURES
        if (place == "forward" or n not in NEEDS_MODEL)
        and (n not in GIVEN or place in ("forward", "part", "processor"))
    ]
    names = rng.sample(allowed, rng.choice([1, 1, 1, 2, 2, 3]))
    free = names[0] not in NEEDS_MODEL | GIVEN
    others = [p for p in PLACES if p not in (place, "forward")] if free else []
    return names, place, rng.choice(others) if others and rng.random() < 0.3 else "forward"


FILE = tempfile.NamedTemporaryFile("w", suffix=".txt")
os.environ.setdefault("FUZZ_FILE", FILE.name)
FILE.write("1.0")
FILE.flush()


def seed(number: int):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def call(world: dict, number: int) -> torch.Tensor:
    seed(1000)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        return world["model"](x, world["CONTEXT"])


def changes(rng: random.Random, names: list[str]) -> list[str]:
    """None, or one, before each of the calls."""
    found = ["", ""]
    for name in names:
        some = FEATURES[name].changes
        found += [*some, ""] if len(some) < 3 else [*rng.sample(some, 2), ""]
    return found[: 2 + 6]


def apart(names, place, other, lines, install) -> tuple[list[float], str | None]:
    """Differences of each call, and why the model ran line by line, if it did."""
    theirs, ours = make_world(names, place, other), make_world(names, place, other)
    install(ours["model"])
    found = []
    for number, line in enumerate(lines):
        environment = dict(os.environ)
        for world in (theirs, ours):
            os.environ.clear()
            os.environ.update(environment)
            exec(line.replace("ctx.", "CONTEXT."), world)
        want, got = call(theirs, number), call(ours, number)
        found.append(float((got - want).norm() / want.norm().clamp_min(1e-9)))
    return found, next(iter(ours["model"]._tpu_runner.eager), None)


def main(count: int, first: int):
    import diffusers.tpu

    wrong, eager, unneeded, reasons = 0, 0, 0, {}
    for number in range(first, first + count):
        rng = random.Random(number)
        names, place, other = draw(rng)
        lines = changes(rng, names)
        os.environ.pop("FUZZ", None)
        try:
            found, why = apart(names, place, other, lines, diffusers.tpu.install)
        except Exception as error:
            found, why = [float("inf")], repr(error)[:300]
        eager += why is not None
        if why is not None and all(FEATURES[name].steady for name in names):
            unneeded += 1
            reasons[f"{names} {place}: {why}"] = number
        if not max(found) < 1e-5:
            wrong += 1
            print(f"seed {number}: {names} in {place}, {other}: {found} after {lines} {why or ''}", flush=True)
        if number % 50 == 49:
            print(f"{number + 1 - first} of {count}: {wrong} differ, {eager} ran line by line", flush=True)
    print(
        f"{count} modules: {wrong} differ, {eager} ran line by line, {unneeded} of these had nothing that changes with a call"
    )
    for reason, number in reasons.items():
        print(f"  seed {number}: {reason}")
    return wrong


if __name__ == "__main__":
    os.environ.setdefault("DIFFUSERS_TPU", "cpu")
    os.environ.setdefault("DIFFUSERS_TPU_DEVICES", "2")
    sys.exit(main(*map(int, [*sys.argv[1:], 500, 0][:2])) != 0)
