"""Sample: seconds of one kernel or transfer, with the arguments of the formula that predicts it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured operation.

    Attributes:
        formula: Name of the compiled formula: "gemm", "attention", "memory_pass", "all_gather" ...
        precision: Number format of the operands, as profiles name it.
        arguments: What of the formula's arguments the operation itself decides, by name.
        seconds: Time of one call.

    """

    formula: str
    precision: str
    arguments: tuple[tuple[str, float], ...]
    seconds: float

    def __getitem__(self, name: str) -> float:
        """Return an argument by name."""
        return dict(self.arguments)[name]

    @property
    def flops(self) -> float:
        """FLOPs of a matrix product."""
        return 2 * self["m"] * self["n"] * self["k"]


def sample(formula: str, precision: str, seconds: float, **arguments: float) -> Sample:
    """Return a sample; arguments are kept in the order of their names."""
    return Sample(
        formula=formula,
        precision=precision,
        arguments=tuple(sorted(arguments.items())),
        seconds=seconds,
    )


def typical_of(rounds: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the median of each operation over rounds that took the same samples in one order.

    Training takes typical times, not the best ones; a disturbance of one round does not count.
    """
    return [
        replace(same[0], seconds=median(s.seconds for s in same))
        for same in zip(*rounds, strict=True)
    ]


def to_json(measured: Sample) -> dict[str, object]:
    """Return what a rank hands to the process that started it."""
    return {
        "formula": measured.formula,
        "precision": measured.precision,
        "seconds": measured.seconds,
        "arguments": dict(measured.arguments),
    }


def from_json(value: Mapping[str, object]) -> Sample:
    """Return the sample that `to_json` wrote."""
    arguments = value["arguments"]
    assert isinstance(arguments, dict)
    seconds = value["seconds"]
    assert isinstance(seconds, float)
    return sample(str(value["formula"]), str(value["precision"]), seconds, **arguments)
