"""A traced or recorded module as stages, and the calls for which it holds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import extract_tb
from typing import Any, TypeVar

import torch
from torch import fx, nn

from lightning_rotor.capture.boundaries import Footprint, footprints_of, lasting_addresses, run_watched, stages_of
from lightning_rotor.capture.checks import Heap
from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.capture.guards import Guards, first_difference
from lightning_rotor.capture.inlining import Sample, Samples, is_attention, is_composite
from lightning_rotor.capture.modules import Call, Lessons, hide_trainers, is_invertible_as_a_whole
from lightning_rotor.capture.recorder import Recorder
from lightning_rotor.capture.symbols import Tracer, ambient
from lightning_rotor.capture.watched import Watch
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.options import kept_attributes, kept_parameters, lent_buffers, undisturbed
from lightning_rotor.invertible.check import try_inverse
from lightning_rotor.private.values import is_fake, same_bits
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import Stage, packed, wiring_of
from lightning_rotor.stages.snapshot import Snapshot, is_users

# ----------------------------------------------------------------------------------------------------
# Modules with an inverse that does not undo their forward: they are cut inside like any others.


_log = logging.getLogger(__name__)


def has_inverses(module: nn.Module) -> bool:
    """Whether there are submodules that could be inverted as a whole."""
    return any(map(is_invertible_as_a_whole, list(module.modules())[1:]))


def unusable_inverses(module: nn.Module, call: Call, tensors: Sequence[torch.Tensor]) -> frozenset[nn.Module]:
    """Find the submodules whose inverse cannot be used, by running the module and trying each on its own input.

    Args:
        module: Is called without gradients.
        call: How.
        tensors: In the place of those of the call. If they are fake, nobody knows, and none is found.
    """
    if any(map(is_fake, tensors)):
        return frozenset()
    names = {each: name for name, each in module.named_modules() if name and is_invertible_as_a_whole(each)}
    found: dict[nn.Module, str] = {}
    trying = False

    def attempt(each: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal trying
        if trying:  # it is called by the trial, or within one
            return
        trying = True
        if kwargs or len(args) != 1:
            objection = "it takes several arguments: expected one, which may be a tuple"
        else:
            objection = try_inverse(each, args[0], name=names[each]).inverse
        trying = False
        if objection:
            found.setdefault(each, objection)

    with ExitStack() as hooks, torch.no_grad():
        for each in names:
            hooks.callback(each.register_forward_pre_hook(attempt, with_kwargs=True).remove)
        args, kwargs = call.with_tensors(tensors)
        type(module).forward(module, *args, **kwargs)
    for each, objection in found.items():
        _log.info("%r is not inverted, and cut inside like any other module: %s", names[each], objection)
    return frozenset(found)


# ----------------------------------------------------------------------------------------------------
# A second look at a graph: which of its operations are Python code that saves several tensors, and what they were
# called with.


def has_composites(module: nn.Module, graph: fx.Graph) -> bool:
    """Whether an operation of a graph looks like one but is Python code that may do several things."""
    return any(_is_composite(module, node) for node in graph.nodes)


def samples_of(
    module: nn.Module, graph: fx.Graph, tracer: Tracer, tensors: Sequence[torch.Tensor]
) -> list[Sample | None]:
    """Run a graph, and see what its composite operations are called with.

    Args:
        module: What it was traced from; the run updates its buffers and generators.
        graph: Its operations.
        tracer: What traced it.
        tensors: Of the call.
    Returns:
        One for each composite operation in order, None for those that save one tensor at most: there is nothing to choose inside.
    """
    found: list[Sample | None] = []
    lasting = lasting_addresses(module, tracer, tensors)

    def watch(node: fx.Node, reads: list[fx.Node], given: Any, _: Any, saved: dict[int, int]) -> None:
        if not _is_composite(module, node):
            return
        if len(saved.keys() - lasting) <= 1 or _is_opaque(tracer, module, node):
            found.append(None)
            return
        called = [node.args, node.kwargs]
        arguments = GraphSlice(reads, [], called, root=module, owners=tracer.owners, constants=tracer.constants)
        found.append(Sample.of(arguments(given)))

    run_watched(module, graph, tracer, tensors, watch)
    return found


def _is_composite(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return is_attention(module.get_submodule(str(node.target)))
    return node.op == "call_function" and is_composite(node.target)


def _is_opaque(tracer: Tracer, module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and tracer.calls.is_opaque(module.get_submodule(str(node.target)))


# ----------------------------------------------------------------------------------------------------


_Seen = TypeVar("_Seen")
_OPAQUE_INSTANCES = 2  # modules of one type that fail before the type counts as untraceable


@dataclass(slots=True, eq=False)
class GraphCut:
    """A module as stages, for calls like the one that was traced.

    Attributes:
        stages: The first values of the chain are the call's tensors, the last stage returns what the module returns.
        opaque: Modules that had to become one operation, by name, and why.
        way: ``"graph"`` if the forward ran on symbols, ``"recording"`` if it ran on the call's tensors.
        reasons: For each other way that was tried, why it was not taken.
        lessons: What it teaches about calls that differ in sizes alone; None unless it is a recording.
        module: What was cut.
        inputs: How messages call the call's tensors.
    """

    stages: tuple[Stage, ...]
    opaque: Mapping[str, str]
    way: str
    module: nn.Module
    inputs: tuple[str, ...]
    _key: Any
    _watch: Watch
    _guards: Guards | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    lessons: Lessons | None = None
    _reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._reads = wiring_of(self.stages).wire.reads

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The chain's input for a call, or None if the trace does not hold for it.

        It does not if another argument that is no tensor differs, or if the module has changed in a way that its code could notice. A
        recording does not either if a tensor has another shape or type, or if its forward would read other values out of tensors.
        """
        call = Call.of(self.module, args, kwargs)
        if _key(call, self.way) != self._key or not self._watch.holds():
            return None
        return self._take(call) if self._guards is None or self._guards.hold(call.tensors) else None

    def lessons_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lessons | None:
        """What it teaches about another call; None if that differs in more than sizes, or if the module has changed."""
        if self.lessons is None:
            return None
        call = Call.of(self.module, args, kwargs)
        return self.lessons if _key(call, "graph") == self._key[:-1] and self._watch.holds() else None

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The chain's input for a call for which the trace is known to hold: the tensors that it reads."""
        return self._take(Call.of(self.module, args, kwargs))

    def _take(self, call: Call) -> Any:
        return packed([call.tensors[number] for number in self._reads])

    def renewed_by(self, newer: GraphCut) -> bool:
        """Hold on under a newer trace's conditions if that trace runs the same operations on the same objects."""
        if self._key != newer._key or len(self.stages) != len(newer.stages):
            return False
        for mine, theirs in zip(self.slices, newer.slices, strict=True):
            if mine.called_modules != theirs.called_modules or mine.reads != theirs.reads:
                return False
            if not all(same_bits(*pair) for pair in zip(mine.constants, theirs.constants, strict=False)):
                return False
            if mine.operations != theirs.operations:
                return False
        if self._guards is not None and newer._guards is not None and self._guards.ask_the_same(newer._guards):
            self._guards.also_accept(newer._guards)
        else:
            self._guards = newer._guards
        self._watch = newer._watch
        return True

    def lives_in(self, modules: set[nn.Module]) -> bool:
        """Whether everything that it runs is still among these modules."""
        return all(called in modules for piece in self.slices for called in piece.called_modules)

    @property
    def slices(self) -> tuple[GraphSlice, ...]:
        """What the stages run."""
        return tuple(module for stage in self.stages for module in stage.modules if isinstance(module, GraphSlice))


