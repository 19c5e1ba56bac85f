"""The space: its size, what each rule takes from it, and nothing else."""

from collections import Counter
from itertools import product
from math import prod

import pytest
from small_worlds import cluster, job, layout, llama_8b, mixtral, model

from costmodels.job import Target
from costmodels.layout import Offload, Recompute, Schedule
from costmodels.layout_table import SCHEDULES
from planner.constraints import Constraints
from planner.rules import violations
from planner.rules.allowed import divisors
from planner.rules.native import RUNTIME_RULES
from planner.rules.rule import Case
from planner.search.axes import MOST_STAGES_PER_RANK, RANK_ORDERS
from planner.search.space import census, legal_table, root, space_of, unfold


def keys(table):
    """What tells layouts apart, per row."""
    names = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel",
             "expert_parallel", "expert_tensor_parallel", "zero_stage", "keep_gathered",
             "zero_group", "micro_batch_size", "num_micro_batches", "stages_per_rank",
             "lighter_last", "schedule", "recompute", "sequence_parallel", "context_parallel_type",
             "offload_optimizer", "offload_parameters", "offload_activations",
             "rank_order")  # fmt: skip
    return list(zip(*(getattr(table, name).tolist() for name in names), strict=True))


def test_divisors_are_all_of_them():
    assert divisors(48) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    assert divisors(7) == (1, 7)
    assert divisors(1) == (1,)


@pytest.mark.parametrize("gpus", [1, 6, 8])
@pytest.mark.parametrize("spec", [llama_8b(num_layers=6), mixtral(num_layers=6)])
def test_rules_and_legal_layouts_add_up_to_the_product(gpus, spec):
    space = space_of(spec, job(seq_len=1024, global_batch_size=12), cluster(gpus, gpus))
    counted = census(space)
    assert counted.num_layouts == prod(len(axis) for axis in space.axes.axes)
    assert counted.num_legal + sum(counted.rejected.values()) == counted.num_layouts
    assert counted.num_legal == len(legal_table(space))


def test_the_product_of_a_dense_model_on_8_gpus_by_hand():
    space = space_of(llama_8b(), job(), cluster(8))
    degrees = 4**3  # tp, pp, cp
    batch = len(divisors(64))
    states = 5  # ZeRO 0 to 3, and 3 once more where gathered weights are kept
    choices = 2 * 3 * len(Schedule) * MOST_STAGES_PER_RANK * len(RANK_ORDERS) * states * 2
    ends = 3  # the head weighs two and a half layers: the last stage may give up two
    assert space.num_layouts == degrees * batch * choices * len(Recompute) * 3 * ends


def test_every_legal_layout_obeys_the_targets_rules():
    spec, task = mixtral(num_layers=4), job(seq_len=512, global_batch_size=4)
    space = space_of(spec, task, cluster(4, 4), Constraints(offload=((),)))
    table = legal_table(space)
    for row in range(0, len(table), 17):
        stages = int(table.pipeline_parallel[row] * table.stages_per_rank[row])
        even = layout(spec, task, 4, pipeline_parallel=stages).layers_per_stage
        assert violations(spec, task, cluster(4, 4), table.layout(row, even, 0)) == ()


def test_no_two_legal_layouts_are_the_same():
    table = legal_table(space_of(llama_8b(num_layers=8), job(global_batch_size=8), cluster(8)))
    assert max(Counter(keys(table)).values()) == 1


