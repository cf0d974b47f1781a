"""Paths: calls that wait for their backward at the same time, in the order of their forwards.

A step with two towers has one path of two calls. A step that runs a module's backward before it calls the next one has
two paths of one call each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lightning_rotor.chain import Chain
from lightning_rotor.planned.running_step import Call, CallKey
from lightning_rotor.profiling import Profile

Path: TypeAlias = tuple[CallKey, ...]
"""Calls that wait for their backward together, in the order of their forwards."""


def path_of(calls: Sequence[Call]) -> Path:
    """The calls as they return in every step."""
    return tuple(call.key for call in calls)


def are_alike(path: Path, other: Path) -> bool:
    """True if two paths are of the same modules, called in the same order with any sizes."""
    # By identity: two modules of one training may have equal stages, sizes and names of stages.
    return [key.plans for key in path] == [key.plans for key in other]


def kept_bytes(chains: Iterable[Chain]) -> int:
    """Bytes that calls keep if nothing is recomputed."""
    return sum(chain.kept_bytes for chain in chains)


def copied_bytes(profiles: Iterable[Profile]) -> int:
    """Bytes that the forwards of some calls copy."""
    return sum(profile.copied_bytes for profile in profiles)


def demand_bytes(path: Path) -> int:
    """Bytes that a path holds if nothing is recomputed."""
    held_bytes = 0
    for key in path:
        entry = key.entry()
        if entry is not None:
            # At least 1, so that of paths which keep nothing the longer one is planned first.
            held_bytes += max(entry.profile.chain.kept_bytes, 1)
    return held_bytes


def has_room(calls: Sequence[Call]) -> bool:
    """True if the plan of each call that waits was made for no less than what the earlier ones hold."""
    held_bytes = 0
    for call in calls:
        # None: the call was planned by itself, as if nothing waited.
        room_bytes = call.prepared.room_bytes
        if room_bytes is None or held_bytes > room_bytes:
            return False
        held_bytes += call.prepared.held_bytes
    return True
