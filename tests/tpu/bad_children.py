"""What goes wrong in the compiler's process, named to it as "bad_children:name" (test_planner_program.py). It starts in seconds."""

import os
import subprocess
import sys

from diffusers.tpu.planner import aot


def crash(argument, progress):
    print("about to end badly", file=sys.stderr, flush=True)
    os.abort()


def hang(argument, progress):
    sleeper = subprocess.Popen(["sleep", "600"])
    progress(str(sleeper.pid))
    sleeper.wait()


def refuse(argument, progress):
    raise aot.BadRequest(f"expected nothing, got {argument}")
