"""ComfyUI nodes that make videos and images with `diffusers-tpu serve`. README.md says how to install them."""

import base64
import contextlib
import io
import time

import comfy.model_management
import comfy.utils
import numpy as np
import torch
from comfy_api.input_impl import VideoFromFile
from PIL import Image

from .client import LOOK_SECONDS, Client, ServerError


SERVER = "http://127.0.0.1:8000"
PREVIEW_SECONDS, PREVIEW_SIDE = 2.0, 512


def _input(kind: str, tooltip: str, default, **more) -> tuple:
    return kind, {"tooltip": tooltip, "default": default, **more}


class Node:
    """Inputs that all nodes have: fields of a request. An empty field means the server's default."""

    CATEGORY, FUNCTION = "diffusers on TPU", "make"
    MORE = {}  # inputs of one node

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        prompt = _input("STRING", "What to make.", "", multiline=True)
        seed = _input("INT", "Of the noise.", 0, min=0, max=2**63 - 1, control_after_generate=True)
        size = "WIDTHxHEIGHT, of videos also WIDTHxHEIGHTxFRAMES; empty: the server's first size."
        optional = {
            "negative_prompt": _input("STRING", "What to avoid; empty: the server's default.", "", multiline=True),
            "size": _input("STRING", size, ""),
            "steps": _input("INT", "0: the server's default.", 0, min=0, max=1000),
            "guidance": _input("FLOAT", "-1: the server's default.", -1.0, min=-1.0, max=100.0, step=0.1),
            "server": _input("STRING", "The address of `diffusers-tpu serve`.", SERVER),
        }
        return {"required": {"prompt": prompt, **cls.MORE, "seed": seed}, "optional": optional}

    def asked(
        self, prompt, seed, negative_prompt="", size="", steps=0, guidance=-1.0, server=SERVER
    ) -> tuple[Client, dict]:
        """Returns the request's fields and a client whose requests end when the graph is interrupted."""
        given = {"negative_prompt": negative_prompt, "size": size.strip(), "num_inference_steps": steps}
        fields = {"prompt": prompt, "seed": seed, **{name: value for name, value in given.items() if value}}
        fields |= {"guidance_scale": guidance} if guidance >= 0 else {}
        return Client(server, comfy.model_management.throw_exception_if_processing_interrupted), fields


class TPUTextToVideo(Node):
    """Runs a job on the server and cancels it when the graph is interrupted."""

    RETURN_TYPES, TITLE = ("VIDEO",), "Text to Video (TPU)"
    DESCRIPTION = "A video by `diffusers-tpu serve`, with progress and, where the model has them, previews."

    def make(self, image: torch.Tensor | None = None, **inputs):
        client, fields = self.asked(**inputs)
        picture = None if image is None else png(image)
        job = client.ask("POST", "/v1/videos", fields=fields, picture=picture)
        path = f"/v1/videos/{job['id']}"
        try:
            self._wait(client, path, job)
            return (VideoFromFile(io.BytesIO(client.ask("GET", f"{path}/content"))),)
        except BaseException:
            with contextlib.suppress(ServerError):  # a server that has gone has no job
                Client(client.address).ask("DELETE", path)
            raise

    def _wait(self, client: Client, path: str, job: dict):
        bar, shown = comfy.utils.ProgressBar(100), time.monotonic()
        while job["status"] in ("queued", "in_progress"):
            picture = None
            if time.monotonic() - shown > PREVIEW_SECONDS:
                shown, picture = time.monotonic(), preview(client, path)
            bar.update_absolute(job["progress"], 100, picture)
            client.look()
            time.sleep(LOOK_SECONDS)
            job = client.ask("GET", path)
        if job["status"] != "completed":
            error = (job["error"] or {}).get("message", "it was cancelled at the server")
            raise ServerError(f"{client.address}: expected a video, got a job that is {job['status']}: {error}")
        bar.update_absolute(100, 100)


class TPUImageToVideo(TPUTextToVideo):
    """Runs a job on the server that makes a video from a picture."""

    TITLE = "Image to Video (TPU)"
    MORE = {"image": ("IMAGE", {"tooltip": "Where the video starts from: the first of a batch."})}


class TPUTextToImage(Node):
    """Sends one request, without progress; the server cancels its jobs when the connection is closed."""

    RETURN_TYPES, TITLE = ("IMAGE",), "Text to Image (TPU)"
    DESCRIPTION = "Images by `diffusers-tpu serve`; their seeds follow each other."
    MORE = {"n": _input("INT", "Images.", 1, min=1, max=64)}

    def make(self, n: int, **inputs):
        client, fields = self.asked(**inputs)
        made = client.ask("POST", "/v1/images/generations", fields={**fields, "n": n})["data"]
        images = [Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))).convert("RGB") for one in made]
        return (torch.from_numpy(np.stack([np.asarray(image, np.float32) / 255 for image in images])),)


def png(images: torch.Tensor) -> bytes:
    """Returns the first image of a batch `B H W C` in [0, 1] as a PNG file."""
    pixels = (images[0, ..., :3].clamp(0, 1) * 255).round().byte().cpu().numpy()
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def preview(client: Client, path: str) -> tuple | None:
    """Returns the job's preview as `ProgressBar` takes it, None where the server has none."""
    try:
        return "JPEG", Image.open(io.BytesIO(client.ask("GET", f"{path}/content?variant=preview"))), PREVIEW_SIDE
    except ServerError as error:
        if error.status == 409:
            return None
        raise


NODE_CLASS_MAPPINGS = {node.__name__: node for node in (TPUTextToVideo, TPUImageToVideo, TPUTextToImage)}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
