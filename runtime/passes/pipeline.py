"""What a pass is, and how passes run: rewrite, lint, recompile, check, log the difference."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import GraphModule, Node

from costmodels.layout import Layout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringContext:
    """What passes may know.

    Attributes:
        layout: The plan's.
        flash_attention: Attention runs as one fused kernel; otherwise scores go to memory.
        capacity_factor: What an expert takes of a sequence, over the mean; 0 takes all.

    """

    layout: Layout
    flash_attention: bool = True
    capacity_factor: float = 0.0


Rewrite: TypeAlias = Callable[[GraphModule, LoweringContext], GraphModule]
Check: TypeAlias = Callable[[GraphModule, LoweringContext], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite, and the invariant that holds from then on.

    Attributes:
        rewrite: (graph, context) -> graph.
        ensures: (graph, context) -> None; raises AssertionError naming the node.

    """

    rewrite: Rewrite
    ensures: Check

    @property
    def name(self) -> str:
        """The rewrite's name."""
        return self.rewrite.__name__


def run_passes(graph: GraphModule, context: LoweringContext, passes: Sequence[Pass]) -> GraphModule:
    """Run passes in order; every invariant established so far is checked after each."""
    for i, step in enumerate(passes):
        before = op_counts(graph)
        graph = step.rewrite(graph, context)
        for part in graph_modules(graph):
            part.graph.lint()
            part.recompile()
        for done in passes[: i + 1]:
            done.ensures(graph, context)
        _log.info("%s: %s", step.name, format_difference(before, op_counts(graph)))
    return graph


def graph_modules(graph: GraphModule) -> list[GraphModule]:
    """Return a graph module and those inside it."""
    return [module for module in graph.modules() if isinstance(module, GraphModule)]


def all_nodes(graph: GraphModule) -> list[Node]:
    """Return the nodes of a graph module and of those inside it."""
    return [node for part in graph_modules(graph) for node in part.graph.nodes]


def op_counts(graph: GraphModule) -> Counter[str]:
    """Count the function calls of a graph by name."""
    return Counter(
        getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        for node in all_nodes(graph)
        if node.op == "call_function"
    )


def format_difference(before: Counter[str], after: Counter[str]) -> str:
    """Return "+4 all_gather, -2 linear", or "no change"."""
    changes = {name: after[name] - before[name] for name in sorted(before | after)}
    words = [f"{change:+d} {name}" for name, change in changes.items() if change]
    return ", ".join(words) or "no change"
