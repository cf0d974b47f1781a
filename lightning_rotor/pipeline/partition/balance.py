"""How many stages of a chain go to which part: checked, or found from one number per stage as torchgpipe does it."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.schedule import PipelineError
from lightning_rotor.pipeline.simulator import Reals
from lightning_rotor.units import is_positive_integer

Cuts: TypeAlias = tuple[int, ...]
"""First stage of the chain in each pipeline stage."""
_MOST_NAMED = 12  # stages in a message


def stage_seconds(chain: Chain) -> list[float]:
    """Seconds of each stage; recomputation does not count."""
    return [stage.keep.seconds for stage in chain]


def stage_bytes(chain: Chain, param_scale: float = 2.0) -> list[float]:
    """Bytes of each stage: what plain training saves, and ``param_scale`` for each byte of trained parameters."""
    if not (math.isfinite(param_scale) and param_scale >= 0):
        raise PipelineError(
            f"param_scale is {param_scale!r}: expected a number that is not negative, such as 2 for SGD, 3 with "
            "momentum, 4 for Adam"
        )
    return [
        stage.keep.saved_bytes + stage.output_bytes + param_scale * stage.keep.parameter_gradient_bytes
        for stage in chain
    ]


def check_balance(balance: Sequence[int] | str, names: Sequence[str], parts: int) -> tuple[int, ...]:
    """A balance given by hand, checked for stages of these names and so many parts."""
    stages, even = len(names), even_balance(len(names), parts)
    if isinstance(balance, str):
        raise PipelineError(f'balance is {balance!r}: expected "auto" or numbers such as {even}')
    given = list(balance)
    wrong, odd = "", [place for place, count in enumerate(given) if not is_positive_integer(count)]
    if odd:
        wrong = (
            f"has {given[odd[0]]!r} at place {odd[0]}: expected positive integers, since every pipeline stage needs "
        )
        wrong += "at least one stage of the model"
    elif len(given) != parts:
        wrong = f"has {len(given)} entries for {parts} pipeline stages: expected one for each"
    elif sum(given) != stages:
        wrong = f"shares out {sum(given)} stages, but the model has {stages}: expected the entries to add up"
        listed = ", ".join([*names[:_MOST_NAMED], *(("…", names[-1]) if stages > _MOST_NAMED else ())])
        raise PipelineError(f"balance={given} {wrong}, such as balance={even}. Its stages are {listed}")
    if wrong:
        raise PipelineError(f"balance={given} {wrong}, such as balance={even}")
    return tuple(given)


def counted_in_stages(balance: Sequence[int], names: Sequence[str], children: Sequence[str]) -> list[int]:
    """A balance that counts a model's children, in stages; any other as it is.

    Args:
        balance: Numbers of children in each part; of stages, if they do not add up to the children.
        names: Of the model's stages, which begin with those of its children.
        children: Names of the model's children, in the order in which they run.
    Raises:
        PipelineError: It separates children that one stage runs together.
    """
    if not all(map(is_positive_integer, balance)) or sum(balance) != len(children):
        return list(balance)
    place = {child: number for number, child in enumerate(children)}
    firsts = [place[name.partition(" … ")[0].partition(".")[0]] for name in names]
    lasts = [place[name.rpartition(" … ")[2].partition(".")[0]] for name in names]
    ends = []
    for cut in accumulate(balance):
        ends.append(sum(last < cut for last in lasts))
        straddling = [name for name, first, last in zip(names, firsts, lasts, strict=True) if first < cut <= last]
        if straddling:
            raise PipelineError(
                f"balance={list(balance)} cuts between the children {children[cut - 1]!r} and {children[cut]!r}, which "
                f"run as one stage, {straddling[0]!r}: expected a cut elsewhere"
            )
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def cuts_of(balance: Sequence[int]) -> tuple[int, ...]:
    """First stage of each part."""
    return tuple(int(sum(balance[:place])) for place in range(len(balance)))


def runs_of(cuts: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """First and last stage of each part."""
    return [(first, end - 1) for first, end in zip(cuts, (*cuts[1:], stages), strict=True)]


def even_balance(stages: int, parts: int) -> list[int]:
    """Parts of equal size, or of one stage each if there are too few."""
    return [stages // parts + (place < stages % parts) for place in range(parts)] if parts <= stages else [1] * stages


def simple_balances(chain: Chain, parts: int) -> list[list[int]]:
    """Balances that one would make by hand; a search must end with nothing slower."""
    by_time, by_size = (least_largest(values, parts) for values in (stage_seconds(chain), stage_bytes(chain)))
    return [even_balance(len(chain), parts), by_time, by_size]


def least_largest(values: Sequence[float], partitions: int) -> list[int]:
    """Contiguous parts whose largest sum is least."""
    n, parts = len(values), partitions
    if not is_positive_integer(parts) or parts > n:
        raise PipelineError(
            f"partitions is {partitions!r}, but the chain has {n} stages: expected an integer from 1 to {n}, such as "
            f"partitions={n}"
        )
    before = np.concatenate(([0.0], np.cumsum(np.asarray(values, float))))
    # No part needs more than an equal share and one stage, which bounds its length.
    most = (before[-1] / parts + max(values)) * (1 + 1e-9)
    longest = int((np.searchsorted(before, before + most, "right") - np.arange(n + 1)).max()) - 1
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    sums = np.where(ends <= n, before[np.minimum(ends, n)] - before[:-1, None], math.inf)
    cuts = least_bottleneck(np.broadcast_to(sums, (parts, n, longest)))
    assert cuts is not None, "equal parts are no longer"
    return [last + 1 - first for first, last in runs_of(cuts, n)]


def least_bottleneck(values: Reals) -> Cuts | None:
    """Cuts whose largest value is least, then nearest to equal; None if all are infinite.

    ``values`` is ``(stages, n, lengths)``: by pipeline stage, first stage of the chain and length less one.
    """
    stages, n, longest = values.shape
    most = np.full((stages + 1, n + longest + 1), math.inf)
    squares = most.copy()
    most[stages, n] = squares[stages, n] = 0.0
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    chosen = np.zeros((stages, n), np.int64)
    for stage in reversed(range(stages)):
        largest = np.maximum(values[stage], most[stage + 1][ends])
        least = largest.min(axis=1, keepdims=True)
        spread = np.where(largest <= least, values[stage] ** 2 + squares[stage + 1][ends], math.inf)
        chosen[stage] = np.argmin(spread, axis=1)
        most[stage, :n], squares[stage, :n] = least[:, 0], spread[np.arange(n), chosen[stage]]
    if most[0, 0] == math.inf:
        return None
    cuts = [0]
    for stage in range(stages - 1):
        cuts.append(cuts[-1] + int(chosen[stage, cuts[-1]]) + 1)
    return tuple(cuts)