def test_a_plain_enumeration_finds_the_same_layouts():
    """Degrees, schedule and ZeRO by nested loops and `violations`, against the unfolded space."""
    spec, task = llama_8b(num_layers=4), job(seq_len=512, global_batch_size=4)
    fixed = Constraints(
        sequence_parallel=(True,), recompute=(Recompute.NONE,), offload=((),),
        rank_order=(RANK_ORDERS[0],), context_parallel=(1,),
    )  # fmt: skip
    table = legal_table(space_of(spec, task, cluster(4, 4), fixed))
    expected = set()
    for tp, pp, mbs, schedule, vpp, zero in product(
        (1, 2, 4), (1, 2, 4), (1, 2, 4), Schedule, range(1, 5), range(4)
    ):
        if tp * pp > 4:
            continue
        lay = layout(spec, task, 4, tensor_parallel=tp, pipeline_parallel=pp, zero_stage=zero,
                     micro_batch_size=mbs, schedule=schedule, stages_per_rank=vpp)  # fmt: skip
        named_once = (pp > 1 or schedule is Schedule.ONE_F_ONE_B) and (
            lay.data_parallel > 1 or zero == 0
        )
        if named_once and not violations(spec, task, cluster(4, 4), lay):
            expected.add((tp, pp, mbs, SCHEDULES.index(schedule), vpp, zero))
    found = zip(
        table.tensor_parallel.tolist(), table.pipeline_parallel.tolist(),
        table.micro_batch_size.tolist(), table.schedule.tolist(),
        table.stages_per_rank.tolist(), table.zero_stage.tolist(), strict=True,
    )  # fmt: skip
    assert set(found) == expected


def test_degrees_that_are_no_powers_of_two_are_there():
    table = legal_table(
        space_of(model(), job(global_batch_size=48), cluster(24, 8), Constraints(offload=((),)))
    )
    assert {1, 3, 6, 12, 24} <= set(table.data_parallel.tolist())
    assert {3, 6} <= set(table.pipeline_parallel.tolist())


def test_the_batch_is_never_changed():
    table = legal_table(space_of(llama_8b(), job(global_batch_size=24), cluster(8)))
    product_of_row = table.data_parallel * table.micro_batch_size * table.num_micro_batches
    assert set(product_of_row.tolist()) == {24}


def test_a_batch_of_2_to_the_30_is_counted():
    space = space_of(llama_8b(num_layers=4), job(global_batch_size=2**30), cluster(2, 2))
    counted = census(space)
    assert counted.num_legal == len(legal_table(space)) > 0
    assert counted.num_legal + sum(counted.rejected.values()) == counted.num_layouts


def test_constraints_narrow_the_space_and_only_that():
    spec, task, machine = llama_8b(num_layers=8), job(global_batch_size=8), cluster(8)
    everything = legal_table(space_of(spec, task, machine))
    narrowed = legal_table(
        space_of(spec, task, machine, Constraints(tensor_parallel=(2, 4), zero_stage=(1,)))
    )
    wanted = [
        key
        for key, tp, zero, shards in zip(
            keys(everything),
            everything.tensor_parallel.tolist(),
            everything.zero_stage.tolist(),
            (everything.data_parallel * everything.context_parallel).tolist(),
            strict=True,
        )
        if tp in (2, 4) and (zero == 1 or (zero == 0 and shards == 1))
    ]
    # Where there is nothing to shard, zero 1 is the name that the constraint leaves.
    assert len(narrowed) == len(wanted)
    assert set(narrowed.tensor_parallel.tolist()) == {2, 4}
    assert set(narrowed.zero_stage.tolist()) == {1}


def test_a_constrained_degree_that_is_illegal_leaves_nothing_and_says_why():
    space = space_of(model(), job(), cluster(8), Constraints(tensor_parallel=(8,)))
    counted = census(space)
    assert counted.num_legal == 0
    assert counted.rejected == {"tensor_parallel_divides_heads": counted.num_layouts}


def test_data_parallel_constraints_hold():
    task = job()
    table = legal_table(space_of(llama_8b(), task, cluster(8), Constraints(data_parallel=(2,))))
    assert set(table.data_parallel.tolist()) == {2}


