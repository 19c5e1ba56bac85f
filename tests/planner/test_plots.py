"""Figures: what they say and show, that names are only names, and that bytes repeat."""

import math
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from costmodels.layout import Layout, Schedule
from costmodels.schedule import StageDurations, build_schedule, simulate, timeline
from costmodels.terms import MemoryEstimate, MemoryParts, Term
from costmodels.units import GIB
from planner.measured.runs import MeasuredRow, MeasuredRun
from planner.plots.accuracy import runs_figure, table_figure
from planner.plots.breakdown import format_seconds, memory_figure, time_figure
from planner.plots.scaling import ScalingPoint, points_of, scaling_figure
from planner.plots.style import PARTS, TERMS, is_dark, look_of, render, write_figure
from planner.plots.timeline import KINDS, PipelineView, timeline_figure


def term(name, exposed, *, axis=None, hidden=0.0):
    return Term(name=name, axis=axis, seconds=exposed + hidden, exposed_seconds=exposed)


TERMS_OF_STEP = (
    term("bubble", 0.5),
    term("matmul", 7.0),
    term("tp_collectives", 1.5, axis="tp"),
    term("grad_reduce", 1.0, axis="dp", hidden=2.0),
)


def memory(*reserved_gib):
    """Ranks whose memory is half activations, a quarter parameters, a quarter framework."""
    ranks = tuple(
        MemoryParts(
            activations=total * GIB / 2, parameters=total * GIB / 4, framework=total * GIB / 4
        )
        for total in reserved_gib
    )
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].reserved)
    return MemoryEstimate(
        capacity=80.0 * GIB,
        worst_rank=worst,
        per_rank=ranks,
        reserved_interval=(0.0, 1.0),
        host_per_node=0.0,
        load_peak=0.0,
    )


def view(num_micro_batches=3):
    layout = Layout(
        pipeline_parallel=2,
        num_micro_batches=num_micro_batches,
        layers_per_stage=(1, 1),
        schedule=Schedule.ONE_F_ONE_B,
    )
    ones = (1.0, 1.0)
    durations = StageDurations(forward=ones, backward_input=ones, backward_weight=ones)
    table = build_schedule(Schedule.ONE_F_ONE_B, 2, 1, 3)
    result = simulate(table, durations)
    return PipelineView(
        layout=layout,
        intervals=timeline(table, durations),
        drawn=3,
        makespan=result.makespan,
        bubble_fraction=result.bubble_fraction,
    )


def run(label, predicted, measured):
    return MeasuredRun(
        label=label,
        predicted=predicted,
        measured=measured,
        spread=(0.9 * measured, 1.2 * measured),
        num_steps=8,
    )


ROWS = (
    MeasuredRow(family="far/off", measured=1000.0, ratio=1.5),
    MeasuredRow(family="near/by", measured=2000.0, ratio=0.9),
    MeasuredRow(family="near/by", measured=4000.0, ratio=1.1),
)
POINTS = (
    ScalingPoint(series="m on h", gpus=64, tokens_per_second_per_gpu=1000.0),
    ScalingPoint(series="m on h", gpus=256, tokens_per_second_per_gpu=750.0),
)
FIGURES = {
    "time": lambda: time_figure(TERMS_OF_STEP),
    "memory": lambda: memory_figure(memory(60.0, 40.0)),
    "timeline": lambda: timeline_figure(view()),
    "runs": lambda: runs_figure([run("a", 1.0, 1.1), run("b", 2.0, 1.9)]),
    "table": lambda: table_figure(ROWS, "hopper"),
    "scaling": lambda: scaling_figure(POINTS),
}


def title(figure):
    return " ".join(figure.get_suptitle().split())


def bars(figure):
    return [p for p in figure.axes[0].patches if isinstance(p, Rectangle)]


def texts(figure):
    return [text.get_text().strip() for text in figure.axes[0].texts]


def row_labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("file_format", ["svg", "png"])
def test_the_same_figure_gives_the_same_bytes(name, file_format):
    first, second = (render(FIGURES[name](), file_format) for _ in range(2))
    assert first == second
    assert len(first) > 2000


