"""An interrupt at any line leaves torch, the module and its hooks as they were."""

from __future__ import annotations

import gc
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import lightning_rotor
from lightning_rotor import Checkpointable
from lightning_rotor.private import torch_names as private
from tests.grids import examples

PACKAGE = str(Path(lightning_rotor.__file__).parent)
# What changes something that is not the package's own, and undoes it.
CHANGING = {
    *("shown_calls", "listening", "paused", "_standing_in", "noticed_checkpoints", "undisturbed", "kept_attributes"),
    *(
        "lent_buffers",
        "repeating",
        "attach",
        "standing_in",
        "uncompiled",
        "put_back",
        "stop",
        "undone",
        "passing_first",
    ),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def state_of(net: nn.Module) -> dict[str, Any]:
    return {
        "patches": [nn.Module.__call__, nn.Module.__init__, vars(torch.autograd.Function)["apply"]],
        "checkpoint": [torch.utils.checkpoint._CheckpointFrame, torch.utils.checkpoint.CheckpointFunction],
        "modes": private.function_modes(),
        "hooks for saved tensors": private.hooks_for_saved_tensors(),
        "profilers": [sys.getprofile(), private.is_profiling(), os.environ.get("KINETO_LOG_LEVEL")],
        "collector": [gc.isenabled(), list(gc.callbacks)],
        "gradients": torch.is_grad_enabled(),
        "passes": [lightning_rotor.is_recomputing(), lightning_rotor.is_checkpointing()],
        "attributes": [sorted(vars(module)) for module in net.modules()],
        "tensors": [id(tensor) for tensor in (*net.parameters(), *net.buffers())],
        "values": [tensor.sum().item() for tensor in (*net.parameters(), *net.buffers())],
        "generator": torch.get_rng_state().tolist(),
    }


def traced(call: Callable[[], object], on_line: Callable[[str, int, str], None]) -> None:
    """Run a call, and tell each line of the package before it runs."""

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if not filename.startswith(PACKAGE) or name not in CHANGING:
            return None

        def inside(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                on_line(filename, frame.f_lineno, name)
            return inside

        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)


def first_call() -> tuple[Checkpointable, torch.Tensor]:
    return Checkpointable(Net(), mem_limit="4KiB", show_progress=False), torch.ones(16, 8)


def test_an_interrupt_at_each_line_that_changes_something_leaves_all_as_it_was() -> None:
    lines: dict[tuple[str, int], str] = {}
    net, x = first_call()
    traced(lambda: net(x), lambda filename, number, name: lines.setdefault((filename, number), name) and None)
    assert len(lines) > 60
    assert {"shown_calls", "noticed_checkpoints", "standing_in", "attach"} <= set(lines.values())
    wrong = []
    places: Counter[str] = Counter()
    for line, name in lines.items():
        places[name] += 1
        if places[name] % examples(3, 1) != examples(1, 0):
            continue  # of each function the first line and every third one are enough to see that it undoes what it did
        net, x = first_call()
        before, fired = state_of(net), []

        def interrupt(filename: str, number: int, _: str, line: Any = line, fired: list[bool] = fired) -> None:
            if not fired and (filename, number) == line:
                fired.append(True)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            traced(lambda net=net, x=x: net(x), interrupt)
        after = state_of(net)
        changed = [key for key in before if before[key] != after[key]]
        if changed:
            wrong.append(f"{name}, {linecache.getline(*line).strip()!r}: {changed}")
    assert wrong == []


def test_training_goes_on_after_an_interrupt() -> None:
    plain, (net, x) = Net(), first_call()

    def interrupt(filename: str, number: int, name: str) -> None:
        if name == "put_back" and "recorder" in filename:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        traced(lambda: net(x), interrupt)
    assert torch.equal(net(x), plain(x))
    assert net.plan is not None
