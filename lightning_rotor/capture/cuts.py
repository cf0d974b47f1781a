"""From a module to a chain: an ``nn.Sequential`` of layers is cut between them, anything else along its graph.

An ``nn.Sequential`` of blocks is cut along its graph as well, so that a plan can choose inside the blocks.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from traceback import extract_tb
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_rotor.capture.boundaries import stages_of
from lightning_rotor.capture.guards import Call, CallGuards, Watch
from lightning_rotor.capture.operations import hide_trainers, hides_code, is_invertible_as_a_whole, tensor_attributes
from lightning_rotor.capture.recorder import Recorder, Recording
from lightning_rotor.capture.size_guards import first_difference, line_of
from lightning_rotor.capture.surroundings import functions
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.isolated import kept_parameters, lent_buffers, undisturbed
from lightning_rotor.invertible.check import try_inverse
from lightning_rotor.private.sharding import Unit, as_found, units_below, units_in
from lightning_rotor.private.torch_names import is_compiled, is_compiler_wrapper, module_inside, noticed_checkpoints
from lightning_rotor.private.values import is_fake, require_tensors, tensors_in
from lightning_rotor.stages.sequential import Stage, sequential_members, sequential_stages, wiring_of
from lightning_rotor.stages.snapshot import Snapshot, is_users

_log = logging.getLogger(__name__)
_OPAQUE_INSTANCES = 2  # modules of one type that fail before the type counts as opaque


@dataclass(slots=True, eq=False)
class GraphCut:
    """A module as stages, for calls like the recorded one. The last stage returns what the module returns.

    ``opaque`` says which modules became one operation, ``fixed`` which numbers of modules can be no inputs, ``reasons``
    why other ways were not taken, and ``anew`` why no earlier recording held for the sizes of the last one. ``bind``
    gives the chain's input for a call, or None if the recording does not hold for it.
    """

    stages: tuple[Stage, ...]
    opaque: Mapping[str, str]
    inputs: tuple[str, ...]
    recording: Recording
    guards: CallGuards
    fixed: set[tuple[nn.Module, str]] = field(default_factory=set)
    reasons: Mapping[str, str] = field(default_factory=dict)
    anew: str = ""
    way: ClassVar[str] = "graph"
    bind: Callable[[Sequence[Any], Mapping[str, Any]], Any] = field(init=False)

    def __post_init__(self) -> None:
        self.bind = self.guards.bind

    @property
    def module(self) -> nn.Module:
        """The recorded module."""
        return self.guards.module

    def changing_numbers(self) -> tuple[tuple[nn.Module, str], ...]:
        """Attributes with another number than in this recording, and those that were others before."""
        places = dict.fromkeys((*self.numbers, *self.guards.watch.changed_numbers()))
        return tuple(place for place in places if place not in self.fixed)

    @property
    def numbers(self) -> list[tuple[nn.Module, str]]:
        """Numbers of modules that are inputs."""
        return [place for place in self.guards.attributes if type(vars(place[0]).get(place[1])) in (int, float)]

    def renewed_by(self, recording: Recording, call: Call, watch: Watch) -> bool:
        """Hold also for the call of a newer recording if that runs the same operations on the same objects."""
        if not self.guards.fit(call) or not self.recording.runs_the_same(recording):
            return False
        self.recording.guards.include(recording.guards)
        self.guards.watch = watch
        return True

    def opaque_share(self) -> float:
        """The part of all saved bytes that is inside of modules which became one operation, between 0 and 1."""
        memory = self.recording.memory
        saved = {node: op.saved_bytes for node, op in memory.items()}
        inside = sum(size for node, size in saved.items() if node.op == "call_module" and node.target in self.opaque)
        return inside / max(sum(saved.values()), 1)

    def lives_in(self, modules: set[nn.Module]) -> bool:
        """True if all modules that it runs are still among these."""
        return all(called in modules for stage in self.stages for called in stage.called_modules())


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
    tensors, numbers = tensor_attributes(module), known[-1].changing_numbers() if known else ()
    call = Call.of(module, args, kwargs or {}, (*tensors, *numbers))
    names = call.names
    like = [cut for cut in reversed(known) if cut.guards.are_like(call)][:1]
    try:
        recording, opaque = _Attempts(module, call, [] if afresh else like).record()
        is_known = not numbers or opaque.keys() <= known[-1].opaque.keys()
    except ModelError:
        if not numbers:
            raise
        is_known = False
    if not is_known:  # it does more with the numbers than a graph can hold
        known[-1].fixed.update(numbers)
        return cut_graph(module, args, kwargs, known=known, afresh=afresh)
    watch, anew = _watch(recording, call.attributes), _why_anew(like, recording)
    for cut in reversed(known):
        if cut.renewed_by(recording, call, watch):
            cut.anew = anew
            return cut
    fixed = known[-1].fixed if known else set()
    stages = tuple(stages_of(recording))
    guards = CallGuards(call, watch, recording.guards, reads=wiring_of(stages).wire.reads)
    return GraphCut(stages, opaque, names, recording, guards, fixed, anew=anew)


def _why_anew(like: Sequence[GraphCut], recording: Recording) -> str:
    """Where the user's code asks a size, or goes another way than in an earlier recording of such a call."""
    if not like:
        return ""
    differing = first_difference(like[0].recording.graph, recording.graph)
    objection = like[0].recording.guards.objection
    return objection or (f"it goes another way {line_of(differing[-1])}" if differing else "")


