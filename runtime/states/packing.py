"""Which parameters share a bucket, and how ranks share it.

A bucket holds parameters of one stage that are treated alike: cut by the same axes, summed over the
same copies, in the same format.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from costmodels.layout import Layout, Offload
from runtime.communication.mesh import Mesh
from runtime.program import ParameterShard, StageModule
from runtime.states.sharing import Sharing

# Ranks that share gradients, cut a state and own the same piece of it; experts have fewer copies.
DENSE_AXES = ("dp_cp", "zero", "zero_replicas")
EXPERT_AXES = ("edp", "expert_zero", "expert_zero_replicas")

Named = tuple[ParameterShard, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precisions:
    """Number formats of the states.

    Attributes:
        gradients: What gradients are summed and kept in.
        master: What the optimizer updates; the weights' own format means no separate copy.

    """

    gradients: torch.dtype
    master: torch.dtype


def share_by_name(stage: StageModule) -> None:
    """Make units that name the same parameter (tied embeddings) hold the same one.

    Parameters on meta become the stage's own: another stage of this rank may name them too.
    """
    own: dict[str, nn.Parameter] = {}
    for unit in stage.units:
        for name, parameter in list(unit.named_parameters()):
            if name not in own:
                own[name] = nn.Parameter(parameter.detach()) if parameter.is_meta else parameter
            owner, _, leaf = name.rpartition(".")
            setattr(unit.get_submodule(owner), leaf, own[name])


def new_parameters(stage: StageModule) -> Iterable[list[Named]]:
    """Yield each unit's parameters, without those that an earlier unit shares."""
    seen: set[int] = set()
    for unit in stage.units:
        fresh = [(name, p) for name, p in unit.named_parameters() if id(p) not in seen]
        seen.update(id(p) for _, p in fresh)
        yield [(stage.shard(name), p) for name, p in fresh]


def runs(units: Iterable[Sequence[Named]], limit: int) -> list[list[Named]]:
    """Group parameters that may share a bucket, unit by unit, up to a number of bytes."""
    closed: list[list[Named]] = []
    opened: dict[tuple[object, ...], list[Named]] = {}
    for unit in units:
        for shard, parameter in unit:
            sums = (shard.gradient_sum_axes, shard.tied_stages)
            key = (shard.axis, shard.block_axis, *sums, parameter.dtype)
            opened.setdefault(key, []).append((shard, parameter))
        full = [key for key, run in opened.items() if _num_bytes(run) >= limit]
        closed.extend(opened.pop(key) for key in full)
    return closed + list(opened.values())


def _num_bytes(run: Sequence[Named]) -> int:
    return sum(parameter.numel() * parameter.element_size() for _, parameter in run)


def sharing_of(shard: ParameterShard, stage: StageModule, mesh: Mesh) -> Sharing:
    """Return how ranks share the states of a stage's parameter."""
    copies = [mesh.group(axis) for axis in shard.gradient_sum_axes]
    if shard.tied_stages:
        copies.append(mesh.group("ends"))
    axes = DENSE_AXES if shard.block_axis is None else EXPERT_AXES
    data, zero, replicas = (mesh.group(axis) for axis in axes)
    zero_stage = mesh.layout.zero_stage
    cuts = zero_stage > 0 and zero.size > 1
    is_first_copy = (replicas if cuts else data).index == 0
    is_cut = shard.axis is not None or mesh.coordinate("tp") == 0
    is_owner = not shard.tied_stages or stage.index == min(shard.tied_stages)
    return Sharing(
        zero_stage=zero_stage,
        data=data,
        zero=zero,
        replicas=replicas,
        copies=tuple(copies),
        is_counted=is_first_copy and is_cut and is_owner,
        is_owner=is_owner,
        on_host=_on_host(mesh.layout),
    )


def _on_host(layout: Layout) -> frozenset[str]:
    if Offload.PARAMETERS in layout.offload:
        return frozenset({"optimizer", "weights"})
    return frozenset({"optimizer"}) if Offload.OPTIMIZER in layout.offload else frozenset()
