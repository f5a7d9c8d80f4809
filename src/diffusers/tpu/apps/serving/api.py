"""The endpoints, in the form of OpenAI's videos and images."""

import asyncio
import base64
import contextlib
import io
import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from .errors import Refused
from .jobs import CANCELLED, COMPLETED, FAILED, Job, Jobs, Metrics
from .requests import Reader, WantedImages, WantedVideo, fields_of, refusal
from .worker import Worker


LOOKS_FOR_CLIENT = 1.0  # seconds between checks that a client waiting for images is connected
Listed = Annotated[int, Query(ge=1, le=100)]  # videos in one response
SUFFIXES = {"video": ".mp4", "spritesheet": ".png"}  # of variants


def make_app(jobs: Jobs, worker: Worker, reader: Reader, metrics: Metrics) -> FastAPI:
    """The application; it starts no thread and loads no model."""
    app = FastAPI(title="diffusers on TPU", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())
    for kind in (Refused, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _refused)
    _add_videos(app, jobs, reader)
    _add_one_video(app, jobs, reader)
    _add_images(app, jobs, reader)

    @app.get("/v1/models")
    async def models():
        model = {"id": reader.model, "object": "model", "created": started, "owned_by": "diffusers-tpu"}
        return {"object": "list", "data": [{**model, "sizes": [str(size) for size in reader.sizes.served]}]}

    @app.get("/health")
    async def health():
        works = worker.is_alive() and not jobs.closed
        state = "ok" if works else "ending" if jobs.closed else "worker died"
        body = {"status": state, "model": reader.model, "queue_length": len(jobs), "queue_limit": jobs.limits.queue}
        return JSONResponse(body, 200 if works else 503)

    @app.get("/metrics")
    async def prometheus():
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/v1/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    async def nothing(rest: str, http: Request):  # else the page, mounted at /, would respond
        ways = [(route.methods, route.path) for route in app.routes if hasattr(route, "methods")]  # not the page
        known = ", ".join(f"{'/'.join(methods)} {path}" for methods, path in ways if "rest" not in path)
        raise Refused(404, f"expected one of {known}, got {http.method} /v1/{rest}", code="not_found")

    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        headers = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
        error = Refused(error.status_code, f"{error.detail}: {request.method} {request.url.path}", **headers)
    elif isinstance(error, RequestValidationError):
        error = refusal(error.errors()[0])
    elif not isinstance(error, Refused):
        error = Refused(500, f"an error of the server: {type(error).__name__}")
    return error.response()


async def changes(job: Job, every: float | None = None) -> AsyncIterator[None]:
    """Yields at once, after each change of the job and every `every` seconds, until the job has finished."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def watcher():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    job.watchers.add(watcher)
    try:
        last = False
        while not last:
            changed.clear()
            last = job.finished
            yield
            if not last:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), every)
    finally:
        job.watchers.discard(watcher)


def _shown(job: Job, jobs: Jobs, reader: Reader) -> dict:
    """A job as OpenAI's video object, with its seed."""
    return {
        "id": job.id,
        "object": "video",
        "model": reader.model,
        "status": job.state,
        "progress": job.progress,
        "created_at": job.created_at,
        "completed_at": job.completed_at if job.state == COMPLETED else None,
        "expires_at": None if job.completed_at is None else job.completed_at + jobs.limits.kept_seconds,
        "size": job.size.pixels,
        "seconds": f"{job.size.frames / reader.sizes.fps:g}",
        "num_frames": job.size.frames,
        "prompt": job.request.prompt,
        "seed": job.request.seed,
        "error": job.error,
        "remixed_from_video_id": None,
    }


def _video(video_id: str, jobs: Jobs) -> Job:
    """The job of a video. Raises Refused if there is none."""
    jobs.sweep()
    job = jobs.get(video_id)
    if job is None or job.kind != "video":
        raise Refused(404, f"expected the id of a video that is kept, got {video_id!r}", code="not_found")
    return job


async def _preview(job: Job) -> Response:
    """The preview of a running job as a JPEG. Raises Refused if there is none."""
    if (image := await asyncio.to_thread(job.preview)) is None:
        expected = "expected a video in progress, after its second step, of a model with previews"
        raise Refused(409, f"{expected}, got step {job.step} of one that is {job.state}", code="no_preview")
    image.save(file := io.BytesIO(), "JPEG", quality=90)
    return Response(file.getvalue(), media_type="image/jpeg", headers={"Cache-Control": "no-store"})


