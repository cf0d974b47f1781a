r"""How fast any execution of a step could be: a proven lower bound on its seconds for a budget.

It holds for *every* execution that fits: any stage may run again at any time from its input, sets and boundaries may be
dropped at any time, each stage may use any option. Bytes and seconds are the simulator's.

**What is looked at.** Only moments at which backwards finish. When that of stage ``t`` does, memory holds at least

* what is alive whatever was done: output, pinned tensors, gradients of parameters behind ``t`` and of passing skips;
* the set of stage ``t`` and the peak of its backward, which counts both gradients;
* the *kept* sets: those of stages before ``t`` that are there and will not be made again;
* the *held* boundaries: those that are there and from which something will run again.

The other stages before ``t`` are *absent* and will run again. A longest run of them with no held boundary inside is a
*gap* ``c..l``. Boundaries ``c+1 .. l`` are not there, so before the backward of ``l`` all of it runs again in order;
when the backward of ``l`` finishes, the same question arises for ``c..l-1``::

               kept      gap c..l              kept          t
            ──────────┬───────────────────┬────────────┬─────────┄┄┄
      boundary c: held, or made again     :            :  backward
        by the kept stages before it      boundary l+1    finishes

**What it costs.** ``gap(c, l)`` is the least that runs and backwards of the stages ``c..l`` take from the moment on::

    gap(c, l) = Σ first(i) for c ≤ i < l  +  replay and backward of l
                + the least, over all that fits beside the backward of l, of
                      kept stages i among c..l-1:     both(i) - first(i) + backward(i)
                      the gaps c'..l' between them:   gap(c', l')
                      outputs of stages i for a gap:  first(i)

    first(i)    a run that gives the output: discarding or recording, what is faster
    both(i)     output and set: recording, or first(i) and a replay if that is faster

That least is a 0-1 knapsack along the chain, one table per ``c`` for all ``l``. The step is ``gap(0, n - 1)``, whose
last stage gives its output too. ``n`` stages and ``S`` slots take O(n³ S) time and O(n² S) memory.

**Why it holds**, for a gap ``c..l`` of any execution that fits:

1. Before ``l`` makes its set, each of ``c..l-1`` runs for its output: ``Σ first(i)`` and a replay of ``l``.
2. When the backward of ``l`` finishes, each of ``c..l-1`` is kept, and has given output and set since (``both(i)``), or
   absent. The absent ones form gaps, which take ``gap(c', l')`` from then on, by induction.
3. A gap whose first boundary is not held gets it from the stage before: a kept one that runs once more, from an input
   that is held or comes from the stage before in turn. What ends a gap may give its output by ``both``, not a replay.
4. Each boundary counts once: whole if it is held, else as far as sets save it. What is left out only adds to it.
5. Stages in different gaps are different, and the seconds of different stages add up.

The same holds at the backward of any ``t`` in ``c..l``, and for the step at the first run of any ``t``, where what
lingers counts and stages from ``t`` on take ``both`` at least. The largest of all is taken. Sizes are rounded down.

**What it leaves out**, and so may be too low by: what one gap holds while another one runs again, peaks of reruns, host
time of segments, states that they remember, skips that a gap must read. Saved skips are divided among their savers.

**Inverted stages** are kept ones with a slower backward, beside whose set their input takes nothing: the backward
rebuilds it for the set of the stage before alone. So no inverse gives a boundary that a gap or a rerun needs. Left out
is that the stage before may need every bit of what it saved.

Knapsacks over one moment and the linear relaxation of Checkmate's program (Jain et al., arXiv:1910.02653) are looser,
see ``benchmarks/oracle.py``. The recursion is rotor's (Beaumont et al., hal-02352969) turned around: there gaps share
the memory and give a schedule, here each has all of it and they give a bound.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from typing_extensions import Unpack

from lightning_rotor.chain import BackwardPeaks, Chain, Option
from lightning_rotor.planning.dynamic_program import Seconds
from lightning_rotor.simulator import Conditions

# -------------------------------------------------------------------- least bytes and seconds of each stage


@dataclass(frozen=True, slots=True)
class LeastWay:
    """One option of a stage, in the least bytes and seconds that it takes."""

    saves: bool
    set_bytes: int  # saved set without input and output
    input_bytes: int
    output_bytes: int  # saved part of the output; 0 for the last stage, since the caller holds it
    peak_bytes: int  # of the backward, whoever holds its input
    held_peak_bytes: int  # of the backward if the stage before saved its input
    kept_seconds: float  # set and backward, beyond a run that gives the output
    last_seconds: float  # set and backward alone
    backward_seconds: float
    drops_input: bool = False  # the backward rebuilds it, so beside the set only a held input takes memory

    def saved_input_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the input beside the set if nobody holds it; the stage before saves ``saved_before`` of them."""
        return 0 if self.drops_input else min(input_bytes, saved_before + self.input_bytes)

    def moment_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the stage when its backward finishes, gradients included."""
        peak = self.held_peak_bytes if saved_before else self.peak_bytes
        return self.set_bytes + self.output_bytes + self.saved_input_bytes(input_bytes, saved_before) + peak


@dataclass(frozen=True, slots=True)
class LeastStage:
    """One stage."""

    input_bytes: int  # 0 for the chain's
    first_seconds: float  # a run that gives the output
    recomputable: bool
    ways: tuple[LeastWay, ...]
    room_bytes: int  # for its backward and everything that is kept and held by then
    forward_room_bytes: int  # for everything that is kept and held during its first run, its own input included

    @property
    def kept_seconds(self) -> float:
        """Least seconds of set and backward beyond a run that gives the output."""
        return min(way.kept_seconds for way in self.ways)

    @property
    def output_seconds(self) -> float:
        """Least additional seconds of the end of a gap if it must give its output, too."""
        return min(
            way.kept_seconds + self.first_seconds - way.last_seconds if way.saves else self.first_seconds
            for way in self.ways
        )


def least_stages(
    chain: Chain, budget_bytes: int, *, gradients_exist: bool = False, lingering_bytes: int = 0
) -> list[LeastStage]:
    """The stages of a chain; arguments as for :func:`lightning_rotor.planning.plan`."""
    gradients = [
        0 if gradients_exist else min(option.parameter_gradient_bytes for option in stage.options) for stage in chain
    ]
    shares = _shares_of_skips(chain)
    stages = []
    for index, stage in enumerate(chain):
        room = budget_bytes - chain.always_bytes - sum(gradients[index + 1 :]) - chain.passing_gradient_bytes(index)
        before = lingering_bytes + sum(each.pinned_bytes for each in chain.stages[:index])
        peak = min(min(stage.discard_peak_of(option), option.forward_peak_bytes) for option in stage.options)
        first = min(stage.discard_seconds, *(option.forward_seconds for option in stage.options))
        stages.append(
            LeastStage(
                input_bytes=chain.stages[index - 1].output_bytes if index else 0,
                first_seconds=first,
                recomputable=stage.recomputable,
                ways=tuple(
                    _way(chain, index, option, option.backward_peaks(gradients_exist=gradients_exist), first, shares)
                    for option in stage.options
                ),
                room_bytes=room,
                forward_room_bytes=budget_bytes - before - peak,
            )
        )
    return stages


def _way(
    chain: Chain, index: int, option: Option, peaks: BackwardPeaks, first_seconds: float, shares: list[int]
) -> LeastWay:
    stage = chain.stages[index]
    held = peaks.held_bytes
    least = min(astuple(peaks)) if index else held  # the caller holds the chain's input
    saves, replay = option.saved_tensors > 0, option.again_seconds
    again = first_seconds + replay if stage.recomputable or not saves else math.inf
    again = min(option.forward_seconds, again)
    return LeastWay(
        saves=saves,
        set_bytes=option.saved_bytes + sum(shares[skip] for skip in option.saved_skips),
        input_bytes=option.saved_input_bytes,
        output_bytes=min(option.saved_output_bytes, stage.output_bytes) if index < len(chain) - 1 else 0,
        peak_bytes=least,
        held_peak_bytes=held,
        kept_seconds=again - first_seconds + option.backward_seconds,
        last_seconds=replay + option.backward_seconds,
        backward_seconds=option.backward_seconds,
        drops_input=option.inverts,
    )


def _shares_of_skips(chain: Chain) -> list[int]:
    """Bytes of each skip charged to every stage that may save it; together no more than the skip has."""
    savers = Counter(skip for stage in chain for skip in {skip for each in stage.options for skip in each.saved_skips})
    return [0 if skip.in_output else skip.size_bytes // max(savers[n], 1) for n, skip in enumerate(chain.skips)]


# -------------------------------------------------------------------- the bound


_Key: TypeAlias = tuple[int, Literal["no", "kept", "gap"]]
"""A boundary that is not held: the part of it that the stage before saves, and whether that stage makes it again.

