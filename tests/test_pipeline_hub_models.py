"""Models of transformers, as they come, in a pipeline over two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import run_python

SCRIPT = """
import json, os, sys, warnings
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from lightning_rotor.errors import RotorWarning
from lightning_rotor.strategies import RotorPipelineStrategy

torch.set_num_threads(1)
warnings.simplefilter("ignore")

class Text(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, resid_pdrop=0,
                                              embd_pdrop=0, attn_pdrop=0))
    def training_step(self, tokens, index):
        return nn.functional.cross_entropy(self.net(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(0))

def piped(model):
    strategy = RotorPipelineStrategy("net", micro_batches=2, process_group_backend="gloo", mem_limit="1GiB")
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed", max_epochs=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(tokens, 8))
    return model

alone = Text()
optimizer = alone.configure_optimizers()
for batch in tokens.split(8):
    optimizer.zero_grad()
    for part in batch.chunk(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = alone.training_step(part, 0)
        (loss / 2).backward()
    optimizer.step()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", RotorWarning)
    model = piped(Text())
said = sum("sets use_cache=False" in str(warning.message) for warning in caught)
states = model.state_dict(), alone.state_dict()
worst = max(float((states[0][name] - value).abs().max()) for name, value in states[1].items())
with open(__file__ + os.environ["RANK"], "w") as answer:
    json.dump({"worst": worst, "said": said, "use_cache": model.net.config.use_cache}, answer)
"""


@pytest.mark.feature("Strategies", "RotorPipelineStrategy, a GPT-2 of transformers with use_cache, bf16-mixed")
def test_a_model_that_returns_a_cache_trains_without_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run_python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    for rank in range(2):
        found = json.loads((tmp_path / f"train.py{rank}").read_text(encoding="utf-8"))
        assert found["worst"] < 1e-6
        assert found["said"] == (rank == 0)
        assert found["use_cache"] is True
