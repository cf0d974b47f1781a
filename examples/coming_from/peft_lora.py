"""LoRA with PEFT, before and after: ``python examples/coming_from/peft_lora.py``."""

from __future__ import annotations

import torch
from comparing import Training, compare
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rotor import Checkpointable

LIMIT = "2500KiB"


def adapted() -> nn.Module:
    """A Llama of four layers whose queries and values are adapted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def loop(model: nn.Module) -> Training:
    """Your loop, which stays as it is."""
    training = Training()
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), 1e-2)
    for _ in range(6):
        words = torch.randint(128, (4, 64))
        with training.step():
            model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.ends(model)


def before() -> Training:
    """Train as always."""
    model = adapted()
    return loop(model)


def after() -> Training:
    """Train inside the limit: one line more, behind ``get_peft_model``."""
    model = adapted()
    model = Checkpointable(model, mem_limit=LIMIT)
    return loop(model)


if __name__ == "__main__":
    compare(before, after, LIMIT)
