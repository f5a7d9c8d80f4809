"""A headless Chromium that a test drives: the DevTools protocol over a pipe, without any package."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest


NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Browser:
    """One page of one browser."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers = os.fdopen(commands, "wb", buffering=0), os.fdopen(answers, "rb")
        self.number, self.session, self.left = 0, None, b""
        self.asked: list[str] = []  # addresses of all requests

    def open(self, address: str):
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Network.enable")
        self.send("Page.navigate", url=address)

    def send(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("method") == "Network.requestWillBeSent":
                self.asked.append(answer["params"]["request"]["url"])
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def value(self, expression: str):
        """Of JavaScript in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60):
        """What the expression gives when that is true."""
        begun = time.monotonic()
        while not (value := self.value(expression)):
            assert time.monotonic() - begun < seconds, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def type(self, selector: str, text: str):
        self.wait(f"document.querySelector({selector!r}) && (document.querySelector({selector!r}).focus(), true)")
        self.send("Input.insertText", text=text)

    def click(self, selector: str):
        self.wait(f"document.querySelector({selector!r}) && (document.querySelector({selector!r}).click(), true)")

    def _message(self) -> bytes:
        while b"\0" not in self.left:
            part = self.answers.read1(65536)
            assert part, "the browser has ended"
            self.left += part
        message, _, self.left = self.left.partition(b"\0")
        return message


@contextlib.contextmanager
def browser(folder: Path):
    """A browser with its profile in `folder`; skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium or Chrome on PATH to open the page in")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    words = [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = Browser(ours_out, ours_in)
    try:
        yield page
        page.session = None
        page.send("Browser.close")
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()
        page.commands.close()
        page.answers.close()
