"""What is compared: layouts, who runs each by hand, and the model that both train."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from by_hand import Ddp, FullyShard, Pipeline, TensorParallel
from torch import Tensor

from costmodels.layout import Layout, split_layers
from costmodels.model import ModelSpec
from runtime.models.llama import Llama


class Trains(Protocol):
    """A program that trains; both sides are one."""

    def step(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Run one step on this data rank's tokens [B, S] and return the loss of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is trained: a model and the tokens of a step."""

    model: ModelSpec
    seq_len: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        by_hand: Spreads a whole model that every rank holds.

    """

    name: str
    layout: Layout
    by_hand: Callable[[Llama], Trains]


def size(*, hidden: int, layers: int, vocab: int, seq_len: int, batch: int) -> Size:
    """Return a Llama with heads of 64 and a feed-forward of 8/3, in multiples of 64."""
    model = ModelSpec(
        name="decoder",
        architecture="llama",
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        ffn_hidden_size=hidden * 8 // 3 // 64 * 64,
        vocab_size=vocab,
        training_seq_len=seq_len,
    )
    return Size(model=model, seq_len=seq_len, batch=batch)


# 20.5 million parameters: 60 MFLOP per token and pass, so that computing dominates and what is
# exchanged (82 MB of gradients) shows.
WHOLE = size(hidden=384, layers=8, vocab=8192, seq_len=256, batch=8)
TRIED = size(hidden=128, layers=2, vocab=256, seq_len=32, batch=8)


def cases(size: Size) -> list[Case]:
    """Return the layouts that are compared."""

    def layout(micro_batches: int = 1, **degrees: int) -> Layout:
        data = degrees.get("data_parallel", 1)
        return Layout(
            micro_batch_size=size.batch // data // micro_batches,
            num_micro_batches=micro_batches,
            layers_per_stage=split_layers(
                size.model.num_layers, degrees.get("pipeline_parallel", 1)
            ),
            zero_group=data,
            **degrees,
        )

    pipeline = partial(Pipeline, num_stages=2, num_micro_batches=4)
    return [
        Case(name="DP2", layout=layout(data_parallel=2), by_hand=Ddp),
        Case(name="ZeRO-3", layout=layout(data_parallel=2, zero_stage=3), by_hand=FullyShard),
        Case(
            name="TP2",
            layout=layout(tensor_parallel=2),
            by_hand=partial(TensorParallel, sequence_parallel=False),
        ),
        Case(
            name="TP2 sequence",
            layout=layout(tensor_parallel=2, sequence_parallel=True),
            by_hand=partial(TensorParallel, sequence_parallel=True),
        ),
        Case(name="PP2 1F1B", layout=layout(4, pipeline_parallel=2), by_hand=pipeline),
        Case(
            name="DP2 x PP2",
            layout=layout(4, data_parallel=2, pipeline_parallel=2),
            by_hand=pipeline,
        ),
    ]
