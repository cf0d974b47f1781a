"""Training on the CPU within tight limits: recomputation alone beside plans that also move to a file.

    python -m benchmarks.offload_disk

A network of wide layers (long forwards beside what they save) trains a few steps with plain PyTorch, with recomputation alone and with
``offload="disk:…"``. The least limit of recomputation comes first, and one below it, that only moving keeps. Every way has to end with the
weights of plain training, to the bit. Peaks are the allocator's.

Writes ``benchmarks/results/offload_disk.md``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.errors import BudgetError
from lightning_rotor.profiling.step_meter import StepMeter
from lightning_rotor.units import format_bytes, format_seconds, format_speed

RESULTS = Path(__file__).parent / "results"
_WIDTH, _BLOCKS, _BATCH, _STEPS = 512, 6, 1024, 4
# Of the span from the least budget of recomputation to the peak without any.
_SHARES = (0.0, 0.4)


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one limit."""

    limit_bytes: int
    way: str
    plan: str
    step_seconds: float
    processor_seconds: float
    peak_bytes: int
    predicted_bytes: int
    is_same: bool


def network() -> nn.Sequential:
    """Layers without names of their own, the same in every way."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(_BLOCKS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers)


def trained(net: nn.Module, batch: torch.Tensor) -> tuple[list[torch.Tensor], float, float, int]:
    """Weights after a few steps, median seconds of a step, processor seconds, and the highest peak."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(1)
    seconds: list[float] = []
    processor: list[float] = []
    peak_bytes = 0
    for step in range(_STEPS):
        optimizer.zero_grad()
        began, began_processor = time.perf_counter(), time.process_time()
        if step == _STEPS - 1:
            # Gradients of the step before are gone, so that new ones count, as they do in a plan.
            meter = StepMeter(torch.device("cpu"))
            meter.start()
            net(batch).square().mean().backward()
            peak_bytes = meter.stop().peak_bytes
        else:
            net(batch).square().mean().backward()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - began_processor)
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    return weights, statistics.median(seconds[1:]), statistics.median(processor[1:]), peak_bytes


def rows(folder: str) -> Iterator[Row | str]:
    """Every way at every limit, and then what the link carries."""
    batch = torch.randn(_BATCH, _WIDTH)
    plain, seconds, processor, peak_bytes = trained(network(), batch)
    yield Row(0, "plain", "", seconds, processor, peak_bytes, 0, is_same=True)
    curve = Checkpointable(network(), batch, "8GiB").frontier()
    least, most = curve[0].peak_bytes, curve[-1].peak_bytes
    moving = Checkpointable(network(), batch, "8GiB", offload=f"disk:{folder}")
    link = ""
    for limit_bytes in (moving.frontier()[0].peak_bytes, *(least + int(share * (most - least)) for share in _SHARES)):
        for way, offload in (("keep or recompute", None), ("keep, recompute or move", f"disk:{folder}")):
            try:
                net = Checkpointable(network(), batch, limit_bytes, offload=offload)
            except BudgetError as error:
                yield Row(
                    limit_bytes, way, f"none: at least {format_bytes(error.minimum_bytes)}", 0, 0, 0, 0, is_same=True
                )
                continue
            weights, seconds, processor, peak_bytes = trained(net, batch)
            assert net.plan is not None
            plan = net.plan
            moved = f", {len(plan.moved)} moved ({format_bytes(plan.host_bytes)})" if plan.moved else ""
            text = f"{len(plan.recomputed)} of {len(plan.chain)} recomputed{moved}"
            is_same = all(map(torch.equal, plain, weights))
            yield Row(limit_bytes, way, text, seconds, processor, peak_bytes, plan.peak_bytes, is_same)
            if plan.link is not None:
                speeds = f"{format_speed(plan.link.out)} out and {format_speed(plan.link.back)} back"
                link = f"The link carries {speeds}, as measured, {plan.carried_share or 0:.0%} of the plain peak in a forward."
    yield link


def main() -> None:
    """Train all ways, print the table and write it."""
    torch.set_num_threads(1)
    lines = [
        "# Moving to a file on the CPU, beside recomputation alone",
        "",
        f"`python -m benchmarks.offload_disk`, torch {torch.__version__}: {_BLOCKS} blocks of a linear layer of width {_WIDTH}, GELU and "
        f"dropout, {_BATCH:,} samples, one thread, {_STEPS} steps of SGD. The file is in the system's cache. "
        "Seconds are medians on a machine that others used at the same time; the processor's are of all threads of the process. "
        f"Measured peaks hold the square of the output and its gradient as well, {2 * 4 * _BATCH * _WIDTH:,} bytes that are no part of the "
        "module's limit.",
        "",
        "| limit | way | plan | step | processor | peak | predicted | measured more | weights |",
        "|--:|---|---|--:|--:|--:|--:|--:|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(folder):
            if isinstance(row, str):
                lines += ["", row]
                continue
            same = "same bits" if row.is_same else "DIFFERENT"
            costs = ["", "", "", "", "", ""]
            if row.peak_bytes:
                costs = [
                    format_seconds(row.step_seconds),
                    format_seconds(row.processor_seconds),
                    f"{row.peak_bytes:,}",
                    "",
                    "",
                    same,
                ]
                if row.predicted_bytes:
                    costs[3:5] = [f"{row.predicted_bytes:,}", f"{row.peak_bytes - row.predicted_bytes:+,} B"]
            limit = f"{row.limit_bytes:,}" if row.limit_bytes else ""
            lines.append(f"| {limit} | {row.way} | {row.plan} | {' | '.join(costs)} |")
            print(lines[-1], flush=True)
    print(lines[-1])
    (RESULTS / "offload_disk.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
