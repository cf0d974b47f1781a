r"""The independent judge: what a schedule costs on a chain, in bytes and seconds.

The simulator walks through a training step as the executor runs it and keeps count of what is allocated. It knows
nothing of how the schedule was found, so it can check every planner, and its peak is the one that the allocator shows.

What is alive, and until when::

    boundary i      from the forward of stage i-1 on, while somebody holds it: the caller (input, output),
                    the running forward, a segment that starts here and is not recomputed yet, or the saved tensors of
                    stage i-1 or i; if stage i is inverted, not from the end of its forward to its backward
    skip            from the forward of the stage that makes it on, while somebody holds it: the running forward, until
                    its last reader is done, a segment that reads it, the caller if it is output, or saved tensors
    saved tensors   from the stage's recorded forward to its backward
    gradients       of a boundary: from the backward of the stage behind it to that of the stage before;
                    of a skip: from the backward of its last reader to that of the stage that makes it;
                    of parameters: from the stage's backward to the end of the step, or, where they are added to
                    gradients that exist, to the backward of the first stage that uses the parameter

Where the schedule moves an item, what the item holds is there until the move's point of release, and again from its
point of fetching on. It is copied out and back beside the computation (:mod:`lightning_rotor.link`), which waits for
the copy out before memory is given back, and for the copy back before the item's backward. So a slow link takes
seconds, and never bytes.

Not counted: the chain's input (the caller has it anyway), parameters, buffers, and gradients from earlier steps.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, TypedDict

from lightning_rotor.chain import Chain, Option
from lightning_rotor.errors import ScheduleError
from lightning_rotor.link import Copies, Link, Transfer, Way
from lightning_rotor.live_memory import Boundaries, Skips
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment, leaves, make_room_for, segments_in
from lightning_rotor.units import format_bytes, format_seconds

# Calls for one more segment inside others: a backward in a backward, and then a discarded pass in a discarded pass.
_CALLS = 3

Phase: TypeAlias = Literal["forward", "recompute", "backward", "wait"]


@dataclass(frozen=True, slots=True)
class Event:
    """One stage doing one thing; ``inverts`` means a backward that rebuilds the stage's input as well.

    A wait is for a copy of what the item holds that begins with the stage.
    """

    phase: Phase
    stage: int
    seconds: float
    peak_bytes: int
    after_bytes: int
    inverts: bool = False


@dataclass(frozen=True, slots=True)
class Simulation:
    """Bytes and seconds of one training step.

    Attributes:
        schedule: What was simulated.
        peak_bytes: Most that is allocated at any moment, beyond what was allocated when the step began.
        seconds: Duration of forward, recomputation, waits and backward.
        recompute_seconds: The part of it that plain training would not spend.
        peak_stage: Number of the stage that sets the peak.
        events: The step in order.
        held_bytes: What is alive between the forward and the backward, beyond what was allocated when the step began.
        host_bytes: What moves away, all of which is in the other memory between the forward and the backward.
        stall_seconds: Waits for copies.
    """

    schedule: Schedule
    peak_bytes: int
    seconds: float
    recompute_seconds: float
    peak_stage: int
    events: tuple[Event, ...]
    held_bytes: int = 0
    host_bytes: int = 0
    stall_seconds: float = 0.0

    @property
    def overhead(self) -> float:
        """Time beyond plain training as a fraction of it: 0.25 is 25 % slower."""
        plain = self.seconds - self.recompute_seconds
        if plain <= 0:
            # Of costs without seconds.
            return 0.0
        return self.recompute_seconds / plain

    def __repr__(self) -> str:
        took = f"{format_seconds(self.seconds)} (+{self.overhead:.1%}) in {len(self.events)} events"
        return f"<Simulation of peak {format_bytes(self.peak_bytes)}, {took}>"


_Storage: TypeAlias = tuple[Literal["set", "boundary", "skip"], int]
"""The saved tensors of an item, a boundary, or a skip, by number."""

_APART = 0.02
"""The host's part of running a stage by itself, as a share of that of a segment: 0.9 to 2.5 ms a call of 60 to 200
stages (one core of an EPYC).
"""


def seconds_apart(chain: Chain, schedule: Schedule) -> float:
    """Host time of running the stages one by one; none where all is kept, for the module itself can run."""
    if schedule.is_plain:
        return 0.0
    # Each stage is a call of ours with its checks, whether it is kept or recomputed.
    return _APART * chain.segment_seconds * len(chain)


def _discard_seconds(chain: Chain, segment: Segment) -> float:
    """First pass of a segment."""
    seconds = chain.segment_seconds
    for item in segment.items:
        if isinstance(item, Leaf):
            seconds += chain.stages[item.stage].discard_seconds
        else:
            seconds += _discard_seconds(chain, item)
    return seconds


def _backward_seconds(chain: Chain, item: Item) -> float:
    """Backward of an item, with the recomputation of a segment."""
    if isinstance(item, Leaf):
        return chain.stages[item.stage].options[item.option].backward_seconds
    seconds = 0.0
    end = _last_saving(chain, item.items)
    for index, inner in enumerate(item.items):
        seconds += _backward_seconds(chain, inner)
        if isinstance(inner, Leaf) and index <= end:
            option = chain.stages[inner.stage].options[inner.option]
            # A recomputation stops at its last saved tensor.
            seconds += option.replay_seconds if index == end else option.forward_seconds
        elif isinstance(inner, Segment) and index < end:
            seconds += _discard_seconds(chain, inner)
    return seconds


class BytesAround(TypedDict, total=False):
    """The bytes around a chain in a step: what decides which schedules fit."""

    gradients_exist: bool
    lingering_bytes: int


class Conditions(BytesAround, total=False):
    """The step around a chain: arguments of :func:`simulate` and of everything that plans."""

    link: Link | None


def bytes_around(conditions: Conditions) -> BytesAround:
    """The part of some conditions that counts bytes."""
    around: BytesAround = {}
    if "gradients_exist" in conditions:
        around["gradients_exist"] = conditions["gradients_exist"]
    if "lingering_bytes" in conditions:
        around["lingering_bytes"] = conditions["lingering_bytes"]
    return around


def least_seconds(chain: Chain, schedule: Schedule, budget_bytes: int, conditions: Conditions) -> float:
    """Seconds that a schedule takes at least within a budget, whatever it moves and wherever moves are placed.

    What is too much beside the backward of the last item must be gone by then, and comes back behind it. The link
    carries only so much in the forward, and in the rest of the backward: the remainder is waited for.

    Sums over items, and no simulation: many times as fast as one.
    """
    forward = []
    backward = []
    for item in schedule.items:
        if isinstance(item, Leaf):
            forward.append(chain.stages[item.stage].options[item.option].forward_seconds)
        else:
            forward.append(_discard_seconds(chain, item))
        backward.append(_backward_seconds(chain, item))
    seconds = sum(forward) + sum(backward) + seconds_apart(chain, Schedule(schedule.items))
    link = conditions.get("link")
    if link is None:
        return seconds
    gone_bytes = (
        _bytes_at_turn(chain, schedule, gradients_exist=conditions.get("gradients_exist", False)) - budget_bytes
    )
    # Copies out begin behind the first item.
    out_seconds = gone_bytes / link.out - sum(forward[1:])
    back_seconds = gone_bytes / link.back - sum(backward[:-1])
    return seconds + max(out_seconds, 0.0) + max(back_seconds, 0.0)


def _bytes_at_turn(chain: Chain, schedule: Schedule, *, gradients_exist: bool) -> int:
    """Least bytes of the backward of the last item, with everything there that the items hold; skips left out."""
    size_bytes = [0, *(stage.output_bytes for stage in chain)]
    saved_bytes = [0] * len(size_bytes)
    held_bytes = 0
    for stage in chain:
        held_bytes += stage.pinned_bytes
    for item in schedule.items:
        if isinstance(item, Segment):
            if _last_saving(chain, item.items) >= 0:
                saved_bytes[item.first] = size_bytes[item.first]
            continue
        option = chain.stages[item.stage].options[item.option]
        held_bytes += option.saved_bytes
        if option.inverts:
            # It drops its input, whoever has saved it.
            saved_bytes[item.stage] = 0
        else:
            saved_bytes[item.stage] += option.saved_input_bytes
        saved_bytes[item.stage + 1] += option.saved_output_bytes
    for size, saved in zip(size_bytes, saved_bytes, strict=True):
        held_bytes += min(size, saved)
    # The output is the caller's: all of it, whatever is saved of it.
    held_bytes += size_bytes[-1] - min(size_bytes[-1], saved_bytes[-1])
    last = schedule.items[-1]
    if isinstance(last, Leaf):
        option = chain.stages[last.stage].options[last.option]
        held_bytes += min(astuple(option.backward_peaks(gradients_exist=gradients_exist)))
    return held_bytes


def simulate(
    chain: Chain,
    schedule: Schedule,
    *,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    link: Link | None = None,
) -> Simulation:
    """Run a schedule on paper.

    Args:
        chain: Costs of ``n`` stages.
        schedule: Covers the same ``n`` stages.
        gradients_exist: Parameters already have gradients that this step adds to (gradient accumulation), so that new
            ones are temporary. By default they appear during the backward and stay.
        lingering_bytes: Held during the forward and freed before the backward, such as the gradients of the step before
            in a loop that calls ``zero_grad`` between the two.
        link: Over which copies go, for schedules that move something. It changes seconds alone.
    Returns:
        Peak and duration. The peak is exact for the executor of this package on the device of the measurement; where
        gradients exist, it is an upper bound for the chain of a ``Checkpointable``, which is not measured with any.
    Raises:
        ScheduleError: See :func:`check_schedule`; or the schedule moves something, and there is no link.
    """
    if schedule.moves and link is None:
        raise ScheduleError(
            f"schedule {schedule} moves what stages hold to another memory, and nothing says how fast copies are: "
            "expected a link, such as link=Link(25e9, 25e9)"
        )
    conditions: Conditions = {"gradients_exist": gradients_exist, "lingering_bytes": lingering_bytes, "link": link}
    return _Simulator(chain, schedule, conditions).run()


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes that a schedule takes by point (see :class:`lightning_rotor.schedule.Move`), for placing its moves.

    Attributes:
        simulation: Of the whole step.
        peak_bytes: By point, the highest level until the next one.
        freed_bytes: By item that moves, what its release gives back.
    """

    simulation: Simulation
    peak_bytes: tuple[int, ...]
    freed_bytes: dict[int, int]