def cut_graph(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> GraphCut:
    """Trace one call of a module, and cut it wherever one value is alive.

    The forward's Python code runs once, on symbols; whatever it changes is set back. Submodules whose code cannot be traced become one
    operation each.

    Args:
        module: Not an attribute of it changes, whether or not this succeeds.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
    Raises:
        ModelError: The module's own forward cannot be traced; says where.
    """
    return _cut(module, Call.of(module, args, kwargs or {}), Tracer)


def cut_recording(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    lessons: Lessons | None = None,
) -> GraphCut:
    """Record one call of a module, and cut it as :func:`cut_graph` does.

    The forward runs for real, on copies of the call's tensors and buffers, and more than once if submodules have to become one operation.
    Saved tensors are dropped, so this takes no more memory than a forward without gradients. What comes out holds for tensors of the same
    shapes only.

    Args:
        module: Nothing about it changes, whether or not this succeeds.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
        lessons: Of a recording for other sizes, which make this one faster.
    Raises:
        ModelError: The module's own forward cannot be recorded; says where.
    """
    return _cut(module, Call.of(module, args, kwargs or {}), Recorder, lessons)


def _cut(module: nn.Module, call: Call, make: type[Tracer | Recorder], lessons: Lessons | None = None) -> GraphCut:
    not_whole: frozenset[nn.Module] = frozenset()
    if has_inverses(module):
        not_whole = _tried(module, call, lambda tensors: unusable_inverses(module, call, tensors)) or not_whole
    graph, tracer, opaque, learnt = _trace(module, call, make, not_whole, lessons)
    if isinstance(tracer, Tracer):
        graph, tracer = _looked_inside(module, call, graph, tracer)
    names = dict(module.named_modules())
    inside = {submodule for leaf in tracer.calls.leaves for submodule in leaf.modules()}
    called = {str(node.target): names[str(node.target)] for node in graph.nodes if node.op == "call_module"}
    inside |= {below for leaf in called.values() for below in leaf.modules()}
    watched = [submodule for submodule in names.values() if submodule not in inside]
    stages = tuple(stages_of(module, graph, tracer, _footprints(module, call, graph, tracer)))
    way, guards = ("recording", tracer.guards) if isinstance(tracer, Recorder) else ("graph", None)
    return GraphCut(
        stages,
        opaque,
        way,
        module,
        call.names,
        _key(call, way),
        Watch(module, watched, outside=tracer.surroundings.notes.holds),
        guards,
        lessons=learnt if isinstance(tracer, Recorder) else None,
    )


def _footprints(
    module: nn.Module, call: Call, graph: fx.Graph, tracer: Tracer | Recorder
) -> dict[fx.Node, Footprint] | None:
    """What the operations of a graph make and save; None if the graph does not run, which its checks will find, too."""
    return _tried(module, call, lambda tensors: footprints_of(module, graph, tracer, tensors))


def _tried(module: nn.Module, call: Call, run: Callable[[list[torch.Tensor]], _Seen]) -> _Seen | None:
    """What comes of a run on copies of the call's tensors, after which everything is as before; None if it fails."""
    states = GeneratorStates()
    tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad).view_as(tensor) for tensor in call.tensors]
    try:
        with _lent(module, call), kept_attributes(Stage("", (module,)), keep_parameters=False):
            return run(tensors)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None
    finally:
        states.restore()


