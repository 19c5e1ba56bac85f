"""`planner models`: the models that are built in, with their parameter counts and sources."""

import json
from argparse import ArgumentParser, Namespace

EXAMPLE = "planner models --json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags (none)."""


def run(arguments: Namespace) -> int:
    """Print the list."""
    from costmodels.parameters import num_active_parameters, num_parameters
    from planner.presets import presets, read_model

    rows: list[dict[str, str | int | None]] = []
    for preset in presets():
        model = read_model(preset.name)
        rows.append(
            {
                "name": preset.name.lower(),
                "plain_size": preset.plain_size,
                "num_parameters": num_parameters(model),
                "num_active_parameters": num_active_parameters(model),
                "source": preset.source,
            }
        )
    if arguments.json:
        print(json.dumps({"schema": 1, "models": rows}))
        return 0
    for row in rows:
        names = f"{row['name']} ({row['plain_size']})" if row["plain_size"] else f"{row['name']}"
        print(f"{names:<26} {_size(row):<28} {row['source']}")
    return 0


def _size(row: dict[str, str | int | None]) -> str:
    total, active = row["num_parameters"], row["num_active_parameters"]
    assert isinstance(total, int)
    assert isinstance(active, int)
    size = f"{total / 1e9:.2f} B" if total > 1e8 else f"{total / 1e6:.1f} M"  # noqa: PLR2004
    return size if active == total else f"{size} ({active / 1e9:.2f} B active)"
