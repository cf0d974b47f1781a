"""Another size at every step: whole trainings under a limit, beside the same steps without one.

    OMP_NUM_THREADS=1 python -m benchmarks.lengths                      # writes benchmarks/results/lengths.md
    OMP_NUM_THREADS=1 python -m benchmarks.lengths --models BERT --steps 60

A Trainer trains under the callback. Behind each of its steps a copy of the model takes the same step plainly: the same batch, random numbers
and optimizer. So both are timed in turns, in seconds that the thread was computing, and their weights must be equal at the end. The limit is
what parameters, gradients and the optimizer's state take, and 60 % of the activations of the largest batch. A second, shorter training has
all of its steps measured by the allocator.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback
from lightning_rotor.planned import step_watch
from lightning_rotor.planned.budget_source import CallRan
from lightning_rotor.planned.step_planner import StepPlanner
from lightning_rotor.profiling import StepMeter
from lightning_rotor.units import format_bytes

RESULT = Path(__file__).parent / "results" / "lengths.md"
BATCH, SHORTEST, LONGEST = 4, 8, 512
WORDS = 1000
KEPT = 0.6  # of the largest batch's activations, inside the limit
FIRST = 20  # steps before the ratios begin
ALLOWED = 1.15
WATCHED = 60  # steps of the training whose peaks are all measured
STATE = 4  # parameters, gradients and AdamW's two moments, in sizes of the parameters


# ---------------------------------------------------------------- models and their batches


class Tagger(nn.Module):
    """A recurrent network over padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.before = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 128))
        self.cells = nn.LSTM(128, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.after = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, WORDS))

    def forward(self, input_ids: torch.Tensor, sizes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of a batch of words ``(batch, length)`` and how many each row has."""
        packed = pack_padded_sequence(self.before(self.words(input_ids)), sizes, batch_first=True, enforce_sorted=False)
        output, _ = self.cells(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=input_ids.shape[1])
        return nn.functional.cross_entropy(self.after(padded).flatten(0, 1), labels.flatten())


class Small(nn.Module):
    """Four layers of torch's own transformer, 48 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 48), nn.Linear(48, WORDS)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of words ``(batch, length)``."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Speech(nn.Module):
    """Frames of a spectrogram through convolutions that halve their number twice, and a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(80, 96, 3, stride=2, padding=1), nn.GELU(), nn.Conv1d(96, 96, 3, stride=2, padding=1), nn.GELU()
        )
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(96, 4, 384, batch_first=True) for _ in range(4))
        self.head = nn.Linear(96, 64)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Loss of frames ``(batch, 80, time)``."""
        x = self.front(frames).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).square().mean()


class EdgeConvolution(nn.Module):
    """A weight matrix for each edge, made by a network from its features."""

    def __init__(self, width: int = 16, features: int = 4) -> None:
        super().__init__()
        self.width = width
        self.net = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, width * width))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Sums of messages over edges ``(2, edges)``, for nodes ``(nodes, width)``."""
        weight = self.net(features).view(-1, self.width, self.width)
        sent = (x[edges[0]].unsqueeze(1) @ weight).squeeze(1)
        return torch.zeros_like(x).index_add_(0, edges[1], sent)


class MessagePassing(nn.Module):
    """One edge network that is called three times, as that of quantum chemistry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.cell = nn.Linear(8, 16), EdgeConvolution(), nn.GRUCell(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Loss of a graph."""
        h = torch.relu(self.first(x))
        for _ in range(3):
            h = self.cell(torch.relu(self.conv(h, edges, features)), h)
        return h.square().mean()


class Pairs(nn.Module):
    """One encoder for two sentences of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 48)
        self.encoder = nn.Sequential(*(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True) for _ in range(3)))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Loss of words ``(batch, length)``, twice."""
        ends = [self.encoder(self.embed(words)).mean(1) for words in (left, right)]
        return nn.functional.mse_loss(*ends)


def hub(kind: str, config: str, **options: Any) -> nn.Module:
    """A model of transformers with random weights."""
    return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=WORDS, **options))


def bert() -> nn.Module:
    """Six layers, 128 wide."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    return hub("BertForMaskedLM", "BertConfig", **sizes)


def gpt2() -> nn.Module:
    """Six layers, 128 wide."""
    return hub("GPT2LMHeadModel", "GPT2Config", n_embd=128, n_layer=6, n_head=4)


