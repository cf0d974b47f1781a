"""What a command line asks for, and what it is told where nobody can know what it means."""

from __future__ import annotations

import pytest

from lightning_rotor.report.command_options import parsed_options

MODEL = ("plan", "--model", "torchvision.models.resnet18", "--input", "4x3x32x32")


def test_a_described_device_is_estimated_for() -> None:
    options = parsed_options([*MODEL, "--budget", "1GiB", "--gpu", "H100"], "lightning-rotor")
    assert options.device == "meta"
    assert parsed_options([*MODEL, "--budget", "1GiB"], "lightning-rotor").device == "cpu"


def test_batch_sizes_rise(capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed_options([*MODEL, "--budget", "1GiB", "--batch-sizes", "8,4"], "lightning-rotor")
    assert sorted(options.batch_sizes) == [4, 8]
    with pytest.raises(SystemExit):
        parsed_options([*MODEL, "--budget", "1GiB", "--batch-sizes", "8", "--curve"], "lightning-rotor")
    assert "expected no --curve" in capsys.readouterr().err


def test_a_misspelled_option_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed_options([*MODEL, "--budgett", "1GiB"], "lightning-rotor")
    message = capsys.readouterr().err
    assert "Did you mean '--budget'?" in message or "Did you mean --budget?" in message
    assert "usage" not in message
