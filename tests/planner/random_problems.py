"""Small random search problems, and a twin that answers them by trying everything.

The twin shares no code with the search: it writes out every layout by nested loops, every split
of the layers by cutting, and ranks by `judge`'s full value and memory.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise, product
from math import ceil

from costmodels.hardware import Cluster, make_cluster
from costmodels.job import Optimizer, Target, TrainingJob
from costmodels.layout import ContextParallelType, Layout, Offload, Recompute, Schedule
from costmodels.layout_table import table_of
from costmodels.memory.estimate import estimate_memory
from costmodels.model import MixtureOfExperts, ModelSpec
from costmodels.parameters import model_flops_per_token
from costmodels.profiles.reader import read_profile
from planner.constraints import Constraints
from planner.judge import Judgement, Verdict, judge, memory_verdict
from planner.rules import legal_mask

ORDERS = (
    ("tp", "cp", "dp", "pp"),
    ("tp", "cp", "pp", "dp"),
    ("tp", "dp", "cp", "pp"),
    ("tp", "dp", "pp", "cp"),
    ("tp", "pp", "cp", "dp"),
    ("tp", "pp", "dp", "cp"),
)


@dataclass(frozen=True)
class Problem:
    model: ModelSpec
    job: TrainingJob
    cluster: Cluster
    constraints: Constraints


def random_problem(seed: int) -> Problem:
    """A dense or expert model of few layers on 1 to 8 GPUs, memory from ample to hopeless."""
    rng = random.Random(seed)  # noqa: S311 - problems, not secrets
    gpus = rng.choice([1, 2, 2, 3, 4, 4, 4, 6, 8, 8])
    node = rng.choice([n for n in (1, 2, 3, 4, 8) if gpus % n == 0 and n <= gpus])
    memory = rng.choice([3, 4, 5, 6, 8, 12, 24, 80])
    profile = read_profile("h100-sxm-80gb", (f"device.memory_gib={memory}",))
    offload: tuple[tuple[Offload, ...], ...] = rng.choice(
        [((),), ((),), ((), (Offload.OPTIMIZER,)), ((Offload.OPTIMIZER, Offload.PARAMETERS), ())]
    )
    two = lambda *choices: tuple(rng.sample(choices, 2))  # noqa: E731
    constraints = Constraints(
        context_parallel=rng.choice([(1,), (1,), (1, 2), None]),
        context_parallel_type=(rng.choice(list(ContextParallelType)),),
        sequence_parallel=rng.choice([(True,), (True,), (False,), (True, False)]),
        expert_tensor_parallel=rng.choice([(1,), (1,), (1, 2)]),
        micro_batch_size=rng.choice([(1,), (1,), (1, 2), (2,)]),
        zero_stage=rng.choice([(0,), (1,), (2,), (3,), two(0, 1, 2, 3)]),
        schedule=two(*Schedule),
        stages_per_rank=rng.choice([None, (1,), (1, 2), (1, 2, 3)]),
        recompute=rng.choice([(Recompute.FULL,), (Recompute.NONE,), two(*Recompute)]),
        rank_order=rng.choice([None, (ORDERS[0],), (ORDERS[0],), (ORDERS[0], ORDERS[4])]),
        offload=offload,
    )
    return Problem(
        model=_model(rng),
        job=TrainingJob(
            seq_len=rng.choice([512, 1024, 2048]),
            global_batch_size=rng.choice([2, 4, 6, 8, 12]),
            target=rng.choice([Target.NATIVE, Target.NATIVE, Target.MEGATRON, Target.TORCHTITAN]),
            optimizer=rng.choice([Optimizer.ADAMW, Optimizer.SGD]),
        ),
        cluster=make_cluster(profile, gpus, node),
        constraints=constraints,
    )


def problem_of_several_stages(seed: int) -> Problem:
    """The same with more layers, a heavy head and several stages on every rank of a pipeline."""
    problem, rng = random_problem(seed), random.Random(-seed)  # noqa: S311 - problems, not secrets
    schedules = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
    return replace(
        problem,
        model=replace(
            problem.model,
            num_layers=rng.choice([8, 10, 12, 12]),
            vocab_size=rng.choice([32000, 128000, 128000]),
        ),
        cluster=make_cluster(problem.cluster.profile, rng.choice([2, 4, 6, 8]), 2),
        constraints=replace(
            problem.constraints,
            schedule=tuple(rng.sample(schedules, 2)),
            stages_per_rank=rng.choice([(2,), (2,), (2, 3)]),
        ),
    )


def _model(rng: random.Random) -> ModelSpec:
    hidden = rng.choice([1024, 2048])
    layers = rng.randint(2, 6)
    moe = None
    if rng.random() < 0.4:
        moe = MixtureOfExperts(
            num_experts=rng.choice([4, 8]),
            experts_per_token=2,
            ffn_hidden_size=hidden,
            shared_ffn_hidden_size=rng.choice([0, hidden]),
            num_dense_layers=rng.randint(0, 2),
        )
    return ModelSpec(
        name="random",
        architecture="mixtral" if moe else "llama",
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=hidden // 128,
        num_kv_heads=rng.choice([2, 4, hidden // 128]),
        head_dim=128,
        ffn_hidden_size=rng.choice([2, 4]) * hidden,
        vocab_size=rng.choice([1000, 32000, 128000]),
        training_seq_len=4096,
        tied_embeddings=rng.random() < 0.3,
        moe=moe,
    )


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut layers into stages of at least one."""
    for inner in combinations(range(1, layers), stages - 1):
        edges = (0, *inner, layers)
        yield tuple(b - a for a, b in pairwise(edges))


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Short stages at the ends, the last first: 7 layers in 4 stages are 2, 2, 2, 1."""
    base, extra = divmod(layers, stages)
    short = stages - extra
    first = short // 2
    last = short - first
    return (base,) * first + (base + 1,) * extra + (base,) * last if extra else (base,) * stages


def lighter(problem: Problem, plain: Layout) -> Iterator[tuple[int, ...]]:
    """Splits whose last stage gives up to three layers, while that saves a hundredth of the work.

    A layer goes to the rank with the fewest, of those to the last, there to the shortest stage but
    the first, of those to the last.
    """
    model, ranks = problem.model, plain.pipeline_parallel
    head = model.vocab_size * model.hidden_size
    layer = (model_flops_per_token(model, 0) / 6 - head) / model.num_layers
    split, own = list(plain.layers_per_stage), plain.rank_of_stage(plain.num_stages - 1)
    slowest = model.num_layers / ranks + head / layer
    for given in range(1, 4):
        if split[-1] < 2:
            return
        held = {
            rank: sum(split[stage] for stage in plain.stages_of_rank(rank))
            for rank in range(ranks)
            if rank != own
        }
        taker = max(rank for rank, layers in held.items() if layers == min(held.values()))
        stages = [stage for stage in plain.stages_of_rank(taker) if stage > 0]
        shortest = min(split[stage] for stage in stages)
        split[max(stage for stage in stages if split[stage] == shortest)] += 1
        split[-1] -= 1
        others = ceil(given / (ranks - 1))
        now = model.num_layers / ranks + max(others, head / layer - given)
        if now > 0.99 * slowest:
            return
        yield tuple(split)
        slowest = now


def splits_of(problem: Problem, plain: Layout) -> Iterator[tuple[int, ...]]:
    """Every split that counts: any with one stage per rank, few with several."""
    if plain.pipeline_parallel > 1 and plain.stages_per_rank == 1:
        yield from cuts(problem.model.num_layers, plain.num_stages)
    else:
        yield plain.layers_per_stage
    if plain.pipeline_parallel > 1 and plain.stages_per_rank > 1:
        yield from lighter(problem, plain)


def _choices(value, free):
    return free if value is None else value


def layouts(problem: Problem) -> Iterator[Layout]:
    """Every layout of the problem's space, legal or not, each under one name."""
    asked, gpus = problem.constraints, problem.cluster.num_gpus
    numbers = range(1, gpus + 1)
    free_stages = asked.stages_per_rank is None
    experts = numbers if problem.model.moe else (1,)
    for tp, pp, cp, mbs, sp, schedule, vpp, zero, order, recompute, offload in product(
        numbers,
        numbers,
        _choices(asked.context_parallel, numbers),
        asked.micro_batch_size,
        asked.sequence_parallel,
        asked.schedule,
        _choices(asked.stages_per_rank, range(1, 13)),
        asked.zero_stage,
        _choices(asked.rank_order, ORDERS),
        _choices(asked.recompute, tuple(Recompute)),
        asked.offload,
    ):
        if gpus % (tp * pp * cp) or (tp == 1 and sp and len(asked.sequence_parallel) == 2):
            continue
        dp = gpus // (tp * pp * cp)
        if dp * cp == 1 and zero != asked.zero_stage[0]:
            continue
        plain = (
            Schedule.ONE_F_ONE_B if Schedule.ONE_F_ONE_B in asked.schedule else asked.schedule[0]
        )
        if pp == 1 and schedule is not plain:
            continue
        layers = problem.model.num_layers
        if pp * vpp > layers or problem.job.global_batch_size % (dp * mbs):
            continue
        uneven = layers % (pp * vpp) != 0 and not (vpp == 2 and layers % pp)
        if free_stages and vpp > 1 and uneven:
            continue
        tiny = cp > 1 and problem.job.seq_len < 256 * cp and asked.context_parallel is None
        if tiny:
            continue
        for ep, etp in product(
            experts, asked.expert_tensor_parallel if problem.model.moe else (1,)
        ):
            kept = _kept(problem, zero, dp * cp, offload)
            for group, keeps in product(_groups(problem, tp, dp, cp, zero), kept):
                yield Layout(
                    data_parallel=dp,
                    tensor_parallel=tp,
                    pipeline_parallel=pp,
                    context_parallel=cp,
                    expert_parallel=ep,
                    expert_tensor_parallel=etp,
                    zero_stage=zero,
                    zero_group=group,
                    keep_gathered=keeps,
                    micro_batch_size=mbs,
                    num_micro_batches=problem.job.global_batch_size // (dp * mbs),
                    stages_per_rank=vpp,
                    schedule=schedule,
                    recompute=recompute,
                    sequence_parallel=sp and tp > 1,
                    context_parallel_type=asked.context_parallel_type[0],
                    offload=offload,
                    layers_per_stage=even(layers, pp * vpp),
                    rank_order=order,
                )


