"""A module on the meta device becomes one forward fx graph of the whole model and its loss.

`torch.export` (non-strict) keeps the operations that matter whole (`linear`, `rms_norm`,
`scaled_dot_product_attention`, `cross_entropy_loss`), knows no device, lets batch and length vary,
and tags every node with the module it comes from. What it calls inputs (parameters, buffers) become
`get_attr` nodes again, under the model's own names:

    placeholders   input_ids, position_ids, labels: [batch, length], both dynamic
    get_attr       model.layers.0.mlp.up_proj.weight ...
    output         cross entropy of the next tokens, summed over those that are not ignored

Node meta: "val" is the *whole* value (shape, dtype), also after passes have cut it; "module" is the
path of the module that made it.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own idiom)
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.overrides import TorchFunctionMode

from runtime.capture.blocks import number_blocks
from runtime.capture.expert_blocks import experts_as_operators
from runtime.program import BATCH_FIELDS, IGNORED_LABEL

_PREFIX = "network."
# Distinct primes, so that no dim of an example is mistaken for another.
_EXAMPLE_SHAPE = (3, 7)


class _EmptyOnMeta(TorchFunctionMode):
    """Sends `torch.empty` to the meta device and leaves all else alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever the function returns)
        del types
        named = dict(kwargs or {})
        if func is torch.empty:
            named["device"] = "meta"
        return func(*args, **named)


def weights_on_meta() -> TorchFunctionMode:
    """Return a context in which modules are built without memory for their weights.

    Layers allocate weights with `torch.empty`, which takes the meta device here; constants that
    modules compute (rotary frequencies) keep their values, unlike under `torch.device("meta")`.
    """
    return _EmptyOnMeta()


class _SummedLoss(nn.Module):
    """The model and the loss of its next-token predictions."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.tokens_name, self.takes_positions = _inputs_of(network)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        given: dict[str, Tensor] = {}
        if self.takes_positions:
            given["position_ids"] = position_ids
        output = self.network(**{self.tokens_name: input_ids}, **given)
        logits: Tensor = output if isinstance(output, Tensor) else output[0]
        # fp32 where the model computes in less, unchanged where it computes in more.
        scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(
            scores, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
        )


def _inputs_of(network: nn.Module) -> tuple[str, bool]:
    """Return what a model calls its tokens, and whether it takes positions besides.

    Raises:
        ValueError: It cannot be called with tokens alone.

    """
    known = inspect.signature(network.forward).parameters
    if "input_ids" in known:
        return "input_ids", "position_ids" in known
    needed = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    others = [name for name in needed[1:] if name != "position_ids"]
    if not needed or others:
        raise ValueError(
            f"{type(network).__name__}.forward takes ({', '.join(known)}); a language model takes "
            "its tokens first and needs nothing else but position_ids"
        )
    return needed[0], "position_ids" in known


def capture(model: nn.Module, *, dtype: torch.dtype | None = None) -> GraphModule:
    """Return the graph of a causal language model and its summed loss, on the meta device.

    Args:
        model: Called as `model(input_ids=..., position_ids=...)`, or with tokens under the name
            of its only needed input where it has no `input_ids`; without `position_ids` where it
            does not take them. Returns logits [batch, length, vocabulary], alone or first of a
            tuple. It is left as it is, except that its parameters move to the meta device.
        dtype: Of the parameters; None keeps the model's.

    Raises:
        ValueError: A buffer has no values (it was built on the meta device), or the model cannot
            be traced; the message says why.

    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} lies on the meta device and has no values; build the model under "
                "`runtime.capture.export.weights_on_meta()`, which leaves buffers on the CPU"
            )
    _to_meta(model, dtype)
    exported = _export(model)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    captured = _with_attributes(exported, model, buffers)
    number_blocks(captured)
    return captured


def _to_meta(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Move parameters (to a dtype) and buffers (as they are) to meta; ties stay ties."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001 (ties must survive)
            if parameter is None:
                continue
            if id(parameter) not in moved:
                data = torch.empty_like(parameter, device="meta", dtype=dtype or parameter.dtype)
                moved[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(module, name, moved[id(parameter)])
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None:
                setattr(module, name, buffer.to("meta"))


def _export(model: nn.Module) -> ExportedProgram:
    example = tuple(
        torch.zeros(_EXAMPLE_SHAPE, dtype=torch.long, device="meta") for _ in BATCH_FIELDS
    )
    dynamic = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in BATCH_FIELDS)
    # torch.export reports guesses about dynamic sizes as warnings; the passes check what they need.
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    try:
        with experts_as_operators(model):
            wrapped = _SummedLoss(model.train())
            return export(wrapped, example, dynamic_shapes=dynamic, strict=False)
    except (RuntimeError, TypeError, torch._dynamo.exc.UserError) as error:  # noqa: SLF001
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{type(model).__name__} cannot be traced: {first_line}") from error


def _with_attributes(
    exported: ExportedProgram, model: nn.Module, buffers: dict[str, Tensor]
) -> GraphModule:
    """Turn lifted inputs back into attributes and strip what only an export needs."""
    names = _attribute_names(exported, model)
    values: dict[str, Any] = {**dict(model.named_parameters()), **buffers}
    values |= {
        name: tensor for name, tensor in exported.constants.items() if isinstance(tensor, Tensor)
    }
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    seen: dict[str, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # noqa: SLF001
            continue
        if node.op == "placeholder" and node.name in names:
            name = names[node.name]
            if name not in seen:
                attributes[name] = values[name]
                seen[name] = graph.create_node("get_attr", name)
                seen[name].meta["val"] = node.meta["val"]
                seen[name].meta["module"] = name.rpartition(".")[0]
            copies[node] = seen[name]
            continue
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].meta = {"val": node.meta.get("val"), "module": _module_path(node)}
    _unwrap_output(graph)
    # Passes rewrite it a dozen times, and few callers ever run the whole: code comes with a call.
    captured = _LazyGraphModule(attributes, graph, class_name="Captured")
    captured.graph.eliminate_dead_code()
    captured.recompile()
    return captured


def _attribute_names(exported: ExportedProgram, model: nn.Module) -> dict[str, str]:
    """Map the export's placeholders to names in the model; tied parameters share the first."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    canonical = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    signature = exported.graph_signature
    lifted = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    plain = {key: name.removeprefix(_PREFIX) for key, name in lifted.items()}
    return {key: canonical.get(name, name) for key, name in plain.items()}


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path: str = next(reversed(stack.values()))[0] if stack else ""
    return path.removeprefix("network").removeprefix(".")


def _unwrap_output(graph: fx.Graph) -> None:
    """Return the loss itself rather than a tuple of one."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    (loss,) = output.args[0]
    output.args = (loss,)
