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
from lightning_rotor.private.torch_names import INNER, is_compiler_wrapper, module_inside
from lightning_rotor.profiling.step_compute import StepCompute
from lightning_rotor.stages.submodules import submodule_of

# A share of the compute that is worth a word to the user, or another choice.
_NOTABLE = 0.2
# A share that is worth a plan beside others.
_HEAVY = 0.05
# Of a smaller share nothing could be saved that pays for measuring it, also where all shares are small.
_LEAST = 0.005
# Shares that are listed among those left out.
_LISTED = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """A submodule to plan.

    Attributes:
        name: Dotted; ``""`` is the model itself.
        module: The submodule.
        reason: Why this one, for messages.
        is_unseen: Its compute is not known before it runs in the first step.
        unused_outputs: Numbers of the tensors, among those that it returns, that the step makes nothing of.
    """

    name: str
    module: nn.Module
    reason: str
    is_unseen: bool = False
    unused_outputs: frozenset[int] = frozenset()

    @property
    def place(self) -> str:
        """Name of the submodule for messages."""
        return repr(self.name) if self.name else "the model itself"

    def __str__(self) -> str:
        return f"{self.place} ({type(self.module).__name__}): {self.reason}"


def check_names(names: object, *, several: bool = True) -> str | list[str] | None:
    """Names of modules as a user gave them, or None if none were given; ``ModelError`` if they are no names."""
    if names is None or isinstance(names, str):
        return names
    listed = list(names) if isinstance(names, (list, tuple)) else None
    if several and listed and all(isinstance(name, str) for name in listed):
        return listed
    found = f"a {type(names).__name__}"
    if listed is not None:
        found += f" of {len(listed)}"
    raise ModelError(
        f"module is {found}: expected the dotted name of a module, as in model.named_modules(), such as "
        f'module="net.blocks"{", or a list of names" if several else ""}'
    )


def named_target(model: nn.Module, name: str) -> Target:
    """The submodule that the user named; ``ModelError`` if it does not exist, or can be no chain."""
    try:
        module = submodule_of(model, name)
    except AttributeError:
        raise _no_submodule(model, name) from None
    if is_compiler_wrapper(module):
        # What torch.compile returned stands in the module's place, and a plan is for the module.
        module = module_inside(module)
        name = f"{name}.{INNER}".lstrip(".")
    check_module(module)
    return Target(name, module, "as named")


def _no_submodule(model: nn.Module, name: str) -> ModelError:
    """The error for a name that the model does not have; it lists names that could be meant."""
    plannable = []
    for path, module in model.named_modules():
        # Modules without parameters are left out: nobody means a metric or a loss.
        if path and _computes(module):
            plannable.append(path)
    close = get_close_matches(name, plannable, n=1)
    closest = f", such as {close[0]!r}" if close else ""
    outermost = []
    for path, module in _outermost(model):
        if _computes(module):
            outermost.append(repr(path))
    listed = ", ".join(outermost) or "none"
    return ModelError(
        f"{type(model).__name__} has no submodule {name!r}: expected a dotted name{closest}. "
        f"Submodules that can be planned: {listed}"
    )


def may_be_planned(module: nn.Module) -> bool:
    """True if nothing speaks against planning a module, as far as can be told without its input."""
    # Where the user has named the module this error is theirs to read. Here it is one candidate less.
    try:
        check_module(module)
    except ModelError:
        return False
    return True


def _computes(module: nn.Module) -> bool:
    """True if a module can be planned, and has a parameter, which metrics have not."""
    has_parameter = next(module.parameters(), None) is not None
    return has_parameter and may_be_planned(module)


