"""`diffusers-tpu serve`. Oracles: the pipeline called by hand; OpenAI's forms by hand; threads, files and jobs counted."""

import base64
import contextlib
import getopt
import io
import json
import re
import shlex
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest
from PIL import Image

import tiny
from conftest import ROOT, needs, slow


needs("fastapi.sse", "prometheus_client", "uvicorn")

import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from diffusers import FluxImg2ImgPipeline, FluxPipeline, tpu  # noqa: E402
from diffusers.tpu.apps.serving.server import Server, Service, Settings  # noqa: E402
from diffusers.tpu.apps.serving.sizes import Limits, Size  # noqa: E402
from test_bulk import by_hand, damaged  # noqa: E402
from test_pages import first_cells, section  # noqa: E402


SIZE, SMALL = Size(16, 16), Size(32, 32, 5)
DEFAULTS = {"num_inference_steps": 2, "max_sequence_length": 8}
HERE = "http://127.0.0.1"
IMAGES, VIDEOS = "/v1/images/generations", "/v1/videos"


@contextlib.contextmanager
def client_of(pipe, sizes=(SIZE,), start=True, defaults=DEFAULTS, **settings):
    service = Service(pipe, Settings("tiny", defaults, sizes, page=False, **settings))
    if start:
        service.start()
    client = TestClient(service.app, HERE, raise_server_exceptions=False)
    client.service, client.jobs = service, service.jobs
    yield client
    service.end()


@contextlib.contextmanager
def listening(pipe, settings: Settings):
    """(address, service) of a server at a port of this machine, in a thread of this process."""
    service, addresses = Service(pipe, settings), SimpleQueue()
    service.start()
    config = uvicorn.Config(service.app, port=0, log_level="warning", ws="none", timeout_graceful_shutdown=5)
    server = Server(config, service, addresses.put)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield addresses.get(timeout=20), service
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serving():
    """A function from a pipeline and settings to a client of a service that has started, which ends with the test."""
    with contextlib.ExitStack() as services:
        yield lambda *given, **settings: services.enter_context(client_of(*given, **settings))
    assert not [thread for thread in threading.enumerate() if thread.name == "diffusers-tpu-worker"]


def wait(holds, seconds=20):
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds
        time.sleep(0.01)


def picture(answer: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["b64_json"]))), int)


# Images


def test_images_are_the_pipelines_and_equal_requests_share_a_call(flux, serving, monkeypatch):
    client = serving(flux, max_batch=4)
    body = {"prompt": "a red circle", "seed": 3, "n": 3, "guidance_scale": 2.0}
    answer = client.post(IMAGES, json=body)
    assert answer.status_code == 200
    assert [image["seed"] for image in answer.json()["data"]] == [3, 4, 5]
    for image in answer.json()["data"]:
        expected = by_hand(flux, "a red circle", image["seed"], guidance_scale=2.0)
        assert np.abs(picture(image) - expected).max() <= 1
    assert client.jobs.all() == [] and not list(client.service.folder.iterdir())
    single = client.post(IMAGES, json={"prompt": "moving left", "seed": 1}).json()["data"]
    np.testing.assert_array_equal(picture(single[0]), by_hand(flux, "moving left", 1))


BAD = [  # body, status, what is said
    ({}, 400, "expected prompt, got none"),
    ({"prompt": ""}, 400, "at least 1 character"),
    ({"prompt": "a" * 101}, 400, "prompt of at most 100 characters, got 101"),
    ({"prompt": 1}, 400, "valid string.*got 1"),
    ({"prompt": "a", "size": "32x32"}, 400, r"compiled \(16x16\), got 32x32"),
    ({"prompt": "a", "size": "big"}, 400, "WIDTHxHEIGHT, got 'big'; served: 16x16"),
    ({"prompt": "a", "n": 5}, 400, "n of at most 4, got 5"),
    ({"prompt": "a", "num_inference_steps": 201}, 400, "at most 200, got 201"),
    ({"prompt": "a", "seed": -1}, 400, "greater than or equal to 0.*got -1"),
    ({"prompt": "a", "sharpness": 1}, 400, "expected only prompt, .*got sharpness"),
    ({"prompt": "a", "model": "big"}, 404, "expected the model 'tiny', got 'big'"),
    ({"prompt": "a", "response_format": "url"}, 400, "b64_json.*got 'url'"),
    ([1], 400, "a JSON object, got list"),
    (b'{"prompt": ', 400, "a body in JSON"),
    (b"[" * 20000, 400, "a body in JSON"),
    (b'{"prompt": "\xff"}', 400, "a body in JSON"),
    (b'{"prompt": "\\ud800"}', 400, "valid prompt"),
    (b'{"prompt": "a", "\\ud800": 1}', 400, "valid body.*a unicode string"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "a body in JSON"),
    (b'{"prompt": "' + b"a" * 70000 + b'"}', 413, "at most 65536 bytes, got 700"),
]


