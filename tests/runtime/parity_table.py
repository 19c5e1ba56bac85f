"""Prints what the parity matrix passed, as tables in Markdown.

python tests/runtime/parity_table.py REPORT.xml...    (reports of pytest's --junitxml)
"""

import json
import sys
from collections import Counter
from itertools import combinations
from xml.etree import ElementTree as ET

AXES = ("dp", "tp", "pp", "cp", "ep", "etp", "ZeRO", "HSDP")
RECOMPUTE = ("none", "selective", "full")


def passed(paths):
    """Return the layouts of the tests that passed, each model's once."""
    rows = {}
    for path in paths:
        for case in ET.parse(path).iter("testcase"):  # noqa: S314  (pytest's own report)
            if case.find("failure") is not None or case.find("error") is not None:
                continue
            for found in case.iter("property"):
                if found.get("name") == "layouts":
                    name = case.get("name", "")
                    rows[name] = json.loads(found.get("value", "[]"))
    return [row for found in rows.values() for row in found]


def axes_of(row):
    """Return the axes that a layout uses, ZeRO and its partial groups among them."""
    used = [axis for axis in AXES if row["axes"].get(axis, 1) > 1]
    return (*used, *(["ZeRO"] if row["zero"] else []), *(["HSDP"] if row["hybrid"] else []))


def table(head, lines):
    """Return the lines of a table in Markdown."""
    return [_line(head), _line(["---"] * len(head)), *map(_line, lines)]


def _line(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def tables(rows):
    """Return all tables: models and ranks, pairs of axes, schedules, stages of ZeRO."""
    ranks = sorted({row["ranks"] for row in rows})
    models = sorted({row["model"] for row in rows})
    counts = Counter((row["model"], row["ranks"]) for row in rows)
    worst = {m: max(max(r["errors"].values()) for r in rows if r["model"] == m) for m in models}
    yield table(
        ["model", *(f"{n} ranks" for n in ranks), "worst error"],
        [[m, *(counts[m, n] for n in ranks), f"{worst[m]:.1e}"] for m in models],
    )
    pairs = Counter(pair for row in rows for pair in combinations(axes_of(row), 2))
    yield table(
        ["both", *AXES[1:]],
        [
            [
                one,
                *(pairs[one, two] if at < place else "" for place, two in enumerate(AXES) if place),
            ]
            for at, one in enumerate(AXES[:-1])
        ],
    )
    yield _crossed("schedule", rows, lambda row: row["schedule"] or "no pipeline")
    yield _crossed("ZeRO", rows, lambda row: f"{row['zero']}{' HSDP' if row['hybrid'] else ''}")
    yield _crossed("context", rows, lambda row: row["context"] or "whole sequences")


def _crossed(name, rows, kind):
    """Return how often each kind met each recomputation and each number of ranks."""
    ranks = sorted({row["ranks"] for row in rows})
    counts = Counter()
    for row in rows:
        for what in (row["recompute"], row["ranks"], "experts" if _has_experts(row) else "dense"):
            counts[kind(row), what] += 1
    columns = [*RECOMPUTE, "dense", "experts", *ranks]
    head = [name, *RECOMPUTE, "dense", "experts", *(f"{n} ranks" for n in ranks)]
    kinds = sorted({kind(row) for row in rows})
    return table(head, [[k, *(counts[k, column] for column in columns)] for k in kinds])


def _has_experts(row):
    return row["axes"]["ep"] * row["axes"]["etp"] > 1


if __name__ == "__main__":
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in tables(passed(sys.argv[1:]))) + "\n")
