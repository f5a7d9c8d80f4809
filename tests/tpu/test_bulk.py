"""Many prompts into one directory. Oracle: the pipeline called by hand; files and records counted; owners that are killed."""

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import ROOT
from diffusers import FluxImg2ImgPipeline, FluxPipeline, WanPipeline
from diffusers.tpu.apps.bulk import prompts as prompt_files
from diffusers.tpu.apps.bulk.claims import Claims
from diffusers.tpu.apps.bulk.directory import Directory
from diffusers.tpu.apps.bulk.work import Work
from diffusers.tpu.apps.cli import main
from diffusers.tpu.apps.generation import media
from diffusers.tpu.apps.generation.signature import check_arguments


SIZE = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8}
SETTINGS = {"model": "flux"}


@pytest.fixture
def write(tmp_path):
    """A function from lines of jsonl to a file of prompts."""

    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def damaged() -> bytes:
    """Of a picture, whose second piece has no name."""
    Image.fromarray(np.random.randint(0, 255, (200, 200, 3), np.uint8)).save(file := io.BytesIO(), "PNG")
    return b"\0\0\0\0".join(file.getvalue().rsplit(b"IDAT", 1))


def by_hand(pipe, prompt: str, seed: int, **changes) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return np.asarray(pipe(prompt, generator=generator, **{**SIZE, **changes}).images[0], int)


def picture(path) -> np.ndarray:
    return np.asarray(Image.open(path), int)


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


# The file of prompts


def test_a_line_has_its_place_its_seed_and_its_own_arguments(write):
    lines = [{"prompt": "b", "id": "mine", "seed": 3, "height": 32}, {"prompt": "c", "id": 7}]
    found = prompt_files.read(write('\ufeff{"prompt": "a\u2028"}\n\n', *lines), 100, {"height": 16})
    assert [(p.place, p.id, p.prompt, p.seed, p.arguments) for p in found] == [
        (0, "00000", "a\u2028", 100, {"height": 16}),
        (1, "mine", "b", 3, {"height": 32}),
        (2, "7", "c", 102, {"height": 16}),
    ]
    plain = prompt_files.read(write("a red circle\n\n  a blue square \n", name="prompts.txt"), 0, {})
    assert [(p.id, p.prompt, p.seed) for p in plain] == [("00000", "a red circle", 0), ("00001", "a blue square", 1)]


BAD_FILES = [
    (['{"prompt": \n'], "a JSON object in line 1"),
    ([{"prompt": "a"}, {"text": "b"}], 'an object with "prompt" as text in line 2'),
    ([{"prompt": "a", "id": "../a"}], "an id of letters.*line 1, got '../a'"),
    ([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}], "once, got 'x' in lines 1 and 2"),
    ([{"prompt": "a", "seed": "1"}], "a seed from 0"),
    (["\n"], "at least one prompt"),
]


def test_a_file_that_is_none_is_refused_with_its_line(write):
    for lines, message in BAD_FILES:
        with pytest.raises(ValueError, match=message):
            prompt_files.read(write(*lines), 0, {})


def test_arguments_are_held_against_the_pipelines_signature():
    good = {"height": 64, "guidance_scale": 5, "negative_prompt": ["x"], "guidance_scale_2": None}
    check_arguments(WanPipeline, good)
    for arguments in ({"sharpness": 3}, {"height": "tall"}, {"height": True}, {"num_frames": 1.5}, {"generator": 1}):
        with pytest.raises(ValueError, match=f"expected.*{[*arguments][0]}"):
            check_arguments(WanPipeline, arguments)


# The directory


def test_another_list_of_prompts_is_refused_with_what_differs_and_a_longer_one_is_not(write, tmp_path):
    directory = Directory(tmp_path / "out")

    def agree(*lines, **settings):
        directory.agree(prompt_files.read(write(*lines), 0, {}), {**SETTINGS, **settings})

    one, two, three = ({"prompt": text} for text in "abc")
    agree(one, two)
    (directory.path / "manifest.jsonl").write_text("of two")
    agree(one, two)
    assert (directory.path / "manifest.jsonl").exists()
    agree(one, two, three)
    assert not (directory.path / "manifest.jsonl").exists()
    for lines, settings, message in (
        ((one, three, three), {}, "another prompt '00001': prompt 'b', now 'c'"),
        ((one, {**two, "seed": 9}, three), {}, "seed 1, now 9"),
        ((one, two), {}, "the 3 prompts.*got 2: '00002' is missing"),
        ((one, two, three), {"model": "wan"}, "model 'flux', now 'wan'"),
    ):
        with pytest.raises(ValueError, match=message):
            agree(*lines, **settings)


