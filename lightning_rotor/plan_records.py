"""Measurements and plans as plain types, so that a checkpoint can hold them, and back on the same model.

A record speaks of stages by their place in the model's cut, never of objects, and says for which model, call and machine it holds. Where any of
that differs, it is not used and the model is measured again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.errors import RotorError
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.storages import merged
from lightning_rotor.schedule import Schedule
from lightning_rotor.sequential import Stage
from lightning_rotor.simulator import simulate
from lightning_rotor.state import Statistic, state_of

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
        "group_sizes": _group_sizes(stages, profile.stages),
        "remembered": [
            [place for place, (_, module) in enumerate(stage.submodules()) if module in state.remembered]
            for stage, state in zip(profile.stages, profile.states, strict=True)
        ],
        "chain": _listed(asdict(profile.chain)),
    }
    if plan is not None:
        record["plan"] = {
            "schedule": str(plan.schedule),
            "budget_bytes": plan.budget_bytes,
            "solve_seconds": plan.solve_seconds,
            "gradients_exist": plan.gradients_exist,
            "lingering_bytes": plan.lingering_bytes,
            "slots": plan.slots,
        }
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
    chain = _chain(record["chain"])
    starts = [0]
    for size in record["group_sizes"]:
        starts.append(starts[-1] + size)
    if starts[-1] != len(stages) or len(chain) != len(starts) - 1:
        raise ValueError("the record has other stages than the model")
    together = merged(stages, [range(start, end) for start, end in pairwise(starts)])
    if chain.names != tuple(stage.name for stage in together):
        raise ValueError("the record names other stages than the model")
    scratch: dict[tuple[nn.Module, str], Statistic] = {}
    states = []
    for stage, places in zip(together, record["remembered"], strict=True):
        modules = [module for _, module in stage.submodules()]
        states.append(state_of(stage, [modules[place] for place in places], scratch))
    return Profile(chain, together, tuple(states))


def _plan(record: _Record | None, chain: Chain) -> Plan | None:
    if record is None:
        return None
    schedule = Schedule.parse(record["schedule"])
    circumstances = {"gradients_exist": record["gradients_exist"], "lingering_bytes": record["lingering_bytes"]}
    return Plan(
        chain=chain,
        schedule=schedule,
        budget_bytes=record["budget_bytes"],
        simulation=simulate(chain, schedule, **circumstances),
        solve_seconds=record["solve_seconds"],
        slots=record["slots"],
        **circumstances,
    )


def _group_sizes(stages: Sequence[Stage], together: Iterable[Stage]) -> list[int]:
    sizes, rest = [], iter(stages)
    for stage in together:
        modules = len(stage.modules)
        sizes.append(0)
        while modules > 0:
            modules -= len(next(rest).modules)
            sizes[-1] += 1
    return sizes


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
