"""What values look like in the call that is traced, for code inside of a composite operation that asks for sizes.

Symbols have no sizes, so ``if x.dim() == 3`` stops a trace. Inside of a composite operation every value therefore has a sample next to it: a
fake tensor of the same shape, or a number. The graph computes with sizes as before and holds for other ones; only where the code takes a
decision does the sample decide, and where sizes were asked the graph gets an assertion that they still say the same::

    length, batch, width = query.shape      getattr, getitem                       (12, 8, 64)
    if width != 64: raise ...           ─►  ne, not_, torch._assert                False
    q = q.view(length, batch * 4, 16)   ─►  mul, view                              a fake tensor of shape (12, 32, 16)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_rotor.private.pytree import tree_leaves
from lightning_rotor.private.torch_names import FakeTensor, FakeTensorMode


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The arguments of one call of a composite operation, with fake tensors.

    Attributes:
        leaves: In the order of the tree.
        mode: Makes the fake tensors.
    """

    leaves: tuple[Any, ...]
    mode: FakeTensorMode

    @classmethod
    def of(cls, arguments: Any) -> Sample:
        """The sample that real arguments, or fake ones, make."""
        leaves = tree_leaves(arguments)
        modes = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
        mode = modes[0] if modes else FakeTensorMode()
        return cls(tuple(_fake(leaf, mode) for leaf in leaves), mode)


class Samples:
    """The composite operations that a trace meets, in order, each with a sample of its arguments or None if it is to stay one operation."""

    def __init__(self, samples: Sequence[Sample | None]) -> None:
        self._samples = list(samples)
        self._place = -1
        self.failed: int | None = None
        """Which of them could not be traced through."""

    def next_is_given(self) -> bool:
        """Go on to the next one, and say whether there is a sample of it."""
        self._place += 1
        return self._place < len(self._samples) and self._samples[self._place] is not None

    @contextmanager
    def taken(self) -> Iterator[Sample]:
        """Context in which the code of the present one is traced."""
        sample = self._samples[self._place]
        assert sample is not None
        try:
            yield sample
        except Exception:
            self.failed = self._place
            raise


class Known:
    """Samples of the values inside of one composite operation.

    Args:
        sample: Of its arguments.
        arguments: What the trace calls it with: proxies where there are values.
        tensor: The parameter, buffer or constant that a ``get_attr`` node of this name reads.
    """

    def __init__(self, sample: Sample, arguments: Any, tensor: Callable[[str], torch.Tensor]) -> None:
        self._mode = sample.mode
        self._tensor = tensor
        self._values: dict[fx.Node, Any] = {}
        self._sizes: set[fx.Node] = set()  # what sizes decide over
        for symbol, value in zip(tree_leaves(arguments), sample.leaves, strict=True):
            if isinstance(symbol, fx.Proxy):
                self._values[symbol.node] = value

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._values

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node]

    def is_of_sizes(self, node: fx.Node) -> bool:
        """Whether a number depends on sizes, and not only on types and the number of dimensions."""
        return node in self._sizes

    def add(self, node: fx.Node) -> None:
        """Compute the sample of a new node, if there is one of everything that it reads."""
        if node.op == "get_attr":
            self._values[node] = _fake(self._tensor(str(node.target)), self._mode)
        elif node.op in ("call_function", "call_method") and all(used in self for used in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
            with self._mode:
                if node.op == "call_method":
                    self._values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            if not isinstance(self._values[node], torch.Tensor) and _tells_sizes(node, self._sizes):
                self._sizes.add(node)

    def erase_unused(self, graph: fx.Graph, output: Any) -> None:
        """Take out sizes and types that were looked at and are not needed any more, nor given back."""
        needed = {leaf.node for leaf in tree_leaves(output) if isinstance(leaf, fx.Proxy)}
        for node in reversed(list(graph.nodes)):
            if not node.users and node not in needed and isinstance(self._values.get(node), _PLAIN):
                graph.erase_node(node)


_PLAIN = (bool, int, float, torch.Size, torch.dtype, torch.device, torch.layout)
_SIZES = ("shape", "size", "numel", "nelement", "stride", "is_contiguous")


def _tells_sizes(node: fx.Node, sizes: set[fx.Node]) -> bool:
    name = node.args[1] if node.target is getattr else node.target
    return name in _SIZES or any(used in sizes for used in node.all_input_nodes) or name is len


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value.detach(), static_shapes=True).requires_grad_(value.requires_grad)
