r"""Where to cut: candidates from a dynamic program, judged by the simulator, and a local search from the best of them.

``t_s`` is forward and backward of a micro-batch in pipeline stage ``s``, ``f_s`` and ``b_s`` its parts, ``c_s`` how long a message
travels from ``s`` to ``s + 1`` and back together, ``m`` the number of micro-batches, ``K_s`` how many are in flight. A step takes about
``(m - 1) · max t + Σ (t + c)``. Each stage bounds it from below: before its first forward a micro-batch comes through all stages before;
after its last backward a gradient goes back through them; between, the stage works on ``m`` micro-batches, and waits::

    first        K - 1 forwards   ┊ waits ┊  backward  ...  last forward ┊ K - 1 backwards ┊ waits ┊ backward
    of stage s   └──── R_s: through all stages behind ──┘                └──────── R_s ─────────────┘

    bound_s = Σ_{u<s} (t_u + c_u) + m · t_s + max(0, R_s - (K_s - 1) · f_s) + max(0, R_s - (K_s - 1) · b_s)

with ``R_s = c_s + Σ_{u>s} (t_u + c_u)``; where ``m ≤ K_s`` the two times of waiting may be one, and only the longer counts. A stage takes in a
new micro-batch when the one that came ``K_s`` before has returned, and a link carries one message after the other::

    Σ_{u<s} (t_u + c_u) + ⌈m / K_s⌉ · (t_s + R_s)                    Σ_{u<s} (t_u + c_u) + t_s + R_s + (m - 1) · c_s / 2

GPipe is a flow shop of equal jobs, twice, so its steps are known: ``Σ (t_s + c_s) + (m - 1) · (max(f_s, travel) + max(b_s, travel))``.

Few cuts are bounded one by one and simulated in this order, until no other one can be better. Of many cuts a dynamic program finds those whose
largest bound is least, where the stages before and behind take the least they can. Runs are planned when they occur in a candidate; until then a
fractional knapsack says what recomputation they need at least (:class:`Bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from lightning_rotor.pipeline.partition.balance import cuts_of, least_bottleneck, runs_of, simple_balances
from lightning_rotor.pipeline.partition.problem import Costs, Cuts, DeviceShares, Integers, Problem, Reals, StageChoice

# So many cuts are bounded one by one.
_FEW = 20_000
# Candidates of the dynamic program, and numbers that it looks at.
_CANDIDATES, _MOST_NUMBERS = 50, 60_000_000
# Actions that are simulated and work of plans (see `Costs.work`), for the candidates and for the local search each. They count work, not
# seconds: the answer is the same on every machine.
_MOST_ACTIONS, _MOST_WORK = 100_000_000, 8_000
# What an action that is simulated by itself costs, compared with one of many partitions at once.
_BY_ITSELF = 25
_AT_ONCE = 32
# Runs of stages that have bounds, if usual ones are fewer, and numbers in one array of the knapsack.
_MOST_RUNS = 4_000_000
_MOST_AT_ONCE = 4_000_000
_SAME = 1e-9
Judgement: TypeAlias = tuple[int, float]
"""How many devices have too little memory, and the seconds of a step if none has."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best cuts that were found.

    Attributes:
        choices: By pipeline stage, how it runs.
        bound_seconds: No partition is faster.
    """

    choices: tuple[StageChoice, ...]
    bound_seconds: float


class Bounds:
    """Seconds that no run of stages and no step can beat.

    A run that keeps everything holds its saved tensors once for each micro-batch in flight. What does not fit is recomputed, those stages first that
    free most bytes per second. Segments' inputs, peaks and nesting are left out, so this is a lower bound.

    Args:
        costs: Of the problem.
        longest: Runs of more stages of the chain than this are left out.

    Attributes:
        extra: Recomputation of a micro-batch, by pipeline stage, first stage of the chain and length less one; infinite where a run cannot be.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        self._costs, self._problem = costs, costs.problem
        chain, self._n, self._stages = costs.problem.chain, len(costs.problem.chain), costs.problem.stages
        self.longest = min(longest, self._n - self._stages + 1)
        self._speeds = np.array([self._problem.device_of(stage).speed for stage in range(self._stages)])
        fastest = [min(stage.options, key=lambda each: each.forward_seconds + each.backward_seconds) for stage in chain]
        forwards = [[each.forward_seconds] for each in fastest]
        backwards = [[each.backward_seconds] for each in fastest]
        if costs.recomputes:
            forwards = [[stage.discard_seconds, *(each.forward_seconds for each in stage.options)] for stage in chain]
            backwards = [[each.backward_seconds for each in stage.options] for stage in chain]
        self._plain = _before([each.forward_seconds + each.backward_seconds for each in fastest])
        self._fastest_forward = _before([each.forward_seconds for each in fastest])
        self._forward, self._most_forward = _before(map(min, forwards)), _before(map(max, forwards))
        self._backward = _before(map(min, backwards))
        self._travel = np.array(costs.travel_seconds)
        self._last_differs = self._problem.recompute == "except_last"
        self._turns = np.ceil(self._problem.micro_batches / np.array(self._problem.in_flight))
        self._read_order()
        self._read_recomputation()
        self.extra = np.stack([self._least_extra(stage) for stage in range(self._stages)])

    def learn(self, stage: int, first: int, last: int, choice: StageChoice | None) -> None:
        """Take the seconds of a run that has been planned."""
        if last - first < self.longest:
            extra = math.inf
            if choice is not None:
                usual = choice.load.micro_batch
                plain = (self._plain[last + 1] - self._plain[first]) / self._speeds[stage]
                extra = max(usual.forward_seconds + usual.backward_seconds - plain, 0.0)
            self.extra[stage, first, last - first] = extra

    # ---------------------------------------------------------------- runs

    def _read_order(self) -> None:
        """How many forwards of each stage are ahead of its device's first backward, and backwards behind its last forward."""
        self._ahead, self._left = np.zeros(self._stages), np.zeros(self._stages)
        apart = []
        for device, actions in enumerate(self._problem.order):
            works = [action.work for action in actions]
            first, last = works.index("backward"), len(works) - 1 - works[::-1].index("forward")
            apart.append(first < last)
            for action in actions[:first]:
                self._ahead[action.stage] += 1
            for action in actions[last + 1 :]:
                self._left[action.stage] += 1
            # One of each is on the way that the device waits for.
            self._ahead[device] -= 1
            self._left[device] -= 1
        self._apart = np.array(apart)

    def _read_recomputation(self) -> None:
        """By stage of the chain, what is held if it is kept, the least seconds per byte to hold less, and a forward more."""
        chain = self._problem.chain
        self._kept, self._price, self._again = (np.zeros(self._n) for _ in range(3))
        for number, stage in enumerate(chain):
            # Of a boundary that both sides save, neither side frees anything alone.
            shared = number == 0 or any(option.saved_output_bytes for option in chain.stages[number - 1].options)
            held = [each.saved_bytes + (0 if shared else each.saved_input_bytes) for each in stage.options]
            ways = [
                (bytes_, each.forward_seconds + each.backward_seconds)
                for bytes_, each in zip(held, stage.options, strict=True)
            ]
            least, most = min(seconds for _, seconds in ways), max(held)
            bare = [stage.discard_seconds + each.backward_seconds for each in stage.options if not each.saved_tensors]
            if stage.recomputable:
                again = [
                    stage.discard_seconds + each.backward_seconds + min(each.replay_seconds, each.forward_seconds)
                    for each in stage.options
                ]
                ways.append((0, min(again + bare)))
                self._again[number] = 0.0 if bare else stage.discard_seconds
            self._kept[number] = most
            self._price[number] = min(
                (max(seconds - least, 0.0) / (most - bytes_) for bytes_, seconds in ways if bytes_ < most),
                default=math.inf,
            )

    def _least_extra(self, stage: int) -> Reals:
        """``(n, longest)``: recomputation of every run that this pipeline stage may be."""
        problem, n = self._problem, self._n
        first = np.arange(n)[:, None]
        last = first + np.arange(self.longest)
        memory = problem.device_of(stage).memory_bytes
        extra = np.zeros((n, self.longest))
        if problem.recompute in ("always", "except_last"):
            extra += self._checkpointed()
        elif problem.recompute == "rotor" and memory is not None and problem.stages_per_device == 1:
            extra += self._recomputed(stage, memory)
        extra /= self._speeds[stage]
        # Every pipeline stage before and behind needs a stage of the chain.
        wrong = (first < stage) | (last > n - (self._stages - stage)) | ((stage == 0) & (first > 0))
        wrong |= (stage == self._stages - 1) & (last != n - 1)
        extra[np.broadcast_to(wrong, extra.shape)] = math.inf
        return extra

    def _sums(self, before: Reals) -> Reals:
        """``(n, longest)``: over every run."""
        ends = np.minimum(np.arange(self._n)[:, None] + np.arange(1, self.longest + 1), self._n)
        sums: Reals = before[ends] - before[:-1, None]
        return sums

    def _checkpointed(self) -> Reals:
        """A whole run in one segment: all forwards once more, the last one up to its last saved tensor."""
        chain = self._problem.chain
        saved = np.array([max(each.forward_seconds - each.replay_seconds for each in stage.options) for stage in chain])
        ends = np.minimum(np.arange(self._n)[:, None] + np.arange(self.longest), self._n - 1)
        total: Reals = np.maximum(self._sums(_before(self._again)) - np.maximum(saved, 0)[ends], 0)
        return total

    def _recomputed(self, stage: int, memory_bytes: int) -> Reals:
        """``(n, longest)``: seconds at least for what does not fit into so much memory, by stages of rising price."""
        n, costs, in_flight = self._n, self._costs, self._problem.in_flight[stage]
        first = np.arange(n)[:, None]
        last = np.minimum(first + np.arange(self.longest), n - 1)
        static = costs.static_table(stage, first, last) + costs.gradient_table(first, last)
        output = np.array([each.output_bytes for each in self._problem.chain])[last]
        needed = self._sums(_before(self._kept)) + output - (memory_bytes - static) / in_flight
        extra = np.zeros((n, self.longest))
        rows = np.flatnonzero((needed > 0).any(axis=1))
        rows = rows[(rows >= stage) & (rows <= n - (self._stages - stage))]
        for some in np.array_split(rows, len(rows) * self.longest**2 // _MOST_AT_ONCE + 1):
            members = np.minimum(some[:, None] + np.arange(self.longest), n - 1)
            order = np.argsort(self._price[members], axis=1, kind="stable")
            places = np.take_along_axis(members, order, axis=1)
            inside = order[:, :, None] < np.arange(1, self.longest + 1)
            freed = np.cumsum(self._kept[places][:, :, None] * inside, axis=1)
            given = np.diff(np.minimum(freed, np.clip(needed[some], 0, None)[:, None]), axis=1, prepend=0.0)
            with np.errstate(invalid="ignore"):
                spent = np.where(given > 0, given * self._price[places][:, :, None], 0.0).sum(axis=1)
            # What cannot be freed at all is somebody else's to refuse: bounds of bytes are rough.
            extra[some] = np.where(np.isfinite(spent), spent, 0.0)
        return extra

    # ---------------------------------------------------------------- steps

    def step_seconds(self, cuts: Integers) -> Reals:
        """What no step with such cuts beats, by row of ``(ways, stages)``."""
        m, devices = self._problem.micro_batches, len(self._problem.devices)
        plain, extra, travel = self._looked_up(cuts)
        possible, extra = np.isfinite(extra).all(axis=1), np.where(np.isfinite(extra), extra, 0.0)
        both = plain if self._last_differs else plain + extra
        work = m * plain + (m - self._last_differs) * extra
        forward, backward, most_forward = (
            self._between(each, cuts) for each in (self._forward, self._backward, self._most_forward)
        )
        most_backward = plain + extra - forward
        if self._problem.schedule == "gpipe":
            slowest = (np.maximum(each, travel).max(axis=1) for each in (forward, backward))
            bounds = (both + 2 * travel).sum(axis=1) + (m - 1) * sum(slowest)
            return np.where(possible, bounds, math.inf)
        steps = both + 2 * travel
        through = np.cumsum(steps, axis=1)
        before, behind = through - steps, through[:, -1:] - through + 2 * travel
        returns = before + self._turns * (both + behind)
        # Of each device's first stage, and behind its last.
        before, beyond = before[:, :devices], behind[:, -devices:]
        home_travel = np.column_stack((np.zeros(len(travel)), travel[:, :-1]))
        there = _passage(forward + travel, devices) - forward[:, :devices] - travel[:, -devices:] + beyond
        home = _passage(backward + travel, devices) - backward[:, :devices] - travel[:, -devices:] + beyond
        first_wait = np.maximum(there - _by_device(self._ahead * most_forward, devices), 0)
        last_wait = np.maximum(home - _by_device(self._left * most_backward, devices), 0)
        waits = np.where(self._apart, first_wait + last_wait, np.maximum(first_wait, last_wait))
        on_devices = before + _by_device(work, devices) + waits
        first = before + forward[:, :devices]
        out = first + m * _by_device(travel, devices) - travel[:, -devices:] + home + backward[:, :devices]
        back = first + m * _by_device(home_travel, devices) - home_travel[:, :devices] + there + backward[:, -devices:]
        bounds = np.concatenate((on_devices, returns, out, back), axis=1).max(axis=1)
        return np.where(possible, bounds, math.inf)

    def estimates(self, cuts: Integers) -> list[float]:
        """Steps with such cuts, simulated with what is known of their runs; on three devices or more."""
        plain, extra, travel = self._looked_up(cuts)
        possible = np.isfinite(extra).all(axis=1)
        forward = self._between(self._fastest_forward, cuts)
        backward = plain - forward
        home_travel = np.column_stack((np.zeros(len(travel)), travel[:, :-1]))
        usual = np.where(np.isfinite(extra), backward + extra, backward)
        last = backward if self._last_differs else usual
        table = np.stack((forward, forward, travel, usual, last, home_travel), axis=-1)
        seconds = np.where(possible, self._problem.simulated_at_once(table), math.inf)
        return [float(each) for each in seconds]

    def through(self) -> Reals:
        """By run, what no partition that has it can beat: other stages take the least they can."""
        n, stages, m = self._n, self._stages, self._problem.micro_batches
        ends = np.arange(n)[:, None] + np.arange(1, self.longest + 1)
        travel = np.concatenate((self._travel, np.zeros(self.longest)))[ends]
        plain, forward, backward, most_forward = map(
            self._sums, (self._plain, self._forward, self._backward, self._most_forward)
        )
        back = np.full((stages + 1, n + self.longest + 1), math.inf)
        front = back.copy()
        back[stages, n] = front[0, 0] = 0.0

        def least(stage: int) -> Reals:
            seconds: Reals = plain / self._speeds[stage] + self.extra[stage]
            return (
                np.where(seconds < math.inf, plain / self._speeds[stage], math.inf) if self._last_differs else seconds
            )

        for stage in reversed(range(stages)):
            back[stage, :n] = (least(stage) + 2 * travel + back[stage + 1][ends]).min(axis=1)
        through = np.full_like(self.extra, math.inf)
        for stage in range(stages):
            speed, both, extra = self._speeds[stage], least(stage), self.extra[stage]
            before, behind = front[stage, :n, None], 2 * travel + back[stage + 1][ends]
            np.minimum.at(front[stage + 1], ends, before + both + 2 * travel)
            if self._problem.schedule == "gpipe":
                through[stage] = before + both + behind + (m - 1) * (forward + backward) / speed
                continue
            own = m * plain / speed + (m - self._last_differs) * extra
            with np.errstate(invalid="ignore"):
                if self._problem.stages_per_device == 1:
                    hidden = (most_forward / speed, plain / speed + extra - forward / speed)
                    waits = [np.maximum(behind - (self._problem.in_flight[stage] - 1) * each, 0) for each in hidden]
                    own = own + (waits[0] + waits[1] if self._apart[stage] else np.maximum(*waits))
                returns = np.maximum(self._turns[stage] * (both + behind), both + behind + (m - 1) * travel)
                through[stage] = before + np.maximum(own, returns)
        through[~np.isfinite(through)] = math.inf
        return through

    def work_seconds(self) -> float:
        """What no cuts beat, since each device does its part of the work."""
        speeds = sum(device.speed for device in self._problem.devices)
        return float(self._problem.micro_batches * self._plain[-1] / speeds)

    def _between(self, before: Reals, cuts: Integers) -> Reals:
        """``(ways, stages)`` on their devices."""
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), self._n)))
        seconds: Reals = (before[ends] - before[cuts]) / self._speeds
        return seconds

    def _looked_up(self, cuts: Integers) -> tuple[Reals, Reals, Reals]:
        """``(ways, stages)`` each: seconds without recomputation, those of recomputation, and of a message to the stage behind."""
        ends = np.column_stack((cuts[:, 1:], np.full(len(cuts), self._n)))
        lengths = ends - cuts
        extra = self.extra[np.arange(self._stages), cuts, np.minimum(lengths, self.longest) - 1]
        return self._between(self._plain, cuts), np.where(lengths > self.longest, math.inf, extra), self._travel[ends]


