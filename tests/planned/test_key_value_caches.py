"""Caches of keys and values are left out in training, and asked for again behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rotor.planned.attachment import attach
from lightning_rotor.planned.key_value_caches import ForwardWithoutCaches, KeyValueCaches


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def test_they_are_off_inside_and_on_behind_even_after_an_error() -> None:
    model = small_llama()
    caches = KeyValueCaches(model)
    assert caches
    with caches.off():
        assert model.config.use_cache is False
    assert model.config.use_cache is True
    with pytest.raises(RuntimeError, match="in the middle"), caches.off():
        raise RuntimeError("in the middle")
    assert model.config.use_cache is True


def test_a_module_of_anybody_elses_has_none() -> None:
    module: Any = nn.Linear(2, 2)
    module.config = type("Config", (), {"use_cache": True})()
    assert not KeyValueCaches(module)


def test_a_forward_without_caches_fills_them_in_evaluation_alone() -> None:
    model = small_llama()
    attach(model, ForwardWithoutCaches(KeyValueCaches(model)))
    tokens = torch.randint(0, 32, (1, 4))
    assert model(tokens).past_key_values is None
    assert model.eval()(tokens).past_key_values is not None
