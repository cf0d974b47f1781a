"""Bounds on the costs of sizes that were never measured: never too low, and close where measurements are near."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.planning.size_bounds import Shapes, bound_at

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


ROWS = [[5, 3, 2, 7, 11, 1]] * len(FIELDS)


def measured_at(*lengths: int, batch: int = 8) -> list[tuple[Shapes, Chain]]:
    return [(((batch, length),), chain(ROWS, batch, length)) for length in lengths]


@pytest.mark.parametrize(("length", "is_known"), [(150, True), (151, False), (10, True)])
def test_a_size_half_as_large_again_as_all_measured_has_no_bound(length: int, is_known: bool) -> None:
    assert (bound_at(((8, length),), measured_at(100, 50)) is not None) is is_known


def test_a_smaller_size_costs_at_most_as_much_as_a_larger_measurement() -> None:
    (measurement,) = measured_at(100)
    bound = bound_at(((8, 10),), [measurement])
    assert bound is not None
    assert bound.chain is measurement[1]
    assert not bound.is_near


@pytest.mark.parametrize(
    ("length", "is_near"), [(110, True), (111, False), (91, True), (90, False), (100, True)], ids=str
)
def test_one_measurement_is_near_within_a_tenth(length: int, is_near: bool) -> None:
    bound = bound_at(((8, length),), measured_at(100))
    assert bound is not None
    assert bound.is_near is is_near


@pytest.mark.parametrize(("most", "is_near"), [(150, True), (151, False)])
def test_two_measurements_are_near_if_they_are_half_apart(most: int, is_near: bool) -> None:
    bound = bound_at(((8, 125),), measured_at(100, most))
    assert bound is not None
    assert bound.is_near is is_near


@pytest.mark.parametrize(("larger", "smaller", "number"), [(100, 60, 1), (60, 100, 0), (90, 60, 1)])
def test_the_lowest_bound_is_taken_and_its_smaller_measurement_named(larger: int, smaller: int, number: int) -> None:
    """At 80, on the line from 60 to 90 or 100."""
    bound = bound_at(((8, 80),), measured_at(larger, smaller))
    assert bound is not None
    assert bound.measurement == number
    measured = {length: chain(ROWS, 8, length).stages[0] for length in (60, 90, 100)}
    low, high = measured[60], measured[max(larger, smaller)]
    share = 20 / (max(larger, smaller) - 60)
    output = low.output_bytes + share * (high.output_bytes - low.output_bytes)
    assert bound.chain.stages[0].output_bytes == math.ceil(output)


def test_of_two_dimensions_the_one_farther_on_decides() -> None:
    """Half of the way in one, a quarter in the other."""
    low, high = chain(ROWS, 8, 100), chain(ROWS, 16, 140)
    bound = bound_at(((12, 110),), [(((8, 100),), low), (((16, 140),), high)])
    assert bound is not None
    between = (low.stages[0].output_bytes + high.stages[0].output_bytes) / 2
    assert bound.chain.stages[0].output_bytes == math.ceil(between)


def test_shapes_that_grow_in_one_dimension_alone_are_not_between() -> None:
    one, other = chain(ROWS, 8, 100), chain(ROWS, 16, 90)
    bound = bound_at(((12, 95),), [(((8, 100),), one), (((16, 90),), other)])
    assert bound is not None
    # Each alone: by half in the batch, or by 95/90 in the length.
    factors = [(12 / 8) ** 3 * one.stages[0].output_bytes, (95 / 90) ** 3 * other.stages[0].output_bytes]
    assert bound.chain.stages[0].output_bytes == math.ceil(min(factors) - 1e-9)


def test_no_row_costs_no_more_than_one() -> None:
    bound = bound_at(((8, 1),), measured_at(0))
    assert bound is not None
    assert bound.is_near


def test_whole_sizes_are_not_rounded_up_by_a_fraction_of_a_byte() -> None:
    """Three times a third of a span of bytes."""
    spans = [(low, high, size) for low in (3, 7) for high in (10, 13, 97) for size in range(low, high)]
    for low, high, size in spans:
        rows = [[0, 1, 0, 0, 0, 0]] * len(FIELDS)
        measured = [(((1, length),), chain(rows, 1, length)) for length in (low, high)]
        bound = bound_at(((1, size),), measured)
        assert bound is not None
        assert bound.chain.stages[0].output_bytes <= size or size > 1.5 * low


def test_of_bounds_that_are_as_low_a_near_one_is_taken() -> None:
    """A measurement as large in all but a dimension that costs nothing."""
    rows = [[5, 0, 0, 0, 0, 0]] * len(FIELDS)
    far, near = ((((8, length),), chain(rows, 8, length)) for length in (200, 101))
    for measured in ([far, near], [near, far]):
        bound = bound_at(((8, 100),), measured)
        assert bound is not None
        assert bound.is_near


@pytest.mark.parametrize("field", ["saved_bytes", "backward_peak_bytes", "output_bytes"])
def test_a_bound_is_lower_if_any_of_its_largest_sizes_is(field: str) -> None:
    small, large = chain(ROWS, 8, 100), chain(ROWS, 8, 100)
    stage = large.stages[0]
    if field == "output_bytes":
        raised = replace(stage, output_bytes=stage.output_bytes + 1)
    else:
        keep = replace(stage.keep, **{field: getattr(stage.keep, field) + 1})
        raised = replace(stage, options=(keep,))
    large = Chain((raised,))
    shapes = ((8, 100),)
    for measured in ([(shapes, small), (shapes, large)], [(shapes, large), (shapes, small)]):
        bound = bound_at(((8, 90),), measured)
        assert bound is not None
        assert bound.chain is small


def test_a_larger_measurement_is_near_up_to_a_tenth() -> None:
    rows = [[5, 3, 2, 7, 11, 1]] * len(FIELDS)
    for length, is_near in ((110, True), (111, False)):
        bound = bound_at(((1, 100),), [(((1, length),), chain(rows, 1, length))])
        assert bound is not None
        assert bound.is_near is is_near


def test_one_row_grows_to_three_as_a_hundred_do_to_three_hundred() -> None:
    rows = [[5, 3, 2, 7, 11, 1]] * len(FIELDS)
    assert bound_at(((3, 8),), [(((1, 8),), chain(rows, 1, 8))]) is None


def test_what_a_larger_size_took_less_time_for_is_not_taken_off() -> None:
    rows = [[0, 1, 0, 0, 0, 0]] * len(FIELDS)

    def timed(length: int, seconds: float) -> Chain:
        stage = chain(rows, 1, length).stages[0]
        return Chain((replace(stage, options=(replace(stage.keep, forward_seconds=seconds),)),))

    measured = [(((1, 16),), timed(16, 2.0)), (((1, 24),), timed(24, 1.0))]
    bound = bound_at(((1, 20),), measured)
    assert bound is not None
    assert bound.chain.stages[0].keep.forward_seconds == 2.0
    assert bound.chain.stages[0].keep.saved_bytes == 20
