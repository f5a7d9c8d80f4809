"""The tables of methods with a loss (caches, 8 bits, sparse attention) and of errors in bfloat16 of models at published size."""

from table_words import markdown, span, work_of


def cache(rows: list[dict]) -> list[str]:
    head = "cache | block runs of 400 | fewer by | PSNR, dB | SSIM | steps of 50 with blocks | Wan 2.1 14B, v6e-8, s"
    lines = [("none", "400", "", "", "", "50", span(rows[0]["planned_without"]))]
    for row in rows:
        runs = (f"{row['block_runs']:.0f}", f"{row['fewer_block_runs']:.2f} x")
        quality = (f"{row['psnr']:.1f}", f"{row['ssim']:.3f}")
        seconds = "" if row["planned_seconds"] is None else span(row["planned_seconds"], row["planned_slower"])
        lines.append((row["name"], *runs, *quality, str(row["steps_with_blocks"]), seconds))
    return markdown(head.split(" | "), lines)


def eight_bits(rows: list[dict]) -> list[str]:
    """Compares steps whose linear layers have 8 bits with those in bfloat16."""
    head = ("model and size", "slice", "bfloat16, s a step", "8 bits, s a step", "layers alone, s", "less, %")
    return markdown(head, _beside_ours(rows, "8 bits", "matmul"))


def sparse(rows: list[dict]) -> list[str]:
    """Compares steps with sparse attention with those with full attention."""
    head = ("model and size, sparsity", "slice", "all, s a step", "sparse, s a step", "attention alone, s", "less, %")
    return markdown(head, _beside_ours(rows, "sparse attention", "attention"))


def _beside_ours(rows: list[dict], variant: str, part: str) -> list[tuple]:
    """Returns rows that compare variants with this prefix with ours. `part` is the kind of operation that they change."""
    lines, same = [], ("model", "topology", "height", "way")
    for row in (row for row in rows if row["variant"].startswith(variant)):
        ours = next(r for r in rows if r["variant"] == "ours" and all(r[name] == row[name] for name in same))
        seconds = (span(one["seconds_per_step"], one["slower"]) for one in (ours, row))
        alone = (f"{one['seconds'][part]:.2g}" for one in (ours, row))
        less = 1 - row["seconds_per_step"] / ours["seconds_per_step"]
        name = work_of(row) + row["variant"].removeprefix(variant)
        lines.append((name, row["topology"], *seconds, ", ".join(alone), f"{100 * less:.0f}"))
    return lines


ERRORS = ("error", "upstream_error")


def at_size(record: dict) -> list[str]:
    """Returns a table of the errors in values-at-size.json, in float32 and in bfloat16, with upstream's own in bfloat16."""
    head = ("model and call", "parameters, billions", "float32", "bfloat16", "upstream's own in bfloat16")
    lines = []
    for row in record["rows"]:
        single, half = row.get("float32"), row.get("bfloat16")
        errors = (
            f"{single['error']:.1e}" if single else "",
            *(f"{half[name]:.2%}" if half else "" for name in ERRORS),
        )
        lines.append((row["what"], f"{row['parameters'] / 1e9:.2g}", *errors))
    return markdown(head, lines)
