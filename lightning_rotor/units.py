"""Sizes in bytes: reading what users write, and printing what they can read."""

import math
import re
from dataclasses import dataclass

from lightning_rotor.errors import OptionError, UnitError

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SPEEDS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_DURATIONS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)
# Below it nothing can be trained, and a limit is a number of GiB, or a share, whose unit was forgotten.
_LEAST_MEANT_BYTES = 1024
_FORMS = (
    'bytes as an integer, "700MiB", "10GB", a fraction of the device such as 0.8 or "80%", or None for what is free'
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit as the user wrote it: a number of bytes, or a fraction of a device of unknown size. One field is set."""

    size_bytes: int | None = None
    fraction: float | None = None

    def on_device(self, total_bytes: int) -> int:
        """The limit in bytes on a device with ``total_bytes`` of memory."""
        if self.size_bytes is not None:
            return self.size_bytes
        return int((self.fraction or 0.0) * total_bytes)

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return format_bytes(self.size_bytes)
        return f"{self.fraction:.0%} of the device"


def parse_limit(value: int | float | str | None) -> MemoryLimit | None:
    """Read a memory limit, or None for what is free on the device; ``UnitError`` if the value is none of these.

    An integer counts bytes (so does a whole float above 1). A float in (0, 1] and a percentage are fractions of the
    device. A string takes the suffixes B, kB/MB/GB/TB (powers of 1000) and KiB/MiB/GiB/TiB (powers of 1024), in any
    case.

    Example:
        >>> parse_limit("1.5 GiB").size_bytes
        1610612736
        >>> parse_limit("80%").fraction
        0.8
    """
    if value is None:
        return None
    # True is an int, and would be a limit of one byte.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UnitError(f"memory limit is {value!r} of type {type(value).__name__}: expected {_FORMS}")
    number, unit = _split(value) if isinstance(value, str) else (value, "")
    # "0.8" is what a command line or a YAML file hands over for 0.8.
    is_float = isinstance(value, float) or (isinstance(value, str) and unit == "" and "." in value)
    if unit == "%" or (is_float and number <= 1):
        fraction = number / 100 if unit == "%" else float(number)
        if not 0 < fraction <= 1:
            raise UnitError(
                f"memory limit {value!r} is no fraction of a device: expected more than 0 and at most 1 (or 100%)"
            )
        return MemoryLimit(fraction=fraction)
    size = number * _FACTORS[unit]
    # Half a byte, as of "0.5B", would be a limit of none.
    if not math.isfinite(size) or size < 1:
        raise UnitError(f"memory limit {value!r} is not a positive size: expected {_FORMS}")
    # 1.5 is no fraction and no count: a unit was forgotten, and which one cannot be guessed.
    if unit == "" and size != int(size):
        raise UnitError(f"memory limit {value!r} has no unit and is no whole number of bytes: expected {_FORMS}")
    return MemoryLimit(size_bytes=int(size))


def parse_bytes(value: int | str) -> int:
    """Read a size in bytes, as :func:`parse_limit` does, without fractions of a device.

    Raises:
        UnitError: The value is no positive size.
    Example:
        >>> parse_bytes("2 GiB")
        2147483648
    """
    limit = parse_limit(value)
    if limit is None or limit.size_bytes is None:
        raise UnitError(f'size is {value!r}: expected bytes as an integer, or a size such as "700MiB" or "10GB"')
    return limit.size_bytes


def in_blocks(size_bytes: int, block_bytes: int) -> int:
    """Bytes that an allocator counts for ``size_bytes`` if all its blocks are multiples of ``block_bytes``."""
    # Rounded up without a float, which is not exact above 2**53.
    return -(-size_bytes // block_bytes) * block_bytes


def size_unit(size_bytes: float) -> tuple[int, str]:
    """The binary unit in which a size reads best, and its name."""
    return next((unit for unit in _SIZES if abs(size_bytes) >= unit[0]), (1, "B"))


def duration_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a duration reads best, and its name."""
    return next((unit for unit in _DURATIONS if abs(seconds) >= unit[0]), _DURATIONS[-1])


def format_bytes(size_bytes: float) -> str:
    """Print a size with three or four significant digits and a binary unit.

    Example:
        >>> format_bytes(2_900_000_000)
        '2.70 GiB'
    """
    factor, unit = size_unit(size_bytes)
    size = size_bytes / factor
    if unit == "B":
        digits = 0
    # A hundredth of a TiB is more than any device can miss.
    elif abs(size) < 10 or unit == "TiB":
        digits = 2
    elif abs(size) < 100:
        digits = 1
    else:
        digits = 0
    return f"{size:.{digits}f} {unit}"


def format_speed(bytes_per_second: float) -> str:
    """Print what a link carries with a decimal unit, as vendors of links do.

    Example:
        >>> format_speed(50e9)
        '50 GB/s'
    """
    factor, unit = next((each for each in _SPEEDS if bytes_per_second >= each[0]), (1.0, "B/s"))
    return f"{bytes_per_second / factor:.3g} {unit}"


def formatted_apart(size_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Two sizes as :func:`format_bytes` prints them, to the byte if they would read the same."""
    one, other = format_bytes(size_bytes), format_bytes(other_bytes)
    if one == other:
        return f"{size_bytes:,} bytes", f"{other_bytes:,} bytes"
    return one, other


def is_positive_integer(value: object) -> bool:
    """True if a user's value counts something; True and False do not."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def require_positive_integer(name: str, value: object, default: int) -> None:
    """``OptionError`` if the value of an option counts nothing."""
    if not is_positive_integer(value):
        raise OptionError(f"{name} is {value!r}: expected a positive integer, such as the default {default}")


def hint_of_units(limit_bytes: int) -> str:
    """A sentence for an error about a limit that somebody may have meant in another unit; empty for other limits."""
    if not 0 < limit_bytes < _LEAST_MEANT_BYTES:
        return ""
    count = "1 is one byte" if limit_bytes == 1 else f"{limit_bytes} is {limit_bytes} bytes"
    return f'. A number without a unit counts bytes: {count}, "{limit_bytes}GiB" has a unit, and 1.0 is all of a device'


def format_seconds(seconds: float) -> str:
    """Print a duration with a unit that keeps it readable, such as ``'3.2 ms'``."""
    factor, unit = duration_unit(seconds)
    return f"{seconds / factor:.3g} {unit}"


def _split(text: str) -> tuple[float, str]:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UnitError(f"memory limit {text!r} cannot be read: expected {_FORMS}")
    number, unit = float(match[1]), match[2].lower()
    if unit != "%" and unit not in _FACTORS:
        raise UnitError(
            f"memory limit {text!r} has the unknown unit {match[2]!r}: "
            "expected one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, %"
        )
    return number, unit
