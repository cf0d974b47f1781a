"""What is asked of a Trainer before its model is cut: the call of the module, and its optimizers' state."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.planned.target_search import Target
from lightning_rotor.strategies.pipeline_builder import PipelineBuilder
from lightning_rotor.strategies.pipeline_settings import PipelineSettings


class Model(L.LightningModule):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.net = nn.Linear(10, 10, bias=False)
        self.make_optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def builder_of(optimizer: Any, **settings: Any) -> tuple[Model, PipelineBuilder]:
    model = Model(optimizer)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    return model, PipelineBuilder(PipelineSettings(**settings), trainer, PipelineProcesses(torch.device("cpu")))


def test_state_is_told_for_each_byte_that_learns() -> None:
    _, plain = builder_of(lambda parameters: torch.optim.SGD(parameters, 0.1))
    assert plain._optimizer_scale() == 0.0
    _, momentum = builder_of(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    assert momentum._optimizer_scale() == 1.0
    _, lbfgs = builder_of(torch.optim.LBFGS)
    with pytest.raises(PipelineError, match="LBFGS evaluates the loss several times"):
        lbfgs._optimizer_scale()


def test_a_sample_is_the_call_of_its_largest_micro_batch() -> None:
    model, builder = builder_of(torch.optim.Adam, sample=torch.ones(5, 10), micro_batches=2)
    (args, kwargs), _ = builder._call_of(Target("net", model.net, "named"), None)
    assert (args[0].shape, kwargs) == ((3, 10), {})
    _, few = builder_of(torch.optim.Adam, sample=torch.ones(1, 10), micro_batches=2)
    with pytest.raises(PipelineError, match="sample has 1 rows for 2 micro-batches"):
        few._call_of(Target("net", model.net, "named"), None)
