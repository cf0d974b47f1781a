"""What moving to another memory buys, and how far plans that may move something are from the best.

    python -m benchmarks.offload

**Quality.** Random chains of 4 and 5 stages with a random link, each at four budgets between the least that any schedule with moves takes and
what keeps everything. The best is found by trying every schedule tree with every set of items that move (``placing`` chooses the points
of each). Every plan is checked against its budget and its lower bound.

**Gains.** Chains as of a roofline: layers of Llama-7B for a sequence of 4,096 tokens on an H100, and torchvision's ViT-L and ResNet-152, with
links as of PCIe 5 and of a GH200. Nothing here ran on a GPU.

Prints tables and writes ``benchmarks/results/offload.json`` and ``offload.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.random_chains import Kind, random_chain, random_link
from benchmarks.reference import all_schedules
from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.errors import BudgetError
from lightning_rotor.link import Link
from lightning_rotor.planning import Solver, fine_slots, lower_bound_seconds
from lightning_rotor.planning.placing import placed
from lightning_rotor.schedule import Move, Schedule
from lightning_rotor.simulator import Simulation, movable, simulate

KINDS: tuple[Kind, ...] = ("heterogeneous", "transformer", "options", "cnn")
FRACTIONS = (0.0, 0.15, 0.3, 0.6)
CHAINS = 1000
RESULTS = Path(__file__).parent / "results"

# ---------------------------------------------------------------------------------------------------- quality


@dataclass(frozen=True)
class Case:
    """One chain at one budget; durations relative to the best's, infinite where there is none."""

    kind: str
    seed: int
    stages: int
    fraction: float
    plan: float
    today: float
    bound: float


def _staying(chain: Chain) -> list[Simulation]:
    """Every schedule tree, the fastest first."""
    return sorted((simulate(chain, schedule) for schedule in all_schedules(chain)), key=lambda each: each.seconds)


def best_seconds(chain: Chain, staying: list[Simulation], budget_bytes: int, link: Link) -> float:
    """The fastest of all trees with all sets of items that move."""
    best = math.inf
    for simulation in staying:
        if simulation.seconds >= best:
            break  # waits only add to it
        able = movable(chain, simulation.schedule.items)
        for count in range(len(able) + 1):
            for wanted in itertools.combinations(able, count):
                found = placed(chain, simulation.schedule, wanted, budget_bytes, {"link": link})
                if found is not None:
                    best = min(best, found.seconds)
    return best


def _least_bytes(chain: Chain, staying: list[Simulation], link: Link) -> int:
    least = []
    for simulation in staying:
        items = simulation.schedule.items
        moves = tuple(Move.whole(number, len(items)) for number in movable(chain, items))
        least.append(simulate(chain, Schedule(items, moves), link=link).peak_bytes)
    return min(least)


def cases_of(seed: int) -> list[Case]:
    """All budgets of one chain."""
    rng = random.Random(f"offload {seed}")
    kind, stages = rng.choice(KINDS), rng.choice((4, 5))
    chain = replace(random_chain(rng, stages, kind, grain=1000), segment_seconds=0.0)
    link = random_link(rng, chain)
    staying = _staying(chain)
    least, most = _least_bytes(chain, staying, link), simulate(chain, Schedule.keep_all(stages)).peak_bytes
    slots = fine_slots(stages)
    today, moving = Solver(chain, slots=slots), Solver(chain, slots=slots, link=link)

    def seconds(solver: Solver, budget_bytes: int) -> float:
        try:
            found = solver.plan(budget_bytes)
        except BudgetError:
            return math.inf
        assert found.peak_bytes <= budget_bytes
        return found.seconds

    cases = []
    for fraction in FRACTIONS:
        budget = least + int(fraction * (most - least))
        best = best_seconds(chain, staying, budget, link)
        bound = lower_bound_seconds(chain, budget, link=link)
        plans = seconds(moving, budget) / best, seconds(today, budget) / best
        cases.append(Case(kind, seed, stages, fraction, *plans, bound / best))
    return cases


