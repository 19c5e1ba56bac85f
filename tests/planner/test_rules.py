"""Legality: the answers of the public threads, what is offered instead, and one source for both."""

from collections import Counter
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from small_worlds import cluster, job, layout, llama_8b, mixtral, model

from costmodels.job import Precision, Target
from costmodels.layout import ContextParallelType, Offload, Recompute, Schedule
from costmodels.layout_table import LayoutTable, table_of
from planner.rules import Case, apply_violations, legal_mask, rules_of, violations
from planner.rules.expressible import expressible_rules


def broken(spec, task, gpus, node=8, **changed):
    """Violations by rule."""
    lay = layout(spec, task, gpus, **changed)
    return {v.rule: v for v in violations(spec, task, cluster(gpus, node), lay)}


def test_28_heads_refuse_tensor_parallel_8_and_offer_1_2_4():
    found = broken(model(), job(), 8, tensor_parallel=8, zero_stage=1)
    heads = found["tensor_parallel_divides_heads"]
    assert heads.given == {"tensor_parallel": 8, "num_attention_heads": 28}
    assert heads.allowed["tensor_parallel"] == (1, 2, 4)
    assert "28" in heads.message
    assert "nearest 4" in heads.message


def test_52_heads_on_3_gpus_leave_tensor_parallel_1_and_a_pipeline():
    spec = model(hidden_size=6656, num_layers=60, num_attention_heads=52, num_kv_heads=52,
                 ffn_hidden_size=17920)  # fmt: skip
    task = job(global_batch_size=48)
    found = broken(spec, task, 3, 3, tensor_parallel=3)
    assert found["tensor_parallel_divides_heads"].allowed["tensor_parallel"] == (1,)
    assert broken(spec, task, 3, 3, pipeline_parallel=3) == {}


def test_a_split_that_drops_layers_is_refused_with_both_counts():
    found = broken(model(num_layers=30), job(target=Target.MEGATRON), 8, pipeline_parallel=4,
                   layers_per_stage=(7, 7, 7, 7))  # fmt: skip
    violation = found["layers_per_stage_sums_to_layers"]
    assert "28" in violation.message
    assert "30" in violation.message
    assert violation.allowed["layers_per_stage"] == ((7, 8, 8, 7),)


def test_an_uneven_split_of_all_layers_is_legal_in_megatron():
    uneven = {"pipeline_parallel": 4, "layers_per_stage": (7, 8, 8, 7)}
    assert broken(model(num_layers=30), job(target=Target.MEGATRON), 8, **uneven) == {}


def test_one_stage_of_7_layers_is_not_the_model_of_30():
    found = broken(model(num_layers=30), job(), 8, layers_per_stage=(7,))
    assert set(found) == {"layers_per_stage_sums_to_layers"}


def test_a_split_of_another_length_names_the_stages():
    found = broken(llama_8b(), job(), 8, pipeline_parallel=4, layers_per_stage=(16, 16))
    violation = found["layers_per_stage_has_every_stage"]
    assert violation.given["num_stages"] == 4
    assert violation.given["partition_stages"] == 2


def test_a_stage_without_layers_is_refused():
    found = broken(llama_8b(), job(), 8, pipeline_parallel=2, layers_per_stage=(32, 0))
    assert set(found) == {"stages_have_layers"}


def test_more_stages_than_layers_are_refused_with_both_counts():
    found = broken(llama_8b(), job(), 64, pipeline_parallel=64)
    violation = found["stages_hold_layers"]
    assert violation.given["num_layers"] == 32
    assert violation.allowed["pipeline_parallel"][-1] == 32


def test_batch_256_on_seven_ranks_of_two_offers_252_and_266():
    found = broken(llama_8b(), job(global_batch_size=256), 7, 7, micro_batch_size=2, zero_stage=3)
    violation = found["batch_is_whole_micro_batches"]
    assert violation.allowed["global_batch_size"] == (252, 266)
    assert "256" in violation.message
    assert "252" in violation.message


def test_micro_batch_3_of_64_offers_the_divisors_of_each_ranks_share():
    found = broken(llama_8b(), job(), 8, micro_batch_size=3)
    assert found["batch_is_whole_micro_batches"].allowed["micro_batch_size"] == (1, 2, 4, 8)


