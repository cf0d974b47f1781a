"""Recordings of one call, until one holds: what cannot be recorded becomes one operation, from the inside out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from traceback import extract_tb
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.call import Call
from lightning_rotor.capture.differences import first_difference
from lightning_rotor.capture.module_calls import hide_trainers, hides_code, is_invertible_as_a_whole
from lightning_rotor.capture.recorder import Recorder
from lightning_rotor.capture.recording import Recording
from lightning_rotor.capture.surroundings import functions
from lightning_rotor.capture.watch import Watch
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.isolated import kept_parameters, lent_buffers, undisturbed
from lightning_rotor.invertible.check import try_inverse
from lightning_rotor.private.sharding import as_found, units_in
from lightning_rotor.private.torch_names import is_compiled
from lightning_rotor.private.values import is_fake, tensors_in
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.stages.submodules import submodule_of
from lightning_rotor.stages.user_code import is_users

_log = logging.getLogger(__name__)
_OPAQUE_INSTANCES = 2
"""Modules of one type that fail before the type counts as opaque."""


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A recording, or the module whose forward could not be recorded, and why.

    ``may_settle`` is True if the forward changes something that it may have set up once, so that a second run changes
    nothing.
    """

    recorder: Recorder
    recording: Recording | None
    culprit: nn.Module
    reason: str = ""
    may_settle: bool = False


