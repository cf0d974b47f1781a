"""One chain from several of the same model, number by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from lightning_rotor.chain import Chain, StageCost


class UnlikeChainsError(Exception):
    """Chains that differ in more than sizes, so that nothing can be said from one about the other."""


def combined(
    chains: Sequence[Chain], *, of_bytes: Callable[[Sequence[int]], int], of_seconds: Callable[[Sequence[float]], float]
) -> Chain:
    """A chain whose every size and duration follows from those of several chains; all else must be equal. It says no shapes.

    Args:
        chains: At least one.
        of_bytes: The size that takes the place of these, in bytes.
        of_seconds: The duration that takes the place of these.
    Raises:
        UnlikeChainsError: They have other stages, options or skips.
    """
    found = _Combination(of_bytes, of_seconds).of(chains, "")
    assert isinstance(found, Chain)
    return found


@dataclass(frozen=True, slots=True)
class _Combination:
    of_bytes: Callable[[Sequence[int]], int]
    of_seconds: Callable[[Sequence[float]], float]

    def of(self, values: Sequence[Any], name: str) -> Any:
        """One value from several of the same kind."""
        if isinstance(values[0], StageCost):
            values = _alike(values)
        first = values[0]
        if is_dataclass(first) and not isinstance(first, type):
            parts = {
                each.name: self.of([getattr(value, each.name) for value in values], each.name) for each in fields(first)
            }
            if isinstance(first, StageCost):
                peaks = [option.discard_peak_bytes or 0 for option in parts["options"]]
                parts["discard_peak_bytes"] = max([parts["discard_peak_bytes"], *peaks])
            return type(first)(**parts)
        if name == "takes":  # shapes, which are not those of any measurement
            return ()
        if isinstance(first, tuple):
            if any(len(value) != len(first) for value in values):
                raise UnlikeChainsError(f"{name}: {first!r} and others")
            return tuple(self.of(group, name) for group in zip(*values, strict=True))
        if name.endswith("_bytes") and all(isinstance(value, int) for value in values):
            return self.of_bytes(values)
        if name.endswith("_seconds"):
            return float(self.of_seconds(values))
        if any(value != first for value in values):
            raise UnlikeChainsError(f"{name}: {first!r} and others")
        return first


def _alike(stages: Sequence[StageCost]) -> Sequence[StageCost]:
    """The same costs with peaks written out that only some of the measurements have of their own."""
    options = [option for stage in stages for option in stage.options]
    apart = [
        tuple(option.accumulating is None for option in options),
        tuple(o.discard_peak_bytes is None for o in options),
    ]
    if not any(len(set(each)) > 1 for each in apart):
        return stages
    return [
        replace(
            stage,
            options=tuple(
                replace(
                    option,
                    accumulating=option.backward_peaks(gradients_exist=True),
                    discard_peak_bytes=stage.discard_peak_of(option),
                )
                for option in stage.options
            ),
        )
        for stage in stages
    ]