@pytest.mark.parametrize("name", FIGURES)
def test_no_date_stands_in_the_file(name):
    text = render(FIGURES[name](), "svg").decode()
    assert "<dc:date>" not in text
    assert text.startswith("<?xml")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_states_a_finding_and_names_its_unit(name):
    figure = FIGURES[name]()
    assert any(character.isdigit() for character in title(figure))
    assert figure.axes[0].get_xlabel()


@pytest.mark.parametrize("name", ["time", "memory", "timeline", "runs"])
def test_bars_start_at_zero(name):
    assert FIGURES[name]().axes[0].get_xlim()[0] == 0


def test_a_step_is_drawn_term_by_term_in_the_order_of_the_colours():
    figure = time_figure(TERMS_OF_STEP)
    assert row_labels(figure) == [
        "matrix products",
        "tensor parallel",
        "gradient reduction",
        "pipeline bubble",
    ]
    solid = [bar for bar in bars(figure) if bar.get_fill()]
    assert [bar.get_width() for bar in solid] == [7.0, 1.5, 1.0, 0.5]
    assert [to_hex(bar.get_facecolor()) for bar in solid] == [
        TERMS[name].colour for name in ("matmul", "tp_collectives", "grad_reduce", "bubble")
    ]
    (hidden,) = [bar for bar in bars(figure) if not bar.get_fill()]
    assert (hidden.get_x(), hidden.get_width()) == (1.0, 2.0)
    assert texts(figure)[2] == "1 s  10.0%  (+2 s hidden)"
    assert title(figure) == (
        "Matrix products take 70% of the 10 s step, waiting for communication 25%"
    )


def test_terms_too_small_to_see_are_left_out_and_rounding_is_zero():
    terms = (
        *TERMS_OF_STEP,
        term("loss", 0.001),
        Term(name="p2p", axis="pp", seconds=0.3, exposed_seconds=-1e-13),
    )
    figure = time_figure(terms)
    assert "loss" not in row_labels(figure)
    at = row_labels(figure).index("pipeline transfers")
    assert texts(figure)[at] == "0 s  0.0%  (+300 ms hidden)"


def test_an_unknown_term_is_grey_under_its_own_name():
    look = look_of("quantum_links", TERMS)
    assert (look.label, look.colour) == ("quantum links", "#969696")


def test_memory_stacks_the_parts_of_every_rank_up_to_its_reserved_bytes():
    figure = memory_figure(memory(60.0, 40.0))
    assert row_labels(figure) == ["rank 0", "rank 1"]
    first = [bar for bar in bars(figure) if math.isclose(bar.get_y() + bar.get_height() / 2, 0)]
    assert sum(bar.get_width() for bar in first) == pytest.approx(60.0)
    assert max(bar.get_x() + bar.get_width() for bar in first) == pytest.approx(60.0)
    assert {"60.0", "40.0", "card", "92%"} <= set(texts(figure))
    assert title(figure) == (
        "Pipeline rank 0 is fullest: 60.0 of 80.0 GiB, most of it activations (30.0)"
    )
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["parameters", "activations", "framework"]


def test_one_rank_is_every_rank():
    assert title(memory_figure(memory(30.0))).startswith("Every rank takes 30.0 of 80.0 GiB")


def test_a_deep_pipeline_keeps_the_ends_and_the_fullest_rank():
    sizes = [30.0] * 64
    sizes[37] = 70.0
    labels = row_labels(memory_figure(memory(*sizes)))
    assert len(labels) <= 16
    assert {"rank 0", "rank 37", "rank 63"} <= set(labels)


def test_timeline_has_a_box_for_every_action_and_leaves_waiting_white():
    figure = timeline_figure(view())
    boxes = bars(figure)
    assert len(boxes) == 2 * 3 * 2
    assert sum(box.get_width() for box in boxes) == pytest.approx(2 * 3 * 3)  # 3 s per micro-batch
    assert max(box.get_x() + box.get_width() for box in boxes) == pytest.approx(12.0)
    # (pp - 1) / (m + pp - 1) of four rounds of 3 s
    assert title(figure) == "Ranks wait 25.0% of the pipeline's 12 s (1f1b, 3 micro-batches)"
    assert texts(figure) == ["0", "1", "0", "2", "1", "2", "0", "0", "1", "1", "2", "2"]