def quality_rows(cases: list[Case]) -> Iterator[str]:
    """Rows of the table: all cases, and those of each budget."""
    yield (
        "| budget | cases | plan is the best | plan above the best: mean | 95th percentile | maximum | without moves: mean | without a plan "
        "| bound / best: mean |"
    )
    yield "| :--- |" + " ---: |" * 8
    for name, chosen in (
        ("all", cases),
        *((f"{fraction:.0%}", [each for each in cases if each.fraction == fraction]) for fraction in FRACTIONS),
    ):
        excess = sorted(case.plan - 1 for case in chosen)
        today = [case.today - 1 for case in chosen if case.today < math.inf]
        optimal = sum(each < 1e-9 for each in excess) / len(excess)
        yield (
            f"| {name} | {len(excess):,} | {optimal:.1%} | {statistics.mean(excess):.2%} | {excess[int(0.95 * len(excess))]:.2%} "
            f"| {excess[-1]:.1%} | {statistics.mean(today):.1%} | {len(chosen) - len(today)} "
            f"| {statistics.mean(case.bound for case in chosen):.3f} |"
        )


# ---------------------------------------------------------------------------------------------------- gains

PCIE_5, GH200 = Link(50e9, 50e9), Link(170e9, 410e9)
SHARES = (0.6, 0.4, 0.2)


@dataclass(frozen=True)
class Gain:
    """Overheads of one chain at one share of its peak."""

    name: str
    stages: int
    share: float
    today: float | None
    pcie: float | None
    gh200: float | None
    carried: float
    gap: float | None
    seconds: tuple[float, float]


def llama_layers(tokens: int, layers: int = 32) -> Chain:
    """Layers of Llama-7B as one stage each, as of a roofline of an H100: 60 % of its arithmetic, bfloat16."""
    width, hidden, rate = 4096, 11008, 0.6 * 989e12
    boundary = 2 * tokens * width
    # Saved: what matrices and attention read (two normed inputs, query, key, value, attention's output), the inner state of the MLP
    # (gate, its activation, up, their product), the residual between the two.
    saved = 7 * boundary + 4 * 2 * tokens * hidden
    operations = 2 * tokens * (4 * width**2 + 3 * width * hidden) + 2 * tokens**2 * width
    forward = operations / rate
    gradients = 2 * tokens * hidden * 3
    keep = Option(
        name="keep",
        saved_bytes=saved,
        saved_input_bytes=boundary,
        saved_output_bytes=0,
        saved_tensors=15,
        forward_peak_bytes=saved + boundary,
        replay_peak_bytes=saved,
        unpack_peak_bytes=boundary,
        unpack_bytes=boundary,
        backward_peak_bytes=2 * boundary + gradients,
        backward_segment_peak_bytes=2 * boundary + gradients,
        backward_held_peak_bytes=2 * boundary + gradients,
        input_gradient_bytes=boundary,
        parameter_gradient_bytes=0,
        forward_seconds=forward,
        replay_seconds=forward,
        backward_seconds=2 * forward,
    )
    stages = [StageCost(f"layers.{n}", boundary, boundary + gradients, forward, (keep,)) for n in range(layers)]
    return Chain(tuple(stages), input_bytes=boundary, device="cuda")


def _estimated(name: str, shape: str) -> Chain:
    """A model of torchvision's on an H100."""
    from lightning_rotor.profiling.accelerators import GPUS
    from lightning_rotor.profiling.estimates import estimate_profile
    from lightning_rotor.profiling.input_spec import InputSpec
    from lightning_rotor.profiling.models_without_memory import build_on_meta
    from lightning_rotor.report.named_models import model_maker

    model = build_on_meta(model_maker(f"torchvision.models.{name}", {}))
    return estimate_profile(model, [InputSpec.parse(shape)], GPUS["H100"]).chain


MODELS = {
    "Llama-7B layers, 4k tokens": lambda: llama_layers(4096),
    "Llama-7B layers, 32k tokens": lambda: llama_layers(32768),
    "ViT-L/16, batch of 128": lambda: _estimated("vit_l_16", "128x3x224x224"),
    "ResNet-152, batch of 128": lambda: _estimated("resnet152", "128x3x224x224"),
}


