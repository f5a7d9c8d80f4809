"""One process of a run on simulated chips, started by test_hosts: python host_runs.py MODEL FOLDER STEP...

A step is a word of `STEPS` and what it takes, with colons between. Arrays that it makes lie in FOLDER as NAME-NUMBER.npy.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import diffusers
from diffusers.tpu import TPUConfig, install, is_main_process
from diffusers.tpu.chips import hosts
from diffusers.tpu.compile import executables
from diffusers.tpu.pipelines import attach
from diffusers.tpu.weights import transfer


CALL = dict(height=64, width=64, num_frames=9, num_inference_steps=2, guidance_scale=2.0, output_type="np")
PROMPT = "a red circle moving right"


class Process:
    def __init__(self, model: str, folder: str):
        self.model, self.folder = model, Path(folder)
        self.load()
        self.number = hosts.number("cpu")
        assert is_main_process() == (self.number == 0)

    def load(self):
        self.pipe = diffusers.DiffusionPipeline.from_pretrained(self.model, dtype=torch.bfloat16)
        self.pipe.set_progress_bar_config(disable=True)

    def install(self, degrees: str):
        install(self.pipe, TPUConfig(mesh=tuple(map(int, degrees.split(",")))))

    def tell(self, name: str, facts):
        (self.folder / f"{name}-{self.number}.json").write_text(json.dumps(facts))

    def video(self, degrees: str, name: str = "video", **changes):
        """The frames of a call on this mesh."""
        self.install(degrees)
        given = {"prompt": PROMPT, "generator": torch.Generator().manual_seed(6), **CALL, **changes}
        frames = self.pipe(**given).frames
        np.save(self.folder / f"{name}-{degrees}-{self.number}.npy", np.asarray(frames, np.float32))

    def latents(self, degrees: str):
        """What the frames would be made of."""
        self.video(degrees, "latents", output_type="latent")

    def again(self, degrees: str):
        """A pipeline that finds the programs of the last one as another run does."""
        executables._loaded.clear()
        self.load()
        self.video(degrees, "again", output_type="latent")
        runners = [runner for runner in map(attach.runs, self.pipe.components.values()) if runner is not None]
        counts = {name: sum(getattr(runner, name) for runner in runners) for name in ("traces", "compilations")}
        self.tell("again", counts | {"programs": sum(len(runner.programs) for runner in runners)})

    def unseeded(self, degrees: str):
        """Each process is somewhere else with its random numbers, and a call has no generator."""
        torch.manual_seed(100 + self.number)
        self.video(degrees, "unseeded", generator=None, output_type="latent")

    def read(self, degrees: str):
        """Bytes of the denoiser's weights that are read, and those that its own chips have."""
        read, fill, fill_padded = [], transfer._fill, transfer._fill_padded
        self.install(degrees)
        runner = attach.runs(self.pipe.transformer)

        def counted(key, tensor, piece, targets):
            read.append(math.prod(s.stop - s.start for s in piece) * targets[0][1].itemsize)
            return fill(key, tensor, piece, targets)

        def counted_padded(tensor, targets):
            read.append(0 if tensor is None else tensor.numel() * targets[0][1].itemsize)
            return fill_padded(tensor, targets)

        with mock.patch.multiple(transfer, _fill=counted, _fill_padded=counted_padded):
            runner.place()
        arrays = runner.plan_weights().arrays.values()
        own = sum(sum({str(s.index): s.data.nbytes for s in a.addressable_shards}.values()) for a in arrays)
        self.tell("read", [sum(read), own, sum(a.nbytes for a in arrays)])

    def other_seed(self, degrees: str):
        self.video(degrees, generator=torch.Generator().manual_seed(6 + self.number))

    def pause(self, number: str, seconds: str):
        """The process of this number stands still for so long."""
        if self.number == int(number):
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def end(self, number: str, how: str):
        """The process of this number ends in the middle of a run."""
        print(f"ends at {time.time()}", flush=True)
        if self.number == int(number) and how == "raise":
            raise ValueError("no room\non the disk")
        if self.number == int(number) and how == "exit":
            sys.exit(0)
        if self.number == int(number):
            os.kill(os.getpid(), getattr(signal, how))
        for _ in range(100):
            self.latents("2,2,1")


if __name__ == "__main__":
    process = Process(*sys.argv[1:3])
    for step in sys.argv[3:]:
        name, *given = step.split(":")
        getattr(process, name)(*given)
