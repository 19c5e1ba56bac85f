"""The layouts that are compared: every axis the runtime splits over, alone and together."""

from dataclasses import replace

from costmodels.layout import ContextParallelType, Layout, Recompute, Schedule, split_layers

FULL, SELECTIVE = Recompute.FULL, Recompute.SELECTIVE
GPIPE, INTERLEAVED = Schedule.GPIPE, Schedule.INTERLEAVED


def real_layouts(num_layers: int, batch: int) -> list[Layout]:
    """Return layouts for at most two ranks, a core for each.

    Args:
        num_layers: Of the model.
        batch: Sequences per step.

    """
    dp2: dict[str, object] = {"data_parallel": 2}
    tp2: dict[str, object] = {"tensor_parallel": 2}
    pp2: dict[str, object] = {"pipeline_parallel": 2}
    sp2 = {**tp2, "sequence_parallel": True}
    cp2: dict[str, object] = {"context_parallel": 2}
    shapes: list[tuple[int, dict[str, object]]] = [
        (8, dp2),
        (2, dp2),
        (2, {**dp2, "recompute": FULL}),
        (4, {**dp2, "zero_stage": 1}),
        (4, {**dp2, "zero_stage": 2}),
        (4, {**dp2, "zero_stage": 3}),
        (8, {**dp2, "zero_stage": 3, "recompute": FULL}),
        (8, tp2),
        (2, tp2),
        (8, sp2),
        (4, {**sp2, "recompute": FULL}),
        (4, {**sp2, "recompute": SELECTIVE}),
        (4, pp2),
        (2, pp2),
        (2, {**pp2, "schedule": GPIPE}),
        (2, {**pp2, "recompute": FULL}),
        (2, {**pp2, "schedule": INTERLEAVED, "stages_per_rank": 2}),
        (8, cp2),
        (8, {**cp2, "context_parallel_type": ContextParallelType.ULYSSES}),
        (8, {**cp2, "context_parallel_type": ContextParallelType.ALL_GATHER, "recompute": FULL}),
    ]
    return [_complete(fields, size, num_layers, batch) for size, fields in shapes]


def sleeping_layouts(num_ranks: int, num_layers: int, batch: int) -> list[Layout]:
    """Return layouts for four or eight ranks.

    Args:
        num_ranks: 4 or 8.
        num_layers: Of the model.
        batch: Sequences per step.

    """
    shapes = FOUR if num_ranks == 4 else EIGHT  # noqa: PLR2004
    return [
        _complete({**_degrees(*degrees), **rest}, size, num_layers, batch)
        for size, degrees, rest in shapes
    ]


# Micro-batch, (data, tensor, pipeline) degrees, the rest.
FOUR: tuple[tuple[int, tuple[int, int, int], dict[str, object]], ...] = (
    (4, (4, 1, 1), {}),
    (1, (4, 1, 1), {}),
    (4, (4, 1, 1), {"zero_stage": 1}),
    (2, (4, 1, 1), {"zero_stage": 3}),
    (4, (4, 1, 1), {"zero_stage": 3, "recompute": FULL}),
    (8, (1, 4, 1), {}),
    (4, (1, 4, 1), {"sequence_parallel": True}),
    (4, (1, 1, 4), {}),
    (2, (1, 1, 4), {}),
    (2, (1, 1, 4), {"schedule": GPIPE, "recompute": FULL}),
    (2, (1, 2, 2), {}),
    (4, (1, 2, 2), {"sequence_parallel": True, "recompute": FULL}),
    (4, (2, 2, 1), {"zero_stage": 1}),
    (4, (2, 2, 1), {"sequence_parallel": True, "zero_stage": 3}),
    (2, (2, 1, 2), {}),
)
EIGHT: tuple[tuple[int, tuple[int, int, int], dict[str, object]], ...] = (
    (2, (8, 1, 1), {}),
    (2, (8, 1, 1), {"zero_stage": 3}),
    (2, (4, 2, 1), {"zero_stage": 1, "sequence_parallel": True}),
    (2, (4, 1, 2), {"zero_stage": 1}),
    (4, (2, 4, 1), {"recompute": FULL}),
    (2, (2, 2, 2), {"sequence_parallel": True}),
    (2, (2, 1, 4), {}),
    (1, (2, 1, 4), {"schedule": GPIPE}),
    (2, (1, 4, 2), {}),
    (2, (1, 2, 4), {"recompute": FULL}),
)


def _degrees(data: int, tensor: int, pipeline: int) -> dict[str, object]:
    return {"data_parallel": data, "tensor_parallel": tensor, "pipeline_parallel": pipeline}


def _complete(fields: dict[str, object], size: int, num_layers: int, batch: int) -> Layout:
    """Return a layout with what follows from its degrees and micro-batch size."""
    bare = Layout(layers_per_stage=(), micro_batch_size=size, **fields)  # type: ignore[arg-type]
    return replace(
        bare,
        num_micro_batches=batch // (size * bare.data_parallel),
        zero_group=bare.data_parallel if bare.zero_stage else 1,
        layers_per_stage=split_layers(num_layers, bare.num_stages),
    )
