"""Makes every file of this folder, and the tables of the pages from them.

    python examples/tpu/results/make_records.py                  rows that are out of date, then the tables
    python examples/tpu/results/make_records.py --only step vae  those of these records, then the tables
    python examples/tpu/results/make_records.py --tables         the tables alone
    python examples/tpu/results/make_records.py --check          lists pages whose tables differ from their records

A row is up to date if it was made by the same sources (`planner.sources`, in its `versions`). A row of compiled programs is also up to date
if these sources trace the same programs and read them by the same code (`bench.naming`: a few minutes for all). Making all other rows takes
hours; the compiler's answers are kept (`planner.Question`), so that a run that was stopped resumes. A record is replaced as a whole when it
is complete; if a part fails, the old one stays and the exit status is 1.
"""

import argparse
import functools
import hashlib
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

from bench import benches  # which record_tables has made importable
from bench.naming import programs_of
from diffusers.tpu import planner
from diffusers.tpu.common.files import whole_files, write_whole
from diffusers.tpu.planner import report
from diffusers.tpu.planner.worker import versions


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FEW_STEPS = {**benches.VIDEO_720P, "num_inference_steps": 4, "guidance_scale": 1.0}
PLANS = {  # file: model, slice, size, and a mesh where it is not the pipeline's own
    "plan-wan2.1-t2v-14b-v6e-8": ("wan2.1-t2v-14b", "v6e-8", benches.VIDEO_720P),
    "plan-wan2.1-t2v-14b-480p-v5e-8": ("wan2.1-t2v-14b", "v5e-8", benches.VIDEO_480P),
    "plan-wan2.1-t2v-1.3b-480p-v5e-1": ("wan2.1-t2v-1.3b", "v5e-1", benches.VIDEO_480P),
    "plan-wan2.2-t2v-a14b-v6e-8": ("wan2.2-t2v-a14b", "v6e-8", benches.VIDEO_720P),
    "plan-hunyuanvideo-1.5-720p-v6e-8": ("hunyuanvideo-1.5-720p-t2v", "v6e-8", benches.HUNYUAN_720P),
    "plan-hunyuanvideo-1.5-480p-v5e-8": ("hunyuanvideo-1.5-480p-t2v", "v5e-8", benches.HUNYUAN_480P),
    "plan-sdxl-v5e-1": ("sdxl", "v5e-1", {}),
    "plan-wan2.1-t2v-14b-4-steps-v6e-8": ("wan2.1-t2v-14b", "v6e-8", FEW_STEPS, (1, 8, 1)),
}
PICTURED = "plan-wan2.1-t2v-14b-v6e-8"
COMPARED = ("compare", "examples/tpu/models/wan-shapes", "--seed", "21", "--json")


@dataclass(frozen=True)
class Record:
    """Files of this folder that are made together.

    Attributes:
        files: their names; the first one records its sources.
        make: returns the content of each file, given the rows that are up to date.
        rows: for a bench, the identity of each row and its question (None for a measured row).
        made_of: returns what the first file must record as its sources; None for files that are cheap and made each time.
    """

    files: tuple[str, ...]
    make: Callable[[list[dict]], list[bytes]]
    rows: Callable[[], list[tuple[dict, planner.Question | None]]] = lambda: [({}, None)]
    made_of: Callable[[], str] | None = planner.sources

    def there(self, folder: Path) -> list[tuple[dict, planner.Question | None]]:
        """Returns the rows that may be up to date, each with the question whose programs decide, None if its sources are the same."""
        if self.made_of is None or not all((folder / name).is_file() for name in self.files):
            return []
        first = folder / self.files[0]
        if first.suffix == ".png":
            with Image.open(first) as picture:
                return [({}, None)] if picture.info.get("sources") == self.made_of() else []
        found = json.loads(first.read_text())
        found, sources = found if isinstance(found, list) else [found], planner.sources()
        pairs = []
        for row, question in self.rows():
            has = next((has for has in found if row.items() <= has.items()), None)
            if has is not None and has.get("versions", {}).get("sources") == sources:
                pairs.append((has, None))
            elif has is not None and question is not None and "programs" in has:
                pairs.append((has, question))
        return pairs

    def is_whole(self, stand: list[dict], folder: Path) -> bool:
        """Whether these are all its rows, and the file has no others."""
        if self.made_of is None or len(stand) != len(self.rows()):
            return False
        first = folder / self.files[0]
        return first.suffix == ".png" or json.loads(first.read_text()) in (stand, *stand)


