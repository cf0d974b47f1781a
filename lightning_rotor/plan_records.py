"""Measurements and plans as plain types, so that a checkpoint can hold them, and back on the same model.

A record speaks of stages by their place in the model's cut, never of objects, and says for which model, call and machine it holds. Where any of
that differs, it is not used and the model is measured again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.errors import RotorError
from lightning_rotor.planning import Plan
from lightning_rotor.planning.records import PlanRecord
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.moved import group_sizes, profile_over, remembered_places
from lightning_rotor.sequential import Stage

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
        record["plan"] = PlanRecord.of(plan).to_plain() | {"solve_seconds": plan.solve_seconds}
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
    return None if record is None else PlanRecord.from_plain(record).plan(chain, solve_seconds=record["solve_seconds"])


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
