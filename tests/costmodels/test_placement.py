"""Groups of ranks on the tiers, by hand and by walking over ranks."""

from itertools import product

import pytest

from costmodels.hardware import make_cluster
from costmodels.layout import Layout
from costmodels.profiles.reader import read_profile
from costmodels.time.placement import place

H100 = read_profile("h100-sxm-80gb")
GB200 = read_profile("gb200-nvl72")


def layout(**degrees):
    return Layout(layers_per_stage=(1,) * degrees.get("pipeline_parallel", 1), **degrees)


def tiers(name, cluster, **degrees):
    found = getattr(place(layout(**degrees), cluster), name)
    return int(found.inner[0]), int(found.outer[0])


def test_tensor_ranks_sit_next_to_each_other():
    cluster = make_cluster(H100, 64)
    assert tiers("tensor", cluster, tensor_parallel=8, data_parallel=8) == (8, 1)


def test_data_ranks_behind_a_full_node_of_tensor_ranks_each_sit_alone():
    cluster = make_cluster(H100, 64)
    assert tiers("data", cluster, tensor_parallel=8, data_parallel=8) == (1, 8)


def test_data_ranks_share_nodes_where_tensor_ranks_leave_room():
    cluster = make_cluster(H100, 64)
    assert tiers("data", cluster, tensor_parallel=2, data_parallel=32) == (4, 8)


def test_tensor_ranks_beyond_a_node_cross_the_network():
    cluster = make_cluster(H100, 32)
    assert tiers("tensor", cluster, tensor_parallel=16, data_parallel=2) == (8, 2)


def test_an_nvlink_domain_spans_hosts():
    cluster = make_cluster(GB200, 64)
    assert tiers("tensor", cluster, tensor_parallel=16, data_parallel=4) == (16, 1)


def test_experts_fold_over_tensor_and_data():
    cluster = make_cluster(H100, 64)
    degrees = {"tensor_parallel": 2, "data_parallel": 32, "expert_parallel": 16}
    assert tiers("expert", cluster, **degrees) == (8, 2)
    assert tiers("expert_data", cluster, **degrees) == (1, 4)


def test_zero_groups_of_a_node_leave_copies_across_nodes():
    cluster = make_cluster(H100, 64)
    degrees = {"data_parallel": 64, "zero_stage": 3, "zero_group": 8}
    assert tiers("zero", cluster, **degrees) == (8, 1)
    assert tiers("replica", cluster, **degrees) == (1, 8)


def test_a_pipeline_fills_one_node_after_another():
    near = make_cluster(H100, 8)
    assert tiers("pipeline", near, pipeline_parallel=8) == (8, 1)
    far = make_cluster(H100, 16)
    assert tiers("pipeline", far, pipeline_parallel=16) == (8, 2)
    assert tiers("pipeline", far, pipeline_parallel=2, data_parallel=8) == (1, 2)


def _walked(cluster, degrees, order, axis):
    """Ranks of the group of rank 0 along an axis, counted per domain."""
    names = {
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "dp": "data_parallel",
        "pp": "pipeline_parallel",
    }
    sizes = {a: degrees.get(names[a], 1) for a in order}
    domains = []
    for place_of in product(*(range(sizes[a]) for a in reversed(order))):
        at = dict(zip(reversed(order), place_of, strict=True))
        if any(at[a] for a in order if a != axis):
            continue
        rank, stride = 0, 1
        for a in order:
            rank += at[a] * stride
            stride *= sizes[a]
        domains.append(rank // cluster.scale_up_size)
    return max(map(domains.count, domains)), len(set(domains))


@pytest.mark.parametrize(
    "order", [("tp", "cp", "dp", "pp"), ("tp", "pp", "dp", "cp"), ("dp", "tp", "cp", "pp")]
)
@pytest.mark.parametrize("sizes", [(2, 2, 4, 4), (4, 1, 8, 2), (8, 2, 2, 2), (1, 4, 16, 1)])
def test_placement_equals_walking_over_the_ranks(order, sizes):
    cluster = make_cluster(H100, 64)
    names = ("tensor_parallel", "context_parallel", "data_parallel", "pipeline_parallel")
    degrees = dict(zip(names, sizes, strict=True))
    placed = place(layout(rank_order=order, **degrees), cluster)
    for axis, name in (("tp", "tensor"), ("cp", "context")):
        found = getattr(placed, name)
        assert (int(found.inner[0]), int(found.outer[0])) == _walked(cluster, degrees, order, axis)