def test_degrees_that_do_not_fill_the_gpus_are_refused_with_both_counts():
    found = broken(llama_8b(), job(), 16, data_parallel=4, tensor_parallel=4, pipeline_parallel=2)
    violation = found["degrees_fill_the_gpus"]
    assert violation.given["degree_product"] == 32
    assert violation.given["gpus"] == 16
    assert violation.allowed["data_parallel"] == (2,)


def test_twelve_gpus_do_not_fill_nodes_of_eight():
    found = broken(llama_8b(), job(global_batch_size=48), 12, data_parallel=3, tensor_parallel=4)
    assert found["gpus_fill_whole_nodes"].allowed["gpus"] == (8, 16)
    assert broken(llama_8b(), job(global_batch_size=48), 6, tensor_parallel=2) == {}


def test_torch_refuses_fewer_micro_batches_than_stages_and_the_native_runtime_does_not():
    few = {"pipeline_parallel": 8, "schedule": Schedule.ONE_F_ONE_B}
    found = broken(llama_8b(), job(global_batch_size=4, target=Target.TORCHTITAN), 8, **few)
    assert set(found) == {"micro_batches_fill_the_pipeline"}
    assert found["micro_batches_fill_the_pipeline"].given["num_micro_batches"] == 4
    assert broken(llama_8b(), job(global_batch_size=8, target=Target.TORCHTITAN), 8, **few) == {}
    assert broken(llama_8b(), job(global_batch_size=4), 8, **few) == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deepspeed_pipeline_allows_zero_1_at_most(stage):
    found = broken(
        llama_8b(), job(target=Target.DEEPSPEED), 8, pipeline_parallel=2, zero_stage=stage
    )
    allowed = found["pipeline_keeps_whole_gradients"].allowed
    assert allowed["zero_stage"] == (0, 1)
    assert allowed["pipeline_parallel"] == (1,)
    assert (
        broken(llama_8b(), job(target=Target.DEEPSPEED), 8, pipeline_parallel=2, zero_stage=1) == {}
    )


def test_megatron_wants_sequence_parallelism_for_experts_only():
    task = job(target=Target.MEGATRON)
    without = {"tensor_parallel": 2, "sequence_parallel": False, "zero_stage": 1}
    found = broken(mixtral(), task, 16, expert_parallel=4, **without)
    assert "sequence" in found["experts_with_tensor_parallel_need_sequence_parallel"].message
    assert found["experts_with_tensor_parallel_need_sequence_parallel"].allowed[
        "sequence_parallel"
    ] == (True,)
    assert broken(llama_8b(), task, 16, **without) == {}
    assert broken(mixtral(), job(), 16, expert_parallel=4, **without) == {}


def test_experts_fold_over_data_and_tensor_ranks_of_a_stage():
    task = job(target=Target.MEGATRON)
    grid = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 8}
    assert broken(mixtral(), task, 16, **grid) == {}
    assert broken(mixtral(), task, 32, **grid) == {}
    found = broken(mixtral(), task, 8, **grid)["experts_fold_into_a_stage"]
    assert found.given["expert_parallel"] == 8
    assert found.allowed["expert_parallel"] == (1, 2, 4)


def test_sequence_is_a_multiple_of_twice_the_ring_times_the_tensor_axis():
    task = {"target": Target.MEGATRON, "global_batch_size": 16}
    odd = broken(llama_8b(), job(seq_len=50341, **task), 8, tensor_parallel=4)
    assert odd["sequence_divides"].given["sequence_multiple"] == 4
    assert odd["sequence_divides"].allowed["seq_len"] == (50340, 50344)
    assert broken(llama_8b(), job(seq_len=50016, **task), 8, tensor_parallel=4) == {}
    assert broken(llama_8b(), job(seq_len=16384, **task), 8, context_parallel=2) == {}
    assert set(broken(llama_8b(), job(seq_len=16386, **task), 8, context_parallel=2)) == {
        "sequence_divides"
    }
    both = broken(llama_8b(), job(seq_len=16392, **task), 8, context_parallel=2, tensor_parallel=4)
    assert both["sequence_divides"].given["sequence_multiple"] == 16


def test_an_odd_sequence_is_legal_where_nothing_splits_it():
    assert broken(llama_8b(), job(seq_len=50341), 8) == {}


