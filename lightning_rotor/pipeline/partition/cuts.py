"""Cuts of a chain into parts, and balances that follow from one number per stage, as torchgpipe makes them."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.step_times import Reals
from lightning_rotor.units import is_positive_integer

Cuts: TypeAlias = tuple[int, ...]
"""First stage of the chain in each pipeline stage."""


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
    sizes = []
    for stage in chain:
        # Inputs are the outputs of the stages before, so each boundary counts once.
        kept = stage.keep.saved_bytes + stage.output_bytes
        sizes.append(kept + param_scale * stage.keep.parameter_gradient_bytes)
    return sizes


def cuts_of(balance: Sequence[int]) -> tuple[int, ...]:
    """First stage of each part."""
    cuts = []
    first = 0
    for length in balance:
        cuts.append(first)
        first += int(length)
    return tuple(cuts)


def runs_of(cuts: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """First and last stage of each part."""
    ends = [*cuts[1:], stages]
    return [(first, end - 1) for first, end in zip(cuts, ends, strict=True)]


def even_balance(stages: int, parts: int) -> list[int]:
    """Parts of equal size, or of one stage each if there are too few."""
    if parts > stages:
        return [1] * stages
    size, larger_parts = divmod(stages, parts)
    # Larger ones first: of micro-batches, the first is the one that is measured.
    return [size + 1] * larger_parts + [size] * (parts - larger_parts)


def simple_balances(chain: Chain, parts: int) -> list[list[int]]:
    """Balances that one would make by hand; a search must end with nothing slower."""
    by_time = least_largest(stage_seconds(chain), parts)
    by_size = least_largest(stage_bytes(chain), parts)
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
    # No part needs more than an equal share and one stage, which bounds its length: the table has n rows of it, and
    # not n². The factor is for sums that round.
    most = (before[-1] / parts + max(values)) * (1 + 1e-9)
    lengths = np.searchsorted(before, before + most, "right") - np.arange(n + 1)
    longest = int(lengths.max()) - 1
    ends = np.arange(n)[:, None] + np.arange(1, longest + 1)
    run_sums = before[np.minimum(ends, n)] - before[:-1, None]
    sums = np.where(ends <= n, run_sums, math.inf)
    cuts = least_bottleneck(np.broadcast_to(sums, (parts, n, longest)))
    assert cuts is not None, "equal parts are no longer"
    return [last + 1 - first for first, last in runs_of(cuts, n)]


def least_bottleneck(values: Reals) -> Cuts | None:
    """Cuts whose largest value (by stage, first and length less one) is least; None if all are infinite.

    O(stages · n · longest), and exact.
    """
    stages, n, longest = values.shape
    # By pipeline stage and first stage of the chain, of all parts from there on: the largest value, and the sum of
    # squares, which decides among cuts of the same largest value for the most even ones.
    # Rows have room for ends beyond the chain, which stay infinite.
    most = np.full((stages + 1, n + longest + 1), math.inf)
    squares = most.copy()
    most[stages, n] = squares[stages, n] = 0.0
    firsts = np.arange(n)
    ends = firsts[:, None] + np.arange(1, longest + 1)
    # The length less one of the part that begins here.
    chosen = np.zeros((stages, n), np.int64)
    for stage in reversed(range(stages)):
        largest = np.maximum(values[stage], most[stage + 1][ends])
        least = largest.min(axis=1, keepdims=True)
        spread = values[stage] ** 2 + squares[stage + 1][ends]
        spread = np.where(largest <= least, spread, math.inf)
        chosen[stage] = np.argmin(spread, axis=1)
        most[stage, :n] = least[:, 0]
        squares[stage, :n] = spread[firsts, chosen[stage]]
    if most[0, 0] == math.inf:
        return None
    cuts = [0]
    for stage in range(stages - 1):
        first = cuts[-1]
        cuts.append(first + int(chosen[stage, first]) + 1)
    return tuple(cuts)
