"""What a fit leaves for the next one: in a checkpoint, or on the callback itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from lightning_rotor.plan_records import model_fingerprint
from lightning_rotor.target import Target, may_be_planned


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """Measurements and plans for one module, in plain types alone, so that checkpoints load with ``weights_only=True``.

    Attributes:
        module: Dotted name of the module in its model.
        model: Its fingerprint.
        corrections: What the closed loop had found out, from :attr:`.process_limit.ProcessLimit.corrections`.
        ceiling_bytes: The most that a plan may take since the device ran out of memory, or None.
        records: From :meth:`lightning_rotor.planned.PlannedForward.records`.
    """

    module: str
    model: str
    corrections: dict[str, list[int]]
    ceiling_bytes: int | None
    records: list[dict[str, Any]]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedPlans | None:
        """The state of a callback, or None if it is of another version of this package."""
        try:
            return cls(**state)
        except TypeError:
            return None

    def to_state(self) -> dict[str, Any]:
        """The state of a callback."""
        return asdict(self)

    def target_in(self, model: nn.Module) -> Target | None:
        """The module in a model, or None if there is no such module in it."""
        module = dict(model.named_modules()).get(self.module)
        if module is None or not may_be_planned(module):
            return None
        target = Target(self.module, module, "as before")
        return target if self.are_for(target) else None

    def are_for(self, target: Target) -> bool:
        """Whether a module has their name, and is made like the one that they are for."""
        return target.name == self.module and model_fingerprint(target.module) == self.model
