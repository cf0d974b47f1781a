"""Simulated pipelines on 8, 64 and 512 devices; run by ``benchmarks/pipeline.py --simulate``.

Chains come from shapes alone (``lightning_rotor.profiling.estimates``):
bytes of activations as autograd keeps them, seconds of a roofline of the H100 under
bf16 autocast. A GPT is estimated with few blocks, one of which is then repeated. Twice as many micro-batches as devices, links of 50 GB/s.

    rotor       ``partition``: cuts that take the least time, each stage under its own recomputation plan
    by time     ``balance_by_time``: the slowest part as fast as can be, before memory is looked at; then planned by rotor like the first
    equal       the same number of stages everywhere; then planned likewise

Under 1F1B all have the same memory per device: a tenth more than what the worse of the two simple ways needs at least, so that every one of them
can run. Interleaved they have as much as they like. ResNet-101 and GPT are cut between their blocks and halves of blocks on 8 devices, where long
runs of single layers would be planned for minutes; ResNet-101 on 64 between layers, as there are not as many blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.frontier_workloads import GPT, UNet, convolutions
from lightning_rotor.capture.sequentialize import SequentialCut
from lightning_rotor.chain import Chain
from lightning_rotor.pipeline.balances import balance_by_time
from lightning_rotor.pipeline.partition import Link, Partition, PartitionError, PipelineDevice, partition
from lightning_rotor.pipeline.partition.cuts import cuts_of, even_balance, runs_of
from lightning_rotor.pipeline.partition.problem import Problem
from lightning_rotor.pipeline.partition.run_costs import Costs
from lightning_rotor.pipeline.pipeline_schedule import PipelineScheduleName
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.accelerators import GPUS
from lightning_rotor.profiling.estimates import estimate_profile
from lightning_rotor.profiling.estimating_meter import EstimatingMeter
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.profiling.models_without_memory import give_fake_tensors

DEVICES = (8, 64, 512)
MODELS = ("ResNet-101", "U-Net", "GPT")
_SHAPES = {"ResNet-101": "16x3x224x224", "U-Net": "4x3x256x256"}
GPT_BLOCKS = {8: 32, 64: 160, 512: 640}
_LINK = Link(50e9, 5e-6)
_STATE_BYTES_PER_PARAMETER = 12  # weights and Adam's two moments in fp32; gradients are counted by the chain
_ROOM = 1.1
Way = Literal["rotor", "by time", "equal"]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to cut one model for so many devices.

    Attributes:
        model: Its name.
        chain_stages: Where it can be cut.
        devices: How many.
        schedule: ``"1f1b"`` or ``"interleaved"``.
        way: Who cut.
        seconds: Of a step; None if there is no such pipeline.
        bubble: Part of all devices' time in which they wait.
        recomputed: Part of their work that is recomputation.
        peak_bytes: Largest of all devices.
        least_bytes: Memory per device without which these cuts cannot run; None for interleaved stages, whose needs do not add up.
        memory_bytes: What each device had.
        gap: What other cuts might save; None where nobody asked.
        solve_seconds: Processor time of the search.
        note: Why there is nothing.
    """

    model: str
    chain_stages: int
    devices: int
    schedule: PipelineScheduleName
    way: Way
    seconds: float | None = None
    bubble: float | None = None
    recomputed: float | None = None
    peak_bytes: int | None = None
    least_bytes: int | None = None
    memory_bytes: int | None = None
    gap: float | None = None
    solve_seconds: float | None = None
    note: str = ""


def rows(model: str, devices: int) -> Iterator[dict[str, Any]]:
    """All rows of a model on so many devices."""
    chain, state = _chain(model, devices)
    for schedule, per_device in (("1f1b", 1), ("interleaved", 2)):
        common = {"model": model, "chain_stages": len(chain), "devices": devices, "schedule": schedule}
        if devices * per_device > len(chain):
            most = max(each for each in DEVICES if each * per_device <= len(chain))
            note = f"{len(chain)} stages: {devices // most} replicas of a pipeline over {most} devices instead"
            yield asdict(Row(**common, way="rotor", note=note))
            continue
        yield from map(asdict, _compared(chain, state, common, per_device))


def _compared(chain: Chain, state: list[int], common: dict[str, Any], per_device: int) -> Iterator[Row]:
    parts = common["devices"] * per_device
    arguments = {
        "micro_batches": 2 * common["devices"], "schedule": common["schedule"], "stages_per_device": per_device,
        "state_bytes": state, "link": _LINK,
    }  # fmt: skip
    balances = {"equal": even_balance(len(chain), parts), "by time": balance_by_time(chain, partitions=parts)}
    plenty = common["schedule"] == "interleaved"
    least: dict[str, int] = {}
    if not plenty:
        needs = _Needs(chain, common["devices"], arguments)
        least = {way: needs.least_bytes(balance) for way, balance in balances.items()}
    memory = None if plenty else int(_ROOM * max(least.values()))
    for way, balance in (*balances.items(), ("rotor", "auto")):
        start = time.process_time()
        try:
            made = partition(chain, common["devices"], balance=balance, memory_bytes=memory, **arguments)
        except PartitionError as error:
            yield Row(**common, way=way, memory_bytes=memory, note=str(error).split(":")[0])
            continue
        spent = time.process_time() - start
        yield _row(
            made, common, way, memory, None if plenty else least.get(way) or needs.least_bytes(made.balance), spent
        )