def standing(wanted: dict[str, Record], folder: Path) -> dict[str, list[dict]]:
    """Returns the rows of each record that are up to date."""
    there = {name: record.there(folder) for name, record in wanted.items()}
    asked = [question for pairs in there.values() for _, question in pairs if question is not None]
    if asked:
        print(f"{len(asked)} rows are of other sources: are they of the same programs?", flush=True)
    named = iter(programs_of(asked, on_progress=lambda text: print(f"  {text}", flush=True)) if asked else [])
    stand = {}
    for name, pairs in there.items():
        stand[name] = [has for has, question in pairs if question is None or is_of(has, next(named))]
        if others := len(pairs) - len(stand[name]):
            print(f"{name}: {others} rows are of other programs", flush=True)
    return stand


def is_of(row: dict, named: dict | None) -> bool:
    """Whether a row or a plan is of these programs and read by this reader."""
    return named is not None and all(row[name] == named[name] for name in ("programs", "reader"))


def records() -> dict[str, Record]:
    """Returns all records by name, the cheap ones first."""
    made = {name: of_bench(name) for name in ("check", "cache", "host", "ready", "compile", "load")}
    made["compare"] = Record(("compare-wan-shapes.json",), compared)
    made["demo"] = Record(("red-circle-right.png",), demonstrated)
    made |= {name: of_bench(name) for name in ("step", "run", "attention", "gradients")}
    for name, asked in PLANS.items():
        rows = functools.partial(rows_of_plan, *asked)
        made[name] = Record((f"{name}.json",), lambda stand, asked=asked: planned(*asked), rows)
    made["pages"] = Record(tuple(f"{name}.html" for name in PLANS), paged, made_of=None)
    made["picture"] = Record((f"{PICTURED}.png",), pictured, made_of=picture_of)
    made |= {name: of_bench(name) for name in ("vae", "calibration", "models", "train")}
    made["sweep"] = of_bench("sweep", "attention-sweep.json")
    return made | {"mutants": Record((), mutants, made_of=None)}


def of_bench(kind: str, name: str | None = None) -> Record:
    """Returns the record with the rows of `diffusers-tpu bench KIND --json`."""

    def rows() -> list[tuple[dict, planner.Question | None]]:
        return [(case.row, case.question) for case in benches.BENCHES[kind]()]

    def make(stand: list[dict]) -> list[bytes]:
        rows, failed, asked = [], [], benches.BENCHES[kind]()
        for number, case in enumerate(asked, 1):
            if stands := [row for row in stand if case.row.items() <= row.items()]:
                rows += stands
                continue
            what, start = ", ".join(str(value) for value in case.row.values() if value != ""), time.monotonic()
            try:
                rows.append({**case.row, **case.ask()})
                said = "done"
            except (ValueError, RuntimeError) as error:  # of a child: no room, no end in time, a crash
                failed.append(what)
                said = f"failed: {error}"
            print(f"  {number} of {len(asked)}, {time.monotonic() - start:.0f} s, {what}: {said}", flush=True)
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(asked)} rows failed, the old record stays: {'; '.join(failed)}")
        return [as_json(rows)]

    return Record((name or f"{kind}.json",), make, rows)


def rows_of_plan(model: str, topology: str, size: dict, mesh=None) -> list[tuple[dict, planner.Question]]:
    request = planner.request_of(model, topology, arguments=size, mesh=mesh)
    return [({"model": model, "topology": topology}, planner.Question(planner.PLANS, request))]


