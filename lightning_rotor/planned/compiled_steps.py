"""Steps of a model that the user compiled as a whole, which run as they are for as long as they keep the limit.

A plan takes compiled code apart, so nothing is planned before a step has shown that something must be recomputed. The
first steps are measured, a few later ones, and each with a larger batch than all before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_rotor.capture.compiled import objection_to_planning_inside, uncompiled_warning
from lightning_rotor.errors import ModelError
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.target_search import Target
from lightning_rotor.private.torch_names import (
    INNER,
    compiled_call_of,
    has_compiled_method,
    is_compiled,
    settings_told_by,
)
from lightning_rotor.stages.submodules import submodule_of

PRESSED_KEY = "pressed"
"""Key of what is saved of a training that ran out of memory as it was compiled. No event of the step's state."""


def compiled_around(loop: TrainingLoop, target: Target, not_inside: Mapping[str, str] | None = None) -> str | None:
    """A message that a plan for a target takes apart what the user compiled; None if that is not so.

    Blocks that were compiled inside of a target stay compiled under a plan. ``not_inside`` has the reasons why modules
    of these names cannot be planned inside of their graph.
    """
    model = loop.model
    if loop.is_compiled:
        return uncompiled_warning("the LightningModule")
    if has_compiled_method(model, "training_step"):
        return uncompiled_warning("training_step", what="the modules in it")
    parts = target.name.split(".") if target.name else []
    # From the inside out: what is closest to the target is what its plan takes apart.
    for length in range(len(parts), -1, -1):
        name = ".".join(parts[:length])
        module = submodule_of(model, name)
        if is_compiled(module) or has_compiled_method(module, "forward") or name.rpartition(".")[2] == INNER:
            # torch.compile(module) wraps it, and the settings that it was compiled with belong to the wrapper.
            outer = name.removesuffix(INNER).removesuffix(".")
            call = compiled_call_of(submodule_of(model, outer))
            objection = "" if call is None else objection_to_planning_inside(settings_told_by(call), module)
            reasons = not_inside or {}
            reason = reasons.get(name) or reasons.get(outer) or objection
            return uncompiled_warning(repr(name) if name else "the model", reason=reason)
    return None


def require_several_graphs(loop: TrainingLoop, target: Target, message: str) -> None:
    """Raise ``ModelError`` if what a plan for a target takes apart was compiled with ``fullgraph=True``."""
    parts = target.name.split(".") if target.name else []
    for length in range(len(parts) + 1):
        call = compiled_call_of(submodule_of(loop.model, ".".join(parts[:length])))
        settings = None if call is None else settings_told_by(call)
        if settings is not None and settings.fullgraph:
            raise ModelError(
                f"fullgraph=True lets this model run under no plan that keeps mem_limit: {message}; or a higher "
                "mem_limit"
            )


def whole_around(loop: TrainingLoop, target: Target) -> Target | None:
    """The outermost module around a target, or the target, that was compiled as a whole; None if there is none.

    Its graph may be planned inside. Code around the modules that was compiled with them is no module, so it has none.
    """
    model = loop.model
    parts = target.name.split(".") if target.name else []
    for length in range(len(parts) + 1):
        name = ".".join(parts[:length])
        module = submodule_of(model, name)
        call = compiled_call_of(module)
        if call is None:
            continue
        # Processes would have to compile the same graphs at the same time, and nobody sees to that.
        if loop.processes > 1 or loop.is_compiled or has_compiled_method(model, "training_step"):
            return None
        if objection_to_planning_inside(settings_told_by(call), module):
            return None
        # Outputs that nobody reads are known of the target alone, not of a module around it.
        is_same = name == target.name or f"{name}.{INNER}".lstrip(".") == target.name
        unused_outputs = target.unused_outputs if is_same else frozenset[int]()
        return Target(name, module, target.reason, unused_outputs=unused_outputs)
    return None


class CompiledSteps:
    """The largest step that has kept the limit, and what it says of others."""

    def __init__(self) -> None:
        self._batch_bytes = 0
        self._held_bytes = 0
        self._peak_bytes = 0

    def is_new(self, batch: Sequence[torch.Tensor]) -> bool:
        """True if no batch as large as this one has been measured."""
        return _bytes_of(batch) > self._batch_bytes

    def foresees_excess(self, batch: Sequence[torch.Tensor], limit_bytes: int) -> bool:
        """True if a step takes more than the limit where activations grow as the batch does."""
        if not self._batch_bytes:
            return False
        # Weights and what else a step begins with do not grow with the batch. What comes on top does, in step with it,
        # but for attention over a longer sequence, which is found when that step is measured.
        growth = _bytes_of(batch) / self._batch_bytes
        activation_bytes = self._peak_bytes - self._held_bytes
        return growth > 1 and self._held_bytes + growth * activation_bytes > limit_bytes

    def note(self, batch: Sequence[torch.Tensor], *, held_bytes: int, peak_bytes: int) -> None:
        """Remember a step that has kept the limit: what it began with, and its peak."""
        batch_bytes = _bytes_of(batch)
        # Of batches of one size the higher peak, since values may decide what a forward takes.
        if (batch_bytes, peak_bytes) > (self._batch_bytes, self._peak_bytes):
            self._batch_bytes = batch_bytes
            self._held_bytes = held_bytes
            self._peak_bytes = peak_bytes


def _bytes_of(batch: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in batch)
