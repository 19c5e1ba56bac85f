"""From a layout and a module to the program of one rank.

    capture -> passes -> units -> the stages that this rank holds

The passes do not depend on the rank, so a caller that wants several ranks' programs (the dry run)
lowers once and calls `program_of` for each.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

from costmodels.job import TrainingJob
from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.schedule import Action, ScheduleTable, build_schedule, with_communication
from runtime.capture.export import capture
from runtime.capture.repeated_layers import capture_model
from runtime.communication.mesh import Mesh
from runtime.passes import PIPELINE, LoweringContext, run_passes
from runtime.passes.placements import Sharded
from runtime.passes.split_layers import SHARED
from runtime.program import Boundary, ParameterShard, Program, StageModule, UnitSpec

# What parameters are computed in; fp8 and narrower keep 16-bit parameters.
COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def compute_dtype(job: TrainingJob) -> torch.dtype:
    """Return the dtype that a job's parameters are computed in."""
    return COMPUTE_DTYPES.get(job.precision, torch.bfloat16)


def lower(
    model: ModelSpec | nn.Module,
    job: TrainingJob,
    layout: Layout,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
) -> Program:
    """Return what this rank runs of a plan; its parameters still lie on meta.

    Args:
        model: A specification, or a causal language model called as
            `model(input_ids=..., position_ids=...)`.
        job: The plan's.
        layout: The plan's.
        mesh: Where this rank stands.
        dtype: Of the parameters; None follows the job's precision.

    Raises:
        ValueError: The model cannot be traced, cut or split as the layout asks.

    """
    return program_of(lower_graph(model, job, layout, dtype=dtype), layout, mesh)


def lower_graph(
    model: ModelSpec | nn.Module,
    job: TrainingJob,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    capacity_factor: float = 0.0,
) -> GraphModule:
    """Return the whole model after all passes; the same on every rank.

    Args:
        model: As for `lower`.
        job: The plan's.
        layout: The plan's.
        dtype: Of the parameters; None follows the job's precision.
        capacity_factor: What an expert takes of a sequence, over the mean; 0 takes all.

    Raises:
        ValueError: The model cannot be traced, cut or split as the layout asks.

    """
    dtype = dtype or compute_dtype(job)
    if isinstance(model, ModelSpec):
        captured = capture_model(model, seq_len=job.seq_len, dtype=dtype)
    else:
        captured = capture(model, dtype=dtype)
    return lower_captured(captured, job, layout, capacity_factor=capacity_factor)


def lower_captured(
    captured: GraphModule, job: TrainingJob, layout: Layout, *, capacity_factor: float = 0.0
) -> GraphModule:
    """Run the passes on a captured graph, which they consume."""
    context = LoweringContext(
        layout=layout, flash_attention=job.flash_attention, capacity_factor=capacity_factor
    )
    return run_passes(captured, context, PIPELINE)


def program_of(lowered: GraphModule, layout: Layout, mesh: Mesh) -> Program:
    """Return the stages that a rank holds of a lowered model.

    Each program has graphs and hooks of its own, so that one lowered model serves several. What
    lies on meta becomes the program's own when it gets values; parameters that have values already
    are shared.
    """
    place = mesh.coordinate("pp")
    return Program(
        layout=layout,
        stages=tuple(_stage(lowered, layout, mesh, i) for i in layout.stages_of_rank(place)),
        actions=actions_of(layout, place),
        warnings=lowered.meta["warnings"],
    )


def rows_of(layout: Layout) -> ScheduleTable:
    """Return what every rank of a pipeline does in a step, with sends and receives."""
    schedule = build_schedule(
        layout.schedule,
        layout.pipeline_parallel,
        layout.stages_per_rank,
        layout.num_micro_batches,
    )
    return with_communication(schedule)


def actions_of(layout: Layout, place: int) -> tuple[Action, ...]:
    """Return the row of a rank, by its place along the pipeline."""
    return rows_of(layout).actions(place)


