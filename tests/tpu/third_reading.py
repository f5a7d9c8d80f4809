"""The attention kernel's bundles, counted from its schedule without the planner's reader: of that, nothing is imported here.

Which parts the kernel has and how often each of them and each loop in it runs is known from its source
(`attention/kernel_body.py`); from the text come their bundles only, one a line. A branch takes effect `SLOTS` bundles later:
those behind it run whether or not it is taken.

A step of the grid is a block of queries with a block of keys. In this order the text has what the first block of keys
begins with, a block that the end of the keys cuts, a whole block, and what the last block of keys ends with. The first
three have a piece for each way, behind a comparison with the way's code.
"""

import re


WAYS = {"bound": 1000001, "centred": 1000002, "online": 1000003}
PARTS = ("start", "cut", "whole")
SLOTS = 4  # of v5e and v6e


def bundles(text: str, rows: int, key_blocks: int, rounds: dict[str, dict[str, list[int]]]) -> dict[str, int]:
    """Bundles that a call issues, by the way that all its heads go.

    Args:
        rows: blocks of queries, of all heads.
        key_blocks: of each, of which the last is cut.
        rounds: of the loops in the piece of each part and way, in the text's order.
    """
    lines = _lines(text)
    codes = "|".join(map(str, WAYS.values()))
    compared = [n for n, line in enumerate(lines) if re.search(rf"scmp\.ne[^;]*, (?:{codes})\b", line)]
    assert len(compared) == len(PARTS) * len(WAYS), compared
    branches = [n for n, line in enumerate(lines) if "sbr.rel" in line]
    pieces = [_jumped_over(lines, next(b for b in branches if b >= n)) for n in compared]
    of_ways = {part: dict(zip(WAYS, pieces[3 * n : 3 * n + 3])) for n, part in enumerate(PARTS)}
    parts = {part: _around(lines, branches, [*ways.values()]) for part, ways in of_ways.items()}
    last_keys = re.search(r"sbr\.rel \((%\w+)\)", lines[parts["cut"].start - SLOTS - 1])[1]  # the end asks the same
    end = next(b for b in branches if b >= parts["whole"].stop and f"sbr.rel ({last_keys})" in lines[b])
    parts["end"] = _jumped_over(lines, end)

    grid = range(next(n for n, line in enumerate(lines) if re.match(r"\w+ LB: > ", line)), branches[-1] + SLOTS + 1)
    every_step = len(grid) - sum(map(len, parts.values()))
    total = len(lines) - len(grid) + rows * key_blocks * every_step
    times = {"start": rows, "cut": rows, "whole": rows * (key_blocks - 1), "end": rows}
    for part, within in parts.items():
        total += times[part] * (len(within) - sum(map(len, of_ways.get(part, {}).values())))
    return {
        way: total + sum(times[part] * _run(lines, of_ways[part][way], rounds[part][way]) for part in PARTS)
        for way in WAYS
    }


def _lines(text: str) -> list[str]:
    """Bundles, each with the lines that continue it."""
    lines = []
    for line in map(str.strip, text.splitlines()):
        if re.match(r"(?:0x[0-9a-f]+|0) ", line):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line
    return lines


def _jumped_over(lines: list[str], branch: int) -> range:
    """What does not run where a branch is taken."""
    region = re.search(r"sbr\.rel .*?target = \$region(\d+)", lines[branch])[1]
    target = next(n for n, line in enumerate(lines) if re.search(rf"(?:Start|empty) region {region}\b", line))
    return range(branch + SLOTS + 1, target)


def _around(lines: list[str], branches: list[int], pieces: list[range]) -> range:
    """What the nearest branch before all of these pieces and over them jumps over."""
    found = [_jumped_over(lines, branch) for branch in branches if branch + SLOTS < pieces[0].start]
    return [within for within in found if within.start <= pieces[0].start and within.stop >= pieces[-1].stop][-1]


def _run(lines: list[str], piece: range, rounds: list[int]) -> int:
    """Bundles of one run of a piece, its loops so many rounds each: from their label to behind their branch."""
    starts = [n for n in piece if re.match(r"\w+ LB: >> ", lines[n])]
    loops = [
        next(n for n in range(start, piece.stop) if "sbr.rel" in lines[n]) + SLOTS + 1 - start for start in starts
    ]
    assert len(loops) == len(rounds), (loops, rounds)
    return len(piece) + sum(length * (times - 1) for length, times in zip(loops, rounds))
