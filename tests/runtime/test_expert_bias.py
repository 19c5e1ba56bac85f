"""Routers' corrections follow the loads of their experts, alike under every layout."""

import lowering_models as small
import torch

from costmodels.layout import Layout, Recompute
from costmodels.model import LatentAttention, MixtureOfExperts
from runtime.checkpoints.sharded_state import buffers_of
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_graph, program_of
from runtime.models.feed_forward import RoutedFeedForward
from runtime.ops.routing import Routing, choose
from runtime.states.zero import Precisions, ShardedStates
from runtime.training.data import share_of
from runtime.training.expert_bias import BiasUpdates

BATCH, STEPS, RATE = 8, 2, 0.01
MOE = MixtureOfExperts(
    num_experts=8,
    experts_per_token=3,
    ffn_hidden_size=12,
    num_dense_layers=1,
    scoring="sigmoid",
    correction_bias=True,
    num_groups=4,
    groups_per_token=2,
)
SPEC = small.llama(
    name="small-deepseek",
    architecture="deepseek_v3",
    num_kv_heads=8,
    moe=MOE,
    latent_attention=LatentAttention(
        q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
    ),
)
LAYOUTS = [
    {"data_parallel": 4, "expert_parallel": 4},
    {"tensor_parallel": 2, "sequence_parallel": True, "data_parallel": 2, "expert_parallel": 2},
    {"pipeline_parallel": 2, "context_parallel": 2, "recompute": Recompute.FULL},
]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(1, small.NUM_LAYERS)]


def layout_of(facts):
    stages = facts.get("pipeline_parallel", 1)
    degree = facts.get("data_parallel", 1)
    return Layout(
        **{
            "zero_group": degree * facts.get("context_parallel", 1),
            "num_micro_batches": BATCH // degree,
            "layers_per_stage": (small.NUM_LAYERS // stages,) * stages,
            **facts,
        }
    )


def expected(values, data):
    """Return the corrections after each step, from the plain module's own hidden states."""
    model = small.plain_model(SPEC)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    blocks = [m for m in model.modules() if isinstance(m, RoutedFeedForward)]
    for block in blocks:
        block.register_forward_hook(lambda block, inputs, _: setattr(block, "seen", inputs[0]))
    rule = Routing(top_k=3, scoring="sigmoid", num_groups=4, groups_per_token=2)
    steps = []
    for _ in range(STEPS):
        positions = torch.arange(small.SEQ).expand(BATCH, -1)
        model(input_ids=data["input_ids"], position_ids=positions)
        for block in blocks:
            scores = (block.seen @ block.gate.weight.t()).sigmoid().flatten(0, 1)
            chosen, _ = choose(scores, block.gate.e_score_correction_bias, rule)
            loads = torch.bincount(chosen.flatten(), minlength=8).double()
            block.gate.e_score_correction_bias += RATE * (loads.mean() - loads).sign().float()
        steps.append([block.gate.e_score_correction_bias.clone() for block in blocks])
    return steps


def corrections(world, case, values, data):
    """Return each router's correction after each step, or None where another rank has it."""
    lowered, layout = case
    mesh = world.mesh(layout)
    program = program_of(lowered, layout, mesh)
    dtypes = Precisions(gradients=torch.float32, master=torch.float32)
    states = ShardedStates(program, mesh, dtypes, initialise=lambda shard: values[shard.name])
    executor, biases = Executor(program, mesh, states), BiasUpdates(program, mesh, RATE)
    share = share_of(BATCH, layout.data_parallel, mesh.coordinate("dp"))
    batches = [
        context_share({k: v[i : i + 1] for k, v in data.items()}, layout, mesh.coordinate("cp"))
        for i in range(share.start, share.stop)
    ]
    found = []
    for _ in range(STEPS):
        executor.run(batches)
        states.clear_gradients()
        imbalance = biases.step()
        assert imbalance > 0
        held = buffers_of(program)
        found.append([held.get(f"{name}.e_score_correction_bias") for name in ROUTERS])
        found[-1] = [None if value is None else value.tolist() for value in found[-1]]
    return found


def test_corrections_move_against_the_loads_of_the_whole_step():
    values = small.weights(small.plain_model(SPEC), scale=0.3)
    data = small.batch(size=BATCH)
    truth = expected(values, data)
    assert any(float(value.abs().max()) > 0 for value in truth[0])
    cases = [(lower_graph(SPEC, small.job(), layout_of(f)), layout_of(f)) for f in LAYOUTS]

    def work(world):
        return [corrections(world, case, values, data) for case in cases]

    seen = set()
    for rank in run_ranks(work, 4, timeout=240):
        for case, steps in enumerate(rank):
            for found, wanted in zip(steps, truth, strict=True):
                for router, (got, value) in enumerate(zip(found, wanted, strict=True)):
                    if got is not None:
                        assert torch.equal(torch.tensor(got), value), (LAYOUTS[case], router)
                        seen.add((case, router))
    assert len(seen) == len(LAYOUTS) * len(ROUTERS)
