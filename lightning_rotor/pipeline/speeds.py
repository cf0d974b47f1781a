"""How fast the devices of a pipeline are beside each other: every process times the same stages.

The ratio to the first process's durations is taken stage by stage, and of those the middle one, by time: an interruption slows some stages,
a slow device all of them. Noise must not move cuts between devices that are alike, so what differs from the first by less than 15 % is as fast
as the first; others are put together likewise. Durations that are too short to tell say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.sharing import gathered

# Two devices are as fast as each other up to this ratio of their durations.
_ALIKE = 1.15
# A model whose stages take less in all is over before a process has been interrupted once.
_LEAST_SECONDS = 0.02


def gathered_speeds(
    chain: Chain, group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None
) -> list[float]:
    """By process of the pipeline, its speed beside the first one's; every process calls it at once.

    Args:
        chain: As this process has measured it; the same stages everywhere.
        group: Processes of the pipeline.
        replicas: Processes with the same place in other pipelines: the slowest of them counts, for all wait for it.
    """
    mine = [stage.keep.forward_seconds + stage.keep.backward_seconds for stage in chain]
    if replicas is not None:
        mine = [max(each) for each in zip(*gathered(mine, replicas), strict=True)]
    return speeds_beside_first(gathered(mine, group))


def speeds_beside_first(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Speeds from durations.

    Args:
        seconds: By process, how long each stage takes it, the same stages everywhere.
    Returns:
        By process, its speed where the first one's is 1; alike ones have equal speeds.
    Example:
        >>> speeds_beside_first([[1.0, 2.0], [1.1, 2.0], [2.0, 4.0]])
        [1.0, 1.0, 0.5]
    """
    first = seconds[0]
    if min(map(sum, seconds)) < _LEAST_SECONDS:
        return [1.0] * len(seconds)
    ratios = [_middle_ratio(each, first) for each in seconds]
    found = [1.0] * len(ratios)
    for alike in _alike(ratios):
        ratio = 1.0 if 0 in alike else ratios[alike[len(alike) // 2]]
        for process in alike:
            found[process] = 1 / ratio
    return found


def _middle_ratio(seconds: Sequence[float], first: Sequence[float]) -> float:
    """The median of ``seconds / first`` over stages, each counted by how long it takes."""
    ratios = sorted((own / other, other) for own, other in zip(seconds, first, strict=True) if own > 0 and other > 0)
    half, passed = sum(weight for _, weight in ratios) / 2, 0.0
    for ratio, weight in ratios:
        passed += weight
        if passed >= half:
            return ratio
    return 1.0


def _alike(ratios: Sequence[float]) -> list[list[int]]:
    """Processes in groups: those that are like the first; of the others, by rising ratio, those that are like the fastest of their group."""
    order = sorted(range(len(ratios)), key=lambda process: ratios[process])
    with_first = [process for process in order if 1 / _ALIKE < ratios[process] < _ALIKE]
    groups = [with_first]
    for process in order:
        if process in with_first:
            continue
        last = groups[-1]
        if last is not with_first and ratios[process] < _ALIKE * ratios[last[0]]:
            last.append(process)
        else:
            groups.append([process])
    return groups