def llama() -> nn.Module:
    """Four layers, 128 wide."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 352}
    return hub("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **sizes)


def t5() -> nn.Module:
    """Three layers of encoder and of decoder, 128 wide."""
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
    return hub("T5ForConditionalGeneration", "T5Config", **sizes)


def text(length: int, draw: random.Random, *, no_cache: bool = True, padded: bool = True) -> dict[str, Any]:
    """A batch whose longest row has this length."""
    sizes = torch.tensor([length, *(draw.randint(length // 2, length) for _ in range(BATCH - 1))])
    ids = torch.randint(WORDS, (BATCH, length))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(length) < sizes[:, None]).long()
    return batch | ({"use_cache": False} if no_cache else {})


def sentences(length: int, draw: random.Random) -> dict[str, Any]:
    """Words, and how many each row has."""
    batch = text(length, draw, no_cache=False)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "sizes": batch["attention_mask"].sum(1)}


def graph(nodes: int, draw: random.Random) -> dict[str, Any]:
    """Nodes and two to six times as many edges."""
    edges = torch.randint(0, nodes, (2, int(nodes * draw.uniform(2, 6))))
    return {"x": torch.randn(nodes, 8), "edges": edges, "features": torch.randn(edges.shape[1], 4)}


def pair(length: int, draw: random.Random) -> dict[str, Any]:
    """Two sentences."""
    other = draw.randint(SHORTEST, LONGEST)
    return {"left": torch.randint(WORDS, (BATCH, length)), "right": torch.randint(WORDS, (BATCH, other))}


Batch = Callable[[int, random.Random], dict[str, Any]]
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "small transformer": (Small, lambda length, draw: text(length, draw, no_cache=False, padded=False)),
    "BERT": (bert, lambda length, draw: text(length, draw, no_cache=False)),
    "GPT-2": (gpt2, lambda length, draw: text(length, draw, padded=False)),
    "Llama": (llama, text),
    "T5": (t5, text),
    "LSTM, packed": (Tagger, sentences),
    "speech": (Speech, lambda length, _: {"frames": torch.randn(BATCH, 80, 2 * length)}),
    "edge network, three calls": (MessagePassing, graph),
    "pairs, two calls": (Pairs, pair),
}


# ---------------------------------------------------------------- a training, and the same steps plainly


class Training(L.LightningModule):
    """The model, as its output is its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        """Loss of a batch."""
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As the copy has it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def loss_of(net: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Loss of a batch."""
    output = net(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


@dataclass
class Steps:
    """What the steps of one training took."""

    plain: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    needless: list[bool] = field(default_factory=list)
    peaks: list[int | None] = field(default_factory=list)
    same: bool = True


class Begin(L.Callback):
    """In front of the callback: the clock, and random numbers."""

    began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """A step begins."""
        torch.manual_seed(trainer.global_step)
        self.began = time.thread_time()


class Beside(L.Callback):
    """Behind the callback: reads the clock, and takes the same step plainly."""

    def __init__(self, net: nn.Module, begin: Begin, limit: int) -> None:
        self.net, self.begin, self.limit = copy.deepcopy(net), begin, limit
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.steps = Steps()
        self.ran: list[CallRan] = []
        self._plain_peaks: dict[Any, int] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, model: L.LightningModule, out: Any, batch: Any, number: int
    ) -> None:
        """A step is over."""
        steps = self.steps
        steps.planned.append(time.thread_time() - self.begin.began)
        plans = [event.prepared.plan for event in self.ran]
        self.ran.clear()
        plain = sum(plan.seconds / (1 + plan.overhead) for plan in plans)
        steps.overheads.append(sum(plan.seconds for plan in plans) / plain - 1 if plans else 0.0)
        steps.needless.append(any(plan.recomputed for plan in plans) and self._fits(batch))
        torch.manual_seed(number)
        began = time.thread_time()
        self.optimizer.zero_grad()
        loss_of(self.net, batch).backward()
        self.optimizer.step()
        steps.plain.append(time.thread_time() - began)

    def _fits(self, batch: dict[str, Any]) -> bool:
        """True if a batch fits without recomputation."""
        size = tuple(tuple(value.shape) for value in batch.values() if isinstance(value, torch.Tensor))
        if size not in self._plain_peaks:
            self._plain_peaks[size] = peak_of(self.net, batch)
        return self._plain_peaks[size] <= self.limit


def peak_of(net: nn.Module, batch: dict[str, Any]) -> int:
    """Peak of a plain step, with weights, gradients and the optimizer's state."""
    weights = sum(parameter.nbytes for parameter in net.parameters())
    copied = copy.deepcopy(net)
    loss_of(copied, batch).backward()  # gradients are there in later steps
    meter = StepMeter(torch.device("cpu"))
    meter.start()
    loss_of(copied, batch).backward()
    inputs = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    return STATE * weights + inputs + meter.stop().peak_bytes


def fit(net: nn.Module, batches: list[dict[str, Any]], callbacks: list[L.Callback]) -> None:
    """Train."""
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Training(net.train()), DataLoader(batches, batch_size=None))


