"""`planner hardware`: the hardware profiles that are built in, with their sources."""

import json
from argparse import ArgumentParser, Namespace

EXAMPLE = "planner hardware"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("name", nargs="?", help="print one profile's file, sources included")


def run(arguments: Namespace) -> int:
    """Print the list, or one profile as it stands."""
    from costmodels.profiles.reader import profile_names, read_profile
    from costmodels.units import GB, GIB, TFLOP
    from planner.codec import encode

    if arguments.name and not arguments.json:
        from hardware_profiles import profile_text

        read_profile(arguments.name)  # names what is known where this one is not
        print(profile_text(arguments.name), end="")
        return 0
    names = (arguments.name,) if arguments.name else profile_names()
    profiles = [read_profile(name) for name in names]
    if arguments.json:
        print(json.dumps({"schema": 1, "profiles": [encode(profile) for profile in profiles]}))
        return 0
    print(
        f"{'name':<18} {'memory':>8} {'bf16':>13} {'memory':>10} {'node':>5} {'in node':>9} across"
    )
    for profile in profiles:
        device = profile.device
        peak = device.peak("bf16") or device.peak("fp16") or 0.0
        print(
            f"{profile.name:<18} {device.memory / GIB:>4.0f} GiB {peak / TFLOP:>6.0f} TFLOP/s "
            f"{device.memory_bandwidth / GB:>5.0f} GB/s {profile.gpus_per_node:>5} "
            f"{profile.intra_node.bandwidth / GB:>4.0f} GB/s "
            f"{profile.inter_node.bandwidth / GB:.4g} GB/s"
        )
    return 0
