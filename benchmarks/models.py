"""Every classification model of torchvision, taken as it is: does it become a chain, with the same bits, and what does a plan save?

    python -m benchmarks.models                       all models; those that have been measured are skipped
    python -m benchmarks.models resnet18 swin_t       some of them
    python -m benchmarks.models --again resnet18      although there is a result

One process a model, with a time limit, so that one failure costs one row. Images are small and the batch is four: what counts here is whether
a model works, and how its activations shrink. With so few of them the gradients of the parameters make up most of a step's peak, so they are
taken as existing before the step, as with ``zero_grad(set_to_none=False)``; the peaks are those of activations and gradients of activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TABLE = RESULTS / "models.json"
BATCH = 4


def main() -> None:
    """Run what is asked for, one subprocess each, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of torchvision models; all by default")
    parser.add_argument("--again", action="store_true", help="run models that have a result as well")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for one model")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0])))
        return
    rows: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in options.models or all_models():
        if "failed" not in rows.get(name, {"failed": ""}) and not options.again:
            continue
        rows[name] = run(options.limit, "-m", "benchmarks.models", "--one", name) | {"commit": commit()}
        print(f"{name}: {rows[name]}", flush=True)
        RESULTS.mkdir(exist_ok=True)
        TABLE.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        (RESULTS / "models.md").write_text(markdown(rows))


def commit() -> str:
    """What is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False).stdout.strip()


def all_models() -> list[str]:
    """Names of all classification models, small ones first within a family."""
    import torchvision

    return torchvision.models.list_models(module=torchvision.models)


def run(limit: float, *command: str) -> dict[str, Any]:
    """The last line that a Python process prints, as JSON; one model has a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = (sys.executable, *command)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:300]}


def measure(name: str) -> dict[str, Any]:
    """Cut, measure, plan and run a model, and compare it with itself."""
    import torch
    import torchvision

    from lightning_rotor.capture.sequentialize import sequentialize
    from lightning_rotor.execution.executor import Executor
    from lightning_rotor.planning import minimum_budget, plan
    from lightning_rotor.profiling import profile_chain
    from lightning_rotor.schedule import Schedule
    from lightning_rotor.simulator import simulate

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        size = image_size(name)
        special: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        if name.startswith("vit"):
            special["image_size"] = size
        net = torchvision.models.get_model(name, weights=None, **special).train()
        images = torch.randn(BATCH, 3, size, size)
        row: dict[str, Any] = {"image": size}
        start = time.perf_counter()
        cut = sequentialize(net, (images,))
        row |= {"way": cut.way, "cuts": len(cut.stages), "trace_seconds": round(time.perf_counter() - start, 3)}
        value = cut.bind((images,), {})
        start = time.perf_counter()
        profile = profile_chain(cut.stages, value, repeats=1)
        row |= {
            "stages": len(profile.chain),
            "skips": len(profile.chain.skips),
            "measure_seconds": round(time.perf_counter() - start, 2),
        }
        chain = profile.chain
        keep_all = simulate(chain, Schedule.keep_all(len(chain)), gradients_exist=True)
        start = time.perf_counter()
        least = minimum_budget(chain, gradients_exist=True)
        row["solve_seconds"] = round(time.perf_counter() - start, 2)
        middle = plan(chain, (least.peak_bytes + keep_all.peak_bytes) // 2, gradients_exist=True)
        row |= {
            "keep_all_bytes": keep_all.peak_bytes,
            "least_ratio": round(least.peak_bytes / keep_all.peak_bytes, 3),
            "least_overhead": round(least.overhead, 3),
            "middle_ratio": round(middle.peak_bytes / keep_all.peak_bytes, 3),
            "middle_overhead": round(middle.overhead, 3),
        }
        state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        expected = leftovers(net, net, images, state)
        schedules = {"least": least.schedule, "middle": middle.schedule, "keep_all": Schedule.keep_all(len(chain))}
        forwards: dict[str, Any] = {"plain": lambda: net(images)}
        for key, schedule in schedules.items():
            executor = Executor(profile.stages, chain, schedule, profile.states)
            forwards[key] = partial(executor, value)
            received = leftovers(net, lambda _, run=forwards[key]: run(), images, state)
            same = len(expected) == len(received) and all(map(torch.equal, expected, received))
            row["bit_equal"] = row.get("bit_equal", True) and same
            simulated = simulate(chain, schedule).peak_bytes
            row[f"{key}_excess_bytes"] = real_peak(net, forwards[key]) - simulated
        row["plain_excess_bytes"] = real_peak(net, forwards["plain"]) - simulated
        seconds = interleaved_seconds(forwards)
        row |= {
            f"{key}_time_ratio": round(seconds[key] / seconds["plain"], 3) for key in ("least", "middle", "keep_all")
        }
        return row
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def real_peak(net: Any, forward: Any) -> int:
    """The allocator's peak in one step that makes its gradients anew."""
    import torch

    from lightning_rotor.profiling import StepMeter

    net.zero_grad()
    meter = StepMeter(torch.device("cpu"))
    gc.collect()
    gc.disable()
    meter.start()
    outputs = forward()  # held to the end, as training steps do
    total(outputs).backward()
    trace = meter.stop()
    del outputs
    gc.enable()
    return trace.peak_bytes


def interleaved_seconds(forwards: dict[str, Any], repeats: int = 3) -> dict[str, float]:
    """Median duration of a step under each forward, in turns."""
    seconds: dict[str, list[float]] = {key: [] for key in forwards}
    for _ in range(repeats):
        for key, forward in forwards.items():
            start = time.perf_counter()
            total(forward()).backward()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times) for key, times in seconds.items()}


