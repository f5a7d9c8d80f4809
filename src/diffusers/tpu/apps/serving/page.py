"""A page at `/`: prompt and settings, progress with previews, the video or image, and the results of this browser session.

It is made with Gradio and mounted into the same application; its jobs go into the same queue.
"""

import contextlib
import io
import os
import queue
import time
from pathlib import Path


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported; off: nothing is sent out

import gradio  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from starlette.datastructures import UploadFile  # noqa: E402

from .errors import Refused  # noqa: E402
from .guard import same  # noqa: E402
from .jobs import CANCELLED, COMPLETED, FAILED, QUEUED, Job, Jobs  # noqa: E402
from .requests import Reader, WantedImages, WantedVideo  # noqa: E402


FONTS = ["system-ui", "sans-serif"]  # of the browser: none is fetched
TICK = 1.0  # seconds between updates of an unchanged job, whose time passed still changes
PREVIEW_SECONDS = 2.0  # between two previews
STYLE = "appearance: auto; width: 100%; accent-color: var(--primary-500)"  # of the progress bar
RESULTS = 12  # of one browser session


def mounted(app: FastAPI, jobs: Jobs, reader: Reader, folder: Path, token: str | None, about: str) -> FastAPI:
    """The application with the page at `/`. With a token, its login takes any name, and the token as password.

    Args:
        about: pipeline and chips, in one line.
    """
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "page")
    kept = jobs.limits.kept_seconds
    login = None if token is None else (lambda user, password: same(token, password))
    return gradio.mount_gradio_app(
        app,
        Page(jobs, reader).blocks(about, delete_cache=(min(kept, 600), kept)),
        path="/",
        auth=login,
        auth_message="Any name; the server's token as password.",
        allowed_paths=[str(folder)],
        show_error=True,
        footer_links=[],
        theme=gradio.themes.Base(font=FONTS, font_mono=["monospace"]),
        max_file_size=jobs.limits.body_bytes,
    )


