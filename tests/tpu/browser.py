"""A headless Chromium that a test drives, by Playwright: the system's, none is downloaded."""

import contextlib
import shutil

import pytest
from playwright.sync_api import sync_playwright


NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def browser():
    """A page of a new browser; skips the test where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium or Chrome on PATH to open the page in")
    with sync_playwright() as play, play.chromium.launch(executable_path=program, args=["--no-sandbox"]) as chromium:
        yield chromium.new_page()