def _needs(kind: str, reader: Reader, other: str):
    if kind != ("videos" if reader.sizes.are_videos else "images"):
        raise Refused(400, f"expected a model of {kind}, {reader.model!r} is none: POST {other}", code="model")


def _add_videos(app: FastAPI, jobs: Jobs, reader: Reader):
    @app.post("/v1/videos")
    async def create(http: Request):
        _needs("videos", reader, "/v1/images/generations")
        (job,) = reader.jobs(reader.checked(await fields_of(http), WantedVideo))
        jobs.submit(job)
        return _shown(job, jobs, reader)

    @app.get("/v1/videos")
    async def listed(limit: Listed = 20, after: str | None = None, order: Literal["asc", "desc"] = "desc"):
        videos = [job for job in jobs.all() if job.kind == "video"][:: 1 if order == "desc" else -1]
        if after is not None:
            videos = videos[videos.index(_video(after, jobs)) + 1 :]
        data = [_shown(job, jobs, reader) for job in videos[:limit]]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(videos) > limit}


def _add_one_video(app: FastAPI, jobs: Jobs, reader: Reader):
    async def found(video_id: str) -> Job:
        return _video(video_id, jobs)

    Found = Annotated[Job, Depends(found)]

    @app.get("/v1/videos/{video_id}")
    async def one(job: Found):
        return _shown(job, jobs, reader)

    @app.get("/v1/videos/{video_id}/content")
    async def content(job: Found, variant: Literal["video", "spritesheet", "preview"] = "video"):
        if variant == "preview":
            return await _preview(job)
        if job.state != COMPLETED:
            raise Refused(409, f"expected a completed video, got one that is {job.state}", code="not_completed")
        (file,) = (file for file in job.files if file.suffix == SUFFIXES[variant])
        try:
            stat = file.stat()
        except FileNotFoundError:
            raise Refused(404, f"expected the id of a video that is kept, got {job.id!r}", code="not_found") from None
        return FileResponse(file, stat_result=stat, filename=file.name, content_disposition_type="inline")

    @app.delete("/v1/videos/{video_id}")
    async def delete(job: Found):
        status = job.state if job.finished else CANCELLED
        jobs.end(job)
        return {"id": job.id, "object": "video.deleted", "deleted": True, "status": status}

    @app.get("/v1/videos/{video_id}/events", response_class=EventSourceResponse)
    async def events(job: Found) -> AsyncIterator[ServerSentEvent]:
        async with contextlib.aclosing(changes(job)) as changed:
            async for _ in changed:
                yield ServerSentEvent(data=_shown(job, jobs, reader), event="done" if job.finished else "progress")


def _add_images(app: FastAPI, jobs: Jobs, reader: Reader):
    @app.post("/v1/images/generations")
    async def images(http: Request):
        _needs("images", reader, "/v1/videos")
        made = reader.jobs(reader.checked(await fields_of(http), WantedImages))
        for job in made:
            job.held = True
        jobs.submit(*made)
        try:
            for job in made:
                await _end_of(job, http)
            return {"created": made[0].created_at, "data": [await asyncio.to_thread(_image, job) for job in made]}
        finally:
            for job in made:
                job.held = False
                jobs.end(job)


async def _end_of(job: Job, http: Request):
    """Return when the job has finished. Raises Refused if it failed or was cancelled, or if the client disconnected."""
    async with contextlib.aclosing(changes(job, LOOKS_FOR_CLIENT)) as changed:
        async for _ in changed:
            if not job.finished and await http.is_disconnected():
                raise Refused(499, "expected a client that waits, it has gone", code="gone")
    if job.state == FAILED:
        status = 400 if job.error["code"] == "invalid_request" else 500
        raise Refused(status, job.error["message"], code=job.error["code"])
    if job.state == CANCELLED:
        raise Refused(503, "expected a server that goes on, got one that ends: the job was cancelled", code="ending")


def _image(job: Job) -> dict:
    return {"b64_json": base64.b64encode(job.files[0].read_bytes()).decode(), "seed": job.request.seed}