def run(name: str, lengths: list[int]) -> tuple[Steps, int]:
    """Train under a limit and plainly, in turns. Returns the limit as well."""
    torch.manual_seed(0)
    build, batch_of = WORKLOADS[name]
    net, draw = build().train(), random.Random(1)
    batches = [batch_of(length, draw) for length in lengths]
    weights = STATE * sum(parameter.nbytes for parameter in net.parameters())
    largest = max(peak_of(net, batch) for batch in sorted(batches, key=size_of)[-3:])
    limit = int(weights + KEPT * (largest - weights))
    rotor, begin = RotorCallback(limit, show_table=False), Begin()
    watched, beside = copy.deepcopy(net), Beside(net, begin, limit)
    hear = StepPlanner.hear

    def heard(planner: StepPlanner, event: Any) -> None:
        if isinstance(event, CallRan):
            beside.ran.append(event)
        hear(planner, event)

    with patch.object(StepPlanner, "hear", heard):
        fit(net, batches, [begin, rotor, beside])
    steps = beside.steps
    pairs = zip(net.state_dict().values(), beside.net.state_dict().values(), strict=True)
    steps.same = all(torch.equal(left, right) for left, right in pairs)
    rotor = RotorCallback(limit, show_table=False)

    class Peaks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.peaks.append(rotor.measured_peak_bytes)

    with patch.object(step_watch, "_STEPS", 10**9):
        fit(watched, batches[:WATCHED], [rotor, Peaks()])
    return steps, limit


def size_of(batch: dict[str, Any]) -> int:
    """Elements of a batch."""
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


# ---------------------------------------------------------------- the table


def row(name: str, lengths: list[int], *, verbose: bool) -> str:
    """A line of the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, limit = run(name, lengths)
    if verbose:
        for each in zip(lengths, steps.plain, steps.planned, steps.overheads, steps.needless, strict=True):
            print("{:4d}  {:7.4f} {:7.4f} s  {:+5.1%}  {}".format(*each))
    later = slice(FIRST, None)
    plain, planned, overheads = steps.plain[later], steps.planned[later], steps.overheads[later]
    expected = [seconds * (1 + overhead) for seconds, overhead in zip(plain, overheads, strict=True)]
    medians = [under / seconds for under, seconds in zip(planned, expected, strict=True)]
    peaks = [peak for peak in steps.peaks[1:] if peak is not None]
    return (
        f"| {name} | {statistics.median(steps.plain):.3f} s | {sum(planned) / sum(plain):.2f} | "
        f"{sum(expected) / sum(plain) - 1:.0%} | {sum(planned) / sum(expected):.2f} | {statistics.median(medians):.2f} | "
        f"{sum(steps.needless[later])} of {len(plain)} | {sum(steps.planned[:FIRST]):.1f} s | "
        f"{sum(peak <= limit for peak in peaks)} of {len(peaks)} | {max(peaks, default=0) / limit:.0%} | {format_bytes(limit)} | "
        f"{'yes' if steps.same else '**no**'} |"
    )


def main() -> None:
    """Measure, print, and write the table if it has all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--to", type=Path, help="file of the table; by default with all models alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(given.steps)]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    lines = [
        "# Another size at every step",
        "",
        f"`python -m benchmarks.lengths --steps {given.steps}`, {versions}, {os.environ.get('OMP_NUM_THREADS', '?')} thread, batch {BATCH}, "
        f"{SHORTEST} to {LONGEST} words, frames (twice as many) or nodes.",
        f"Total is the time of all steps from number {FIRST} on, with planning, measuring and the optimizer, by that of the plain ones; beyond",
        f"the plans is that by one and what the plans were to take, of which {ALLOWED} is allowed. Median is of single steps, likewise.",
        "Needless are steps that recompute though they fit. First is the time of the steps before. Peaks are those of a training in which",
        f"each of {WATCHED} steps was measured, from the second on; used is the highest.",
        "",
        "| model | plain step | total | plans' overhead | beyond the plans | median | needless | first | peak in limit | used | limit | same bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    print(*lines[-2:], sep="\n")
    for name in given.models:
        lines.append(row(name, lengths, verbose=given.verbose))
        print(lines[-1], flush=True)
    target = given.to or (RESULT if set(given.models) == set(WORKLOADS) else None)
    if target is not None:
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
