"""What plans promise of a step's time, against what steps under them take.

    OMP_NUM_THREADS=1 python -m benchmarks.predictions                       # writes benchmarks/results/predictions.md
    OMP_NUM_THREADS=1 python -m benchmarks.predictions gpt8 bert --rounds 10

The workloads of :mod:`benchmarks.frontier` and six more, five budgets each, spread evenly from the least that a plan needs to what a plan
needs that recomputes next to nothing. Steps are taken in turns, the plain one and one under each plan, so that a disturbance meets all; a step's
time is the median over the rounds of its time by the round's plain step. Seconds are those that the thread was computing. The error is the
measured overhead less the predicted one, in points: hundredths of a plain step.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.frontier_workloads import WORKLOADS as OF_THE_RACE
from benchmarks.lengths import WORKLOADS as OF_TEXT
from lightning_rotor import Checkpointable, Plan
from lightning_rotor.planning import minimum_budget
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

RESULT = Path(__file__).parent / "results" / "predictions.md"
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
LENGTH, IMAGE = 128, 96
Built = tuple[nn.Module, dict[str, Any], Callable[[Any], torch.Tensor]]


def of_the_race(name: str) -> Built:
    """The module, its arguments by name, and the loss of its output."""
    workload = OF_THE_RACE[name]("cpu", True)
    return Named(workload.net), dict(zip("xyz", workload.inputs, strict=False)), workload.loss


class Named(nn.Module):
    """A model that takes its arguments by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, *more: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the model."""
        return self.net(x) if y is None else self.net(x, y)


def of_text(name: str) -> Built:
    """A model of transformers for one length."""
    build, batch_of = OF_TEXT[name]
    return build().train(), batch_of(LENGTH, random.Random(1)), lambda output: output.loss


def of_images(name: str) -> Built:
    """A model of torchvision, small images."""
    net = getattr(torchvision.models, name)(num_classes=10).train()
    for module in net.modules():  # stochastic depth decides in each step how much there is to do
        if isinstance(module, torchvision.ops.StochasticDepth):
            module.p = 0.0
    images = torch.randn(4, 3, IMAGE, IMAGE)
    return Named(net), {"x": images}, lambda output: output.square().mean()


WORKLOADS: dict[str, Callable[[], Built]] = {
    **{name: partial(of_the_race, name) for name in OF_THE_RACE},
    **{name.lower(): partial(of_text, name) for name in ("BERT", "Llama", "T5")},
    **{name: partial(of_images, name) for name in ("convnext_tiny", "swin_t", "efficientnet_b0")},
}


def plans_of(net: Checkpointable) -> list[Plan]:
    """Plans for budgets from the least to nearly all, those that recompute."""
    assert net.chain is not None
    least = minimum_budget(net.chain).peak_bytes
    most = simulate(net.chain, Schedule.keep_all(len(net.chain))).peak_bytes
    return [net.compute_sequence(int(least + share * (most - least))) for share in SHARES]


def seconds_of(step: Callable[[], None]) -> float:
    """Processor seconds of a step."""
    gc.collect()
    began = time.thread_time()
    step()
    return time.thread_time() - began


def rows(name: str, rounds: int) -> list[tuple[str, float, float, float]]:
    """For each budget: the workload, the plain step's seconds, the predicted and the measured overhead."""
    torch.manual_seed(0)
    module, inputs, loss = WORKLOADS[name]()
    net = Checkpointable(module, inputs, show_progress=False)
    plans = plans_of(net)

    def step(run: nn.Module, plan: Plan | None = None) -> float:
        module.zero_grad()
        if plan is not None:
            net.use(plan)

        def whole() -> None:
            loss(run(**inputs)).backward()

        return seconds_of(whole)

    step(module)
    times = [[step(module), *(step(net, plan) for plan in plans)] for _ in range(rounds)]
    plain = statistics.median(each[0] for each in times)
    found = []
    for number, plan in enumerate(plans, 1):
        measured = statistics.median(each[number] / each[0] for each in times) - 1
        found.append((name, plain, plan.overhead, measured))
        segments = str(plan.schedule).count("(")
        print(f"{name:16} {plain:7.3f} s {plan.overhead:7.1%} {measured:7.1%}  {segments} segments", flush=True)
    print(f"{name:16} plain {plain:.4f} s, by its stages {plans[0].chain.step_seconds:.4f} s", flush=True)
    return found


def main() -> None:
    """Measure, print, and write the table if it has all workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--to", type=Path, help="file of the table; by default with all workloads alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [row for name in given.workloads or WORKLOADS for row in rows(name, given.rounds)]
    errors = sorted(100 * abs(measured - predicted) for _, _, predicted, measured in found)
    at_95 = errors[min(int(0.95 * len(errors)), len(errors) - 1)]
    lines = [
        "# Predicted against measured overhead",
        "",
        f"`python -m benchmarks.predictions --rounds {given.rounds}`, torch {torch.__version__}, {platform.machine()}, "
        f"{os.environ.get('OMP_NUM_THREADS', '?')} thread, load {os.getloadavg()[0]:.1f}.",
        f"Error: {statistics.median(errors):.1f} points of a plain step in the median, {at_95:.1f} at 95 %, of "
        f"{len(errors)} plans.",
        "",
        "| workload | plain step | predicted | measured | points |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {name} | {plain:.3f} s | {predicted:.1%} | {measured:.1%} | {100 * (measured - predicted):+.1f} |"
            for name, plain, predicted, measured in found
        ),
    ]
    print(lines[3])
    target = given.to or (None if given.workloads else RESULT)
    if target is not None:
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
