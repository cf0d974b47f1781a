"""What micro-batches log becomes one log of the batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torchmetrics import MeanMetric

from lightning_rotor.pipeline.paused_call import PausedCall, current
from lightning_rotor.private.lightning_names import last_value
from lightning_rotor.strategies.micro_batch_logs import MicroBatchLogs


class Model(L.LightningModule):
    """Keeps what it is given to log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.logged.append((name, value, options))


def in_micro_batches(model: Model, sizes: tuple[int, ...], log: Any, order: tuple[int, ...] | None = None) -> None:
    logs = MicroBatchLogs(model, sizes)
    with logs.caught():
        for place in order or range(len(sizes)):
            token = current.set(PausedCall(lambda: None, place, torch.device("cpu"), seed=0, what="step"))
            log(place)
            current.reset(token)
    assert "log" not in model.__dict__
    assert not model.logged
    logs.write()


def test_a_number_becomes_its_mean_by_rows_whatever_the_order() -> None:
    model = Model()
    values = [torch.tensor(1.0, requires_grad=True), torch.tensor(4.0)]
    in_micro_batches(model, (3, 1), lambda place: model.log("loss", values[place], True, batch_size=2), (1, 0))
    ((name, value, options),) = model.logged
    assert (name, float(value), value.requires_grad) == ("loss", 1.75, False)
    assert options == {"prog_bar": True, "logger": None, "batch_size": 4}


@pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 7.0), ("max", 4.0), (torch.min, 1.0), ("avg", 2.75)])
def test_other_ways_to_reduce(reduce_fx: Any, expected: float) -> None:
    model, values = Model(), (1, 2, 4)
    in_micro_batches(model, (1, 1, 2), lambda place: model.log("n", values[place], reduce_fx=reduce_fx))
    assert float(model.logged[0][1]) == expected


def test_a_metric_is_logged_itself_with_the_value_of_the_batch() -> None:
    model, metric = Model(), MeanMetric()

    def log(place: int) -> None:
        metric(torch.tensor(float(place)))
        model.log("metric", metric)

    in_micro_batches(model, (1, 3), log)
    assert model.logged[0][1] is metric
    assert float(last_value(metric)) == 0.75
    assert float(metric.compute()) == 0.5


def test_what_lightning_refuses_is_handed_on_to_it() -> None:
    model = Model()
    in_micro_batches(model, (1,), lambda _: model.log("several", {"a": 1}))
    assert model.logged[0][1] == {"a": 1}


def test_an_own_log_of_the_instance_is_put_back() -> None:
    model, own = Model(), lambda *_, **__: None
    model.__dict__["log"] = own
    with MicroBatchLogs(model, (1,)).caught():
        assert model.__dict__["log"] is not own
    assert model.__dict__["log"] is own
