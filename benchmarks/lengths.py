"""Another length at every step: a plain step against the same step under a plan, for models that people train on text.

    OMP_NUM_THREADS=1 python -m benchmarks.lengths                      # writes benchmarks/results/lengths.md
    OMP_NUM_THREADS=1 python -m benchmarks.lengths --models BERT --lengths 12

Weights are random and steps alternate: plain, under the plan, and under the plan once more in front of the allocator's log. Each takes the same
batch and the same random numbers; loss and gradients are compared bit for bit. The limit is 60 % of the plain step's peak at the longest
length, and what the first steps take (recording, measuring) is left out of the ratios, as they begin with the fifth step. Seconds are
those that the thread was computing.
"""

from __future__ import annotations

import argparse
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

import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_rotor import Checkpointable
from lightning_rotor.capture.recorder import Recorder
from lightning_rotor.profiling import StepMeter
from lightning_rotor.units import format_bytes

RESULT = Path(__file__).parent / "results" / "lengths.md"
BATCH, LONGEST, SHORTEST = 4, 256, 32
WORDS = 1000
ALLOWED = 1.25
FIRST = 4  # steps before the ratios begin


class Tagger(nn.Module):
    """A recurrent network over padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 128)
        self.before = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 128))
        self.cells = nn.GRU(128, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.after = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, WORDS))

    def forward(self, input_ids: torch.Tensor, sizes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of a batch of words ``(batch, length)`` and how many each row has."""
        packed = pack_padded_sequence(self.before(self.words(input_ids)), sizes, batch_first=True, enforce_sorted=False)
        output, _ = self.cells(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=input_ids.shape[1])
        return nn.functional.cross_entropy(self.after(padded).flatten(0, 1), labels.flatten())


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


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, random.Random], dict[str, Any]]]] = {
    "BERT": (bert, lambda length, draw: text(length, draw, no_cache=False)),
    "GPT-2": (gpt2, lambda length, draw: text(length, draw, padded=False)),
    "Llama": (llama, text),
    "T5": (t5, text),
    "GRU, packed": (Tagger, sentences),
}


@dataclass
class Steps:
    """What the steps of one model took."""

    plain: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    recorded: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    same: bool = True


def step(net: nn.Module, batch: dict[str, Any], seed: int) -> tuple[float, list[torch.Tensor]]:
    """Seconds of one step, and its loss and gradients."""
    net.zero_grad()
    torch.manual_seed(seed)
    began = time.thread_time()
    output = net(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    seconds = time.thread_time() - began
    found = [loss.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]
    net.zero_grad()
    return seconds, found


def peak_of(net: nn.Module, batch: dict[str, Any]) -> int:
    """Peak of a step above its beginning."""
    meter = StepMeter(torch.device("cpu"))
    meter.start()
    step(net, batch, 0)
    return meter.stop().peak_bytes


def run(name: str, lengths: list[int]) -> tuple[Steps, int]:
    """Train plainly and under a plan, in turns. Returns the limit as well."""
    torch.manual_seed(0)
    build, batch_of = WORKLOADS[name]
    net, draw = build().train(), random.Random(1)
    step(net, batch_of(LONGEST, draw), 0)
    limit = int(0.6 * peak_of(net, batch_of(LONGEST, draw)))
    planned, steps, recorded = Checkpointable(net, mem_limit=limit, show_progress=False), Steps(), 0
    plain_record = Recorder.record

    def counting(recorder: Recorder) -> Any:
        nonlocal recorded
        recorded += 1
        return plain_record(recorder)

    for number, length in enumerate(lengths):
        batch, before = batch_of(length, draw), recorded
        seconds, expected = step(net, batch, number)
        with patch.object(Recorder, "record", counting):
            under_plan, found = step(planned, batch, number)
        assert planned.plan is not None
        steps.plain.append(seconds)
        steps.planned.append(under_plan)
        steps.overheads.append(planned.plan.overhead)
        steps.recorded.append(recorded - before)
        steps.same &= len(expected) == len(found) and all(map(torch.equal, expected, found))
        del expected, found
        steps.peaks.append(peak_of(planned, batch))
    return steps, limit


def row(name: str, lengths: list[int], *, verbose: bool) -> str:
    """A line of the table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, limit = run(name, lengths)
    if verbose:
        for each in zip(lengths, steps.plain, steps.planned, steps.overheads, steps.recorded, steps.peaks, strict=True):
            print("{:4d}  {:7.3f} {:7.3f} s  {:+5.1%}  {} recorded  {:,} bytes".format(*each))
    later = slice(FIRST, None)
    ratios = [under / plain for under, plain in zip(steps.planned[later], steps.plain[later], strict=True)]
    # Each step by the overhead of its own plan: short ones recompute nothing, and long ones much.
    beyond = [ratio / (1 + overhead) for ratio, overhead in zip(ratios, steps.overheads[later], strict=True)]
    overhead = statistics.median(steps.overheads[later])
    kept = sum(peak <= limit for peak in steps.peaks)
    return (
        f"| {name} | {statistics.median(steps.plain):.3f} s | {statistics.median(ratios):.2f} | {overhead:.0%} | "
        f"{statistics.median(beyond):.2f} | {sum(each > ALLOWED for each in beyond)} of {len(beyond)} | {max(ratios):.1f} | {sum(steps.recorded)} | "
        f"{kept} of {len(lengths)} | {format_bytes(limit)} | {'yes' if steps.same else '**no**'} |"
    )


def main() -> None:
    """Measure, print, and write the table if it has all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--lengths", type=int, default=64)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--to", type=Path, help="file of the table; by default with all models alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(given.lengths)]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    lines = [
        "# Another length at every step",
        "",
        f"`python -m benchmarks.lengths --lengths {given.lengths}`, {versions}, {os.environ.get('OMP_NUM_THREADS', '?')} thread, batch {BATCH}, "
        f"{SHORTEST} to {LONGEST} words.",
        "Ratio is a step under the plan by the plain step of the same length, from the fifth step on; beyond the plan is that",
        f"by one and the overhead of the plan that the step ran under, of which {ALLOWED} is allowed in the median. Recorded is how",
        "often the forward was recorded.",
        "",
        "| model | plain step | ratio | plan's overhead | beyond the plan | slower | largest ratio | recorded | peak in limit | limit | same bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
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
