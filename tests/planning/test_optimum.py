"""The oracle of true optima, against cases by hand and another way to find them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import pytest

from benchmarks.optimum import Optimum
from benchmarks.reference import best_by_budget, judge_all
from lightning_rotor.chain import Chain, Option, Skip, StageCost
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate
from tests.grids import few
from tests.strategies import KINDS, random_chain


def plain_chain(output_bytes: tuple[int, ...], saved_bytes: tuple[int, ...]) -> Chain:
    """Stages of 1 s forward and 2 s backward that save their input and as much more as is said; replays take as long."""
    stages, before = [], 0
    for index, (output, saved) in enumerate(zip(output_bytes, saved_bytes, strict=True)):
        keep = Option(
            name="keep",
            saved_bytes=saved,
            saved_input_bytes=before,
            saved_output_bytes=0,
            saved_tensors=1,
            forward_peak_bytes=output + saved,
            replay_peak_bytes=saved,
            unpack_peak_bytes=output,
            unpack_bytes=output,
            backward_peak_bytes=output + before,
            backward_segment_peak_bytes=output + before,
            backward_held_peak_bytes=output + before,
            input_gradient_bytes=before,
            parameter_gradient_bytes=0,
            forward_seconds=1.0,
            replay_seconds=1.0,
            backward_seconds=2.0,
        )
        stages.append(StageCost(str(index), output, output, 1.0, (keep,)))
        before = output
    return Chain(tuple(stages))


def test_nothing_runs_twice_if_everything_fits() -> None:
    chain = plain_chain((1, 1, 1), (0, 0, 0))
    # The last backward: boundaries 1 and 2, the output, and two gradients.
    assert simulate(chain, Schedule.keep_all(3)).peak_bytes == 5
    assert Optimum(chain).seconds(5) == 9


def test_one_boundary_too_many_costs_two_runs() -> None:
    """Boundary 1 is not there at the last backward: stage 0 runs again to make it, and stage 1 to save it."""
    chain = plain_chain((1, 1, 1), (0, 0, 0))
    assert Optimum(chain).seconds(4) == 11


def test_no_execution_needs_less_than_one_backward() -> None:
    assert Optimum(plain_chain((1, 1, 1), (0, 0, 0))).seconds(3) == math.inf


def test_parameter_gradients_and_what_lingers_take_memory() -> None:
    chain = plain_chain((1, 1), (0, 0))
    last = replace(chain.stages[1].keep, parameter_gradient_bytes=5)
    chain = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], options=(last,))))
    # The last backward takes 4. That of stage 0 holds the output, one gradient of an activation, and those of parameters.
    assert Optimum(chain).seconds(6) == math.inf
    assert Optimum(chain).seconds(7) == Optimum(chain, gradients_exist=True).seconds(4) == 6
    assert Optimum(chain, lingering_bytes=6).seconds(7) == math.inf
    assert Optimum(chain, lingering_bytes=5).seconds(7) == 6


def test_stage_that_must_be_kept_runs_once() -> None:
    chain = plain_chain((1, 1, 1), (0, 0, 0))
    chain = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], recomputable=False), chain.stages[2]))
    assert Optimum(chain).seconds(4) == math.inf
    assert Optimum(chain).seconds(5) == 9


def test_boundary_that_serves_once_and_is_made_again_later_beats_every_tree() -> None:
    """Boundary 1 is held to replay stages 1 and 2, gives way to boundary 2, and is made again for the backward of stage 1::

        forward 0 1 2 3, backward 3, again 1 2 from boundary 1, backward 2, again 0 1 from the input, backward 1 0

    In a tree whoever holds boundary 1 holds it until the backward of stage 1, too long here: stage 0 runs three times.
    """
    chain = plain_chain((1, 2, 1, 1), (0, 0, 0, 1))
    assert best_by_budget(judge_all(chain))[6].seconds == simulate(chain, Schedule.parse("((0-1) 2) 3")).seconds == 17
    assert Optimum(chain).seconds(6) == 16


@pytest.mark.parametrize("kind", few(KINDS, "options", "heterogeneous", "odd"))
def test_optimum_is_that_of_a_search_through_explicit_states(kind: str) -> None:
    finite = 0
    for seed in range(12):
        rng = random.Random(f"{kind} {seed}")
        chain = replace(random_chain(rng, rng.randint(1, 4), kind), rng_state_bytes=0)
        step = {"gradients_exist": rng.random() < 0.3, "lingering_bytes": rng.choice((0, 0, 30))}
        most = simulate(chain, Schedule.keep_all(len(chain)), **step).peak_bytes
        for _ in range(3):
            budget = rng.randint(most // 2, most)
            found = Optimum(chain, **step).seconds(budget)
            assert found == pytest.approx(_Search(chain, budget, **step).seconds(), rel=1e-9)
            finite += found < math.inf
    assert finite > 5


@pytest.mark.parametrize("kind", few(KINDS, "options", "heterogeneous", "odd"))
def test_optimum_is_never_slower_than_the_best_schedule_tree(kind: str) -> None:
    cases = 0
    for seed in range(15):
        rng = random.Random(f"{kind} {seed}")
        chain = random_chain(rng, rng.randint(1, 5), kind)
        step = {"gradients_exist": rng.random() < 0.3, "lingering_bytes": rng.choice((0, 0, 30))}
        optimum = Optimum(chain, **step)
        for budget, best in best_by_budget(judge_all(chain, **step)).items():
            found = optimum.seconds(budget)
            assert found <= best.seconds * (1 + 1e-9), f"{budget} bytes, {best}, {chain}"
            cases += 1
    assert cases > 25


def test_chains_beyond_the_model_are_refused() -> None:
    chain = plain_chain((1, 1, 1), (0, 0, 0))
    with pytest.raises(ValueError, match="skips"):
        Optimum(replace(chain, skips=(Skip(0, (2,), 1, (0,)),)))
    keep = chain.stages[1].keep
    odd = replace(chain.stages[1], options=(keep, replace(keep, input_gradient_bytes=9)))
    with pytest.raises(ValueError, match="leave different gradients"):
        Optimum(replace(chain, stages=(chain.stages[0], odd, chain.stages[2])))


# ---------------------------------------------------------------------------------------------------- another way


@dataclass(frozen=True)
class _State:
    """What there is: sets by stage as numbers of options, -1 for none; boundaries; first runs; the next backward, and as what it began."""

    sets: tuple[int, ...]
    boundaries: frozenset[int] = frozenset()
    forwards: int = 0
    backward: int = -1
    begun: int = -1


class _Search:
    """Dijkstra's algorithm over states as they are met: slow, and written without arrays, axes or phases."""

    def __init__(self, chain: Chain, budget_bytes: int, *, gradients_exist: bool, lingering_bytes: int) -> None:
        self.chain, self.stages, self.budget = chain, chain.stages, budget_bytes
        self.gradients_exist, self.lingering = gradients_exist, lingering_bytes

    def seconds(self) -> float:
        start = _State((-1,) * len(self.chain))
        order = count()
        least, queue = {start: 0.0}, [(0.0, next(order), start)]
        while queue:
            seconds, _, state = heapq.heappop(queue)
            if state.forwards == len(self.chain) and state.backward < 0:
                return seconds
            if seconds > least[state]:
                continue
            for duration, following in self.steps(state):
                if seconds + duration < least.get(following, math.inf):
                    least[following] = seconds + duration
                    heapq.heappush(queue, (seconds + duration, next(order), following))
        return math.inf

    def steps(self, state: _State) -> Iterator[tuple[float, _State]]:
        for boundary in state.boundaries:
            yield 0.0, replace(state, boundaries=state.boundaries - {boundary})
        for stage, option in enumerate(state.sets):
            if option >= 0:
                yield 0.0, replace(state, sets=self.with_set(state, stage, -1))
        room = self.budget - self.alive(state)
        last = state.forwards if state.backward < 0 else state.backward
        for stage in range(last + 1):
            if stage == 0 or stage in state.boundaries:
                yield from self.runs(state, stage, room)
        if state.backward >= 0:
            yield from self.backwards(state, self.budget - self.alive(state, gradient=False))

    def runs(self, state: _State, stage: int, room: int) -> Iterator[tuple[float, _State]]:
        cost, first = self.stages[stage], stage == state.forwards
        if not first and not cost.recomputable:
            return
        ran = replace(state, boundaries=state.boundaries | {stage + 1})
        if first:
            ran = replace(ran, forwards=stage + 1, backward=stage if stage == len(self.chain) - 1 else -1)
        ran = replace(ran, boundaries=ran.boundaries - {len(self.chain)})
        if room >= min(map(cost.discard_peak_of, cost.options)):
            yield cost.discard_seconds, ran
        for number, option in enumerate(cost.options):
            sets = self.with_set(state, stage, number if option.saved_tensors else -1)
            if room >= option.forward_peak_bytes:
                yield option.forward_seconds, replace(ran, sets=sets)
            if not first and room >= option.replay_peak_bytes:
                yield option.replay_seconds, replace(state, sets=sets)

    def backwards(self, state: _State, room: int) -> Iterator[tuple[float, _State]]:
        stage = state.backward
        if state.begun < 0:
            for number, option in enumerate(self.stages[stage].options):
                if room >= option.unpack_peak_bytes:
                    yield 0.0, replace(state, begun=number)
            return
        option = self.stages[stage].options[state.begun]
        if option.saved_tensors and state.sets[stage] != state.begun:
            return
        peaks = option.backward_peaks(gradients_exist=self.gradients_exist)
        before = state.sets[stage - 1] if stage else -1
        if stage == 0 or (before >= 0 and self.stages[stage - 1].options[before].saved_output_bytes):
            peak = peaks.held_bytes
        else:
            peak = peaks.segment_bytes if stage in state.boundaries else peaks.plain_bytes
        if room >= peak:
            left = frozenset(boundary for boundary in state.boundaries if boundary < stage)
            sets = self.with_set(state, stage, -1)
            yield (
                option.backward_seconds,
                replace(state, sets=sets, boundaries=left, backward=stage - 1, begun=-1),
            )

    def alive(self, state: _State, *, gradient: bool = True) -> int:
        chosen = [
            self.stages[stage].options[option] if option >= 0 else None for stage, option in enumerate(state.sets)
        ]
        total = sum(option.saved_bytes for option in chosen if option)
        for boundary in range(1, len(self.chain)):
            size, before, behind = self.stages[boundary - 1].output_bytes, chosen[boundary - 1], chosen[boundary]
            saved = (before.saved_output_bytes if before else 0) + (behind.saved_input_bytes if behind else 0)
            total += size if boundary in state.boundaries else min(size, saved)
        total += sum(stage.pinned_bytes for stage in self.stages[: state.forwards])
        if state.backward < 0:
            return total + self.lingering
        total += self.stages[-1].output_bytes
        done = self.stages[state.backward + 1 :]
        total += 0 if self.gradients_exist else sum(stage.keep.parameter_gradient_bytes for stage in done)
        if gradient and state.begun >= 0:
            total += self.stages[state.backward].options[state.begun].unpack_bytes
        elif gradient and done:
            total += done[0].keep.input_gradient_bytes
        return total

    @staticmethod
    def with_set(state: _State, stage: int, option: int) -> tuple[int, ...]:
        return (*state.sets[:stage], option, *state.sets[stage + 1 :])
