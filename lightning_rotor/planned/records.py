"""Measurements and plans as plain types, so that a checkpoint can hold them, and back on the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_rotor.chain import BackwardPeaks, Chain, Option, Skip, StageCost
from lightning_rotor.devices import kind_of
from lightning_rotor.errors import RotorError
from lightning_rotor.planned.prepared import Costs, Prepared
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planning import Plan
from lightning_rotor.planning.plan import from_plain
from lightning_rotor.planning.plan_file import with_tuples
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain_profile import profile_over
from lightning_rotor.stages.sequential import Stage

Record: TypeAlias = dict[str, Any]
"""A measurement, and perhaps a plan, in plain types."""
SEAL = "seal"
"""Key under which a saved state keeps the digest of the rest."""


def model_fingerprint(module: nn.Module) -> str:
    """Sixteen hexadecimal digits that name the classes, parameters and buffers of a module, but not their values."""
    # Not their values: those are what training changes, and costs do not depend on them.
    modules = []
    for name, submodule in module.named_modules():
        kind = type(submodule)
        modules.append((name, kind.__module__, kind.__qualname__))
    tensors = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensors.append((name, tuple(tensor.shape), str(tensor.dtype)))
    return _digest((modules, tensors))


def call_fingerprint(signature: Signature, variants: str) -> str:
    """Sixteen hexadecimal digits of what a measurement holds for: stages before merging, plain settings, device."""
    device = signature.device
    # Seconds, and workspaces of libraries, are those of one model of a device and of one version of torch.
    machine = kind_of(device).model_name(device)
    modes = (signature.autocast, *signature.modes)
    settings = signature.shapes, signature.kinds, modes
    names = [stage.name for stage in signature.cut.stages]
    return _digest((names, (settings, variants), machine, torch.__version__))


def record_of(call: str, entry: Costs | Prepared) -> Record:
    """A measurement and the plan made from it, for the call of this fingerprint."""
    profile = entry.profile
    # Lists in the place of tuples: torch.load with weights_only, and JSON, know no others.
    chain = json.loads(json.dumps(asdict(profile.chain)))
    record: Record = {
        "call": call,
        "group_sizes": list(profile.group_sizes),
        "remembered": profile.remembered,
        "drawn": profile.drawn,
        "chain": chain,
    }
    if isinstance(entry, Prepared):
        plan = entry.plan
        record["plan"] = {**plan.to_plain(), "solve_seconds": plan.solve_seconds}
    return record


def recalled(record: Record, stages: Sequence[Stage]) -> tuple[Profile, Plan | None] | None:
    """The measurement and the plan of a record, for a model's stages; None if it cannot be meant for them."""
    try:
        chain = _chain(record["chain"])
        profile = profile_over(
            stages,
            chain,
            group_sizes=record["group_sizes"],
            remembered=record["remembered"],
            drawn=record["drawn"],
        )
        plan = None
        if "plan" in record:
            plan = from_plain(record["plan"], chain)
        return profile, plan
    except (RotorError, KeyError, TypeError, ValueError, IndexError):
        # Of another version of this package, of a module with other code, or damaged. Or variants of a compiled stage
        # were measured, which are compiled by measuring alone.
        return None


def seal_of(saved: Mapping[str, Any]) -> str | None:
    """A digest of a saved state, by which one that was damaged or changed is known; None if it is no plain data."""
    rest = {key: value for key, value in saved.items() if key != SEAL}
    try:
        return _digest(json.dumps(rest, sort_keys=True))
    except (TypeError, ValueError, RecursionError):
        # What comes from a damaged file may be anything.
        return None


def _chain(record: Record) -> Chain:
    record = with_tuples(record)
    stages = []
    for stage in record["stages"]:
        options = tuple(map(_option, stage["options"]))
        stages.append(StageCost(**{**stage, "options": options}))
    skips = tuple(Skip(**skip) for skip in record["skips"])
    return Chain(**{**record, "stages": tuple(stages), "skips": skips})


def _option(record: Record) -> Option:
    peaks = record["accumulating"]
    if peaks is not None:
        peaks = BackwardPeaks(**peaks)
    return Option(**{**record, "accumulating": peaks})


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
