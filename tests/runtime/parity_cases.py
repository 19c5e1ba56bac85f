"""Models, data and the single-process truth of the parity suite; how a layout is held to it."""

import copy
from dataclasses import dataclass
from functools import cache

import torch
from parity import gradient_errors, larger, sgd_step, weight_errors, worst
from torch.nn import functional

from costmodels.job import Precision, TrainingJob
from costmodels.layout import Layout
from costmodels.model import LatentAttention, MixtureOfExperts, ModelSpec
from runtime.capture.repeated_layers import capture_model
from runtime.context import context_share
from runtime.executor import Executor
from runtime.launch import run_ranks
from runtime.lower import lower_captured, program_of
from runtime.models import build_model
from runtime.models.feed_forward import RoutedFeedForward
from runtime.ops.routing import Routing, choose
from runtime.program import IGNORED_LABEL
from runtime.states.zero import Precisions, ShardedStates
from runtime.training.data import share_of

TOLERANCE = 1e-5
LAUNCH = 25  # layouts of one launch: graphs of more would crowd the memory of small machines
# 16 tokens cut into two chunks for each of 4 context ranks, or of 2 with 2 of sequence parallelism.
SEQ_LEN, BATCH, STEPS = 16, 32, 3
# One process in fp32 strays from fp64 by 8e-6 of the largest gradient within three steps at 0.1,
# which leaves a layout 2e-6 of the tolerance for its own sums; at 0.05 by 4e-6.
RATE = 0.05
JOB = TrainingJob(seq_len=SEQ_LEN, global_batch_size=BATCH, precision=Precision.FP32)

_SHAPE = {
    "hidden_size": 24,
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 4,
    "ffn_hidden_size": 40,
    "vocab_size": 67,  # a prime: no tensor-parallel degree divides it
    "training_seq_len": SEQ_LEN,
}
MODELS = {
    "qwen2-untied": ModelSpec(name="qwen2-untied", architecture="qwen2", qkv_bias=True, **_SHAPE),
    "qwen3-tied": ModelSpec(
        name="qwen3-tied",
        architecture="qwen3",
        qk_norm="per-head",
        tied_embeddings=True,
        # Norms of short vectors divide by numbers near 0: 4 wide, fp32 is 1e-5 off fp64 by itself.
        **{**_SHAPE, "head_dim": 16},
    ),
    "gpt2-tied": ModelSpec(
        name="gpt2-tied",
        architecture="gpt2",
        norm="layernorm",
        gated_ffn=False,
        activation="gelu_new",
        tied_embeddings=True,
        num_position_embeddings=SEQ_LEN,
        rope_theta=None,
        qkv_bias=True,
        attention_output_bias=True,
        ffn_bias=True,
        **{**_SHAPE, "num_kv_heads": 8, "head_dim": 3},
    ),
}
# fp64 where norms of narrow compressed forms make fp32 rounding visible at 1e-5.
EXPERTS = {
    "mixtral": ModelSpec(
        name="mixtral",
        architecture="mixtral",
        moe=MixtureOfExperts(
            num_experts=8, experts_per_token=2, ffn_hidden_size=16, balance_loss=0.05
        ),
        **_SHAPE,
    ),
    "deepseek": ModelSpec(
        name="deepseek",
        architecture="deepseek_v3",
        moe=MixtureOfExperts(
            num_experts=8,
            experts_per_token=3,
            ffn_hidden_size=12,
            shared_ffn_hidden_size=24,
            num_dense_layers=2,
            scoring="sigmoid",
            correction_bias=True,
            num_groups=4,
            groups_per_token=2,
            routed_scaling=1.5,
            balance_loss=0.02,
        ),
        latent_attention=LatentAttention(
            q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
        ),
        **{**_SHAPE, "num_kv_heads": 8, "head_dim": 6},
    ),
}
ALL = {**MODELS, **EXPERTS}
DTYPES = {"deepseek": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What one process computes in one step, in fp64: its own rounding is no layout's error."""

    loss: float
    gradients: dict
    weights: dict


def initial(name, shape, dtype=torch.float64):
    """Values that depend on the name alone: no zero biases, no norm weights of one."""
    generator = torch.Generator().manual_seed(sum((i + 1) * ord(c) for i, c in enumerate(name)))
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    is_norm = len(shape) == 1 and name.endswith("weight")
    return ((1 + noise / 4) if is_norm else noise / 5).to(dtype)


@cache
def shared_values(name, shape, dtype):
    """Return `initial`'s values to read only: the ranks of a launch share what was made before."""
    return initial(name, shape, dtype)


@cache
def global_batch(vocab_size):
    """One step's sequences; ignored labels lie unevenly, one sequence is ignored whole."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        labels[row, : (row * row) % SEQ_LEN] = IGNORED_LABEL
    labels[5] = IGNORED_LABEL
    return tokens[:, :-1].contiguous(), labels


def micro_batches(vocab_size, layout, data_rank, context_rank=0):
    """Return a rank's share of the step: sequences by its data rank, tokens by its context rank."""
    share = share_of(BATCH, layout.data_parallel, data_rank)
    ids, labels = (whole[share.start : share.stop] for whole in global_batch(vocab_size))
    size = layout.micro_batch_size
    whole = [
        {"input_ids": i, "labels": t}
        for i, t in zip(ids.split(size), labels.split(size), strict=True)
    ]
    return [context_share(batch, layout, context_rank) for batch in whole]


def own_batches(name, mesh):
    """Return the share of the rank that a mesh belongs to."""
    places = mesh.coordinate("dp"), mesh.coordinate("cp")
    return micro_batches(ALL[name].vocab_size, mesh.layout, *places)


def build_reference(name, dtype):
    """Return the plain module with its values, and its parameters by name."""
    module = build_model(ALL[name], seq_len=SEQ_LEN, dtype=dtype, device="cpu")
    named = dict(module.named_parameters())
    for key, parameter in named.items():
        parameter.data = initial(key, parameter.shape, dtype)
    for block in module.modules():
        if isinstance(block, RoutedFeedForward):
            block.register_forward_hook(_remember_input)
    return module, named


def _remember_input(block, arguments, output):
    del output
    (block.seen,) = arguments


def reference_loss(module, vocab_size):
    """Return the mean loss of a step as plain torch computes it, over the whole batch at once."""
    ids, labels = global_batch(vocab_size)
    positions = torch.arange(SEQ_LEN).expand(BATCH, -1)
    logits = module(input_ids=ids, position_ids=positions)
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL
    )


