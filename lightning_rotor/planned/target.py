"""Which submodule of a model to plan: the one with most of a training step's compute."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from lightning_rotor.capture.cuts import check_module
from lightning_rotor.errors import ModelError, ProfilingError
from lightning_rotor.private.torch_names import FakeTensorMode, backward_number, packet_of
from lightning_rotor.private.values import tensors_in, tree_leaves
from lightning_rotor.profiling.dry_run import AssumedValues, fake_copy, without_trace

# ---------------------------------- Where a training step computes: the FLOPs of every submodule, counted in a dry run.

# A loop that waits for a value would never end, since values do not change.
_MOST_READS = 1000
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class StepCompute:
    """FLOPs of the forwards in one training step.

    Attributes:
        plannable: By dotted name of a submodule, those inside its forwards that a plan could run: in training mode,
            with gradients enabled and flowing through its output.
        calls: How often each of them runs.
        assumed_values: How often the step asked for a value that a dry run cannot know.
    """

    total: int
    plannable: Mapping[str, int]
    assumed_values: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """The part of the step's FLOPs that a plan for this submodule would reach, between 0 and 1."""
        return self.plannable.get(name, 0) / self.total


def measure_compute(
    model: nn.Module,
    inputs: Any,
    step: Callable[[Any, Any], Any],
    *,
    replacements: Mapping[int, Any] | None = None,
) -> StepCompute:
    """FLOPs of a training step by submodule, counted on copies without values of the model and ``inputs``.

    ``step`` is called once, with these copies. By ``id``, ``replacements`` stand in them for objects that a dry run
    must not touch. Raises ``ProfilingError`` if the step cannot run without values.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> measure_compute(net, torch.ones(3, 8), lambda copy, batch: copy(batch)).plannable["0"]
        192
    """
    try:
        found = _count(model, inputs, step, replacements or {})
    except Exception as error:  # whatever a step does that was written for real tensors
        reason = f"its dry run fails with {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
    else:
        reason = "" if found.total else "its dry run computes nothing"
    gc.collect()  # the copies hold each other, and what looks for tensors (a recording does) would still find them
    if reason:
        raise ProfilingError(reason)
    return found


def _count(
    model: nn.Module, inputs: Any, step: Callable[[Any, Any], Any], replacements: Mapping[int, Any]
) -> StepCompute:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with without_trace(device, model.modules()), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        duplicate, inputs = fake_copy((model, inputs), mode, replacements)
        with _Count(duplicate) as count:
            step(duplicate, inputs)
    return StepCompute(count.flops, dict(count.plannable), count.assumed_values, dict(count.calls))


class _Count(AssumedValues):
    """Counts operations, and knows whose forward runs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flops = 0
        self.plannable: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._running: list[str] = []
        for name, module in model.named_modules():
            # Not a hook: those do not fire when a forward is called by its name.
            module.__dict__["forward"] = partial(self._call, name, module, module.forward)

    def _call(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        learning = module.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        recursive, before = name in self._running, self.flops
        self._running.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._running.pop()
        if learning and not recursive and any(tensor.requires_grad for tensor in _outputs_in(output)):
            self.plannable[name] += self.flops - before
            self.calls[name] += 1
        return output

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assumed = self.assumed_values
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.assumed_values > _MOST_READS:
            raise ProfilingError(f"it asks for values more than {_MOST_READS} times")
        if self.assumed_values == assumed and backward_number() is None:  # not in a backward
            self.flops += _flops(func, args, kwargs or {}, result)
        return result


def _outputs_in(value: Any) -> list[torch.Tensor]:
    """Tensors in an output, also in one of the user's own classes."""
    return [*tensors_in(value), *tensors_in([getattr(leaf, "__dict__", leaf) for leaf in tree_leaves(value)])]


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    name = packet_of(func).__name__
    if name.startswith("_scaled_dot_product") and "backward" not in name:  # the registry knows the kernels of GPUs only
        query, key, value = args[:3]
        pairs = query.shape[:-1].numel() * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    if name in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        weights = args[1:5] if name == "mkldnn_rnn_layer" else args[1]
        return int(2 * args[0].shape[:2].numel() * sum(weight.numel() for weight in weights))
    formula = flop_registry.get(packet_of(func))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.is_view:
        return 0
    return sum(tensor.numel() for tensor in tensors_in(result))


# -------------------------------------------------------------------- Which submodule to plan.

