"""What the planner needs to know of a traced module: a ModelSpec, and the roles of its parameters.

Read off the graph, by operation and by the roles that tensor parallelism finds (`passes/roles.py`):

    attention      the row layer that a scaled_dot_product_attention feeds, and its columns
    feed-forward   the other row layer, and its columns: one as wide as it, or two
    vocabulary     the table that looks tokens up, and the layer that makes the logits
    norms          vectors that norms multiply with
    whole          everything else in a block: each tensor-parallel rank holds and applies all of it

All blocks must be alike. The specification's parameter count must come out as the module's, to the
last weight; otherwise the module is refused, with both numbers.
"""

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from costmodels.layout import Layout
from costmodels.model import ModelSpec
from costmodels.parameters import num_parameters
from planner.rules.native_jobs import TRACED
from runtime.any_module.block_facts import facts_of_block, has_bias, held_parameters
from runtime.capture.blocks import container_of, layer_of
from runtime.passes.canonicalise import canonicalise
from runtime.passes.pipeline import LoweringContext
from runtime.passes.roles import Part, Role, infer_roles, parameter_name
from runtime.passes.split_context import sliced_tables

# Tokens per sequence of a module that has no table of positions: what the planner takes at most
# where nothing else is said (`--seq-len` says more).
TRAINING_SEQ_LEN = 8192

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A traced module as the planner sees it.

    Attributes:
        roles: Of every parameter that is cut.
        whole: Matrices of blocks that no rule cuts, by name: their sizes.
        sliced: Tables that are sliced to the length, which rules the context axis out.
        blocks: Paths of blocks that are attributes of their own; () where they stand in a list.

    """

    spec: ModelSpec
    roles: dict[str, Role]
    whole: dict[str, int]
    num_parameters: int
    sliced: tuple[str, ...]
    blocks: tuple[str, ...]

    def lines(self) -> list[str]:
        """Say which part each parameter plays, blocks merged, and what replication costs."""
        words = {Part.COLUMN: "columns", Part.ROW: "rows", Part.VOCABULARY: "vocabulary"}
        cut: dict[str, dict[str, None]] = defaultdict(dict)
        for name, role in self.roles.items():
            parts = f", {role.num_segments} parts" if role.num_segments > 1 else ""
            cut[words[role.part] + parts][self._merged(name)] = None
        spec = self.spec
        head = (
            f"{spec.name}: {spec.num_layers} blocks of {spec.num_attention_heads} heads "
            f"({spec.num_kv_heads} of keys), {self.num_parameters:,} parameters"
        )
        lines = [
            head,
            *(f"  cut by {kind}: {', '.join(names)}" for kind, names in sorted(cut.items())),
            "  whole on every tensor-parallel rank: everything else",
        ]
        return lines + [f"warning: {text}" for text in self.warnings()]

    def warnings(self) -> list[str]:
        """Say which matrices stay whole and what that costs, and which axis is ruled out."""
        merged: dict[str, list[int]] = defaultdict(list)
        for name, size in self.whole.items():
            merged[self._merged(name)].append(size)
        wholes = [
            f"no rule cuts {name}: all {sum(sizes):,} weights "
            f"({sum(sizes) / self.num_parameters:.1%} of the model) and their products are done "
            "whole on every tensor-parallel rank"
            for name, sizes in merged.items()
        ]
        tables = [f"{name} is sliced to the length: plan with --cp 1" for name in self.sliced]
        return wholes + tables

    def _merged(self, name: str) -> str:
        """Return a parameter's name with its block's place left open."""
        for block in self.blocks:
            if name.startswith(f"{block}."):
                return f"({self.blocks[0]} to {self.blocks[-1]}){name.removeprefix(block)}"
        words = name.split(".")
        place = next((i for i, word in enumerate(words) if word.isdecimal()), None)
        return ".".join("*" if i == place else word for i, word in enumerate(words))


def describe(captured: GraphModule, name: str) -> Description:
    """Return what the planner needs to know of a captured module.

    Args:
        captured: From `capture`; it is left as it is.
        name: What to call the model.

    Raises:
        ValueError: It is no chain of equal decoder blocks; the message says where it differs.

    """
    graph = copy.deepcopy(captured)
    canonicalise(graph, LoweringContext(layout=Layout(layers_per_stage=(1,))))
    roles = infer_roles(graph)
    members = _members(graph)
    num_layers = max(members) + 1
    if num_layers < 1:
        raise ValueError(f"{name} has no repeated blocks to spread over ranks")
    blocks = [
        facts_of_block(graph, members.get(layer, []), roles, f"{name}: block {layer}")
        for layer in range(num_layers)
    ]
    for layer, block in enumerate(blocks[1:], start=1):
        if block != blocks[0]:
            raise ValueError(
                f"{name}: block {layer} is {block}, block 0 is {blocks[0]}; the planner takes "
                "modules whose blocks are alike"
            )
    ends = _ends(roles, members[-1], name)
    spec = ModelSpec(
        name=name,
        architecture=TRACED,
        num_layers=num_layers,
        **ends,
        **blocks[0].spec_fields(ends["hidden_size"]),
    )
    counted = sum(parameter.numel() for parameter in graph.parameters())
    if num_parameters(spec) != counted:
        raise ValueError(
            f"{name} has {counted:,} parameters, of which the planner explains "
            f"{num_parameters(spec):,}: outside of the {num_layers} blocks it knows a table of "
            "tokens, one of positions, norms and a layer that makes logits"
        )
    return Description(
        spec=spec,
        roles=roles,
        whole=_whole_matrices(graph, roles, members),
        num_parameters=counted,
        sliced=tuple(dict.fromkeys(sliced_tables(graph))),
        blocks=captured.meta.get("blocks", ()),
    )


def _members(graph: GraphModule) -> dict[int, list[Node]]:
    """Return the nodes of each block in order, those outside of all blocks under -1."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    container = container_of(node.meta["module"] for node in nodes) or ""
    members: dict[int, list[Node]] = {-1: []}
    for node in nodes:
        members.setdefault(layer_of(node.meta["module"], container), []).append(node)
    return members


