"""Serving and bulk under load, as their scripts do it: minutes each. Oracles: those of serve_load.py and bulk_kills.py."""

import base64
import importlib.util
import io
import json
import os
import sys
import urllib.request

import numpy as np
import pytest
from PIL import Image

import bulk_kills
import serve_load
import tiny_images
from conftest import ROOT


SERVED = ("fastapi.sse", "uvicorn", "prometheus_client", "python_multipart")


def read(name: str) -> dict:
    return json.loads((ROOT / "examples/tpu/results" / name).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", serve_load.PATHS)
def test_many_clients_some_of_them_rude(kind, tmp_path):
    for package in SERVED:
        pytest.importorskip(package)
    facts = serve_load.run(kind, tmp_path, 50, 1000, "--no-page", "--max-batch", "4")
    assert serve_load.holds(facts), facts


@pytest.mark.slow
@pytest.mark.parametrize("ray", (False, True), ids=("processes", "ray"))
def test_many_prompts_while_processes_are_killed(ray, tmp_path):
    if ray:
        pytest.importorskip("ray.data")
    tiny_images.flux().save_pretrained(tmp_path / "model")
    facts = bulk_kills.run(tmp_path, 200, 3, 1, ray)
    assert bulk_kills.holds(facts, 200, 3), facts


@pytest.mark.slow
def test_replicas_of_ray_serve_answer_with_upstreams_pictures(tmp_path, monkeypatch):
    """The example, two replicas, without the TPU path."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    place = importlib.util.spec_from_file_location("serve_ray", ROOT / "examples/tpu/serve_ray.py")
    serve_ray = importlib.util.module_from_spec(place)
    sys.modules["serve_ray"] = serve_ray
    place.loader.exec_module(serve_ray)
    tiny_images.flux().save_pretrained(tmp_path / "model")
    folders = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/tpu"), str(ROOT / "examples/tpu")])
    variables = {"DIFFUSERS_TPU": "off", "PYTHONPATH": folders}
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False, num_cpus=4)
    try:
        arguments = {
            name: serve_load.ARGUMENTS["image"][name] for name in ("num_inference_steps", "max_sequence_length")
        }
        actor = {"num_cpus": 0.5}
        serve_ray.start(str(tmp_path / "model"), ["16x16"], 2, defaults=arguments, actor=actor, port=8397)
        for (prompt, seed), picture in [*serve_load.expected_of("image").items()][:4]:
            body = json.dumps({"prompt": prompt, "seed": seed}).encode()
            request = urllib.request.Request("http://127.0.0.1:8397/v1/images/generations", body, serve_load.JSON)
            (image,) = json.load(urllib.request.urlopen(request))["data"]
            made = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))).convert("RGB"), int)
            assert np.abs(made - picture).max() <= 1
    finally:
        serve_ray.serve.shutdown()
        ray.shutdown()


@pytest.mark.parametrize("name", ("processes", "ray"))
def test_the_recorded_kills_left_every_output_once(name):
    assert bulk_kills.holds(read("bulk.json")[name], 200, 3)


@pytest.mark.parametrize("kind", serve_load.PATHS)
def test_the_recorded_load_was_answered(kind):
    facts = read("serve.json")[kind]
    assert serve_load.holds(facts) and (facts["clients"], facts["requests"]) == (50, 1000)
