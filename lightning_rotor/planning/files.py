"""Plans as JSON: a schedule, what it was made for, and nothing measured in seconds.

A plan holds for one model with one input signature on one kind of device: a file names every stage with the tensors
that it reads, saves and hands on, and a chain that differs in any of it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from typing_extensions import Self

from lightning_rotor.chain import Chain, StageIdentity
from lightning_rotor.errors import PlanError, ScheduleError
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import Simulation, simulate

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The entries of a :class:`~lightning_rotor.planning.Plan` that files and checkpoints hold: all but its chain."""

    schedule: Schedule
    budget_bytes: int
    gradients_exist: bool
    lingering_bytes: int
    slots: int

    @classmethod
    def from_plain(cls, record: Mapping[str, Any]) -> Self:
        """Record from what :meth:`to_plain` wrote; else a ScheduleError, KeyError, TypeError or ValueError."""
        return cls(
            Schedule.parse(record["schedule"]),
            int(record["budget_bytes"]),
            bool(record["gradients_exist"]),
            int(record["lingering_bytes"]),
            int(record["slots"]),
        )

    def to_plain(self) -> dict[str, Any]:
        """The record as strings, numbers and flags by name."""
        return {field: getattr(self, field) for field in self.__slots__} | {"schedule": str(self.schedule)}

    def simulate(self, chain: Chain) -> Simulation:
        """Simulation on a chain; a ScheduleError if the schedule does not belong to it."""
        return simulate(
            chain, self.schedule, gradients_exist=self.gradients_exist, lingering_bytes=self.lingering_bytes
        )


def save_record(record: PlanRecord, chain: Chain, path: Path | str) -> None:
    """Write a record of a chain's plan to a file, which is replaced if it exists."""
    content = {
        "format": _FORMAT,
        "fingerprint": chain.fingerprint,
        "device": chain.device,
        "stages": [_as_json(stage) for stage in chain.identity],
        **record.to_plain(),
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_record(path: Path | str, chain: Chain) -> PlanRecord:
    """Read a record for a chain; a PlanError says what differs first if it was made for another model or device."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise PlanError(f"{path} has format {content['format']!r}: expected {_FORMAT}, written by this version")
        saved = [_from_json(stage) for stage in content["stages"]]
        record = PlanRecord.from_plain(content)
        device, fingerprint = content["device"], content["fingerprint"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        reason = error if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        raise PlanError(f"{path} holds no plan ({reason}): expected a file that Plan.save has written") from error
    if fingerprint != chain.fingerprint:
        raise made_for_another(path, saved, device, chain)
    return record


def made_for_another(what: object, saved: Sequence[StageIdentity], device: str, chain: Chain) -> PlanError:
    """PlanError for a plan that was made for other stages, or another device, than a chain's."""
    difference = _difference(saved, device, chain)
    return PlanError(f"{what} was made for something else: {difference}. Plan for this model and input anew")


def _as_json(stage: StageIdentity) -> dict[str, Any]:
    return {
        "name": stage.name,
        "takes": stage.takes,
        "output_bytes": stage.output_bytes,
        "options": stage.options,
        "skips": stage.skips,
    }


def _from_json(stage: dict[str, Any]) -> StageIdentity:
    return StageIdentity(
        stage["name"],
        tuple(stage["takes"]),
        stage["output_bytes"],
        tuple((name, saved) for name, saved in stage["options"]),
        tuple((tuple(uses), size) for uses, size in stage["skips"]),
    )


def _difference(saved: Sequence[StageIdentity], device: str, chain: Chain) -> str:
    """The first difference between a chain and what a plan was made for: what the plan says, and what there is."""
    if device != chain.device:
        return f"device {device!r}, and this chain was measured on {chain.device!r}"
    alike = [(stage.name, stage.takes) for stage in (saved[0], chain.identity[0])]
    estimated = [not any(stage.takes for stage in stages[1:]) for stages in (saved, chain.identity)]
    if alike[0] == alike[1] and len(saved) == len(chain) and estimated[0] != estimated[1]:
        then_so, now_so = ("estimated from other shapes" if guess else "measured" for guess in estimated)
        shapes = ", ".join(saved[0].takes)
        return f"what stages cost at {shapes} was {then_so}, and is {now_so} (measure(sample) measures a shape)"
    for number, (then, now) in enumerate(zip_longest(saved, chain.identity)):
        if then is None or now is None or then.name != now.name:
            there, here = ("no such stage" if each is None else repr(each.name) for each in (then, now))
            return f"stage {number} was {there} of {len(saved)}, and is {here} of {len(chain)}"
        if then.takes != now.takes:
            return f"stage {now.name!r} took {', '.join(then.takes)}, and takes {', '.join(now.takes)}"
        for what in ("output_bytes", "options", "skips"):
            if getattr(then, what) != getattr(now, what):
                return f"{what} of stage {now.name!r} was {getattr(then, what)}, and is {getattr(now, what)}"
    return "the file was changed after it was written"
