"""The Trainer of Hugging Face, before and after: ``python examples/coming_from/hugging_face_trainer.py``."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from typing import Any

import torch
from comparing import Training, compare
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lightning_rotor import Checkpointable

LIMIT = "4MiB"


def llama() -> LlamaForCausalLM:
    """A Llama of four layers, with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def rows() -> list[dict[str, Any]]:
    """Random words, each to be said again."""
    words = torch.randint(128, (24, 64), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in words]


class StepPeaks(TrainerCallback):
    """Measures each step up to the optimizer's."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.step: AbstractContextManager[None]

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Begins to measure."""
        self.step = self.training.step()
        self.step.__enter__()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        """Ends before the optimizer makes its state."""
        self.step.__exit__(None, None, None)


def train(model: Any) -> Training:
    """Six steps of AdamW."""
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            weight_decay=0.1,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows(), callbacks=[StepPeaks(training)])
        trainer.train()
    return training.ends(model)


def before() -> Training:
    """Train as always."""
    model = llama()
    return train(model)


def after() -> Training:
    """Train inside the limit: one line more."""
    model = llama()
    model = Checkpointable(model, mem_limit=LIMIT)
    return train(model)


if __name__ == "__main__":
    compare(before, after, LIMIT)