# A part of the compute that is worth a word, or another choice; and one that is worth a plan beside others.
_NOTABLE = 0.2
_HEAVY = 0.05
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A submodule to plan, by its dotted name (``""`` is the model itself), and why this one."""

    name: str
    module: nn.Module
    reason: str

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


def _computes(module: nn.Module) -> bool:
    """True if a module can be planned, and has a parameter, which metrics have not."""
    return next(module.parameters(), None) is not None and may_be_planned(module)


class TargetSearch:
    """Finds the submodule to plan when the user names none: by parameters at first, by compute once it is known.

    With ``may_be_whole`` the model has a forward of its own. It is the choice if that reaches much more compute than
    any submodule, or if there is none.
    """

    def __init__(self, model: nn.Module, *, may_be_whole: bool) -> None:
        self._model = model
        self._may_be_whole = may_be_whole
        self._compute: StepCompute | None = None
        self.unknown_because = "its compute is not known yet"
        self._refused: set[str] = set()

    def count(self, compute: Callable[[], StepCompute]) -> None:
        """Rank by the compute of a training step from now on, if that can be counted."""
        try:
            self._compute = compute()
        except ProfilingError as error:
            self.unknown_because = str(error)

    def refuse(self, target: Target) -> None:
        """Never find this one again, as it has turned out to be no chain."""
        self._refused.add(target.name)

    def best(self) -> Target | None:
        """The submodule to plan, or None if there is none. Of submodules that do the same, the outermost."""
        names = [
            name
            for name, module in self._model.named_modules()
            if name and name not in self._refused and self._weight(name) and may_be_planned(module)
        ]
        # The first of the largest: a module comes before what is in it.
        best = max(names, key=self._weight, default=None)
        may_be_whole = self._may_be_whole and "" not in self._refused and self._weight("") > 0
        if may_be_whole and (best is None or self._share("") >= self._share(best) + _NOTABLE):
            best = ""
        return None if best is None else self._target(best)

    def all(self) -> list[Target]:
        """:meth:`best`, and whatever else is worth a plan, apart from it; empty if there is nothing."""
        best = self.best()
        if best is None:
            return []
        beside = self._shares([best.name], self._refused)
        return [best, *(self._target(name) for name, share in beside if share >= _HEAVY)]

    def calls(self, names: Collection[str]) -> int:
        """How many calls of these modules a step has; 0 if unknown."""
        return 0 if self._compute is None else sum(self._compute.calls.get(name, 0) for name in names)

    def _shares(self, planned: Collection[str], refused: Collection[str] = ()) -> list[tuple[str, float]]:
        """Other submodules that could be planned, and their shares of the compute, largest first; empty if unknown."""
        if self._compute is None or "" in planned:
            return []
        shares = [(name, self._share(name)) for name, _ in _outermost(self._model, planned, refused)]
        return sorted((entry for entry in shares if entry[1] >= 0.01), key=lambda entry: entry[1], reverse=True)

    def what_is_left_out(self, targets: Sequence[Target]) -> str | None:
        """A message about other submodules if they have much of the compute, and what to do about it, or None."""
        left_out = self._shares([target.name for target in targets])
        if sum(share for _, share in left_out) < _NOTABLE:
            return None
        named = [f"{name!r} ({100 * share:.0f} %)" for name, share in left_out[:_MOST_NAMES]]
        rest = left_out[_MOST_NAMES:]
        if rest:
            named.append(f"{len(rest)} more ({100 * sum(share for _, share in rest):.0f} %)")
        refused = " and ".join(sorted(repr(name) if name else "the model itself" for name in self._refused))
        planned = ", ".join(f"{target.place}, {target.reason}" for target in targets)
        return (
            f"plans {planned}; not planned, and kept as without a limit: {', '.join(named)}. "
            + (f"{refused} could not be planned as a whole, the log says why. " if refused else "")
            + "To have them planned, let nn.Modules do this work, and name them: "
            'RotorCallback(module=["...", "..."])'
        )

    def _weight(self, name: str) -> int:
        if self._compute is not None:
            return self._compute.plannable.get(name, 0)
        parameters = self._model.get_submodule(name).parameters()
        return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)

    def _share(self, name: str) -> float:
        return 0.0 if self._compute is None else self._compute.share(name)

    def _target(self, name: str) -> Target:
        if self._compute is None:
            reason = (
                f"{self._weight(name):,} trainable parameters, the most that can be planned ({self.unknown_because})"
            )
        else:
            reason = f"{100 * self._share(name):.0f} % of the FLOPs of a training step's forward"
            if assumed := self._compute.assumed_values:
                reason += f" ({assumed} value{'s' * (assumed > 1)} that the step asks for taken as 1)"
        return Target(name, self._model.get_submodule(name), reason)


def _outermost(
    module: nn.Module, planned: Collection[str] = (), refused: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that may be chains and are not inside of others, nor in planned ones or around one, nor refused."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if name in planned:
            continue
        if name not in refused and may_be_planned(child) and not any(each.startswith(f"{name}.") for each in planned):
            yield name, child
        else:
            yield from _outermost(child, planned, refused, f"{name}.")


def may_be_planned(module: nn.Module) -> bool:
    """True if nothing speaks against planning a module, as far as can be told without its input."""
    try:
        check_module(module)
    except ModelError:
        return False
    return True
