"""The programs of examples/coming_from, and the page that shows them: same weights, limit kept, something recomputed."""

from __future__ import annotations

import re
import runpy
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from lightning_rotor import parse_bytes
from tests.grids import few
from tests.processes import ROOT

EXAMPLES = ROOT / "examples" / "coming_from"
PAGE = (ROOT / "docs" / "coming_from_pytorch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- from (\w+\.py) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
RUN = ("plain_loop", "torch_checkpoint", "hugging_face_trainer", "accelerate_loop", "peft_lora")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Names that a program defines, imported as its own folder would."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "comparing", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)  # the Trainer of Hugging Face makes one, too
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))


# What PEFT 0.21 asks of transformers 5.23, which has another name for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", few(RUN, "torch_checkpoint", "accelerate_loop"))
def test_both_trainings_end_with_the_same_weights_and_the_limit_is_kept(
    name: str, program: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = program(name)
    limit_bytes = parse_bytes(names["LIMIT"])
    after = names["after"]()
    befores = [names[way]() for way in ("before", "before_in_segments", "plain") if way in names]
    for before in befores:
        assert before.weights.keys() == after.weights.keys()
        assert [key for key, value in before.weights.items() if not torch.equal(value, after.weights[key])] == []
        assert len(before.peaks) == len(after.peaks) > 2
    assert after.recomputes
    assert max(befores[-1].peaks) > limit_bytes
    assert max(after.peaks) <= limit_bytes
    names["compare"](lambda: befores[0], lambda: after, names["LIMIT"])
    assert capsys.readouterr().out.endswith(": kept\nsame weights, bit for bit: yes\n")


def test_the_page_shows_what_the_programs_run() -> None:
    assert {name.removesuffix(".py") for name, _ in BLOCKS} == set(RUN)
    for name, block in BLOCKS:
        lines = [line.strip() for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]
        shown = [line.strip() for line in textwrap.dedent(block).splitlines()]
        places = (lines[start : start + len(shown)] for start in range(len(lines)))
        whole = any(place == shown for place in places) or (len(shown) == 1 and shown[0] in "\n".join(lines))
        assert whole, f"{name} has no such lines: {block}"


def test_every_program_is_on_the_page_and_in_a_test() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"comparing"}
    assert programs == set(RUN)
    assert all(f"../examples/coming_from/{name}.py" in PAGE for name in programs)
