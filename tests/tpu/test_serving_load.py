"""Serving and bulk under load, as their scripts do it: minutes each. Oracles: those of serve_load.py and bulk_kills.py."""

import base64
import importlib.util
import io
import json
import os
import sys
import time
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image

import bulk_kills
import serve_load
import tiny
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
def test_a_job_that_is_cancelled_on_chips_leaves_the_next_one_right(chips, tmp_path):
    """The worker's thread calls a pipeline that this one made; the call ends in the middle of its steps."""
    for package in SERVED:
        pytest.importorskip(package)
    import diffusers.tpu
    from diffusers.tpu import TPUConfig
    from diffusers.tpu.apps.generation import media
    from diffusers.tpu.apps.generation.call import Request
    from diffusers.tpu.apps.serving.jobs import CANCELLED, COMPLETED, Job
    from diffusers.tpu.apps.serving.server import Service, Settings
    from diffusers.tpu.apps.serving.sizes import Size

    pipe, size = serve_load.pipeline("video"), Size(32, 32, 5)
    diffusers.tpu.install(pipe, TPUConfig(mesh=(2, 2, 1)))
    arguments = {"num_inference_steps": 3, "max_sequence_length": 16, **size.arguments()}
    given = {"generator": torch.Generator().manual_seed(5), "output_type": "pil", **arguments}
    expected = pipe("a red circle", **given).frames[0]
    service = Service(pipe, Settings("tiny", {}, (size,), page=False))
    request = Request("a red circle", 5, {**arguments, "num_inference_steps": 60})
    stopped, after = Job("video", request, size), Job("video", Request("a red circle", 5, arguments), size)
    stopped.watchers.add(lambda: stopped.step == 4 and service.jobs.cancel(stopped))
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "write", lambda values, *rest: made.append(values[0]) or [])
        service.jobs.submit(stopped, after)
        service.worker.start()
        while not after.finished:
            time.sleep(0.05)
    service.end()
    assert (stopped.state, stopped.step, after.state) == (CANCELLED, 4, COMPLETED)
    np.testing.assert_array_equal(np.stack(made[0]), np.stack(expected))


@pytest.mark.slow
@pytest.mark.parametrize("ray", (False, True), ids=("processes", "ray"))
def test_many_prompts_while_processes_are_killed(ray, tmp_path):
    if ray:
        pytest.importorskip("ray.data")
    tiny.flux().save_pretrained(tmp_path / "model")
    facts = bulk_kills.run(tmp_path, ray)
    assert bulk_kills.holds(facts), facts


@pytest.mark.slow
def test_replicas_of_ray_serve_answer_with_upstreams_pictures(tmp_path, monkeypatch):
    """The example, two replicas, without the TPU path."""
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # on a machine that does other things too
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "60")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    place = importlib.util.spec_from_file_location("serve_ray", ROOT / "examples/tpu/serve_ray.py")
    serve_ray = importlib.util.module_from_spec(place)
    sys.modules["serve_ray"] = serve_ray
    place.loader.exec_module(serve_ray)
    tiny.flux().save_pretrained(tmp_path / "model")
    folders = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/tpu"), str(ROOT / "examples/tpu")])
    variables = {"DIFFUSERS_TPU": "off", "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False, num_cpus=4)
    try:
        arguments = {"num_inference_steps": 2, "max_sequence_length": 8}
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