def planned(model: str, topology: str, size: dict, mesh=None) -> list[bytes]:
    """Returns the output of `diffusers-tpu plan --json`."""
    return [as_json(planner.plan(model, topology, arguments=size, mesh=mesh, seconds=1800))]


def paged(stand: list[dict]) -> list[bytes]:
    """Returns the pages of `diffusers-tpu plan --report` for the recorded plans."""
    return [report.page([json.loads((FOLDER / f"{name}.json").read_text())]).encode() for name in PLANS]


def picture_of() -> str:
    return hashlib.sha256((FOLDER / f"{PICTURED}.html").read_bytes()).hexdigest()


def pictured(stand: list[dict]) -> list[bytes]:
    """Returns a screenshot of a plan's page in a browser 1200 pixels wide."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"expected a browser on PATH to take a picture with, one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as work:
        picture = Path(work) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,6000"]
        options += [f"--user-data-dir={work}/profile", f"--screenshot={picture}"]
        page = (FOLDER / f"{PICTURED}.html").as_uri()
        subprocess.run([browser, *options, page], check=True, capture_output=True, timeout=120)
        return [as_png(picture, until_it_ends, picture_of())]


def until_it_ends(picture: Image.Image) -> Image.Image:
    """Crops the rows below a page to as many as are empty above it, and reduces to 256 colours."""
    picture = picture.convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((0, picture.height - 1)))
    _, top, _, bottom = ImageChops.difference(picture, empty).getbbox()
    return picture.crop((0, 0, picture.width, min(bottom + top, picture.height))).quantize()


def demonstrated(stand: list[dict]) -> list[bytes]:
    """Returns the frames that `make demo` writes."""
    subprocess.run(["make", "-o", ".venv/installed", "demo"], cwd=ROOT, check=True)  # of which this runs
    return [as_png(ROOT / "out" / "red-circle-right.png")]


def compared(stand: list[dict]) -> list[bytes]:
    """Returns the output of `diffusers-tpu compare` for the shipped model."""
    command = [str(Path(sys.executable).with_name("diffusers-tpu")), *COMPARED]
    environment = {**os.environ, "DIFFUSERS_TPU": "cpu"}
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [as_json({**json.loads(said), "versions": versions()})]


def mutants(stand: list[dict]) -> list[bytes]:
    """Runs the mutants' script, which writes its own file, fault by fault, and repeats faults that have changed."""
    subprocess.run([sys.executable, str(ROOT / "examples/tpu/results/mutants/run.py")], cwd=ROOT, check=True)
    return []


def as_json(found) -> bytes:
    return (json.dumps(found, indent=1) + "\n").encode()


def as_png(
    path: Path, changed: Callable[[Image.Image], Image.Image] = lambda picture: picture, made_of: str = ""
) -> bytes:
    """Returns a PNG file that records its sources: `made_of`, or a digest of the present ones."""
    said, out = PngImagePlugin.PngInfo(), io.BytesIO()
    said.add_text("sources", made_of or planner.sources())
    with Image.open(path) as picture:
        changed(picture).save(out, "PNG", pnginfo=said, optimize=True)
    return out.getvalue()


def make(wanted: dict[str, Record], folder: Path = FOLDER) -> int:
    """Makes these records and returns how many failed."""
    failed, stand = 0, standing(wanted, folder)
    for number, (name, record) in enumerate(wanted.items(), 1):
        print(f"{number} of {len(wanted)}, {name}: ", end="", flush=True)
        rows = stand[name] if record.there(folder) else []  # a page that was made just now has no picture yet
        if record.is_whole(rows, folder):
            print("stands", flush=True)
            continue
        print("...", flush=True)
        start = time.monotonic()
        try:
            contents = record.make(rows)
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
    """Returns the pages with tables that differ from their records, and rewrites them unless `check`."""
    different = []
    for page in pages(root):
        text = page.read_text()
        new = rewritten(text, folder)
        if new != text:
            different.append(page)
            if not check:
                write_whole(page, new)
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
