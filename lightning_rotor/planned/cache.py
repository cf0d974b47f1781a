"""Plans and costs of one module's calls, for each signature of their input."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_rotor.capture.module_facts import ModuleFacts
from lightning_rotor.planned.prepared import Costs, Prepared, Turn, costs_of
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.size_bounds import is_within

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

    def serves(self, signature: Signature) -> bool:
        """True if the module is as it was, and a call differs by smaller sizes at most."""
        # Facts first: they are an address compared in C, and change more often than sizes in a training with one batch
        # size.
        if not self.facts.holds() or not signature.differs_in_sizes(self.signature):
            return False
        return is_within(signature.shapes, self.signature.shapes)


class PlanCache:
    """Plans and costs by signature, turn by turn. The ``most`` signatures used last are kept.

    Attributes:
        steady: None after every change.
        roomy: A large call that runs plainly and has much more memory than it takes; smaller ones run as it does.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.steady: SteadyCall | None = None
        self.roomy: SteadyCall | None = None
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
        # Whoever asks uses it: what is asked for least is forgotten first.
        self._entries.move_to_end(signature)
        if turn in turns:
            return turns[turn]
        # Costs do not depend on what else waits for its backward. The bytes that a plan may use do.
        return replace(costs_of(next(iter(turns.values()))), turn=turn)

    def alike(self, signature: Signature, names: Sequence[str]) -> list[tuple[int, Prepared]]:
        """Sizes and plans of calls that differ from a signature in sizes alone, the nearest size first."""
        # Names of stages as well: a module may be cut anew (a layer was added) and keep its modes and types.
        wanted = signature.family
        entries = []
        for known, prepared in self.planned():
            if known.family == wanted and prepared.plan.chain.names == names:
                entries.append((known.size, prepared))
        return sorted(entries, key=lambda entry: abs(entry[0] - signature.size))

    def put(self, signature: Signature, entry: Costs | Prepared) -> None:
        """Add or replace an entry; its signature is now used last."""
        # A steady call is asked nothing, not even whether its entry is still the one of the cache. So every change
        # ends it.
        self.steady = None
        if self.roomy is not None and self.roomy.signature == signature:
            self.roomy = None
        turn = costs_of(entry).turn
        self._entries.setdefault(signature, {})[turn] = entry
        self._entries.move_to_end(signature)
        # With all turns of a signature, whose costs are the same.
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
        # A plan that its calls' seconds may still replace must be looked up at the next call. Totals of packed
        # sequences are values, which the shapes of a call do not show.
        stays = prepared.is_settled or prepared.runs_plainly
        if facts is not None and stays and prepared.is_best_known and not signature.has_totals:
            self.steady = SteadyCall(facts, signature, prepared, waiting)
            if prepared.has_much_room and (self.roomy is None or not self.roomy.serves(signature)):
                self.roomy = self.steady

    def keep_only(self, is_kept: Callable[[Signature], bool]) -> None:
        """Forget all other signatures, which no call can have any more."""
        # They may be among those that go, and are found by themselves, not in the entries.
        self.steady = self.roomy = None
        for signature in [signature for signature in self._entries if not is_kept(signature)]:
            del self._entries[signature]

    def keep_only_plans(self, is_kept: Callable[[Plan], bool]) -> None:
        """Drop all other plans, but not their costs; plans are made again when their signatures return."""
        self.steady = self.roomy = None
        for turns in self._entries.values():
            for turn, entry in turns.items():
                if isinstance(entry, Prepared) and not is_kept(entry.plan):
                    turns[turn] = entry.costs