def _watch(recording: Recording, inputs: Collection[tuple[nn.Module, str]]) -> Watch:
    """What must stay as it is: the modules whose code was recorded, and what it read outside of them."""
    inside = recording.run_as_they_are
    watched = [submodule for submodule in recording.root.modules() if submodule not in inside]
    return Watch(recording.root, watched, outside=recording.notes.holds, inputs=inputs)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A recording, or the module whose forward could not be recorded, and why."""

    recorder: Recorder
    recording: Recording | None
    culprit: nn.Module
    reason: str = ""
    may_settle: bool = False


class _Attempts:
    """Recordings of one call, until one holds: what cannot be recorded becomes opaque, from the inside out."""

    def __init__(self, module: nn.Module, call: Call, known: Sequence[GraphCut]) -> None:
        self._module, self._call, self._known = module, call, known
        self._objections: dict[nn.Module, str] = {}  # to inverses that were tried
        self._paths = {submodule: path for path, submodule in module.named_modules()}
        self._opaque = {module.get_submodule(path): why for cut in known for path, why in cut.opaque.items()}
        self._failures = Counter(map(type, self._opaque))
        self._functions = cache(functions)

    def record(self) -> tuple[Recording, dict[str, str]]:
        """A recording, and which modules are one operation in it, by name, and why."""
        before, unsettled = Snapshot(self._module.modules()), None
        while True:
            attempt = self._attempt()
            if attempt.recording is not None:
                attempt = self._repeated(attempt, attempt.recording)
            if attempt.recording is not None:
                return attempt.recording, {self._paths[submodule]: why for submodule, why in self._opaque.items()}
            if attempt.may_settle and unsettled is None:
                # Models of transformers note in their configuration which loss they compute, once. Others fill a cache.
                unsettled = attempt.recorder.surroundings.notes
                continue
            if attempt.may_settle and unsettled is not None:
                attempt.recorder.surroundings.notes.restore()
                unsettled.restore()
                before.restore()
            if self._gives_up(attempt):
                before.restore()
                raise ModelError(
                    f"the forward of {type(self._module).__name__} cannot be recorded: {attempt.reason}. Expected code "
                    "whose course depends on the input's values in submodules only; move that part into a "
                    "submodule, or name a submodule that can be planned"
                )

    def _gives_up(self, attempt: _Attempt) -> bool:
        """Make the failed module, or one around it, opaque. True if none can be."""
        culprit, leaves = attempt.culprit, attempt.recorder.calls.leaves
        while culprit is not self._module and (culprit in self._opaque or culprit in leaves):
            culprit = self._module.get_submodule(self._paths[culprit].rpartition(".")[0])
        if culprit is self._module:
            return True
        self._opaque[culprit] = attempt.reason
        self._failures[type(culprit)] += 1
        return False

    def _is_opaque(self, module: nn.Module, given: Any = None) -> bool:
        """True if a module cannot be recorded, does more than its code says, or can be inverted as a whole alone."""
        kind = type(module)
        fails = self._failures[kind] >= _OPAQUE_INSTANCES and kind.__module__.partition(".")[0] != "torch"
        is_whole = is_invertible_as_a_whole(module) and not self._objection(module, given)
        return fails or is_whole or module in self._opaque or hides_code(module)

    def _objection(self, module: nn.Module, given: Any) -> str:
        """Why a module's inverse cannot be used, found by trying it on the first input that it is given."""
        if given is not None and module not in self._objections:
            args, kwargs = given
            found = "" if len(args) == 1 and not kwargs else "it takes several arguments: expected one, or a tuple"
            if not found and not any(map(is_fake, tensors_in(args))):
                found, _ = try_inverse(module, args[0], name=self._paths[module])
            if found:
                _log.info("%r is not inverted, and cut inside like any other module: %s", self._paths[module], found)
            self._objections[module] = found
        return self._objections.get(module, "")

    def _repeated(self, first: _Attempt, recording: Recording) -> _Attempt:
        """The first attempt, unless the same call records something else the second time."""
        if any(cut.recording.runs_the_same(recording) for cut in self._known):
            return first
        again = self._attempt()
        differing = () if again.recording is None else first_difference(recording.graph, again.recording.graph)
        writer = again.recorder.surroundings.written_by
        if not differing and again.recording is not None and writer is not None:  # a warning comes once
            culprit = self._module.get_submodule(writer)
            reason = "it prints, or writes to a file, whenever it runs, which a recording would not"
            return _Attempt(again.recorder, None, culprit, reason)
        if not differing:
            return again if again.recording is None else first
        paths = [str(node.meta["module"]) for node in differing]
        # Where one has an operation more, the other is at what comes after it, a layer most likely.
        suspects = [self._module.get_submodule(path) for path in sorted(paths, key=lambda path: -path.count("."))]
        culprit = next((suspect for suspect in suspects if suspect not in recording.leaves), suspects[0])
        reason = (
            "it does something else each time that it runs on the same input (it asks a clock, a counter outside of "
            "modules, or a random generator of its own)"
        )
        return _Attempt(again.recorder, None, culprit, reason)

    def _attempt(self) -> _Attempt:
        """Record once, and set back whatever the forward has changed."""
        recorder = Recorder(self._module, self._call, self._is_opaque, self._functions)
        notes = recorder.surroundings.notes
        module, modules = self._module, tuple(self._module.modules())
        device = self._call.tensors[0].device if self._call.tensors else torch.device("cpu")
        whole = Stage("", (module,))
        with undisturbed(device), lent_buffers(whole), kept_parameters(whole):
            watch, before = Watch(module, modules, tensors=True), Snapshot(modules)
            hide_trainers(module, self._is_opaque)
            recorder.check.allow(before.copied)
            if not units_in((module,)) and not any(map(is_compiled, modules)):
                recorder.check.allow(module.parameters())  # which are put back as well
            try:
                with as_found((module,)):
                    recording = recorder.record()
            except (torch.OutOfMemoryError, InverseError):  # the forward fails in plain training, too
                before.restore()
                raise
            except Exception as error:
                notes.restore()
                before.restore()
                culprit = module if recorder.calls.culprit is None else recorder.calls.culprit
                return _Attempt(recorder, None, culprit, _reason(error))
            except BaseException:  # an interrupt
                notes.restore()
                before.restore()
                raise
            finally:
                # Leaves have run for real, and will in every call.
                besides = {below for leaf in recorder.calls.leaves for below in leaf.modules()}
                outside = notes.changed()
                changed = watch.changed(besides) or _changed_beyond_watching(before, modules, besides)
                # What the forward has set up, as in a configuration, may stay so.
                others = (each for each in modules if each not in besides)
                before.restore(leaving=Snapshot(others, hooks=False).objects)
                remaining = watch.changed(besides)
                if remaining is None:
                    if changed is not None:
                        notes.restore()
                    before.restore()  # behind the notes: some were taken when another layer had changed what they note
        if changed is not None:
            reason = "its forward changes attributes of the module"
            return _Attempt(recorder, None, changed, reason, may_settle=remaining is not None)
        if outside is not None:
            path, name = outside
            reason = f"its forward changes {name!r}, which is outside of modules"
            return _Attempt(recorder, None, module.get_submodule(path), reason, may_settle=True)
        recorder.surroundings.note_layers(recording.run_as_they_are)
        recording.notes.settle()
        return _Attempt(recorder, recording, module)


