"""Random modules of a user's, changed at random between two calls, ours beside upstream's torch: `python tests/tpu/key_fuzz.py [COUNT] [SEED]`.

A world is a script of its own: globals, classes, hooks, a model that reads some of it. It is made twice, once for torch and once for the
chips; both are changed by the same lines. Prints how many worlds differ (0 expected) and how many ran line by line.
"""

import os
import random
import sys
import tempfile
import types
from dataclasses import dataclass

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
    changes: tuple[str, ...]
    steady: bool = True


FEATURES = {
    "global": Feature("A = 1.0", "A", ("A = 2.0", "A = -0.5", "A = 1")),
    "flag": Feature("F = True", "(2.0 if F is True else 3.0)", ("F = 1", "F = False", "F = True")),
    "zero": Feature("Z = 0.0", "(2.0 + math.copysign(1.0, Z))", ("Z = -0.0", "Z = 0.0", "Z = 0")),
    "dict": Feature("D = {'a': 1.0, 'b': [2.0, {'c': 3.0}]}", "D['b'][1]['c']", ("D['b'][1]['c'] = 4.0", "D['b'][1] = {'c': 1.5}")),
    "namespace": Feature("N = argparse.Namespace(s=1.0)", "N.s", ("N.s = 0.5", "N = argparse.Namespace(s=2.5)")),
    "module": Feature("S = types.ModuleType('settings'); S.s = 1.0", "S.s", ("S.s = 3.0", "S.s = 3")),
    "module by name": Feature("S2 = types.ModuleType('settings'); S2.s = 1.0; KEY = 's'", "getattr(S2, KEY)", ("S2.s = 3.0",)),
    "slots": Feature("class Slots:\n  __slots__ = ('s', 't')\nL = Slots(); L.s = 1.0", "L.s", ("L.s = 0.2", "L.s = 7")),
    "dataclass": Feature(
        "@dataclasses.dataclass\nclass Config:\n  s: float = 1.0\n  inner: object = None\nC = Config(inner=Config(2.0))",
        "C.inner.s", ("C.inner.s = 3.0", "C.inner = Config(3.0)", "C.inner.s = 5.0"),
    ),
    "deque": Feature("Q = collections.deque([1.0, 2.0])", "Q[0]", ("Q[0] = 3.0", "Q.appendleft(0.25)")),
    "default dict": Feature("DD = collections.defaultdict(lambda: 1.5)", "DD['x']", ("DD['x'] = 2.0", "DD.default_factory = lambda: 4.0"), False),
    "environment": Feature("", "float(os.environ.get('FUZZ', '1'))", ("os.environ['FUZZ'] = '2.5'", "os.environ['FUZZ'] = '0.5'", "os.environ.pop('FUZZ', None)")),
    "variable": Feature("V = contextvars.ContextVar('V'); V.set(1.0)", "V.get()", ("V.set(2.0)", "V.set(0.25)")),
    "array": Feature("R = np.array([1.0, 2.0])", "float(R[1])", ("R[1] = 3.0", "R *= 0.5", "R = R.copy()")),
    "array of whole numbers": Feature("W = np.arange(3)", "int(W[2])", ("W[2] = 5",)),
    "tensor": Feature("T = torch.tensor([1.5])", "T", ("T.data.mul_(2)", "T.mul_(0.5)", "T = torch.tensor([3.0])", "T.data = torch.tensor([0.5])")),
    "attribute tensor": Feature("setup.append(lambda m: setattr(m, 'plain', torch.ones(8)))", "self.plain", ("model.plain.data.mul_(3)", "model.plain.add_(1)")),
    "attribute flag": Feature("setup.append(lambda m: setattr(m, 'flag', True))", "(2.0 if self.flag is True else 3.0)", ("model.flag = 1", "model.flag = True", "model.flag = 1.0")),
    "closure": Feature(
        "def counter():\n  n = 1.0\n  def get(): return n\n  def put(x):\n    nonlocal n\n    n = x\n  return get, put\nget, put = counter()",
        "get()", ("put(2.0)", "put(0.5)"),
    ),
    "partial": Feature("P = functools.partial(lambda a, b: a * b, 2.0, b=1.5)", "P()", ("P.keywords['b'] = 3.0", "P = functools.partial(lambda a, b: a + b, 2.0, b=1.5)")),
    "defaults": Feature("def default(a=1.5): return a", "default()", ("default.__defaults__ = (2.5,)",)),
    "function attribute": Feature("def scaled(): return scaled.s\nscaled.s = 1.0", "scaled()", ("scaled.s = 2.0",)),
    "helper": Feature("H = 1.0\ndef inner(): return H\ndef helper(): return inner() + 1", "helper()", ("H = 2.0", "inner = lambda: 5.0")),
    "class attribute": Feature("class K:\n  s = 1.0\n  table = [1.0, 2.0]", "(K.s * K.table[1])", ("K.s = 2.0", "K.table[1] = 0.5")),
    "method": Feature("class Me:\n  def get(self): return 1.5\nM = Me()", "M.get()", ("Me.get = lambda self: 2.5", "M.get = lambda: 0.5", "vars(M).pop('get', None)")),
    "property": Feature("class Pr:\n  base = 2.0\n  @property\n  def s(self): return self.base * FACTOR\nFACTOR = 1.0\nPR = Pr()", "PR.s", ("FACTOR = 3.0", "PR.base = 0.5")),
    "class of an object": Feature(
        "class One:\n  def get(self): return 1.0\nclass Two(One):\n  def get(self): return 2.0\nO = One()",
        "O.get()", ("O.__class__ = Two", "O.__class__ = One"),
    ),
    "class of a module": Feature(
        "class Half(torch.nn.Linear):\n  def forward(self, x): return super().forward(x) * 0.5",
        "1.0", ("model.linear.__class__ = Half", "model.linear.__class__ = torch.nn.Linear"),
    ),
    "patched class": Feature(
        "G = {'s': 1.0}\nreal = Part.forward\nPart.forward = lambda self, *a: real(self, *a) * G['s']", "1.0", ("G['s'] = 0.5", "G['s'] = 3.0"),
    ),
    "graph": Feature(
        "class Node:\n  def __init__(self, s, to): self.s, self.to = s, to\n  def total(self): return self.s + (self.to.total() if self.to else 0)\nX = Node(1.0, Node(2.0, None))",
        "X.total()", ("X.to.s = 5.0", "X.to.to = Node(0.5, None)"),
    ),
    "dict of functions": Feature("U = 1.0\nFN = {'f': lambda: U, 'g': lambda: 2 * U}", "FN['f']()", ("U = 3.0", "FN['f'] = FN['g']")),
    "number of a class": Feature("class Strength(float):\n  pass\nY = Strength(1.5); Y.more = 1.0", "(Y * Y.more)", ("Y.more = 2.0", "Y = Strength(0.5); Y.more = 1.0")),
    "reference": Feature("class Far: s = 1.0\nfar = Far(); REF = weakref.ref(far)", "REF().s", ("far.s = 2.5",)),
    "set": Feature("SET = {1.0}", "sum(SET)", ("SET.add(2.0)", "SET.discard(1.0)")),
    "object in a list": Feature("class It:\n  def __init__(self, s): self.s = s\n  def __getitem__(self, i): return self.s * i\nLS = [It(1.0), It(2.0)]", "LS[1][2]", ("LS[1].s = 3.0", "LS.reverse()")),
    "enumeration": Feature("class E(enum.Enum):\n  A = 1.0\n  B = 2.0\nEN = E.A", "EN.value", ("EN = E.B", "EN = E.A")),
    "own number": Feature("setup.append(lambda m: [setattr(p, 'layer_idx', n) for n, p in enumerate(m.parts)])", "1.0", ("model.parts[1].layer_idx = 4",)),
    "bytes": Feature("BA = bytearray(b'abc')", "float(BA[0])", ("BA[0] = 7",)),
    "numbers": Feature("PA = array.array('d', [1.5, 2.0])", "PA[0]", ("PA[0] = 3.0", "PA.append(1.0)")),
    "imported inside": Feature("sys.modules['fuzz_settings'] = types.ModuleType('fuzz_settings')\nsys.modules['fuzz_settings'].s = 1.0\ndef late():\n  from fuzz_settings import s\n  return s", "late()", ("sys.modules['fuzz_settings'].s = 2.0", "sys.modules['fuzz_settings'].s = 0.5")),
    "by the table of modules": Feature("sys.modules['fuzz_table'] = types.ModuleType('fuzz_table')\nsys.modules['fuzz_table'].s = 1.0", "sys.modules['fuzz_table'].s", ("sys.modules['fuzz_table'].s = 2.0",), False),
    "file": Feature("", "float(pathlib.Path(os.environ['FUZZ_FILE']).read_text())", ("pathlib.Path(os.environ['FUZZ_FILE']).write_text('2.5')", "pathlib.Path(os.environ['FUZZ_FILE']).write_text('1.0')"), False),
    "counted": Feature("CT = itertools.count(1)", "next(CT)", (), False),
    "cycled": Feature("CY = itertools.cycle([1.0, 2.0, 3.0])", "next(CY)", (), False),
    "generator": Feature("GE = (n * 0.5 for n in range(1, 100))", "next(GE)", (), False),
    "own generator": Feature("RG = random.Random(3)", "RG.random()", ("RG.seed(4)",), False),
    "numpy's generator": Feature("NG = np.random.default_rng(3)", "float(NG.random())", (), False),
    "random": Feature("", "random.random()", (), False),
    "numpy's random": Feature("", "float(np.random.rand())", (), False),
    "torch's random": Feature("", "torch.rand(1)", (), False),
    "kept results": Feature("B = 1.0\n@functools.lru_cache\ndef kept(): return B", "kept()", ("B = 2.0", "kept.cache_clear()"), False),
    "counter": Feature("class Co:\n  n = 0\n  def up(self):\n    self.n += 1\n    return self.n\nCO = Co()", "CO.up()", ("CO.n = 0",), False),
    "global counter": Feature("GC = 0\ndef up():\n  global GC\n  GC += 1\n  return GC", "up()", ("GC = 0",), False),
    "given number": Feature("", "ctx.s", ("ctx.s = 2.0", "ctx.s = 0.5", "ctx.s = 1")),
    "given tensor": Feature("", "ctx.t", ("ctx.t.mul_(2)", "ctx.t.data.add_(1)", "ctx.t = torch.full((8,), 0.5)")),
    "given nested": Feature("", "ctx.inner.d['s']", ("ctx.inner.d['s'] = 2.0", "ctx.inner.d = {'s': 3.0}")),
    "given cache": Feature("", "ctx.cached(x)", ("ctx.cache.clear()",), False),
    "given list": Feature("", "ctx.kept(x)", (), False),
}  # fmt: skip

PLACES = {
    "forward": "",
    "part": "part_reads = lambda self, x, ctx: x * ({read})",
    "processor": "class Processor:\n  def __call__(self, x, ctx):\n    return x * ({read})\nsetup.append(lambda m: setattr(m.parts[0], 'processor', Processor()))",
    "hook": "def hook(self, args, out):\n  ctx = CONTEXT\n  x = args[0]\n  return out * ({read})\nsetup.append(lambda m: m.parts[1].linear.register_forward_hook(hook))",
    "pre-hook": "def before(self, args):\n  ctx = CONTEXT\n  x = args[0]\n  return (x * ({read}),)\nsetup.append(lambda m: m.parts[0].linear.register_forward_pre_hook(before))",
    "own forward": "def own(part, x, ctx):\n  self = part\n  return part.linear(x) * ({read})\nsetup.append(lambda m: setattr(m.parts[1], 'forward', functools.partial(own, m.parts[1])))",
    "activation": "class Activation(torch.nn.Module):\n  def forward(self, x):\n    ctx = CONTEXT\n    return x * ({read})\nsetup.append(lambda m: setattr(m, 'activation', Activation()))",
}  # fmt: skip
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
