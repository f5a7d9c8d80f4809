"""Makes every file of this folder (but wan-step-ladder.md, which is written by hand), and the tables of the pages from them.

    python examples/tpu/results/make_records.py                  what is not of these sources yet, then the tables: hours
    python examples/tpu/results/make_records.py --only step vae  those records, then the tables
    python examples/tpu/results/make_records.py --tables         the tables alone
    python examples/tpu/results/make_records.py --check          which pages have a table that is not its record's

A run that was stopped goes on from there: answers of the compiler are kept (`planner.remembered`), and a record that the
same sources and packages made (`planner.sources`, in its `versions`) is not made again. A record is replaced as a whole when
all of it is there; if a part of it fails, the old one stays and the exit status is 1.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops, PngImagePlugin
from record_tables import FOLDER, ROOT, TABLES, pages, rewritten

from diffusers.tpu import planner
from diffusers.tpu.files import whole_files
from diffusers.tpu.planner import benches, report
from diffusers.tpu.planner.worker import versions


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PLANS = {  # file: model, slice, size
    "plan-wan2.1-t2v-14b-v6e-8": ("wan2.1-t2v-14b", "v6e-8", benches.VIDEO_720P),
    "plan-wan2.1-t2v-14b-480p-v5e-8": ("wan2.1-t2v-14b", "v5e-8", benches.VIDEO_480P),
    "plan-wan2.1-t2v-1.3b-480p-v5e-1": ("wan2.1-t2v-1.3b", "v5e-1", benches.VIDEO_480P),
    "plan-wan2.2-t2v-a14b-v6e-8": ("wan2.2-t2v-a14b", "v6e-8", benches.VIDEO_720P),
    "plan-hunyuanvideo-1.5-720p-v6e-8": ("hunyuanvideo-1.5-720p-t2v", "v6e-8", benches.HUNYUAN_720P),
    "plan-hunyuanvideo-1.5-480p-v5e-8": ("hunyuanvideo-1.5-480p-t2v", "v5e-8", benches.HUNYUAN_480P),
}
PICTURED = "plan-wan2.1-t2v-14b-v6e-8"
COMPARED = ("compare", "examples/tpu/models/wan-shapes", "--seed", "21", "--json")


@dataclass(frozen=True)
class Record:
    """Files of this folder that are made together.

    Attributes:
        files: the first one says in its versions which sources made it.
        make: what is in each of them, in this order.
        cases: which rows it has, for a bench.
    """

    files: tuple[str, ...]
    make: Callable[[], list[bytes]]
    cases: Callable[[], list[benches.Case]] | None = None

    def is_of_these_sources(self, folder: Path) -> bool:
        """Is it there, with all its rows, made by the sources as they are now?"""
        if not self.files or not all((folder / name).is_file() for name in self.files):
            return False
        first = folder / self.files[0]
        if first.suffix == ".png":
            with Image.open(first) as picture:
                return picture.info.get("sources") == planner.sources()
        found = json.loads(first.read_text())
        if self.cases is not None:
            wanted = [case.row for case in self.cases()]
            if len(found) != len(wanted) or any(not case.items() <= row.items() for case, row in zip(wanted, found)):
                return False
        parts = found if isinstance(found, list) else [found]
        return all(part.get("versions", {}).get("sources") == planner.sources() for part in parts)


def records() -> dict[str, Record]:
    """By name, the cheap ones first."""
    made = {
        "check": of_bench("check"),
        "compare": Record(("compare-wan-shapes.json",), compared),
        "demo": Record(("red-circle-right.png",), demonstrated),
        "step": of_bench("step"),
        "run": of_bench("run"),
        "attention": of_bench("attention"),
    }
    for name, asked in PLANS.items():
        made[name] = Record((f"{name}.json", f"{name}.html"), lambda asked=asked: planned(*asked))
    made["picture"] = Record((f"{PICTURED}.png",), pictured)
    made |= {"vae": of_bench("vae"), "calibration": of_bench("calibration")}
    return made | {"sweep": of_bench("sweep", "attention-sweep.json"), "mutants": Record((), mutants)}


def of_bench(kind: str, name: str | None = None) -> Record:
    """The rows of `diffusers-tpu bench KIND --json`."""

    def cases() -> list[benches.Case]:
        return benches.BENCHES[kind]()

    def make() -> list[bytes]:
        rows, failed, asked = [], [], cases()
        for number, case in enumerate(asked, 1):
            what, start = ", ".join(str(value) for value in case.row.values() if value != ""), time.monotonic()
            try:
                rows.append({**case.row, **case.ask(lambda text: None)})
                said = "done"
            except (ValueError, RuntimeError) as error:  # of a child: no room, no end in time, a crash
                failed.append(what)
                said = f"failed: {error}"
            print(f"  {number} of {len(asked)}, {time.monotonic() - start:.0f} s, {what}: {said}", flush=True)
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(asked)} rows failed, the old record stays: {'; '.join(failed)}")
        return [as_json(rows)]

    return Record((name or f"{kind}.json",), make, cases)


def planned(model: str, topology: str, size: dict) -> list[bytes]:
    """`diffusers-tpu plan` with `--json` and with `--report`."""
    plan = planner.plan(model, topology, arguments=size, seconds=1800)
    return [as_json(plan), report.page([plan]).encode()]


def pictured() -> list[bytes]:
    """The page of a plan as a browser of 1200 pixels shows it."""
    if not records()[PICTURED].is_of_these_sources(FOLDER):
        raise RuntimeError(f"expected {PICTURED}.html of these sources to take a picture of; make it first")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"expected a browser on PATH to take a picture with, one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as work:
        picture = Path(work) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,6000"]
        options += [f"--user-data-dir={work}/profile", f"--screenshot={picture}"]
        page = (FOLDER / f"{PICTURED}.html").as_uri()
        subprocess.run([browser, *options, page], check=True, capture_output=True, timeout=120)
        return [as_png(picture, until_it_ends)]


def until_it_ends(picture: Image.Image) -> Image.Image:
    """Without the empty rows below a page, but for as many as are above it; in 256 colours."""
    picture = picture.convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    _, top, _, bottom = ImageChops.difference(picture, empty).getbbox()
    return picture.crop((0, 0, picture.width, min(bottom + top, picture.height))).quantize()


def demonstrated() -> list[bytes]:
    """The frames of `make demo`."""
    subprocess.run(["make", "-o", ".venv/installed", "demo"], cwd=ROOT, check=True)  # of which this runs
    return [as_png(ROOT / "out" / "red-circle-right.png")]


def compared() -> list[bytes]:
    """`diffusers-tpu compare` of the model that is shipped."""
    command = [str(Path(sys.executable).with_name("diffusers-tpu")), *COMPARED]
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu"}
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [as_json({**json.loads(said), "versions": versions()})]


def mutants() -> list[bytes]:
    """Writes its two files itself, fault by fault; one that has been seen is planted again if it or its test has changed."""
    subprocess.run([sys.executable, str(ROOT / "tests/tpu/mutants/run.py")], cwd=ROOT, check=True)
    return []


def as_json(found) -> bytes:
    return (json.dumps(found, indent=1) + "\n").encode()


def as_png(path: Path, changed: Callable[[Image.Image], Image.Image] = lambda picture: picture) -> bytes:
    """A picture that says which sources made it."""
    said, out = PngImagePlugin.PngInfo(), io.BytesIO()
    said.add_text("sources", planner.sources())
    with Image.open(path) as picture:
        changed(picture).save(out, "PNG", pnginfo=said, optimize=True)
    return out.getvalue()


def make(wanted: dict[str, Record], folder: Path = FOLDER) -> int:
    """Makes these records; returns how many failed."""
    failed = 0
    for number, (name, record) in enumerate(wanted.items(), 1):
        print(f"{number} of {len(wanted)}, {name}: ", end="", flush=True)
        if record.is_of_these_sources(folder):
            print("of these sources already", flush=True)
            continue
        print("...", flush=True)
        start = time.monotonic()
        try:
            contents = record.make()
        except (ValueError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            failed += 1
            print(f"  FAILED after {time.monotonic() - start:.0f} s: {error}", flush=True)
            continue
        with whole_files([folder / file for file in record.files]) as drafts:
            for draft, content in zip(drafts, contents, strict=True):
                draft.write_bytes(content)
        print(f"  made in {time.monotonic() - start:.0f} s", flush=True)
    return failed


def make_tables(check: bool = False, root: Path = ROOT, folder: Path = FOLDER) -> list[Path]:
    """The pages with a table that is not as its record has it; they are rewritten, unless `check`."""
    different = []
    for page in pages(root):
        text = page.read_text()
        new = rewritten(text, folder)
        if new != text:
            different.append(page)
            if not check:
                with whole_files([page]) as (draft,):
                    draft.write_text(new)
    return different


def main(arguments: list[str] | None = None) -> int:
    known = records()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--tables", action="store_true", help=f"the tables alone: {', '.join(TABLES)}")
    parser.add_argument("--check", action="store_true", help="say which pages differ from the records; change nothing")
    given = parser.parse_args(arguments)
    wanted = {name: record for name, record in known.items() if given.only is None or name in given.only}
    failed = make(wanted) if not (given.tables or given.check) else 0
    different = make_tables(given.check)
    for page in different:
        print(f"{page.relative_to(ROOT)}: {'not the tables of the records' if given.check else 'tables made anew'}")
    return 1 if failed or (given.check and different) else 0


if __name__ == "__main__":
    sys.exit(main())