@pytest.fixture(scope="module")
def idle(flux):
    """A client of a service whose worker has not started: nothing that is refused gets that far."""
    with client_of(flux, start=False, limits=Limits(prompt_characters=100, body_bytes=65536, queue=2)) as client:
        yield client


def test_what_no_job_can_be_is_refused_with_what_was_expected(idle):
    for body, status, message in BAD:
        content = body if isinstance(body, bytes) else json.dumps(body)
        refuses(idle.post(IMAGES, content=content, headers={"content-type": "application/json"}), status, message)
    assert not idle.jobs.all()


def refuses(answer, status: int, message: str):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["type"].endswith("_error")
    assert re.search(message, error["message"]), error["message"]


def test_other_requests_that_nothing_answers(idle):
    refuses(idle.post(IMAGES, content="prompt=a"), 415, "Content-Type application/json or multipart")
    refuses(idle.post(IMAGES, data={"prompt": ["a", "b"]}), 400, "each field once, got prompt again")
    refuses(idle.post(VIDEOS, json={"prompt": "a"}), 400, f"a model of videos.*POST {IMAGES}")
    refuses(idle.get("/v1/videos/video_1"), 404, "kept, got 'video_1'")
    refuses(idle.get(VIDEOS, params={"limit": "x"}), 400, "a valid limit.*integer.*got 'x'")
    refuses(idle.get(VIDEOS, params={"limit": 1000}), 400, "a valid limit.*equal to 100")
    refuses(idle.put(VIDEOS), 404, "expected one of .*POST /v1/videos.*got PUT /v1/videos")
    refuses(idle.post("/gradio_api/upload", files={"files": b"x"}), 404, "the page takes none")
    refuses(idle.get("/nothing"), 404, "GET /nothing")
    refuses(idle.get("/health", headers={"host": "elsewhere.example"}), 403, "local host name.*'elsewhere.example'")
    refuses(idle.get("/health", headers={"host": "[::1"}), 403, r"local host name.*'\[::1'")
    for origin in ("http://elsewhere.example", "http://[", "null"):
        refuses(idle.get("/health", headers={"origin": origin}), 403, "a page of this server")
    in_parts = idle.post(IMAGES, content=iter([b"a" * 40000] * 2), headers={"content-type": "application/json"})
    refuses(in_parts, 413, "and more")
    full = idle.post(IMAGES, json={"prompt": "a", "n": 3})
    refuses(full, 429, "room for 3 in the queue of 2, got 0 that wait")
    assert int(full.headers["retry-after"]) >= 1
    health = idle.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "worker died"


def test_a_damaged_picture_is_refused(flux, serving):
    client = serving(FluxImg2ImgPipeline(**flux.components), start=False)
    form = {"input_reference": ("a.png", damaged(), "image/png"), "prompt": (None, "a")}
    refuses(client.post(IMAGES, files=form), 400, "input_reference to be a picture: broken PNG")


def test_elsewhere_a_token_is_needed_and_held_against(flux, serving, monkeypatch, capsys):
    with pytest.raises(ValueError, match="a token.*--token or DIFFUSERS_TPU_TOKEN.*0.0.0.0"):
        Settings("tiny", {}, host="0.0.0.0")
    client = serving(flux, start=False, host="0.0.0.0", token="secret")
    for headers, got in (
        ({}, "none"),
        ({"authorization": "Bearer secret2"}, "another one"),
        ({"authorization": "Basic secret"}, "another one"),
        ({"authorization": "Bearer s\xe9cret".encode("latin-1")}, "another one"),
    ):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            refuses(client.get(path, headers=headers), 401, f"Authorization: Bearer TOKEN.*got {got}")
    answer = client.get("/v1/models", headers={"authorization": "Bearer secret", "host": "elsewhere.example"})
    assert answer.json()["data"][0]["id"] == "tiny"
    client.service.app.token = "geh\xe4\xe0"
    for given in (b"geh\xc3\xa4\xc3\xa0", b"geh\xe4\xe0"):
        assert client.get("/metrics", headers={"authorization": b"Bearer " + given}).status_code == 200
    client.app.app.mount("/", FastAPI())  # as the page is
    answer = client.get("/v1/nothing", headers={"authorization": b"Bearer " + given})
    refuses(answer, 404, "expected one of .*GET /v1/models.*got GET /v1/nothing")
    assert client.get("/health").status_code == 503  # open, of a worker that has not started


