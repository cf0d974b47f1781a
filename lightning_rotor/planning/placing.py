"""Points for the items that move: where each gives its memory back, and where it takes it again.

Copies run beside the computation, so what is given back late and taken again early is waited for least. Memory is free
until the budget is reached::

    level    budget ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
                          ╱╲╱▔▔▔▔▔▔╲╱╲                 with every item away for as long as it can be
                     ╱▔╲╱▔            ╲
    points          0   1   2  ...
             item 0 │■■■■■■■│───────────────│■■■■■│    stays while there is room, and is back when there is again

Items that the budget never asks for stay. What comes back first is what is needed first.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Move, Schedule
from lightning_rotor.simulator import Conditions, Levels, Simulation, levels

# Sizes do not quite add up where neighbours share a boundary. Then less than the budget is aimed at, so many times.
_ATTEMPTS = 6


def placed(
    chain: Chain,
    schedule: Schedule,
    wanted: Sequence[int],
    budget_bytes: int,
    conditions: Conditions,
) -> Simulation | None:
    """A schedule that moves some of the wanted items, as many as the budget asks for, and as long as it must.

    Args:
        chain: Costs of the stages.
        schedule: Its own moves are not looked at.
        wanted: Numbers of items that may move, rising.
        budget_bytes: As for :func:`lightning_rotor.planning.plan`.
        conditions: With a link.
    Returns:
        Its simulation; None if it does not fit whatever moves, or there is no room at the other end of the link.
    """
    # All away for as long as can be takes least. So what does not fit then fits in no way.
    longest = _longest(chain, schedule, wanted, conditions)
    if longest.simulation.peak_bytes > budget_bytes:
        return None
    if not longest.simulation.schedule.moves:
        return longest.simulation
    aim_bytes = budget_bytes
    for _ in range(_ATTEMPTS):
        moves = _placed_moves(longest, aim_bytes)
        shorter = levels(chain, Schedule(schedule.items, moves), conditions).simulation
        if shorter.peak_bytes <= budget_bytes:
            return shorter
        aim_bytes -= shorter.peak_bytes - budget_bytes
    return longest.simulation


def _longest(chain: Chain, schedule: Schedule, wanted: Sequence[int], conditions: Conditions) -> Levels:
    """Every wanted item away for as long as it can be; the first ones alone, if the other memory has no more room."""
    link = conditions.get("link")
    count = len(schedule.items)

    def first(items: int) -> Levels:
        moves = [Move.whole(number, count) for number in wanted[:items]]
        return levels(chain, Schedule(schedule.items, tuple(moves)), conditions)

    every = first(len(wanted))
    if link is None or link.holds(every.simulation.host_bytes):
        return every
    # More items take more of the other memory, so halving finds the most that it holds.
    low = 0
    high = len(wanted)
    while high - low > 1:
        middle = (low + high) // 2
        if link.holds(first(middle).simulation.host_bytes):
            low = middle
        else:
            high = middle
    return first(low)


def _placed_moves(longest: Levels, aim_bytes: int) -> tuple[Move, ...]:
    """Moves given back as late, and taken again as early, as there is room for."""
    points = len(longest.peak_bytes)
    room = [aim_bytes - level for level in longest.peak_bytes]
    size = longest.freed_bytes
    released, used = _release_late(size, room)
    moves = []
    earliest = points // 2
    # From the last item on, which is needed first.
    for number in sorted(released, reverse=True):
        needed = points - 1 - number
        fetch = needed
        # Copies back are in order, and an item that is there again before it was given back need not go.
        while fetch > max(earliest, released[number] + 1) and used[fetch - 1] + size[number] <= room[fetch - 1]:
            fetch -= 1
        for point in range(fetch, needed):
            used[point] += size[number]
        moves.append(Move(number, released[number], fetch))
        earliest = fetch
    return tuple(reversed(moves))


def _release_late(size: dict[int, int], room: list[int]) -> tuple[dict[int, int], list[int]]:
    """By item that must go, the point at which it does; and by point, what others still take that have not gone yet."""
    points = len(room)
    released: dict[int, int] = {}
    used = [0] * points
    staying: list[int] = []
    for point in range(points):
        own = points - 1 - point
        if own in staying:
            staying.remove(own)
        while staying and sum(size[number] for number in staying) > room[point]:
            # The copy that began first is done first.
            released[staying.pop(0)] = point
        used[point] = sum(size[number] for number in staying)
        if point in size and point < points // 2:
            staying.append(point)
    return released, used
