"""Jobs, sizes, previews and the end of a server. Oracles: hand counts of files, jobs and threads; latents made of frames by hand."""

import functools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from conftest import needs
from diffusers import FluxPipeline


needs("fastapi.sse", "prometheus_client", "uvicorn")

from diffusers.tpu.apps.cli import main, serve  # noqa: E402
from diffusers.tpu.apps.generation.call import Request  # noqa: E402
from diffusers.tpu.apps.serving.errors import Refused  # noqa: E402
from diffusers.tpu.apps.serving.jobs import CANCELLED, COMPLETED, IN_PROGRESS, Job, Jobs  # noqa: E402
from diffusers.tpu.apps.serving.preview import Colours, Steps  # noqa: E402
from diffusers.tpu.apps.serving.server import Service, Settings  # noqa: E402
from diffusers.tpu.apps.serving.sizes import Limits, Size, Sizes, default_size, parse  # noqa: E402
from test_serving import DEFAULTS, SIZE, wait  # noqa: E402


# Jobs


def job(kind="image", prompt="a", steps=2) -> Job:
    return Job(kind, Request(prompt, 0, {"num_inference_steps": steps}), SIZE)


def test_jobs_that_are_alike_are_taken_together_and_in_order():
    jobs = Jobs(Limits())
    a, b, c, d = job(prompt="a"), job(steps=3), job(prompt="c"), job(prompt="d")
    jobs.submit(a, b, c, d)
    assert jobs.take(2) == [a, c] and a.state == IN_PROGRESS
    assert jobs.take(2) == [b] and jobs.take(2) == [d]
    jobs.close()
    assert jobs.take(2) is None
    with pytest.raises(Refused, match="one that ends"):
        jobs.submit(job())


def test_finished_jobs_go_by_age_by_bytes_and_by_number(tmp_path, monkeypatch):
    def finished(jobs: Jobs, count: int) -> list[Job]:
        made = [job() for _ in range(count)]
        jobs.submit(*made)
        jobs.take(count)
        for number, one in enumerate(made):
            file = tmp_path / f"{one.id}.png"
            file.write_bytes(b"x" * 100)
            jobs.finish(one, COMPLETED, [file])
        return made

    for limits, left in ((Limits(kept_bytes=250), 2), (Limits(kept_jobs=3), 3), (Limits(), 5)):
        jobs = Jobs(limits)
        made = finished(jobs, 5)
        assert jobs.all() == made[: 4 - left if left < 5 else None : -1]
        assert {f.name for f in tmp_path.iterdir()} == {one.files[0].name for one in jobs.all()}
        later = time.monotonic() + 4000
        monkeypatch.setattr(time, "monotonic", lambda: later)
        jobs.sweep()
        monkeypatch.undo()
        assert jobs.all() == [] and not list(tmp_path.iterdir())


def test_a_job_that_waits_is_cancelled_at_once_and_one_that_is_done_too_late_leaves_no_file(tmp_path):
    jobs = Jobs(Limits())
    a, b = job(), job()
    jobs.submit(a, b)
    jobs.cancel(b)
    assert b.state == CANCELLED and jobs.take(9) == [a]
    jobs.cancel(a)
    assert a.state == IN_PROGRESS
    file = tmp_path / "a.png"
    file.write_bytes(b"")
    jobs.finish(a, COMPLETED, [file])
    assert a.state == CANCELLED and a.files == [] and not file.exists()


@pytest.mark.parametrize("seconds, state", [(20.0, COMPLETED), (0.05, CANCELLED)])
def test_the_end_cancels_what_waits_and_lets_what_runs_finish_for_a_while(flux, monkeypatch, seconds, state):
    gate, started, call = threading.Event(), threading.Event(), FluxPipeline.__call__

    @functools.wraps(call)
    def slowed(self, *args, **kwargs):
        started.set()
        assert gate.wait(20)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(FluxPipeline, "__call__", slowed)
    service = Service(flux, Settings("tiny", DEFAULTS, (SIZE,), page=False))
    runs, waits = (Job("image", Request("a", 0, {**DEFAULTS, **SIZE.arguments()}), SIZE) for _ in range(2))
    service.jobs.submit(runs, waits)
    service.worker.start()
    assert started.wait(20)
    ends = threading.Thread(target=service.end, args=(seconds,))
    ends.start()
    wait(lambda: waits.finished and (state == COMPLETED or runs.cancelling))
    gate.set()
    ends.join()
    assert (runs.state, waits.state) == (state, CANCELLED)
    assert not service.worker.is_alive() and not service.folder.exists()


