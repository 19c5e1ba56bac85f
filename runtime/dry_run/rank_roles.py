"""Which ranks of a plan run different programs: one of each role stands for the others.

Stages differ along the pipeline. Within a stage, ranks differ where a pass or an operation asks for
a rank's place:

    context axis   a ring meets others' keys in another order, a gather sees another part of the
                   sequence; exchanges around whole attention do not
    tensor axis    where the vocabulary is padded, ranks hold different numbers of real columns

Ranks of the data and expert axes do the same on other data (a dry run gives experts equal shares).
"""

from dataclasses import dataclass

from costmodels.job import TrainingJob
from costmodels.layout import ContextParallelType, Layout
from costmodels.model import ModelSpec
from costmodels.network.shard import padded_rows
from runtime.communication.grid import coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRole:
    """Ranks that run the same program.

    Attributes:
        stage_rank: Their place along the pipeline.
        ranks: Global ranks, ascending. The first ones of all roles of a pipeline's place see the
            first ones of the next place's across the cut.

    """

    stage_rank: int
    ranks: tuple[int, ...]


def rank_roles(model: ModelSpec, job: TrainingJob, layout: Layout) -> tuple[RankRole, ...]:
    """Return all roles of a plan, by place along the pipeline, then by first rank."""
    found: dict[tuple[int, int, int], list[int]] = {}
    rows = padded_rows(model, job.target, layout.tensor_parallel) // layout.tensor_parallel
    for rank in range(layout.num_gpus):
        place = coordinates(layout, rank)
        context = place["cp"] if _sees_its_place(layout) else 0
        columns = min(max(model.vocab_size - place["tp"] * rows, 0), rows)
        found.setdefault((place["pp"], context, rows - columns), []).append(rank)
    return tuple(
        RankRole(stage_rank=stage, ranks=tuple(ranks))
        for (stage, *_), ranks in sorted(found.items(), key=lambda item: (item[0][0], item[1][0]))
    )


def _sees_its_place(layout: Layout) -> bool:
    return layout.context_parallel_type is not ContextParallelType.ULYSSES