def test_ulysses_needs_heads_for_every_rank():
    deepspeed = job(target=Target.DEEPSPEED)
    kind = {"context_parallel_type": ContextParallelType.ULYSSES}
    assert broken(llama_8b(), deepspeed, 8, context_parallel=8, **kind) == {}
    assert "ulysses_divides_heads" in broken(model(), deepspeed, 8, context_parallel=8, **kind)


def test_key_value_heads_divide_for_native_and_may_be_copied_for_megatron():
    wide = llama_8b(num_kv_heads=4)
    assert set(broken(wide, job(), 8, tensor_parallel=8)) == {"tensor_parallel_divides_kv_heads"}
    assert broken(wide, job(target=Target.MEGATRON), 8, tensor_parallel=8) == {}
    six = llama_8b(num_attention_heads=24, num_kv_heads=6)
    assert set(broken(six, job(target=Target.MEGATRON), 8, tensor_parallel=4)) == {
        "tensor_parallel_fits_kv_heads"
    }


@pytest.mark.parametrize("schedule", [Schedule.ZERO_BUBBLE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_native_cuts_no_expert_gradients_between_halves_of_a_backward(schedule, zero_stage):
    changed = {"pipeline_parallel": 2, "schedule": schedule, "zero_stage": zero_stage}
    found = set(broken(mixtral(), job(), 16, **changed))
    splits = schedule is Schedule.ZERO_BUBBLE
    assert found == ({"expert_gradients_are_cut_at_once"} if splits and zero_stage > 1 else set())
    assert broken(llama_8b(), job(), 16, **changed) == {}


@pytest.mark.parametrize(
    ("target", "changed", "rule"),
    [
        (
            Target.MEGATRON,
            {"pipeline_parallel": 2, "schedule": Schedule.GPIPE},
            "target_has_schedule",
        ),
        (
            Target.MEGATRON,
            {"zero_stage": 3, "pipeline_parallel": 2},
            "sharded_gradients_exclude_a_pipeline",
        ),
        (
            Target.MEGATRON,
            {"zero_stage": 3, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
            "parameters_stay_on_the_device",
        ),
        (
            Target.MEGATRON,
            {"offload": (Offload.ACTIVATIONS,), "recompute": Recompute.FULL},
            "activation_offload_excludes_pipeline_and_recompute",
        ),
        (Target.TORCHTITAN, {"zero_stage": 1}, "optimizer_states_shard_with_parameters"),
        (
            Target.TORCHTITAN,
            {"context_parallel": 2, "context_parallel_type": ContextParallelType.ULYSSES},
            "target_has_context_parallel_type",
        ),
        (
            Target.TORCHTITAN,
            {"pipeline_parallel": 2, "schedule": Schedule.ZERO_BUBBLE},
            "zero_bubble_needs_stages",
        ),
        (
            Target.TORCHTITAN,
            {"zero_stage": 3, "offload": (Offload.OPTIMIZER,)},
            "offload_is_of_all_states",
        ),
        (Target.DEEPSPEED, {"context_parallel": 2}, "target_has_context_parallel_type"),
        (Target.DEEPSPEED, {"offload": (Offload.OPTIMIZER,)}, "offloaded_optimizer_is_sharded"),
        (
            Target.DEEPSPEED,
            {"offload": (Offload.ACTIVATIONS,)},
            "offloaded_activations_are_checkpoints",
        ),
        (Target.NANOTRON, {"zero_stage": 3}, "zero_stage_is_0_or_1"),
        (Target.NANOTRON, {"recompute": Recompute.SELECTIVE}, "recompute_is_whole_layers"),
        (Target.NANOTRON, {"offload": (Offload.OPTIMIZER,)}, "nothing_is_offloaded"),
        (Target.ACCELERATE, {"pipeline_parallel": 2}, "no_pipeline"),
        (Target.ACCELERATE, {"offload": (Offload.OPTIMIZER,)}, "offloaded_optimizer_is_sharded"),
        (Target.ACCELERATE, {"tensor_parallel": 2}, "axes_beside_data_parallelism_need_shards"),
        (
            Target.ACCELERATE,
            {"zero_stage": 3, "zero_group": 1, "tensor_parallel": 2},
            "axes_beside_data_parallelism_need_shards",
        ),
        (
            Target.ACCELERATE,
            {"zero_stage": 1, "context_parallel": 2},
            "context_parallel_needs_fsdp",
        ),
        (
            Target.NATIVE,
            {"zero_stage": 1, "offload": (Offload.OPTIMIZER, Offload.PARAMETERS)},
            "offloaded_parameters_are_sharded",
        ),
        (Target.NATIVE, {"zero_group": 3}, "zero_group_divides_ranks"),
        (Target.NATIVE, {"schedule": Schedule.ZBV, "stages_per_rank": 2}, "pipeline_of_schedule"),
        (
            Target.NATIVE,
            {"pipeline_parallel": 2, "schedule": Schedule.INTERLEAVED},
            "stages_per_rank_of_schedule",
        ),
        (Target.NATIVE, {"expert_parallel": 2}, "expert_parallel_divides_experts"),
        (Target.NATIVE, {"recompute_layers": 2}, "recompute_layers_fit"),
    ],
)
def test_each_target_refuses_what_its_runtime_refuses(target, changed, rule):
    assert set(broken(llama_8b(), job(target=target), 8, **changed)) == {rule}


def test_interleaving_in_megatron_needs_full_rounds():
    task = {"global_batch_size": 6, "target": Target.MEGATRON}
    grid = {"pipeline_parallel": 4, "stages_per_rank": 2, "schedule": Schedule.INTERLEAVED}
    found = broken(llama_8b(), job(**task), 4, 4, **grid)
    assert set(found) == {"interleaved_rounds_are_full"}
    assert broken(llama_8b(), job(**(task | {"global_batch_size": 8})), 4, 4, **grid) == {}


@pytest.mark.parametrize(
    "target", [Target.MEGATRON, Target.TORCHTITAN, Target.ACCELERATE, Target.NANOTRON]
)
def test_context_parallelism_needs_a_fused_kernel(target):
    zero = 1 if target in (Target.MEGATRON, Target.NANOTRON) else 3
    asked = {"context_parallel": 2, "zero_stage": zero}
    unfused = broken(llama_8b(), job(target=target, flash_attention=False), 8, **asked)
    assert set(unfused) == {"context_parallel_needs_fused_attention"}
    assert unfused["context_parallel_needs_fused_attention"].allowed["context_parallel"] == (1,)
    assert broken(llama_8b(), job(target=target), 8, **asked) == {}


def test_experts_do_not_train_in_fp16_in_megatron():
    half = job(target=Target.MEGATRON, precision=Precision.FP16)
    found = broken(mixtral(), half, 8, expert_parallel=8, zero_stage=1)
    assert "bf16" in found["expert_parallel_excludes_fp16"].allowed["precision"]
    assert "expert_parallel_excludes_fp16" not in broken(mixtral(), half, 8, zero_stage=1)


def test_a_precision_that_the_part_lacks_is_refused_with_those_it_has():
    found = broken(llama_8b(), job(precision=Precision.FP16), 8)
    assert found["precision_supported"].allowed["precision"] == ("bf16", "fp32", "fp8")


def test_fp8_wants_dimensions_of_sixteen_on_every_rank():
    spec = llama_8b(ffn_hidden_size=14344)  # 8 x 1793: tp 1 leaves 14344 = 16 x 896 + 8
    assert "low_precision_blocks_divide" in broken(spec, job(precision=Precision.FP8), 8)
    assert broken(llama_8b(), job(precision=Precision.FP8), 8) == {}


@pytest.mark.parametrize(("target", "block"), [(Target.MEGATRON, 8), (Target.TORCHTITAN, 16)])
def test_fp8_wants_tokens_in_the_blocks_of_its_kernels(target, block):
    asked = {"zero_stage": 1 if target is Target.MEGATRON else 3, "micro_batch_size": 1}
    whole = job(target=target, precision=Precision.FP8, seq_len=1024 - 16 + block)
    assert broken(llama_8b(), whole, 8, **asked) == {}
    odd = replace(whole, seq_len=whole.seq_len + block // 2)
    found = broken(llama_8b(), odd, 8, **asked)
    message = found["low_precision_blocks_divide_tokens"].message
    assert f"multiples of {block};" in message
    assert str(odd.seq_len) in message
    assert 2 in found["low_precision_blocks_divide_tokens"].allowed["micro_batch_size"]


def test_degrees_below_one_are_named_and_nothing_else_is():
    lay = layout(llama_8b(), job(), 8, micro_batch_size=1)
    wrong = lay.__class__(
        **{f.name: getattr(lay, f.name) for f in fields(lay)} | {"micro_batch_size": 0}
    )
    found = violations(llama_8b(), job(), cluster(8), wrong)
    assert [v.rule for v in found] == ["degrees_are_positive"]
    assert "micro_batch_size" in found[0].message


def test_allowed_values_are_exactly_those_that_make_the_layout_legal():
    """Every offered tensor degree is legal, and every other divisor of the GPUs is not."""
    task = job(global_batch_size=48)
    offered = broken(model(), task, 8, tensor_parallel=8)["tensor_parallel_divides_heads"].allowed
    legal = [t for t in (1, 2, 4, 8) if not broken(model(), task, 8, tensor_parallel=t)]
    assert list(offered["tensor_parallel"]) == legal


def grid_of_layouts(spec, task):
    degrees = product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (0, 1, 2, 3), (1, 2), tuple(Schedule))
    for tp, pp, cp, vpp, zero, mbs, schedule in degrees:
        yield layout(
            spec, task, 16, tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp,
            stages_per_rank=vpp, zero_stage=zero, micro_batch_size=mbs, schedule=schedule,
        )  # fmt: skip


@pytest.mark.parametrize("target", list(Target))
def test_one_layout_and_a_table_of_many_are_judged_alike(target):
    spec, task = mixtral(), job(target=target, global_batch_size=32)
    layouts = list(grid_of_layouts(spec, task))
    legal, rejected = legal_mask(spec, task, cluster(16), table_of(layouts))
    alone = [violations(spec, task, cluster(16), lay) for lay in layouts]
    assert legal.tolist() == [not found for found in alone]
    assert rejected == dict(Counter(found[0].rule for found in alone if found))
    assert 0 < legal.sum() < len(layouts)


class Watched:
    """A table that notes which columns are read."""

    def __init__(self, table):
        self.table, self.seen = table, set()

    def __getattr__(self, name):
        if name in {f.name for f in fields(LayoutTable)}:
            self.seen.add(name)
        return getattr(self.table, name)

    def __len__(self):
        return len(self.table)


@pytest.mark.parametrize("target", list(Target))
def test_rules_read_the_columns_that_they_declare_and_no_others(target):
    task = job(target=target, precision=Precision.FP8)
    table = table_of(grid_of_layouts(mixtral(), task))
    for rule in (*rules_of(target), *expressible_rules(target)):
        watched = Watched(table)
        rule.holds(Case(model=mixtral(), job=task, cluster=cluster(16), table=watched))
        assert watched.seen - {"rank_orders"} <= set(rule.reads), rule.name


@pytest.mark.parametrize("target", list(Target))
def test_every_rule_names_itself_once_and_says_something(target):
    names = [rule.name for rule in rules_of(target)]
    assert len(names) == len(set(names))
    assert all(rule.says for rule in rules_of(target))


def test_the_native_runtime_says_what_it_does_not_run_yet():
    task = job()
    plain = layout(llama_8b(), task, 8, tensor_parallel=2, pipeline_parallel=2, zero_stage=3)
    assert apply_violations(llama_8b(), task, cluster(8), plain) == ()
    ring = layout(llama_8b(), task, 8, context_parallel=2)
    assert apply_violations(llama_8b(), task, cluster(8), ring) == ()
    unfused = job(flash_attention=False)  # whose kernel returns nothing to merge by
    found = apply_violations(llama_8b(), unfused, cluster(8), ring)
    assert [v.rule for v in found] == ["merged_attention_is_flash"]
    assert 1 in found[0].allowed["context_parallel"]
    assert found[0].allowed["context_parallel_type"] == ("ulysses",)
    assert violations(llama_8b(), unfused, cluster(8), ring) == ()
    ulysses = replace(ring, context_parallel_type=ContextParallelType.ULYSSES)
    assert apply_violations(llama_8b(), unfused, cluster(8), ulysses) == ()


def test_masks_are_booleans_of_the_tables_length():
    table = table_of(grid_of_layouts(mixtral(), job()))
    case = Case(model=mixtral(), job=job(), cluster=cluster(16), table=table)
    for target in Target:
        for rule in rules_of(target):
            mask = rule.holds(case)
            assert mask.shape == (len(table),), rule.name
            assert mask.dtype == np.bool_, rule.name
