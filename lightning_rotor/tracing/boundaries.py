r"""Where to cut a graph into stages.

A cut is cheapest where one value alone is alive: everything behind it can be computed from that value. Sizes (``n = x.shape[0]``) may
come along, they weigh nothing; parameters and buffers do not count, for every stage reads them where they are::

    input ─ conv1 ─ bn1 ─ relu ─┬─ conv ─ bn ─ + ─ relu ─ flatten ─ fc
          │       │     │       └────────────┘ │       │          │
          cut     cut   cut       no cut here   cut     cut        cut

Where such places are far apart (dense blocks, branches, a mask beside the activations, skips from one end of a U-Net to the other), several
values are alive at all of them. A cut there is worth its bytes if what it adds to hold is little against what the stages on both sides
compute: see :func:`_worthwhile`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from lightning_rotor.errors import ModelError
from lightning_rotor.sequential import Stage
from lightning_rotor.tracing.recorder import Recorder
from lightning_rotor.tracing.slices import GraphSlice
from lightning_rotor.tracing.tracer import IN_PLACE, Tracer
from lightning_rotor.wiring import Wire, Wiring, packed


def stages_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer | Recorder, sizes: Mapping[fx.Node, int] | None = None
) -> list[Stage]:
    """Cut a graph into stages.

    Args:
        module: What it was traced from.
        graph: Its operations.
        tracer: What traced it.
        sizes: Bytes of new memory in what each operation returns; without them only places where one value is alive are cut.
    Raises:
        ModelError: There are no operations.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    body = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    (result,) = [node for node in graph.nodes if node.op == "output"]
    if not body:
        raise ModelError(f"the forward of {type(module).__name__} computes nothing: expected at least one operation")
    lives = _Lives(module, inputs, body, result)
    single = lives.single_cuts()
    cuts = single if sizes is None else sorted({*single, *lives.further_cuts(single, sizes)})
    names = _Names(module, body)
    number = {node: index for index, node in enumerate((*inputs, *body))}
    stages: list[Stage] = []
    for start, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
        nodes, is_last = body[start:end], end == len(body)
        inside = set(nodes)
        read = [node for step in nodes for node in step.all_input_nodes] + (result.all_input_nodes if is_last else [])
        reads = sorted({number[node] for node in read if node in number and node not in inside})
        outputs = [node for node in nodes if lives.last_use[node] >= end]
        before = [(*inputs, *body)[index] for index in reads]
        given = result.args[0] if is_last else outputs[0] if len(outputs) == 1 else tuple(outputs)
        piece = GraphSlice(before, nodes, given, root=module, owners=tracer.owners, constants=tracer.constants)
        writes = (len(number),) if is_last else tuple(number[node] for node in outputs)
        stages.append(Stage(names.of(nodes), (piece,), Wiring.of([Wire(tuple(reads), writes)], writes)))
    return stages


