"""`diffusers-tpu serve` in Ray Serve, one replica per host: `python examples/tpu/serve_ray.py MODEL --sizes 832x480x81 --replicas 2`.

A replica is the application of `diffusers.tpu.apps.serving` with its own pipeline. Videos are polled by id at the replica that made them, so
several replicas need a load balancer with sticky sessions. Images are returned in the response to their request and need none.
"""

import argparse
import os
import signal
import threading

import ray
import torch
from ray import serve

import diffusers
from diffusers.tpu.apps.serving.server import Service, Settings
from diffusers.tpu.apps.serving.sizes import default_frames, parse


@serve.deployment(max_ongoing_requests=512)
@serve.ingress()
class Replica:
    """Holds one pipeline, which compiles its sizes before Ray sends requests."""

    def __init__(self, model: str, sizes: list[str], dtype: str | None, defaults: dict, settings: dict):
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            model, **({"dtype": getattr(torch, dtype)} if dtype else {})
        )
        pipe = pipe.to("cuda") if os.environ.get("DIFFUSERS_TPU") != "off" else pipe
        pipe.set_progress_bar_config(disable=True)
        served = tuple(parse(text, default_frames(type(pipe))) for text in sizes)
        name = os.path.basename(os.path.normpath(model))
        self.service = Service(pipe, Settings(name, defaults, served, page=False, **settings))
        self.service.start()

    def __serve_build_asgi_app__(self):
        return self.service.app

    def __del__(self):
        self.service.end()


def start(
    model: str, sizes: list[str], replicas: int, *, dtype=None, defaults=None, actor=None, port=8000, **settings
):
    """Starts the replicas and returns when all accept requests.

    Args:
        actor: Ray's options of each replica, such as {"resources": {"TPU": 8}}.
        settings: fields of `Settings`.
    """
    serve.start(http_options={"host": settings.get("host", "127.0.0.1"), "port": port})
    deployment = Replica.options(num_replicas=replicas, ray_actor_options=actor or {})
    serve.run(deployment.bind(model, sizes, dtype, defaults or {}, settings), route_prefix="/")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--sizes", required=True, help="WIDTHxHEIGHTxFRAMES, with commas between")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tpus", type=float, default=0, help="of one replica, as Ray counts them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--max-batch", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1", help="elsewhere a token is needed: DIFFUSERS_TPU_TOKEN")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def main():
    options = make_parser().parse_args()
    variables = {n: v for n, v in os.environ.items() if n.startswith("DIFFUSERS_TPU") and not n.endswith("_TOKEN")}
    ray.init(runtime_env={"env_vars": variables})
    actor = {"resources": {"TPU": options.tpus}} if options.tpus else {}
    settings = {"host": options.host, "max_batch": options.max_batch, "token": os.environ.get("DIFFUSERS_TPU_TOKEN")}
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    sizes = options.sizes.split(",")
    start(options.model, sizes, options.replicas, dtype=options.dtype, actor=actor, port=options.port, **settings)
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
