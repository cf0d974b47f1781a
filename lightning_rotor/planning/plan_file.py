"""The file of a plan: JSON that names every stage with the tensors that it reads, saves and hands on.

It has nothing measured in seconds. A plan holds for one model with one input signature on one kind of device, so a
chain that differs in any of it is refused, and the message says what differs first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_rotor.chain import Chain, StageIdentity
from lightning_rotor.errors import PlanError, ScheduleError
from lightning_rotor.schedule import shorten

_FORMAT = 1
# Has a link, for plans that may move what stages hold. All others can still be read by older versions.
_FORMAT_WITH_LINK = 2
_MOST_BITS = 63


def content_of(chain: Chain, plain_plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan with what tells its chain from others."""
    # The fingerprint tells whether a chain is another one, and the identity says in which stage.
    identity = [asdict(stage) for stage in chain.identity]
    return {
        "fingerprint": chain.fingerprint,
        "device": chain.device,
        "stages": identity,
        **plain_plan,
    }


def write(path: Path | str, content: Mapping[str, Any]) -> None:
    """Write a plan's content to a file, which is replaced if it exists."""
    version = _FORMAT
    if "link" in content:
        version = _FORMAT_WITH_LINK
    versioned = {"format": version, **content}
    text = json.dumps(versioned, indent=1)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def read(path: Path | str) -> Mapping[str, Any]:
    """The content of a file of this version; a ``PlanError`` of another version, many others of a damaged file."""
    text = Path(path).read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    if content["format"] not in (_FORMAT, _FORMAT_WITH_LINK):
        # Of a damaged file it may be anything, of any length.
        version = shorten(repr(content["format"]))
        raise PlanError(
            f"{path} has format {version}: expected {_FORMAT} or {_FORMAT_WITH_LINK}, written by this version"
        )
    return content


@contextmanager
def damage_as_plan_errors(path: Path | str) -> Iterator[None]:
    """Errors of whoever reads a damaged file, as a ``PlanError`` that says so."""
    try:
        yield
    except PlanError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # All that code meets which takes a value of another kind from a file. Others are faults of our own.
        reason: object = shorten(f"{type(error).__name__}: {error}")
        if isinstance(error, ScheduleError):
            # It says itself what is wrong where, and has shortened what it quotes.
            reason = error
        message = f"{path} holds no plan ({reason}): expected a file that Plan.save has written"
        raise PlanError(message) from error


def check_chain(what: object, content: Mapping[str, Any], chain: Chain) -> None:
    """Raise a ``PlanError`` unless a plan's content was made for a chain like this one."""
    # Read even where the fingerprint agrees: a file whose stages are damaged holds no plan.
    stages = [StageIdentity(**with_tuples(stage)) for stage in content["stages"]]
    if content["fingerprint"] != chain.fingerprint:
        difference = _difference(stages, content["device"], chain)
        raise PlanError(f"{what} was made for something else: {difference}. Plan for this model and input anew")


def whole_number(record: Mapping[str, Any], name: str) -> int:
    """A size or a count out of a file."""
    value = record[name]
    # Files are written by anybody: NumPy would wrap a larger number around, and True is an int to Python.
    if type(value) is not int or not 0 <= value < 2**_MOST_BITS:
        raise ValueError(f"{name} is {shorten(repr(value))}, expected a whole number of at most {_MOST_BITS} bits")
    return value


def with_tuples(value: Any) -> Any:
    """A value from a file with tuples in the place of lists, at any depth."""
    # JSON has no tuples, and identities of stages are compared with those of a chain, which has no lists.
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(with_tuples, value))
    return value


def _difference(saved: Sequence[StageIdentity], device: str, chain: Chain) -> str:
    """The first difference between a chain and what a plan was made for: what the plan says, and what there is."""
    if device != chain.device:
        return f"device {device!r}, and this chain was measured on {chain.device!r}"
    current = chain.identity
    # First, since bounds differ from measurements in every stage: a difference in sizes would send users to the model.
    if _differ_in_measurement(saved, current):
        then_so = _origin(saved)
        now_so = _origin(current)
        shapes = ", ".join(saved[0].takes)
        return f"what stages cost at {shapes} was {then_so}, and is {now_so} (measure(sample) measures a shape)"
    # From the front: one stage more or less shifts all behind it, so the first difference is the one to look at.
    for number, (then, now) in enumerate(zip_longest(saved, current)):
        if then is None or now is None or then.name != now.name:
            there = _name_or_none(then)
            here = _name_or_none(now)
            return f"stage {number} was {there} of {len(saved)}, and is {here} of {len(chain)}"
        # Before sizes, which follow from it.
        if then.takes != now.takes:
            took = ", ".join(then.takes)
            takes = ", ".join(now.takes)
            return f"stage {now.name!r} took {took}, and takes {takes}"
        for field in ("output_bytes", "options", "skips"):
            before, after = getattr(then, field), getattr(now, field)
            if before != after:
                return f"{field} of stage {now.name!r} was {before}, and is {after}"
    return "the file was changed after it was written"


def _differ_in_measurement(saved: Sequence[StageIdentity], current: Sequence[StageIdentity]) -> bool:
    """True if one of two chains for the same input was measured, and the other follows from other shapes."""
    input_then = saved[0].name, saved[0].takes
    input_now = current[0].name, current[0].takes
    if input_then != input_now or len(saved) != len(current):
        return False
    return _origin(saved) != _origin(current)


def _origin(stages: Sequence[StageIdentity]) -> str:
    # Only a measurement knows which tensors the stages behind the first take.
    is_measured = any(stage.takes for stage in stages[1:])
    return "measured" if is_measured else "estimated from other shapes"


def _name_or_none(stage: StageIdentity | None) -> str:
    if stage is None:
        return "no such stage"
    return repr(stage.name)
