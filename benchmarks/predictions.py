"""What plans promise of a step's time, against what steps under them take.

    python -m benchmarks.predictions                       # writes benchmarks/results/predictions.md
    python -m benchmarks.predictions gpt8 bert --rounds 10

The workloads of :mod:`benchmarks.frontier` and six more, five budgets each, spread evenly from the least that a plan needs to what a plan
needs that recomputes next to nothing. Steps are taken in turns, two plain ones and two under each limit, so that a disturbance meets all.
The second counts: in a training, too, steps under one plan follow each other. A step's time is the median over the rounds of its time by
the round's plain step. Seconds are those that the thread was computing. The error is the measured overhead less the predicted one, in
points: hundredths of a plain step. Before, each plan runs until it has been timed and stays. The C library keeps freed memory, as in the
race: else plain steps, which take most, fault it in again, up to a twentieth of their time.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from benchmarks.frontier_workloads import KEEP_MEMORY
from benchmarks.frontier_workloads import WORKLOADS as OF_THE_RACE
from benchmarks.lengths import WORKLOADS as OF_TEXT
from lightning_rotor import Checkpointable
from lightning_rotor.planning import minimum_budget
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

RESULT = Path(__file__).parent / "results" / "predictions.md"
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
SETTLED = 9  # steps under one plan: it has been timed, and stays
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


def limits_of(net: Checkpointable) -> list[int]:
    """Limits from the least to nearly all."""
    assert net.chain is not None
    least = minimum_budget(net.chain).peak_bytes
    most = simulate(net.chain, Schedule.keep_all(len(net.chain))).peak_bytes
    # Measured again, the least of a long chain differs by up to 2.5 %: where its search ends depends on seconds.
    return [int(1.03 * least + share * (most - least)) for share in SHARES]


def seconds_of(step: Callable[[], None]) -> float:
    """Processor seconds of a step."""
    gc.collect()
    began = time.thread_time()
    step()
    return time.thread_time() - began


def settle(net: Checkpointable, step: Callable[[nn.Module], float]) -> float:
    """Step until a plan has stayed long enough to know what it takes. Returns the overhead that was predicted at first."""
    predicted, plan, steps = None, None, 0
    while steps < SETTLED:
        step(net)
        steps = steps + 1 if net.plan is plan else 1
        plan = net.plan
        assert plan is not None
        predicted = plan.overhead if predicted is None else predicted
    assert predicted is not None
    return predicted


def rows(name: str, rounds: int) -> list[tuple[str, float, float, float, float]]:
    """For each limit: the workload, the plain step's seconds, the overhead as predicted at first, then, and as measured."""
    torch.manual_seed(0)
    module, inputs, loss = WORKLOADS[name]()
    limits = limits_of(Checkpointable(module, inputs, show_progress=False))
    nets = [Checkpointable(module, mem_limit=limit, show_progress=False) for limit in limits]

    def step(run: nn.Module) -> float:
        module.zero_grad()
        return seconds_of(lambda: loss(run(**inputs)).backward())

    step(module)
    first = [settle(net, step) for net in nets]

    def second(run: nn.Module) -> float:
        step(run)
        return step(run)

    times = [[second(module), *map(second, nets)] for _ in range(rounds)]
    plain = statistics.median(each[0] for each in times)
    found = []
    for number, net in enumerate(nets, 1):
        plan = net.plan
        assert plan is not None
        measured = statistics.median(each[number] / each[0] for each in times) - 1
        found.append((name, plain, first[number - 1], plan.overhead, measured))
        segments = str(plan.schedule).count("(")
        print(
            f"{name:16} {plain:7.3f} s {' '.join(f'{each:7.1%}' for each in found[-1][2:])}  {segments} segments",
            flush=True,
        )
    return found


def error(differences: list[float]) -> str:
    """The median of the points, and those at 95 %."""
    points = sorted(100 * abs(each) for each in differences)
    return f"{statistics.median(points):.1f} and {points[min(int(0.95 * len(points)), len(points) - 1)]:.1f}"


def main() -> None:
    """Measure, print, and write the table if it has all workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help="all by default")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--to", type=Path, help="file of the table; by default with all workloads alone")
    given = parser.parse_args()
    settings = {**KEEP_MEMORY, "OMP_NUM_THREADS": "1"}
    if not settings.items() <= os.environ.items():  # the C library reads them as a process begins
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.predictions", *sys.argv[1:]], {**os.environ, **settings}
        )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [row for name in given.workloads or WORKLOADS for row in rows(name, given.rounds)]
    lines = [
        "# Predicted against measured overhead",
        "",
        f"`python -m benchmarks.predictions --rounds {given.rounds}`, torch {torch.__version__}, {platform.machine()}, "
        f"1 thread, load {os.getloadavg()[0]:.1f}.",
        "Error in points of a plain step, in the median and at 95 %: of what the first plan was to take "
        f"{error([row[4] - row[2] for row in found])}; of what the plan is to take that has stayed "
        f"{error([row[4] - row[3] for row in found])}; of {len(found)} limits. Measured in steps that come later.",
        "",
        "| workload | plain step | predicted at first | predicted by its steps | measured | points |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {name} | {plain:.3f} s | {first:.1%} | {predicted:.1%} | {measured:.1%} | {100 * (measured - predicted):+.1f} |"
            for name, plain, first, predicted, measured in found
        ),
    ]
    print(lines[3])
    target = given.to or (None if given.workloads else RESULT)
    if target is not None:
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
