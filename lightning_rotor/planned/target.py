"""Which submodule of a model to plan: the one with most of a training step's compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from lightning_rotor.capture.cuts import check_module
from lightning_rotor.errors import ModelError, ProfilingError
from lightning_rotor.planned.compute import StepCompute

# A part of the compute that is worth a word, or another choice.
_NOTABLE = 0.2
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A submodule to plan.

    Attributes:
        name: Dotted name in the model; ``""`` is the model itself.
        module: The submodule.
        reason: Why this one.
    """

    name: str
    module: nn.Module
    reason: str

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return repr(self.name) if self.name else "the model itself"

    def __str__(self) -> str:
        return f"{self.place} ({type(self.module).__name__}): {self.reason}"


def named_target(model: nn.Module, name: str) -> Target:
    """The submodule that the user named.

    Raises:
        ModelError: It does not exist, or can be no chain.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ModelError(
            f"{type(model).__name__} has no submodule {name!r}: expected a dotted name{_closest(model, name)}. "
            f"Submodules that can be planned: {_listed(model)}"
        ) from None
    check_module(module)
    return Target(name, module, "as named")


def _closest(model: nn.Module, name: str) -> str:
    plannable = [path for path, module in model.named_modules() if path and _computes(module)]
    close = get_close_matches(name, plannable, n=1)
    return f", such as {close[0]!r}" if close else ""


def _listed(model: nn.Module) -> str:
    return ", ".join(repr(path) for path, module in _outermost(model, "") if _computes(module)) or "none"


def _computes(module: nn.Module) -> bool:
    """Whether it can be planned, and has a parameter, which metrics have not."""
    return next(module.parameters(), None) is not None and may_be_planned(module)


class TargetSearch:
    """Finds the submodule to plan when the user names none: by parameters at first, by compute once it is known.

    Args:
        model: Its submodules are the candidates.
        may_be_whole: The model has a forward of its own, and is the choice if that reaches much more compute than any
            submodule, or if there is none.
    """

    def __init__(self, model: nn.Module, *, may_be_whole: bool) -> None:
        self._model = model
        self._may_be_whole = may_be_whole
        self._compute: StepCompute | None = None
        self._unknown_because = "its compute is not known yet"
        self._refused: set[str] = set()

    def best_by_compute(self, compute: Callable[[], StepCompute]) -> Target | None:
        """:meth:`best`, from now on by the compute of a training step if that can be counted."""
        try:
            self._compute = compute()
        except ProfilingError as error:
            self._unknown_because = str(error)
        return self.best()

    def do_without(self, reason: str) -> None:
        """Rank by parameters, since the compute cannot be measured."""
        self._unknown_because = reason

    def refuse(self, target: Target) -> None:
        """Never find this one again: it has turned out to be no chain."""
        self._refused.add(target.name)

    def best(self) -> Target | None:
        """The submodule to plan, or None if there is none. Of submodules that do the same, the outermost."""
        candidates = [
            (name, module)
            for name, module in self._model.named_modules()
            if name and name not in self._refused and self._weight(name, module) and may_be_planned(module)
        ]
        # The first of the largest: a module comes before what is in it.
        best = max(candidates, key=lambda candidate: self._weight(*candidate), default=None)
        if best is None or self._whole_reaches_more_than(best[0]):
            best = ("", self._model) if self._whole_may_be_planned() else best
        if best is None:
            return None
        name, module = best
        return Target(name, module, self._reason(name, module))

    def left_out(self, target: Target) -> list[tuple[str, float]]:
        """Submodules beside the target that could be planned, and their shares of the compute, the largest first.

        Empty if they are not worth a word, or if the compute is not known.
        """
        if self._compute is None or not target.name:
            return []
        shares = [(name, self._compute.share(name)) for name, _ in _outermost(self._model, target.name)]
        shares = sorted((entry for entry in shares if entry[1] >= 0.01), key=lambda entry: entry[1], reverse=True)
        return shares if sum(share for _, share in shares) >= _NOTABLE else []

    def what_is_left_out(self, target: Target) -> str | None:
        """A message about :meth:`left_out` and what to do about it, or None."""
        left_out = self.left_out(target)
        if not left_out:
            return None
        named = [f"{name!r} ({100 * share:.0f} %)" for name, share in left_out[:_MOST_NAMES]]
        rest = left_out[_MOST_NAMES:]
        if rest:
            named.append(f"{len(rest)} more ({100 * sum(share for _, share in rest):.0f} %)")
        refused = " and ".join(sorted(repr(name) if name else "the model itself" for name in self._refused))
        return (
            f"plans {target.place} alone, {target.reason}; not planned, and kept as without a limit: "
            f"{', '.join(named)}. "
            + (f"{refused} could not be planned as a whole, the log says why. " if refused else "")
            + "To have them planned as one chain, let one nn.Module call them all in its forward, let training_step "
            "call that module, and name "
            'it: RotorCallback(module="..."). Or name the one that takes the most memory'
        )

    def _weight(self, name: str, module: nn.Module) -> int:
        return trainable_parameters(module) if self._compute is None else self._compute.plannable.get(name, 0)

    def _whole_may_be_planned(self) -> bool:
        return self._may_be_whole and "" not in self._refused and self._weight("", self._model) > 0

    def _whole_reaches_more_than(self, name: str) -> bool:
        return self._compute is not None and self._compute.share("") >= self._compute.share(name) + _NOTABLE

    def _reason(self, name: str, module: nn.Module) -> str:
        if self._compute is None:
            count = trainable_parameters(module)
            return f"{count:,} trainable parameters, the most that can be planned ({self._unknown_because})"
        guessed = ""
        if assumed := self._compute.assumed_values:
            guessed = f" ({assumed} value{'s' * (assumed > 1)} that the step asks for taken as 1)"
        return f"{100 * self._compute.share(name):.0f} % of the FLOPs of a training step's forward{guessed}"


def _outermost(module: nn.Module, avoid: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be chains and are not inside of others.

    Neither the one to avoid, nor what it is in or what is in it.
    """
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if avoid and name == avoid:
            continue
        if may_be_planned(child) and not f"{avoid}.".startswith(f"{name}."):
            yield name, child
        else:
            yield from _outermost(child, avoid, f"{name}.")


def may_be_planned(module: nn.Module) -> bool:
    """Whether nothing speaks against planning a module, as far as can be told without its input."""
    try:
        check_module(module)
    except ModelError:
        return False
    return True


def trainable_parameters(module: nn.Module) -> int:
    """Number of parameters that learn."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