class Search:
    """Cuts one chain.

    Args:
        problem: What there is to cut.
        costs: Of the problem.
    """

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self._problem, self._costs = problem, costs
        self._n, self._stages = len(problem.chain), problem.stages
        self._actions = 2 * problem.micro_batches * problem.stages
        self._shares = DeviceShares(problem, costs)
        self._judged: dict[Cuts, Judgement] = {}
        self._best: tuple[Judgement, Cuts] = (self._stages + 1, math.inf), ()
        self._simulated, self._most_actions, self._most_work = 0, _MOST_ACTIONS, _MOST_WORK
        self._planned: dict[tuple[int, int, int], StageChoice | None] = {}

    def run(self) -> Found | None:
        """The best cuts, or None if none was found that fits."""
        simple = [cuts_of(balance) for balance in simple_balances(self._problem.chain, self._stages)]
        for cuts in simple:
            self._judge(cuts)
        most, longest = self._n - self._stages + 1, 4 * math.ceil(self._n / self._stages) + 4
        if self._seconds < math.inf:
            longest = min(max(longest, _MOST_RUNS // (self._n * self._stages)), most)
        while longest > 1 and self._longer_seconds(longest - 1) >= self._seconds:
            longest -= 1
        while True:
            self._bounds = Bounds(self._costs, longest)
            for run, choice in self._planned.items():
                self._bounds.learn(*run, choice)
            bound = self._candidates()
            if longest >= most or self._seconds < math.inf:
                break
            longest *= 2
        bound = min(bound, self._longer_seconds(longest))
        if bound < self._seconds * (1 - _SAME):
            self._climb_from(simple)
        choices = self._choices(self._best[1])
        found = tuple(choice for choice in choices if choice is not None)
        return Found(found, min(bound, self._seconds)) if len(found) == self._stages else None

    def only(self, cuts: Cuts) -> Found | None:
        """These cuts, whatever others would take."""
        found = tuple(choice for choice in self._choices(cuts) if choice is not None)
        return Found(found, 0.0) if len(found) == self._stages else None

    def _longer_seconds(self, longest: int) -> float:
        """What no partition with a longer run beats."""
        if longest >= self._n - self._stages + 1:
            return math.inf
        before = _before(
            min(each.forward_seconds + each.backward_seconds for each in stage.options) for stage in self._problem.chain
        )
        least = (before[longest + 1 :] - before[: -longest - 1]).min()
        return float(self._problem.micro_batches * least / max(device.speed for device in self._problem.devices))

    # ---------------------------------------------------------------- judgement

    @property
    def _seconds(self) -> float:
        return self._best[0][1]

    def _choices(self, cuts: Cuts) -> list[StageChoice | None]:
        runs = runs_of(cuts, self._n)
        if self._problem.stages_per_device > 1:
            return self._shares.choices(runs, thorough=self._seconds == math.inf)
        return [self._costs.choice(stage, *run) for stage, run in enumerate(runs)]

    def _judge(self, cuts: Cuts) -> Judgement:
        """Plan all runs of a partition and simulate it."""
        if cuts in self._judged:
            return self._judged[cuts]
        choices = self._choices(cuts)
        loads = [choice.load for choice in choices if choice is not None]
        misfits, seconds = len(choices) - len(loads), math.inf
        if not misfits:
            self._simulated += _BY_ITSELF * self._actions
            seconds = self._problem.step_seconds(loads)
        self._judged[cuts] = misfits, seconds
        self._best = min(self._best, ((misfits, seconds), cuts))
        if self._problem.stages_per_device == 1:
            for stage, (run, choice) in enumerate(zip(runs_of(cuts, self._n), choices, strict=True)):
                self._planned[(stage, *run)] = choice
                if hasattr(self, "_bounds"):
                    self._bounds.learn(stage, *run, choice)
        return self._judged[cuts]

    def _is_spent(self) -> bool:
        return self._simulated >= self._most_actions or self._costs.work >= self._most_work

    def _promising(self, cuts: Integers) -> tuple[Integers, float]:
        """Those that may be better, the most promising ones first, and the least of their bounds."""
        bounds = self._bounds.step_seconds(cuts)
        order = np.argsort(bounds, kind="stable")
        order = order[bounds[order] < self._seconds * (1 - _SAME)]
        return cuts[order], float(bounds[order[0]]) if len(order) else math.inf

    # ---------------------------------------------------------------- candidates

    def _candidates(self) -> float:
        """Judge what may be best; returns what no partition can beat."""
        if math.comb(self._n - 1, self._stages - 1) <= _FEW:
            return self._all()
        patience = min(_CANDIDATES, max(_MOST_NUMBERS // self._bounds.extra.size, 2))
        bound = 0.0
        for number in range(self._n * self._stages):
            through = self._bounds.through()
            cuts = least_bottleneck(through)
            if cuts is None:
                return self._seconds
            runs = runs_of(cuts, self._n)
            bound = float(max(through[stage, first, last - first] for stage, (first, last) in enumerate(runs)))
            known = cuts in self._judged
            self._judge(cuts)
            if known or ((number >= patience or self._is_spent()) and self._seconds < math.inf):
                break
        return max(bound, self._bounds.work_seconds())

    def _all(self) -> float:
        """Judge all cuts one by one, until no other one can be better."""
        waiting = np.array([(0, *middle) for middle in combinations(range(1, self._n), self._stages - 1)])
        # Shares of a device's memory may be shared out better than they are found.
        shares = self._problem.stages_per_device > 1 and self._costs.recomputes
        of_all = self._promising(waiting)[1] if shares else math.inf
        while True:
            waiting, least = self._promising(waiting)
            if not len(waiting) or (self._is_spent() and self._seconds < math.inf):
                return min(of_all, least, self._seconds)
            for cuts in waiting[:_AT_ONCE].tolist():
                self._judge(tuple(cuts))
            waiting = waiting[_AT_ONCE:]

    # ---------------------------------------------------------------- local search

    def _climb_from(self, starts: Iterable[Cuts]) -> None:
        """From the best cuts as far as it goes, then from others, as long as there is work left."""
        starts = list(dict.fromkeys([self._best[1], *sorted(starts, key=self._judged.__getitem__)]))
        actions, work = self._simulated + _MOST_ACTIONS, self._costs.work + _MOST_WORK
        for number, cuts in enumerate(starts):
            # Half of what is left, and all of it in the end.
            share = 1 if number == len(starts) - 1 else 2
            self._most_actions = self._simulated + (actions - self._simulated) // share
            self._most_work = self._costs.work + (work - self._costs.work) // share
            self._climb(cuts)

    def _climb(self, cuts: Cuts) -> None:
        """One kind of moves after the other, until none of them gets anywhere."""
        kinds = self._kinds()
        kind = in_vain = 0
        while in_vain < len(kinds) and not self._is_spent():
            better = self._better(cuts, self._moved(cuts, *kinds[kind]))
            if better is None:
                kind, in_vain = (kind + 1) % len(kinds), in_vain + 1
            else:
                cuts, in_vain = better, 0

    def _better(self, cuts: Cuts, moved: Integers) -> Cuts | None:
        """The first that is better, of which the estimates promise most."""
        misfits, seconds = self._judged[cuts]
        below = seconds * (1 - _SAME)
        bounds = self._bounds.step_seconds(moved)
        order = _rising(bounds, below)
        for start in range(0, len(order), _AT_ONCE):
            some = moved[order[start : start + _AT_ONCE]]
            if self._is_spent():
                return None
            if len(self._problem.devices) > 2:  # between two a link serves both directions
                self._simulated += len(some) * self._actions
                some = some[_rising(np.array(self._bounds.estimates(some)), below)]
            for each in map(tuple, some.tolist()):
                if self._is_spent():
                    return None
                found = self._judge(each)
                if found < (misfits, below):
                    return each
        return None

    def _kinds(self) -> list[tuple[int, int]]:
        """How many neighbouring cuts move, and by how many stages of the chain: long ways first."""
        steps, counts = [max(self._n // self._stages // 2, 1)], [1]
        while steps[-1] > 1:
            steps.append(steps[-1] // 2)
        while counts[-1] < self._stages - 1:
            counts.append(min(2 * counts[-1], self._stages - 1))
        return [(count, step) for step in steps for count in counts]

    def _moved(self, cuts: Cuts, count: int, step: int) -> Integers:
        """All moves of one kind; at the end fewer cuts move."""
        places = np.arange(1, self._stages)
        moving = (places[:, None] <= np.arange(self._stages)) & (np.arange(self._stages) < places[:, None] + count)
        moved = np.array(cuts) + step * np.concatenate((moving, -moving.astype(np.int64)))
        ends = np.column_stack((moved[:, 1:], np.full(len(moved), self._n)))
        allowed: Integers = moved[(moved < ends).all(axis=1)]
        return allowed


def _before(values: Iterable[float]) -> Reals:
    before: Reals = np.concatenate(([0.0], np.cumsum(list(values))))
    return before


def _by_device(values: Reals, devices: int) -> Reals:
    """``(ways, stages)`` summed over the stages of each device."""
    summed: Reals = values.reshape(len(values), values.shape[1] // devices, devices).sum(axis=1)
    return summed


def _passage(steps: Reals, devices: int) -> Reals:
    """From each device's first stage to its last one, both included."""
    through = np.cumsum(steps, axis=1)
    passed: Reals = through[:, -devices:] - (through - steps)[:, :devices]
    return passed


def _rising(values: Reals, below: float) -> Integers:
    """Places of those that are less, the least first."""
    order = np.argsort(values, kind="stable")
    found: Integers = order[values[order] < below]
    return found
