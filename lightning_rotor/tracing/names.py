"""Names of stages in the user's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from torch import fx

from lightning_rotor.private.torch_names import ASSERT

# Not what a stage is named after.
_VIEWS = {
    "chunk",
    "contiguous",
    "expand",
    "flatten",
    "getitem",
    "narrow",
    "permute",
    "reshape",
    "select",
    "split",
    "split_with_sizes",
    "squeeze",
    "swapaxes",
    "t",
    "tensor_split",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
}
_METADATA = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")


class Names:
    """Names of stages in the user's terms."""

    def __init__(self, body: Sequence[fx.Node]) -> None:
        self._silent = weightless(body)
        # How many operations run inside of each module.
        self._inside = Counter(path for node in body for path in _paths_around(node))
        self._taken: Counter[str] = Counter()

    def of(self, nodes: Sequence[fx.Node]) -> str:
        """The module that all of it is, or from where to where it goes."""
        name = self._describe(nodes)
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name} ({self._taken[name]})"

    def _describe(self, nodes: Sequence[fx.Node]) -> str:
        audible = [node for node in nodes if node not in self._silent and node.target is not ASSERT]
        working = [node for node in audible if not _is_view(node)] or audible or list(nodes)
        paths = [str(node.meta["module"]).split(".") for node in working]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        prefix = ".".join(common)
        if prefix and self._inside[prefix] == sum(prefix in _paths_around(node) for node in nodes):
            return prefix
        first, last = self._label(working[0]), self._label(working[-1])
        return first if first == last else f"{first} … {last}"

    @staticmethod
    def _label(node: fx.Node) -> str:
        path = str(node.meta["module"])
        if node.op == "call_module":
            return path
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"{path}.{name}" if path else str(name)


def weightless(body: Sequence[fx.Node]) -> set[fx.Node]:
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


def _is_view(node: fx.Node) -> bool:
    """Whether an operation only shows its input in another way; a few of these copy if they must."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op != "call_module" and name in _VIEWS


def _paths_around(node: fx.Node) -> list[str]:
    """The module that an operation runs in, and those around it."""
    return list(accumulate(str(node.meta["module"]).split("."), "{}.{}".format))
