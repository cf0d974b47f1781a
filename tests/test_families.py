"""Models of timm and transformers as a newcomer trains them: a real Trainer, one callback, a limit that forces recomputation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_rotor import RotorCallback
from tests.training import assert_same_training, tight_limit, train


class Task(L.LightningModule):
    """Around any model; those of transformers return more than logits."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model.train(), options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        output = self.model(inputs, **self.options)
        if not isinstance(output, torch.Tensor):
            output = output.logits if hasattr(output, "logits") else output.last_hidden_state
        return F.cross_entropy(output.flatten(0, -2), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def check(make: Any, tensors: tuple[torch.Tensor, ...], folder: Path) -> None:
    limit = tight_limit(make, tensors, folder, batch_size=4)
    callback = RotorCallback(limit, show_table=False)
    planned = train(make, tensors, folder, callback=callback, batch_size=4)
    assert callback.plan is not None
    assert callback.plan.recomputed
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= limit
    assert len(planned.losses) == 6  # the first ones show what the loss takes, which no plan knows before
    assert_same_training(train(make, tensors, folder, batch_size=4), planned)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "vit_tiny_patch16_224", {"depth": 2, "patch_size": 8, "embed_dim": 48, "drop_rate": 0.1, "drop_path_rate": 0.2},
            marks=pytest.mark.wide,
        ),
        pytest.param("mixer_s16_224", {"num_blocks": 2, "patch_size": 8, "embed_dim": 32, "drop_rate": 0.1}, marks=pytest.mark.wide),
        pytest.param("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "drop_path_rate": 0.2}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_families_of_timm(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    size = {} if name.startswith("convnext") else {"img_size": 32}
    tensors = torch.randn(24, 3, 32, 32), torch.randint(5, (24,))
    # timm's name of the mixer fixes its depth.
    make = timm.models.mlp_mixer.MlpMixer if name.startswith("mixer") else partial(timm.create_model, name)
    check(lambda: Task(make(num_classes=5, **size, **options)), tensors, tmp_path)


COMMON = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "config", "settings", "options"),
    [
        # One of the hub trains in test_steps, too.
        pytest.param("BertForMaskedLM", "BertConfig", COMMON, {}, marks=pytest.mark.wide),
        pytest.param(
            "GPT2LMHeadModel", "GPT2Config",
            {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}, {"use_cache": False},
            marks=pytest.mark.wide,
        ),
        pytest.param("LlamaForCausalLM", "LlamaConfig", {**COMMON, "num_key_value_heads": 1}, {"use_cache": False}, marks=pytest.mark.wide),
        pytest.param(
            "T5EncoderModel", "T5Config", {"vocab_size": 40, "d_model": 48, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, {},
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_families_of_transformers(
    hugging: Any, name: str, config: str, settings: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ids = torch.randint(3, 40, (24, 12))

    def make() -> Task:
        return Task(getattr(hugging, name)(getattr(hugging, config)(**settings)), **options)

    check(make, (ids, ids.roll(1, 1)), tmp_path)
