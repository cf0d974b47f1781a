"""The backward of a call: still to come, or over. A second one through freed tensors is an error with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import tree_leaves


class Pending:
    """Hangs at the outputs of a call, and goes with its graph. ``waits`` is True until its backward begins.

    With ``once``, saved tensors are freed in the backward: a second one is an ``ExecutionError`` that names the remedy.
    ``on_backward`` is called when one begins.
    """

    __slots__ = ("__weakref__", "_backward", "_once", "on_backward")

    def __init__(self, *, once: bool) -> None:
        self._once = once
        self.on_backward: Callable[[], None] | None = None
        # Number of the backward that does not retain the graph.
        self._backward: int | None = None

    @property
    def waits(self) -> bool:
        """True until a backward has come that does not retain the graph."""
        return self._backward is None

    def __call__(self, _: Any) -> None:
        """A backward has reached the call."""
        # By number, and not by a flag: one backward may reach a call through each of its outputs.
        backward = private.backward_number()
        if self._once and self._backward not in (None, backward):
            raise ExecutionError(
                "backward ran a second time through a graph whose saved tensors are freed: expected one backward per "
                "forward. Call backward(retain_graph=True) the first time, or run the forward again"
            )
        # Every backward begins here, also one that keeps the graph for another: what waits behind it must know.
        if self.on_backward is not None and self._backward != backward:
            self.on_backward()
        if not private.backward_keeps_graph():
            self._backward = backward


def await_backward(output: Any, value: Any, *, once: bool) -> ReferenceType[Pending]:
    """A reference to what waits for the backward of a call, dead when its graph is gone. ``value`` is its input."""
    pending = Pending(once=once)
    inputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    nodes_before = {id(tensor.grad_fn) for tensor in inputs}
    for leaf in tree_leaves(output):
        if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
            continue
        # Inputs that are handed through belong to the caller's graph.
        if id(leaf.grad_fn) not in nodes_before:
            private.before_node(leaf.grad_fn, pending)
    return ref(pending)