# Videos


def test_a_video_from_its_creation_to_its_end(wan, serving):
    client = serving(wan, (SMALL,), defaults={"num_inference_steps": 2}, fps=8)
    form = {"prompt": "a red circle", "size": "32x32", "seconds": "0.6", "seed": "3"}
    created = client.post(VIDEOS, files={name: (None, value) for name, value in form.items()})
    assert created.status_code == 200, created.text
    video = created.json()
    assert video["object"] == "video" and video["id"].startswith("video_") and video["model"] == "tiny"
    assert (video["size"], video["seconds"], video["num_frames"], video["seed"]) == ("32x32", "0.625", 5, 3)
    path = f"{VIDEOS}/{video['id']}"
    with client.stream("GET", f"{path}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert lines[-2] == "event: done" or lines[-1] == "event: done"
    assert events[-1]["status"] == "completed" and events[-1]["progress"] == 100
    assert [e["progress"] for e in events] == sorted(e["progress"] for e in events)
    content = client.get(f"{path}/content")
    assert content.headers["content-type"] == "video/mp4" and len(content.content) > 500
    assert client.get(f"{path}/content", headers={"range": "bytes=0-9"}).status_code == 206
    refuses(client.get(f"{path}/content?variant=preview"), 409, "in progress, after its second step.*is completed")
    sheet = client.get(f"{path}/content", params={"variant": "spritesheet"})
    assert Image.open(io.BytesIO(sheet.content)).format == "PNG"
    known = "valid variant.*'video', 'spritesheet' or 'preview'.*got 'x'"
    refuses(client.get(f"{path}/content", params={"variant": "x"}), 400, known)
    listed = client.get(VIDEOS).json()
    assert [v["id"] for v in listed["data"]] == [video["id"]] and listed["has_more"] is False
    text = client.get("/metrics").text
    assert 'diffusers_tpu_jobs_total{outcome="completed"} 1.0' in text and "diffusers_tpu_queue_length 0.0" in text
    assert client.delete(path).json()["deleted"] is True
    refuses(client.get(path), 404, "kept")
    assert not list(client.service.folder.iterdir())
    for body, message in (
        ({"seconds": 4}, r"compiled \(32x32x5 \(0.625 s\)\), got 32x32x32"),
        ({"seconds": 1e308}, "less than or equal to 86400.*got 1e.308"),
        ({"num_frames": 9}, "got 32x32x9"),
        ({"num_frames": 5, "seconds": 1}, "seconds or num_frames, got both"),
        ({"input_reference": "x"}, "input_reference"),
    ):
        refuses(client.post(VIDEOS, json={"prompt": "a", **body}), 400, message)
    picture = {"input_reference": ("a.png", sheet.content, "image/png"), "prompt": (None, "a")}
    refuses(client.post(VIDEOS, files=picture), 400, "no input_reference: tiny takes none")


@pytest.mark.parametrize("mesh", [None, slow((2, 2, 1))])
def test_a_running_job_ends_after_the_step_in_which_it_is_cancelled_and_the_next_is_right(
    request, wan, serving, monkeypatch, mesh
):
    """On chips the worker's thread calls a pipeline that this one made; the call ends in the middle of its steps."""
    if mesh is not None:
        request.getfixturevalue("chips")
        wan = tpu.install(tiny.wan(), tpu.TPUConfig(mesh=mesh))
    arguments = {"num_inference_steps": 2, "output_type": "pil", **SMALL.arguments()}
    expected = wan("a red circle", generator=tiny.fresh(1), **arguments).frames[0]
    client = serving(wan, (SMALL,), start=False, defaults={"num_inference_steps": 50})
    held, go = threading.Event(), threading.Event()

    def at_step(job):
        if job.step == 2 and not go.is_set():
            held.set()
            assert go.wait(20)

    job = client.post(VIDEOS, json={"prompt": "a red circle", "seed": 1}).json()
    running = client.jobs.get(job["id"])
    running.watchers.add(lambda: at_step(running))
    client.service.worker.start()
    assert held.wait(60)
    path = f"{VIDEOS}/{job['id']}"
    assert client.get(path).json()["progress"] == 4
    refuses(client.get(f"{path}/content"), 409, "completed video, got one that is in_progress")
    assert client.delete(path).json()["status"] == "cancelled"
    go.set()
    wait(lambda: running.finished)
    assert client.get(path).json()["status"] == "cancelled" and running.step == 2
    frames, write = [], "diffusers.tpu.apps.generation.media.write"
    monkeypatch.setattr(write, lambda values, *rest: frames.append(values[0]) or [])
    again = client.post(VIDEOS, json={"prompt": "a red circle", "seed": 1, "num_inference_steps": 2}).json()
    wait(lambda: client.jobs.get(again["id"]).finished, 60)
    np.testing.assert_array_equal(np.stack(frames[0]), np.stack(expected))


def test_a_job_that_fails_says_why_and_the_worker_goes_on(flux, serving, monkeypatch):
    client = serving(flux, max_batch=2, any_size=True)
    vast = {"prompt": "a", "size": "5000x16"}
    refuses(client.post(IMAGES, json=vast), 400, "width up to 4096, got 5000")

    def fails(self, *args, **kwargs):
        raise RuntimeError("of the device")

    with monkeypatch.context() as patch:
        patch.setattr(FluxPipeline, "encode_prompt", fails)
        refuses(client.post(IMAGES, json={"prompt": "a", "n": 2}), 500, "of the device")
    reader = client.service.reader.defaults
    reader["max_sequence_length"] = 513
    refuses(client.post(IMAGES, json={"prompt": "a"}), 400, "cannot be greater than 512")
    reader["max_sequence_length"] = 8
    assert client.post(IMAGES, json={"prompt": "a"}).status_code == 200
    assert 'outcome="failed"} ' in client.get("/metrics").text


def test_files_that_a_request_still_reads_are_kept(flux, serving):
    """More images than are kept, in one request."""
    client = serving(flux, limits=Limits(kept_jobs=1, kept_bytes=1))
    assert len(client.post(IMAGES, json={"prompt": "a", "n": 4}).json()["data"]) == 4
    assert not client.jobs.all() and not list(client.service.folder.iterdir())


# The page of the documentation


PAGE = ROOT / "examples/tpu/SERVING.md"


def test_the_page_names_every_endpoint_limit_and_metric(idle):
    routes = [r for r in idle.service.api.routes if "rest" not in r.path]
    served = sorted(f"{method} {route.path}" for route in routes for method in route.methods)
    assert sorted(first_cells(section(PAGE, "Endpoints"))) == served
    assert first_cells(section(PAGE, "Limits")) == [f"--{name.replace('_', '-')}" for name in vars(Limits())]
    named = {m.name for m in idle.service.metrics.registry.collect()}
    assert {name.removesuffix("_total") for name in first_cells(section(PAGE, "Metrics"))} == named


def test_the_curl_lines_of_the_page(wan, serving, tmp_path, monkeypatch):
    client = serving(wan, (SMALL,), defaults={"num_inference_steps": 1})
    lines = [shlex.split(line) for line in re.findall(r"^curl .*", PAGE.read_text(), re.M)]
    assert len(lines) == 5
    made, seen = None, []
    for words in lines:
        options, (address,) = getopt.gnu_getopt(words[1:], "sNX:H:d:o:")
        given = dict(options)
        path = address.removeprefix("http://127.0.0.1:8000").replace("$ID", made or "")
        method = given.get("-X", "POST" if "-d" in given else "GET")
        headers = dict([given["-H"].split(": ")]) if "-H" in given else {}
        answer = client.request(method, path, content=given.get("-d"), headers=headers)
        assert answer.status_code == 200, answer.text
        made = made or answer.json()["id"]
        seen.append(answer.headers["content-type"].partition(";")[0])
    assert seen == ["application/json", "application/json", "text/event-stream", "video/mp4", "application/json"]
