"""What RotorCallback costs where its plan recomputes nothing: the same training with and without it, step by step in turns.

    python benchmarks/overhead.py            # writes benchmarks/results/overhead.md

Two Trainers would not share the machine's mood, so both models train in one process: step n of one, then step n of the other, the order of each pair
drawn at random. What counts is the median over pairs of the difference, as a share of the median step.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader

from lightning_rotor import RotorCallback

RESULT = Path(__file__).parent / "results" / "overhead.md"
WARM_UP = 6


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
    """Steps of two trainings in turns; each in a thread of its own, one of which runs at a time."""

    def __init__(self, turn: threading.Semaphore, done: threading.Semaphore) -> None:
        self.turn, self.done, self.seconds = turn, done, []

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait for the other."""
        self.done.release()
        self.turn.acquire()


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


class Training:
    """One fit in a thread, stepped from outside."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, torch.Tensor]], steps: int, callbacks: list[L.Callback]
    ) -> None:
        torch.manual_seed(0)
        body, batch = make()
        self.turns = Turns(threading.Semaphore(0), threading.Semaphore(0))
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*callbacks, self.turns],
        )  # fmt: skip
        data = DataLoader([batch] * steps, batch_size=None)
        self._thread = threading.Thread(target=trainer.fit, args=(Task(body), data), daemon=True)

    def step(self) -> float:
        """Seconds of the next step."""
        start = time.perf_counter()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self.turns.turn.release()
        if not self.turns.done.acquire(timeout=300):
            raise RuntimeError("a step did not end within 300 s")
        return time.perf_counter() - start

    def end(self) -> None:
        """Let the fit return."""
        self.turns.turn.release()
        self._thread.join()


def compare(make: Callable[[], tuple[nn.Module, torch.Tensor]], pairs: int) -> tuple[float, float]:
    """Seconds of a plain step, and what the callback adds."""
    rotor = RotorCallback("64GiB", "body", show_table=False)
    steps = pairs + WARM_UP
    plain, planned = Training(make, steps, []), Training(make, steps, [rotor])
    seconds: dict[Training, list[float]] = {plain: [], planned: []}
    for _ in range(steps):
        for training in random.sample([plain, planned], 2):
            seconds[training].append(training.step())
    for training in (plain, planned):
        training.end()
    if rotor.plan is None or rotor.plan.recomputed:
        raise RuntimeError("the plan recomputes, which is not what this is about")
    differences = [with_it - without for without, with_it in zip(*seconds.values(), strict=True)]
    return statistics.median(seconds[plain][WARM_UP:]), statistics.median(differences[WARM_UP:])


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    lines = ["| model | plain step | the callback adds | share |", "|---|---:|---:|---:|"]
    for name, make in MODELS.items():
        plain, added = compare(make, pairs)
        lines.append(f"| {name} | {1e3 * plain:.1f} ms | {1e6 * added:+.0f} µs | {added / plain:+.2%} |")
        sys.stderr.write(lines[-1] + "\n")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread; load {os.getloadavg()[0]:.1f}"
    head = (
        "# Overhead of RotorCallback under a plan that recomputes nothing\n\n"
        f"`python benchmarks/overhead.py --pairs {pairs}`, torch {torch.__version__}, {machine}. Medians over {pairs} pairs of steps, "
        "one without and one with the callback in random order.\n"
    )
    RESULT.write_text(head + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
