"""The passes that turn a captured graph into the program of a plan, and what each one promises.

    captured graph -> canonicalise -> shard_tensors -> split_context -> dispatch_experts
                   -> split_layers -> apply_recompute

A pass is a rewrite and an invariant. After every pass the graph is linted and recompiled, and all
invariants established so far are checked again; the difference in operations goes to the log.
Passes know the layout, never a rank: every rank runs the same graph, and what differs (its piece of
the vocabulary, for instance) is asked of the mesh at run time.
"""

from runtime.passes.apply_recompute import apply_recompute, recomputed_layers_match_the_layout
from runtime.passes.canonicalise import canonicalise, only_canonical_operations
from runtime.passes.dispatch_experts import dispatch_experts, every_token_reaches_its_experts
from runtime.passes.pipeline import LoweringContext, Pass, run_passes
from runtime.passes.shard_tensors import every_value_has_a_placement, shard_tensors
from runtime.passes.split_context import attention_sees_the_whole_sequence, split_context
from runtime.passes.split_layers import only_activations_cross_units, split_layers

PIPELINE: tuple[Pass, ...] = (
    # First: the others match on few forms, and may assume masks and devices away.
    Pass(canonicalise, only_canonical_operations),
    # On the whole graph: the placement of a value follows from the values before it.
    Pass(shard_tensors, every_value_has_a_placement),
    # After the tensor axis, which cuts the heads that attention then finds in place.
    Pass(split_context, attention_sees_the_whole_sequence),
    # After the tensor axis, which decides what tokens a rank has to route.
    Pass(dispatch_experts, every_token_reaches_its_experts),
    # After the axes, whose collectives belong to the layer that needs them.
    Pass(split_layers, only_activations_cross_units),
    # Last: it chooses among whole layers, or wraps single operations within them.
    Pass(apply_recompute, recomputed_layers_match_the_layout),
)

__all__ = ["PIPELINE", "LoweringContext", "Pass", "run_passes"]
