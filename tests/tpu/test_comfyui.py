"""The nodes of examples/tpu/comfyui, ComfyUI's three functions stubbed, against a server in this process.

Oracles: the server's jobs; the pipeline called by hand.
"""

import importlib.util
import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import tiny
from conftest import ROOT, needs


needs("fastapi.sse", "prometheus_client", "uvicorn")

from diffusers.tpu.apps.serving.server import Settings  # noqa: E402
from test_bulk import by_hand  # noqa: E402
from test_serving import DEFAULTS, SIZE, SMALL, listening, wait  # noqa: E402


FOLDER = ROOT / "examples/tpu/comfyui"


class Interrupted(Exception):
    """As ComfyUI's own."""


@pytest.fixture
def comfy(monkeypatch):
    """The nodes by name; `shown`: (progress, preview); `interrupt`: set to interrupt the graph."""
    shown, interrupt = [], threading.Event()

    def throw():
        if interrupt.is_set():
            raise Interrupted

    bar = SimpleNamespace(update_absolute=lambda value, total, preview=None: shown.append((value, preview)))
    names = {"throw_exception_if_processing_interrupted": throw, "VideoFromFile": lambda file: file.read()}
    for name in ("comfy", "comfy.utils", "comfy.model_management", "comfy_api", "comfy_api.input_impl"):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(names, ProgressBar=lambda total: bar)
        setattr(sys.modules[name.partition(".")[0]], name.rpartition(".")[2], module)
    spec = importlib.util.spec_from_file_location("tpu_nodes", FOLDER / "__init__.py")
    monkeypatch.setitem(sys.modules, "tpu_nodes", package := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(package)
    monkeypatch.setattr(package, "PREVIEW_SECONDS", 0)
    monkeypatch.setattr(package, "LOOK_SECONDS", 0.02)  # sixty steps of the model may take a fifth of a second
    yield SimpleNamespace(nodes=package.NODE_CLASS_MAPPINGS, shown=shown, interrupt=interrupt)
    del sys.modules["tpu_nodes.client"]


def settings(size, **more) -> Settings:
    return Settings("tiny", DEFAULTS, (size,), page=False, **more)


def test_a_video_with_progress_and_previews_and_one_that_is_interrupted(wan, comfy, monkeypatch):
    monkeypatch.setattr("diffusers.tpu.apps.serving.preview.LEAST_FIT", -1e9)  # the model's frames are noise
    graph = json.loads((FOLDER / "text_to_video.json").read_text())["1"]
    with listening(wan, settings(SMALL)) as (address, service):
        asked = {**graph["inputs"], "steps": 60, "negative_prompt": "blue", "server": address}
        node = comfy.nodes[graph["class_type"]]()
        (content,) = node.make(**asked)
        (job,) = service.jobs.all()
        assert content == job.files[0].read_bytes() and job.steps == 60
        assert (job.request.seed, job.request.arguments["negative_prompt"]) == (6, "blue")
        values, previews = zip(*comfy.shown)
        assert [*values] == sorted(values) and values[-1] == 100
        assert {(preview[0], preview[1].size) for preview in previews if preview} == {("JPEG", (384, 384))}
        see = service.worker._see

        def slowly(*step):
            see(*step)
            comfy.interrupt.set()
            time.sleep(0.2)  # or all 60 steps are over before the request to cancel comes

        monkeypatch.setattr(service.worker, "_see", slowly)
        with pytest.raises(Interrupted):
            node.make(**asked)
        wait(lambda: service.jobs.all()[0].finished)
        assert service.jobs.all()[0].state == "cancelled"


def test_a_video_that_starts_from_a_picture(comfy):
    with listening(tiny.wan_i2v(), settings(SMALL)) as (address, service):
        picture = torch.rand(1, 32, 32, 3)
        comfy.nodes["TPUImageToVideo"]().make(prompt="a red circle", seed=0, image=picture, server=address)
        (job,) = service.jobs.all()
        sent = torch.tensor(np.asarray(job.request.arguments["image"])) / 255
        assert job.request.seed == 0 and (sent - picture[0]).abs().max() < 0.51 / 255


def test_images_one_that_is_interrupted_and_what_is_said_where_there_are_none(flux, comfy, monkeypatch):
    make, asked = comfy.nodes["TPUTextToImage"]().make, {"prompt": "moving left", "seed": 1, "n": 2}
    with listening(flux, settings(SIZE, token="secret")) as (address, service):
        with pytest.raises(RuntimeError, match="Bearer TOKEN.*set DIFFUSERS_TPU_TOKEN"):
            make(**asked, server=address)
        monkeypatch.setenv("DIFFUSERS_TPU_TOKEN", "secret")
        (images,) = make(**asked, server=address)
        expected = np.stack([by_hand(flux, "moving left", seed) for seed in (1, 2)])
        assert np.abs(255 * images.numpy() - expected).max() < 1.01
        with pytest.raises(RuntimeError, match="compiled .16x16., got 8x8"):
            make(**asked, size="8x8", server=address)

        def see(*_):
            comfy.interrupt.set()
            wait(lambda: service.jobs.running()[0].cancelling)

        monkeypatch.setattr(service.worker, "_see", see)
        with pytest.raises(Interrupted):
            make(**asked, server=address)
    comfy.interrupt.clear()
    for server, message in ((address, "expected a server at http.*serve MODEL --port"), ("here", "http://HOST:PORT")):
        with pytest.raises((RuntimeError, ValueError), match=message):
            make(**asked, server=server)
