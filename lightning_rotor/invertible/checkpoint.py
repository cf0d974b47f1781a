"""Training modules without their inputs, with no planner around."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_rotor.execution.inversion import Way, can_be_fused, run_inverted
from lightning_rotor.invertible.layers import members
from lightning_rotor.private.torch_names import outside_of_graphs
from lightning_rotor.stages.sequential import Stage, require_invertible


def invertible_checkpoint(module: nn.Module | Sequence[nn.Module], x: Any, *, name: str | None = None) -> Any:
    """Call a module so that the backward rebuilds its input from its output instead of holding it.

    A run of modules, in a list, an :class:`~lightning_rotor.invertible.InvertibleSequential` or several calls in a row,
    holds the last output alone. Nothing is freed that others refer to: ``x + invertible_checkpoint(module, x)`` is
    right, and holds ``x``.

    Gradients are those of a plain call up to rounding in the rebuilt inputs. The backward sees autocast, generators and
    buffers of the forward, and leaves them alone. Without gradients it is a plain call. Under others' hooks for saved
    tensors (``torch.utils.checkpoint``, ``save_on_cpu``) each module gives its output to them.

    Args:
        module: With an ``inverse``; or several, to run in a row. A ``reversible_backward`` is used if there is one.
        x: A tensor, or tensors in a tuple, list or dict.
        name: Of the module in error messages; by default its type's.
    Returns:
        The output of the module.
    Raises:
        InverseError: A module has no inverse, changes its input in place, or returns less than it took. In the
            backward: the inverse returns something else than the forward took, or is off by more than :class:`Guard`
            allows.
        ExecutionError: A second backward without ``retain_graph=True`` in the first; a gradient of a gradient; an
            output, a parameter or a buffer changed before the backward; a tensor that requires a gradient and is
            neither input nor parameter.
    Warns:
        RotorWarning: In the backward: an inverse in float16 or bfloat16 is off by more than the guard expects.
    Example:
        >>> block = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> invertible_checkpoint([block] * 100, torch.randn(2, 8)).sum().backward()
    """
    return _in_a_row(module, x, name)


@outside_of_graphs
def _in_a_row(module: nn.Module | Sequence[nn.Module], x: Any, name: str | None) -> Any:
    for member_name, member in _steps(module, name):
        require_invertible(member, name=member_name)
        x = run_inverted(Way(Stage(member_name, (member,)), can_be_fused(member)), x)
    return x


def _steps(module: nn.Module | Sequence[nn.Module], name: str | None) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Module):
        yield from members(module, name or "")
        return
    for index, member in enumerate(module):
        yield from members(member, f"{name}.{index}" if name else str(index))
