"""Which submodules to plan, where the user names none: those with much of a step's compute.

A dry run counts the compute of a step, as far as it can follow the step. Behind a line that it cannot follow there may
be more. So every module that may be planned and was not met before that line is a target as well, an unseen one, at any
depth: the first step shows which of them it calls, and those are planned when their call comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from lightning_rotor.capture.sequentialize import check_module
from lightning_rotor.errors import ModelError, ProfilingError
from lightning_rotor.profiling.step_compute import StepCompute

# A part of the compute that is worth a word, or another choice; and one that is worth a plan beside others.
_NOTABLE = 0.2
_HEAVY = 0.05
_LEAST = 0.005  # of which nothing could be saved that pays for measuring it


@dataclass(frozen=True, slots=True)
class Target:
    """A submodule to plan, by its dotted name (``""`` is the model itself), and why this one.

    ``is_unseen`` is True if its compute is not known before it runs in the first step.
    """

    name: str
    module: nn.Module
    reason: str
    is_unseen: bool = False

    @property
    def place(self) -> str:
        """Name of the submodule for messages."""
        return repr(self.name) if self.name else "the model itself"

    def __str__(self) -> str:
        return f"{self.place} ({type(self.module).__name__}): {self.reason}"


def named_target(model: nn.Module, name: str) -> Target:
    """The submodule that the user named; ``ModelError`` if it does not exist, or can be no chain."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        plannable = [path for path, each in model.named_modules() if path and _computes(each)]
        close = get_close_matches(name, plannable, n=1)
        closest = f", such as {close[0]!r}" if close else ""
        outermost = ", ".join(repr(path) for path, each in _outermost(model) if _computes(each)) or "none"
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}: expected a dotted name{closest}. "
            f"Submodules that can be planned: {outermost}"
        ) from None
    check_module(module)
    return Target(name, module, "as named")


def may_be_planned(module: nn.Module) -> bool:
    """True if nothing speaks against planning a module, as far as can be told without its input."""
    try:
        check_module(module)
    except ModelError:
        return False
    return True


def _computes(module: nn.Module) -> bool:
    """True if a module can be planned, and has a parameter, which metrics have not."""
    return next(module.parameters(), None) is not None and may_be_planned(module)


