"""The answer to ``plan`` as data: the figures of the plan, for programs that read them."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_rotor.report.command_answer import plan_as_json
from lightning_rotor.report.command_options import parsed_options
from lightning_rotor.report.command_plan import answer_to

NET = """
from torch import nn

def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)))
"""


def test_bytes_and_seconds_of_a_plan_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "net_of_answer.py"
    file.write_text(NET)
    command = ["plan", "--model", f"{file}:net", "--input", "32x16", "--budget", "1GiB", "--device", "meta", "--curve"]
    answer = answer_to(parsed_options(command, "lightning-rotor"))
    data = json.loads(json.dumps(plan_as_json(answer)))
    assert data["budget_bytes"] == 2**30
    assert data["peak_bytes"] == answer.reserved_bytes + answer.plan.peak_bytes
    assert data["peak_bytes"] == data["plain_peak_bytes"] <= 2**30
    assert data["device"] == "meta"
    assert data["seconds"] == answer.plan.seconds > 0