def dtype_of(name):
    """Return what a model's parity is judged in."""
    return DTYPES.get(name, torch.float32)


def reference_balance(module, vocab_size):
    """Return the balance loss of the step that `reference_loss` has just computed, per token."""
    total = torch.zeros(())
    for block in module.modules():
        if not isinstance(block, RoutedFeedForward):
            continue
        x, moe = block.seen, block.moe
        logits = x @ block.gate.weight.t()
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
        rule = Routing(
            top_k=moe.experts_per_token,
            num_groups=moe.num_groups,
            groups_per_token=moe.groups_per_token,
        )
        chosen, _ = choose(scores, block.gate.e_score_correction_bias, rule)
        visits = functional.one_hot(chosen, moe.num_experts).sum((1, 2))
        shares = visits * moe.num_experts / (moe.experts_per_token * SEQ_LEN)
        likely = scores / scores.sum(-1, keepdim=True)
        total = total + moe.balance_loss * torch.einsum("bse,be->", likely, shares.to(likely))
    return total / max(int((global_batch(vocab_size)[1] != IGNORED_LABEL).sum()), 1)


@cache
def sgd_truth(name):
    """Return what one process computes in each SGD step, from the values that ranks start from."""
    module, named = build_reference(name, torch.float64)
    for key, parameter in named.items():
        parameter.data.copy_(shared_values(key, parameter.shape, dtype_of(name)))
    truths = []
    for _ in range(STEPS):
        loss = reference_loss(module, ALL[name].vocab_size)
        (loss + reference_balance(module, ALL[name].vocab_size)).backward()
        gradients = {key: p.grad.clone() for key, p in named.items()}
        sgd_step(named.values(), RATE)
        weights = {key: p.detach().clone() for key, p in named.items()}
        truths.append(Truth(loss=loss.item(), gradients=gradients, weights=weights))
    return tuple(truths)


