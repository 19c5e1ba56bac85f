"""The pipeline's schedule in seconds: one row per rank, one box per action, waiting left white."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from costmodels.layout import Layout
from costmodels.schedule import (
    ActionKind,
    Interval,
    PipelineShape,
    simulate_schedule,
)
from costmodels.time.stages import pipeline_times, step_intervals
from planner.plan import Plan
from planner.plots.breakdown import format_seconds
from planner.plots.style import BESIDE, Look, headline, is_dark, new_figure, quiet_rows, styled

KINDS: dict[ActionKind, Look] = {
    ActionKind.FORWARD: Look(label="forward", colour="#08519c"),
    ActionKind.BACKWARD: Look(label="backward", colour="#f16913"),
    ActionKind.BACKWARD_INPUT: Look(label="backward, inputs", colour="#f16913"),
    ActionKind.BACKWARD_WEIGHT: Look(label="backward, weights", colour="#fdd0a2"),
}
# Later stages of a rank are lighter, so that the rounds of an interleaved schedule show.
FADE = 0.75  # chosen: opacity of each stage relative to the rank's one before
FAINTEST = 0.3  # chosen: still told from waiting
MAX_BOXES = 130  # chosen: boxes on one row that a page can hold; longer steps are cut short
MIN_NUMBERED = 0.009  # chosen: share of the axis that one digit takes
PIPELINES_DRAWN = 3  # a shortened step still fills, is steady and drains


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineView:
    """A pipeline's step, ready to be drawn.

    Attributes:
        intervals: Actions of the drawn step, which may have fewer micro-batches than the real one.
        drawn: Micro-batches of the drawn step.
        makespan: Seconds of the whole step's pipeline, all micro-batches.
        bubble_fraction: Idle share of the whole step's pipeline.

    """

    layout: Layout
    intervals: tuple[Interval, ...]
    drawn: int
    makespan: float
    bubble_fraction: float


def pipeline_of(plan: Plan) -> PipelineView:
    """Return the pipeline of a plan, simulated with the estimate's own seconds per stage.

    Raises:
        ValueError: The plan has no pipeline.

    """
    layout = plan.layout
    if layout.num_stages == 1:
        raise ValueError("the plan has one pipeline stage: there is no timeline to draw")
    times = pipeline_times(plan.model, plan.job, plan.cluster, layout)
    whole = simulate_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
        times.durations,
        times.hops,
        p2p_overlaps=times.p2p_overlaps,
    )
    drawn = _micro_batches_drawn(layout)
    return PipelineView(
        layout=layout,
        intervals=step_intervals(times, layout, drawn),
        drawn=drawn,
        makespan=whole.makespan,
        bubble_fraction=whole.bubble_fraction,
    )


def _micro_batches_drawn(layout: Layout) -> int:
    """Return how many micro-batches fit a page, of a step that still repeats as the whole does."""
    if 2 * layout.stages_per_rank * layout.num_micro_batches <= MAX_BOXES:
        return layout.num_micro_batches
    return PipelineShape.of(layout).shortened(PIPELINES_DRAWN).num_micro_batches


@styled
def timeline_figure(view: PipelineView) -> Figure:
    """Return the timeline of a pipeline."""
    figure = new_figure(10.0, 1.6 + 0.3 * view.layout.pipeline_parallel)
    headline(figure, draw_timeline(figure.add_subplot(), view))
    return figure


def draw_timeline(axes: Axes, view: PipelineView) -> str:
    """Draw `timeline_figure` on given axes and return its finding."""
    end = max(interval.end for interval in view.intervals)
    for interval in view.intervals:
        look = KINDS[interval.action.kind]
        stages = view.layout.stages_of_rank(interval.rank)
        opacity = max(FADE ** stages.index(interval.action.stage), FAINTEST)
        width = interval.end - interval.start
        axes.barh(
            interval.rank,
            width,
            left=interval.start,
            height=0.82,
            color=look.colour,
            alpha=opacity,
            edgecolor="white",
            linewidth=0.5,
        )
        number = str(interval.action.micro_batch)
        if width > MIN_NUMBERED * len(number) * end:
            ink = "white" if is_dark(look.colour) and opacity == 1 else "black"
            axes.text(
                interval.start + width / 2,
                interval.rank,
                number,
                ha="center",
                va="center",
                fontsize=6.5,
                color=ink,
            )
    quiet_rows(axes, [f"rank {rank}" for rank in range(view.layout.pipeline_parallel)])
    axes.set_xlim(0, end)
    virtual = "; lighter: the rank's later stages" if view.layout.stages_per_rank > 1 else ""
    axes.set_xlabel(f"seconds since the step began (numbers: micro-batches{virtual})")
    used = {interval.action.kind for interval in view.intervals}
    axes.legend(
        handles=[
            Patch(facecolor=look.colour, label=look.label)
            for kind, look in KINDS.items()
            if kind in used
        ],
        **BESIDE,
    )
    return _title(view)


def _title(view: PipelineView) -> str:
    layout = view.layout
    title = (
        f"Ranks wait {view.bubble_fraction:.1%} of the pipeline's "
        f"{format_seconds(view.makespan)} ({layout.schedule}, "
        f"{layout.num_micro_batches} micro-batches)"
    )
    if view.drawn < layout.num_micro_batches:
        title += f"; {view.drawn} drawn"
    return title
