"""First values of a program's parameters: from an initialiser that makes wholes, or pieces."""

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from runtime.communication.mesh import Mesh
from runtime.program import ParameterShard, Program

Initialiser: TypeAlias = Callable[[ParameterShard], Tensor]


@runtime_checkable
class PieceInitialiser(Protocol):
    """An initialiser that makes a rank's piece of a parameter without the whole."""

    def piece(self, shard: ParameterShard, mesh: Mesh) -> Tensor:
        """Return what `shard.of_rank` would cut from the whole."""


def materialise(
    program: Program, initialise: Initialiser, *, device: torch.device | str = "cpu"
) -> None:
    """Give every parameter of a program its values, in place, one parameter at a time.

    Args:
        program: Its parameters lie on the meta device, in the dtype they are trained in.
        initialise: Returns the *whole* parameter of a shard: from a generator, or from a file.
            It must return the same on every rank.
        device: Where the pieces go.

    """
    move_buffers(program, device)
    for stage in program.stages:
        made: dict[str, nn.Parameter] = {}
        for unit in stage.units:
            for name, old in list(unit.named_parameters()):
                if name not in made:
                    piece = own_piece(initialise, stage.shard(name), stage.mesh)
                    piece = piece.to(device=device, dtype=old.dtype)
                    made[name] = nn.Parameter(piece, requires_grad=old.requires_grad)
                owner, _, leaf = name.rpartition(".")
                setattr(unit.get_submodule(owner), leaf, made[name])


def move_buffers(program: Program, device: torch.device | str) -> None:
    """Move what the graphs hold besides parameters (rotary frequencies, router biases)."""
    for stage in program.stages:
        for module in stage.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def own_piece(initialise: Initialiser, shard: ParameterShard, mesh: Mesh) -> Tensor:
    """Return a rank's first values of a parameter, in memory of their own."""
    if isinstance(initialise, PieceInitialiser):
        return initialise.piece(shard, mesh)
    return shard.of_rank(initialise(shard).detach(), mesh).clone()
