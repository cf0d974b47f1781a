"""AOTAutograd's joint graphs of forward and backward: their parts, what torch would save, and pairs of graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class JointParts:
    """Parts of a joint graph.

    Attributes:
        forward: Nodes that the forward's outputs need, placeholders included, in order.
        outputs: Nodes that the forward returns.
        gradients: Nodes that the backward returns.
        info: torch's own classification.
        number_of_outputs: Of the forward.
        changed_inputs: Placeholders that are written to when the forward is over, such as running statistics.
    """

    forward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]
    info: Any
    number_of_outputs: int
    changed_inputs: frozenset[fx.Node]


def parts_of(joint: fx.GraphModule, number_of_outputs: int, static_inputs: Sequence[int]) -> JointParts:
    """Parts of a joint graph, once code that nobody needs is gone and equal operations are one."""
    # Here and below inside of functions: all that is imported belongs to the compiler, and takes a second.
    from torch._functorch import partitioners
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    joint.recompile()
    wanted = set()
    waiting = [node for node in _outputs(joint, number_of_outputs)[1] if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in wanted:
            wanted.add(node)
            waiting += node.all_input_nodes
    try:
        # What the forward alone needs is not made one with what the backward needs, too: that would be saved more.
        joint.graph = fx_graph_cse(joint.graph, extra_node_key=lambda node: node in wanted)
    except TypeError:
        # torch < 2.14
        joint.graph = fx_graph_cse(joint.graph)
    info = partitioners.classify_nodes(joint, list(static_inputs), number_of_outputs)
    for node in reversed(joint.graph.nodes):
        # Distance to the backward. The solver prefers to save what is near it, and torch's own partitioner, in whose
        # place this one stands, would have noted it.
        node.dist_from_bw = int(1e9) if node.op == "output" or info.is_required_fw(node) else 0
        if node.op != "output" and info.is_required_fw(node):
            node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])
    outputs, gradients = _outputs(joint, number_of_outputs)
    return JointParts(
        tuple(node for node in joint.graph.nodes if node.op != "output" and info.is_required_fw(node)),
        tuple(node for node in outputs if isinstance(node, fx.Node)),
        tuple(node for node in gradients if isinstance(node, fx.Node)),
        info,
        number_of_outputs,
        _changed_inputs(joint),
    )


def _outputs(joint: fx.GraphModule, number_of_outputs: int) -> tuple[list[Any], list[Any]]:
    from torch._functorch import partitioners

    outputs, gradients, *_ = partitioners._extract_fwd_bwd_outputs(joint, num_fwd_outputs=number_of_outputs)
    return outputs, gradients


def _changed_inputs(joint: fx.GraphModule) -> frozenset[fx.Node]:
    """Placeholders that are written to, in the graph or behind it."""
    changed = set()
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            changed.add(node.args[0])
    output = next(iter(reversed(joint.graph.nodes)))
    described = {node.meta.get("desc"): node for node in joint.graph.nodes if node.op == "placeholder"}
    for description in output.meta.get("desc", ()) or ():
        if "Mutation" in type(description).__name__:
            node = described.get(getattr(description, "mutated_input", None))
            if node is not None:
                changed.add(node)
    return frozenset(changed)


def chosen_by_torch(joint: fx.GraphModule, parts: JointParts, budget: float) -> frozenset[fx.Node]:
    """Nodes that torch would save under an activation memory budget between 0 and 1."""
    from torch._functorch import partitioners

    return frozenset(partitioners.choose_saved_values_set(joint.graph, parts.info, memory_budget=budget))


def is_tangent(node: fx.Node) -> bool:
    """True if a placeholder is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_of_sizes(node: fx.Node) -> bool:
    """True if a node is a number that depends on the sizes of inputs."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def split(joint: fx.GraphModule, parts: JointParts, saved: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The pair of graphs in which the forward saves these nodes, and the backward recomputes all else that it needs."""
    from torch._functorch import partitioners

    return partitioners._extract_fwd_bwd_modules(
        joint,
        list(saved),
        saved_sym_nodes=[],
        num_fwd_outputs=parts.number_of_outputs,
        static_lifetime_input_nodes=parts.info.static_lifetime_input_nodes,
    )


def with_graph(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a graph, with a joint graph's attributes."""
    from torch.fx._lazy_graph_module import _make_graph_module

    return _make_graph_module(joint, graph)


def finished(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A pair of graphs as compilers expect it: each part of several results is taken at once."""
    from torch._functorch import partitioners

    # Where it is defined differs between versions of torch.
    names: Any = partitioners
    return names.raise_getitems(forward), names.raise_getitems(backward)


def copy_attributes(source: fx.Node, target: fx.Node) -> None:
    """Note on a node of a backward what the compiler looks for there."""
    target.meta.update(source.meta)
    if target.op in ("call_function", "get_attr"):
        target.meta["autograd_backward"] = True


def is_forward(parts: JointParts, node: fx.Node) -> bool:
    """True if the forward needs a node."""
    return bool(node in parts.info._required_fw_nodes)


def is_mutable(target: torch._ops.OpOverload) -> bool:
    """True if an operation writes to one of its arguments."""
    return bool(target._schema.is_mutable)


def takes_part(node: fx.Node) -> bool:
    """True if a node takes one of several results."""
    return node.target is operator.getitem


def outside_of_fakes() -> AbstractContextManager[Any]:
    """Context in which new tensors have values although a compiler runs."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def under_partitioner(partition: Callable[..., Any], key: str) -> AbstractContextManager[Any]:
    """Context in which Inductor splits joint graphs by a function; equal keys mean equal splits."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = partition(gm, joint_inputs, **kwargs)
            return forward, backward

        def uuid(self) -> Any:
            return key

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            # Inductor copies its settings for each graph.
            return self

        def __reduce__(self) -> Any:
            # It pickles them, too, for the key of its cache.
            return str, (key,)

    return config.patch(custom_partitioner_fn=Partitioner())  # type: ignore[no-any-return]