def _row(made: Partition, common: dict[str, Any], way: Any, memory: int | None, least: int | None, spent: float) -> Row:
    """The same numbers as those of ``made.simulation``, without its millions of events."""
    m, loads = made.problem.micro_batches, [each.load.micro_batch for each in made.choices]
    busy = m * sum(load.forward_seconds + load.backward_seconds for load in loads)
    again = m * sum(load.recompute_seconds for load in loads)
    gap = made.gap if way == "rotor" else None
    return Row(
        **common, way=way, seconds=made.seconds, bubble=1 - busy / made.seconds / common["devices"], recomputed=again / busy,
        peak_bytes=_peak_bytes(made), least_bytes=least, memory_bytes=memory, gap=gap, solve_seconds=spent,
    )  # fmt: skip


def _peak_bytes(made: Partition) -> int:
    """Of the worst device."""
    problem, loads = made.problem, [choice.load for choice in made.choices]
    devices = range(len(problem.devices))
    return max(problem.memory(device).peak_bytes(loads, problem.results_bytes) for device in devices)


class _Needs:
    """What balances need at least, of devices that have one stage each."""

    def __init__(self, chain: Chain, devices: int, arguments: dict[str, Any]) -> None:
        names = {name: value for name, value in arguments.items() if name != "state_bytes"}
        problem = Problem(chain, (PipelineDevice(),) * devices, state_bytes=tuple(arguments["state_bytes"]), **names)
        self._costs = Costs(problem)
        # One segment for each stage is simple, and takes little more than the least.
        self._simple = Costs(replace(problem, recompute="always"))

    def least_bytes(self, balance: Sequence[int]) -> int:
        """Of the worst device; those that need less than another one does even in the simplest way are not looked at further."""
        runs = runs_of(cuts_of(balance), sum(balance))
        enough = {stage: self._simple.least_bytes(stage, *run) for stage, run in enumerate(runs)}
        worst = 0
        for stage in sorted(enough, key=lambda stage: -enough[stage]):
            if enough[stage] <= worst:
                break
            worst = max(worst, self._costs.least_bytes(stage, *runs[stage]))
        return worst


# -------------------------------------------------------------------- chains


def _chain(model: str, devices: int) -> tuple[Chain, list[int]]:
    """A chain and, by stage, bytes of weights and optimizer state."""
    from torchvision.models import resnet101

    with torch.device("meta"):
        made = {"ResNet-101": resnet101, "U-Net": lambda: _deep_unet(64, 4), "GPT": lambda: _gpt(4)}[model]()
    if model == "ResNet-101" and devices == 8:
        blocks = [*made.layer1, *made.layer2, *made.layer3, *made.layer4]
        ends = (
            nn.Sequential(made.conv1, made.bn1, made.relu, made.maxpool),
            nn.Sequential(made.avgpool, nn.Flatten(), made.fc),
        )
        return _whole(nn.Sequential(ends[0], *blocks, ends[1]), torch.randn, (16, 3, 224, 224))
    if model == "GPT":
        chain, state = _whole(made, partial(torch.ones, dtype=torch.int64), (4, 1024))
        return _repeated(chain, state, period=2, times=GPT_BLOCKS[devices] - 4)
    profile = estimate_profile(made, [InputSpec.parse(_SHAPES[model])], GPUS["H100"], autocast=torch.bfloat16)
    return profile.chain, _state_bytes(profile)


def _whole(model: nn.Sequential, make: Any, shape: tuple[int, ...]) -> tuple[Chain, list[int]]:
    """The same where each member of a sequence is one stage, rather than cut further."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    give_fake_tensors(model, mode)
    meter = EstimatingMeter(GPUS["H100"], block_bytes=512)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16), meter:
        profile = profile_chain(SequentialCut(model).stages, make(shape), repeats=1, meter=meter)
    return profile.chain, _state_bytes(profile)


def _state_bytes(profile: Profile) -> list[int]:
    counts = [sum(parameter.numel() for parameter in stage.parameters()) for stage in profile.stages]
    return [_STATE_BYTES_PER_PARAMETER * count for count in counts]


def _repeated(chain: Chain, state: list[int], *, period: int, times: int) -> tuple[Chain, list[int]]:
    """With the stages of one block in the middle so many times more."""
    middle = len(chain) // 2
    block = slice(middle, middle + period)
    stages = [
        replace(stage, name=f"{stage.name} again {number}") for number in range(times) for stage in chain.stages[block]
    ]
    made = replace(chain, stages=(*chain.stages[:middle], *stages, *chain.stages[middle:]))
    return made, [*state[:middle], *state[block] * times, *state[middle:]]


class _Residual(nn.Module):
    """One half of a block: ``x + layers(norm(x))``."""

    def __init__(self, norm: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.norm, self.layers = norm, layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        return x + self.layers(self.norm(x))


def _gpt(blocks: int) -> nn.Sequential:
    """A GPT of width 1024 as a sequence of its halves of blocks, between which one tensor is alive."""
    model = GPT(blocks, 1024, 16, 1024, tokens=32_000)
    halves = [
        half
        for block in model.blocks
        for half in (_Residual(block.norm1, block.attention), _Residual(block.norm2, block.mlp))
    ]
    return nn.Sequential(model.tokens, *halves, nn.Sequential(model.norm, model.head))


def _deep_unet(width: int, depth: int) -> UNet:
    """A U-Net with so many pairs of convolutions at each level."""
    model = UNet(width)
    for number, (down, up) in enumerate(zip(list(model.down), list(model.up), strict=True)):
        size, back = width * 2**number, width * 2 ** (3 - number)
        model.down[number] = nn.Sequential(*down, *_more(size, depth))
        model.up[number] = nn.Sequential(*up, *_more(back, depth))
    model.middle = nn.Sequential(*model.middle, *_more(16 * width, depth))
    return model


def _more(size: int, depth: int) -> list[nn.Module]:
    return [layer for _ in range(depth - 1) for layer in convolutions(size, size)]