def _changed_beyond_watching(
    before: Snapshot, modules: Sequence[nn.Module], besides: Collection[nn.Module]
) -> nn.Module | None:
    """The first module with a long container or a large array that has changed since, not counting some."""
    changed = set(map(id, before.changed_large()))
    changed -= Snapshot(besides).owners if changed else set()
    others = (each for each in modules if each not in besides)
    return next((each for each in others if changed & Snapshot((each,), hooks=False).owners), None) if changed else None


def _reason(error: Exception) -> str:
    """The error, and the user's line that it comes from."""
    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    text = str(error).partition("\n")[0] or type(error).__name__
    return f"{text} (in {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text


# -------------------------------------------------------------------- Every way to a chain.


NO_CHECKPOINTS = (
    "It calls torch.utils.checkpoint by itself: expected no other recomputation than the plan's, which is "
    "faster within the same memory. Switch it off: model.gradient_checkpointing_disable() for Hugging Face's models, "
    "model.set_grad_checkpointing(False) for timm's, or call the layers directly"
)
"""Why not, and the remedy."""
_NO_POINT = "there is no point between its operations where little is alive"
WAYS = {"sequential": "as an nn.Sequential", "graph": "as a graph"}
"""How messages spell the ways to a chain."""


class SequentialCut:
    """The members of an ``nn.Sequential`` as stages, nested ones flattened. ``ModelError`` if it is none or empty."""

    way: ClassVar[str] = "sequential"
    inputs: ClassVar[tuple[str, ...]] = ()
    anew: ClassVar[str] = ""

    def __init__(self, module: nn.Module) -> None:
        self.reasons: Mapping[str, str] = {}
        self.module = module
        self.stages = sequential_stages(module)
        self._members = sequential_members(module)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The one input, unless a layer was replaced, or a container got hooks that the flat chain would never fire."""
        if len(args) != 1 or kwargs:
            inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        (value,) = (*args, *kwargs.values())
        return value if tensors_in(value) and sequential_members(self.module) == self._members else None


def sequentialize(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Sequence[SequentialCut | GraphCut] = (),
    afresh: bool = False,
) -> SequentialCut | GraphCut:
    """Turn a module into a chain of stages. The module stays as it is.

    Args:
        module: Any module with a forward.
        args: Positional arguments of a call as in training. An ``nn.Sequential`` takes one, which may be a tuple.
        kwargs: Keyword arguments of that call.
        known: Earlier cuts of the module; one is returned if it holds for this call.
        afresh: Run the module as often as if there were none, as processes without them do that wait for it.
    Returns:
        The stages, what they take as input for a given call, and in ``way`` how they were found.
    Raises:
        ModelError: No way works; says why for each.
        SampleError: The call holds no tensor.
    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> sequentialize(net, (torch.ones(1, 2),)).way
        'sequential'
    """
    check_module(module)
    require_tensors((args, kwargs))
    reasons: dict[str, str] = {}
    row: SequentialCut | None = None
    try:
        row = SequentialCut(module)
        blocks = [stage.name for stage in row.stages if _has_layers(stage)]
        if not blocks:
            return row
        reasons["sequential"] = f"there are several layers in {blocks[0]!r}, between which a graph can be cut"
    except ModelError as error:
        if isinstance(module, nn.Sequential):
            reasons["sequential"] = str(error)
    with noticed_checkpoints() as noticed:
        try:
            graphs = [each for each in known if isinstance(each, GraphCut)]
            cut = cut_graph(module, args, kwargs, known=graphs, afresh=afresh)
            if len(cut.stages) > max(1, 0 if row is None else len(row.stages)):
                cut.reasons = reasons
                return cut
            stuck = ", ".join(map(repr, cut.opaque))
            why = f"most of it is in {stuck}, which cannot be recorded" if stuck else _NO_POINT
            reasons["graph"] = f"{why}, so it is {len(cut.stages)} stages. Name a submodule that is a chain of layers"
        except ModelError as error:
            reasons["graph"] = f"{error}{f'. {NO_CHECKPOINTS}' * bool(noticed)}"
    if row is not None:
        row.reasons = {"graph": reasons["graph"]}
        return row
    if len(reasons) == 1:
        raise ModelError(f"{type(module).__name__} cannot be planned: {reasons['graph']}")
    tried = ". ".join(f"{WAYS[way][0].upper()}{WAYS[way][1:]}: {reason}" for way, reason in reasons.items())
    raise ModelError(f"{type(module).__name__} cannot be planned. {tried}")


def _has_layers(stage: Stage) -> bool:
    """True if a stage is more than one layer. Attention holds its projection, but runs as one function."""
    return any(module._modules and not isinstance(module, nn.MultiheadAttention) for module in stage.modules)


def check_module(module: nn.Module) -> None:
    """Raise ``ModelError`` if a module can be no chain, whatever its input: a single layer, or wrapped as a whole."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} was scripted or traced (torch.jit), which leaves no Python code to cut: expected the module as it "
            "was before, or one around it that has other layers, too"
        )
    if "_planned" in module.__dict__:
        raise ModelError(
            f"this {name} plans its module by itself: expected one of both, RotorCallback on the module without the "
            "Checkpointable around it, or a Checkpointable without RotorCallback"
        )
    if wrapped := units_below(module, "FullyShardedDataParallel"):
        raise ModelError(
            f"{name} holds modules that FullyShardedDataParallel wraps (the first is {wrapped[0]!r}), which gathers "
            "parameters in a way that cannot be measured or planned: expected units of fully_shard (FSDP2, "
            f"ModelParallelStrategy), or a module inside of one wrapper, such as {wrapped[0]!r}"
        )
    if shared := [unit for unit in units_below(module) if Unit(module.get_submodule(unit)).shares_hooks]:
        raise ModelError(
            f"{name} holds {shared[0]!r}, which fully_shard was given in a list, so that it gathers its parameters "
            "together with other modules, and cannot be recomputed alone: expected fully_shard for each of these "
            "modules, or a module to plan without them"
        )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        sequential_stages(module)
    if is_compiler_wrapper(module):
        raise ModelError(
            f"{type(module_inside(module)).__name__} was compiled as a whole, which leaves nothing to cut: "
            "expected its blocks to be compiled instead (for block in net.blocks: block.compile()), "
            "Checkpointable(torch.compile(net)), which chooses among compiled code for the whole, or the module "
            "inside, ._orig_mod, which runs uncompiled under a plan"
        )
    if type(module).forward is nn.Module.forward:
        raise ModelError(
            f"{name} has no forward, so it is no chain of layers: expected an nn.Sequential, or a module "
            "that calls its layers"
        )
    if type(module).__module__.startswith("torch.nn.modules.") and not module._modules:
        raise ModelError(
            f"{name} is a single layer, so there is nothing to cut: expected an nn.Sequential, or a module "
            "with several layers"
        )
