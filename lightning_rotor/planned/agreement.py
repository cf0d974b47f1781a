"""Agreement of processes whose planned module exchanges messages, which are seen and not guessed.

Each process measures and plans for itself until a message is seen in the module's code. Its first runs are the same on
all processes, whatever their clocks say. So all see the first message in the same run, and agree from there on::

    recorded ──► compared ──► each stage forwards ──► and backwards ──► timed as often as noise asks for,
    └──────────────── watched, equally often ────────────────────┘      or equally often; plans are settled by all
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import BudgetError, MessageError, RotorError, ScheduleError
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import plain_simulation
from lightning_rotor.private.messages import MessageWatch
from lightning_rotor.private.process_groups import group_beside, processes
from lightning_rotor.private.sharding import is_dtensor
from lightning_rotor.private.torch_names import uncompiled
from lightning_rotor.profiling.ranks import Ranks
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from lightning_rotor.units import format_bytes

Told = TypeVar("Told")
# Names that a message lists.
_FEW = 5


class Offer(NamedTuple):
    """A plan as other processes hear of it: whole, it would be pickled for each, with the chain of its own batch.

    Attributes:
        missing_bytes: What recomputing nothing would lack. The first entry, so that the tightest process sorts first.
        schedule: As text.
        exceeds: The plan takes least, and is beyond its budget.
    """

    missing_bytes: int
    schedule: str
    exceeds: bool


class Agreement(Ranks):
    """One plan for processes that exchange messages in a planned module; until a message was seen, nothing.

    They run the module in lockstep anyway, and a recomputation exchanges its messages again. So at each forward they
    ask each other whether all have the same schedule for it. If not, all plan together, measure first if anyone must,
    and run the plan of the one with least room, ``beyond`` the budget if so told. A module without messages (under DDP)
    is no concern of others: each process plans for itself, and one that skips the module keeps nobody waiting.
    """

    def __init__(self, *, beyond: bool = False) -> None:
        self._beyond = beyond
        self._group: Any = None
        self._members: frozenset[int] = frozenset()
        # Names of the stages that are measured now.
        self._names: Sequence[str] = ()
        # Of this process alone until the next agreement.
        self._overdue: BudgetError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module measures for itself, and a group is no data.
        # Not by the constructor itself: pickle passes no keyword arguments.
        return Agreement._anew, (self._beyond,)

    @classmethod
    def _anew(cls, beyond: bool) -> Agreement:
        return cls(beyond=beyond)

    @property
    def together(self) -> bool:
        """True once it is known which processes run the code together: from messages, or parameters that are spread."""
        return self._group is not None

    @property
    def watches(self) -> bool:
        """True if there are other processes."""
        return processes() > 1

    @contextmanager
    def watching(self, *, marks: bool = True) -> Iterator[None]:
        """Context of code in which messages are looked for."""
        if not self.watches:
            yield
            return
        # Code under a dispatch mode is not compiled, and torch before 2.14 would never compile it again. So compiled
        # parts run as they were written while messages are looked for.
        with uncompiled(), MessageWatch(marks=marks) as seen:
            yield
        if seen.members:
            self.join(seen.members)

    def join(self, seen: Collection[frozenset[int]]) -> None:
        """Agree with the processes that messages went to: with those of one group, or else with all."""
        groups = set(seen)
        if self.together:
            groups.add(self._members)
        if len(groups) == 1:
            self._join(groups.pop())
        else:
            # Members of one group may belong to another with others, who must then agree, too.
            self.join_all()

    def _join(self, members: frozenset[int]) -> None:
        """Agree with these processes, all of whom call this at the same time."""
        if members == self._members:
            return
        with self._answered(members):
            # A group of its own, so that questions do not come between the user's messages.
            self._group = group_beside(members)
        self._members = members
        self._require_same_stages()

    @contextmanager
    def alike(self, names: Sequence[str]) -> Iterator[None]:
        """Context in which all have stages of these names, or ``MessageError``."""
        self._names = names
        try:
            self._require_same_stages()
            yield
        finally:
            self._names = ()

    def _require_same_stages(self) -> None:
        """Check that all measure stages of the same names."""
        # Names, since a stage has the name of the code that it runs. Sizes may differ, as plans are settled by room.
        if not self.together or self._same(" ".join(self._names)):
            return
        listed = list(self._names[:_FEW])
        if len(self._names) > _FEW:
            listed.append("…")
        few = ", ".join(listed)
        raise MessageError(
            f"processes {sorted(self._members)} exchange messages in a module that is not the same for this call on "
            f"all of them: here it becomes {len(self._names)} stages ({few}). Expected arguments of the same kinds on "
            "each, as a recomputation on one would send what the others do not expect; sizes may differ"
        )

    def join_all(self) -> None:
        """Agree with all processes."""
        self._join(frozenset(range(processes())))

    def join_connected(self, seen: Collection[frozenset[int]]) -> None:
        """Agree with those that this process exchanges messages with, by way of others, too, as all processes know."""
        rank = dist.get_rank() if self.watches else 0
        members = _connected(seen, rank)
        if members:
            self._join(members)

    # ---------------------------------------------------------------- questions

    def any(self, is_so: bool) -> bool:
        """True if it is so in any process: one number goes round."""
        # Alone it costs nothing: this is asked at each forward of a training without messages, too.
        if not self.together:
            return is_so
        return bool(self._largest(int(is_so))[0])

    def all_run(self, schedule: Schedule | None) -> bool:
        """True if all processes have the same schedule."""
        if not self.together:
            return schedule is not None
        if self._overdue is not None:
            # All plan then, which is where errors are told.
            schedule = None
        text = "" if schedule is None else str(schedule)
        return self._same(text) and schedule is not None

    def common(self, numbers: Set[int]) -> Set[int]:
        """The numbers that all processes have."""
        if not self.together:
            return numbers
        return frozenset(numbers).intersection(*self._told(frozenset(numbers)))

    def put_off(self, error: BudgetError) -> None:
        """Let all processes raise an error of this one, or a worse one of another, when they plan next.

        Raised at once, it would end this process alone. The others would wait for its messages, and end in an error of
        torch's that says nothing about a limit. Nobody plans behind the last step, so it is raised at once if it is
        still there when the next one ends.
        """
        if not self.together or self._overdue is not None:
            raise error
        self._overdue = error

    @property
    def overdue(self) -> BudgetError | None:
        """The error that was put off."""
        return self._overdue

    def settle(self, outcome: Plan | BudgetError, *, exceeds: bool = False) -> Plan:
        """The plan to run: one's own ``outcome``, or that of the process whose batch leaves the least room.

        ``exceeds``: the outcome is the plan that takes least, beyond its budget; a step under it shows what is needed.
        Raises ``BudgetError`` if that is the outcome of any, ``RotorError`` if no process's plan fits all.
        """
        if not self.together:
            if isinstance(outcome, BudgetError):
                raise outcome
            return outcome
        if self._overdue is not None:
            outcome, self._overdue = self._overdue, None
        answer: BudgetError | Offer
        if isinstance(outcome, Plan):
            missing_bytes = plain_simulation(outcome).peak_bytes - outcome.budget_bytes
            answer = Offer(missing_bytes, str(outcome.schedule), exceeds)
        else:
            answer = outcome
        answers = self._told(answer)
        # The error of the process that lacks most: the limit that it names is enough for all.
        errors = [each for each in answers if isinstance(each, BudgetError)]
        if errors:
            raise max(errors, key=lambda error: error.minimum_bytes - error.budget_bytes)
        offers = [each for each in answers if isinstance(each, Offer)]
        assert isinstance(outcome, Plan)
        # The tightest process's schedule mostly fits the others. Where sizes differ by noise, another one may.
        offered = list(dict.fromkeys(offer.schedule for offer in sorted(offers, reverse=True)))
        if len(offered) == 1:
            return outcome
        # Each judges them by its own costs, as batches differ in size.
        judged = [_with_schedule(outcome, schedule) for schedule in offered]
        excesses = [math.inf if plan is None else plan.peak_bytes - plan.budget_bytes for plan in judged]
        # All judge, and all come to the same conclusion: one that ended alone would leave the others waiting.
        largest_excesses = [max(of_one) for of_one in zip(*self._told(excesses), strict=True)]
        fitting = [number for number, excess_bytes in enumerate(largest_excesses) if excess_bytes <= 0]
        best = fitting[0] if fitting else largest_excesses.index(min(largest_excesses))
        settled = judged[best]
        may_exceed = self._beyond or any(offer.exceeds for offer in offers)
        if settled is None or largest_excesses[best] == math.inf or not (fitting or may_exceed):
            raise RotorError(
                f"no plan fits all processes, of which this one has a chain of {len(outcome.chain)} stages and a "
                f"budget of {format_bytes(outcome.budget_bytes)}: expected batches of about the same shape on all of "
                "them, since the planned module communicates"
            )
        return replace(settled, budget_bytes=max(settled.budget_bytes, settled.peak_bytes))

    def _same(self, text: str) -> bool:
        """True if all say the same text."""
        # A number that names it goes round, and its negative: the largest of both are its own only if all are equal.
        # It is asked at every forward, so it is one all_reduce of two numbers, and no gathering of objects.
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return self._largest(number, -number) == [number, -number]

    def _largest(self, *numbers: int) -> list[int]:
        """The largest of any process in each place."""
        largest = torch.tensor(numbers, device="cpu")
        with self._answered(self._members):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest.tolist()

    def _told(self, value: Told) -> list[Told]:
        with self._answered(self._members):
            return answers_of_all(value, self._group)

    @contextmanager
    def _answered(self, members: Iterable[int]) -> Iterator[None]:
        """Context of a question to other processes."""
        try:
            yield
        except RuntimeError as error:
            raise MessageError(
                f"processes {sorted(members)} exchange messages in the planned module, so they agree on a plan at each "
                "call of it, but not all of them answer: expected each to call it as often as the others, in training. "
                "Either one has ended with an error of its own, which comes first, or it does not call the module in "
                f"this step. torch said: {error}"
            ) from error


def answers_of_all(value: Told, group: Any = None) -> list[Told]:
    """The values of all processes of a group, by default of all there are, in their order. Each waits for all."""
    heard = [value] * dist.get_world_size(group)
    dist.all_gather_object(heard, value, group=group)
    return heard


def is_spread(module: nn.Module) -> bool:
    """True if parameters are spread over processes: messages come before and behind forwards, where nobody watches."""
    return any(map(is_dtensor, module.parameters()))


def _connected(seen: Iterable[frozenset[int]], rank: int) -> frozenset[int]:
    """All processes that one exchanges messages with, by way of others, too; empty if it exchanges none."""
    # A circle of agreements that is too small leaves a process waiting for one that asks nobody.
    groups = list(seen)
    if not any(rank in members for members in groups):
        return frozenset()
    connected = frozenset((rank,))
    while True:
        touching = [members for members in groups if members & connected and not members <= connected]
        if not touching:
            return connected
        connected = connected.union(*touching)


def _with_schedule(plan: Plan, schedule: str) -> Plan | None:
    """A plan with another process' schedule, or None if that is not for such a chain."""
    try:
        parsed = Schedule.parse(schedule)
        simulation = simulate(plan.chain, parsed, **plan.conditions)
    except ScheduleError:
        return None
    return replace(plan, schedule=parsed, simulation=simulation)