def test_a_shortened_timeline_says_how_much_is_drawn():
    assert title(timeline_figure(view(num_micro_batches=500))).endswith(
        "(1f1b, 500 micro-batches); 3 drawn"
    )


def test_runs_show_measured_solid_and_predicted_hollow():
    figure = runs_figure([run("slow", 2.0, 4.0), run("fast", 1.0, 1.0)])
    assert row_labels(figure) == ["fast", "slow"]
    measured, predicted = figure.axes[0].collections
    assert measured.get_offsets().tolist() == [[1.0, 0.0], [4.0, 1.0]]
    assert predicted.get_offsets().tolist() == [[1.0, 0.0], [2.0, 1.0]]
    assert len(predicted.get_facecolor()) == 0
    assert to_hex(measured.get_facecolor()[0]) == "#08306b"
    assert texts(figure) == ["+0%", "-50%"]
    assert title(figure) == (
        "Step times of 2 layouts are predicted 25% off on average, "
        "100% of pairs are in the right order"
    )


def test_a_single_run_states_both_times():
    assert title(runs_figure([run("one", 1.1, 1.0)])) == "Predicted 1.1 s, measured 1 s: +10%"


def test_a_table_names_the_families_that_err_most_first():
    figure = table_figure(ROWS, "hopper")
    assert row_labels(figure) == [
        "far/off  50% off, median +50%",
        "near/by  10% off, median +0%",
    ]
    assert title(figure) == (
        "Hopper: 3 runs of 2 families are predicted 30% off on average, the median run 10%"
    )
    predicted = [c for c in figure.axes[0].collections if len(c.get_offsets()) == 2][-1]
    assert predicted.get_offsets()[:, 0].tolist() == pytest.approx([1800.0, 4400.0])


def test_scaling_keeps_the_best_of_each_size_and_states_the_loss():
    def estimate(gpus, speed):
        return {
            "model": {"name": "m"},
            "hardware": {"name": "h", "gpus": gpus},
            "time": {"tokens_per_second_per_gpu": speed},
        }

    points = points_of([estimate(256, 750.0), estimate(64, 900.0), estimate(64, 1000.0)])
    assert tuple(points) == POINTS
    assert title(scaling_figure(points)) == "From 64 to 256 GPUs each GPU loses 25% of its tokens/s"
    with pytest.raises(ValueError, match="lacks its model, hardware or time"):
        points_of([{"model": {"name": "m"}, "hardware": {"name": "h", "gpus": 8}, "time": None}])


def test_scaling_of_several_series_names_the_one_that_loses_most():
    other = [replace(point, series="n on h", tokens_per_second_per_gpu=500.0) for point in POINTS]
    figure = scaling_figure([*POINTS, *other])
    assert "each GPU of m on h loses 25%" in title(figure)
    assert set(texts(figure)) == {"m on h: 750", "n on h: 500"}


def test_names_are_never_read_as_formulas():
    figure = runs_figure([run(r"$\frac{1}{0}$ \undefined$", 1.0, 1.0)])
    assert row_labels(figure) == [r"$\frac{1}{0}$ \undefined$"]
    assert render(figure, "svg")


def test_colours_fall_apart_in_grey():
    def luma(colour):
        return sum(
            weight * int(colour[i : i + 2], 16)
            for weight, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5))
        )

    for looks in (TERMS, PARTS, KINDS):
        # A whole backward has the colour of its first half: both send a gradient on.
        looks = {name: look for name, look in looks.items() if name != "B"}  # noqa: PLW2901
        keys = [(round(luma(look.colour)), look.hatch) for look in looks.values()]
        assert len(set(keys)) == len(keys)
    assert is_dark("#08306b")
    assert not is_dark("#fdd0a2")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (12.345, "12.3 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us")]
)
def test_seconds_read_in_a_unit_that_keeps_them_short(seconds, text):
    assert format_seconds(seconds) == text


def test_an_unknown_suffix_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="cannot draw 'bmp'"):
        write_figure(FIGURES["scaling"](), tmp_path / "figure.bmp")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_is_written_with_the_bytes_that_render_returns(tmp_path):
    write_figure(FIGURES["time"](), tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_bytes() == render(FIGURES["time"](), "svg")
