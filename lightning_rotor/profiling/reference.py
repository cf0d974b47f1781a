"""Whether the stages of a traced module compute what the module computes: run both once, and compare every bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.cuts import GraphCut
from lightning_rotor.capture.modules import firsts_of
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.options import kept_attributes, lent_buffers, run_stage, undisturbed
from lightning_rotor.execution.recomputation import recomputed
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.private.values import same_bits, tensors_in, tree_flatten, tree_leaves, tree_unflatten
from lightning_rotor.profiling.storages import Boundary
from lightning_rotor.stages.sequential import Stage, wiring_of
from lightning_rotor.stages.state import GeneratorStates


def require_same(module: nn.Module, cut: GraphCut, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that stages give a module's outputs, buffers and random numbers. Nothing of the module changes.

    Saved tensors are dropped, so this takes no more memory than a forward without gradients.

    Args:
        module: The module.
        cut: What it was cut into, for calls like this one.
        args: Positional arguments of a call.
        kwargs: Keyword arguments.
    Raises:
        ModelError: Something differs, and it is not the module that gives other bits each time.
    """
    boundary = Boundary.of((tuple(args), dict(kwargs)))
    firsts = firsts_of(tree_leaves((tuple(args), dict(kwargs))))

    def fresh() -> Any:
        leaves, spec = tree_flatten(boundary.fresh())
        return tree_unflatten([leaves[first] for first in firsts], spec)

    constants = [
        constant for stage in cut.stages for piece in stage.modules for constant in getattr(piece, "constants", ())
    ]
    versions = [version_of(constant) for constant in constants]

    def plain() -> Any:
        args, kwargs = fresh()
        return type(module).forward(module, *args, **kwargs)

    def staged() -> Any:
        return wiring_of(cut.stages).run(cut.take(*fresh()), [partial(run_stage, stage) for stage in cut.stages])

    device = tensors_in((args, kwargs))[0].device
    whole = Stage(type(module).__name__, (module,))
    with undisturbed(device):
        try:
            received = _outcome(whole, staged, device)
        except InverseError:  # it names its stage, which the plain module's error would not
            raise
        except Exception:
            _outcome(whole, plain, device)  # what is wrong with the input is said by the module itself
            raise
        expected = _outcome(whole, plain, device)
        if versions != [version_of(constant) for constant in constants]:
            raise ModelError(
                f"the forward of {type(module).__name__} changes a tensor in place that it has made itself without any input, so a trace "
                "would change it again in every step. Move that part into a submodule"
            )
        difference = _difference(expected, received)
        if difference is not None and _difference(expected, _outcome(whole, plain, device)) is None:
            raise ModelError(
                f"the trace of {type(module).__name__} does not compute what the module does: {difference}. Its forward takes decisions that "
                "no trace sees (type(x) is torch.Tensor, the answers of C++ code): move them into a submodule"
            )


def _outcome(whole: Stage, forward: Any, device: torch.device) -> tuple[Any, list[torch.Tensor], GeneratorStates]:
    """Output, buffers and generators after a run from the present state; the state is set back."""
    states = GeneratorStates(device)
    with kept_attributes(whole), lent_buffers(whole) as slots:
        output = Boundary.of(recomputed(forward, draws_random=False))
        buffers = [module._buffers[name] for module, name, _ in slots]
    after = GeneratorStates(device)
    states.restore()
    return output, [buffer for buffer in buffers if buffer is not None], after


def _difference(left: Any, right: Any) -> str | None:
    (expected, buffers, states), (received, other_buffers, other_states) = left, right
    if str(expected.spec) != str(received.spec) or len(expected.leaves) != len(received.leaves):
        return "the outputs are nested differently"
    for mine, theirs in zip(expected.leaves, received.leaves, strict=True):
        same = (
            same_bits(mine, theirs)
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
            else mine == theirs
        )
        if not same:
            return "the outputs differ"
    if expected.requires_grad != received.requires_grad:
        return "other outputs require a gradient"
    if len(buffers) != len(other_buffers) or not all(map(same_bits, buffers, other_buffers)):
        return "buffers are updated differently"
    if not states.equals(other_states):
        return "other random numbers are drawn"
    return None
