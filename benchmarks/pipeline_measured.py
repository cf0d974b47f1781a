"""Two gloo processes on the CPU, one thread each: how long steps take, against the simulator and the ideal (``pipeline.py --measure``).

The model is a row of equal residual blocks, wide enough that messages are small beside the work. One process runs all micro-batches one after the
other without any pipeline, which is the unit: with ``t`` for a micro-batch, a perfect pipeline over two devices takes ``(m + 1) / 2 · t`` for ``m``
micro-batches under GPipe and 1F1B. All combinations run in turn in every round, both processes starting together, and of each the median over
rounds counts, as a ratio to the same round's unit.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.pipeline.micro_batches import sizes_of, split
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.pipeline.processes import PipelineProcesses

SCHEDULES: tuple[PipelineScheduleName, ...] = ("gpipe", "1f1b", "interleaved")
MICRO_BATCHES = (2, 4, 8, 16)
_WORLD, _BLOCKS, _WIDTH, _ROWS = 2, 8, 384, 192
_TIMEOUT = timedelta(minutes=5)


class _Block(nn.Module):
    """``x + mlp(x)``: 1.2 MB of weights in, 0.3 MB of activations out."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return x + self.mlp(x)


def measured(rounds: int) -> list[dict[str, Any]]:
    """By schedule and number of micro-batches: measured, simulated and ideal duration of a step, in micro-batches of one process."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [context.Process(target=_work, args=(rank, store, rounds, answers)) for rank in range(_WORLD)]
        for process in processes:
            process.start()
        found: list[dict[str, Any]] = answers.get(timeout=_TIMEOUT.total_seconds() + 120)
        for process in processes:
            process.join()
    return found


def _work(rank: int, store: str, rounds: int, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(_WORLD), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, _WORLD), rank=rank, world_size=_WORLD, timeout=_TIMEOUT)
    pipelines = {(name, m): _built(name, m) for name in SCHEDULES for m in MICRO_BATCHES}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in pipelines}
    for number in range(rounds + 1):
        unit = _unit_seconds()
        for key, made in pipelines.items():
            spent = _step_seconds(made, key[1])
            if number:  # the first round warms up
                seconds[key].append(spent / unit)
    if rank == 0:
        answers.put([_row(made, *key, seconds[key]) for key, made in pipelines.items()])
    dist.barrier()
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[_Block() for _ in range(_BLOCKS)])


def _built(name: PipelineScheduleName, m: int) -> PipelinedModule:
    model, per_device = _model(), 2 if name == "interleaved" else 1
    options = PipelineOptions(m, name, "never", "auto", per_device)
    made = pipelined(
        model, model, ((torch.randn(_ROWS, _WIDTH),), {}), options=options,
        kept=lambda tensors: 0, processes=PipelineProcesses(torch.device("cpu")),
    )  # fmt: skip
    made.placement.give_up()
    return made


def _step_seconds(made: PipelinedModule, m: int) -> float:
    rows = m * _ROWS
    inputs = made.runner.inputs(split(((torch.randn(rows, _WIDTH),), {}), sizes_of(rows, m)))
    dist.barrier()
    start = time.perf_counter()
    made.runner.run(inputs, lambda output, _: output.sum(), seed=0)
    dist.barrier()
    return time.perf_counter() - start


def _unit_seconds() -> float:
    """One micro-batch through the whole model, both processes at once, so that each has what the other leaves it: the median of several."""
    model, x = _model(), torch.randn(_ROWS, _WIDTH)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - start)
    mine = torch.tensor(statistics.median(times))
    dist.all_reduce(mine)
    return float(mine) / _WORLD


def _row(made: PipelinedModule, name: str, m: int, ratios: list[float]) -> dict[str, Any]:
    chain = made.partition.problem.chain
    unit = sum(stage.keep.forward_seconds + stage.keep.backward_seconds for stage in chain)
    return {
        "schedule": name, "micro_batches": m, "rounds": len(ratios),
        "measured": statistics.median(ratios), "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "simulated": made.partition.seconds / unit,
        "ideal": (m + _WORLD - 1) / _WORLD if name != "interleaved" else (m + (_WORLD - 1) / 2) / _WORLD,
    }  # fmt: skip
