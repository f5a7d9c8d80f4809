"""The page and the process of `diffusers-tpu serve`, and serving and bulk under load: minutes each.

Oracles: what a browser shows and asks; exit statuses; those of load.py.
"""

import base64
import contextlib
import io
import os
import re
import signal
import subprocess
import time

import load
import numpy as np
import pytest
import requests

import tiny
from browser import browser
from conftest import ROOT, needs


PLAYS = """(async () => {
  const video = document.querySelector("#result video");
  if (!video) return null;
  if (video.readyState < 2) await new Promise(done => { video.onloadeddata = done; video.onerror = done; video.load(); });
  return [video.videoWidth, video.videoHeight, video.error && video.error.message];
})()"""


def field(page, name: str):
    return page.locator(f"#{name} input, #{name} textarea")


def make_a_video(page, prompt: str) -> tuple[list, set[str]]:
    """Type, click, look: (width, height and error of the video that is shown, what the status said on the way)."""
    field(page, "prompt").fill(prompt)
    page.click("#generate")
    said, begun = set(), time.monotonic()
    while not any(words.startswith("completed") for words in said):
        said.add(page.inner_text("#status").strip())
        assert time.monotonic() - begun < 120, page.inner_text("body")
    page.wait_for_selector("#result video")
    return page.evaluate(PLAYS), said


@pytest.fixture
def served():
    """A function from settings to the address of a tiny Wan's page, which ends with the test."""
    needs("fastapi.sse", "gradio", "uvicorn")
    from diffusers.tpu.apps.serving.server import Settings
    from test_serving import SMALL, listening

    with contextlib.ExitStack() as stack:

        def served(pipe=None, **settings):
            given = Settings("tiny", {"num_inference_steps": 100}, (SMALL,), **settings)
            return stack.enter_context(listening(pipe or tiny.wan(), given))[0]

        yield served


def test_the_page_takes_a_prompt_shows_progress_and_the_video_cancels_and_asks_nobody_else(served):
    address = served(any_size=True)
    with browser() as page:
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.set_viewport_size({"width": 390, "height": 844})
        page.goto(address)
        page.click("#more button")
        hints = {"seed": "empty: drawn", "num_frames": "as the size says", "num_inference_steps": "100"}
        for name, shown in hints.items():
            assert (field(page, name).input_value(), field(page, name).get_attribute("placeholder")) == ("", shown)
        field(page, "seed").fill("0")
        field(page, "num_inference_steps").fill("90")
        video, said = make_a_video(page, "a red circle moving left")
        assert video == [32, 32, None]
        progress = re.compile(r"in progress: step \d+ of 90, \d+\ss passed, about \d+\ss left")
        assert any(map(progress.fullmatch, said))
        with page.expect_download() as download:
            page.click("#download")
        assert download.value.path().stat().st_size > 500
        for name in ("prompt", "seed", "num_inference_steps"):
            field(page, name).fill("7")
        page.click("#results .thumbnail-item")
        page.wait_for_function("document.querySelector('#prompt textarea').value != '7'")
        again = [field(page, name).input_value() for name in ("prompt", "seed", "num_inference_steps")]
        assert again == ["a red circle moving left", "0", "90"]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.click("#generate")
        page.wait_for_selector("#status :text('in progress: step ')")
        page.click("#cancel")
        page.wait_for_selector("#status :text-is('cancelled')")
        field(page, "seed").fill("x")
        page.click("#generate")
        page.wait_for_selector(":text('expected a valid seed')")
        assert [url for url in asked if not url.startswith((address, "data:", "blob:", "about:"))] == []


def test_the_page_takes_a_picture_where_the_pipeline_starts_from_one(served, tmp_path):
    tiny.picture(32, 32).save(tmp_path / "a.png")
    with browser() as page:
        page.goto(served(tiny.wan_i2v()))
        page.set_input_files("#picture input[type=file]", tmp_path / "a.png")
        page.wait_for_selector("#picture img")
        assert make_a_video(page, "a red circle moving left")[0] == [32, 32, None]


def test_the_page_has_a_login_where_the_server_has_a_token(served):
    address = served(token="secret")
    assert '"auth_required":true' in requests.get(address).text.replace(" ", "")
    assert requests.get(f"{address}/gradio_api/info").status_code == 401
    for password, status in (("wrong", 400), ("secret", 200)):
        login = {"username": "me", "password": password}
        assert requests.post(f"{address}/login", data=login).status_code == status


@pytest.mark.slow
def test_the_shipped_model_by_the_page_on_simulated_chips():
    """The command, from its start to its end by SIGTERM."""
    needs("fastapi.sse", "gradio", "uvicorn")
    words = "serve examples/tpu/models/wan-shapes --sizes 64x64x9 --num-inference-steps 16 --guidance-scale 2 --port 0"
    server = load.start(words.split(), 8, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        address = server.stdout.readline().split()[-1]
        with browser() as page:
            page.goto(address)
            video, said = make_a_video(page, "a red circle moving right")
        assert video == [64, 64, None] and any("of 16" in words for words in said)
        listed = requests.get(f"{address}/v1/videos").json()["data"]
        assert [v["status"] for v in listed] == ["completed"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        load.stop(server)
        server.stdout.close()


NEEDED = {"processes": (), "ray": ("ray.data",)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", load.KINDS)
def test_many_clients_some_of_them_rude_and_many_prompts_while_processes_are_killed(kind, tmp_path):
    needs(*NEEDED.get(kind, ("fastapi.sse", "uvicorn", "prometheus_client", "python_multipart")))
    facts = load.KINDS[kind](kind, tmp_path)
    assert facts["holds"], facts


@pytest.mark.slow
def test_replicas_of_ray_serve_answer_with_upstreams_pictures(tmp_path, monkeypatch):
    """The example, two replicas, without the TPU path."""
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # on a machine that does other things too
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "60")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    needs("ray", "ray.serve")
    import ray

    import serve_ray

    load.pipeline("image").save_pretrained(tmp_path / "model")
    folders = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/tpu"), str(ROOT / "examples/tpu")])
    variables = {"DIFFUSERS_TPU": "off", "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False, num_cpus=4)
    try:
        arguments = {"num_inference_steps": 2, "max_sequence_length": 8}
        actor = {"num_cpus": 0.5}
        serve_ray.start(str(tmp_path / "model"), ["16x16"], 2, defaults=arguments, actor=actor, port=8397)
        for (prompt, seed), picture in [*load.expected_of("image").items()][:4]:
            asked = {"prompt": prompt, "seed": seed}
            (image,) = requests.post("http://127.0.0.1:8397/v1/images/generations", json=asked).json()["data"]
            assert np.abs(load.read(io.BytesIO(base64.b64decode(image["b64_json"]))) - picture).max() <= 1
    finally:
        serve_ray.serve.shutdown()
        ray.shutdown()