# Sizes


def test_sizes_are_parsed_chosen_and_defaulted(flux):
    assert parse("64x32x9", 81) == Size(64, 32, 9) and parse("64x32", 81) == Size(64, 32, 81)
    for text, frames in (("64", 81), ("0x1", None), ("64x64x9", None), ("64x64x", 9), ("1x2x3x4", 9)):
        with pytest.raises(ValueError, match="a size as"):
            parse(text, frames)
    assert default_size(tiny.wan()) == Size(832, 480, 81)
    side = flux.default_sample_size * flux.vae_scale_factor
    assert default_size(flux) == Size(side, side)
    sizes = Sizes((Size(64, 64, 9), Size(64, 64, 33)), False, 16, Limits())
    assert sizes.choose(None) == Size(64, 64, 9)
    assert sizes.choose("64x64", seconds=2) == Size(64, 64, 33) and sizes.choose("64x64x33") == Size(64, 64, 33)
    for text in ("128x64", "64x64x17", "64x32x9"):
        with pytest.raises(Refused, match=rf"compiled \(64x64x9 \(0.5625 s\), .*got {text}"):
            sizes.choose(text)
    assert Sizes(sizes.served, True, 16, Limits()).choose("128x64", seconds=1) == Size(128, 64, 16)


# Previews


def test_the_line_through_two_steps_and_the_fit_give_the_frame_in_the_middle_or_none():
    """Of 9 frames of 32 x 32 whose 4 x 4 blocks are 3 x 8 x 8 latents of 4 channels, linearly."""
    blocks = np.random.randint(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    frames = [Image.fromarray(blocks[round(n / 4)]).resize((32, 32), Image.Resampling.NEAREST) for n in range(9)]
    latents = torch.tensor(blocks / 127.5 - 1).permute(3, 0, 1, 2)
    latents = torch.cat([latents, latents[:1] - latents[2:]])
    noise, sigmas = torch.randn_like(latents), [1.0, 0.75, 0.5, 0.25, 0.0]
    colours, steps, plain, unlike, packed = Colours(), Steps(), Steps(), Colours(), Colours()
    colours.learn(latents, frames)
    assert colours.fit > 0.999 and colours.picture(steps) is None
    for step in (1, 2):
        noisy = (1 - sigmas[step]) * latents + sigmas[step] * noise
        steps.add(noisy, SimpleNamespace(sigmas=sigmas), step, 4)
        plain.add(noisy, SimpleNamespace(), step, 4)
    torch.testing.assert_close(steps.clean(), latents.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(plain.clean(), noisy.float())
    expected = Image.fromarray(blocks[1]).resize((384, 384), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(colours.picture(steps), int) - np.asarray(expected, int)).max() <= 3
    unlike.learn(noise, frames)
    packed.learn(torch.ones(64, 16), frames)
    assert unlike.fit < 0.4 and unlike.picture(steps) is None and packed.picture(steps) is None


# The command


def test_the_command_says_what_no_server_can_be_started_with(flux, tmp_path, monkeypatch, capsys):
    flux.save_pretrained(tmp_path)
    for words, message in (
        (["--host", "0.0.0.0"], "expected a token"),
        (["--sizes", "16"], "a size as WIDTHxHEIGHT, got '16'"),
        (["--height", "16"], "no --height: requests say what"),
        (["--num-images-per-prompt", "2"], "no --num-images-per-prompt: requests say what"),
        (["--port", "99999"], "a free address, got 127.0.0.1:99999"),
        (["--queue", "0"], "--queue of at least 1"),
        (["--max-batch", "0"], "--max-batch of at least 1"),
        (["--grace", "nan"], "--grace of at least 0"),
    ):
        assert main(["serve", str(tmp_path), "--device", "upstream", "--no-page", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package",))
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install '.[serve]'" in capsys.readouterr().err
