r"""The best cuts for GPipe and 1F1B: candidates from dynamic programs, judged by the simulator, with a bound for all others.

``t_s`` is forward and backward of a micro-batch in pipeline stage ``s``, ``f_s`` and ``b_s`` its parts, ``c_s`` how long a message
travels from ``s`` to ``s + 1`` and back together, ``m`` the number of micro-batches, ``K_s`` how many are in flight.

*GPipe* is a flow shop of equal jobs, twice, and links are machines like devices. So a step takes exactly

    Σ (t_s + c_s) + (m - 1) · (max(f_s, travel) + max(b_s, travel)).

*1F1B* has no such formula: ``Σ t_s + (m - 1) · max t_s`` is right for equal stages, and some percent too large or too small for others.
But each stage bounds the step from below: before its first forward, a micro-batch comes through all stages before; after its last
backward, a gradient goes back through them; between, it works on ``m`` micro-batches, and waits::

    first        K - 1 forwards   ┊ waits ┊  backward  ...  last forward ┊ K - 1 backwards ┊ waits ┊ backward
    of stage s   └──── R_s: through all stages behind ──┘                └──────── R_s ─────────────┘

    bound_s = Σ_{u<s} (t_u + c_u) + m · t_s + max(0, R_s - (K_s - 1) · f_s) + max(0, R_s - (K_s - 1) · b_s)

with ``R_s = c_s + Σ_{u>s} (t_u + c_u)``; where ``m ≤ K_s`` the two times of waiting may be one, and only the longer counts. Where messages take
long, two more bounds are larger: a stage takes in a new micro-batch when the one that came ``K_s`` before has returned, and a link carries one
message after the other::

    Σ_{u<s} (t_u + c_u) + ⌈m / K_s⌉ · (t_s + R_s)                    Σ_{u<s} (t_u + c_u) + t_s + R_s + (m - 1) · c_s / 2

The bound of a partition is the largest of its stages. On random pipelines of 2 to 8 stages it is the exact step in 83 % of all cases without
messages and in 60 % with messages as long as the work, and 0.1 % and 2.0 % below it on average.

From the last stage to the first, a partition's bound needs only two numbers of the stages behind: ``R`` and the largest bound so far, less
what comes before. Neither is ever better for being larger, so partial partitions that are beaten in both are dropped (*labels*),
and the least bound of all partitions is found exactly. Then a search goes from the first stage to the last, the most promising
partition first, and drops what cannot beat the best one simulated so far; when nothing is left, that one is optimal.

Runs of stages are planned only when they matter: until then their bounds of :mod:`.bounds` stand for them. A best partition all of
whose stages have been planned is the best of all. Where there is too much to look at, the search stops with what it has and a bound,
and :mod:`.climbing` goes on from there.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from lightning_rotor.pipeline.partition.balance import cuts_of, runs_of, simple_balances
from lightning_rotor.pipeline.partition.bounds import LeastSeconds, StepBounds
from lightning_rotor.pipeline.partition.device_shares import DeviceShares
from lightning_rotor.pipeline.partition.local_search import Climb, Judgement
from lightning_rotor.pipeline.partition.pareto_states import Labels, Runs
from lightning_rotor.pipeline.partition.problem import Costs, Cuts, Problem, Reals, StageChoice

# Runs that are looked at for labels, at once and in all, actions that are simulated, and stages that steps of one search and of all of them
# extend, before there is a bound instead of a proof. They count work, not seconds: the answer is the same on every machine.
_MOST_RUNS, _MOST_RUNS_IN_ALL = 40_000, 200_000
_MOST_SIMULATED = 4_000_000
_MOST_EXTENDED, _MOST_EXTENDED_IN_ALL = 250_000, 1_500_000
# Rounds that balance bounds, and numbers that they look at, for the tables of many devices are large.
_ROUNDS, _MOST_NUMBERS = 24, 60_000_000
# Numbers that the search for a first partition looks at before it takes a simple one that fits.
_MOST_BALANCED = 300_000_000
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """The best cuts that were found.

    Attributes:
        cuts: Where pipeline stages begin.
        choices: How each of them runs.
        seconds: Of a step, simulated.
        bound_seconds: No partition is faster.
    """

    cuts: Cuts
    choices: tuple[StageChoice, ...]
    seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run of stages costs as a pipeline stage, as far as it is known: ``forward`` and ``backward`` are bounds from above where it is not."""

    seconds: float
    work_seconds: float
    least_forward: float
    least_backward: float
    forward: float
    backward: float


