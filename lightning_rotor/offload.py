"""Where plans may move what stages hold, as users write it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_rotor.errors import OptionError
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
        bandwidth: Bytes per second that the link carries, or two such numbers: out, and back. By default it is
            measured.
    Raises:
        OptionError: None of these forms.
    Example:
        >>> Offload("host", limit="20GiB", bandwidth=(50e9, 50e9))
        Offload(target='host', limit='20GiB', bandwidth=(50000000000.0, 50000000000.0))
    """

    target: str
    limit: int | str | None = None
    bandwidth: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.target != _HOST and self.folder is None:
            raise OptionError(f"offload is {self.target!r}: expected {_FORMS}")
        # For its error alone: ``repr`` shows the limit as the user wrote it.
        if self.limit is not None:
            parse_bytes(self.limit)
        if self.bandwidth is not None:
            numbers = self._speeds()
            if len(numbers) != 2 or not all(math.isfinite(number) and number > 0 for number in numbers):
                raise OptionError(
                    f"bandwidth of offload is {self.bandwidth!r}: expected a positive number of bytes per second, two "
                    "of them (out, and back), or None to measure it"
                )
            # Lists, as from YAML, have no hash.
            object.__setattr__(self, "bandwidth", numbers)

    @property
    def folder(self) -> Path | None:
        """The folder of the file; None for the host's memory."""
        path = self.target.removeprefix(_DISK)
        return Path(path) if path and path != self.target else None

    @property
    def limit_bytes(self) -> int | None:
        """The limit as a number; None if it was left out."""
        return None if self.limit is None else parse_bytes(self.limit)

    def link(self, room_bytes: int) -> Link | None:
        """The link with the speed that was given, to so much memory; None if the speed is to be measured."""
        if self.bandwidth is None:
            return None
        out, back = self._speeds()
        return Link(out, back, room_bytes=room_bytes)

    def _speeds(self) -> tuple[float, ...]:
        given = self.bandwidth
        return tuple(given) if isinstance(given, Sequence) else (float(given or 0), float(given or 0))

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
