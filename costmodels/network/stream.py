"""Ops on the residual stream: norms, sums, and the edges of tensor-parallel regions.

Bytes are counted from what each kernel reads and writes, for 16-bit activations; shapes are those
of one rank under a Shard. Sources of the regions' collectives: see `workload`.
"""

from costmodels.job import Precision, Target, TrainingJob
from costmodels.network.ops import HALF, Collective, MemoryPass, Op, Size
from costmodels.network.shard import Shard

# Bytes per element of a norm, forward and backward: one kernel that reads and writes 16 bits; or
# cast, square, mean, scale, cast, weight as kernels of their own on fp32 copies. Kind: chosen.
_NORM_BYTES = {True: (4, 6), False: (34, 56)}
_NORM_KERNELS = {True: (1, 2), False: (6, 12)}
# In fp32 nothing is cast: 5 and 19 accesses of 4 bytes (runtime/ops/norm.py, counted by hand).
_WIDE_NORM_BYTES = (20, 76)


def norm(job: TrainingJob, name: str, elements: Size) -> MemoryPass:
    """Normalise: one fused kernel, or the chain of kernels that plain PyTorch runs."""
    fused = job.switches.fused_norm
    is_wide = job.precision is Precision.FP32 and not fused
    forward, backward = _WIDE_NORM_BYTES if is_wide else _NORM_BYTES[fused]
    forward_kernels, backward_kernels = _NORM_KERNELS[fused]
    return MemoryPass(
        name=name,
        module="layernorm",
        forward=forward * elements,
        backward=backward * elements,
        forward_kernels=forward_kernels,
        backward_kernels=backward_kernels,
        follows_precision=not is_wide,
    )


def sum_branches(job: TrainingJob, shard: Shard, name: str, hidden: int, count: int) -> list[Op]:
    """Sum the gradients of `count` products that read one tensor; fused products have only one.

    Our graph keeps the projections of queries, keys and values, and gate and up, apart.
    """
    if job.target is not Target.NATIVE or count == 1:
        return []
    return [
        MemoryPass(
            name=name,
            module="residual",
            forward=0,
            backward=(count - 1) * 3 * HALF * shard.tokens * hidden,
            forward_kernels=0,
            backward_kernels=count - 1,
        )
    ]


def residual(name: str, elements: Size) -> MemoryPass:
    """Add the block's input (read two, write one); backward sums two gradients."""
    return MemoryPass(name=name, module="residual", forward=6 * elements, backward=6 * elements)


def enter_region(
    shard: Shard, name: str, hidden: int, beside: str, reductions: int = 1
) -> Collective:
    """Start a tensor-parallel region: every rank needs the whole input.

    Without sequence parallelism, backward reduces as many gradients of it as `reductions` says.
    """
    return Collective(
        name=name,
        module="tensor_parallel",
        axis="tp",
        group="tensor",
        forward="all_gather",
        backward="reduce_scatter",
        plain_forward="",
        plain_backward="all_reduce",
        plain_backward_count=reductions,
        payload=HALF * shard.tokens * hidden,
        beside=beside,
        input_side=True,
    )


def leave_region(shard: Shard, name: str, hidden: int, beside: str) -> Collective:
    """End a tensor-parallel region: partial sums meet."""
    return Collective(
        name=name,
        module="tensor_parallel",
        axis="tp",
        group="tensor",
        forward="reduce_scatter",
        backward="all_gather",
        plain_forward="all_reduce",
        plain_backward="",
        payload=HALF * shard.tokens * hidden,
        beside=beside,
    )