# Takes prompts; when a file is there it writes the record of prompt 0 and ends.
OWNER = """
import pathlib, sys, time
room, folder, until, *places = sys.argv[1:]
sys.path.insert(0, room)
import claims
mine = claims.Claims(pathlib.Path(folder))
print(*(mine.take(int(place)) for place in places), flush=True)
while not pathlib.Path(until).exists():
    time.sleep(0.01)
pathlib.Path(folder, ".records", "00000.json").write_text('{"files": []}')
"""


@contextlib.contextmanager
def owner(folder, until, *places: str):
    """Another process that has the prompts at these places of the directory."""
    room = ROOT / "src/diffusers/tpu/apps/bulk"
    command = [sys.executable, "-c", OWNER, *map(str, (room, folder, until)), *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as failed:
        failed.callback(process.kill)  # who leaves waits for it
        assert process.stdout.readline().split() == ["True"] * len(places)
        yield process
        failed.pop_all()


def test_a_prompt_is_its_owners_until_the_owner_is_killed(tmp_path):
    with owner(tmp_path, tmp_path / "never", "0", "1") as process:
        claims = Claims(tmp_path)
        assert [claims.take(place) for place in range(3)] == [False, False, True]
        process.send_signal(signal.SIGKILL)
        claims.wait(0)
        process.wait()
        assert claims.take(1)
        os.close(claims._file)


# Work


def work(pipe, folder, prompts, **settings) -> list[dict]:
    directory, told = Directory(folder), []
    directory.agree(prompts, SETTINGS)
    mine = Work(directory, lambda: pipe, type(pipe), told=told.append, **settings)
    mine.run(prompts)
    os.close(mine.claims._file)
    directory.write_manifest(prompts)
    return told


def test_outputs_are_the_pipelines_and_a_bad_prompt_stops_nothing(flux, write, tmp_path):
    lines = [
        {"prompt": "a red circle"},
        {"prompt": "a red circle", "sharpness": 3},
        {"prompt": "moving left", "seed": 5},
        {"prompt": "a red circle", "max_sequence_length": 513},
    ]
    prompts = prompt_files.read(write(*lines), 0, SIZE)
    told = work(flux, tmp_path / "out", prompts)
    assert ["error" in record for record in told] == [False, True, False, True]
    assert "takes as text or numbers" in told[1]["error"] and "sharpness" in told[1]["error"]
    assert "`max_sequence_length` cannot be greater than 512" in told[3]["error"]
    for name, prompt, seed in (("00000", "a red circle", 0), ("00002", "moving left", 5)):
        np.testing.assert_array_equal(picture(tmp_path / f"out/{name}.png"), by_hand(flux, prompt, seed))
    manifest = (tmp_path / "out/manifest.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in manifest] == told
    assert work(flux, tmp_path / "out", prompts) == []
    assert [r["id"] for r in work(flux, tmp_path / "out", prompts, retry=["00001", "00003"])] == ["00001", "00003"]


def test_a_batch_gives_what_single_calls_give(flux, write, tmp_path, monkeypatch):
    other = {"prompt": "a red circle", "num_inference_steps": 1}
    lines = [{"prompt": text} for text in ("a", "a red", "a red circle")] + [other, {"prompt": "moving"}]
    prompts = prompt_files.read(write(*lines), 3, SIZE)
    call, sizes = FluxPipeline.__call__, []

    @functools.wraps(call)
    def counted(self, prompt, **arguments):
        sizes.append(len(prompt))
        return call(self, prompt, **arguments)

    monkeypatch.setattr(FluxPipeline, "__call__", counted)
    assert len(work(flux, tmp_path / "out", prompts, batch=2)) == 5
    assert sizes == [2, 2, 2, 2]  # two, one filled up, the other one, the last
    monkeypatch.undo()
    for prompt in prompts:
        expected = by_hand(flux, prompt.prompt, prompt.seed, **prompt.arguments)
        assert np.abs(picture(tmp_path / f"out/{prompt.id}.png") - expected).max() <= 1


def test_a_picture_to_start_from_is_named_by_its_file(flux, write, tmp_path):
    Image.fromarray(np.random.randint(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(damaged())
    files = [str(tmp_path / name) for name in ("a.png", "b.png", "c.png")]
    prompts = prompt_files.read(write(*({"prompt": "a", "image": file} for file in files)), 0, SIZE)
    pipe = FluxImg2ImgPipeline(**flux.components)
    told = work(pipe, tmp_path / "out", prompts)
    assert [record.get("error", "")[:10] for record in told] == ["", "ValueError", "ValueError"]
    expected = by_hand(pipe, "a", 0, image=Image.open(files[0]))
    np.testing.assert_array_equal(picture(tmp_path / "out/00000.png"), expected)


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(flux, write, tmp_path, monkeypatch):
    prompts = prompt_files.read(write(*({"prompt": text} for text in "abc")), 0, SIZE)
    writes = media.write

    def full(values, path, fps):
        if path.stem == "00001":
            raise OSError(28, "No space left on device")
        return writes(values, path, fps)

    monkeypatch.setattr(media, "write", full)
    with pytest.raises(OSError, match="No space"):
        work(flux, tmp_path / "out", prompts)
    assert "manifest.jsonl" not in names(tmp_path / "out") and "00001.png" not in names(tmp_path / "out")
    (tmp_path / "out/.00001.99.png").write_text("half, of one that was killed")
    monkeypatch.setattr(media, "write", writes)
    assert [record["id"] for record in work(flux, tmp_path / "out", prompts)] == ["00001", "00002"]
    shown = {name for name in names(tmp_path / "out") if name.endswith(".png")}
    assert shown == {"00000.png", "00001.png", "00002.png"}


def test_one_bad_prompt_of_a_batch_spoils_no_other(flux, write, tmp_path, monkeypatch):
    prompts = prompt_files.read(write(*({"prompt": text} for text in ("a", "bad", "moving"))), 0, SIZE)
    encode = FluxPipeline.encode_prompt

    def fails(self, prompt, *args, **kwargs):
        if "bad" in prompt:
            raise ValueError("of this prompt")
        return encode(self, prompt, *args, **kwargs)

    monkeypatch.setattr(FluxPipeline, "encode_prompt", fails)
    told = work(flux, tmp_path / "out", prompts, batch=3)
    assert [record.get("error") for record in told] == [None, "ValueError: of this prompt", None]


def test_a_prompt_that_another_process_has_is_waited_for_and_not_made_again(flux, write, tmp_path):
    """The other process has prompt 0 and writes its record before it ends."""
    prompts = prompt_files.read(write(*({"prompt": text} for text in "ab")), 0, SIZE)
    directory = Directory(tmp_path / "out")
    directory.agree(prompts, SETTINGS)
    with owner(directory.path, directory.records / "00001.json", "0") as other:
        assert [record["id"] for record in work(flux, tmp_path / "out", prompts)] == ["00001"]
        assert directory.record(prompts[0]) == {"files": []}
        assert other.wait() == 0


def test_the_command_makes_goes_on_and_says_what_failed(flux, write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flux.save_pretrained(model := tmp_path / "model")
    path = write({"prompt": "a red circle"}, {"prompt": "moving", "strength": 1})
    words = f"generate {model} --prompts {path} --output out --seed 4 --device upstream --height 16 --width 16".split()
    words += "--num-inference-steps 2 --max-sequence-length 8".split()
    for _ in range(2):
        assert main(words) == 1
        Path("out/.records/00000.json").write_text("")  # as a crash leaves it
        out = capsys.readouterr().out
        assert "1 of 2 prompts made" in out and "strength" in out
    np.testing.assert_array_equal(picture("out/00000.png"), by_hand(flux, "a red circle", 4))
    for change, message in (
        (["--seed", "5"], "seed 4, now 5"),
        (["--prompt", "x"], "without --prompt"),
        (["--batch", "0"], "at least 1"),
        (["--output", "x.mp4"], "a directory"),
        (["--output", "x2.1", "--num-images-per-prompt", "2"], "got 'num_images_per_prompt'"),
        (["--debug-nans"], "without --debug-nans"),
        (["--ray-resources", "TPU=4"], "--ray with"),
    ):
        assert main([*words, *change]) == 2
        assert message in capsys.readouterr().err
    assert sorted(os.listdir("out")) == ".claims .prompts.lock .records 00000.png manifest.jsonl prompts.jsonl".split()