def gains_of(name: str) -> list[Gain]:
    """All budgets of one model."""
    chain = MODELS[name]()
    slots = fine_slots(len(chain))
    most = simulate(chain, Schedule.keep_all(len(chain)), gradients_exist=True).peak_bytes
    carried = PCIE_5.out * sum(stage.keep.forward_seconds for stage in chain) / most
    gains = []
    for share in SHARES:
        overheads: list[float | None] = []
        took = []
        gap = None
        for link in (None, PCIE_5, GH200):
            start = time.process_time()
            try:
                found = Solver(chain, slots=slots, gradients_exist=True, link=link).plan(int(share * most))
            except BudgetError:
                overheads.append(None)
            else:
                overheads.append(found.overhead)
                if link is PCIE_5 and len(chain) < 50:
                    gap = found.gap
            took.append(time.process_time() - start)
        gains.append(Gain(name, len(chain), share, *overheads, carried, gap, (took[0], took[1])))
    return gains


def gain_rows(gains: list[Gain]) -> Iterator[str]:
    """Rows of the table."""
    yield (
        "| model | stages | budget, of the peak | without moves | 50 GB/s (PCIe 5) | 170 and 410 GB/s (GH200) "
        "| PCIe 5 carries in a forward, of the peak | proven gap, PCIe 5 | planning, s: without, with |"
    )
    yield "| :--- |" + " ---: |" * 8
    for gain in gains:
        overheads = ["no plan" if each is None else f"{each:.1%}" for each in (gain.today, gain.pcie, gain.gh200)]
        gap = "" if gain.gap is None else f"{gain.gap:.1%}"
        yield (
            f"| {gain.name} | {gain.stages} | {gain.share:.0%} | {' | '.join(overheads)} | {gain.carried:.0%} | {gap} "
            f"| {gain.seconds[0]:.1f}, {gain.seconds[1]:.1f} |"
        )


# ---------------------------------------------------------------------------------------------------- output


def main() -> None:
    """Run all, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=CHAINS, help="random chains")
    parser.add_argument(
        "--models", nargs="*", choices=MODELS, default=list(MODELS), metavar="NAME", help="of the gains"
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        cases = [case for found in pool.imap_unordered(cases_of, range(options.chains)) for case in found]
    gains = [gain for name in options.models for gain in gains_of(name)]
    cases.sort(key=lambda case: (case.seed, case.fraction))
    broken = [case for case in cases if case.bound > 1 + 1e-9]
    if broken:
        raise SystemExit(f"{len(broken)} bounds are above the best, such as {broken[0]}")
    worst = sorted(cases, key=lambda case: case.plan, reverse=True)[:5]
    lines = [
        "# Plans that may move what stages hold",
        "",
        f"`python -m benchmarks.offload --chains {options.chains}`, {time.perf_counter() - start:.0f} s. Nothing here ran on a GPU.",
        "",
        "## Against the best of all schedule trees and all sets of moves",
        "",
        f"{options.chains:,} random chains of 4 and 5 stages, each with a random link and four budgets: 0 % is the least that any "
        "schedule with moves takes, 100 % what keeps everything. No plan is above its budget, no lower bound above the best. "
        "A plan may be below the best, "
        "which tries one choice of points for each set.",
        "",
        *quality_rows(cases),
        "",
        "The worst: "
        + ", ".join(f"{case.plan - 1:.1%} ({case.kind} {case.seed} at {case.fraction:.0%})" for case in worst)
        + ".",
        "",
        "## Time beyond plain training, simulated for an H100",
        "",
        *gain_rows(gains),
    ]
    print("\n".join(lines))
    (RESULTS / "offload.md").write_text("\n".join(lines) + "\n")
    rows = {"cases": [asdict(case) for case in worst], "gains": [asdict(gain) for gain in gains]}
    (RESULTS / "offload.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