def total(outputs: Any) -> Any:
    """A loss that takes next to no memory, and whose gradients are dense."""
    import torch
    from torch.utils._pytree import tree_leaves

    return sum(leaf.mul(1).sum() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))


def image_size(name: str) -> int:
    """The smallest that the model takes, more or less."""
    sizes = {"inception_v3": 299, "vit_h_14": 70, "maxvit": 224, "alexnet": 96, "squeezenet": 96}
    return next((size for start, size in sizes.items() if name.startswith(start)), 64)


def leftovers(net: Any, forward: Any, images: Any, state: dict[str, Any]) -> list[Any]:
    """Output, gradients, buffers and generator after one step from a given state."""
    import torch
    from torch.utils._pytree import tree_leaves

    with torch.no_grad():
        for key, tensor in net.state_dict().items():
            tensor.copy_(state[key])
    net.zero_grad()
    torch.manual_seed(1)
    outputs = [leaf for leaf in tree_leaves(forward(images)) if isinstance(leaf, torch.Tensor)]
    sum(output.square().sum() for output in outputs).backward()
    gradients = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]
    return [*(o.detach() for o in outputs), *gradients, *(b.clone() for b in net.buffers()), torch.get_rng_state()]


def markdown(rows: dict[str, Any]) -> str:
    """The table for people."""
    good = {name: row for name, row in rows.items() if "failed" not in row}
    equal = sum(row["bit_equal"] for row in good.values())
    excess = max(
        (row[f"{key}_excess_bytes"] for row in good.values() for key in ("least", "middle", "keep_all")), default=0
    )
    lines = [
        "# torchvision's classification models, unchanged",
        "",
        f"{len(good)} of {len(rows)} become a chain; {equal} of these give the bits of the plain model under every plan tried (least memory, the",
        f"middle, no recomputation). The allocator's peak exceeds the simulated one by {excess:,} bytes at most. Batch of {BATCH}, CPU,",
        "one thread; peaks count activations and their gradients; times are measured against the plain step, median of three in turns on a busy",
        "machine. Made by `benchmarks/models.py`.",
        "",
        "| model | image | stages | skips | same bits | real - plan | least peak | its time | middle peak | its time | trace | measure | solve |",
        "|---|--:|--:|--:|:-:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in sorted(good.items()):
        worst = max(row[f"{key}_excess_bytes"] for key in ("least", "middle", "keep_all"))
        lines.append(
            f"| {name} | {row['image']} | {row['stages']} | {row['skips']} | {'yes' if row['bit_equal'] else '**no**'} | {worst:,} B "
            f"| {row['least_ratio']:.0%} | {row['least_time_ratio']:.2f} | {row['middle_ratio']:.0%} | {row['middle_time_ratio']:.2f} "
            f"| {row['trace_seconds']:.2f} s | {row['measure_seconds']:.1f} s | {row['solve_seconds']:.1f} s |"
        )
    failures = [f"- {name}: {row['failed']}" for name, row in sorted(rows.items()) if "failed" in row]
    return "\n".join([*lines, *(["", "Not a chain, or not measured:", "", *failures] if failures else []), ""])


if __name__ == "__main__":
    main()
