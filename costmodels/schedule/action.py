"""Action: one thing that one pipeline rank does with one micro-batch on one of its stages.

Actions print and parse as the strings of `torch.distributed.pipelining` (PyTorch 2.13), so that a
table made here can be read by torch's validator and torch's tables can be read here:

    2F0  2B0  2I0  2W0          forward, whole backward, its input half, its weight half
    2SEND_F0  3RECV_F0          stage 2 sends its output of micro-batch 0, stage 3 receives it
    3SEND_B0  2RECV_B0          stage 3 sends the gradient of its input, stage 2 receives it
"""

import re
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """What an action does; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"


KINDS = tuple(ActionKind)
COMPUTE_KINDS = KINDS[:4]
# Their places in KINDS, which the codes of a table are made of (see `costmodels.schedule.table`).
FORWARD_CODE, BACKWARD_CODE, INPUT_CODE, WEIGHT_CODE = range(4)

_PATTERN = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a pipeline rank.

    Attributes:
        stage: Global stage, counted in model order; virtual stages count.
        kind: What is done.
        micro_batch: Index of the micro-batch within the step.

    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        """Return torch's action string."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @property
    def is_compute(self) -> bool:
        """Whether the action computes rather than communicates."""
        return self.kind in COMPUTE_KINDS


def parse_action(text: str) -> Action:
    """Read one action string, the inverse of `str(action)`.

    Raises:
        ValueError: The text is no action, or one of a kind that our tables do not hold.

    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not an action: expected stage, kind and micro-batch such as 2F0 or "
            f"2SEND_F0, kind one of {', '.join(KINDS)}"
        )
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), ActionKind(kind), int(micro_batch))