If it does as the end of a gap, the next gap must not begin there: the two would be one.
"""

# Sums for the gaps take 0.1 s. They decide the slots; long chains get shorter gaps rather than fewer slots.
_SUMS = 5e7
_MOST_SLOTS = 4000
_LEAST_SLOTS = 500
# Relative difference between sums of the same durations in another order.
ROUNDING = 1e-12


@lru_cache(maxsize=32)
def lower_bound_seconds(chain: Chain, budget_bytes: int, **step: Unpack[Conditions]) -> float:
    """Least seconds of any execution within a budget, as far as is proven.

    Takes about 0.2 s for 50 stages. The last results are remembered.

    Args:
        chain: Costs of ``n`` stages. An option without saved tensors saves no bytes.
        budget_bytes: As for :func:`lightning_rotor.planning.plan`, like the other arguments.
        step: ``gradients_exist`` and ``lingering_bytes``.
    Returns:
        At most the seconds of any schedule whose simulated peak fits; infinite if it proves that none does.
    """
    stages = least_stages(chain, budget_bytes, **step)
    n = len(stages)
    reach = min(n, max(int(math.sqrt(2 * _SUMS / (_LEAST_SLOTS * n))), 2))
    slots = max(min(int(2 * _SUMS / (n * reach**2)), _MOST_SLOTS), _LEAST_SLOTS)
    gaps: Seconds = np.full((n, n), math.inf)  # least seconds of every run of stages that can be one
    if n > 2:
        _Knapsacks(stages, gaps, budget_bytes, slots=slots, starts=range(1, n - 1), reach=reach).solve()
        for first in reversed(range(n - reach)):  # longer ones: at least the sum of their parts
            cut = first + reach
            gaps[first, cut:] = gaps[first, cut - 1] + gaps[cut, cut:]
    whole = _Knapsacks(stages, gaps, budget_bytes, slots=_MOST_SLOTS, starts=range(1), reach=n).solve()
    return whole * (1 - ROUNDING)


class _Knapsacks:
    """Least seconds of the stages from ``c`` to before ``t`` by the memory kept and held, for some ``c`` and all ``t``.

    A row of each array belongs to one ``c``, a column to an amount of memory in slots. Of ``gaps``, those that start at
    one of the consecutive ``starts`` are filled in; the later ones must be there.
    """

    def __init__(
        self, stages: list[LeastStage], gaps: Seconds, budget_bytes: int, *, slots: int, starts: range, reach: int
    ) -> None:
        self._stages = stages
        self._gaps = gaps
        self._unit = max(budget_bytes / slots, 1.0)
        self._size = int(budget_bytes / self._unit) + 2
        self._starts = starts
        self._reach = reach
        self._sources: dict[int, Seconds] = {}  # by stage: everything before it settled and its input there for a gap
        self._best = np.zeros(len(starts))  # the largest bound of all moments so far, without first runs
        self._first = np.zeros(len(starts))  # first runs so far
        self._unbroken = np.ones(len(starts), bool)  # every stage so far can be part of a gap

    def solve(self) -> float:
        """Fill in the gaps; returns least seconds from the first start on if the first runs there are the step's."""
        states: dict[_Key, Seconds] = {}
        forward = 0.0  # the largest bound of all first runs
        for index in range(self._starts.start, len(self._stages)):
            rows = self._rows(index)
            if index in self._starts:
                states.setdefault((0, "kept"), self._nothing())[rows.stop - 1] = 0.0
            forward = max(forward, self._forward_moment(index, states)) + self._stages[index].kept_seconds
            self._moment(index, rows, states)
            states = self._next(index, rows, states)
        return float(max(forward, self._best[0]) + self._first[0])

    def _rows(self, index: int) -> slice:
        """Rows of the starts that can reach a stage."""
        begin = max(index - self._reach + 1, self._starts.start)
        return slice(begin - self._starts.start, min(index + 1, self._starts.stop) - self._starts.start)

    def _nothing(self) -> Seconds:
        return np.full((len(self._starts), self._size), math.inf)

    def _moment(self, index: int, rows: slice, states: dict[_Key, Seconds]) -> None:
        """Record the backward of a stage: gaps that end here, and the best of all moments."""
        stage = self._stages[index]
        kept = self._least(stage, rows, states, lambda way: way.kept_seconds)
        first, best = self._first[rows], self._best[rows]
        if stage.recomputable:
            ends = self._least(stage, rows, states, lambda way: way.last_seconds if way.saves else math.inf)
            last = min(way.last_seconds for way in stage.ways)
            found = first + np.maximum(ends, best + last)
            if not all(way.saves for way in stage.ways):
                # Nothing runs for a stage that saves nothing: the gap ends before it.
                before = self._gaps[self._starts.start :, index - 1][rows] if index else np.zeros_like(found)
                free = min(way.last_seconds for way in stage.ways if not way.saves)
                before = np.where(np.arange(len(before)) == index - self._starts.start - rows.start, 0.0, before)
                found = np.minimum(found, before + free)
            found[~self._unbroken[rows]] = math.inf
            self._gaps[self._starts.start :][rows, index] = found
        else:
            self._unbroken[rows] = False
        best = np.maximum(best + stage.kept_seconds, kept)
        self._best[rows] = best
        self._first[rows] = first + stage.first_seconds

    def _least(
        self, stage: LeastStage, rows: slice, states: dict[_Key, Seconds], seconds: Callable[[LeastWay], float]
    ) -> Seconds:
        """By row, the least seconds of the stage and of everything before it that fits beside its backward."""
        least = np.full(rows.stop - rows.start, math.inf)
        for way in stage.ways:
            for (saved, _), before in states.items():
                room = stage.room_bytes - way.moment_bytes(stage.input_bytes, saved)
                if room >= 0:
                    np.minimum(least, before[rows, self._column(room)] + seconds(way), out=least)
        return least

    def _forward_moment(self, index: int, states: dict[_Key, Seconds]) -> float:
        """Least seconds from the first start on of what fits beside the first run of a stage, its input held."""
        stage = self._stages[index]
        room = stage.forward_room_bytes - stage.input_bytes
        return min(float(before[0, self._column(room)]) for before in states.values()) if room >= 0 else math.inf

    def _column(self, room_bytes: int) -> int:
        return min(math.ceil(room_bytes / self._unit), self._size - 1)

    def _next(self, index: int, rows: slice, states: dict[_Key, Seconds]) -> dict[_Key, Seconds]:
        """States after a stage that is kept or that ends a gap."""
        stage = self._stages[index]
        held = self._nothing()
        for before in states.values():
            self._put(held, before, rows, stage.input_bytes, 0.0)
        source = held.copy()
        for (saved, again), before in states.items():
            if again == "kept":
                self._put(source, before, rows, saved, 0.0)
        self._sources[index] = source
        self._sources.pop(index - self._reach, None)
        after: dict[_Key, Seconds] = {}
        for way in stage.ways:
            lost = after.setdefault((way.output_bytes, "no"), self._nothing())
            made = after.setdefault((way.output_bytes, "kept"), self._nothing())
            both = [(True, held, 0)]
            for (saved, again), before in states.items():
                both.append((again != "no", before, way.saved_input_bytes(stage.input_bytes, saved)))
            for available, before, input_bytes in both:
                size = way.set_bytes + input_bytes
                self._put(lost, before, rows, size, way.kept_seconds)
                if available and stage.recomputable:
                    self._put(made, before, rows, size, way.kept_seconds + stage.first_seconds)
        if stage.recomputable:
            gap = self._after_gaps(index)
            lost = after.setdefault((0, "no"), self._nothing())
            np.minimum(lost, gap, out=lost)
            after[0, "gap"] = gap + stage.output_seconds
        return after

    def _after_gaps(self, last: int) -> Seconds:
        """Least seconds up to a stage that ends a gap."""
        least = self._nothing()
        for first, source in self._sources.items():
            seconds = self._gaps[first, last]
            if seconds < math.inf:
                rows = slice(self._rows(last).start, self._rows(first).stop)
                np.minimum(least[rows], source[rows] + seconds, out=least[rows])
        return least

    def _put(self, into: Seconds, before: Seconds, rows: slice, size_bytes: int, seconds: float) -> None:
        """Lower ``into`` to ``before`` with an addition of ``size_bytes`` and ``seconds``."""
        slots = int(size_bytes / self._unit)
        if slots < self._size:
            target = into[rows, slots:]
            np.minimum(target, before[rows, : self._size - slots] + seconds, out=target)
