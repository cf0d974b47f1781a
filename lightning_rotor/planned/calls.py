"""The calls of planned modules in a step, which of them wait for their backward together, and what lies around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ReferenceType

import torch

from lightning_rotor.execution.executor import Pending
from lightning_rotor.planned.cache import Prepared, Signature, Turn
from lightning_rotor.planned.plans import Plans
from lightning_rotor.planning import Plan
from lightning_rotor.private.values import sizes_by_address
from lightning_rotor.profiling.meters import MeteredPhase

LOSS = "loss"
"""Label of a phase that begins with a backward."""
INTO, BEHIND, BACK = "into", "behind", "back to"
"""How labels begin of the phases that begin with a call's forward, behind it, and with its backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call in the running step."""

    key: CallKey
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
    def has_another_plan(self) -> bool:
        """True if it will run under another one in the next step."""
        prepared = self.key.prepared()
        return prepared is None or prepared.plan is not self.plan


@dataclass(frozen=True, slots=True)
class CallKey:
    """What a call has in every step; ``plans`` are of its module."""

    plans: Plans
    signature: Signature
    turn: Turn

    @property
    def name(self) -> str:
        """Of the module."""
        return self.plans.name

    def prepared(self) -> Prepared | None:
        """What is known of it, if that is still known."""
        return self.plans.known(self.signature, self.turn)


@dataclass(slots=True)
class Step:
    """The running step; ``is_over`` once its optimizer has stepped.

    Attributes:
        paths: Calls that wait for their backward together, in the order of their forwards; the running one is last.
        numbers: Of its calls, from 0 on.
        is_shared: A call was planned with a part of what is left, because others were to come.
        other_bytes: What else a GPU's allocator had given out when the first forward began.
        missing: What later steps will hold besides, in forwards and in backwards.
    """

    batch: list[torch.Tensor]
    is_first: bool
    paths: list[tuple[Call, ...]] = field(default_factory=list)
    numbers: dict[Call, int] = field(default_factory=dict)
    is_shared: bool = False
    other_bytes: int | None = None
    missing: tuple[int, int] = (0, 0)
    is_over: bool = False

    @property
    def waiting(self) -> tuple[Call, ...]:
        """Calls whose backward is still to come."""
        return tuple(call for call in self.paths[-1] if call.waits) if self.paths else ()

    @property
    def is_joint(self) -> bool:
        """True if some of its calls were alive together, or could have been."""
        return self.is_shared or any(len(path) > 1 for path in self.paths)

    def as_later(self, phases: Iterable[MeteredPhase]) -> list[MeteredPhase]:
        """Its phases, with what later steps hold besides."""
        forward, backward = self.missing
        return [
            phase.raised(backward if phase.label == LOSS or phase.label.startswith(BACK) else forward)
            for phase in phases
        ]

    def find(self, taken: Iterable[torch.Tensor]) -> None:
        """Count the input of the first call that the step has made before a meter of the CPU could see it."""
        batch = sizes_by_address(self.batch)
        made_bytes = sum(size for address, size in sizes_by_address(taken).items() if address not in batch)
        self.missing = self.missing[0] + made_bytes, self.missing[1] + made_bytes

    def add(self, call: Call) -> None:
        """A call has run."""
        self.numbers[call] = len(self.numbers)
        waiting = self.waiting
        if self.paths and waiting == self.paths[-1]:
            self.paths.pop()
        self.paths.append((*waiting, call))