def _stage(lowered: GraphModule, layout: Layout, mesh: Mesh, index: int) -> StageModule:
    calls = {str(n.target): n for n in lowered.graph.nodes if n.op == "call_module"}
    names = unit_names(layout, index)
    units = tuple(_own_copy(_unit(lowered, name)) for name in names)
    specs = tuple(_spec(calls[name], name, len(calls) - 1) for name in names)
    shared, inputs, outputs = _shared_values(lowered, calls[SHARED], specs)
    return StageModule(
        index=index,
        num_stages=layout.num_stages,
        mesh=mesh,
        shared=shared,
        shared_inputs=inputs,
        shared_outputs=outputs,
        units=units,
        specs=specs,
        parameter_shards=_parameter_shards(lowered, layout, index),
        boundary=_boundary(calls["units.0"], layout),
    )


def unit_names(layout: Layout, index: int) -> tuple[str, ...]:
    """Return the units of a stage: its layers, the embedding before and the head after all."""
    first = 1 + sum(layout.layers_per_stage[:index])
    last = first + layout.layers_per_stage[index]
    first -= index == 0
    last += index == layout.num_stages - 1
    return tuple(f"units.{unit}" for unit in range(first, last))


def _unit(lowered: GraphModule, name: str) -> GraphModule:
    unit = lowered.get_submodule(name)
    assert isinstance(unit, GraphModule)
    return unit


def _own_copy(unit: GraphModule) -> GraphModule:
    """Return a unit that can be hooked and rewritten by itself, over the same tensors."""
    return GraphModule(unit, copy.deepcopy(unit.graph), class_name="Unit")


def _spec(call: Node, name: str, num_units: int) -> UnitSpec:
    place = int(name.rpartition(".")[2])
    words = {0: "embedding", num_units - 1: "head"}
    return UnitSpec(
        name=words.get(place, f"layer_{place - 1}"),
        inputs=call.meta["inputs"],
        recompute=call.meta["recompute"],
    )


def _shared_values(
    lowered: GraphModule, call: Node, specs: tuple[UnitSpec, ...]
) -> tuple[GraphModule, tuple[str, ...], tuple[str, ...]]:
    """Return the graph of the shared values that a stage needs, its inputs and its outputs."""
    whole = _unit(lowered, SHARED)
    needed = {name for spec in specs for name in spec.inputs}
    graph = fx.Graph()
    copies: dict[Node, Node] = {}
    outputs = graph.graph_copy(whole.graph, copies)
    assert isinstance(outputs, tuple)
    kept = [i for i, name in enumerate(call.meta["outputs"]) if name in needed]
    graph.output(tuple(outputs[i] for i in kept))
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
    part = GraphModule(whole, graph, class_name="Shared")
    inputs = tuple(str(node.target) for node in graph.nodes if node.op == "placeholder")
    return part, inputs, tuple(call.meta["outputs"][i] for i in kept)


def _parameter_shards(
    lowered: GraphModule, layout: Layout, index: int
) -> tuple[ParameterShard, ...]:
    held: dict[int, dict[str, ParameterShard]] = {
        stage: _shards_of_units(lowered, unit_names(layout, stage))
        for stage in {0, index, layout.num_stages - 1}
    }
    ends = (0, layout.num_stages - 1)
    tied = set(held[ends[0]]) & set(held[ends[1]]) if ends[0] != ends[1] else set()
    return tuple(
        replace(shard, tied_stages=ends) if name in tied else shard
        for name, shard in held[index].items()
    )


def _shards_of_units(lowered: GraphModule, names: tuple[str, ...]) -> dict[str, ParameterShard]:
    return {
        node.meta["shard"].name: node.meta["shard"]
        for name in names
        for node in _unit(lowered, name).graph.nodes
        if "shard" in node.meta
    }


def _boundary(embedding: Node, layout: Layout) -> Boundary:
    value = embedding.meta["val"]
    assert isinstance(value, Tensor)
    cut = isinstance(embedding.meta["placement"], Sharded)
    return Boundary(
        hidden_size=int(value.shape[-1]),
        context_parallel=layout.context_parallel,
        sequence_shards=layout.tensor_parallel if cut else 1,
    )