@cache
def _captured(name, dtype):
    return capture_model(ALL[name], seq_len=SEQ_LEN, dtype=dtype)


def lowered(name, layout, dtype=None):
    """Return the model's graph after all passes, captured once per model."""
    dtype = dtype or dtype_of(name)
    return lower_captured(copy.deepcopy(_captured(name, dtype)), JOB, layout)


def start(world, graph, layout, dtype=torch.float32):
    """Return this rank's mesh, states, executor and program, with the suite's values."""
    mesh = world.mesh(layout)
    program = program_of(graph, layout, mesh)
    states = ShardedStates(
        program,
        mesh,
        Precisions(gradients=dtype, master=dtype),
        initialise=lambda shard: shared_values(shard.name, shard.global_shape, dtype),
    )
    return mesh, states, Executor(program, mesh, states), program


def sgd_errors(world, name, graph, layout):
    """Return the worst error of each kind over the steps, against one process."""
    mesh, states, executor, _ = start(world, graph, layout, dtype_of(name))
    worst_of = {"loss": 0.0, "gradient": 0.0, "update": 0.0}
    before = {
        key: shared_values(key, w.shape, dtype_of(name)).double()
        for key, w in sgd_truth(name)[0].weights.items()
    }
    for truth in sgd_truth(name):
        loss = executor.run(own_batches(name, mesh))
        gradient, _ = worst(gradient_errors(states, mesh, truth.gradients))
        for bucket in states.buckets:
            bucket.master.sub_(RATE * bucket.gradients)
        states.clear_gradients()
        states.publish()
        update = _worst_update(states, mesh, before, truth, torch.finfo(dtype_of(name)).eps)
        before = truth.weights
        for kind, error in (
            ("loss", abs(loss.item() - truth.loss)),
            ("gradient", gradient),
            ("update", update),
        ):
            worst_of[kind] = larger(worst_of[kind], error)
    return worst_of


def _worst_update(states, mesh, before, truth, spacing):
    """Return the largest error of an update over the largest update of its tensor.

    Weights round to their own spacing in each step, whatever the size of the update: a few units
    in the last place are no error.
    """
    worst_error = 0.0
    for key, error in weight_errors(states, mesh, truth.weights).items():
        after = truth.weights[key]
        rounding = 2 * STEPS * spacing * float(after.abs().max())
        moved = float((after - before[key]).abs().max())
        worst_error = larger(worst_error, (error - rounding) / max(moved, 1e-3))
    return worst_error


def check(name, num_ranks, cases, timeout):
    """Hold layouts to one process, many in one launch; return their worst error of each kind.

    A launch that takes longer than the timeout, in seconds, is ended: no hang holds a test run.
    Gradients and updates are judged by the largest entry of their tensor.
    """
    worst_of = []
    sgd_truth(name)  # before the ranks fork, which then share it
    for first in range(0, len(cases), LAUNCH):
        part = cases[first : first + LAUNCH]
        graphs = [lowered(name, layout) for layout in part]

        def work(world, part=part, graphs=graphs):
            return [
                sgd_errors(world, name, graph, layout)
                for layout, graph in zip(part, graphs, strict=True)
            ]

        results = run_ranks(work, num_ranks, timeout=timeout)
        for layout, *errors in zip(part, *results, strict=True):
            kinds = {kind: max(error[kind] for error in errors) for kind in errors[0]}
            assert max(kinds.values()) < TOLERANCE, (describe(layout), kinds)
            worst_of.append(kinds)
    return worst_of


def describe(layout: Layout):
    """Name a layout in a failure."""
    return (
        f"ep{layout.expert_parallel} etp{layout.expert_tensor_parallel} "
        f"cp{layout.context_parallel} {layout.context_parallel_type} "
        f"dp{layout.data_parallel} tp{layout.tensor_parallel} pp{layout.pipeline_parallel} "
        f"vpp{layout.stages_per_rank} {layout.schedule} zero{layout.zero_stage}"
        f"/{layout.zero_group} sp={layout.sequence_parallel} m{layout.num_micro_batches} "
        f"{layout.recompute} {layout.recompute_layers} {layout.layers_per_stage}"
    )
