"""What a command line asks for, and what it is told where nobody can know what it means."""

from __future__ import annotations

import pytest

from lightning_rotor.link import Link
from lightning_rotor.offload import Offload
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


def test_where_plans_move_is_a_place_or_the_speed_of_a_link() -> None:
    def offload(*words: str) -> object:
        return parsed_options([*MODEL, *words], "lightning-rotor").offload

    assert offload() is None
    assert offload("--offload") == Offload("host")
    assert offload("--offload", "host:64GiB") == Offload("host", "64GiB")
    assert offload("--offload", "disk:/scratch") == Offload("disk:/scratch")
    assert offload("--offload", "50GB/s") == Link(50e9, 50e9)
    assert offload("--offload", "170/410GB/s") == Link(170e9, 410e9)


@pytest.mark.parametrize("text", ["0GB/s", "fast/s", "1/2/3GB/s", "nvme", "50GB"])
def test_what_is_neither_is_refused_in_a_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed_options([*MODEL, "--offload", text], "lightning-rotor")
    message = capsys.readouterr().err
    assert "offload is" in message
    assert "expected" in message
