"""Damaged plan files and callback states: a PlanError, or measured anew; no hang, and no forward left replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, Plan, PlanError, RotorCallback, Schedule, ScheduleError
from lightning_rotor.planned.records import seal_of
from tests.grids import examples

VALUES = [
    *(None, True, -1, 0, 1e30, 10**30, 10**400, float("inf"), float("nan"), "", "x", "9" * 5000, [], {}, [[]]),
    *("0-9", "0-99999999", "0-999999999999", "(0-9", "\0", {"a": 1}, 2**63, "(" * 3000 + "0" + ")" * 3000),
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())])


@pytest.fixture(scope="module")
def net() -> Checkpointable:
    return Checkpointable(layers(), torch.randn(16, 32))


def damaged(content: dict[str, Any]) -> Iterator[str]:
    for key in content:
        for value in VALUES:
            yield json.dumps({**content, key: value})
        yield json.dumps({name: value for name, value in content.items() if name != key})
    for key in content["stages"][0]:
        for value in VALUES:
            changed = copy.deepcopy(content)
            changed["stages"][0][key] = value
            yield json.dumps(changed)
    text = json.dumps(content)
    yield from (text[: len(text) * part // 10] for part in range(10))
    yield from ("[" * 200_000 + "]" * 200_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "null", "\ufeff" + text)


def test_a_damaged_plan_is_a_plan_error_or_the_plan(net: Checkpointable, tmp_path: Path) -> None:
    plan, path = net.use("(0-2) 3-5"), tmp_path / "plan.json"
    plan.save(path)
    refused = list[str]()
    for text in damaged(json.loads(path.read_text())):
        path.write_text(text)
        try:
            loaded = Plan.load(path, net.chain)
        except PlanError as error:
            refused.append(str(error))
        else:
            assert str(loaded)  # every number can be shown
            net.use(loaded)
    assert len(refused) > 100
    assert max(map(len, refused)) < 2000


@pytest.mark.parametrize("text", ["0-99999999", "0-999999999999999", "9" * 5000, "(0-2", "plan.json", ""])
def test_a_text_that_is_no_schedule_is_refused_at_once(net: Checkpointable, text: str) -> None:
    before = net.use("0-5")
    with pytest.raises(ScheduleError):
        Schedule.parse(text)
    with pytest.raises(ScheduleError):
        net.use(text)
    assert net.plan is before


def test_use_takes_a_schedules_text_and_says_what_else_it_takes(net: Checkpointable) -> None:
    assert net.use("(0-1) 2-5").recomputed == (0, 1)
    for other in (None, 5, Path("plan.json")):
        with pytest.raises(PlanError, match=r"use\(\) was given .*: expected a Plan, a Schedule, or a schedule's text"):
            net.use(other)


# -------------------------------------------------------------------- states of the callback


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def trained(rotor: RotorCallback | None) -> Model:
    rows = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    callbacks = [] if rotor is None else [rotor]
    trainer = L.Trainer(max_steps=2, callbacks=callbacks, enable_model_summary=False, **options)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=64))
    return model


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


def test_a_damaged_state_is_left_aside() -> None:
    rotor = RotorCallback("1GiB", show_table=False)
    plain = trained(None)
    trained(rotor)
    good = rotor.state_dict()
    assert good["seal"] == seal_of(good) == seal_of(json.loads(json.dumps(good)))
    states: list[Any] = []
    for path in places(good):
        for value in (None, -1, 10**400, "0-99999999", [[]]):
            state = copy.deepcopy(good)
            holder = state
            for key in path[:-1]:
                holder = holder[key]
            if holder[path[-1]] != value:
                holder[path[-1]] = value
                states.append(state)
    assert all(state["seal"] != seal_of(state) for state in states)
    cyclic, deep = copy.deepcopy(good), copy.deepcopy(good)
    cyclic["records"] = [cyclic]
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    deep["records"] = nested
    odd = [cyclic, deep, {**good, "records": torch.zeros(3)}, {**good, "module": lambda: 0}, {}, []]
    for state in [*states[:: len(states) // examples(2, 4)], *odd]:
        again = RotorCallback("1GiB", show_table=False)
        again.load_state_dict(state)
        model = trained(again)
        assert "forward" not in vars(model.net)
        assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    intact = RotorCallback("1GiB", show_table=False)
    intact.load_state_dict(good)
    trained(intact)
    assert intact._last.measuring_seconds < 0.01