class Page:
    """The page's content and its actions. Fields are named as those of the API's requests."""

    def __init__(self, jobs: Jobs, reader: Reader):
        self.jobs, self.reader, self.are_videos = jobs, reader, reader.sizes.are_videos

    def blocks(self, about: str, **settings) -> gradio.Blocks:
        """The whole page."""
        with gradio.Blocks(title=self.reader.model, **settings) as blocks:
            sizes = f"Sizes: {self.reader.sizes}" + (", and others" if self.reader.sizes.any_size else "")
            gradio.Markdown(f"# {self.reader.model}\n{about}. {sizes}.", elem_id="about")
            with gradio.Row():
                with gradio.Column(min_width=300):
                    fields = self._fields()
                    with gradio.Row():
                        make = gradio.Button("Generate", variant="primary", elem_id="generate", min_width=120)
                        stop = gradio.Button("Cancel", elem_id="cancel", min_width=120)
                    self.status = gradio.Markdown(elem_id="status")
                    self.bar = gradio.HTML(visible=False)
                with gradio.Column(min_width=300):
                    plain = {"interactive": False, "buttons": []}
                    self.preview = gradio.Image(label="Preview", visible=False, elem_id="preview", **plain)
                    shown = gradio.Video if self.are_videos else gradio.Image
                    self.result = shown(label="Result", elem_id="result", **plain)
                    self.file = gradio.DownloadButton("Download", visible=False, elem_id="download")
            label = "This session's results: click to reuse"
            look = {"columns": 3, "height": "auto", "fit_columns": False, "allow_preview": False, "visible": False}
            self.gallery = gradio.Gallery(label=label, elem_id="results", **look, **plain)
            self.current, self.results = gradio.State(), gradio.State([])
            self.names, many = [*fields], {"concurrency_limit": self.jobs.limits.queue, "show_progress": "hidden"}
            outputs = [self.status, self.bar, self.preview, self.result, self.file, self.gallery, self.current]
            make.click(self.generate, [self.results, *fields.values()], [*outputs, self.results], **many)
            stop.click(self.cancel, [self.current], [], **many)
            self.gallery.select(self.again, [self.results], [*fields.values(), self.result, self.file], **many)
        return blocks

    def _fields(self) -> dict[str, gradio.components.Component]:
        """Adds the form to the open block; returns its fields by name. An empty field means the pipeline's default."""
        reader, sizes, made = self.reader, [str(size) for size in self.reader.sizes.served], {}
        most = {"lines": 2, "max_length": self.jobs.limits.prompt_characters}
        made["prompt"] = gradio.Textbox(label="Prompt", elem_id="prompt", **most)
        if reader.takes_picture:
            sources = {"type": "filepath", "sources": ["upload", "clipboard"], "height": 200}
            made["input_reference"] = gradio.Image(label="Picture to start from", elem_id="picture", **sources)
        with gradio.Row():
            others = reader.sizes.any_size
            made["size"] = gradio.Dropdown(
                sizes, value=sizes[0], label="Size", allow_custom_value=others, min_width=120, elem_id="size"
            )
            if others and self.are_videos:
                made["num_frames"] = self._number("num_frames", "Frames", "as the size says")
            made["seed"] = self._number("seed", "Seed", "empty: drawn")
        with gradio.Accordion("More settings", open=False, elem_id="more"):
            if "negative_prompt" in reader.takes:
                shown = reader.default("negative_prompt") or "none"
                made["negative_prompt"] = gradio.Textbox(
                    label="Negative prompt", placeholder=shown, elem_id="negative_prompt", **most
                )
            with gradio.Row():
                for name, label in (("num_inference_steps", "Steps"), ("guidance_scale", "Guidance")):
                    if name in reader.takes:
                        made[name] = self._number(name, label, str(reader.default(name)))
        return made

    def _number(self, name: str, label: str, placeholder: str) -> gradio.Textbox:
        """A text field, as Gradio's field for numbers cannot stay empty. The request's reader refuses what is no number."""
        shown = {"label": label, "placeholder": placeholder, "elem_id": name}
        return gradio.Textbox(max_lines=1, max_length=20, min_width=120, **shown)

    def generate(self, results: list[dict], *values):
        """Submits a job of these fields; yields the changes of the page until it has finished."""
        fields = {name: value for name, value in zip(self.names, values) if value not in (None, "")}
        kind, given = WantedVideo if self.are_videos else WantedImages, dict(fields)
        if "input_reference" in given:
            given["input_reference"] = UploadFile(io.BytesIO(Path(given["input_reference"]).read_bytes()))
        try:
            (job,) = self.reader.jobs(self.reader.checked(given, kind))
            changed: queue.SimpleQueue = queue.SimpleQueue()
            job.watchers.add(lambda: changed.put(None))
            self.jobs.submit(job)
        except Refused as refused:
            raise gradio.Error(str(refused), duration=None, print_exception=False) from None
        hidden, seen = gradio.update(value=None, visible=False), time.monotonic()
        try:
            yield {self.current: job.id, self.file: hidden, self.result: None}
            while not job.finished:
                now = {self.status: self._words(job), self.bar: _bar(job)}
                if time.monotonic() - seen > PREVIEW_SECONDS and (image := job.preview()) is not None:
                    seen, now[self.result] = time.monotonic(), gradio.update(visible=False)
                    now[self.preview] = gradio.update(value=image, visible=True)
                yield now
                with contextlib.suppress(queue.Empty):
                    changed.get(timeout=TICK)
                    while True:  # several changes are one update
                        changed.get_nowait()
            now = {self.status: self._words(job), self.bar: hidden, self.preview: hidden}
            if job.state == COMPLETED:
                file = str(job.files[0])
                results = [r for r in results if Path(r["file"]).exists()][: RESULTS - 1]
                results = [{**fields, "seed": job.request.seed, "file": file}, *results]
                pictures = [(r["file"], f"{r['prompt'][:60]}, seed {r['seed']}") for r in results]
                now |= {self.results: results, self.gallery: gradio.update(value=pictures, visible=True)}
                now |= {self.file: gradio.update(value=file, visible=True)}
            yield {**now, self.result: gradio.update(value=file if job.state == COMPLETED else None, visible=True)}
            if job.state == FAILED:
                raise gradio.Error(job.error["message"], duration=None, print_exception=False)
        finally:
            self.jobs.cancel(job)  # for a page that was closed

    def cancel(self, name: str | None):
        if (job := self.jobs.get(name or "")) is not None:
            self.jobs.cancel(job)

    def again(self, results: list[dict], event: gradio.SelectData):
        """The fields of the result that was clicked, the result, and its file."""
        one = results[event.index]
        if not Path(one["file"]).exists():
            raise gradio.Error("expected a result that is kept, this one is older: generate it again", duration=None)
        if (picture := one.get("input_reference")) and not Path(picture).exists():
            picture = None
        one = one | {"seed": str(one["seed"]), "input_reference": picture}
        return *(one.get(name) for name in self.names), one["file"], gradio.update(value=one["file"], visible=True)

    def _words(self, job: Job) -> str:
        if job.state == QUEUED:
            ahead = self.jobs.ahead(job)
            return "queued" + (f": {ahead} before it" if ahead else "")
        passed = (job.finished_at or time.monotonic()) - (job.started_at or job.queued_at)
        if job.state == COMPLETED:
            return f"completed in {_time(passed)}, seed {job.request.seed}"
        if job.state in (CANCELLED, FAILED):
            return job.state
        if not job.step:
            return f"in progress: {_time(passed)} passed"
        left = passed / job.step * (job.steps - job.step)
        then = f", about {_time(left)} left" if job.step < job.steps else ", decoding"
        return f"in progress: step {job.step} of {job.steps}, {_time(passed)} passed{then}"


def _bar(job: Job):
    return gradio.update(value=f'<progress max="100" value="{job.progress}" style="{STYLE}">', visible=True)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}\N{NO-BREAK SPACE}min {rest}\N{NO-BREAK SPACE}s" if minutes else f"{rest}\N{NO-BREAK SPACE}s"