def _kept(problem: Problem, zero: int, ranks: int, offload: tuple[Offload, ...]) -> list[bool]:
    """Keeping is tried where weights are cut and other ranks have them."""
    gathers = zero == 3 and ranks > 1 and Offload.PARAMETERS not in offload
    return [False, True] if gathers and problem.job.target is Target.NATIVE else [False]


def _groups(problem: Problem, tp: int, dp: int, cp: int, zero: int) -> set[int]:
    """The whole data group, or its part inside one node."""
    node = min(problem.cluster.scale_up_size, problem.cluster.num_gpus)
    near = min(max(node // tp, 1), cp)
    inside = near * min(max(node // (tp * cp), 1), dp)
    domain = {inside} if zero and 1 < inside < dp * cp else set()
    return {dp * cp} | domain


def answers(problem: Problem) -> dict[tuple[object, ...], Judgement]:
    """The fastest layout that fits of each distinct kind, by trying all."""
    best: dict[tuple[object, ...], Judgement] = {}
    inputs = (problem.model, problem.job, problem.cluster)
    tried = list(layouts(problem))
    legal, _ = legal_mask(*inputs, table_of(tried))  # the split changes nothing there
    for plain in (plain for plain, obeys in zip(tried, legal, strict=True) if obeys):
        for layout in _fitting(problem, plain):
            said = judge(*inputs, layout)
            assert said.verdict is Verdict.FITS
            key = kind_of(layout)
            if key not in best or seconds(said) < seconds(best[key]):
                best[key] = said
    return best


def _fitting(problem: Problem, plain: Layout) -> Iterator[Layout]:
    """Every split that fits, with the fewest recomputed layers that do."""
    for split in splits_of(problem, plain):
        whole = replace(plain, layers_per_stage=split)
        counts = [*range(1, max(split)), 0] if plain.recompute is Recompute.FULL else [0]
        tried = (replace(whole, recompute_layers=count) for count in counts)
        yield from islice((layout for layout in tried if _fits(problem, layout)), 1)


def _fits(problem: Problem, layout: Layout) -> bool:
    memory = estimate_memory(problem.model, problem.job, problem.cluster, layout)
    return memory_verdict(memory, problem.cluster) is Verdict.FITS


def kind_of(layout: Layout) -> tuple[object, ...]:
    """What makes two layouts different plans."""
    return (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        layout.expert_parallel,
        layout.expert_tensor_parallel,
        layout.micro_batch_size,
        layout.zero_stage,
        layout.schedule,
        layout.stages_per_rank,
    )


def seconds(said: Judgement) -> float:
    assert said.time is not None
    return said.time.step_seconds
