"""Settings of all plans of a module."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_rotor.capture.compiled import Variants
from lightning_rotor.offload import Offload
from lightning_rotor.planned.cache import MAX_PLANS
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.units import require_positive_integer


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of all plans of a module.

    Attributes:
        slots: Resolution of the planner.
        max_plans: Signatures that are kept.
        compiled_variants: Under which other memory budgets compiled blocks may run.
        show_progress: Show a progress bar while measuring or planning takes long.
        offload: Where plans may move what stages hold; None if they move nothing.
    Raises:
        OptionError: ``slots`` or ``max_plans`` is no positive integer.
    """

    slots: int = DEFAULT_SLOTS
    max_plans: int = MAX_PLANS
    compiled_variants: Variants = "exact"
    show_progress: bool = True
    offload: Offload | None = None

    def __post_init__(self) -> None:
        require_positive_integer("slots", self.slots, DEFAULT_SLOTS)
        require_positive_integer("max_plans", self.max_plans, MAX_PLANS)
