"""Values that free axes leave out, and that a flag brings back."""

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