class TargetSearch:
    """Finds the submodules to plan by the compute of a training step, as far as that is known.

    Args:
        model: The model.
        may_be_whole: The model itself is the choice if its forward reaches much more compute than any submodule.
    Attributes:
        no_chains: Names of modules that have turned out to be no chain. Their parts are targets in their place.
        is_open: True while the step may compute in places that are not known.
    """

    def __init__(self, model: nn.Module, *, may_be_whole: bool) -> None:
        self._model = model
        self._may_be_whole = may_be_whole
        self._compute: StepCompute | None = None
        self._calls: Collection[str] = ()
        self._unseen_because = "its compute is not known yet"
        self.no_chains: set[str] = set()
        self.is_open = True

    def count(self, compute: Callable[[], StepCompute]) -> None:
        """Rank by the compute of a training step from now on, if that can be counted."""
        try:
            self._compute = compute()
        except ProfilingError as error:
            # Not an error: training must begin, and its first step shows what a dry run would have told.
            self._unseen_because = f"found in the first step, whose compute could not be counted before: {error}"
            return
        stop = self._compute.stopped_at
        if stop:
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
        # Modules that were met are ranked by compute. Unmet ones may have all of the compute or none, so each is a
        # target, and those that the step does not call cost nothing.
        met = [name for name, _ in self._met(self._model)]
        seen = self._heavy(met)
        if self._is_better_whole(seen):
            return [self._target("")]
        unseen = list(self._unmet(self._model)) if self.is_open else []
        nothing_inside = not seen and not unseen
        if nothing_inside and self.is_open and self._may_be_whole and "" not in self.no_chains:
            # Nothing but single layers: the model's own forward is what can be cut, if the step calls it.
            if self._weight("") > 0:
                unseen = [""]
        return [*map(self._target, seen), *map(self._unseen_target, unseen)]

    def best(self) -> Target | None:
        """The one submodule with most compute, or most trainable parameters where that is unknown; None if none."""
        return max(
            self.targets(),
            key=lambda target: self._weight(target.name),
            default=None,
        )

    def calls(self, names: Collection[str]) -> int:
        """Number of calls of these modules in a step, as far as that is known."""
        # A real step goes before the dry run, which may not have come to its end.
        if self._calls:
            return sum(name in names for name in self._calls)
        if self._compute is None:
            return 0
        return sum(self._compute.calls[name] for name in names)

    @property
    def held_bytes(self) -> int | None:
        """Bytes that a step makes, and holds when its backward begins; None if that is not known."""
        return None if self._compute is None else self._compute.held_bytes

    @property
    def messages(self) -> dict[str, set[frozenset[int]]]:
        """Ranks of the processes with which submodules exchange messages in a step, as far as that is known."""
        return {} if self._compute is None else dict(self._compute.messages)

    def _is_better_whole(self, seen: Sequence[str]) -> bool:
        """True if the model's own forward reaches much more than its best submodule."""
        compute = self._compute
        if not self._may_be_whole or "" in self.no_chains:
            return False
        if compute is None or not compute.calls[""]:
            return False
        # The dry run ended inside of the model's own forward, so the rest of it may hold more than any submodule.
        if "" in compute.unfinished or not seen:
            return True
        return self._share("") >= self._share(seen[0]) + _NOTABLE

    def _met(self, module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Outermost submodules that may be planned, and in which the dry run has computed something."""
        if self._compute is None:
            return
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            # A module that cannot be a chain is no end: its children may be.
            was_met = self._compute.plannable[name] > 0
            if was_met and name not in self.no_chains and may_be_planned(child):
                yield name, child
            else:
                yield from self._met(child, f"{name}.")

    def _unmet(self, module: nn.Module, prefix: str = "") -> Iterator[str]:
        """Submodules at any depth that may be planned and hold parameters, and in which nothing was computed."""
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            was_met = self._compute is not None and self._compute.plannable[name] > 0
            was_refused = name in self.no_chains
            if was_met and not was_refused:
                continue
            if not was_met and not was_refused and _computes(child):
                yield name
            yield from self._unmet(child, f"{name}.")

    def _heavy(self, names: Sequence[str]) -> list[str]:
        """Modules apart from each other that have much of the compute by themselves or with their equals."""
        assert self._compute is not None or not names
        groups: dict[tuple[str, type], list[str]] = {}
        for name in self._apart([*names, *self._skipped(names)]):
            groups.setdefault(self._group_of(name), []).append(name)
        # Of twelve equal blocks each has 8 % of the compute, and the thirteenth layer may have as much. They are
        # judged together, since planning half of equal blocks helps nobody.
        shares = {group: sum(map(self._share, members)) for group, members in groups.items()}
        # Where no group is heavy, the heaviest still is: it is all there is to plan.
        least = max(min(_HEAVY, max(shares.values(), default=0.0)), _LEAST)
        heavy: list[str] = []
        for group, members in groups.items():
            if shares[group] >= least or self._is_unfinished(members):
                heavy += members
        return sorted(heavy, key=self._share, reverse=True)

    def _group_of(self, name: str) -> tuple[str, type]:
        """Name of a module's parent, and its class: equal for equal blocks."""
        parent = name.rpartition(".")[0]
        return parent, type(submodule_of(self._model, name))

    def _skipped(self, names: Sequence[str]) -> list[str]:
        """Equals of met modules that the dry run has not called. Which layers are skipped may be a draw."""
        groups = {self._group_of(name) for name in names}
        parents = dict.fromkeys(parent for parent, _ in map(self._group_of, names))
        skipped = []
        for parent in parents:
            children = submodule_of(self._model, parent).named_children()
            for key, child in children:
                name = f"{parent}.{key}".lstrip(".")
                is_equal = (parent, type(child)) in groups
                if is_equal and name not in names and name not in self.no_chains and may_be_planned(child):
                    skipped.append(name)
        return skipped

    def _is_unfinished(self, names: Sequence[str]) -> bool:
        """True if the dry run has ended inside of one of these modules, so that their compute is not all known."""
        return self._compute is not None and not self._compute.unfinished.isdisjoint(names)

    def _apart(self, names: Sequence[str]) -> list[str]:
        """Of modules that hold each other under several names, the one with most compute; the outer one of equals."""
        modules = {name: submodule_of(self._model, name) for name in names}
        inside = {name: set(module.modules()) for name, module in modules.items()}

        def rank(name: str) -> tuple[int, int]:
            return -self._weight(name), -len(inside[name])

        apart: list[str] = []
        # The one with most compute comes first, so that a module inside of it is left out and not the other way round.
        for name in sorted(names, key=rank):
            overlaps = False
            for other in apart:
                overlaps |= modules[name] in inside[other]
                overlaps |= modules[other] in inside[name]
            if not overlaps:
                apart.append(name)
        return apart

    # ---------------------------------------------------------------- the rest

    def left_out(self, planned: Collection[str]) -> list[tuple[str, float]]:
        """Modules that are not planned, and their shares of the compute, largest first; empty if that is not known."""
        # Shares of a step that was followed to a part only would be shares of that part.
        if self._compute is None or "" in planned or self._compute.stopped_at:
            return []
        modules = [submodule_of(self._model, name) for name in planned]
        shares = []
        for name, _ in _outermost(self._model, modules):
            share = self._share(name)
            if share >= _LISTED:
                shares.append((name, share))
        return sorted(shares, key=lambda entry: entry[1], reverse=True)

    def what_is_left_out(self, targets: Sequence[Target]) -> str | None:
        """A message about other submodules if they have much of the compute, and what to do about it, or None."""
        left_out = self.left_out([target.name for target in targets])
        if sum(share for _, share in left_out) < _NOTABLE:
            return None
        # With the reason for each: whoever reads that something is left out wants to know why it is not the rest.
        planned = ", ".join(f"{target.place}, {target.reason}" for target in targets)
        refused = ""
        if self.no_chains:
            places = sorted(repr(name) if name else "the model itself" for name in self.no_chains)
            refused = f". {' and '.join(places)} could not be planned as a whole, the log says why"
        return (
            f"plans {planned}; not planned, and kept as without a limit: {spelled_shares(left_out)}. "
            "To have them planned, let nn.Modules do this work, and name them: "
            f'RotorCallback(module=["...", "..."]){refused}'
        )

    # ---------------------------------------------------------------- the compute of one module

    def _weight(self, name: str) -> int:
        """FLOPs that a plan could cover; trainable parameters where those are not known."""
        if self._compute is not None:
            return self._compute.plannable[name]
        parameters = submodule_of(self._model, name).parameters()
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    def _share(self, name: str) -> float:
        """Share of the FLOPs of the step's forward; 0 if those are not known."""
        return 0.0 if self._compute is None else self._compute.share(name)

    def _target(self, name: str) -> Target:
        """A target that the dry run has met."""
        assert self._compute is not None
        reason = f"{100 * self._share(name):.0f} % of the FLOPs of a training step's forward"
        stop = self._compute.stopped_at
        if stop:
            reason += f", as far as its dry run could follow it ({stop})"
        assumed = self._compute.assumed_values
        if assumed:
            values = "values" if assumed > 1 else "value"
            reason += f" ({assumed} {values} that the step asks for taken as 1)"
        unused = self._compute.returned.unused(name)
        return Target(name, submodule_of(self._model, name), reason, unused_outputs=unused)

    def _unseen_target(self, name: str) -> Target:
        """A target that nobody has seen run."""
        # Nothing is known of its outputs, so all of them are taken for used.
        module = submodule_of(self._model, name)
        return Target(name, module, self._unseen_because, is_unseen=True)


def spelled_shares(shares: Sequence[tuple[str, float]]) -> str:
    """Names of modules with their parts of the compute."""
    return ", ".join(f"{name!r} ({100 * share:.0f} %)" for name, share in shares)


def holds(outer: nn.Module, inner: nn.Module) -> bool:
    """True if a module lies in another one, or is it."""
    # A metric of torchmetrics equals any module, so that ``in`` a list tells nothing.
    return any(module is inner for module in outer.modules())


def _outermost(
    module: nn.Module,
    planned: Collection[nn.Module] = (),
    prefix: str = "",
) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be chains and are not inside of others, nor of planned ones, nor around one."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if any(holds(each, child) for each in planned):
            continue
        holds_planned = any(holds(child, each) for each in planned)
        if may_be_planned(child) and not holds_planned:
            yield name, child
        else:
            yield from _outermost(child, planned, f"{name}.")
