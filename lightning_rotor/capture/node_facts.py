"""Facts that are kept with the nodes of a recorded graph, and the settings that a node may run under."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import fx

OF = "of"
"""Key of ``Node.meta``: the module that a node calls; the module and the name of the tensor that it reads; or a
constant, a tensor that the forward made out of nothing."""
LINE = "line"
"""Key: file and line of the user's code that did the operation."""
UNSURE = "unsure"
"""Key: present if a function may draw random numbers, or give other bits when it runs again."""
SIZE = "size"
"""Key: the number that a size was in the recording."""
VALUED = "valued"
"""Key: present if a number depends on values: the longest row of packed sequences, a number that a module has as an
attribute, and what is computed from these."""
REGION = "region"
"""Key: the settings under which the operation runs, if these are others than the call's."""
BOUND = "bound"
"""Key: present if no stage can hand the value to another: a DTensor, of which each process has a part, or a tensor of
another layout (sparse, jagged), whose memory cannot be followed."""
OWN = "own"
"""Key: True if a node runs code that is not torch's, of which nobody knows what it does for other sizes."""

IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow),
    *(operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
)
"""Python's operators that change a tensor."""


def name_of(node: fx.Node) -> str:
    """Name of the module, method or function that a node calls."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def is_constant(node: fx.Node) -> bool:
    """True if a node is a tensor that the forward made out of nothing."""
    return node.op == "get_attr" and isinstance(node.meta[OF], torch.Tensor)


def line_of(node: fx.Node) -> str:
    """Place of the user's line that did an operation, for messages."""
    return "at {}:{}".format(*node.meta[LINE])


def longest(lengths: torch.Tensor) -> int:
    """Length of the longest of some rows: how many time steps they have once they are packed."""
    return int(lengths.max())


def total(lengths: torch.Tensor) -> int:
    """Entries of some rows once they are packed."""
    return int(lengths.sum())


@dataclass(frozen=True, slots=True)
class Region:
    """Settings of operations inside of ``torch.no_grad`` or ``torch.autocast``.

    Attributes:
        gradients: Gradients are recorded.
        autocast: Kinds of devices whose autocast the user's code has changed, if it is on there, and its type.
    """

    gradients: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of the operations. A first pass without gradients stays without."""
        gradients = self.gradients and torch.is_grad_enabled()
        with torch.set_grad_enabled(gradients), ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                # Its cache of cast weights is off for the reasons that run_stage of execution/passes has.
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield
