"""Lowered stages give the numbers of the plain module: loss and every gradient, piece by piece."""

from functools import partial

import lowering_models as small
import pytest
import torch

from costmodels.layout import Layout, Recompute
from runtime.launch import run_ranks
from runtime.lower import lower, program_of
from runtime.states.first_values import materialise

TOLERANCE = 1e-5


def run_chain(stages, data):
    """Run a rank's stages one after the other, forward and backward; return the loss."""
    value = None
    for stage in stages:
        value = stage(value, data)
    value.backward()
    return value.detach()


def worst_error(stages, gradients, world, sizes):
    """Return the largest error of a local gradient against its piece of the whole one."""
    worst = 0.0
    for stage in stages:
        seen = {}
        for unit in stage.units:
            seen.update(unit.named_parameters())
        assert {shard.name for shard in stage.parameter_shards} == set(seen)
        for name, parameter in seen.items():
            shard = stage.shard(name)
            gradient = parameter.grad
            for axis in shard.gradient_sum_axes:
                torch.distributed.all_reduce(gradient, group=stage.mesh.group(axis).handle)
            index, count = sizes if shard.axis else (0, 1)
            expected = shard.cut(gradients[name], index, count)
            scale = max(gradients[name].abs().max().item(), 1e-3)
            worst = max(worst, (gradient - expected).abs().max().item() / scale)
    return worst


def tensor_parallel_errors(world, spec, layout, lowered):
    """Return this rank's errors of loss and gradients."""
    mesh = world.mesh(layout)
    model = small.plain_model(spec)
    values, data = small.weights(model), small.batch()
    loss, gradients = small.reference(model, values, data)
    program = program_of(lowered, layout, mesh)
    materialise(program, lambda shard: values[shard.name])
    got = run_chain(program.stages, data)
    sizes = (mesh.coordinate("tp"), mesh.size("tp"))
    error = worst_error(program.stages, gradients, world, sizes)
    return [abs(got - loss).item() / abs(loss).item(), error]


def all_errors(world, cases):
    return [tensor_parallel_errors(world, *case) for case in cases]


def tensor_parallel_cases(degree):
    for spec in small.MODELS.values():
        for sequence_parallel in (False, True):
            layout = Layout(
                tensor_parallel=degree,
                sequence_parallel=sequence_parallel,
                layers_per_stage=(small.NUM_LAYERS,),
            )
            yield spec, layout, small.lowered(spec, small.job(), layout)


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_gives_the_gradients_of_one_process(degree):
    cases = list(tensor_parallel_cases(degree))
    for rank in run_ranks(partial(all_errors, cases=cases), degree, timeout=120):
        for (spec, layout, _), (loss, gradient) in zip(cases, rank, strict=True):
            where = f"{spec.name} tied={spec.tied_embeddings} sp={layout.sequence_parallel}"
            assert loss < TOLERANCE, where
            assert gradient < TOLERANCE, where


FORMS = [
    *((name, Recompute.NONE, True) for name in small.MODELS),
    *(("qwen3", recompute, flash) for recompute in Recompute for flash in (True, False)),
]


@pytest.mark.parametrize(("name", "recompute", "flash"), FORMS)
def test_one_process_equals_the_plain_module(name, recompute, flash):
    spec = small.MODELS[name]
    model = small.plain_model(spec)
    values, data = small.weights(model), small.batch()
    loss, gradients = small.reference(model, values, data)
    layout = Layout(recompute=recompute, layers_per_stage=(small.NUM_LAYERS,))
    program = lower(spec, small.job(flash_attention=flash), layout, small.lone_mesh(layout))
    materialise(program, lambda shard: values[shard.name])
    got = run_chain(program.stages, data)
    assert got.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    assert worst_error(program.stages, gradients, None, (0, 1)) < TOLERANCE


def test_stages_of_all_ranks_together_are_the_model():
    layout = Layout(pipeline_parallel=3, layers_per_stage=(1, 1, 2), num_micro_batches=3)
    spec = small.MODELS["qwen3"]
    model = small.plain_model(spec)
    values, data = small.weights(model), small.batch()
    loss, gradients = small.reference(model, values, data)
    stages = []
    for rank in range(3):
        program = lower(spec, small.job(), layout, small.lone_mesh(layout, {"pp": rank}))
        materialise(program, lambda shard: values[shard.name])
        stages += program.stages
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    got = run_chain(stages, data)
    assert got.item() == pytest.approx(loss.item(), rel=TOLERANCE)
    assert worst_error(stages, gradients, None, (0, 1)) < TOLERANCE
    names = [shard.name for stage in stages for shard in stage.parameter_shards]
    assert sorted(names) == sorted(values)


def test_tied_embeddings_are_on_both_end_stages_and_say_so():
    layout = Layout(pipeline_parallel=2, layers_per_stage=(2, 2), num_micro_batches=2)
    spec = small.MODELS["llama-tied"]
    shards = {}
    for rank in range(2):
        program = lower(spec, small.job(), layout, small.lone_mesh(layout, {"pp": rank}))
        shards[rank] = {s.name: s.tied_stages for s in program.stages[0].parameter_shards}
    assert shards[0]["model.embed_tokens.weight"] == (0, 1)
    assert shards[1]["model.embed_tokens.weight"] == (0, 1)
    assert {ties for name, ties in shards[1].items() if "embed" not in name} == {()}


def test_batch_and_length_stay_free_after_lowering():
    layout = Layout(layers_per_stage=(small.NUM_LAYERS,))
    spec = small.MODELS["llama"]
    program = lower(spec, small.job(), layout, small.lone_mesh(layout))
    values = small.weights(small.plain_model(spec))
    materialise(program, lambda shard: values[shard.name])
    whole = small.batch(size=5)
    halves = [{k: v[:, :9] for k, v in whole.items()}, {k: v[:3] for k, v in whole.items()}]
    losses = [program.stages[0](None, part).item() for part in halves]
    assert losses[0] != losses[1]
    assert program.stages[0].boundary_shape(5, 9) == (5, 9, 32)
