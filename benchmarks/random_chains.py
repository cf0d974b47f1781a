"""Random chains and schedules, with costs that a real model could have.

What holds for every stage that was really measured holds here too: a forward peak covers what the forward leaves, a replay is
part of a forward, a backward holds at least the gradients that it reads and writes, who holds the input can only add to the peak.
"""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from typing import Literal, get_args

from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.link import Link
from lightning_rotor.schedule import Item, Leaf, Move, Schedule, Segment
from lightning_rotor.simulator import movable

Kind = Literal["cnn", "transformer", "heterogeneous", "odd", "options"]
"""
cnn             boundaries shrink along the chain, as resolution drops faster than channels grow
transformer     equal stages
heterogeneous   every size and duration drawn anew
odd             heterogeneous, with stages that save nothing, draw random numbers, have buffers, pin tensors or cannot be recomputed
options         heterogeneous, with a second option that saves less and takes longer in some stages
"""
InvertibleKind = Literal["invertible"]
"""heterogeneous, with an option that inverts in some stages, whose output is as large as their input"""
KINDS: tuple[Kind, ...] = get_args(Kind)
_COARSE = 8


def random_chain(
    rng: random.Random, stages: int, kind: Kind | InvertibleKind, *, grain: int = 1, most_options: int = 2
) -> Chain:
    """A chain of any kind; all sizes are multiples of ``grain`` bytes."""
    costs: list[StageCost] = []
    # States of generators and buffers are small beside boundaries: kilobytes against hundreds of them.
    coarse = _COARSE * grain if kind == "odd" else grain
    input_bytes = _size(rng, 64, coarse)
    common = _shape(rng, coarse)
    before = input_bytes
    for index in range(stages):
        shape = common if kind == "transformer" else _shape(rng, coarse)
        if kind == "cnn":
            shape["output"] = max(before // rng.choice((1, 1, 2, 4)) // grain, 1) * grain
        inverts = kind == "invertible" and index > 0 and rng.random() < 0.6
        if inverts:
            shape["output"] = before
        two = kind == "options" and rng.random() < 0.5 and sum(len(cost.options) > 1 for cost in costs) < most_options
        costs.append(_stage(rng, index, before, shape, grain=grain, odd=kind == "odd", two_options=two))
        if kind == "invertible":
            exact = (
                replace(option, needs_exact_output=option.saved_output_bytes > 0 and rng.random() < 0.5)
                for option in costs[-1].options
            )
            costs[-1] = replace(costs[-1], options=tuple(exact))
        if inverts:
            costs[-1] = with_inversion(rng, costs[-1], grain=grain)
        before = costs[-1].output_bytes
    return Chain(
        tuple(costs),
        input_bytes=input_bytes,
        rng_state_bytes=grain * rng.choice((0, 1)) if kind == "odd" else 0,
        segment_seconds=rng.choice((0.0, 1e-5)),
    )


def with_inversion(rng: random.Random, cost: StageCost, *, grain: int = 1) -> StageCost:
    """The stage with an option that inverts it: inverse, another forward, and the backward, with the rebuilt input."""
    keep = cost.keep
    if not keep.saved_tensors:
        return cost
    size, work = cost.output_bytes, keep.saved_bytes + rng.choice((0, 1)) * _size(rng, 24, grain)
    peaks = {name: getattr(keep, name) + size + work for name in _BACKWARD_PEAKS if name != "unpack_peak_bytes"}
    existing = keep.backward_peaks(gradients_exist=True)
    option = replace(
        keep,
        name="invert",
        needs_exact_output=False,
        saved_bytes=grain * rng.choice((0, 0, 1)),
        saved_input_bytes=0,
        saved_output_bytes=size,
        saved_tensors=1,
        forward_peak_bytes=cost.discard_peak_bytes,
        replay_peak_bytes=cost.discard_peak_bytes,
        unpack_peak_bytes=size,
        unpack_bytes=size,
        **peaks,
        accumulating=BackwardPeaks(*(peak + size + work for peak in astuple(existing))),
        replay_seconds=keep.forward_seconds,
        backward_seconds=keep.backward_seconds + rng.choice((1, 2)) * keep.forward_seconds,
        inverts=True,
    )
    return replace(cost, options=(*cost.options, option))


def with_skips(rng: random.Random, chain: Chain) -> Chain:
    """The chain with one to three skips, for chains of at least three stages; peaks grow by what the skips add to them."""
    n = len(chain)
    skips: list[Skip] = []
    savers: list[set[int]] = []
    for _ in range(rng.randint(1, 3)):
        born = rng.randint(-1, n - 3)
        uses = tuple(sorted(rng.sample(range(born + 1, n), rng.randint(1, min(3, n - born - 1)))))
        uses = (n - 1,) if uses == (born + 1,) else uses
        size = 0 if born < 0 else rng.randint(1, 64)
        gradients = (rng.choice((0, size or 16)),) * len(uses)
        skips.append(Skip(born, uses, size, gradients, in_output=uses[-1] == n - 1 and rng.random() < 0.1))
        savers.append({stage for stage in (*uses, born) if rng.random() < 0.4})
    stages = []
    for index, stage in enumerate(chain):
        made = sum(skip.size_bytes for skip in skips if skip.born == index)
        more = sum(skip.gradient_bytes[0] for skip in skips if index in (skip.born, *skip.uses))
        saved = tuple(number for number, stages_that_save in enumerate(savers) if index in stages_that_save)
        options = tuple(
            replace(
                option,
                saved_skips=() if option.inverts else saved,
                saved_tensors=max(option.saved_tensors, len(saved)),
                forward_peak_bytes=option.forward_peak_bytes + made,
                replay_peak_bytes=option.replay_peak_bytes + made,
                discard_peak_bytes=stage.discard_peak_of(option) + made,
                unpack_bytes=option.unpack_bytes + more,
                **{name: getattr(option, name) + more for name in _BACKWARD_PEAKS},
                accumulating=BackwardPeaks(
                    *(peak + more for peak in astuple(option.backward_peaks(gradients_exist=True)))
                ),
            )
            for option in stage.options
        )
        stages.append(replace(stage, options=options, discard_peak_bytes=stage.discard_peak_bytes + made))
    return replace(chain, stages=tuple(stages), skips=tuple(skips))


_BACKWARD_PEAKS = (
    "unpack_peak_bytes",
    "backward_peak_bytes",
    "backward_segment_peak_bytes",
    "backward_held_peak_bytes",
)


def random_schedule(rng: random.Random, chain: Chain, *, segment_probability: float = 0.5) -> Schedule:
    """Any schedule of a chain."""

    def items(first: int, last: int) -> tuple[Item, ...]:
        run: list[Item] = []
        while first <= last:
            end = rng.randint(first, last)
            inside = chain.stages[first : end + 1]
            if end < last and rng.random() < segment_probability and all(stage.recomputable for stage in inside):
                run.append(Segment(items(first, end)))
                first = end + 1
            else:
                options = chain.stages[first].options
                run.append(Leaf(first, rng.choice([o for o, each in enumerate(options) if run or not each.inverts])))
                first += 1
        return tuple(run)

    return Schedule(items(0, len(chain) - 1))


def _size(rng: random.Random, most: int, grain: int) -> int:
    return rng.randint(1, most) * grain


def _shape(rng: random.Random, grain: int) -> dict[str, int]:
    """What a stage is like: how large it is, and what it saves."""
    return {
        "output": _size(rng, 64, grain),
        "internal": rng.choice((0, 1, 2)) * _size(rng, 48, grain),
        "temporary": rng.choice((0, 0, 1)) * _size(rng, 24, grain),
        "parameters": rng.choice((0, 0, 1)) * _size(rng, 16, grain),
        "saves_input": rng.random() < 0.7,
        "saves_output": rng.random() < 0.3,
        "tensors": rng.randint(1, 6),
        "microseconds": rng.randint(20, 1000),
        "replayed": rng.choice((0, 50, 90, 100)),
    }


def _stage(
    rng: random.Random, index: int, before: int, shape: dict[str, int], *, grain: int, odd: bool, two_options: bool
) -> StageCost:
    seconds = shape["microseconds"] * 1e-6
    saves_nothing = odd and rng.random() < 0.15
    keep = _option("keep", index, before, shape, saves_nothing=saves_nothing)
    options = (keep, _selective(rng, index, before, shape, keep)) if two_options else (keep,)
    cost = StageCost(
        name=f"stage{index}",
        output_bytes=shape["output"],
        discard_peak_bytes=shape["output"] + max(shape["temporary"], shape["internal"] // 2),
        discard_seconds=seconds,
        options=options,
        pinned_bytes=grain * rng.randint(1, 4) if odd and rng.random() < 0.1 else 0,
        draws_random=odd and rng.random() < 0.3,
        state_bytes=grain * rng.choice((0, 0, 1)) if odd else 0,
        recomputable=not (odd and rng.random() < 0.07),
    )
    if index % 2 and keep.saved_tensors:  # it reads its buffers through an operation that saves them
        options = tuple(replace(option, saved_state_bytes=cost.state_bytes) for option in options)
    return replace(cost, options=options)


def _option(name: str, index: int, before: int, shape: dict[str, int], *, saves_nothing: bool = False) -> Option:
    output, temporary, seconds = shape["output"], shape["temporary"], shape["microseconds"] * 1e-6
    internal = 0 if saves_nothing else shape["internal"]
    saves_output = 0 if saves_nothing else shape["saves_output"] * output
    saves_input = 0 if saves_nothing else shape["saves_input"] * before
    if not (internal or saves_output or saves_input):
        saves_nothing = True
    input_gradient = before if index else 0
    # The input dies when the backward has read it for the last time, which is after the input's gradient was made.
    accumulating = max(output + input_gradient + temporary, input_gradient)
    plain = max(accumulating, input_gradient + shape["parameters"])
    return Option(
        name=name,
        saved_bytes=internal,
        saved_input_bytes=saves_input,
        saved_output_bytes=saves_output,
        saved_tensors=0 if saves_nothing else shape["tensors"],
        forward_peak_bytes=output + internal + temporary,
        replay_peak_bytes=0
        if saves_nothing
        else saves_output + internal + (temporary if shape["replayed"] > 50 else 0),
        unpack_peak_bytes=output + (temporary // 2 if shape["replayed"] < 100 else 0),
        unpack_bytes=output,
        backward_peak_bytes=plain,
        backward_segment_peak_bytes=plain + min(saves_input, temporary) // 2,
        backward_held_peak_bytes=plain + min(saves_input, temporary),
        input_gradient_bytes=input_gradient,
        parameter_gradient_bytes=shape["parameters"],
        forward_seconds=seconds,
        replay_seconds=0.0 if saves_nothing else seconds * shape["replayed"] / 100,
        backward_seconds=seconds * 2,
        accumulating=BackwardPeaks(
            accumulating,
            accumulating + min(saves_input, temporary) // 2,
            accumulating + min(saves_input, temporary),
            accumulating,
        ),
    )


def _selective(rng: random.Random, index: int, before: int, shape: dict[str, int], keep: Option) -> Option:
    """An option that recomputes some of its operations in the backward."""
    less = {**shape, "internal": shape["internal"] // 4, "temporary": shape["temporary"] + shape["internal"] // 2}
    option = _option("selective", index, before, {**less, "saves_output": rng.random() < 0.3})
    slower = keep.forward_seconds * rng.choice((0.2, 0.5, 0.8))
    return Option(
        **{
            **{name: getattr(option, name) for name in option.__slots__},
            "backward_seconds": keep.backward_seconds + slower,
            "discard_peak_bytes": shape["output"] if index % 3 else None,
        }
    )


def random_moves(rng: random.Random, chain: Chain, schedule: Schedule) -> Schedule:
    """The schedule with moves of random items, given back and taken again at random points."""
    items = len(schedule.items)
    moves = []
    for number in movable(chain, schedule.items):
        last = Move.whole(number, items).fetch
        if rng.random() < 0.7 and last > items - 1:
            fetch = rng.randint(max(items, number + 2), last)
            moves.append(Move(number, rng.randint(number + 1, fetch - 1), fetch))
    return Schedule(schedule.items, tuple(moves))


def random_link(rng: random.Random, chain: Chain) -> Link:
    """A link that carries all that the chain saves in a fifth to five forwards."""
    saved_bytes = max(sum(stage.keep.kept_bytes for stage in chain), 1)
    forward_seconds = sum(stage.keep.forward_seconds for stage in chain) or 1e-3
    speed = saved_bytes / forward_seconds * 2 ** rng.uniform(-2.3, 2.5)
    return Link(speed, speed * rng.choice((1, 1, 2.4)), latency=0.0)
