"""examples/tpu/Dockerfile. Oracle: its own instructions, replayed without Docker; the server's /health.

No image is built here: the base image is a virtual environment of this Python, `/` a temporary folder, `useradd` and `chown` only
record their words, and wheels packed from this environment stand for the index. So what is tested is that the steps are in an
order that works and that the entry point serves.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from conftest import ROOT, needs
from wheelhouse import copy_tree, pack_all


DOCKERFILE = ROOT / "examples/tpu/Dockerfile"
MODEL = ROOT / "examples/tpu/models/wan-shapes"
PLACES = ("/opt", "/src", "/home")


def instructions() -> list[tuple[str, str]]:
    lines = re.findall(r"^([A-Z]+) (.*)$", DOCKERFILE.read_text().replace("\\\n", " "), re.M)
    assert lines[0][0] == "FROM" and {name for name, _ in lines} <= {
        "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT",
    }  # fmt: skip
    return lines


def test_the_container_is_of_a_supported_python_not_root_and_exposes_the_servers_port():
    found = dict(instructions())
    minors = re.search(r"^PYTHONS = \((.*?)\)", (ROOT / "setup.py").read_text(), re.M)[1].split(", ")
    assert found["FROM"].removeprefix("python:3.").removesuffix("-slim") in minors
    assert found["USER"] != "root" and [name for name, _ in instructions()].index("USER") > 0
    words = json.loads(found["ENTRYPOINT"])
    assert words[:2] == ["diffusers-tpu", "serve"] and words[words.index("--port") + 1] == found["EXPOSE"]


@pytest.mark.slow
def test_the_steps_replayed_in_order_without_docker_serve_the_shipped_model(tmp_path):
    needs("gradio", "fastapi")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pack_all(wheels, "diffusers[serve]", "setuptools", "uv")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "base"], check=True)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("useradd", "chown"):
        (stubs / name).write_text(f'#!/bin/sh\necho "$0 $@" >> {tmp_path}/recorded\n')
        (stubs / name).chmod(0o755)
    path, home = f"{stubs}:{tmp_path / 'base/bin'}:/usr/bin:/bin", str(tmp_path / "home/diffusers")
    env = {**os.environ, "PATH": path, "HOME": home}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "DIFFUSERS_TPU": "cpu", "DIFFUSERS_TPU_DEVICES": "2"}
    folder, users = tmp_path, []

    def here(words: str) -> str:
        """With the container's folders under the temporary one."""
        return re.sub(rf"(?<![\w.])(?=(?:{'|'.join(PLACES)})\b)", str(tmp_path), words)

    for name, words in instructions():
        if name == "RUN":
            words = words.replace("uv venv", f"uv venv --python {tmp_path}/base/bin/python")  # an image has one
            words = words.replace("--torch-backend cpu", f"--no-index --find-links {wheels}")
            subprocess.run(["bash", "-euc", here(words)], cwd=folder, env=env, check=True)
        elif name == "ENV":
            for key, value in (word.split("=", 1) for word in shlex.split(here(words))):
                env[key] = re.sub(r"\$(\w+)", lambda found: env[found[1]], value)
        elif name == "WORKDIR":
            folder = Path(here(words))
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            assert words == ". ." and not any(folder.iterdir())
            folder.rmdir()
            copy_tree(folder)
        elif name == "USER":
            users.append(words)
    recorded = (tmp_path / "recorded").read_text()
    assert re.search(rf"useradd .*\b{users[0]}$", recorded, re.M) and f"chown {users[0]} {folder}/.cache" in recorded
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    size = ["--sizes", "64x64x9", "--num-inference-steps", "2", "--guidance-scale", "2"]
    env["DIFFUSERS_TPU_TOKEN"] = "token"
    command = [tmp_path / "opt/diffusers-tpu/bin" / entry[0], *entry[1:], "--port", port, MODEL, *size]
    server = subprocess.Popen([*map(str, command)], cwd=folder, env=env)
    try:
        deadline = time.monotonic() + 900
        while True:
            assert server.poll() is None and time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                    assert reply.status == 200
                    break
            except OSError:
                time.sleep(1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
