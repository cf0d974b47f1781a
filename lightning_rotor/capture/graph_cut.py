"""A module as stages along its graph, for calls like the recorded one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from lightning_rotor.capture.attempts import Attempts
from lightning_rotor.capture.boundaries import stages_of_recording
from lightning_rotor.capture.call import Call
from lightning_rotor.capture.differences import first_difference
from lightning_rotor.capture.guards import CallGuards
from lightning_rotor.capture.module_calls import Slot, tensor_attributes
from lightning_rotor.capture.node_facts import line_of
from lightning_rotor.capture.recording import Recording
from lightning_rotor.capture.unread_arguments import is_unread
from lightning_rotor.capture.watch import Watch
from lightning_rotor.errors import ModelError
from lightning_rotor.stages.sequential import Stage, wiring_of


@dataclass(slots=True, eq=False)
class GraphCut:
    """A module as stages, for calls like the recorded one. The last stage returns what the module returns.

    Attributes:
        opaque: Modules that became one operation, by name, and why.
        inputs: Names of the chain's inputs, for messages.
        fixed: Numbers of modules that can be no inputs.
        reasons: By way to a chain that was not taken, why.
        anew: Why no earlier recording held for the sizes of the last one.
        bind: Gives the chain's input for a call, or None if the recording does not hold for it.
    """

    stages: tuple[Stage, ...]
    opaque: Mapping[str, str]
    inputs: tuple[str, ...]
    recording: Recording
    guards: CallGuards
    fixed: set[Slot] = field(default_factory=set)
    reasons: Mapping[str, str] = field(default_factory=dict)
    anew: str = ""
    way: ClassVar[str] = "graph"
    bind: Callable[[Sequence[Any], Mapping[str, Any]], Any] = field(init=False)

    def __post_init__(self) -> None:
        # Bound once: it is called at every training call.
        self.bind = self.guards.bind

    @property
    def module(self) -> nn.Module:
        """The recorded module."""
        return self.guards.module

    def changing_numbers(self) -> tuple[Slot, ...]:
        """Attributes with another number than in this recording, and those that were others before."""
        slots = dict.fromkeys((*self.number_slots, *self.guards.watch.changed_numbers()))
        return tuple(slot for slot in slots if slot not in self.fixed)

    @property
    def number_slots(self) -> list[Slot]:
        """Attributes that hold an int or a float now, and are inputs of the recording instead of constants."""
        slots = []
        for owner, name in self.guards.attributes:
            # By type, as a bool is an int for isinstance.
            if type(vars(owner).get(name)) in (int, float):
                slots.append((owner, name))
        return slots

    def renewed_by(self, recording: Recording, call: Call) -> bool:
        """Hold also for the call of a newer recording if that runs the same operations on the same objects."""
        if not self.guards.fit(call) or not self.recording.runs_the_same(recording):
            return False
        # The older graph and its stages stay, with all plans for them. What was asked is known for more sizes now.
        self.recording.guards.include(recording.guards)
        # Modules look as they do now. What has changed between the two recordings, and made no difference, is idle.
        idle = self.guards.watch.idle(recording.notes)
        self.guards.watch = _watch(recording, call.attributes, idle)
        return True

    def is_for_any(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Hold also for a call that differs in plain arguments which the code does not read, such as file names."""
        try:
            call = self.guards.call(args, kwargs)
        except ModelError:
            return False
        places = self.guards.differing(call)
        if not places:
            return False

        def runs_the_same(other: Call) -> bool:
            attempts = Attempts(self.recording.root, other, [self.recording], self.opaque)
            return attempts.runs_like(self.recording)

        if not is_unread(call, places, runs_the_same):
            return False
        self.guards.free(places)
        return True

    def opaque_share(self) -> float:
        """The part of all saved bytes that is inside of modules which became one operation, between 0 and 1."""
        saved_bytes = inside_bytes = 0
        for node, memory in self.recording.memory.items():
            saved_bytes += memory.saved_bytes
            if node.op == "call_module" and node.target in self.opaque:
                inside_bytes += memory.saved_bytes
        return inside_bytes / max(saved_bytes, 1)

    def lives_in(self, modules: set[nn.Module]) -> bool:
        """True if all modules that it runs are still among these."""
        for stage in self.stages:
            if not all(called in modules for called in stage.called_modules()):
                return False
        return True


def cut_graph(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Sequence[GraphCut] = (),
    afresh: bool = False,
) -> GraphCut:
    """Record one call of a module and cut it between any two operations that save something.

    The forward runs for real, on copies of the call's tensors and buffers, and again for each submodule that has to
    become one operation. A module whose inverse does not undo its forward is cut inside like any other. Saved tensors
    are dropped, so it takes no more memory than a forward without gradients. Returns the earlier cut of ``known`` if
    the same was recorded again: it then holds for this call as well. With ``afresh``, the forward runs as often as if
    there were none. Raises ``ModelError`` if the module's own forward cannot be recorded.
    """
    newest = known[-1] if known else None
    numbers = newest.changing_numbers() if newest else ()
    call = Call.of(module, args, kwargs or {}, (*tensor_attributes(module), *numbers))
    # First, as the forward may take no such call.
    names = call.names
    # The newest of a kind: it has learnt which modules become one operation.
    similar = [cut for cut in reversed(known) if cut.guards.are_like(call)][:1]
    try:
        # Processes that exchange messages in the forward must run it equally often.
        if similar and not afresh:
            (earlier,) = similar
            attempts = Attempts(module, call, [earlier.recording], earlier.opaque)
        else:
            attempts = Attempts(module, call)
        recording, opaque = attempts.record()
    except ModelError:
        if not numbers:
            raise
        opaque = None
    if newest and numbers:
        more_is_opaque = opaque is None or not opaque.keys() <= newest.opaque.keys()
        if more_is_opaque:
            # The code does more with the numbers than a graph can hold.
            newest.fixed.update(numbers)
            return cut_graph(module, args, kwargs, known=known, afresh=afresh)
    assert opaque is not None
    anew = _why_anew(similar, recording)
    for cut in reversed(known):
        if cut.renewed_by(recording, call):
            cut.anew = anew
            return cut
    stages = tuple(stages_of_recording(recording))
    watch = _watch(recording, call.attributes)
    reads = wiring_of(stages).wire.reads
    guards = CallGuards(call, watch, recording.guards, reads=reads)
    # The very set of the cut before, so that a number which is fixed for one is fixed for all.
    fixed = newest.fixed if newest else set()
    return GraphCut(stages, opaque, names, recording, guards, fixed, anew=anew)


def _why_anew(similar: Sequence[GraphCut], recording: Recording) -> str:
    """Where the user's code asks a size, or goes another way than in an earlier recording of such a call."""
    if not similar:
        return ""
    earlier = similar[0].recording
    if earlier.guards.objection:
        return earlier.guards.objection
    differing = first_difference(earlier.graph, recording.graph)
    if differing:
        return f"it goes another way {line_of(differing[-1])}"
    return ""


def _watch(
    recording: Recording,
    inputs: Collection[Slot],
    idle: Collection[Slot] = (),
) -> Watch:
    """A watch of all that must stay: the modules whose code was recorded, and what it read outside of them."""
    # Code that runs at each call sees for itself what has changed.
    inside = recording.run_as_they_are
    watched = [submodule for submodule in recording.root.modules() if submodule not in inside]
    return Watch(
        recording.root,
        watched,
        outside=recording.notes.holds,
        inputs=inputs,
        idle=idle,
    )