class Attempts:
    """Recordings of one call, until one holds.

    Args:
        known: Earlier recordings of such a call. What is recorded as in one of them is not recorded twice.
        opaque: Modules that became one operation before, by path, and why.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        known: Sequence[Recording] = (),
        opaque: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._call = call
        self._known = known
        # Objections to inverses that were tried; empty where there is none.
        self._objections: dict[nn.Module, str] = {}
        self._paths = {submodule: path for path, submodule in module.named_modules()}
        self._opaque: dict[nn.Module, str] = {}
        for path, why in (opaque or {}).items():
            self._opaque[submodule_of(module, path)] = why
        # By class: of one that has failed as often as ``_OPAQUE_INSTANCES``, no other object is tried.
        self._failures = Counter(map(type, self._opaque))
        # Looking at all functions of the process takes long, and several attempts need it.
        self._functions = cache(functions)

    def record(self) -> tuple[Recording, dict[str, str]]:
        """A recording, and which modules are one operation in it, by name, and why."""
        before = Snapshot(self._module.modules())
        unsettled = None
        while True:
            attempt = self._attempt()
            # Once is no proof: a forward that asks a clock has a graph, too.
            if attempt.recording is not None:
                attempt = self._repeated(attempt, attempt.recording)
            if attempt.recording is not None:
                opaque = {}
                for submodule, reason in self._opaque.items():
                    opaque[self._paths[submodule]] = reason
                return attempt.recording, opaque
            if attempt.may_settle and unsettled is None:
                # Models of transformers note in their configuration which loss they compute, once. Others fill a cache.
                unsettled = attempt.recorder.surroundings.notes
                continue
            if attempt.may_settle and unsettled is not None:
                # It changes something in every run, and so has set up nothing: the newest change is undone first.
                attempt.recorder.surroundings.notes.restore()
                unsettled.restore()
                before.restore()
            if not self._make_opaque(attempt):
                before.restore()
                raise ModelError(
                    f"the forward of {type(self._module).__name__} cannot be recorded: {attempt.reason}. Expected code "
                    "whose course depends on the input's values in submodules only; move that part into a "
                    "submodule, or name a submodule that can be planned"
                )

    def runs_like(self, known: Recording) -> bool:
        """True if the call runs the operations of a known recording. It is run once, and nothing becomes opaque."""
        attempt = self._attempt()
        return attempt.recording is not None and known.runs_the_same(attempt.recording)

    def _make_opaque(self, attempt: _Attempt) -> bool:
        """Make the failed module, or one around it, one operation. False if that would be the root."""
        culprit = attempt.culprit
        leaves = attempt.recorder.calls.leaves
        # One that is an operation already has failed as such, by what it returns or changes: the one around it is next.
        while culprit is not self._module and (culprit in self._opaque or culprit in leaves):
            around, _, _ = self._paths[culprit].rpartition(".")
            culprit = submodule_of(self._module, around)
        if culprit is self._module:
            return False
        self._opaque[culprit] = attempt.reason
        self._failures[type(culprit)] += 1
        return True

    def _is_opaque(self, module: nn.Module, arguments: Any = None) -> bool:
        """True if a module cannot be recorded, does more than its code says, or can be inverted as a whole alone."""
        kind = type(module)
        # Not torch's own: a container of torch's fails for what is in it.
        is_users_kind = kind.__module__.partition(".")[0] != "torch"
        # Each attempt runs the whole forward, so that 48 equal blocks must not fail one by one.
        if is_users_kind and self._failures[kind] >= _OPAQUE_INSTANCES:
            return True
        if is_invertible_as_a_whole(module) and not self._objection(module, arguments):
            return True
        return module in self._opaque or hides_code(module)

    def _objection(self, module: nn.Module, arguments: Any) -> str:
        """Why a module's inverse cannot be used, found by trying it on the first input that it is given."""
        if arguments is not None and module not in self._objections:
            objection = self._try_inverse(module, *arguments)
            if objection:
                path = self._paths[module]
                _log.info("%r is not inverted, and cut inside like any other module: %s", path, objection)
            self._objections[module] = objection
        return self._objections.get(module, "")

    def _try_inverse(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> str:
        if len(args) != 1 or kwargs:
            return "it takes several arguments: expected one, or a tuple"
        # Without values there are no bits to compare. The inverse is tried when real tensors come.
        if any(map(is_fake, tensors_in(args))):
            return ""
        objection, _ = try_inverse(module, args[0], name=self._paths[module])
        return objection

    def _repeated(self, first: _Attempt, recording: Recording) -> _Attempt:
        """The first attempt, unless the same call records something else the second time."""
        # An earlier recording is as good a second run as another one now.
        if any(known.runs_the_same(recording) for known in self._known):
            return first
        again = self._attempt()
        if again.recording is None:
            return again
        # Generators were set back in between, so that draws make no difference.
        differing = first_difference(recording.graph, again.recording.graph)
        if differing:
            paths = [str(node.meta["module"]) for node in differing]
            culprit = self._culprit_of_difference(paths, recording)
            reason = (
                "it does something else each time that it runs on the same input (it asks a clock, a counter outside "
                "of modules, or a random generator of its own)"
            )
            return _Attempt(again.recorder, None, culprit, reason)
        # In the second run, for a warning comes once.
        writer = again.recorder.surroundings.written_by
        if writer is not None:
            culprit = submodule_of(self._module, writer)
            reason = "it prints, or opens or writes a file, whenever it runs, which a recording would not"
            return _Attempt(again.recorder, None, culprit, reason)
        return first

    def _culprit_of_difference(self, paths: Sequence[str], recording: Recording) -> nn.Module:
        """The module that did something else, out of those whose operations differ."""
        # Where one has an operation more, the other is at what comes after it, a layer most likely.
        innermost_first = sorted(paths, key=lambda path: -path.count("."))
        suspects = [submodule_of(self._module, path) for path in innermost_first]
        for suspect in suspects:
            if suspect not in recording.leaves:
                return suspect
        return suspects[0]

    def _attempt(self) -> _Attempt:
        """Record once, and set back whatever the forward has changed."""
        recorder = Recorder(self._module, self._call, self._is_opaque, self._functions)
        notes = recorder.surroundings.notes
        module = self._module
        modules = tuple(self._module.modules())
        with self._isolated():
            watch = Watch(module, modules, tensors=True)
            before = Snapshot(modules, code=True)
            hide_trainers(module, self._is_opaque)
            recorder.check.allow(before.copied)
            has_units_or_compiled = bool(units_in((module,))) or any(map(is_compiled, modules))
            if not has_units_or_compiled:
                # kept_parameters puts them back.
                recorder.check.allow(module.parameters())
            try:
                with as_found((module,)):
                    recording = recorder.record()
            except (torch.OutOfMemoryError, InverseError):
                # The forward fails in plain training, too.
                before.restore()
                raise
            except Exception as error:
                notes.restore()
                before.restore()
                culprit = module if recorder.calls.culprit is None else recorder.calls.culprit
                return _Attempt(recorder, None, culprit, _reason(error))
            except BaseException:
                # An interrupt (Ctrl-C) must not leave the module half changed.
                notes.restore()
                before.restore()
                raise
            finally:
                # Leaves have run for real, and will in every call.
                besides = {below for leaf in recorder.calls.leaves for below in leaf.modules()}
                outside = notes.changed()
                changed = watch.changed(besides)
                if changed is None:
                    changed = _changed_beyond_watching(before, modules, besides)
                # What the forward has set up, as in a configuration, may stay so. Of what code names, notes say it.
                others = [submodule for submodule in modules if submodule not in besides]
                held = Snapshot(others, hooks=False)
                named = Snapshot(others, hooks=False, code=True).owners - held.owners
                before.restore(leaving=held.objects | named)
                # None: what the forward changed was put back with the modules that ran as they are.
                remaining = watch.changed(besides)
                if remaining is None:
                    if changed is not None:
                        notes.restore()
                    # Behind the notes: some were taken when another layer had changed what they note.
                    before.restore()
        if changed is not None:
            reason = "its forward changes attributes of the module"
            return _Attempt(recorder, None, changed, reason, may_settle=remaining is not None)
        if outside is not None:
            path, name = outside
            reason = f"its forward changes {name!r}, which is outside of modules"
            return _Attempt(recorder, None, submodule_of(module, path), reason, may_settle=True)
        recorder.surroundings.note_layers(recording.run_as_they_are)
        recorder.surroundings.note_cached()
        # Everything was set back above, and the next call is compared with what is there now.
        recording.notes.settle()
        return _Attempt(recorder, recording, module)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Context of a run of the forward that leaves generators, buffers and parameters as they are."""
        tensors = self._call.tensors
        device = tensors[0].device if tensors else torch.device("cpu")
        # A stage that is the whole module, for contexts that are written for stages.
        whole = Stage("", (self._module,))
        with undisturbed(device), lent_buffers(whole), kept_parameters(whole):
            yield


def _changed_beyond_watching(
    before: Snapshot,
    modules: Sequence[nn.Module],
    besides: Collection[nn.Module],
) -> nn.Module | None:
    """The first module with a long container or a large array that has changed since, not counting some."""
    changed = set(map(id, before.changed_large()))
    # Looking for owners walks through all that modules hold, which is worth it for a change alone.
    if changed:
        changed -= Snapshot(besides).owners
    if not changed:
        return None
    for module in modules:
        if module not in besides and changed & Snapshot((module,), hooks=False).owners:
            return module
    return None


def _reason(error: Exception) -> str:
    """The error, and the user's line that it comes from."""
    frames = [frame for frame in extract_tb(error.__traceback__) if is_users(frame.filename)]
    # torch's errors go on with advice, or the C++ stack, on further lines.
    text = str(error).partition("\n")[0] or type(error).__name__
    if "support saved tensor hooks" in text:
        text = (
            "torch.func.grad, vjp, jacrev and hessian refuse the hooks by which a plan drops what autograd saves: "
            "expected torch.autograd.grad(..., create_graph=True)"
        )
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (in {last.filename}, line {last.lineno}: {last.line})"
