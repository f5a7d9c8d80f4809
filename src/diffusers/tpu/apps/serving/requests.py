"""Makes jobs of requests' bodies, JSON or forms. Every refusal says what was expected and what came."""

import functools
import inspect
import io
import json
import random
from typing import Literal

from fastapi import Request as HTTPRequest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from ..generation.call import Request
from ..generation.media import NO_PICTURE
from ..generation.signature import SEEDS, parameters_of
from .errors import Refused
from .jobs import Job
from .sizes import Sizes


FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
MOST_FIELDS = 32
OF_PIPELINE = {"negative_prompt", "num_inference_steps", "guidance_scale"}


class Wanted(BaseModel):
    """The fields of both endpoints. `negative_prompt` to `seed` are not in OpenAI's."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    prompt: str = Field(min_length=1)
    model: str | None = None
    size: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=SEEDS.start, lt=SEEDS.stop)
    input_reference: UploadFile | None = None


class WantedVideo(Wanted):
    """`POST /v1/videos`."""

    seconds: float | None = Field(None, gt=0, le=86_400)
    num_frames: int | None = Field(None, ge=1)


class WantedImages(Wanted):
    """`POST /v1/images/generations`."""

    n: int = Field(1, ge=1)
    response_format: Literal["b64_json"] = "b64_json"


class Reader:
    """Makes jobs of requests for one pipeline; `defaults`: its arguments unless a request sets them."""

    def __init__(self, pipeline_class: type, model: str, defaults: dict, sizes: Sizes):
        self.takes, self.model, self.defaults = parameters_of(pipeline_class), model, defaults
        self.sizes, self.limits = sizes, sizes.limits

    @property
    def takes_picture(self) -> bool:
        """Whether a request may have `input_reference`. It must if the pipeline makes videos or has no default for it."""
        return "image" in self.takes

    def default(self, name: str):
        """The value of an argument that a request leaves out: of `defaults`, else the pipeline's own default."""
        return self.defaults.get(name, self.takes[name].default)

    def checked(self, fields: dict, kind: type[Wanted]) -> Wanted:
        """Fields of a request, checked. Raises Refused."""
        try:
            wanted = kind.model_validate(fields)
        except ValidationError as error:
            raise refusal(error.errors()[0], kind) from error
        if wanted.model not in (None, self.model):
            raise Refused(
                404, f"expected the model {self.model!r}, got {wanted.model!r}", param="model", code="model_not_found"
            )
        for name, most, value in (
            ("prompt", self.limits.prompt_characters, len(wanted.prompt)),
            ("negative_prompt", self.limits.prompt_characters, len(wanted.negative_prompt or "")),
            ("num_inference_steps", self.limits.steps, wanted.num_inference_steps or 1),
            ("n", self.limits.images, getattr(wanted, "n", 1)),
        ):
            if value > most:
                unit = " characters" if "prompt" in name else ""
                raise Refused(400, f"expected {name} of at most {most}{unit}, got {value}", param=name)
        return wanted

    def jobs(self, wanted: WantedVideo | WantedImages) -> list[Job]:
        """One job for a video, `n` jobs with consecutive seeds for images."""
        is_video = isinstance(wanted, WantedVideo)
        size = self.sizes.choose(wanted.size, *((wanted.seconds, wanted.num_frames) if is_video else ()))
        arguments = {**self.defaults, **size.arguments()}
        for name, value in wanted.model_dump(include=OF_PIPELINE, exclude_none=True).items():
            if name not in self.takes:
                raise Refused(400, f"expected no {name}: {self.model} takes none, got {value!r}", param=name)
            arguments[name] = value
        is_needed = self.takes_picture and (is_video or self.default("image") is inspect.Parameter.empty)
        if is_needed or wanted.input_reference is not None:
            arguments["image"] = self._image(wanted.input_reference)
        seed = random.randrange(2**31) if wanted.seed is None else wanted.seed
        kind, count = ("video", 1) if is_video else ("image", wanted.n)
        return [Job(kind, Request(wanted.prompt, seed + place, arguments), size) for place in range(count)]

    def _image(self, upload: UploadFile | None) -> Image.Image:
        refused = functools.partial(Refused, 400, param="input_reference")
        if upload is None:
            raise refused(f"expected input_reference: {self.model} starts from a picture")
        if not self.takes_picture:
            raise refused(f"expected no input_reference: {self.model} takes none")
        try:
            picture = Image.open(io.BytesIO(upload.file.read()))
            if max(picture.size) > 2 * self.limits.side:
                raise ValueError(f"sides of at most {2 * self.limits.side} pixels, got {picture.size}")
            return picture.convert("RGB")
        except NO_PICTURE as error:
            raise refused(f"expected input_reference to be a picture: {error}") from error


async def fields_of(http: HTTPRequest) -> dict:
    """The fields of a body, JSON or a form. Raises Refused."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        try:
            value = json.loads(await http.body())
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"expected a body in JSON, got what is none: {error}", code="json") from error
        if not isinstance(value, dict):
            raise Refused(400, f"expected a JSON object, got {type(value).__name__}", code="json")
        return value
    if kind in FORMS:
        async with http.form(max_files=1, max_fields=MOST_FIELDS) as form:
            if twice := sorted({name for name in form if len(form.getlist(name)) > 1}):
                raise Refused(400, f"expected each field once, got {', '.join(twice)} again", param=twice[0])
            return {  # files that outlive the form
                name: UploadFile(io.BytesIO(await value.read())) if isinstance(value, UploadFile) else value
                for name, value in form.items()
            }
    raise Refused(
        415, f"expected Content-Type application/json or {FORMS[0]}, got {kind or 'none'}", code="content_type"
    )


def refusal(error: dict, kind: type[BaseModel] = Wanted) -> Refused:
    """The refusal of pydantic's error about one field of a request."""
    param, got = str(error["loc"][-1]) if error["loc"] else "body", repr(error["input"])
    got = got if len(got) <= 100 else got[:97] + "..."
    words = f"expected a valid {param} ({error['msg'][:1].lower()}{error['msg'][1:]}), got {got}"
    if error["type"] == "missing":
        words = f"expected {param}, got none"
    elif error["type"] == "extra_forbidden":
        words = f"expected only {', '.join(kind.model_fields)}, got {param}"
    return Refused(400, words, param=param)