def levels(chain: Chain, schedule: Schedule, conditions: Conditions) -> Levels:
    """A simulation, with what a schedule takes by point."""
    simulator = _Simulator(chain, schedule, conditions)
    return Levels(simulator.run(), tuple(simulator.point_bytes), simulator.freed_bytes)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The copies of one step, and when they run.

    Attributes:
        transfers: All copies.
        forward_seconds: When the forward ends; all times are seconds since the step began.
        seconds: When the step ends.
    """

    transfers: tuple[Transfer, ...]
    forward_seconds: float
    seconds: float

    def busy(self, way: Way) -> float:
        """Share of the forward in which the link carries something out, or of the backward in which it carries back."""
        begin, end = (0.0, self.forward_seconds) if way == "out" else (self.forward_seconds, self.seconds)
        carrying = sum(each.seconds_between(begin, end) for each in self.transfers if each.way == way)
        return carrying / (end - begin) if end > begin else 0.0


def traffic(chain: Chain, schedule: Schedule, conditions: Conditions) -> Traffic:
    """The copies of a step under a schedule."""
    simulator = _Simulator(chain, schedule, conditions)
    simulator.run()
    return simulator.traffic()


def held_by_stage(chain: Chain, schedule: Schedule) -> list[int]:
    """Bytes alive between forward and backward by stage (skips: by their maker), without states of segments."""
    return _Simulator(chain, schedule, {}).held_by_stage()


def check_schedule(chain: Chain, schedule: Schedule) -> None:
    """Raise ``ScheduleError`` unless a schedule belongs to a chain.

    Reasons: another number of stages, unknown options, a recomputed stage that must be kept, or an inverted stage whose
    input must not be dropped: the first of a chain or segment, or one after a stage that needs its exact output; or an
    item moves that holds nothing which could leave.
    """
    if len(schedule) != len(chain):
        raise ScheduleError(f"schedule {schedule} covers {len(schedule)} stages, but the chain has {len(chain)}")
    for item in schedule.items:
        for leaf in leaves(item):
            stage = chain.stages[leaf.stage]
            if leaf.option >= len(stage.options):
                raise ScheduleError(
                    f"schedule {schedule}: stage {stage.name!r} has {len(stage.options)} options, "
                    f"not option {leaf.option}"
                )
            if isinstance(item, Segment) and not stage.recomputable:
                raise ScheduleError(
                    f"schedule {schedule} recomputes stage {stage.name!r}, "
                    "which does not give the same bits twice: keep it"
                )
    first = first_inverted(chain, schedule)
    if first is not None:
        raise ScheduleError(
            f"schedule {schedule} inverts stage {chain.stages[first].name!r} where nothing comes before it in "
            "the chain or its segment, or a kept stage that needs every bit of its output (ReLU does), so its input "
            "must not be dropped: expected it after a segment, an inverted stage or a stage that can do with "
            "a rebuilt output"
        )
    if schedule.moves:
        able = set(movable(chain, schedule.items))
        for move in schedule.moves:
            if move.item not in able:
                name = chain.stages[schedule.items[move.item].first].name
                raise ScheduleError(
                    f"schedule {schedule} moves the item that begins with stage {name!r}, which holds nothing that "
                    "can leave: expected a kept stage that saves tensors, or a segment with an input that a stage "
                    "made, and no inverted stage at or behind it"
                )


def movable(chain: Chain, items: tuple[Item, ...]) -> list[int]:
    """Numbers of the items that hold something until their backward which can be elsewhere meanwhile."""
    numbers = []
    # The backward of the last item comes at once.
    for number, item in enumerate(items[:-1]):
        # An inverted stage drops its input, whoever has saved it, and rebuilds it.
        if _inverts(chain, item) or _inverts(chain, items[number + 1]):
            continue
        if isinstance(item, Leaf):
            holds_something = chain.stages[item.stage].options[item.option].saved_tensors > 0
        else:
            # The chain's input is the caller's, and a segment that saves nothing is forgotten at once.
            holds_something = item.first > 0 and _last_saving(chain, item.items) >= 0
        if holds_something:
            numbers.append(number)
    return numbers


def _inverts(chain: Chain, item: Item) -> bool:
    """True if an item is a stage under an option that inverts it."""
    return isinstance(item, Leaf) and chain.stages[item.stage].options[item.option].inverts


def first_inverted(chain: Chain, schedule: Schedule) -> int | None:
    """A stage that is inverted though its input must not be dropped (see :func:`check_schedule`), or None."""
    for items in _rows_of_items(schedule):
        # The input of the first is the caller's, or the segment's, which recomputes from it.
        needed = True
        for item in items:
            if isinstance(item, Segment):
                # Its output is made again from its own input, so nobody needs it as it was.
                needed = False
                continue
            option = chain.stages[item.stage].options[item.option]
            if needed and option.inverts:
                return item.stage
            needed = option.needs_exact_output
    return None


def _rows_of_items(schedule: Schedule) -> Iterator[tuple[Item, ...]]:
    """The items of a schedule, and those of each of its segments."""
    yield schedule.items
    for segment in segments_in(schedule.items):
        yield segment.items


class _Simulator:
    def __init__(self, chain: Chain, schedule: Schedule, conditions: Conditions) -> None:
        check_schedule(chain, schedule)
        make_room_for(_CALLS * schedule.depth)
        self._chain = chain
        self._schedule = schedule
        self._gradients_exist = conditions.get("gradients_exist", False)
        self._lingering_bytes = conditions.get("lingering_bytes", 0)
        # Sums, so that those of any segment are a difference.
        self._states_before = [0, *accumulate(stage.state_bytes for stage in chain)]
        self._draws_before = [0, *accumulate(stage.draws_random for stage in chain)]
        self._boundaries = Boundaries(chain)
        self._skips = Skips(chain)
        # Skips that the running forward holds.
        self._running: set[int] = set()
        # Everything else that is alive,
        self._other_bytes = 0
        # the part of it that is the gradient of the boundary where the backward stands,
        self._gradient_bytes = 0
        # and the part that waits in autograd's engine: gradients of shared parameters, until their first stage adds its
        # own.
        self._waiting_gradient_bytes = 0
        # By stage, copies of buffers that a recomputation has worked on and saved.
        self._saved_state_bytes = [0] * len(chain)
        # States that nested segments remember during the running recomputation, for one that never comes.
        self._unused_state_bytes = 0
        self._segment_seconds = 0.0
        # By identity: equal segments need not be at the same depth.
        self._outermost = set(map(id, schedule.items))
        self._events: list[Event] = []
        self._peak_bytes = 0
        self._peak_stage = 0
        # Of moves. Bytes are the same for every link.
        self._copies = Copies(conditions.get("link") or Link(1.0, 1.0))
        self._moves = {move.item: move for move in schedule.moves}
        # By storage, the items that gave it back and have not fetched it again,
        self._away: dict[_Storage, list[int]] = {}
        # and what of it is in the other memory.
        self._host_bytes: dict[_Storage, int] = {}
        self.freed_bytes: dict[int, int] = {}
        self._point = 0
        self.point_bytes = [0] * (2 * len(schedule.items))
        # Events that the clock has counted, and its time.
        self._clocked = 0
        self._clock_seconds = 0.0
        self._forward_seconds = 0.0

    def record(self) -> None:
        self._other_bytes += self._lingering_bytes
        self._record(self._schedule.items, "forward")
        self._other_bytes -= self._lingering_bytes

    def held_by_stage(self) -> list[int]:
        self.record()
        held = []
        for number, stage in enumerate(self._chain):
            held.append(self._boundaries.bytes(number) + stage.pinned_bytes)
        # A chain has one boundary more than stages: the output.
        held[-1] += self._boundaries.bytes(len(held))
        for leaf in self._schedule.items:
            if isinstance(leaf, Leaf):
                held[leaf.stage] += self._option(leaf).saved_bytes
        for number, skip in enumerate(self._chain.skips):
            held[skip.born] += self._skips.bytes(number)
        return held

    def run(self) -> Simulation:
        self.record()
        items = len(self._schedule.items)
        # Before the caller goes on to the loss, whose gradient is there when the backward begins.
        self._give_back(items)
        held_bytes = self._live_bytes
        self._forward_seconds = self._now()
        # The output now belongs to the caller, so the reference that the forward took is never given back.
        for number in reversed(range(items)):
            self._reach(2 * items - 1 - number)
            self._await_moved(number)
            self._backward(self._schedule.items[number])
        host_seconds = self._segment_seconds + seconds_apart(self._chain, self._schedule) + self._copies.host_seconds
        seconds = sum(event.seconds for event in self._events) + host_seconds
        stall_seconds = sum(event.seconds for event in self._events if event.phase == "wait")
        # An option that is faster than keeping makes a step that is faster than plain training.
        extra_seconds = max(seconds - self._chain.step_seconds, 0.0)
        return Simulation(
            self._schedule,
            self._peak_bytes,
            seconds,
            extra_seconds,
            self._peak_stage,
            tuple(self._events),
            held_bytes,
            sum(self._host_bytes.values()),
            stall_seconds,
        )

    def traffic(self) -> Traffic:
        """Copies of the step that was run."""
        return Traffic(tuple(self._copies.transfers), self._forward_seconds, self._now())

    @property
    def _live_bytes(self) -> int:
        """Everything that is alive."""
        return self._boundaries.live_bytes + self._skips.live_bytes + self._other_bytes

    def _record(self, items: tuple[Item, ...], phase: Phase) -> None:
        """Run items so that their backward can follow. In a recomputation a leaf stops at its last saved tensor."""
        start = items[0].first
        end = len(items) - 1
        if phase == "recompute":
            end = _last_saving(self._chain, items)
        self._running = set()
        for index, item in enumerate(items[: end + 1]):
            stops_here = phase == "recompute" and index == end
            if phase == "forward":
                self._reach(index)
            match item:
                case Leaf():
                    self._record_leaf(item, phase, replay=stops_here)
                case Segment():
                    # A segment that saves nothing is never recomputed, so it needs no input.
                    if _last_saving(self._chain, item.items) >= 0:
                        self._boundaries.update(item.first, holders=1)
                        self._skips.hold(self._skips.read_by(item))
                    # What comes next is its backward, which recomputes it at once.
                    if not stops_here:
                        self._discard(item, phase)
            self._move_on(start, item)
            if phase == "forward" and index in self._moves:
                self._send(index)
        if phase == "recompute":
            self._skips.hold(self._running, holders=-1)

    def _record_leaf(self, leaf: Leaf, phase: Phase, *, replay: bool) -> None:
        """Run a stage so that its backward can follow."""
        stage = leaf.stage
        option = self._option(leaf)
        peak = option.forward_peak_bytes
        seconds = option.forward_seconds
        if replay:
            # The recomputation ends with the last tensor that the backward needs, by an exception from within.
            peak = option.replay_peak_bytes
            seconds = option.replay_seconds
        level = self._touch(stage, peak)
        # An inverted stage saves nothing but states, in every first pass, as a segment does.
        self._remember(option.saved_bytes, phase if option.inverts else "forward")
        if phase == "forward":
            # Until the graph dies, after the step.
            self._other_bytes += self._chain.stages[stage].pinned_bytes
        self._boundaries.update(stage, consumer=option.saved_input_bytes, dropped=option.inverts)
        self._boundaries.update(stage + 1, producer=option.saved_output_bytes)
        self._skips.hold(option.saved_skips)
        # A replay ends before the stage returns, so nobody gets what it makes.
        if not replay:
            self._hold_made(stage)
        self._events.append(Event(phase, stage, seconds, level, self._live_bytes))

    def _discard(self, segment: Segment, phase: Phase) -> None:
        """First pass of a segment, whose input the caller holds."""
        self._remember(self._state_bytes(segment), phase)
        self._segment_seconds += self._chain.segment_seconds
        for item in segment.items:
            match item:
                case Leaf(stage):
                    cost = self._chain.stages[stage]
                    level = self._touch(stage, cost.discard_peak_of(self._option(item)))
                    if self._option(item).inverts:
                        self._remember(self._option(item).saved_bytes, phase)
                    self._hold_made(stage)
                    self._other_bytes += cost.pinned_bytes if phase == "forward" else 0
                    self._events.append(Event(phase, stage, cost.discard_seconds, level, self._live_bytes))
                case Segment():
                    self._discard(item, phase)
            self._move_on(segment.first, item)
        if _last_saving(self._chain, segment.items) < 0:
            # Forgotten at once, it holds neither states nor its input.
            self._remember(-self._state_bytes(segment), phase)

    def _remember(self, size_bytes: int, phase: Phase) -> None:
        """Remember states; in a recomputation for one that never comes."""
        self._other_bytes += size_bytes
        if phase == "recompute":
            self._unused_state_bytes += size_bytes

    def _backward(self, item: Item, pending: tuple[Segment, ...] = (), *, replayed: bool = False) -> None:
        """Backward of one item. ``pending`` are the segments around it that are not recomputed yet, outermost first."""
        match item:
            case Leaf():
                self._backward_leaf(item, pending, replayed=replayed)
            case Segment(items):
                end = _last_saving(self._chain, items)
                for index in reversed(range(len(items))):
                    # What comes after the last saved tensor needs no recomputation; the item that has it triggers it.
                    triggered = (*pending, item) if index == end else ()
                    self._backward(items[index], triggered, replayed=True)
                if end >= 0:
                    if not self._gives_up_input(item):
                        self._give_up_inputs(item)
                    self._other_bytes += -self._state_bytes(item)

    def _gives_up_input(self, segment: Segment) -> bool:
        """True if a segment lets go of its input once it has read it.

        A nested segment does, as a recomputation hands tensors out once. Others can tell that their input is not needed
        again only if the backward goes on to where it comes from.
        """
        first, last = segment.first, segment.last
        return (
            id(segment) not in self._outermost
            or self._chain.stages[first].keep.input_gradient_bytes > 0
            or self._skips.learn_in(first, last)
        )

    def _backward_leaf(self, leaf: Leaf, pending: tuple[Segment, ...], *, replayed: bool) -> None:
        stage = leaf.stage
        option = self._option(leaf)
        # The peaks of a backward count the gradient that it is given.
        self._other_bytes -= self._gradient_bytes
        self._skips.take_gradients(stage)
        if pending:
            self._touch(stage, option.unpack_peak_bytes)
            self._gradient_bytes = option.unpack_bytes
            self._other_bytes += self._gradient_bytes
            for segment in pending:
                self._recompute(segment)
                if self._gives_up_input(segment):
                    self._give_up_inputs(segment)
            self._other_bytes -= self._gradient_bytes
        peaks = option.backward_peaks(gradients_exist=self._gradients_exist)
        if stage == 0 or self._boundaries.saved_by_producer[stage]:
            peak = peaks.held_bytes
        elif self._boundaries.holders[stage]:
            peak = peaks.segment_bytes
        else:
            peak = peaks.replayed_bytes if replayed else peaks.plain_bytes
        # Behind a recomputation, that part of the backward has run already.
        if not pending:
            peak = max(peak, option.unpack_peak_bytes)
        level = self._touch(stage, peak)
        self._other_bytes += -option.saved_bytes - self._saved_state_bytes[stage]
        self._saved_state_bytes[stage] = 0
        self._boundaries.update(stage, consumer=0, dropped=False)
        self._boundaries.update(stage + 1, producer=0)
        self._skips.hold(option.saved_skips, holders=-1)
        self._gradient_bytes = option.input_gradient_bytes
        self._other_bytes += self._gradient_bytes
        self._skips.leave_gradients(stage)
        if self._gradients_exist:
            waiting = self._chain.stages[stage].waiting_gradient_bytes
            self._other_bytes += waiting - self._waiting_gradient_bytes
            self._waiting_gradient_bytes = waiting
        else:
            self._other_bytes += option.parameter_gradient_bytes
        self._events.append(Event("backward", stage, option.backward_seconds, level, self._live_bytes, option.inverts))

    def _recompute(self, segment: Segment) -> None:
        # While it runs, the generators' current state is put aside and buffers are lent, and nested segments remember
        # states for a recomputation that never comes: theirs are those of the first pass.
        aside = self._state_bytes(segment)
        self._other_bytes += aside
        self._record(segment.items, "recompute")
        self._other_bytes += -aside - self._unused_state_bytes
        self._unused_state_bytes = 0
        for item in segment.items:
            # Stages behind the last that saves something were not recomputed, and have nothing here.
            if isinstance(item, Leaf):
                self._saved_state_bytes[item.stage] = self._option(item).saved_state_bytes
                self._other_bytes += self._saved_state_bytes[item.stage]

    def _option(self, leaf: Leaf) -> Option:
        return self._chain.stages[leaf.stage].options[leaf.option]

    def _state_bytes(self, segment: Segment) -> int:
        """Generator states and buffers that one run of a segment remembers, not those of segments in it."""
        first = segment.first
        stop = segment.last + 1
        state_bytes = self._states_before[stop] - self._states_before[first]
        # One state of the generators serves all stages that draw.
        if self._draws_before[stop] > self._draws_before[first]:
            state_bytes += self._chain.rng_state_bytes
        return state_bytes

    def _hold_made(self, stage: int) -> None:
        """The running forward takes what a stage has made."""
        self._boundaries.update(stage + 1, holders=1)
        self._skips.hold(self._skips.made[stage])
        self._running.update(self._skips.made[stage])

    def _move_on(self, start: int, item: Item) -> None:
        """A forward from ``start`` on has run an item, and lets go of its input and of what nobody reads any more."""
        if item.first != start:
            self._boundaries.update(item.first, holders=-1)
        if self._running:
            read = []
            for skip in self._running:
                # Of those that were made before, somebody else is the holder.
                is_own = self._chain.skips[skip].born >= start
                if is_own and self._skips.last_use[skip] <= item.last:
                    read.append(skip)
            self._running.difference_update(read)
            self._skips.hold(read, holders=-1)

    def _give_up_inputs(self, segment: Segment) -> None:
        """A segment lets go of its input and the skips that it reads."""
        self._boundaries.update(segment.first, holders=-1)
        self._skips.hold(self._skips.read_by(segment), holders=-1)

    def _touch(self, stage: int, extra_bytes: int) -> int:
        """Count ``extra_bytes`` that are allocated for a moment; returns the level that this makes."""
        level = self._live_bytes + extra_bytes
        if level > self._peak_bytes:
            self._peak_bytes = level
            self._peak_stage = stage
        if level > self.point_bytes[self._point]:
            self.point_bytes[self._point] = level
        return level

    def _reach(self, point: int) -> None:
        """Give back and take again what moves at a point."""
        self._point = point
        # At the end of the forward that is done already, before the caller goes on.
        if point != len(self._schedule.items):
            self._give_back(point)
        # What is needed first comes back first.
        for move in reversed(self._schedule.moves):
            if move.fetch == point:
                self._fetch(move.item)

    def _give_back(self, point: int) -> None:
        for move in self._schedule.moves:
            if move.release == point:
                self._release(move.item)

    def _send(self, number: int) -> None:
        """Copy out what an item holds, but for what an item before has copied already."""
        for storage in self._storages_of(number):
            kind, index = storage
            size = self._held_by(number, storage)
            before = self._host_bytes.get(storage, 0)
            if kind == "boundary":
                # The stages on both sides may save different parts of it.
                size = min(before + size, self._boundaries.size_bytes[index]) - before
            elif before:
                size = 0
            self._host_bytes[storage] = before + size
            self._copies.send(storage, size, self._now(), self._schedule.items[number].first)

    def _release(self, number: int) -> None:
        """Wait for the copies out of an item, and give back what it holds."""
        storages = self._storages_of(number)
        sent_seconds = max(map(self._copies.sent, storages), default=0.0)
        self._wait_until(sent_seconds, number)
        before = self._live_bytes
        for storage in storages:
            self._hold(number, storage, away=True)
            self._away.setdefault(storage, []).append(number)
        self.freed_bytes[number] = before - self._live_bytes

    def _fetch(self, number: int) -> None:
        """Take again what an item holds. A storage that others gave back as well is there for them, too."""
        for storage in self._storages_of(number):
            before = self._live_bytes
            for other in self._away.pop(storage, ()):
                self._hold(other, storage, away=False)
            stage = self._schedule.items[number].first
            self._copies.fetch(storage, self._live_bytes - before, self._now(), stage)

    def _await_moved(self, number: int) -> None:
        if number in self._moves:
            storages = self._storages_of(number)
            fetched_seconds = max(map(self._copies.fetched, storages), default=0.0)
            self._wait_until(fetched_seconds, number)

    def _wait_until(self, seconds: float, number: int) -> None:
        missing = seconds - self._now()
        if missing > 0:
            live = self._live_bytes
            self._events.append(Event("wait", self._schedule.items[number].first, missing, live, live))

    def _now(self) -> float:
        """Seconds of the step so far."""
        # On from where it was asked last: adding all up each time would take the square of the events.
        for event in self._events[self._clocked :]:
            self._clock_seconds += event.seconds
        self._clocked = len(self._events)
        return self._clock_seconds + self._segment_seconds

    def _storages_of(self, number: int) -> list[_Storage]:
        """Storages of an item that can be elsewhere until its backward."""
        item = self._schedule.items[number]
        if isinstance(item, Segment):
            read = self._skips.read_by(item)
            storages: list[_Storage] = [("boundary", item.first)]
        else:
            read = set(self._option(item).saved_skips)
            storages = [("set", number), ("boundary", item.stage), ("boundary", item.stage + 1)]
        for number_of_skip in sorted(read):
            skip = self._chain.skips[number_of_skip]
            # Parts of the chain's input and output are the caller's, who holds them here.
            if skip.born >= 0 and not skip.in_output:
                storages.append(("skip", number_of_skip))
        return [storage for storage in storages if self._held_by(number, storage)]

    def _held_by(self, number: int, storage: _Storage) -> int:
        """Bytes of a storage that an item holds."""
        kind, index = storage
        item = self._schedule.items[number]
        if kind == "skip":
            return self._chain.skips[index].size_bytes
        if isinstance(item, Segment):
            return self._boundaries.size_bytes[index]
        option = self._option(item)
        if kind == "set":
            return option.saved_bytes
        if index in (0, len(self._chain)):
            # The caller's.
            return 0
        if index == item.stage:
            return option.saved_input_bytes
        return option.saved_output_bytes

    def _hold(self, number: int, storage: _Storage, *, away: bool) -> None:
        """An item gives back a storage that it holds, or takes it again."""
        kind, index = storage
        item = self._schedule.items[number]
        size = 0 if away else self._held_by(number, storage)
        sign = -1 if away else 1
        if kind == "skip":
            self._skips.hold((index,), holders=sign)
        elif kind == "set":
            self._other_bytes += sign * self._held_by(number, storage)
        elif isinstance(item, Segment):
            self._boundaries.update(index, holders=sign)
        elif index == item.stage:
            self._boundaries.update(index, consumer=size)
        else:
            self._boundaries.update(index, producer=size)


def _last_saving(chain: Chain, items: tuple[Item, ...]) -> int:
    """Index of the last item that saves a tensor, or -1: a recomputation stops there."""
    for index in reversed(range(len(items))):
        for leaf in leaves(items[index]):
            if chain.stages[leaf.stage].options[leaf.option].saved_tensors:
                return index
    return -1
