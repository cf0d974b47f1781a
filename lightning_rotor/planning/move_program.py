r"""A dynamic program over two resources: memory, and what the link has still to carry.

Only the step's own forward can move things, as what a recomputation keeps lives too short. So only the last column of
the table of :mod:`.dynamic_program` gets a second dimension, and bodies of segments are looked up in it. ``m`` is the
memory for stages ``i ..``, ``q`` what earlier stages still hold that is on its way out when stage ``i`` begins, both in
slots. ``d`` is what the link carries during a forward::

    rest(i, m, q) = the least of
        stage i kept       if m - q is enough:   t_i + rest(i+1, m - s_i, max(q - d_i, 0))
        stage i moved      likewise:             t_i + rest(i+1, m,       max(q - d_i, 0) + s_i)
        segment i..e       likewise:             body(m - a_i - q, i, e) + rest(e+1, m - a_i, max(q - d_i..e, 0))
        its input moved    likewise:             the same body           + rest(e+1, m,       max(q - d_i..e, 0) + a_i)
        waiting            one slot less to carry: seconds of the copy + rest(i, m, q - 1)

``q`` also bounds the mirror image, what copies back take while the backward of stage ``i`` runs. Both sides start from
nothing, and a backward takes no less than its forward, so what is on its way back is no more than was on its way out.
If copies back are slower, their speed counts for both ways. Behind a wait the bound does not hold; that is as good as
any other approximation here, since the simulator judges in bytes and seconds, and :mod:`.placing` chooses the points.

Long segments are tried at some lengths only, so it takes O(n log n S²) time on top of the table's O(n³ S), for ``n``
stages and ``S`` slots.

Source: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs"
(POFO), NeurIPS 2021, which has a dimension for the copies back as well.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.link import Link
from lightning_rotor.planning.bodies import Bodies
from lightning_rotor.planning.dynamic_program import Table
from lightning_rotor.planning.kernels import CLASS, Choices, Integers, Seconds, kept, segments
from lightning_rotor.planning.requirements import requirements_of
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import BytesAround

# Slots beyond the budget, for what rounds up.
_MORE_SLOTS = 4
# In the place of a way's number.
_NOT_POSSIBLE, _WAIT = -2, -1


class _Way(NamedTuple):
    """A beginning of ``rest``: stage ``first`` kept under an option, or a segment up to ``end``.

    Attributes:
        option: Of the kept stage; None for a segment.
        size: Slots that it holds until its backward, unless they move.
        behind: Slots that the rest goes without besides.
        body_shift: Slots that the body of the segment goes without.
        variant: Of the body.
        source: Of the input of what follows.
        moves: What it holds moves.
    """

    option: int | None
    end: int
    size: int
    behind: int
    body_shift: int
    variant: int
    source: int
    moves: bool


class _Rest:
    """``rest`` of one stage and source of its input: seconds by ``m`` and ``q``, and the way that gives them."""

    def __init__(self, size: int) -> None:
        self.seconds: Seconds = np.full((size, size), np.inf)
        self.chosen: npt.NDArray[np.int32] = np.full((size, size), _NOT_POSSIBLE, np.int32)
        self.ways: list[_Way] = []

    def lower(self, seconds: Seconds, way: _Way, *, shift: int = 0) -> None:
        """Take a way where it is faster; its seconds are those from the memory ``shift`` on."""
        better = seconds < self.seconds[shift:]
        if better.any():
            np.copyto(self.seconds[shift:], seconds, where=better)
            np.copyto(self.chosen[shift:], len(self.ways), where=better)
            self.ways.append(way)

    def wait(self, slot_seconds: float) -> None:
        """Wait until the link has carried a slot where that is faster."""
        for q in range(1, len(self.seconds)):
            waited = self.seconds[:, q - 1] + slot_seconds
            better = waited < self.seconds[:, q]
            self.seconds[better, q] = waited[better]
            self.chosen[better, q] = _WAIT


class MoveProgram:
    """Schedules of one chain that move something, for budgets up to one; ``slots`` are memory levels to tell apart."""

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        link: Link,
        *,
        slots: int,
        refined: bool,
        **around: Unpack[BytesAround],
    ) -> None:
        unit = budget_bytes / slots
        self._chain = chain
        self.slots = slots + _MORE_SLOTS
        self._needs = requirements_of(chain, unit=unit, refined=refined, **around)
        table = Table(self._needs, slots=self.slots)
        table.solve()
        self._table = table.rows
        self._bodies = Bodies(table)
        # The first of those that pay for the input.
        self._sources = self._needs.bare.shape[1] - 1
        # One speed for both ways: ``q`` stands for the copies back as well, as the slower ones need it.
        speed = min(link.out, link.back)
        self._slot_seconds = unit / speed
        self._copy_slots = link.latency * speed / unit
        forward_seconds = [stage.keep.forward_seconds for stage in chain]
        # Slots that the link carries before each stage; sums are rounded, so that errors cancel.
        self._carried = [int(seconds * speed / unit) for seconds in accumulate(forward_seconds, initial=0.0)]
        self._amounts: Integers = np.arange(self.slots + 1)
        self._longer = _longer(len(chain))
        self._rests: dict[tuple[int, int], _Rest] = {}
        # From behind: every way is followed by the rest behind it.
        for first in reversed(range(len(chain))):
            self._solve(first)

    def schedule_at(self, memory: int) -> tuple[Schedule, list[int]] | None:
        """The schedule for so many slots, and the items that it moves; None if there is none."""
        first = 0
        source = 0
        m = memory
        q = 0
        items: list[Item] = []
        moved: list[int] = []
        while first < len(self._chain):
            rest = self._rests[first, source]
            chosen = rest.chosen[m, q]
            if chosen == _NOT_POSSIBLE:
                return None
            if chosen == _WAIT:
                # A wait is no part of a schedule: whoever runs it waits where the copy is not done.
                q -= 1
                continue
            way = rest.ways[chosen]
            if way.moves:
                moved.append(len(items))
            if way.option is None:
                body_memory = m - q - way.body_shift
                body = self._bodies.body(body_memory, first, way.end, way.variant)
                items.append(Segment(body))
            else:
                items.append(Leaf(first, way.option))
            m, q = self._after(way, first, m, q)
            first = way.end + 1
            source = way.source
        return Schedule(tuple(items)), moved

    def _after(self, way: _Way, first: int, m: int, q: int) -> tuple[int, int]:
        """Memory and what is on its way out behind a way."""
        q = max(q - self._carried[way.end + 1] + self._carried[first], 0)
        if way.moves:
            return m - way.behind, q + self._to_carry(way.size)
        return m - way.behind - way.size, q

    def _to_carry(self, size: int) -> int:
        """Slots that the link could carry while it copies some, the latency included."""
        return size + round(self._copy_slots)

    def _solve(self, first: int) -> None:
        top = len(self._chain) - 1
        classes = int(self._needs.class_before[first + 1] - self._needs.class_before[first])
        first_class = self._sources
        if first == 0:
            # Of the chain's input the caller holds everything.
            classes = 1
            first_class = 0
        for source in range(classes):
            rest = self._rests[first, source] = _Rest(self.slots + 1)
            self._keep(rest, first, top, first_class + source)
            if first < top:
                self._segment(rest, first, top, source)
            # Last, since waiting leads to what a way would have given with less to carry.
            rest.wait(self._slot_seconds)

    def _keep(self, rest: _Rest, first: int, top: int, source: int) -> None:
        """Ways that keep a stage."""
        choices = kept(self._needs, self._table, first, top, 0, source)
        ways = self._needs.kept[first, source]
        if first == top:
            ways = self._needs.ended[top, 0, source]
        options = self._needs.bare.shape[2]
        for number in np.flatnonzero(choices.low <= self.slots).tolist():
            option = number % options
            size = int(choices.shift[number])
            fits = self._amounts >= choices.low[number]
            seconds = np.where(fits, choices.seconds[number], np.inf)
            if first == top:
                rest.lower(_by_memory(seconds), _Way(option, first, size, 0, 0, 0, 0, moves=False))
                continue
            way = _Way(option, first, size, 0, 0, 0, int(ways[CLASS, number]), moves=False)
            self._lower(rest, first, seconds, way)
            # An inverted stage drops what it would move. Which items can, ``simulator.movable`` decides in the end.
            if size > 0 and not self._chain.stages[first].options[option].inverts:
                self._lower(rest, first, seconds, way._replace(moves=True))

    def _segment(self, rest: _Rest, first: int, top: int, source: int) -> None:
        """Ways that begin with a segment."""
        needs = self._needs
        paid = 0
        least = 0
        variant = 0
        if first:
            # The caller pays for the chain's input, each segment for its own.
            paid = int(needs.input_slots[first])
            least = int(needs.segment_least[1, first, source])
            variant = int(needs.segment_variant[1, first, source])
        choices = segments(needs, self._table, first, top, 0, variant)
        for number in self._longer:
            if number >= len(choices.low):
                break
            body_shift = paid + int(choices.shift[number])
            behind = int(choices.other_shift[number])
            enough = max(int(choices.low[number]) + paid, least, body_shift)
            if enough > self.slots:
                continue
            body = self._body_seconds(choices, number)
            seconds: Seconds = np.full(self.slots + 1, np.inf)
            seconds[enough:] = body[enough - body_shift : self.slots + 1 - body_shift]
            way = _Way(None, first + number, paid, behind, body_shift, variant, 0, moves=False)
            self._lower(rest, first, seconds, way)
            if paid:
                self._lower(rest, first, seconds, way._replace(moves=True))

    def _body_seconds(self, choices: Choices, number: int) -> Seconds:
        """Seconds of the body of a segment, by memory."""
        start, first, last = self._table.spans[choices.row[number]].tolist()
        seconds: Seconds = np.full(self.slots + 1, np.inf)
        if first <= self.slots:
            there: Integers = np.arange(first, self.slots + 1)
            seconds[first:] = self._table.values[start + np.minimum(there, last)] + choices.seconds[number]
        return seconds

    def _lower(self, rest: _Rest, first: int, seconds: Seconds, way: _Way) -> None:
        """Lower a rest to a way, with seconds by what it has of memory (``m - q``), and what follows it."""
        shift = way.behind if way.moves else way.behind + way.size
        if shift > self.slots or seconds[-1] == np.inf:
            return
        carried = min(self._carried[way.end + 1] - self._carried[first], self.slots + 1)
        more = self._to_carry(way.size) if way.moves else 0
        if more > self.slots:
            return
        # Rows are memory: all shift by the same amount. Columns are what is on its way out: the first become what moves
        # here alone, as the link has carried them. Of what is too much nothing can follow.
        there = max(self.slots + 1 - max(carried, more), 0)
        own = _by_memory(seconds)[shift:]
        following = self._rests[way.end + 1, way.source].seconds[: self.slots + 1 - shift]
        behind: Seconds = np.full(own.shape, np.inf)
        np.add(own[:, :carried], following[:, more : more + 1], out=behind[:, :carried])
        carrying = slice(carried, carried + there)
        np.add(own[:, carrying], following[:, more : more + there], out=behind[:, carrying])
        rest.lower(behind, way, shift=shift)


def _longer(stages: int) -> list[int]:
    """Numbers of stages to try behind a segment's first: all small ones, and larger ones a quarter apart."""
    numbers = []
    number = 0
    while number < stages:
        numbers.append(number)
        number += max(number // 4, 1)
    return numbers


def _by_memory(seconds: Seconds) -> Seconds:
    """Seconds by ``m`` and ``q``, of those by ``m - q``: what is on its way out is missing to a forward and a body."""
    size = len(seconds)
    padded = np.concatenate([np.full(size - 1, np.inf), seconds])
    step = padded.itemsize
    # Each row begins one number further right, and goes left. A view by hand: NumPy's checks take longer than the rest.
    return np.ndarray((size, size), padded.dtype, padded, (size - 1) * step, (step, -step))