def test_stating_a_value_lifts_the_convention_on_its_axis():
    free = legal_table(space_of(llama_8b(), job(), cluster(8)))
    assert 3 not in free.stages_per_rank  # 32 layers do not spread over 2 x 3 stages evenly
    stated = Constraints(stages_per_rank=(3,), pipeline_parallel=(2,))
    assert len(legal_table(space_of(llama_8b(), job(), cluster(8), stated))) > 0


def test_parameters_are_offloaded_with_the_optimizer_and_zero_3_only():
    table = legal_table(space_of(llama_8b(), job(), cluster(8)))
    offloaded = table.offload_parameters == 1
    assert offloaded.any()
    assert (table.offload_optimizer[offloaded] == 1).all()
    assert (table.zero_stage[offloaded] == 3).all()


def test_zero_groups_are_the_whole_or_one_nvlink_domain():
    table = legal_table(space_of(llama_8b(), job(), cluster(16), Constraints(offload=((),))))
    pure_data = (table.data_parallel == 16) & (table.zero_stage == 3)
    assert set(table.zero_group[pure_data].tolist()) == {8, 16}


def test_rank_orders_with_one_placement_have_one_name():
    inside = legal_table(space_of(llama_8b(), job(), cluster(8)))
    assert set(inside.rank_order.tolist()) == {0}  # one node: every order is the same
    across = legal_table(
        space_of(llama_8b(), job(), cluster(16), Constraints(offload=((),), context_parallel=(1,)))
    )
    whole_node = (across.tensor_parallel == 8) & (across.pipeline_parallel == 2)
    assert set(across.rank_order[whole_node].tolist()) == {0}
    split = (across.tensor_parallel == 4) & (across.pipeline_parallel == 2)
    assert len(set(across.rank_order[split].tolist())) == 2  # dp or pp shares the node


def test_runnable_layouts_need_nothing_that_the_native_runtime_lacks():
    unfused = job(flash_attention=False)
    everything = legal_table(space_of(mixtral(), unfused, cluster(8), Constraints()))
    runnable = legal_table(space_of(mixtral(), unfused, cluster(8), Constraints(runnable=True)))
    case = Case(model=mixtral(), job=unfused, cluster=cluster(8), table=runnable)
    assert all(rule.holds(case).all() for rule in RUNTIME_RULES)
    assert 0 < len(runnable) < len(everything)


def test_experts_may_ask_for_tokens():
    asked = Constraints(min_tokens_per_expert=4096)
    table = legal_table(space_of(mixtral(), job(seq_len=4096), cluster(8), asked))
    tokens = (
        table.micro_batch_size * 4096 // table.context_parallel * table.expert_parallel * 2 // 8
    )
    assert len(table) > 0
    assert tokens.min() >= 4096


def test_unfolding_in_steps_is_unfolding_at_once():
    space = space_of(llama_8b(num_layers=4), job(global_batch_size=4), cluster(4, 4))
    half = unfold(space, root(space), "schedule")
    assert keys(unfold(space, half, "offload").table) == keys(legal_table(space))


def test_targets_differ_in_their_spaces():
    schedules = {}
    for target in (Target.NATIVE, Target.MEGATRON, Target.DEEPSPEED):
        table = legal_table(space_of(llama_8b(num_layers=8), job(target=target), cluster(4, 4)))
        schedules[target] = {SCHEDULES[code] for code in set(table.schedule.tolist())}
    assert schedules[Target.DEEPSPEED] == {Schedule.ONE_F_ONE_B}
    assert schedules[Target.MEGATRON] == {Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED}
    assert schedules[Target.NATIVE] == set(Schedule)


def test_a_memory_fraction_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="max_memory_fraction"):
        Constraints(max_memory_fraction=1.5)


def test_offload_constraints_are_combinations():
    both = (Offload.OPTIMIZER, Offload.PARAMETERS)
    table = legal_table(space_of(llama_8b(), job(), cluster(8), Constraints(offload=(both,))))
    assert set(table.offload_parameters.tolist()) == {1}
