"""Where plans may move what stages hold, as users write it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rotor.errors import OptionError, UnitError
from lightning_rotor.link import Link
from lightning_rotor.units import format_bytes, parse_bytes

_DISK = "disk:"
_HOST = "host"
_FORMS = (
    '"host" or "host:20GiB" for pinned memory of the host, from a GPU; "disk:/a/folder" for a file, from the CPU; or '
    "None, which moves nothing"
)


@dataclass(frozen=True, slots=True)
class Offload:
    """Another memory that plans may move what stages hold to.

    Args:
        target: ``"host"``, the host's memory, for training on a GPU; or ``"disk:/a/folder"``, a file in a folder, for
            training on the CPU.
        limit: Most that may be there at a time, in bytes or as ``"20GiB"``. By default half of the host's memory that
            is free, or what the disk has free.
        bandwidth: Bytes per second that the link carries, or two such numbers: out, and back. As a text, ``"50GB/s"``
            or ``"170/410GB/s"``. By default it is measured.
    Raises:
        OptionError: None of these forms.
    Example:
        >>> Offload("host", limit="20GiB", bandwidth=(50e9, 50e9))
        Offload(target='host', limit='20GiB', bandwidth=(50000000000.0, 50000000000.0))
    """

    target: str
    limit: int | str | None = None
    bandwidth: float | Sequence[float] | str | None = None

    def __post_init__(self) -> None:
        # The folder itself is looked at when training begins: settings may be read on another machine.
        if self.target != _HOST and self.folder is None:
            raise OptionError(f"offload is {self.target!r}: expected {_FORMS}")
        # For its error alone: ``repr`` shows the limit as the user wrote it.
        if self.limit is not None:
            parse_bytes(self.limit)
        if self.bandwidth is not None:
            # Lists, as from YAML, have no hash.
            object.__setattr__(self, "bandwidth", _speeds(self.bandwidth))

    @property
    def folder(self) -> Path | None:
        """The folder of the file; None for the host's memory."""
        path = self.target.removeprefix(_DISK)
        return Path(path) if path and path != self.target else None

    @property
    def limit_bytes(self) -> int | None:
        """The limit as a number; None if it was left out."""
        return None if self.limit is None else parse_bytes(self.limit)

    def link(self, room_bytes: int | None) -> Link | None:
        """The link with the speed that was given, to so much memory; None if the speed is to be measured."""
        if self.bandwidth is None:
            return None
        out, back = _speeds(self.bandwidth)
        return Link(out, back, room_bytes=room_bytes)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", at most {format_bytes(parse_bytes(self.limit))}"
        return f"{self.target}{limit}"


def parse_offload(value: str | Offload | None) -> Offload | None:
    """Read where plans may move what stages hold; ``OptionError`` if the value is none of the forms.

    Example:
        >>> parse_offload("host:20GiB").limit_bytes
        21474836480
        >>> parse_offload("disk:/scratch").folder
        PosixPath('/scratch')
    """
    if value is None or isinstance(value, Offload):
        return value
    if not isinstance(value, str):
        raise OptionError(f"offload is {value!r} of type {type(value).__name__}: expected {_FORMS}")
    # Of the host alone: the name of a folder may hold a colon, too.
    target, colon, size = value.partition(":")
    if target == _HOST and colon:
        return Offload(_HOST, size)
    return Offload(value)


def parse_speed(text: str) -> tuple[float, float]:
    """Read bytes per second, out and back; ``OptionError`` if the text is no speed.

    Example:
        >>> parse_speed("50GB/s")
        (50000000000.0, 50000000000.0)
        >>> parse_speed("170/410GB/s")
        (170000000000.0, 410000000000.0)
    """
    given = _SPEED.fullmatch(text)
    # A size without "/s" would be taken for the room on the other side.
    if given is None:
        raise _no_speed(text)
    out, back, unit = given["out"], given["back"] or given["out"], given["unit"]
    try:
        # The units of sizes, so that GB and GiB mean here what they mean there.
        return float(parse_bytes(f"{out}{unit}")), float(parse_bytes(f"{back}{unit}"))
    except UnitError:
        raise _no_speed(text) from None


def is_speed(text: str) -> bool:
    """True if a text is meant as a speed, and not as a place."""
    return text.rstrip().endswith("/s") and ":" not in text


_SPEED = re.compile(r"\s*(?P<out>[0-9.e+]+)(?:/(?P<back>[0-9.e+]+))?\s*(?P<unit>[A-Za-z]*)/s\s*")


def _speeds(given: float | Sequence[float] | str) -> tuple[float, float]:
    """Bytes per second out and back; ``OptionError`` if they are none."""
    if isinstance(given, str):
        return parse_speed(given)
    numbers: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else (given, given)
    if len(numbers) != 2 or not all(map(_is_speed_number, numbers)):
        raise _no_speed(given)
    out, back = numbers
    return float(out), float(back)


def _is_speed_number(value: object) -> bool:
    # True counts as 1.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def _no_speed(given: object) -> OptionError:
    return OptionError(
        f"bandwidth of offload is {given!r}: expected a positive number of bytes per second, two of them (out, and "
        'back), a text such as "50GB/s" or "170/410GB/s", or None to measure it'
    )
