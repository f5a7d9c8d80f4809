"""A page at `/`: prompt, progress, the video or image. Gradio, mounted into the same application; its jobs wait in the same queue."""

import contextlib
import os
import queue
from pathlib import Path


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported; a server here calls nobody

import gradio  # noqa: E402
from fastapi import FastAPI  # noqa: E402

from .errors import Refused  # noqa: E402
from .guard import same  # noqa: E402
from .jobs import CANCELLED, COMPLETED, FAILED, Jobs  # noqa: E402
from .requests import Reader, WantedImages, WantedVideo  # noqa: E402


FONTS = ["system-ui", "sans-serif"]  # of the browser: none is fetched
ASKS_AGAIN = 10.0  # seconds after which the page hears of a job that has not changed


def mounted(app: FastAPI, jobs: Jobs, reader: Reader, folder: Path, token: str | None) -> FastAPI:
    """The application with the page at `/`; with a token its login wants the token as password, whoever's the name."""
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "page")
    kept = jobs.limits.kept_seconds
    login = None if token is None else (lambda user, password: same(token, password))
    return gradio.mount_gradio_app(
        app,
        _blocks(jobs, reader, delete_cache=(min(kept, 600), kept)),
        path="/",
        auth=login,
        auth_message="Any name; the server's token as password.",
        allowed_paths=[str(folder)],
        show_error=True,
        footer_links=[],
        theme=gradio.themes.Base(font=FONTS, font_mono=["monospace"]),
        max_file_size=jobs.limits.body_bytes,
    )


def _blocks(jobs: Jobs, reader: Reader, **settings) -> gradio.Blocks:
    sizes = [str(size) for size in reader.sizes.served]
    with gradio.Blocks(title=reader.model, **settings) as blocks:
        gradio.Markdown(f"# {reader.model}")
        prompt = gradio.Textbox(label="Prompt", lines=2, max_length=jobs.limits.prompt_characters, elem_id="prompt")
        with gradio.Row():
            size = gradio.Dropdown(sizes, value=sizes[0], label="Size", allow_custom_value=reader.sizes.any_size)
            seed = gradio.Number(label="Seed (empty: drawn)", precision=0, value=None, minimum=0)
        with gradio.Row():
            make = gradio.Button("Generate", variant="primary", elem_id="generate")
            stop = gradio.Button("Cancel", elem_id="cancel")
        status = gradio.Markdown(elem_id="status")
        shown = gradio.Video if reader.sizes.are_videos else gradio.Image
        result = shown(label="Result", interactive=False, elem_id="result")
        current = gradio.State()

        def generate(prompt, size, seed):
            yield from _generate(jobs, reader, prompt, size, seed)

        def cancel(name):
            if (job := jobs.get(name or "")) is not None:
                jobs.cancel(job)

        make.click(generate, [prompt, size, seed], [status, result, current], concurrency_limit=jobs.limits.queue)
        stop.click(cancel, [current], [], concurrency_limit=jobs.limits.queue)
    return blocks


def _generate(jobs: Jobs, reader: Reader, prompt: str, size: str, seed: float | None):
    """Words of the status, the file and the job's id, again and again until the job has finished."""
    kind = WantedVideo if reader.sizes.are_videos else WantedImages
    try:
        wanted = reader.checked({"prompt": prompt, "size": size, "seed": None if seed is None else int(seed)}, kind)
        (job,) = reader.jobs(wanted)
        changed: queue.SimpleQueue = queue.SimpleQueue()
        job.watchers.add(lambda: changed.put(None))
        jobs.submit(job)
    except Refused as refused:
        raise gradio.Error(str(refused), duration=None, print_exception=False) from None
    try:
        while not job.finished:
            yield _words(job), None, job.id
            with contextlib.suppress(queue.Empty):
                changed.get(timeout=ASKS_AGAIN)
                while True:  # several changes are told at once
                    changed.get_nowait()
        if job.state == FAILED:
            raise gradio.Error(job.error["message"], duration=None, print_exception=False)
        yield _words(job), str(job.files[0]) if job.state == COMPLETED else None, job.id
    finally:
        jobs.cancel(job)  # the page was closed


def _words(job) -> str:
    if job.state == COMPLETED:
        return f"completed, seed {job.request.seed}"
    if job.state == CANCELLED:
        return "cancelled"
    return job.state.replace("_", " ") + (f": step {job.step} of {job.steps}" if job.steps else "")
