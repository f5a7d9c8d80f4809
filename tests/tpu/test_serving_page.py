"""The page and the process of `diffusers-tpu serve`. Oracles: what a browser shows and asks; exit statuses; upstream's frames."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

import tiny
from browser import browser
from conftest import ROOT


pytest.importorskip("fastapi.sse", reason="the extra serve is not installed")
pytest.importorskip("gradio")
uvicorn = pytest.importorskip("uvicorn")

from diffusers.tpu.apps.serving.server import Server, Service, Settings  # noqa: E402
from diffusers.tpu.apps.serving.sizes import Size  # noqa: E402


MODEL = "examples/tpu/models/wan-shapes"
COMMAND = [sys.executable, "-c", "import sys; from diffusers.tpu.apps.cli import main; sys.exit(main())"]
PLAYS = """(async () => {
  const video = document.querySelector("#result video");
  if (!video) return null;
  if (video.readyState < 2) await new Promise(done => { video.onloadeddata = done; video.onerror = done; video.load(); });
  return [video.videoWidth, video.videoHeight, video.error && video.error.message];
})()"""


def make_a_video(page, prompt: str) -> tuple[list, set[str]]:
    """Type, click, look: (width, height and error of the video that is shown, what the status said on the way)."""
    page.type("#prompt textarea", prompt)
    page.click("#generate")
    said, begun = set(), time.monotonic()
    while not any(words.startswith("completed") for words in said):
        said.add(page.value("(document.querySelector('#status') || {innerText: ''}).innerText.trim()"))
        assert time.monotonic() - begun < 120, page.value("document.body.innerText")
    page.wait("!!document.querySelector('#result video')")
    return page.wait(PLAYS), said


@pytest.fixture
def served():
    """A function from settings to the address of a tiny Wan's page, which ends with the test."""
    running = []

    def served(**settings):
        pipe = tiny.wan()
        pipe.set_progress_bar_config(disable=True)
        arguments = {"num_inference_steps": 100}
        service = Service(pipe, Settings("tiny", arguments, (Size(32, 32, 5),), **settings))
        service.start()
        address, ready = [], threading.Event()

        def told(where):
            address.append(where)
            ready.set()

        config = uvicorn.Config(service.app, port=0, log_level="warning", ws="none", timeout_graceful_shutdown=5)
        server = Server(config, service, told)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        assert ready.wait(20)
        return address[0]

    yield served
    for server, thread in running:
        server.should_exit = True
        thread.join()


def test_the_page_takes_a_prompt_shows_progress_and_the_video_cancels_and_asks_nobody_else(served, tmp_path):
    address = served()
    with browser(tmp_path) as page:
        page.open(address)
        video, said = make_a_video(page, "a red circle moving left")
        assert video == [32, 32, None]
        assert any(words.startswith("in progress: step ") and words.endswith(" of 100") for words in said)
        page.click("#generate")
        page.wait("document.querySelector('#status').innerText.startsWith('in progress: step ')")
        page.click("#cancel")
        page.wait("document.querySelector('#status').innerText.trim() === 'cancelled'")
        own = [url for url in page.asked if url.startswith((address, "data:", "blob:", "about:"))]
        assert sorted({*page.asked} - {*own}) == []


def test_the_page_has_a_login_where_the_server_has_a_token(served):
    address = served(token="secret")
    with urllib.request.urlopen(f"{address}/") as answer:
        assert b'"auth_required":true' in answer.read().replace(b" ", b"")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{address}/gradio_api/info")
    for password, status in (("wrong", 400), ("secret", 200)):
        login = urllib.request.Request(f"{address}/login", f"username=me&password={password}".encode())
        try:
            found = urllib.request.urlopen(login).status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status


@pytest.mark.slow
def test_the_shipped_model_by_the_page_on_simulated_chips(tmp_path):
    """The command, from its start to its end by SIGTERM."""
    words = f"serve {MODEL} --sizes 64x64x9 --num-inference-steps 16 --guidance-scale 2 --port 0".split()
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([*COMMAND, *words], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().split()[-1]
        with browser(tmp_path) as page:
            page.open(address)
            video, said = make_a_video(page, "a red circle moving right")
        assert video == [64, 64, None] and any("of 16" in words for words in said)
        listed = json.load(urllib.request.urlopen(f"{address}/v1/videos"))["data"]
        assert [v["status"] for v in listed] == ["completed"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        server.stdout.close()
