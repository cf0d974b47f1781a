"""The calls of planned modules in a step, which of them wait for their backward together, and what lies around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import ReferenceType

import torch

from lightning_rotor.execution.executor import Pending
from lightning_rotor.planned.cache import Prepared, Signature
from lightning_rotor.planned.plans import Plans
from lightning_rotor.planned.target import Target
from lightning_rotor.planning import Plan
from lightning_rotor.profiling.meters import MeteredPhase

LOSS = "loss"
"""Label of the phase that begins with the backward."""


class Called(Protocol):
    """A planned module, as far as its calls know it."""

    target: Target

    @property
    def plans(self) -> Plans:
        """Plans of its forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call in the running step."""

    module: Called
    signature: Signature
    prepared: Prepared
    pending: ReferenceType[Pending]

    @property
    def waits(self) -> bool:
        """True until its backward has come, or its graph is gone."""
        pending = self.pending()
        return pending is not None and pending.waits

    @property
    def plan(self) -> Plan:
        """What it has run under."""
        assert self.prepared.plan is not None
        return self.prepared.plan

    @property
    def key(self) -> CallKey:
        """Equal for the same call in other steps."""
        return CallKey(self.module, self.signature, self.prepared.turn)


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a call has in every step."""

    module: Called
    signature: Signature
    turn: int

    @property
    def name(self) -> str:
        """Of the module."""
        return self.module.target.name

    def prepared(self) -> Prepared | None:
        """What is known of it, if that is still known."""
        return self.module.plans.known(self.signature, self.turn)


@dataclass(frozen=True, slots=True)
class Outside:
    """What the user's code behind a call takes, beyond what is there when that call has run.

    Attributes:
        held_bytes: Stays until its backward.
        backward_peak_bytes: The same in its backward, beyond what is there when that begins.
        left_bytes: Stays behind its backward, the call's output or its gradient included.
        found_bytes: What the step has made before the call, if that is its first.
    """

    held_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    left_bytes: int = 0
    found_bytes: int = 0


@dataclass(slots=True)
class Step:
    """The running step; ``is_over`` once its optimizer has stepped.

    Attributes:
        paths: Calls that wait for their backward together, in the order of their forwards; the running one is last.
        numbers: Of its calls, from 0 on.
        is_shared: A call was planned with a part of what is left, because others were to come.
        other_bytes: What else a GPU's allocator had given out when the first forward began.
        gradient_bytes: That existed when the last call had run.
        freed_bytes: The part of them that was gone when the backward began.
        new_bytes: Gradients outside of the planned modules that the backward made.
    """

    batch: list[torch.Tensor]
    is_first: bool
    paths: list[tuple[Call, ...]] = field(default_factory=list)
    numbers: dict[Call, int] = field(default_factory=dict)
    is_shared: bool = False
    other_bytes: int | None = None
    gradient_bytes: int = 0
    freed_bytes: int = 0
    new_bytes: int = 0
    is_over: bool = False

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls whose backward is still to come."""
        return tuple(call for call in self.paths[-1] if call.waits) if self.paths else ()

    def add(self, call: Call) -> None:
        """A call has run."""
        self.numbers[call] = len(self.numbers)
        waiting = self.waiting
        if self.paths and waiting == self.paths[-1]:
            self.paths.pop()
        self.paths.append((*waiting, call))

    def outside(self, call: Call, phases: Mapping[str, MeteredPhase]) -> Outside | None:
        """What the code around a call has taken, or None if it was not measured."""
        number = self.numbers[call]
        behind = phases.get(f"behind {number}")
        begin = phases.get(f"into {number}")
        if behind is None or (number == 0 and begin is None):
            return None
        found_bytes = max(begin.start_bytes, 0) if number == 0 and begin is not None else 0
        peak_bytes = behind.peak_bytes - behind.start_bytes
        following = next(iter(list(phases)[list(phases).index(behind.label) + 1 :]), "")
        if following != LOSS:
            held_bytes = max(behind.end_bytes - behind.start_bytes, 0) if following.startswith("into") else 0
            return Outside(held_bytes, peak_bytes, peak_bytes, found_bytes=found_bytes)
        loss = phases[LOSS]
        freed_bytes = self.freed_bytes - behind.start_bytes
        return Outside(
            held_bytes=max(loss.start_bytes + freed_bytes, 0),
            forward_peak_bytes=peak_bytes,
            backward_peak_bytes=max(loss.peak_bytes - loss.start_bytes - self.new_bytes, 0),
            left_bytes=max(loss.end_bytes + freed_bytes - self.new_bytes, 0),
            found_bytes=found_bytes,
        )
