"""One chain from several of the same model, number by number: sizes that were never measured, from those that were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from lightning_rotor.chain import Chain, StageCost


class UnlikeChainsError(Exception):
    """Chains that differ in more than sizes, so that nothing can be said from one about the other."""


def combined(
    chains: Sequence[Chain],
    *,
    of_bytes: Callable[[Sequence[int]], int],
    of_seconds: Callable[[Sequence[float]], float],
) -> Chain:
    """A chain whose sizes and durations follow from several chains'; ``UnlikeChainsError`` if those are unlike."""

    def one(values: Sequence[Any], name: str) -> Any:
        """One value from those of several chains; ``name`` of the field says what it counts."""
        first = values[0]
        if isinstance(first, StageCost):
            values = list(map(_spelled_out, values))
        if is_dataclass(first) and not isinstance(first, type):
            parts: dict[str, Any] = {}
            for field in fields(first):
                own = [getattr(value, field.name) for value in values]
                parts[field.name] = one(own, field.name)
            if isinstance(first, StageCost):
                # Each is rounded by itself, and the stage's must stay the largest.
                peaks = [option.discard_peak_bytes or 0 for option in parts["options"]]
                parts["discard_peak_bytes"] = max([parts["discard_peak_bytes"], *peaks])
            return replace(first, **parts)
        if name == "takes":
            # Shapes, which are not those of any measurement. A chain without any is known to be estimated.
            return ()
        if isinstance(first, tuple) and all(len(value) == len(first) for value in values):
            groups = zip(*values, strict=True)
            return tuple(one(group, name) for group in groups)
        # By the names of fields, so that a new size or duration of a chain needs no line here.
        if name.endswith("_bytes") and all(isinstance(value, int) for value in values):
            return of_bytes(values)
        if name.endswith("_seconds"):
            return float(of_seconds(values))
        # Names, numbers of skips and flags must agree: else these are other stages.
        if any(value != first for value in values):
            raise UnlikeChainsError(f"{name}: {first!r} and others")
        return first

    chain: Chain = one(chains, "")
    return chain


def _spelled_out(stage: StageCost) -> StageCost:
    """The stage with the peaks that only some measurements have of their own, so that all have as many figures."""
    options = []
    for option in stage.options:
        spelled_out = replace(
            option,
            accumulating=option.backward_peaks(gradients_exist=True),
            discard_peak_bytes=stage.discard_peak_of(option),
        )
        options.append(spelled_out)
    return replace(stage, options=tuple(options))
