"""Models of transformers, as they come, in a pipeline over two processes."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from pipelines import PATIENCE_SECONDS, good, processes
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor.errors import RotorWarning
from lightning_rotor.strategies import RotorPipelineStrategy

TOKENS = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(0))


class Text(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
        nothing_dropped = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **nothing_dropped))

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def piped() -> Text:
    model = Text()
    strategy = RotorPipelineStrategy("net", micro_batches=2, process_group_backend="gloo", mem_limit="1GiB")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TOKENS, 8))  # type: ignore[arg-type]
    return model


def alone() -> Text:
    """Trained by one process, with the same micro-batches."""
    model = Text()
    optimizer = model.configure_optimizers()
    for batch in TOKENS.split(8):
        optimizer.zero_grad()
        for part in batch.chunk(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.training_step(part, 0)
            (loss / 2).backward()
        optimizer.step()
    return model


def trained(rank: int) -> dict[str, Any]:
    """How far a pipeline's weights are from those of one process, and what it says."""
    expected = alone().state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RotorWarning)
        model = piped()
    state = model.state_dict()
    return {
        "worst": max(float((state[name] - value).abs().max()) for name, value in expected.items()),
        "said": sum("sets use_cache=False" in str(warning.message) for warning in caught),
        "use_cache": model.net.config.use_cache,
    }


@pytest.mark.feature("Strategies", "RotorPipelineStrategy, a GPT-2 of transformers with use_cache, bf16-mixed")
def test_a_model_that_returns_a_cache_trains_without_one() -> None:
    pytest.importorskip("transformers")
    with processes(2, patience_seconds=PATIENCE_SECONDS) as group:
        answers = good(group.run(2, trained))
    for rank, found in enumerate(answers):
        assert found["worst"] < 1e-6
        assert found["said"] == (rank == 0)
        assert found["use_cache"] is True
