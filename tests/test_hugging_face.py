"""The Hugging Face Trainer and accelerate train a Checkpointable as they train its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rotor import Checkpointable
from tests.grids import few
from tests.test_names_of_a_wrapped_model import Tower

transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows with a column that no model takes."""

    def __init__(self) -> None:
        self.ids = torch.randint(3, 200, (16, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "note": "not for the model"}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def tight(model: Any) -> int:
    """A limit at which something is recomputed."""
    row = {name: torch.stack([Tokens()[n][name] for n in range(4)]) for name in ("input_ids", "labels")}
    frontier = Checkpointable(model, row).frontier()
    return int((frontier.points[0].peak_bytes + frontier.points[-1].peak_bytes) // 2)


def huggingface_trainer(model: Any, folder: Path) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def test_the_hugging_face_trainer_trains_it_as_it_is(tmp_path: Path) -> None:
    plain, wrapped = llama(), Checkpointable(llama(), mem_limit=tight(llama()))
    found = []
    for model in (plain, wrapped):
        trainer = huggingface_trainer(model, tmp_path)
        trainer.train()
        assert "eval_loss" in trainer.evaluate()  # it knows which columns are labels
        groups = [(group["weight_decay"], len(group["params"])) for group in trainer.optimizer.param_groups]
        found.append((groups, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    assert found[0] == found[1]
    assert [decay for decay, _ in found[0][0]] == [0.5, 0.0]
    assert wrapped.plan is not None
    assert wrapped.plan.recomputed
    for (name, one), (other_name, other) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
    trainer.save_model(str(tmp_path / "saved"))
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert read.config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(one, read.state_dict()[name]) for name, one in plain.state_dict().items())


@pytest.mark.wide
def test_the_hugging_face_trainer_resumes_with_it(tmp_path: Path) -> None:
    states = []
    for wrap in (lambda model: model, lambda model: Checkpointable(model, mem_limit="1GiB")):
        folder = tmp_path / str(len(states))
        first = huggingface_trainer(wrap(llama()), folder)
        first.args.max_steps, first.args.save_steps = 2, 2
        first.args.save_strategy = transformers.trainer_utils.SaveStrategy.STEPS
        first.train()
        second = huggingface_trainer(wrap(llama()), folder)
        second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        states.append(second.model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert [name for name, one in states[0].items() if not torch.equal(one, states[1][name])] == []


@pytest.mark.parametrize("precision", few(["no", "bf16"], "bf16"))
def test_accelerate_prepares_saves_and_unwraps_it(precision: str, tmp_path: Path) -> None:
    states = []
    for wrap in (lambda model: model, lambda model: Checkpointable(model, mem_limit="1GiB")):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(0)
        model = wrap(Tower())
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        for _ in range(3):
            loss = prepared(torch.ones(8, 16), labels=torch.zeros(8, 16))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.unwrap_model(prepared) is model
        accelerator.save_model(prepared, str(tmp_path / "model"))
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.load_state(str(tmp_path / "state"))
        states.append({name: each.clone() for name, each in accelerator.get_state_dict(prepared).items()})
        if isinstance(model, Checkpointable):
            assert model.plan is not None
            assert "_original_forward" not in vars(model.module)
            assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(torch.ones(8, 16)).dtype == torch.float32
    assert states[0].keys() == states[1].keys()
    assert [name for name, one in states[0].items() if not torch.equal(one, states[1][name])] == []
