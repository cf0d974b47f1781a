"""Plans and costs of one module's calls, for each signature of their input."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.planned.prepared import Costs, Prepared, Turn, costs_of
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan

MAX_PLANS = 64
"""Signatures that are kept by default."""


@dataclass(frozen=True, slots=True, eq=False)
class SteadyCall:
    """The call that came last, if its plan stays. Nothing else is asked of a call that is like it.

    Attributes:
        facts: Of the module.
        signature: Of the call.
        prepared: With the plan that it has run under.
        waiting: With the plans of the calls that waited for their backward when it began.
    """

    facts: ModuleFacts
    signature: Signature
    prepared: Prepared
    waiting: tuple[Prepared, ...] = ()


class PlanCache:
    """Plans and costs by signature, turn by turn. The ``most`` signatures used last are kept.

    Attributes:
        steady: None after every change.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.steady: SteadyCall | None = None
        self._entries: OrderedDict[Signature, dict[Turn, Costs | Prepared]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, signature: Signature | None) -> bool:
        return signature in self._entries

    def __iter__(self) -> Iterator[tuple[Signature, Costs | Prepared]]:
        for signature, turns in self._entries.items():
            for entry in turns.values():
                yield signature, entry

    def planned(self) -> Iterator[tuple[Signature, Prepared]]:
        """Entries that have a plan."""
        return ((signature, entry) for signature, entry in self if isinstance(entry, Prepared))

    @property
    def latest(self) -> tuple[Signature, Costs | Prepared]:
        """An entry of the signature used last."""
        signature, turns = next(reversed(self._entries.items()))
        return signature, next(iter(turns.values()))

    def use(self, signature: Signature, turn: Turn = ()) -> Costs | Prepared | None:
        """The entry of a signature, now used last. Costs of one turn are those of the others, but not the plan."""
        turns = self._entries.get(signature)
        if turns is None:
            return None
        self._entries.move_to_end(signature)
        if turn in turns:
            return turns[turn]
        return replace(costs_of(next(iter(turns.values()))), turn=turn)

    def alike(self, signature: Signature, names: Sequence[str]) -> list[tuple[int, Prepared]]:
        """Sizes and plans of calls that differ from a signature in sizes alone, the nearest size first."""
        wanted = signature.family
        entries = []
        for known, prepared in self.planned():
            if known.family == wanted and prepared.plan.chain.names == names:
                entries.append((known.size, prepared))
        return sorted(entries, key=lambda entry: abs(entry[0] - signature.size))

    def put(self, signature: Signature, entry: Costs | Prepared) -> None:
        """Add or replace an entry; its signature is now used last."""
        self.steady = None
        turn = costs_of(entry).turn
        self._entries.setdefault(signature, {})[turn] = entry
        self._entries.move_to_end(signature)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def note_last(
        self,
        signature: Signature,
        prepared: Prepared,
        facts: ModuleFacts | None,
        waiting: tuple[Prepared, ...] = (),
    ) -> None:
        """Note the call that came last, if nothing about its entry may change by itself; facts are of its module."""
        self.steady = None
        stays = prepared.is_settled or prepared.runs_plainly
        if facts is not None and stays and prepared.is_best_known and not signature.has_totals:
            self.steady = SteadyCall(facts, signature, prepared, waiting)

    def keep_only(self, is_kept: Callable[[Signature], bool]) -> None:
        """Forget all other signatures, which no call can have any more."""
        self.steady = None
        for signature in [signature for signature in self._entries if not is_kept(signature)]:
            del self._entries[signature]

    def keep_only_plans(self, is_kept: Callable[[Plan], bool]) -> None:
        """Drop all other plans, but not their costs; plans are made again when their signatures return."""
        self.steady = None
        for turns in self._entries.values():
            for turn, entry in turns.items():
                if isinstance(entry, Prepared) and not is_kept(entry.plan):
                    turns[turn] = entry.costs
