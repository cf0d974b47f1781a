"""Names of stages in the user's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from torch import fx

from lightning_rotor.capture.node_facts import SIZE, name_of
from lightning_rotor.capture.operations import words
from lightning_rotor.capture.recorded_checks import require_as_recorded, require_check
from lightning_rotor.private.values import tree_unflatten

SPLITS = ("chunk", "split", "unbind", "tensor_split", "split_with_sizes")
"""Methods that return several views of one storage."""
_VIEWS = words(
    "contiguous expand flatten getitem narrow permute reshape select squeeze swapaxes t transpose unflatten unsqueeze",
    "view",
).union(SPLITS)
"""Operations that no stage is named after: they show their input in another way; a few of these copy if they must."""
_OURS = (require_as_recorded, require_check, tree_unflatten)
"""Functions in a graph that are no code of the user's."""


class StageNames:
    """Names of the stages of one graph, each once."""

    def __init__(self, body: Sequence[fx.Node]) -> None:
        # How many operations run inside of each module.
        self._inside = Counter(path for node in body for path in _paths_around(node))
        self._taken: Counter[str] = Counter()

    def of(self, nodes: Sequence[fx.Node]) -> str:
        """Name of the module that all of it is, or of the first and the last."""
        name = self._describe(nodes)
        self._taken[name] += 1
        if self._taken[name] == 1:
            return name
        return f"{name} ({self._taken[name]})"

    def _describe(self, nodes: Sequence[fx.Node]) -> str:
        users = []
        for node in nodes:
            if SIZE not in node.meta and node.target not in _OURS:
                users.append(node)
        telling = []
        for node in users:
            if node.op == "call_module" or name_of(node) not in _VIEWS:
                telling.append(node)
        # A stage of views alone has their name.
        working = telling or users or list(nodes)
        module = _module_around(working)
        operations_here = sum(module in _paths_around(node) for node in nodes)
        # A module that is cut into several stages would give its name to each of them.
        if module and self._inside[module] == operations_here:
            return module
        first = _label(working[0])
        last = _label(working[-1])
        return first if first == last else f"{first} … {last}"


def _module_around(nodes: Sequence[fx.Node]) -> str:
    """Path of the innermost module that all of these run in; empty for the root."""
    paths = [str(node.meta["module"]).split(".") for node in nodes]
    common = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def _paths_around(node: fx.Node) -> list[str]:
    """The module that an operation runs in, and those around it."""
    return list(accumulate(str(node.meta["module"]).split("."), "{}.{}".format))


def _label(node: fx.Node) -> str:
    path = str(node.meta["module"])
    if node.op == "call_module":
        return path
    return f"{path}.{name_of(node)}" if path else name_of(node)
