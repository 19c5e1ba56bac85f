"""StageMemory: what the partition solver knows of a layout's memory, before layers are split.

Reserved bytes of a pipeline rank at one moment are linear in its layers. With n_k layers of kind k
in a stage that holds f micro-batches at that moment, q_k of them recomputed:

    reserved >= fixed
             + sum over the rank's stages of
                 sum over kinds   n_k * state_k + f * ((n_k - q_k) * kept_k + q_k * recomputed_k)
                 + f * boundary, but not for the last global stage
                 + embedding on global stage 0, head on the last one
             + the larger of the layers' and (on the last stage's rank) the head's transient

The rank needs the largest of its moments. Without split backwards both sides are equal; with them
micro-batches whose weight gradients wait count with the least that they keep. `estimate_memory`
evaluates all and the moment of the optimizer step, so what does not fit here does not fit there.
"""

from dataclasses import dataclass

from costmodels.memory.moments import Moments
from costmodels.model import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """Reserved bytes of one layer of a kind.

    Attributes:
        states: Weights, gradients and optimizer states of the rank's share.
        kept: The least per micro-batch in flight, where the layer is not recomputed in full.
        recomputed: Per micro-batch in flight, where it is: its input.

    """

    states: float
    kept: float
    recomputed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMemory:
    """Reserved bytes of the embedding, or of final norm, head and loss.

    Attributes:
        states: Weights, gradients and optimizer states.
        kept: The least per micro-batch in flight.
        transient: Alive only while it runs (logits and their gradients).

    """

    states: float
    kept: float
    transient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one layout, by block; bytes as the card sees them (fragmentation is in).

    Attributes:
        layers: One layer of each kind.
        embedding: On the rank of global stage 0.
        head: On the rank of the last global stage.
        boundary: Per micro-batch in flight of every stage but the last: the output that it keeps.
        fixed: On every rank: context, communicators, buckets, what others took.
        transient: Gradients and gathered weights while a layer runs backward, at least.
        transient_of_many: The same in a stage of so many layers that units of both sides are held.
        moments: For each pipeline rank, the moments that may be its fullest.
        capacity: Bytes that the driver leaves.

    """

    layers: tuple[tuple[LayerKind, LayerMemory], ...]
    embedding: EndMemory
    head: EndMemory
    boundary: float
    fixed: float
    transient: float
    transient_of_many: float
    moments: tuple[Moments, ...]
    capacity: float

    def layer(self, kind: LayerKind) -> LayerMemory:
        """Return the bytes of a kind of layer."""
        return dict(self.layers)[kind]
