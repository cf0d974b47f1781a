"""What RotorCallback costs where its plan recomputes nothing: steps with and without it, in one training.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.overhead            # writes benchmarks/results/overhead.md
    python -m benchmarks.overhead --device cuda --to FILE                   # on a GPU

Two models, or two Trainers, differ by a percent for reasons of their own: where their memory lies, which of them came first. So there is one
training of one model, in which the callback comes and goes between steps: out of the Trainer's list, the module's own forward back in its place.
Each round has three steps in random order, two of them plain::

    plain │ plain again │ with the callback          difference of the first two: what this benchmark cannot see
                                                     of the first and the third: what the callback costs

Seconds are those that the thread was computing, so that what else the machine does counts little; on a GPU they are the clock's, up to the end of
the device's work. An interval around a median is that between two
order statistics, for which nothing needs to be known of the distribution. Python's calls of functions, which depend on nothing, are counted
besides.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback

RESULT = Path(__file__).parent / "results" / "overhead.md"
WARM_UP = 8  # the callback measures the first steps under a plan
COUNTED = 4
PLAIN, AGAIN, CALLBACK = "plain", "plain again", "callback"


class Task(L.LightningModule):
    """Any network, trained to small outputs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Square of the outputs."""
        loss = self.body(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Turns(L.Callback):
    """Lets another callback work in some of a training's steps, and takes the time of each. Comes after that one.

    Args:
        other: The callback.
        rounds: How many to measure.
        now: Seconds at which all work so far is done.
    """

    def __init__(self, other: RotorCallback, rounds: int, now: Callable[[], float]) -> None:
        order = [kind for _ in range(rounds) for kind in random.sample([PLAIN, AGAIN, CALLBACK], 3)]
        self._kinds = [CALLBACK] * WARM_UP + order + [PLAIN, CALLBACK] * COUNTED + [CALLBACK]
        self._first_counted = WARM_UP + len(order)
        self._other = other
        self._now = now
        self._began = 0.0
        self._calls = 0
        self._planned: Any = None
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.calls: dict[str, list[int]] = defaultdict(list)

    @property
    def steps(self) -> int:
        """That the training must have."""
        return len(self._kinds)

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        """A step is over; prepare the next."""
        seconds, step = self._now() - self._began, trainer.global_step - 1
        sys.setprofile(None)
        if step >= self._first_counted:
            self.calls[self._kinds[step]].append(self._calls)
        elif step >= WARM_UP:
            self.seconds[self._kinds[step]].append(seconds)
        if step + 1 < self.steps:
            self._switch(trainer, model, on=self._kinds[step + 1] == CALLBACK)
        self._calls, self._began = 0, self._now()
        if step + 1 >= self._first_counted:
            sys.setprofile(self._count)

    def _switch(self, trainer: L.Trainer, model: L.LightningModule, *, on: bool) -> None:
        # The very objects that the callback has put there: a step that finds others looks at the whole module.
        attributes = vars(model.body)
        if self._planned is None:
            self._planned = {name: attributes[name] for name in ("_lightning_rotor", "forward")}
        for name in self._planned:
            attributes.pop(name, None)
        if on:
            attributes.update(self._planned)
        # Another list: the Trainer is going through the present one.
        trainer.callbacks = [self._other, self] if on else [self]

    def _count(self, _: Any, event: str, __: Any) -> None:
        self._calls += event in ("call", "c_call")


def _deep_mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(256, 256), nn.ReLU()))), torch.randn(
        256, 256
    )


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    return torchvision.models.resnet18(num_classes=10), torch.randn(16, 3, 64, 64)


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(8, 128, 128)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "200 layers in an nn.Sequential": _deep_mlp,
    "ResNet-18, 16 images of 64 pixels": _resnet,
    "6 transformer layers, 8 x 128 tokens": _transformer,
}


@dataclass(frozen=True)
class Median:
    """Of some seconds, with a 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """The interval's ends are the k-th least and largest value, where k or more of n coins show heads in 97.5 % of cases."""
        ordered, rank = sorted(values), int(len(values) / 2 - 0.98 * math.sqrt(len(values)))
        rank = max(rank, 0)
        return cls(statistics.median(ordered), ordered[rank], ordered[-1 - rank])

    def share_of(self, whole: float) -> str:
        """As text, in percent."""
        return f"{self.value / whole:+.2%} ({self.low / whole:+.2%} to {self.high / whole:+.2%})"


def _after_the_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def compare(make: Callable[[], tuple[nn.Module, torch.Tensor]], rounds: int, device: str) -> Turns:
    """Train one model."""
    torch.manual_seed(0)
    body, batch = make()
    rotor = RotorCallback("64GiB" if device == "cpu" else "90%", "body", show_table=False)
    turns = Turns(rotor, rounds, time.thread_time if device == "cpu" else _after_the_device)
    trainer = L.Trainer(
        accelerator=device, devices=1, max_steps=turns.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[rotor, turns],
    )  # fmt: skip
    trainer.fit(Task(body), DataLoader([batch] * turns.steps, batch_size=None))
    if rotor.plan is None or rotor.plan.recomputed:
        raise RuntimeError("the plan recomputes, which is not what this is about")
    return turns


def row(name: str, turns: Turns) -> str:
    """One line of the table."""
    plain = turns.seconds[PLAIN]
    step = statistics.median(plain)
    null, added = (
        Median.of([other - one for one, other in zip(plain, turns.seconds[kind], strict=True)])
        for kind in (AGAIN, CALLBACK)
    )
    calls = {kind: round(statistics.median(turns.calls[kind])) for kind in (PLAIN, CALLBACK)}
    return (
        f"| {name} | {1e3 * step:.1f} ms | {null.share_of(step)} | {added.share_of(step)} | {1e6 * added.value:+.0f} µs | "
        f"{calls[CALLBACK] - calls[PLAIN]:+,} to {calls[PLAIN]:,} |"
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of three steps each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--to", type=Path, default=RESULT, help="file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    lines = [
        "| model | plain step | plain again adds | the callback adds | that is | Python calls in a step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in options.models:
        lines.append(row(name, compare(MODELS[name], options.rounds, options.device)))
        sys.stderr.write(lines[-1] + "\n")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread; load {os.getloadavg()[0]:.1f}"
    clock = "CPU seconds of the thread"
    if options.device == "cuda":
        machine, clock = torch.cuda.get_device_name(), "seconds up to the end of the device's work"
    head = (
        "# Overhead of RotorCallback under a plan that recomputes nothing\n\n"
        f"`python -m benchmarks.overhead --rounds {options.rounds}`, torch {torch.__version__}, {machine}. Medians over rounds of three steps in "
        f"random order in one training, in {clock}, with 95 % intervals; the third column is what the benchmark cannot see.\n"
    )
    options.to.write_text(head + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
