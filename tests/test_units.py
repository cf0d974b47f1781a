from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_rotor.errors import InverseError, RotorError, ShortageError, TrialError, UnitError
from lightning_rotor.units import MemoryLimit, format_bytes, format_seconds, parse_bytes, parse_limit


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (1, 1),
        (2_000_000.0, 2_000_000),
        ("700MiB", 700 * 2**20),
        ("10GB", 10 * 10**9),
        ("10gib", 10 * 2**30),
        ("2 GiB", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (".5k", 500),
        ("1e9", 10**9),
        ("4096", 4096),
        ("1", 1),
        ("3b", 3),
        ("2TiB", 2 * 2**40),
        (" 8 M ", 8 * 10**6),
    ],
)
def test_a_limit_in_bytes_is_read(value, size_bytes):
    assert parse_limit(value) == MemoryLimit(size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("value", "fraction"), [(0.8, 0.8), (1.0, 1.0), ("0.8", 0.8), ("80%", 0.8), ("100 %", 1.0), ("1.0", 1.0)]
)
def test_a_fraction_of_the_device_is_read(value, fraction):
    limit = parse_limit(value)
    assert limit == MemoryLimit(fraction=fraction)
    assert limit.on_device(1000) == int(1000 * fraction)


def test_none_means_what_is_free():
    assert parse_limit(None) is None


def test_a_limit_in_bytes_does_not_depend_on_the_device():
    assert parse_limit("1GiB").on_device(5) == 2**30


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, -0.5, float("nan"), float("inf"), "0", "0%", "101%", "0.0", "-5MiB", "0.2B"]
)
def test_what_is_no_positive_size_is_refused(value):
    with pytest.raises(
        UnitError, match=r"memory limit .* (not a positive size|no fraction of a device|cannot be read)"
    ):
        parse_limit(value)


@pytest.mark.parametrize("value", ["", "lots", "GiB", "10 10", "MiB 10", "1e400x!", "1,5GiB"])
def test_text_that_is_no_size_is_refused_with_the_forms_that_work(value):
    with pytest.raises(UnitError, match=r'cannot be read: expected bytes as an integer, "700MiB", "10GB"'):
        parse_limit(value)


@pytest.mark.parametrize("value", [True, [1], (2, 3), b"1GiB", 1j, object()])
def test_other_types_are_refused_by_name(value):
    with pytest.raises(UnitError, match=f"of type {type(value).__name__}: expected bytes"):
        parse_limit(value)


def test_an_unknown_unit_lists_the_known_ones():
    with pytest.raises(
        UnitError, match=r"unknown unit 'PiB': expected one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, %"
    ):
        parse_limit("3PiB")


def test_a_unit_error_is_a_value_error_of_this_package():
    assert issubclass(UnitError, RotorError)
    assert issubclass(UnitError, ValueError)


def test_a_size_in_bytes_is_read():
    assert parse_bytes("2 GiB") == 2**31
    assert parse_bytes(17) == 17


@pytest.mark.parametrize("value", ["80%", 0.5, None])
def test_a_size_is_no_fraction_of_a_device(value):
    with pytest.raises(UnitError, match="expected bytes as an integer, or a size such as"):
        parse_bytes(value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (50 * 2**20, "50.0 MiB"),
        (700 * 2**20, "700 MiB"),
        (2_900_000_000, "2.70 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_sizes_are_printed_with_a_readable_unit(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_reads_back_within_half_a_percent(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.006)


@given(st.integers(min_value=1, max_value=2**60))
def test_bytes_survive_as_number_and_as_text(size_bytes):
    assert parse_bytes(size_bytes) == size_bytes
    assert parse_bytes(str(size_bytes)) == pytest.approx(size_bytes, rel=1e-15)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (1.5, "1.5 s"), (0.0032, "3.2 ms"), (4.5e-6, "4.5 µs"), (2e-9, "2 ns"), (-0.25, "-250 ms")],
)
def test_durations_are_printed_with_a_readable_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_a_limit_prints_what_the_user_meant():
    assert str(parse_limit("1.5GiB")) == "1.50 GiB"
    assert str(parse_limit("80%")) == "80% of the device"


@pytest.mark.parametrize(
    "error",
    [
        TrialError("too small", budget_bytes=1, minimum_bytes=2, stage="layer"),
        ShortageError("out of memory", limit_bytes=3, predicted_bytes=2),
        InverseError("not undone", stage="layer", error=0.5, tolerance=0.1),
        UnitError("unreadable"),
    ],
)
def test_errors_cross_processes_with_type_message_and_numbers(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
