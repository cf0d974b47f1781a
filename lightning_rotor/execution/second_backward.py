"""A second backward through segments whose saved tensors are freed, told in words that help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private.pytree import tree_leaves
from lightning_rotor.private.torch_names import backward_keeps_graph, backward_number


def guard_second_backward(output: Any, value: Any) -> None:
    """Turn torch's error about a freed graph into one that names the remedy."""
    given = {id(tensor.grad_fn) for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)}
    for tensor in tree_leaves(output):
        # What is handed through belongs to the caller's graph.
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
            tensor.grad_fn.register_prehook(_once_unless_retained())


def _once_unless_retained() -> Callable[[Any], None]:
    finished: list[int | None] = []

    def check(_: Any) -> None:
        backward = backward_number()
        if finished and finished[0] != backward:
            raise ExecutionError(
                "backward ran a second time through a graph whose saved tensors are freed: expected one backward per forward. "
                "Call backward(retain_graph=True) the first time, or run the forward again"
            )
        if not backward_keeps_graph():
            finished[:] = [backward]

    return check
