"""`planner models`: the models that are built in, with their parameter counts and sources."""

import json
from argparse import ArgumentParser, Namespace

EXAMPLE = "planner models --json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags (none)."""


def run(arguments: Namespace) -> int:
    """Print the list."""
    from costmodels.parameters import num_active_parameters, num_parameters
    from planner.presets import preset_names, preset_source, read_model

    rows = []
    for name in preset_names():
        model = read_model(name)
        rows.append(
            {
                "name": name,
                "model": model.name,
                "num_parameters": num_parameters(model),
                "num_active_parameters": num_active_parameters(model),
                "source": preset_source(name),
            }
        )
    if arguments.json:
        print(json.dumps({"schema": 1, "models": rows}))
        return 0
    for row in rows:
        total, active = int(row["num_parameters"]), int(row["num_active_parameters"])
        size = f"{total / 1e9:.2f} B" if total > 1e8 else f"{total / 1e6:.1f} M"  # noqa: PLR2004
        if active != total:
            size += f" ({active / 1e9:.2f} B active)"
        print(f"{row['name']:<20} {size:<28} {row['source']}")
    return 0
