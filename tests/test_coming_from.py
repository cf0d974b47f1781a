"""The examples of docs/coming_from.md, run on small tensors; torchgpipe's loop runs in tests/test_pipeline_runner.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
_SMALLER = {
    "32, 3, 224, 224": "2, 3, 32, 32",
    "import resnet101": "import resnet18 as resnet101",
    "100, 3, 128, 128": "2, 3, 32, 32",
    "n_layer=12": "n_layer=2, n_embd=32, n_head=2, vocab_size=64",
    "5400, (100, 20)": "64, (16, 20)",
    'dist.init_process_group("gloo")': "",  # they have one already
}


def example(name: str) -> str:
    """The code of a seed's example, on small tensors."""
    code = "".join(re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL))
    assert code, f"{name} has no block in docs/coming_from.md"
    for long, short in _SMALLER.items():
        code = code.replace(long, short)
    return code


def run(name: str) -> dict[str, Any]:
    """The variables that an example leaves."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(compile(example(name), f"coming_from.md, {name}", "exec"), found)
    return found


def test_every_block_of_the_page_runs_here() -> None:
    assert PAGE.count("```python") == len(
        re.findall(r"<!-- (?:rotor|rockmate|rkgb|invtorch|torchgpipe|stashes) -->", PAGE)
    )


@pytest.mark.wide
def test_rotors_resnet(capsys: pytest.CaptureFixture[str]) -> None:
    found = run("rotor")
    net, plain = found["net"], found["resnet18"]()
    plain.load_state_dict(net.state_dict())
    data = found["data"].detach().requires_grad_()
    plain(data).sum().backward()
    assert torch.equal(found["gradient"], data.grad)
    assert net.plan.budget_bytes == 700 * 10**6
    assert "Recomputation plan" in capsys.readouterr().out


def test_rockmates_resnet() -> None:
    net = run("rockmate")["net"]
    assert net.plan.budget_bytes == 2**31
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.wide
def test_rk_gbs_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    found = run("rkgb")
    assert found["net"].plan.recomputed
    stages, backward = (Path(name).read_text().replace("&#160;", " ") for name in ("stages.svg", "backward.svg"))
    assert "keeps" in stages
    assert "addmm" in stages
    assert "new parameter gradients" in backward
    assert "runs again first" in backward


def test_invtorchs_layer() -> None:
    found = run("invtorch")
    assert found["layer"].weight.grad.shape == (5, 3)
    assert found["turn"].net.weight.grad is not None
    assert found["b"].shape == (10, 3)


def test_torchgpipes_skips() -> None:
    found = run("stashes")
    assert isinstance(found["model"], nn.Sequential)
    assert found["output"].shape == (4, 8)
