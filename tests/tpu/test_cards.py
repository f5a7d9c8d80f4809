"""Model-card scripts, word for word, from a local hub cache of tiny models under the published names, on simulated chips.

The oracle is the same script without the path (see cards.py), from the same seed and pictures. A script that asks for half
precision is held to what half precision costs upstream: its distance from upstream's float32 is at most 1.25 times that
of upstream's own run in the script's dtypes, and `ROUNDING` (of one seed: 0.71 to 1.33 times, of twelve of LTX 1.02 in the
mean). Two draws of roundings over few pixels differ that much by chance; a seed that is past it is asked with more beside
it. A script in float32 is within `SAME` of upstream (measured: 5e-7 to 1.5e-6).
"""

import contextlib
import gc

import huggingface_hub.constants
import numpy as np
import pytest

import cards
from cards import CARDS, FAST
from conftest import slow
from diffusers.tpu import idioms
from diffusers.tpu.compare.pipelines import LOW_PRECISION_FACTOR
from hub import MAKERS, Hub


SAME = 1e-4
ROUNDING = 1e-3  # of one draw of roundings to another: a script has one prompt, one seed and few pixels
MORE_SEEDS = 5


@pytest.fixture(scope="session")
def hub(tmp_path_factory) -> Hub:
    return Hub(tmp_path_factory.mktemp("hub"))


@contextlib.contextmanager
def on_path(monkeypatch, path: str):
    """The environment of a process that began with DIFFUSERS_TPU=path."""
    was_on = idioms._replacements is not None
    with monkeypatch.context() as patch:
        patch.setenv("DIFFUSERS_TPU", path)
        (idioms.off if path == "off" else idioms.on)()
        yield
    (idioms.on if was_on else idioms.off)()


@pytest.fixture
def run(hub, tmp_path, monkeypatch, chips):
    """A function from a card, a text of its script, a path and a seed to what the script left, all from one set of pictures."""
    if hub.cache.exists():
        gc.collect()  # the models of the card before
    monkeypatch.setenv("DIFFUSERS_TPU_DEVICES", "2")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub.cache))

    def run(card: cards.Card, script: str, path: str, seed: int) -> cards.Ran:
        for name in cards.repositories(script):
            if name in MAKERS:
                hub.lay(name)
        with on_path(monkeypatch, path):
            return cards.run(script, card, monkeypatch, tmp_path / f"run{len([*tmp_path.iterdir()])}", seed)

    return run


def allowed(own: float) -> float:
    return LOW_PRECISION_FACTOR * own + ROUNDING if own > SAME else SAME


def distances(run, card: cards.Card, script: str) -> tuple[float, float]:
    """From upstream's float32, of one seed: upstream's own run in the script's dtypes, and ours."""
    seed = int(np.random.randint(2**31))
    ours = run(card, script, "cpu", seed)
    theirs, oracle = (run(card, cards.without_path(script, float32), "off", seed) for float32 in (False, True))
    assert ours.shapes() == theirs.shapes() == oracle.shapes()
    assert ours.files.keys() == theirs.files.keys() and all(ours.files.values())
    own, error = cards.distance(theirs, oracle), cards.distance(ours, oracle)
    print(f"{card.name}: seed {seed}, error {error:.2e}, upstream's own {own:.2e}")
    return own, error


@pytest.mark.parametrize("float32", [False, slow(True)])
@pytest.mark.parametrize("card", [card if card in FAST else slow(card) for card in CARDS], ids=lambda card: card.name)
def test_cards(run, card, float32):
    """The script with the path against the same without. Half precision hides errors of its own size; in float32 it hides none."""
    script = cards.in_float32(card.script()) if float32 else card.script()
    draws = [distances(run, card, script)]
    (own, error), *_ = draws
    if own > SAME and error > allowed(own):
        draws += [distances(run, card, script) for _ in range(MORE_SEEDS)]
        own, error = np.sqrt(np.mean(np.square(draws), axis=0))
    assert error <= allowed(own)
