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
    from planner.report import size_words

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
        plain = f" ({row['plain_size']})" if row["plain_size"] else ""
        names = f"{row['name']}{plain}"
        print(f"{names:<26} {size_words(read_model(str(row['name']))):<28} {row['source']}")
    return 0
