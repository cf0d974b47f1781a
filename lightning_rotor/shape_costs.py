r"""What a chain costs for shapes that were never measured, from measurements of others: an upper bound, and a close one in between.

A tensor program's bytes and seconds are sums of products of its dimensions. With a batch size B and a sequence length T, say::

    f(B, T) = c₀ + c₁·B + c₂·B·T + c₃·B·T² + ...        every cₖ ≥ 0, unknown; at most quadratic in each dimension

Nobody needs to know the cₖ. Let φₖ be the monomials, xᵢ the shapes that were measured, x the one that is wanted. Weights wᵢ of any sign with

    Σᵢ wᵢ·φₖ(xᵢ) ≥ φₖ(x)  for every k          give          Σᵢ wᵢ·f(xᵢ) = Σₖ cₖ Σᵢ wᵢ·φₖ(xᵢ) ≥ Σₖ cₖ·φₖ(x) = f(x)

whatever the cₖ: weak duality of linear programming. The same few weights serve every number of every stage, so the weights with the least
bound on the chain's total are found once, and a new shape costs milliseconds. Between two lengths they are those of the chord, beyond them those
of the parabola through both, and from a single measurement the squared ratio.

Kernels are no polynomials: another algorithm is chosen at another size, allocators round. So no number is below that of a measured shape that is
smaller in every dimension, nor above that of one that is larger.

Source:
    Boyd and Vandenberghe, "Convex Optimization", section 5.2 (weak duality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain
from lightning_rotor.combining import UnlikeChainsError, combined

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
_Matrix: TypeAlias = npt.NDArray[np.float64]

_MOST_VARIABLES = 3
_MOST_KNOWN = 4
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Bound:
    """How the costs for some shapes follow from measured ones.

    Attributes:
        weights: One for each measurement.
        smaller: Numbers of the measurements at shapes nowhere larger than the wanted ones.
        larger: Numbers of those at shapes nowhere smaller.
    """

    weights: tuple[float, ...]
    smaller: tuple[int, ...]
    larger: tuple[int, ...]

    def __call__(self, values: Sequence[float]) -> float:
        """The bound on a number whose values at the measured shapes are these."""
        value = sum(weight * each for weight, each in zip(self.weights, values, strict=True))
        value = min([value, *(values[number] for number in self.larger)])
        return max([0, value, *(values[number] for number in self.smaller)])


def chain_at(wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]) -> Chain:
    """A chain that costs at least what the chain of the wanted shapes would, if it were measured.

    Args:
        wanted: Shapes of the tensors that the chain takes.
        known: Measured chains of the same model, at least one, with their shapes.
    Raises:
        UnlikeChainsError: They have other stages, options or skips, or too many dimensions vary.
    """
    # No row costs no more than one row, and nothing is a multiple of nothing.
    wanted = tuple(tuple(max(size, 1) for size in shape) for shape in wanted)
    chosen = sorted(known, key=lambda each: distance(each[0], wanted))[:_MOST_KNOWN]
    points = _points([shapes for shapes, _ in chosen], wanted)
    totals = np.array([_total_bytes(chain) for _, chain in chosen], dtype=float)
    bound = Bound(
        tuple(_weights(points[:-1], points[-1], totals)),
        tuple(number for number, (shapes, _) in enumerate(chosen) if _nowhere_larger(shapes, wanted)),
        tuple(number for number, (shapes, _) in enumerate(chosen) if _nowhere_larger(wanted, shapes)),
    )
    return combined(
        [chain for _, chain in chosen],
        of_bytes=lambda values: math.ceil(bound(values) - _TOLERANCE),
        of_seconds=bound,
    )


def distance(shapes: Shapes, wanted: Shapes) -> float:
    """By what factor some dimension differs most, as a logarithm."""
    return max(
        (
            abs(math.log(max(one, 1) / max(other, 1)))
            for left, right in zip(shapes, wanted, strict=True)
            for one, other in zip(left, right, strict=True)
        ),
        default=0.0,
    )


def growth(shapes: Sequence[Shapes], wanted: Shapes) -> float:
    """By what factor some dimension is larger than in all of the shapes; at most 1 if none is."""
    largest = [max(column) for column in zip(*(_flat(each) for each in shapes), strict=True)]
    return max((one / max(most, 1) for one, most in zip(_flat(wanted), largest, strict=True)), default=1.0)


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _nowhere_larger(shapes: Shapes, other: Shapes) -> bool:
    return all(one <= two for one, two in zip(_flat(shapes), _flat(other), strict=True))


def _total_bytes(chain: Chain) -> int:
    return sum(stage.output_bytes + stage.keep.saved_bytes + stage.keep.backward_peak_bytes for stage in chain)


# -------------------------------------------------------------------- weights


def _points(known: Sequence[Shapes], wanted: Shapes) -> _Matrix:
    """One row for each shape, the wanted one last; one column for each dimension that varies by itself."""
    columns = dict.fromkeys(zip(*(_flat(each) for each in (*known, wanted)), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) > _MOST_VARIABLES:
        raise UnlikeChainsError(f"{len(varying)} dimensions vary")
    return np.array(varying, dtype=float).reshape(len(varying), len(known) + 1).T


def _weights(known: _Matrix, wanted: _Matrix, totals: _Matrix) -> _Matrix:
    """The weights of the least bound: a vertex of the dual program, found among all of them, for there are few."""
    powers = list(product(range(3), repeat=len(wanted)))
    # Divided by the wanted shape's monomials, so that every row asks for at least 1.
    rows = np.array([[np.prod((point / wanted) ** power) for point in known] for power in powers])
    best, least = None, math.inf
    for count in range(1, min(len(known), len(rows)) + 1):
        for columns in map(list, combinations(range(len(known)), count)):
            tight = np.array(list(combinations(range(len(rows)), count)))
            systems = rows[tight[:, :, None], np.array(columns)[None, None, :]]
            solvable = np.abs(np.linalg.det(systems)) > _TOLERANCE
            if not solvable.any():
                continue
            solutions = np.linalg.solve(systems[solvable], np.ones((int(solvable.sum()), count, 1)))[..., 0]
            fits = (solutions @ rows[:, columns].T >= 1 - _TOLERANCE).all(axis=1)
            bounds = np.where(fits, solutions @ totals[columns], math.inf)
            index = int(bounds.argmin())
            if bounds[index] < least:
                least, best = float(bounds[index]), np.zeros(len(known))
                best[columns] = solutions[index]
    assert best is not None  # one measurement alone always gives one
    return best
