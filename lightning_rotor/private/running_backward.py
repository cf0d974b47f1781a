"""The backward that runs now, and nodes of its graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node


def backward_number() -> int | None:
    """Number of the backward in this thread, or None; ``register_multi_grad_hook`` tells backwards apart by it."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True if the running backward was called with ``retain_graph=True``. Only the caller knows it otherwise."""
backward_reaches: Callable[[Node], bool] = torch._C._will_engine_execute_node
"""True if the running backward will execute a node of its graph. Public hooks tell it when it is too late."""


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function once the running backward has run. No public hook can tell where its last node is."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def hooks_for_saved_tensors() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost ``saved_tensors_hooks``, which can be set but not read in public; None without any."""
    # True: also while the computation is traced.
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or None


# A node that is the context of a user's Function has whatever attributes its forward has set, also with names of
# torch's methods. So the class is asked.


def name_of_node(node: Any) -> str:
    """``node.name()``."""
    return str(type(node).name(node))


def before_node(node: Any, hook: Callable[..., Any]) -> Any:
    """``node.register_prehook(hook)``."""
    return type(node).register_prehook(node, hook)


def leaf_of_node(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node accumulates; None for a node that does something else."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None
