"""The running step: its calls, which of them wait for their backward together, and its peaks phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.executor import Pending
from lightning_rotor.memory.held import own_gradients
from lightning_rotor.planned.cache import Prepared, Turn
from lightning_rotor.planned.cuts import Signature
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planned.plans import Plans
from lightning_rotor.planning import Plan
from lightning_rotor.private.values import sizes_by_address
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.meters import END, MeteredPhase

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
        return self.plans.cache.use(self.signature, self.turn)


@dataclass(slots=True)
class Step:
    """The running step, with the batch as it was given; ``is_over`` once its optimizer has stepped.

    Attributes:
        batch: The tensors of the batch, and ``is_first`` if no optimizer has stepped before; None until somebody asks.
        paths: Calls that wait for their backward together, in the order of their forwards; the running one is last.
        numbers: Of its calls, from 0 on.
        is_shared: A call was planned with a part of what is left, because others were to come.
        other_bytes: What else a GPU's allocator had given out when the first forward began.
        missing: What later steps will hold besides, in forwards and in backwards.
    """

    given: Any
    batch: list[torch.Tensor] = field(default_factory=list)
    is_first: bool | None = None
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


# --------------------------------------------- The peaks of the first steps under each plan, as the allocator saw them.

_STEPS = 3
_PATIENCE = 8


class StepWatch:
    """Measures a few steps of training after each plan, then leaves training alone.

    Attributes:
        peak_bytes: The allocator's peak in the step measured last, what was there before included; None before it.
        reserved_bytes: Most that a GPU's caching allocator had reserved in that step; None on the CPU.
        backward_peak_bytes: The peak until the optimizer's step, the only part that a plan can change.
        phases: Of that step, up to there, in order, with what was there before it.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.backward_peak_bytes = 0
        self.phases: list[MeteredPhase] = []
        self._left = 0
        self._meter: StepMeter | None = None
        self._base_bytes = 0
        self._model: nn.Module = nn.Module()
        self._seen: dict[int, ReferenceType[torch.Tensor]] = {}  # gradients that a meter saw made, by identity
        self._older: list[tuple[ReferenceType[torch.Tensor], int]] = []  # others, which no meter will see go
        self._gone_bytes: list[int] = []  # of them, when a phase began
        self._is_uneven = False  # more is taken in this step than is seen to be given back
        self._patience = _PATIENCE
        self._was_interrupted = False

    @property
    def due(self) -> bool:
        """True if the next step is to be measured."""
        return self._left > 0

    @property
    def running(self) -> bool:
        """True while a step is being measured."""
        return self._meter is not None

    def renew(self) -> None:
        """Measure the steps that follow, as there is a new plan."""
        self._left = _STEPS

    def give_up(self) -> None:
        """Measure no more steps under this plan."""
        self._left = 0

    def start(self, loop: TrainingLoop, batch: Sequence[torch.Tensor]) -> None:
        """Begin with a step, at its very start or, when a plan is new, in its first forward.

        Not after an interruption in the same step: what torch's profiler saw begin in one recording (the optimizer's
        step, around its closure) and end in another, it notes in freed memory, and the process crashes (torch 2.14).
        """
        if self._was_interrupted:
            return
        on_cpu = loop.device.type == "cpu"
        if on_cpu and loop.profiler_is_taken:
            self.give_up()  # torch has one profiler, and the user wants it
            return
        meter = StepMeter(loop.device)
        try:
            meter.start()
        except ProfilingError as error:
            self.give_up()
            loop.warn(f"RotorCallback cannot measure the peak of this step: {error}")
            return
        self._meter = meter
        self._model = loop.model
        # The CPU's meter sees only those go that were made under its eyes.
        others = [each for each in own_gradients(loop.model) if on_cpu and not self._has_seen(each)]
        self._older = [(ref(each), each.nbytes) for each in others]
        self._gone_bytes = [0]
        self._base_bytes = loop.allocated_bytes(batch)
        self._is_uneven = on_cpu and loop.may_take_new_buckets()

    def mark(self, label: str = END) -> None:
        """Begin a phase of the step, if it is measured; without a label, what no plan can change."""
        if self._meter is not None:
            self._gone_bytes.append(sum(size for tensor, size in self._older if tensor() is None))
            self._meter.lap(label)

    def stop(self) -> bool:
        """End with a step. True if there are new peaks."""
        self._was_interrupted = False
        if self._meter is None:
            return False
        trace, self._meter = self._meter.stop(), None
        self._note_gradients()
        if self._is_uneven and self._patience > 0:
            # New buckets came, but the old ones, never measured, did not show as freed: measure another step.
            self._patience -= 1
            return False
        self._left -= 1
        phases = [
            phase.raised(self._base_bytes - gone) for phase, gone in zip(trace.phases, self._gone_bytes, strict=True)
        ]
        self.phases = [phase for phase in phases if phase.label != END]
        self.peak_bytes = max(phase.peak_bytes for phase in phases)
        self.backward_peak_bytes = max(phase.peak_bytes for phase in self.phases)
        self.reserved_bytes = trace.reserved_bytes
        return True

    def drop(self) -> None:
        """Give torch's one profiler back: a new input shape is about to be measured, or training is over."""
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
            self._note_gradients()
            self._was_interrupted = True

    def _note_gradients(self) -> None:
        """Remember which gradients were made under a meter's eyes."""
        older = {id(tensor()) for tensor, _ in self._older}
        new = [each for each in own_gradients(self._model) if id(each) not in older]
        self._seen = {id(each): ref(each) for each in new}

    def _has_seen(self, gradient: torch.Tensor) -> bool:
        seen = self._seen.get(id(gradient))
        return seen is not None and seen() is gradient