class Search:
    """Cuts one chain.

    Args:
        problem: With one pipeline stage per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._n, self._stages = len(problem.chain), problem.stages
        self._simple = [cuts_of(balance) for balance in simple_balances(problem.chain, self._stages)]
        self._simulated: dict[Cuts, float] = {}
        self._known: dict[tuple[int, int, int], _Run | None] = {}
        self._best: tuple[float, Cuts] | None = None
        self._extended = 0
        self._is_gpipe = problem.schedule == "gpipe"
        self._labels = Labels(problem, costs.travel_seconds)
        self._has_odd_one = problem.recompute == "except_last"  # one micro-batch is faster than the others

    def run(self) -> Found | None:
        """The best cuts, or None if the memory fits no partition."""
        longest = self._n if self._stages == 1 else 4 * math.ceil(self._n / self._stages) + 4
        while True:
            self._bounds = LeastSeconds(self._costs, longest)
            for run in self._known:
                self._put_bounds(*run)
            self._balance()
            if self._best is None and self._bounds.longest < self._n - self._stages + 1:
                longest = min(2 * longest, self._n)
                continue
            if self._best is None:
                return None
            reach = self._least_of_longer(longest)
            if reach >= self._best[0] or longest >= self._n:
                break
            longest = min(2 * longest, self._n)
        self._judge_simple()
        bound = self._prove()
        if bound < self._best[0] * (1 - _SAME) and not self._is_gpipe:
            self._climb(self._best[1])
        seconds, cuts = self._best
        return Found(cuts, self._choices(cuts), seconds, min(bound, seconds))

    def _judge_simple(self) -> None:
        for cuts in self._simple:
            if max(last - first for first, last in runs_of(cuts, self._n)) < self._bounds.longest:
                self.judge(cuts)

    def _climb(self, cuts: Cuts) -> None:
        """From the best cuts that were found, and from the simple ones."""
        bounds = StepBounds(self._problem, self._costs)
        climb = Climb(self._problem, self._costs, bounds, self._judgement)
        climb.run([cuts, *self._simple])
        self.judge(min(climb.judged, key=climb.judged.__getitem__))

    def _judgement(self, cuts: Cuts) -> Judgement:
        seconds = self.judge(cuts)
        return int(seconds == math.inf), seconds

    def judge(self, cuts: Cuts) -> float:
        """Seconds of a step with these cuts; infinite if the memory does not suffice."""
        if cuts not in self._simulated:
            choices = [self._choice(stage, *run) for stage, run in enumerate(runs_of(cuts, self._n))]
            loads = [choice.load for choice in choices if choice is not None]
            seconds = math.inf
            if len(loads) == len(choices):
                seconds = self._problem.step_seconds(loads)
            self._simulated[cuts] = seconds
            if seconds < math.inf and (self._best is None or seconds < self._best[0] * (1 - _SAME)):
                self._best = seconds, cuts
        return self._simulated[cuts]

    # ---------------------------------------------------------------- runs of stages

    def _choice(self, stage: int, first: int, last: int) -> StageChoice | None:
        choice = self._costs.choice(stage, first, last)
        if (stage, first, last) not in self._known:
            self._known[stage, first, last] = None if choice is None else self._run_of(choice)
            self._put_bounds(stage, first, last)
        return choice

    def _put_bounds(self, stage: int, first: int, last: int) -> None:
        """What is known of a run, in the place of its bounds."""
        at, run = (stage, first, last - first), self._known[stage, first, last]
        if last - first >= self._bounds.longest:
            return
        if run is None:
            self._bounds.seconds[at] = math.inf
            return
        self._bounds.seconds[at] = run.seconds
        self._bounds.forward[at], self._bounds.most_forward[at] = run.least_forward, run.forward
        self._bounds.backward[at], self._bounds.most_backward[at] = run.least_backward, run.backward

    def _plan(self, cuts: Cuts) -> bool:
        """Plan the runs of these cuts; whether there was anything to plan."""
        before = len(self._known)
        for stage, run in enumerate(runs_of(cuts, self._n)):
            self._choice(stage, *run)
        return len(self._known) > before

    def _choices(self, cuts: Cuts) -> tuple[StageChoice, ...]:
        found = [self._choice(stage, *run) for stage, run in enumerate(runs_of(cuts, self._n))]
        return tuple(choice for choice in found if choice is not None)

    def _run_of(self, choice: StageChoice) -> _Run:
        usual = choice.load.micro_batch
        last = choice.load.last or usual
        both = [usual, last]
        work = (self._problem.micro_batches - 1) * (usual.forward_seconds + usual.backward_seconds)
        return _Run(
            seconds=_seconds(choice),
            work_seconds=work + last.forward_seconds + last.backward_seconds,
            least_forward=min(each.forward_seconds for each in both),
            least_backward=min(each.backward_seconds for each in both),
            forward=max(each.forward_seconds for each in both),
            backward=max(each.backward_seconds for each in both),
        )

    def _least_of_longer(self, longest: int) -> float:
        """No partition with a longer run takes less."""
        if self._bounds.longest >= self._n - self._stages + 1:
            return math.inf
        stage_seconds = [
            min(each.forward_seconds + each.backward_seconds for each in stage.options) for stage in self._problem.chain
        ]
        sums = np.concatenate(([0.0], np.cumsum(stage_seconds)))
        least = float((sums[longest + 1 :] - sums[: -longest - 1]).min())
        return self._problem.micro_batches * least / max(device.speed for device in self._problem.devices)

    # ---------------------------------------------------------------- the least bottleneck

    def _balance(self) -> None:
        """Partitions whose slowest stage is as fast as can be, until one of them has been planned throughout: a first best one."""
        patience = max(_MOST_BALANCED // self._bounds.seconds.size, 2)
        for number in range(self._n * self._stages):
            if number == patience:
                self._judge_simple()
                if self._best is not None:
                    return
            cuts = least_bottleneck(self._bounds.seconds)
            if cuts is None:
                return
            if not self._plan(cuts):
                self.judge(cuts)
                return

    # ---------------------------------------------------------------- labels

    def _prove(self) -> float:
        """Improve the best partition until nothing can be better, or patience ends; returns what no partition can beat."""
        assert self._best is not None
        if self._stages == 1:
            return self._best[0]
        self._balance_bounds()
        bound, seen = 0.0, 0
        while True:
            through = self._through()
            count = int(np.count_nonzero(through < self._best[0] * (1 - _SAME)))
            seen += count
            if seen > _MOST_RUNS_IN_ALL:
                return max(bound, self._largest(through))
            before = len(self._known), self._best[0]
            if count > _MOST_RUNS:
                # Among the most promising ones there may be a better partition, but nothing is proved.
                self._explore(self._useful_runs(_least(through, _MOST_RUNS)))
                if (len(self._known), self._best[0]) == before:
                    return max(bound, self._largest(through))
                continue
            bound = self._explore(self._useful_runs(through))
            if bound >= self._best[0] * (1 - _SAME) or (len(self._known), self._best[0]) == before:
                return bound
            if self._extended > _MOST_EXTENDED_IN_ALL:
                return bound
            if len(self._simulated) * len(self._problem.order) * self._problem.micro_batches > _MOST_SIMULATED:
                return bound

    def _balance_bounds(self) -> None:
        """The same as :meth:`_balance` for the largest of the runs' bounds, which know more than their seconds, for a while."""
        for _ in range(min(_ROUNDS, max(_MOST_NUMBERS // self._bounds.seconds.size, 2))):
            cuts = least_bottleneck(self._through())
            if cuts is None:
                return
            if not self._plan(cuts):
                self.judge(cuts)
                return

    def _through(self) -> Reals:
        """By run, what no partition that has it can beat: :meth:`_own_bound` and what comes before, with the least that others take."""
        bounds, n, stages, m = self._bounds, self._n, self._stages, self._problem.micro_batches
        least = bounds.forward + bounds.backward if self._has_odd_one else bounds.seconds
        least = np.where(bounds.seconds < math.inf, least, math.inf)
        travel = 2 * np.array(self._costs.travel_seconds)
        ends = np.arange(n)[:, None] + np.arange(1, bounds.longest + 1)
        travel = np.concatenate((travel, np.zeros(bounds.longest)))[ends]
        back = np.full((stages + 1, n + bounds.longest + 1), math.inf)
        front = back.copy()
        back[stages, n] = front[0, 0] = 0.0
        for stage in reversed(range(stages)):
            back[stage, :n] = (least[stage] + travel + back[stage + 1][ends]).min(axis=1)
        through = np.full_like(least, math.inf)
        for stage in range(stages):
            before, behind = front[stage, :n, None], travel + back[stage + 1][ends]
            np.minimum.at(front[stage + 1], ends, before + least[stage] + travel)
            if self._is_gpipe:
                both = bounds.forward[stage] + bounds.backward[stage]
                through[stage] = before + least[stage] + behind + (m - 1) * both
                continue
            ahead = self._problem.in_flight[stage] - 1
            with np.errstate(invalid="ignore"):
                work = (m - self._has_odd_one) * bounds.seconds[stage] + self._has_odd_one * least[stage]
                waits = [np.maximum(behind - ahead * bounds.most_forward[stage], 0)]
                if not self._has_odd_one:
                    waits.append(np.maximum(behind - ahead * bounds.most_backward[stage], 0))
                own = work + (sum(waits) if m > ahead + 1 else np.max(waits, axis=0))
                through[stage] = before + np.maximum(own, self._labels.returns(stage, least[stage], behind, travel / 2))
        through[~np.isfinite(through)] = math.inf
        return through

    def _largest(self, through: Reals) -> float:
        """The largest of its runs' bounds, in the partition where that is least."""
        cuts = least_bottleneck(through)
        assert cuts is not None
        return float(
            max(through[stage, first, last - first] for stage, (first, last) in enumerate(runs_of(cuts, self._n)))
        )

    def _useful_runs(self, through: Reals) -> list[Runs]:
        """By pipeline stage, the runs that a partition faster than the best one may have."""
        assert self._best is not None
        bounds, m = self._bounds, self._problem.micro_batches
        found = []
        for stage in range(self._stages):
            at = np.nonzero(through[stage] < self._best[0] * (1 - _SAME))
            seconds, forward, backward = (
                table[stage][at] for table in (bounds.seconds, bounds.forward, bounds.backward)
            )
            work, most_backward = m * seconds, bounds.most_backward[stage][at]
            if self._has_odd_one:  # of which the bound knows only that it may be faster
                work, seconds = work - seconds + forward + backward, forward + backward
                most_backward = np.full_like(seconds, math.inf)
            runs = Runs(
                at[0], at[0] + at[1], seconds, work, forward, backward, bounds.most_forward[stage][at], most_backward
            )
            if self._has_odd_one:
                self._put_known(stage, runs)
            found.append(runs)
        return found

    def _put_known(self, stage: int, runs: Runs) -> None:
        """What is known of a run whose micro-batches are not all alike; ``seconds`` stay those of the fastest, which may be the last to go back."""
        for place, run in enumerate(zip(runs.first.tolist(), runs.last.tolist(), strict=True)):
            known = self._known.get((stage, *run))
            if known is not None:
                runs.work_seconds[place], runs.backward[place] = known.work_seconds, known.backward

    # ---------------------------------------------------------------- the search

    def _explore(self, runs: list[Runs]) -> float:
        """From the first stage on, the most promising partition first; returns what no partition can beat."""
        assert self._best is not None
        labels = [self._labels.at_the_end()]
        for stage in reversed(range(self._stages)):
            labels.append(self._labels.before(stage, runs[stage], labels[-1], below=self._best[0]))
        labels.reverse()
        least = float(self._labels.values(labels[0][0]).min())
        if least == math.inf:
            return self._best[0]
        # Bound, stages decided (more first), cuts; and for each stage which of its runs.
        waiting: list[tuple[float, int, Cuts, tuple[int, ...]]] = [(least, 0, (0,), ())]
        tables = [each.table() for each in runs]
        # One that goes straight to the last stage extends every stage once.
        for _ in range(max(_MOST_EXTENDED // self._stages, 2 * self._stages)):
            self._extended += self._stages
            if not waiting or waiting[0][0] >= self._best[0] * (1 - _SAME):
                return self._best[0]
            bound, _, cuts, decided = heapq.heappop(waiting)
            stage = len(decided)
            if stage == self._stages:
                known = len(self._known)
                self.judge(cuts[:-1])
                if len(self._known) > known:
                    return min(bound, self._best[0])  # what was a bound is known now: labels change
                continue
            which = runs[stage].beginning_at(cuts[-1])
            mine = runs[stage][which]
            if not len(mine):
                continue
            new = self._labels.extended(stage, mine, labels[stage + 1][mine.last + 1])
            before = Runs.of([tables[earlier][place] for earlier, place in enumerate(decided)])
            for place, value in enumerate(self._labels.values_behind(before, new).min(axis=1).tolist()):
                if value < self._best[0] * (1 - _SAME):
                    end = int(mine.last[place]) + 1
                    heapq.heappush(waiting, (value, -stage - 1, (*cuts, end), (*decided, which.start + place)))
        return min([self._best[0], *(each[0] for each in waiting[:1])])


def least_bottleneck(values: Reals) -> Cuts | None:
    """Cuts whose largest value is least, and among those nearly with the least sum; None if all are infinite.

    Args:
        values: ``(stages, n, lengths)``, by pipeline stage, first stage of the chain and length less one.
    """
    stages, n, longest = values.shape
    most = np.full((stages + 1, n + longest + 1), math.inf)
    total = most.copy()
    most[stages, n] = total[stages, n] = 0.0
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    chosen = np.zeros((stages, n), np.int64)
    for stage in reversed(range(stages)):
        largest = np.maximum(values[stage], most[stage + 1][ends])
        least = largest.min(axis=1, keepdims=True)
        sums = np.where(largest <= least, values[stage] + total[stage + 1][ends], math.inf)
        chosen[stage] = np.argmin(sums, axis=1)
        most[stage, :n], total[stage, :n] = least[:, 0], sums[np.arange(n), chosen[stage]]
    if most[0, 0] == math.inf:
        return None
    cuts = [0]
    for stage in range(stages - 1):
        cuts.append(cuts[-1] + int(chosen[stage, cuts[-1]]) + 1)
    return tuple(cuts)


def _least(values: Reals, count: int) -> Reals:
    """The same with infinity for all but so many of the least."""
    limit = np.partition(values.ravel(), count)[count]
    kept: Reals = np.where(values < limit, values, math.inf)
    return kept


def _seconds(choice: StageChoice) -> float:
    return choice.load.micro_batch.forward_seconds + choice.load.micro_batch.backward_seconds


# ----------------------------------------------------------------------------------------------------
# Cuts for the interleaved schedule, where each device has several stages.


# So many partitions are tried one by one.
_MOST_TRIED = 400


class InterleavedSearch:
    """Cuts one chain for the interleaved schedule.

    Args:
        problem: With several pipeline stages per device.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._n, self._stages, self._devices = len(problem.chain), problem.stages, len(problem.devices)
        self._shares = DeviceShares(problem, costs)

    def run(self) -> Found | None:
        """The best cuts, or None if none was found that fits."""
        bounds = StepBounds(self._problem, self._costs)
        climb = Climb(self._problem, self._costs, bounds, self._judgement)
        simple = [cuts_of(balance) for balance in simple_balances(self._problem.chain, self._stages)]
        simple.append(bounds.equal_parts())
        climb.judge(simple)
        if math.comb(self._n - 1, self._stages - 1) <= _MOST_TRIED:
            climb.judge((0, *middle) for middle in combinations(range(1, self._n), self._stages - 1))
        else:
            climb.run(simple)
        found = self.only(min(climb.judged, key=climb.judged.__getitem__))
        return found and replace(found, bound_seconds=min(bounds.of_any_cuts(), found.seconds))

    def only(self, cuts: Cuts) -> Found | None:
        """These cuts, whatever others would take."""
        choices = self._choices(cuts)
        if len(choices) < self._stages:
            return None
        return Found(cuts, choices, self._problem.step_seconds([choice.load for choice in choices]), 0.0)

    def _judgement(self, cuts: Cuts) -> Judgement:
        found = self.only(cuts)
        return (0, found.seconds) if found else (sum(each is None for each in self._on_devices(cuts)), math.inf)

    def _choices(self, cuts: Cuts) -> tuple[StageChoice, ...]:
        """By pipeline stage; fewer of them if some device has too little memory."""
        found = [choices for choices in self._on_devices(cuts) if choices is not None]
        return tuple(on_device[turn] for turn in range(self._problem.stages_per_device) for on_device in found)

    def _on_devices(self, cuts: Cuts) -> list[tuple[StageChoice, ...] | None]:
        runs = runs_of(cuts, self._n)
        return [self._shares.choices(device, runs[device :: self._devices]) for device in range(self._devices)]
