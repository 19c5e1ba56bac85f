"""One plan on one page: where the step goes, what fills the memory, how the pipeline runs."""

from matplotlib.figure import Figure

from costmodels.memory.estimate import estimate_memory
from costmodels.terms import Term
from planner.codec import DecodeError, decode
from planner.plan import Plan
from planner.plots.breakdown import draw_memory, draw_time
from planner.plots.style import headline, new_figure, panel_title, styled
from planner.plots.timeline import draw_timeline, pipeline_of
from planner.report import layout_words

_ROW = 0.3  # inches of one bar


@styled
def overview_figure(plan: Plan) -> Figure:
    """Return the page of a plan; without a pipeline it has no timeline.

    Raises:
        ValueError: The plan file holds no estimate of time.

    """
    terms = terms_of(plan)
    memory = estimate_memory(plan.model, plan.job, plan.cluster, plan.layout)
    ranks = plan.layout.pipeline_parallel
    heights = [1.2 + _ROW * len(terms), 1.6 + _ROW * max(ranks, 3)]
    if plan.layout.num_stages > 1:
        heights.append(1.2 + _ROW * ranks)
    figure = new_figure(10.0, sum(heights))
    panels = figure.subplots(len(heights), 1, height_ratios=heights)
    panel_title(panels[0], draw_time(panels[0], terms))
    panel_title(panels[1], draw_memory(panels[1], memory))
    if plan.layout.num_stages > 1:
        panel_title(panels[2], draw_timeline(panels[2], pipeline_of(plan)))
    headline(
        figure,
        f"{plan.model.name} on {plan.cluster.num_gpus} x {plan.cluster.profile.name}: "
        f"{layout_words(plan.layout)}",
    )
    return figure


def terms_of(plan: Plan) -> tuple[Term, ...]:
    """Return the terms of the plan's own estimate, as they were when it was made.

    Raises:
        ValueError: The plan has none: its layout is illegal, or the file was changed.

    """
    time = plan.estimate.get("time")
    listed = time.get("terms") if isinstance(time, dict) else None
    if not isinstance(listed, list):
        raise ValueError(  # noqa: TRY004 - a fault of the file, as any other
            "the plan file holds no estimate of time; search for it again"
        )
    try:
        terms = tuple(decode(Term, entry, "estimate.time.terms") for entry in listed)
    except DecodeError as error:
        raise ValueError(f"the plan's estimate is not valid: {error}") from error
    if sum(term.exposed_seconds for term in terms) <= 0:
        raise ValueError("the plan's estimate is not valid: its terms sum to no time")
    return terms