class TargetSearch:
    """Finds the submodules to plan by the compute of a training step, as far as that is known.

    A model that ``may_be_whole`` is the choice if its forward reaches much more compute than any submodule.

    Attributes:
        refused: Names of modules that have turned out to be no chain. Their parts are targets in their place.
        is_open: True while the step may compute in places that are not known.
    """

    def __init__(self, model: nn.Module, *, may_be_whole: bool) -> None:
        self._model, self._may_be_whole = model, may_be_whole
        self._compute: StepCompute | None = None
        self._calls: Collection[str] = ()
        self._unseen_because = "its compute is not known yet"
        self.refused: set[str] = set()
        self.is_open = True

    def count(self, compute: Callable[[], StepCompute]) -> None:
        """Rank by the compute of a training step from now on, if that can be counted."""
        try:
            self._compute = compute()
        except ProfilingError as error:
            self._unseen_because = f"found in the first step, whose compute could not be counted before: {error}"
            return
        if stop := self._compute.stopped_at:
            self._unseen_because = f"found in the first step, behind what its dry run could not follow ({stop})"
        self.is_open = bool(stop)

    def close(self, calls: Sequence[str]) -> None:
        """Note which modules a real step has called, once for each call: nothing is unknown any more."""
        self.is_open = False
        self._calls = calls

    # ---------------------------------------------------------------- the choice

    def targets(self) -> list[Target]:
        """The submodules to plan, those with most compute first; empty if there are none.

        Of submodules that do the same work, it is the outermost. Equal blocks, which are children of one module and
        have one class, are chosen together, however small each of them is.
        """
        seen = self._heavy([name for name, _ in self._met(self._model)])
        if self._is_better_whole(seen):
            return [self._target("")]
        unseen = list(self._unmet(self._model)) if self.is_open else []
        if self._may_be_whole and not seen and not unseen and "" not in self.refused:
            # Nothing but single layers: the model's own forward is what can be cut, if the step calls it.
            unseen = [""] if self._weight("") > 0 and self.is_open else []
        return [*map(self._target, seen), *map(self._unseen_target, unseen)]

    def best(self) -> Target | None:
        """The one submodule with most compute, or most trainable parameters where that is unknown; None if none."""
        targets = self.targets()
        return max(targets, key=lambda target: self._weight(target.name), default=None)

    def calls(self, names: Collection[str]) -> int:
        """How many calls of these modules a step has, as far as that is known."""
        if self._calls:
            return sum(name in names for name in self._calls)
        return 0 if self._compute is None else sum(self._compute.calls[name] for name in names)

    @property
    def messages(self) -> dict[str, set[frozenset[int]]]:
        """Ranks of the processes with which submodules exchange messages in a step, as far as that is known."""
        return {} if self._compute is None else dict(self._compute.messages)

    def _is_better_whole(self, seen: Sequence[str]) -> bool:
        """True if the model's own forward reaches much more than its best submodule."""
        if not self._may_be_whole or "" in self.refused or self._compute is None or not self._compute.calls[""]:
            return False
        is_unfinished = "" in self._compute.unfinished
        return is_unfinished or not seen or self._share("") >= self._share(seen[0]) + _NOTABLE

    def _met(self, module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Outermost submodules that may be planned, and in which the dry run has computed something."""
        if self._compute is None:
            return
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if self._compute.plannable[name] and name not in self.refused and may_be_planned(child):
                yield name, child
            else:
                yield from self._met(child, f"{name}.")

    def _unmet(self, module: nn.Module, prefix: str = "") -> Iterator[str]:
        """Submodules at any depth that may be planned and hold parameters, and in which nothing was computed."""
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            was_met = self._compute is not None and self._compute.plannable[name] > 0
            if was_met and name not in self.refused:
                continue
            if not was_met and name not in self.refused and _computes(child):
                yield name
            yield from self._unmet(child, f"{name}.")

    def _heavy(self, names: Sequence[str]) -> list[str]:
        """Modules apart from each other that have much of the compute by themselves or with their equals."""
        assert self._compute is not None or not names
        groups: dict[tuple[str, type], list[str]] = {}
        for name in self._apart([*names, *self._skipped(names)]):
            kind = type(self._model.get_submodule(name))
            groups.setdefault((name.rpartition(".")[0], kind), []).append(name)
        shares = {group: sum(map(self._share, members)) for group, members in groups.items()}
        most = max(shares.values(), default=0.0)
        heavy = [
            name
            for group, members in groups.items()
            if shares[group] >= max(min(_HEAVY, most), _LEAST) or self._is_unfinished(members)
            for name in members
        ]
        return sorted(heavy, key=self._share, reverse=True)

    def _skipped(self, names: Sequence[str]) -> list[str]:
        """Equals of met modules that the dry run has not called. Which layers are skipped may be a draw."""
        met = {(name.rpartition(".")[0], type(self._model.get_submodule(name))) for name in names}
        return [
            name
            for parent in dict.fromkeys(parent for parent, _ in met)
            for key, child in self._model.get_submodule(parent).named_children()
            if (parent, type(child)) in met
            and (name := f"{parent}.{key}".lstrip(".")) not in (*names, *self.refused)
            and may_be_planned(child)
        ]

    def _is_unfinished(self, names: Sequence[str]) -> bool:
        return self._compute is not None and not self._compute.unfinished.isdisjoint(names)

    def _apart(self, names: Sequence[str]) -> list[str]:
        """Of modules that hold each other under several names, the one with most compute; the outer one of equals."""
        modules = {name: self._model.get_submodule(name) for name in names}
        inside = {name: set(module.modules()) for name, module in modules.items()}
        kept: list[str] = []
        for name in sorted(names, key=lambda name: (-self._weight(name), -len(inside[name]))):
            if not any(modules[name] in inside[other] or modules[other] in inside[name] for other in kept):
                kept.append(name)
        return kept

    # ---------------------------------------------------------------- what is left out

    def left_out(self, planned: Collection[str]) -> list[tuple[str, float]]:
        """Modules that are not planned, and their shares of the compute, largest first; empty if that is not known."""
        if self._compute is None or "" in planned or self._compute.stopped_at:
            return []
        modules = [self._model.get_submodule(name) for name in planned]
        shares = [(name, self._share(name)) for name, _ in _outermost(self._model, modules)]
        return sorted((entry for entry in shares if entry[1] >= 0.01), key=lambda entry: entry[1], reverse=True)

    def what_is_left_out(self, targets: Sequence[Target]) -> str | None:
        """A message about other submodules if they have much of the compute, and what to do about it, or None."""
        left_out = self.left_out([target.name for target in targets])
        if sum(share for _, share in left_out) < _NOTABLE:
            return None
        refused = " and ".join(sorted(repr(name) if name else "the model itself" for name in self.refused))
        planned = ", ".join(f"{target.place}, {target.reason}" for target in targets)
        return (
            f"plans {planned}; not planned, and kept as without a limit: {spelled_shares(left_out)}. "
            + (f"{refused} could not be planned as a whole, the log says why. " if refused else "")
            + "To have them planned, let nn.Modules do this work, and name them: "
            'RotorCallback(module=["...", "..."])'
        )

    # ---------------------------------------------------------------- small things

    def _weight(self, name: str) -> int:
        if self._compute is not None:
            return self._compute.plannable[name]
        parameters = self._model.get_submodule(name).parameters()
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    def _share(self, name: str) -> float:
        return 0.0 if self._compute is None else self._compute.share(name)

    def _target(self, name: str) -> Target:
        assert self._compute is not None
        reason = f"{100 * self._share(name):.0f} % of the FLOPs of a training step's forward"
        if stop := self._compute.stopped_at:
            reason += f", as far as its dry run could follow it ({stop})"
        if assumed := self._compute.assumed_values:
            reason += f" ({assumed} value{'s' * (assumed > 1)} that the step asks for taken as 1)"
        return Target(name, self._model.get_submodule(name), reason)

    def _unseen_target(self, name: str) -> Target:
        return Target(name, self._model.get_submodule(name), self._unseen_because, is_unseen=True)


def spelled_shares(shares: Sequence[tuple[str, float]]) -> str:
    """Names of modules with their parts of the compute."""
    return ", ".join(f"{name!r} ({100 * share:.0f} %)" for name, share in shares)


def _outermost(
    module: nn.Module, planned: Collection[nn.Module] = (), prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be chains and are not inside of others, nor of planned ones, nor around one."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if any(child in each.modules() for each in planned):
            continue
        if may_be_planned(child) and not any(each in child.modules() for each in planned):
            yield name, child
        else:
            yield from _outermost(child, planned, f"{name}.")
