"""Bounds on the costs of sizes that were never measured: never too low, and close where measurements are near."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning.size_bounds import bound_at

FIELDS = [
    name for name in Option.__dataclass_fields__ if name.endswith("_bytes") and name not in ("discard_peak_bytes",)
]


def chain(coefficients: list[list[int]], batch: int, length: int, name: str = "layer") -> Chain:
    """One stage, each of whose sizes is a polynomial of batch size and length."""
    monomials = [1, length, length**2, batch, batch * length, batch * length**2]
    sizes = [sum(c * m for c, m in zip(row, monomials, strict=True)) for row in coefficients]
    option = Option("keep", saved_tensors=1, **dict(zip(FIELDS, sizes, strict=False)), forward_seconds=1.0,
                    replay_seconds=1.0, backward_seconds=1.0)  # fmt: skip
    return Chain((StageCost(name, sizes[-1], sizes[-1], 1.0, (option,)),))


@given(
    coefficients=st.lists(
        st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=len(FIELDS), max_size=len(FIELDS)
    ),
    known=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=5, unique=True),
    wanted=st.tuples(st.integers(1, 96), st.integers(1, 96)),
)
def test_costs_for_other_shapes_are_never_too_low(
    coefficients: list[list[int]], known: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    measured = [(((batch, length), (batch, 3)), chain(coefficients, batch, length)) for batch, length in known]
    found = bound_at((wanted, (wanted[0], 3)), measured)
    if found is None:  # measured, since it is larger than all of them by half
        assert all(max(wanted[0] / batch, wanted[1] / length) > 1.5 for batch, length in known)
        return
    bound = found.chain.stages[0]
    truth = chain(coefficients, *wanted).stages[0]
    assert bound.output_bytes >= truth.output_bytes
    for name in FIELDS:
        assert getattr(bound.keep, name) >= getattr(truth.keep, name)
    if wanted in known:
        assert bound == truth


def test_between_near_lengths_the_bound_is_close() -> None:
    rows = [[5, 3, 2, 7, 11, 1]] * len(FIELDS)
    measured = [(((8, length),), chain(rows, 8, length)) for length in (16, 24, 36)]
    for length in range(16, 40):
        bound = bound_at(((8, length),), measured)
        assert bound is not None
        truth = chain(rows, 8, length).stages[0].output_bytes
        assert bound.is_near
        assert truth <= bound.chain.stages[0].output_bytes <= (1.05 if length <= 36 else 1.34) * truth
    assert not bound_at(((8, 50),), measured).is_near  # type: ignore[union-attr]
    assert bound_at(((8, 55),), measured) is None


def test_chains_that_differ_in_more_than_sizes_say_nothing_of_each_other() -> None:
    rows = [[1] * 6] * len(FIELDS)
    measured = [(((8, 16),), chain(rows, 8, 16)), (((8, 32),), chain(rows, 8, 32, "another"))]
    bound = bound_at(((8, 20),), measured)
    assert bound is not None
    assert bound.chain.names == ("layer",)
    assert bound.chain.stages[0].output_bytes == math.ceil(measured[0][1].stages[0].output_bytes * (20 / 16) ** 3)