def sizes_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer | Recorder, tensors: Sequence[torch.Tensor]
) -> dict[fx.Node, int]:
    """Run a graph, one operation after the other; bytes of new memory in what each of them returns.

    Args:
        module: What it was traced from; the run updates its buffers and generators.
        graph: Its operations.
        tracer: What traced it.
        tensors: Of the call.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    body = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    last_use = {used: index for index, node in enumerate(body) for used in node.all_input_nodes}
    values: dict[fx.Node, Any] = dict(zip(inputs, tensors, strict=True))
    sizes: dict[fx.Node, int] = {}
    for index, node in enumerate(body):
        reads = [used for used in node.all_input_nodes if used.op != "get_attr"]
        step = GraphSlice(reads, [node], node, root=module, owners=tracer.owners, constants=tracer.constants)
        taken = [values[used] for used in reads]
        values[node] = step(packed(taken))
        old = {tensor.untyped_storage().data_ptr() for tensor in _tensors((taken, list(step.direct_tensors())))}
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(values[node])
        }
        sizes[node] = sum(size for address, size in storages.items() if address not in old)
        del taken
        for used in (*reads, node):
            if last_use.get(used, -1) <= index:
                values.pop(used, None)
    return sizes


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class _Lives:
    """What is alive after each operation."""

    def __init__(self, module: nn.Module, inputs: Sequence[fx.Node], body: Sequence[fx.Node], result: fx.Node) -> None:
        self._module = module
        self._inputs = inputs
        self._body = body
        position = {node: index for index, node in enumerate(body)} | {result: len(body)}
        self.last_use = {node: max((position[user] for user in node.users), default=-1) for node in (*inputs, *body)}
        self._weightless = _weightless(body)
        # By the number of operations that have run: the values that are read later, inputs included.
        self._alive: list[list[fx.Node]] = []
        alive = dict.fromkeys(node for node in inputs if self.last_use[node] >= 0)
        for index, node in enumerate(body):
            self._alive.append(list(alive))
            for used in node.all_input_nodes:
                if self.last_use.get(used) == index:
                    alive.pop(used, None)
            if self.last_use[node] > index:
                alive[node] = None
        self._alive.append(list(alive))

    def single_cuts(self) -> list[int]:
        """After how many operations one value alone is alive, a new one each time."""
        before: fx.Node | None = None
        cuts: list[int] = []
        for place in range(1, len(self._body)):
            values = self._values(place)
            if len(values) == 1 and values[0] is not before and self._is_possible(place):
                before = values[0]
                cuts.append(place)
        return cuts

    def further_cuts(self, cuts: Sequence[int], sizes: Mapping[fx.Node, int]) -> list[int]:
        """Cuts between those, where several values are alive."""
        found: list[int] = []
        coarse = _COARSE * sum(sizes.get(node, 0) for node in self._body)
        for start, end in zip((0, *cuts), (*cuts, len(self._body)), strict=True):
            if sum(sizes.get(node, 0) for node in self._body[start:end]) > coarse:
                found += self._worthwhile(start, end, sizes)
        return found

    def _worthwhile(self, start: int, end: int, sizes: Mapping[fx.Node, int]) -> list[int]:
        """Places where less is alive than around them, and little against what is computed on either side.

        To recompute a stage instead of keeping it, one holds what it reads: the cut pays if that is less than what its operations return.
        What was alive at the cut before is held anyway.
        """
        held = [sum(sizes.get(node, 0) for node in self._values(place)) for place in range(start, end + 1)]
        total = [0]
        for node in self._body[start:end]:
            total.append(total[-1] + sizes.get(node, 0))
        found: list[int] = []
        before = start
        for place in range(start + 1, end):
            here = place - start
            is_least = held[here] <= held[here - 1] and held[here] < held[here + 1]
            if not is_least or not self._is_possible(place):
                continue
            old = set(self._values(before))
            new = sum(sizes.get(node, 0) for node in self._values(place) if node not in old)
            if _GAIN * new <= total[here] - total[before - start] and _GAIN * new <= total[-1] - total[here]:
                found.append(place)
                before = place
        return found

    def _values(self, place: int) -> list[fx.Node]:
        """What weighs something: the caller holds the chain's inputs anyway."""
        return [node for node in self._alive[place] if node not in self._weightless and node not in self._inputs]

    def _is_possible(self, place: int) -> bool:
        return (
            bool(self._values(place))
            and not any(node.target in _PIECES for node in self._alive[place])
            and not self._in_place(self._body[place])
        )

    def _in_place(self, node: fx.Node) -> bool:
        # Such a stage cannot start behind a cut. The profiler would see it and merge the two; this way they have one name.
        target = self._module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        return (
            bool(getattr(target, "inplace", False))
            or node.kwargs.get("inplace") is True
            or target in (*IN_PLACE, operator.setitem)
            or (node.op == "call_method" and str(target).endswith("_") and not str(target).endswith("__"))
        )


# A stretch without a cut is worth a closer look if it returns more than this part of what all operations return.
_COARSE = 1 / 4
# By how much the operations on either side of a cut must outweigh what it adds to hold.
_GAIN = 2


def _weightless(body: Sequence[fx.Node]) -> set[fx.Node]:
    """Sizes, dtypes and devices, and what arithmetic makes of them."""
    found: set[fx.Node] = set()
    for node in body:
        is_metadata = (node.op == "call_function" and node.target is getattr and node.args[1] in _METADATA) or (
            node.op == "call_method" and node.target in ("size", "dim", "numel", "ndimension", "is_floating_point")
        )
        arithmetic = node.op == "call_function" and getattr(node.target, "__module__", "") in (
            "_operator",
            "math",
            "builtins",
        )
        if is_metadata or (arithmetic and node.all_input_nodes and all(used in found for used in node.all_input_nodes)):
            found.add(node)
    return found


# Several views of one storage: a stage that takes them cannot be measured alone, for a copy of each is another storage.
_PIECES = (
    "chunk",
    "split",
    "unbind",
    "tensor_split",
    "split_with_sizes",
    torch.chunk,
    torch.split,
    torch.unbind,
    torch.tensor_split,
)
_METADATA = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")


class _Names:
    """Names of stages in the user's terms."""

    def __init__(self, module: nn.Module, body: Sequence[fx.Node]) -> None:
        self._type = type(module).__name__
        self._body = body
        self._silent = _weightless(body)
        self._taken: Counter[str] = Counter()

    def of(self, nodes: Sequence[fx.Node]) -> str:
        """The module that all of it is, or from where to where it goes."""
        name = self._describe(nodes)
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} ({self._taken[name]})"

    def _describe(self, nodes: Sequence[fx.Node]) -> str:
        quiet = (torch._assert, operator.getitem)
        working = [node for node in nodes if node not in self._silent and node.target not in quiet] or list(nodes)
        paths = [str(node.meta["module"]).split(".") for node in working]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        prefix = ".".join(common)
        if prefix and (
            len(nodes) == len(self._body)
            or not any(self._inside(node, prefix) for node in self._body if node not in nodes)
        ):
            return prefix
        first, last = self._label(working[0]), self._label(working[-1])
        return first if first == last else f"{first} … {last}"

    @staticmethod
    def _inside(node: fx.Node, prefix: str) -> bool:
        path = str(node.meta["module"])
        return path == prefix or path.startswith(f"{prefix}.")

    @staticmethod
    def _label(node: fx.Node) -> str:
        path = str(node.meta["module"])
        if node.op == "call_module":
            return path
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"{path}.{name}" if path else str(name)
