"""A hand-made program: embedding, residual layers, tied or untied head; no lowering needed."""

import torch
from torch import fx, nn
from torch.nn import functional

from costmodels.schedule.build import build_schedule
from costmodels.schedule.communication import with_communication
from runtime.program import Boundary, ParameterShard, Program, StageModule, UnitSpec

VOCAB, HIDDEN, SEQ = 11, 6, 5
_LINEAR = torch.ops.aten.linear.default  # as lowered graphs call it


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCAB, HIDDEN))

    def forward(self, input_ids):
        return functional.embedding(input_ids, self.table)


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(HIDDEN, HIDDEN)})
        self.index = str(index)

    def forward(self, hidden):
        linear = self.layers[self.index]
        return hidden + torch.tanh(_LINEAR(hidden, linear.weight, linear.bias))


class Head(nn.Module):
    def __init__(self, table=None):
        super().__init__()
        if table is None:
            self.head = nn.Parameter(torch.empty(VOCAB, HIDDEN))
        else:
            self.table = table

    def forward(self, hidden, labels):
        weight = self.head if hasattr(self, "head") else self.table
        logits = _LINEAR(hidden, weight).flatten(0, 1)
        return functional.cross_entropy(
            logits, labels.flatten(), ignore_index=-100, reduction="sum"
        )


def build_program(layout, mesh, *, tied, dtype=torch.float32, actions=None):
    """Return the program of this mesh's rank, with values that depend on names only."""
    rank = mesh.coordinate("pp")
    stages = tuple(_stage(layout, mesh, index, tied) for index in layout.stages_of_rank(rank))
    for stage in stages:
        for unit in stage.units:
            for name, parameter in unit.named_parameters():
                parameter.data = initial(name, parameter.shape).to(dtype)
    if actions is None:
        table = build_schedule(
            layout.schedule,
            layout.pipeline_parallel,
            layout.stages_per_rank,
            layout.num_micro_batches,
        )
        actions = with_communication(table).actions(rank)
    return Program(layout=layout, stages=stages, actions=actions)


def initial(name, shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 2


def batches(layout, data_rank):
    """Return one step's micro-batches of a data rank; ignored labels spread unevenly."""
    found = []
    for index in range(layout.num_micro_batches):
        generator = torch.Generator().manual_seed(data_rank * layout.num_micro_batches + index)
        shape = (layout.micro_batch_size, SEQ)
        ids = torch.randint(0, VOCAB, shape, generator=generator)
        labels = torch.randint(0, VOCAB, shape, generator=generator)
        labels[:, : (data_rank + index) % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def _stage(layout, mesh, index, tied):
    first = sum(layout.layers_per_stage[:index])
    is_first, is_last = index == 0, index == layout.num_stages - 1
    modules, specs = [], []
    if is_first:
        modules.append(Embedding())
        specs.append(UnitSpec(name="embedding", inputs=("input_ids",)))
    recompute = layout.recompute.value == "full"
    for layer in range(first, first + layout.layers_per_stage[index]):
        modules.append(Layer(layer))
        specs.append(UnitSpec(name=f"layer_{layer}", inputs=("hidden",), recompute=recompute))
    if is_last:
        table = modules[0].table if is_first and tied else None
        if tied and table is None:
            table = nn.Parameter(torch.empty(VOCAB, HIDDEN))
        modules.append(Head(table))
        specs.append(UnitSpec(name="head", inputs=("hidden", "labels")))
    ends = (0, layout.num_stages - 1) if tied and layout.num_stages > 1 else ()
    shards = {
        name: ParameterShard(
            name=name,
            global_shape=tuple(parameter.shape),
            tied_stages=ends if name == "table" else (),
        )
        for module in modules
        for name, parameter in module.named_parameters()
    }
    return StageModule(
        index=index,
        num_stages=layout.num_stages,
        mesh=mesh,
        shared=_no_shared_values(),
        shared_inputs=(),
        shared_outputs=(),
        units=tuple(fx.symbolic_trace(module) for module in modules),
        specs=tuple(specs),
        parameter_shards=tuple(shards.values()),
        boundary=Boundary(hidden_size=HIDDEN, context_parallel=1, sequence_shards=1),
    )


def _no_shared_values():
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)
