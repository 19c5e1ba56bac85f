"""Values that free axes leave out, and that a flag brings back."""

from dataclasses import replace

from small_worlds import llama_8b

from costmodels.hardware import make_cluster
from costmodels.job import TrainingJob
from costmodels.layout import Offload
from costmodels.profiles.reader import read_profile
from planner.constraints import Constraints
from planner.search.space import legal_table, space_of

MODEL = llama_8b(num_layers=2)
JOB = TrainingJob(seq_len=512, global_batch_size=2)


def offloading(profile, constraints):
    cluster = make_cluster(read_profile(profile), 2, 2)
    table = legal_table(space_of(MODEL, JOB, cluster, constraints))
    return int((table.offload_optimizer > 0).sum())


def test_processors_offload_nothing_to_themselves():
    assert offloading("cpu-gloo", Constraints()) == 0
    assert offloading("h100-sxm-80gb", Constraints()) > 0


def test_a_flag_that_names_offload_brings_it_back():
    assert offloading("cpu-gloo", Constraints(offload=((Offload.OPTIMIZER,),))) > 0


def test_no_stage_is_asked_to_recompute_more_layers_than_it_may_have():
    model, cluster = replace(MODEL, num_layers=8), make_cluster(read_profile("h100-sxm-80gb"), 4, 4)
    job = TrainingJob(seq_len=512, global_batch_size=8)

    def shapes(layers):
        fixed = Constraints(pipeline_parallel=(2, 4), recompute_layers=layers)
        table = legal_table(space_of(model, job, cluster, fixed))
        shape = (table.pipeline_parallel, table.stages_per_rank, table.lighter_last)
        return set(zip(*(column.tolist() for column in shape), strict=True))

    several = {(2, 2, 0), (2, 2, 1), (2, 4, 0), (4, 2, 0)}
    assert shapes(1) == {(2, 1, 0), (4, 1, 0)} | several
    assert shapes(3) == {(2, 1, 0), (4, 1, 0), (2, 2, 1)}  # two layers and the one given up
    assert shapes(6) == {(2, 1, 0)}  # of one stage per rank the others keep a layer each
    assert shapes(8) == set()


def test_rows_that_have_no_split_to_name_are_left_out_without_one():
    """Rules see illegal rows, too: one rank cannot give a layer to another one."""
    fixed = Constraints(pipeline_parallel=(1,), recompute_layers=2)
    table = legal_table(
        space_of(MODEL, JOB, make_cluster(read_profile("h100-sxm-80gb"), 2, 2), fixed)
    )
    assert set(table.lighter_last.tolist()) == {0}
