"""The plans of one module, one for each signature of its input. Those used last stay."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.errors import RotorError
from lightning_rotor.execution.executor import Executor
from lightning_rotor.planned.known_cuts import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.files import PlanRecord
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain import group_sizes, profile_over, remembered_places
from lightning_rotor.schedule import Leaf
from lightning_rotor.stages.sequential import Stage

MAX_PLANS = 64
"""Plans that are kept by default, each for another signature."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that belongs to one input signature.

    Attributes:
        profile: Its costs.
        plan: None until there is one, and once it no longer holds.
        executor: Runs the plan.
        estimated: The costs follow from those of other shapes.
        runs_plainly: The plan recomputes nothing, and the module's own forward keeps inside it.
    """

    profile: Profile
    plan: Plan | None = None
    executor: Executor | None = None
    estimated: bool = False
    runs_plainly: bool = False

    @classmethod
    def of(cls, signature: Signature, profile: Profile, plan: Plan, *, estimated: bool = False) -> Prepared:
        """Ready to run."""
        cut = signature.cut
        executor = Executor(
            profile.stages, profile.chain, plan.schedule, profile.states, root=cut.module, inputs=cut.inputs
        )
        return cls(profile, plan, executor, estimated, _may_run_plainly(signature, profile.chain, plan))

    def without_plan(self) -> Prepared:
        """The costs alone."""
        return Prepared(self.profile, estimated=self.estimated)


def _may_run_plainly(signature: Signature, chain: Chain, plan: Plan) -> bool:
    """True if the module's own forward stays within the plan, which recomputes nothing.

    Code that is written out keeps intermediate values in variables until it returns; the members of an
    ``nn.Sequential`` do not. Under autocast it keeps a cast copy of every weight.
    """
    if any(not isinstance(item, Leaf) or item.option for item in plan.schedule.items):
        return False
    if any(enabled for enabled, _ in signature.autocast):
        return False
    passing_bytes = 0
    if signature.cut.way != "sequential":
        passing_bytes = sum(stage.keep.forward_peak_bytes - stage.keep.saved_bytes for stage in chain)
    return plan.peak_bytes + passing_bytes <= plan.budget_bytes


class PlanCache:
    """What is ready for which signature.

    Args:
        most: So many are kept; those that were not used for longest go first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prepared: OrderedDict[Signature, Prepared] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prepared)

    def __contains__(self, signature: Signature) -> bool:
        return signature in self._prepared

    def __iter__(self) -> Iterator[tuple[Signature, Prepared]]:
        return iter(self._prepared.items())

    @property
    def latest(self) -> tuple[Signature, Prepared]:
        """What was used last."""
        return next(reversed(self._prepared.items()))

    def use(self, signature: Signature) -> Prepared | None:
        """What is ready, now used last."""
        found = self._prepared.get(signature)
        if found is not None:
            self._prepared.move_to_end(signature)
        return found

    def put(self, signature: Signature, prepared: Prepared) -> None:
        """Add or replace; it is now used last."""
        self._prepared[signature] = prepared
        self._prepared.move_to_end(signature)
        while len(self._prepared) > self._most:
            self._prepared.popitem(last=False)

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures that no call can have any more."""
        for signature in [signature for signature in self._prepared if not keep(signature)]:
            del self._prepared[signature]

    def unplan(self, keep: Callable[[Plan], bool]) -> None:
        """Plan anew, when they come again, all whose plan is not to be kept."""
        for signature, prepared in self._prepared.items():
            if prepared.plan is not None and not keep(prepared.plan):
                self._prepared[signature] = prepared.without_plan()

    def clear(self) -> None:
        """Forget everything."""
        self._prepared.clear()


# ----------------------------------------------------------------------------------------------------
# Measurements and plans as plain types, so that a checkpoint can hold them, and back on the same model.


_Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Recalled:
    """What a record says, about the stages of a live model.

    Attributes:
        profile: As it was measured.
        plan: As it was planned, or None if it was only measured.
    """

    profile: Profile
    plan: Plan | None


def model_fingerprint(module: nn.Module) -> str:
    """Sixteen hexadecimal digits that name the classes, parameters and buffers of a module, but not their values."""
    modules = [(name, type(each).__module__, type(each).__qualname__) for name, each in module.named_modules()]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    return _digest((modules, tensors))


def call_fingerprint(stages: Sequence[Stage], signature: Any, device: torch.device) -> str:
    """Sixteen hexadecimal digits that name what a measurement holds for.

    Args:
        stages: As the model was cut, before any were merged.
        signature: Shapes and settings, all of them plain.
        device: Where the call runs.
    """
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _digest(([stage.name for stage in stages], signature, machine, torch.__version__))


def record_of(call: str, stages: Sequence[Stage], profile: Profile, plan: Plan | None) -> dict[str, Any]:
    """A measurement, and the plan made from it, in plain types.

    Args:
        call: From :func:`call_fingerprint`.
        stages: As the model was cut, before any were merged.
        profile: What was measured.
        plan: What was planned, if anything.
    """
    record: dict[str, Any] = {
        "call": call,
        "group_sizes": group_sizes(stages, profile.stages),
        "remembered": remembered_places(profile),
        "chain": _listed(asdict(profile.chain)),
    }
    if plan is not None:
        record["plan"] = plan.record.to_plain() | {"solve_seconds": plan.solve_seconds}
    return record


def recall(record: _Record, stages: Sequence[Stage]) -> Recalled | None:
    """What a record says about a model's stages, or None if it cannot be meant for them.

    Args:
        record: From :func:`record_of`.
        stages: As the model is cut now.
    """
    try:
        profile = _profile(record, stages)
        return Recalled(profile, _plan(record.get("plan"), profile.chain))
    except (RotorError, KeyError, TypeError, ValueError, IndexError):
        return None  # of another version of this package, or damaged


def _profile(record: _Record, stages: Sequence[Stage]) -> Profile:
    sizes, remembered = record["group_sizes"], record["remembered"]
    return profile_over(stages, _chain(record["chain"]), group_sizes=sizes, remembered=remembered)


def _plan(record: _Record | None, chain: Chain) -> Plan | None:
    return (
        None if record is None else Plan.of(PlanRecord.from_plain(record), chain, solve_seconds=record["solve_seconds"])
    )


def _chain(record: _Record) -> Chain:
    stages = [
        StageCost(**{**stage, "options": tuple(map(_option, stage["options"])), "takes": tuple(stage["takes"])})
        for stage in record["stages"]
    ]
    skips = [
        Skip(**{**skip, "uses": tuple(skip["uses"]), "gradient_bytes": tuple(skip["gradient_bytes"])})
        for skip in record["skips"]
    ]
    return Chain(**{**record, "stages": tuple(stages), "skips": tuple(skips)})


def _option(record: _Record) -> Option:
    accumulating = record["accumulating"]
    peaks = None if accumulating is None else BackwardPeaks(**accumulating)
    return Option(**{**record, "saved_skips": tuple(record["saved_skips"]), "accumulating": peaks})


def _listed(value: Any) -> Any:
    """Lists in the place of tuples."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
