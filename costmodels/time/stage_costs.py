"""StageCosts: what the partition solver knows of a layout: seconds per block, before layers split.

A stage's forward is the sum of its blocks' forwards, and so on for the other phases; the step is
the pipeline of the stages plus what each rank does once per step.
"""

from dataclasses import dataclass

from costmodels.model import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one micro-batch in one block, on the rank that holds it.

    Attributes:
        forward: The forward pass, its exposed communication included.
        backward_input: Gradients of activations (torch's I), selective recomputation included.
        backward_weight: Gradients of weights (torch's W); may run later in zero-bubble schedules.
        recompute: What full recomputation of this block adds to backward.
        rest: Once per step, summed over the blocks of a rank: optimizer, and the exposed part of
            gradient and parameter communication (an upper bound of it where backward hides some).

    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    rest: float

    @property
    def backward(self) -> float:
        """Both halves of backward, nothing recomputed."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one layout, by block.

    Attributes:
        layers: Seconds of one layer of each kind.
        embedding: Before the first layer, on global stage 0.
        head: After the last layer, on the last global stage; final norm and loss included.
        way: Seconds of handing one micro-batch through all ranks, one way.
        fixed_rest: Seconds per step on every rank, whatever its layers.

    """

    layers: tuple[tuple[LayerKind, BlockSeconds], ...]
    embedding: BlockSeconds
    head: BlockSeconds
    way: float
    fixed_rest: float

    def layer(self, kind: LayerKind) -> BlockSeconds:
        """Return the seconds of a kind of layer."""
        return dict(self.layers)[kind]