def _looked_inside(module: nn.Module, call: Call, graph: fx.Graph, tracer: Tracer) -> tuple[fx.Graph, Tracer]:
    """A trace that goes through the code of operations that save several tensors, as far as that can be traced."""
    if not has_composites(module, graph):
        return graph, tracer
    samples = _tried(module, call, lambda tensors: samples_of(module, graph, tracer, tensors))
    while samples is not None and any(sample is not None for sample in samples):
        deeper = tracer.again(Samples(samples))
        attempt = _attempt(module, call, deeper)
        if attempt.graph is not None:
            return attempt.graph, deeper
        failed = deeper.failed
        if failed is None:
            break
        samples[failed] = None
    return graph, tracer


def _key(call: Call, way: str) -> Any:
    # Code may ask whether autocast is on. Hooks on saved tensors are nobody's business but autograd's.
    # What a graph computes with is as long as it is, but code inside of it has asked for the types and the dimensions.
    kinds = tuple((tensor.dim(), tensor.dtype, tensor.device) for tensor in call.tensors)
    key = call.key, call.firsts, ambient()[:-1], kinds
    return (*key, call.signature) if way == "recording" else key


# -------------------------------------------------------------------- tracing


def _trace(
    module: nn.Module,
    call: Call,
    make: type[Tracer | Recorder],
    not_whole: frozenset[nn.Module],
    lessons: Lessons | None,
    *,
    looks: bool = False,
) -> tuple[fx.Graph, Tracer | Recorder, dict[str, str], Lessons]:
    """Trace or record, making opaque whatever cannot be traced, from the inside out.

    What is there before is looked at only if a first attempt has asked for it: most code does not, and looking through a large process takes
    longer than a recording.
    """
    paths = {submodule: path for path, submodule in module.named_modules()}
    opaque = {} if lessons is None else {module.get_submodule(path): why for path, why in lessons.opaque.items()}
    failures = Counter(map(type, opaque))
    before, unsettled = Snapshot(module.modules()), None
    heap = Heap(is_users, lessons, looks=looks)
    while True:
        types = {
            kind
            for kind, count in failures.items()
            if count >= _OPAQUE_INSTANCES and kind.__module__.partition(".")[0] != "torch"
        }
        tracer = make(module, call, set(opaque), types, heap=heap, not_whole=not_whole)
        attempt = _attempt(module, call, tracer)
        if isinstance(tracer, Recorder) and attempt.graph is not None:
            second = Recorder(module, call, set(opaque), types, heap=heap, not_whole=not_whole)
            attempt = _repeated(module, call, attempt, tracer, second)
        if heap.misled:
            tracer.surroundings.notes.restore()
            if unsettled is not None:
                unsettled.restore()
            before.restore()
            return _trace(module, call, make, not_whole, None, looks=heap.must_look)
        if attempt.graph is not None:
            heap.closures.forget()
            named = {paths[submodule]: why for submodule, why in opaque.items()}
            return attempt.graph, tracer, named, heap.lessons(named)
        culprit = attempt.culprit
        if attempt.may_settle and unsettled is None:
            # Models of transformers note in their configuration which loss they compute, once. Others fill a global cache.
            unsettled = tracer.surroundings.notes
            continue
        tracer.surroundings.notes.restore()
        if attempt.may_settle and unsettled is not None:
            unsettled.restore()
            before.restore()
        while culprit is not module and (culprit in opaque or culprit in tracer.calls.leaves):
            culprit = module.get_submodule(paths[culprit].rpartition(".")[0])
        if culprit is module or not paths[culprit]:
            before.restore()
            verb = "traced" if make is Tracer else "recorded"
            raise ModelError(
                f"the forward of {type(module).__name__} cannot be {verb}: {attempt.reason}. Expected code whose course depends on the input's "
                "values in submodules only; move that part into a submodule, or name a submodule that can be planned"
            )
        opaque[culprit] = attempt.reason
        failures[type(culprit)] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A graph, or the module whose forward could not be traced, and why."""

    graph: fx.Graph | None
    culprit: nn.Module
    reason: str
    may_settle: bool = False


def _attempt(module: nn.Module, call: Call, tracer: Tracer | Recorder) -> _Attempt:
    """Trace once, and set back whatever the forward has changed."""
    modules = tuple(module.modules())
    records = isinstance(tracer, Recorder)
    with _lent(module, call) if records else nullcontext():
        watch, before, states = Watch(module, modules, tensors=True), Snapshot(modules), GeneratorStates()
        hide_trainers(module, tracer.calls.is_opaque)
        if isinstance(tracer, Recorder):
            tracer.allow(before.copied)
        try:
            graph = tracer.record(module)
            if not records and not states.equals(GeneratorStates()):
                return _Attempt(None, module, "it draws random numbers that do not depend on its input")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            before.restore()
            return _Attempt(None, tracer.calls.culprit or module, _reason(error))
        finally:
            # Leaves have run for real, and will in every call.
            besides = {below for leaf in tracer.calls.leaves for below in leaf.modules()} if records else set()
            changed = watch.changed(besides)
            # What a traced forward has set up, as in a configuration, may stay so.
            before.restore(leaving=Snapshot((each for each in modules if each not in besides), hooks=False).objects)
            remaining = watch.changed(besides)
            if not (records and remaining):
                before.restore()
            states.restore()
    if changed is not None:
        return _Attempt(
            None, changed, "its forward changes attributes of the module", records and remaining is not None
        )
    outside = tracer.surroundings.notes.changed()
    if outside is not None:
        path, name = outside
        return _Attempt(
            None,
            module.get_submodule(path),
            f"its forward changes {name!r}, which is outside of modules",
            not tracer.surroundings.notes.hold_symbols(),
        )
    tracer.surroundings.notes.settle()
    return _Attempt(graph, module, "")


def _repeated(module: nn.Module, call: Call, attempt: _Attempt, first: Recorder, second: Recorder) -> _Attempt:
    """The attempt, unless the same call records something else the second time."""
    again = _attempt(module, call, second)
    if attempt.graph is None or again.graph is None:
        if not again.may_settle:
            second.surroundings.notes.restore()
        return again
    paths = first_difference(attempt.graph, again.graph, (first.constants, second.constants))
    if not paths:
        return attempt
    # Where one has an operation more, the other is at what comes after it, a layer most likely.
    suspects = [module.get_submodule(path) for path in sorted(paths, key=lambda path: -path.count("."))]
    return _Attempt(
        None,
        next((suspect for suspect in suspects if suspect not in first.calls.leaves), suspects[0]),
        "it does something else each time that it runs on the same input (it asks a clock, a counter outside of modules, or a random generator "
        "of its own)",
    )


@contextmanager
def _lent(module: nn.Module, call: Call) -> Iterator[None]:
    """Context in which a real forward leaves parameters, buffers and generators alone."""
    device = call.tensors[0].device if call.tensors else torch.device("cpu")
    whole = Stage("", (module,))
    with undisturbed(device), lent_buffers(whole), kept_parameters(whole):
        yield


def _reason(error: Exception) -> str:
    """The error, and the user's line that it comes from."""
    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    text = str(error).partition("\n")[0] or type(error).__name__
    return f"{text} (in {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else text