def _ends(roles: dict[str, Role], rest: list[Node], name: str) -> dict[str, Any]:
    """Return the fields of a ModelSpec that speak of what stands before and after the blocks."""
    tables = [node for node in rest if node.target is _aten.embedding.default]
    sizes = {
        parameter_name(node.args[0]): node.args[0].meta["val"].shape  # type: ignore[union-attr]  # an embedding reads a node
        for node in tables
    }
    tokens = {key: size for key, size in sizes.items() if key in roles}
    positions = {key: size for key, size in sizes.items() if key not in roles}
    head = next(
        (
            node
            for node in reversed(rest)
            if node.target is _aten.linear.default and parameter_name(node.args[1]) in roles
        ),
        None,
    )
    if len(tokens) != 1 or len(positions) > 1 or head is None:
        raise ValueError(
            f"{name} looks tokens up in {len(tokens)} tables and positions in {len(positions)}, "
            f"and makes logits with {'a' if head is not None else 'no'} linear layer; the planner "
            "takes one table of tokens, at most one of positions, and one layer for logits"
        )
    ((table, (vocab_size, hidden)),) = tokens.items()
    num_positions = next((int(size[0]) for size in positions.values()), 0)
    return {
        "hidden_size": int(hidden),
        "vocab_size": int(vocab_size),
        "training_seq_len": num_positions or TRAINING_SEQ_LEN,
        "tied_embeddings": parameter_name(head.args[1]) == table,
        "num_position_embeddings": num_positions,
        "head_bias": has_bias(head),
    }


def _whole_matrices(
    graph: GraphModule, roles: dict[str, Role], members: dict[int, list[Node]]
) -> dict[str, int]:
    inside = (node for layer, nodes in members.items() if layer >= 0 for node in nodes)
    return {
        name: parameter.numel()
        for name, parameter in held_parameters(graph, inside).items()
        if name not in roles and parameter.dim() > 1
    }
