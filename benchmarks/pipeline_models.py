# ruff: noqa: D102  (forwards of small models)
"""Tiny models for pipelines, and training steps of each: in one process, micro-batch by micro-batch, and against that one in several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lightning_rotor.chain import Chain
from lightning_rotor.execution.passes import is_recomputing
from lightning_rotor.pipeline.micro_batch_seeds import mixed, with_seeds
from lightning_rotor.pipeline.micro_batches import sizes_of, split
from lightning_rotor.pipeline.pipeline_options import PipelineOptions
from lightning_rotor.pipeline.pipelined import cut_for_rows, pipelined
from lightning_rotor.pipeline.pipelined_module import PipelinedModule
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.skip import pop, skippable, stash
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.sequential import wiring_of

ROWS = 10


class UNet(nn.Module):
    """Two long skips, one across the other."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(first))
        third = torch.tanh(self.middle(second))
        fourth = torch.tanh(self.up2(torch.cat([second, third], 1)))
        return self.up1(torch.cat([first, fourth], 1)).mean((2, 3))


class Attention(nn.Module):
    """A transformer's block, with dropout as a layer and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)))
        return x + F.dropout(self.mlp(x), 0.1, self.training)


class Transformer(nn.Module):
    """Tokens in, four numbers out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Tail(nn.Module):
    """Hands over something that is no tensor, and takes it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Any) -> Any:
        return (x * 1, 3) if self.place == 0 else x[0] * x[1]


class Counting(nn.Module):
    """Counts its forwards, and those that repeat one."""

    def __init__(self) -> None:
        super().__init__()
        # Not numbers, which would be put back after a recomputation.
        self._counts = (count(), count())

    def taken(self) -> list[int]:
        """Both numbers since this was asked last."""
        taken = [next(each) for each in self._counts]
        self._counts = (count(), count())
        return taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(self._counts[is_recomputing()])
        return x.tanh()


@skippable(stash=["skip"])
class Down(nn.Linear):
    """The start of a skip."""

    def forward(self, x: torch.Tensor) -> Any:
        yield stash("skip", x)
        return super().forward(x).tanh()


@skippable(pop=["skip"])
class Up(nn.Linear):
    """Its end."""

    def forward(self, x: torch.Tensor) -> Any:
        skip = yield pop("skip")
        return super().forward(x) + skip


def model_of(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, its input and its target, the same in every process."""
    torch.manual_seed(0)
    x, target = torch.randn(ROWS, 3, 6, 6), torch.randn(ROWS, 4)
    match kind:
        case "mlp":
            layers = [layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())]
            return nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(ROWS, 16), target
        case "cnn":
            layers = [
                layer
                for n in range(3)
                for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=n > 0))
            ]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(108, 4)), x, target
        case "transformer":
            return Transformer(), torch.randint(0, 11, (ROWS, 5)), target
        case "skips":
            layers = [nn.Linear(16, 16), Down(16, 16), nn.Linear(16, 16), Up(16, 16), nn.Linear(16, 4)]
            return nn.Sequential(*layers), torch.randn(ROWS, 16), target
        case _:
            return UNet(), x, target


def reference_step(
    model: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    sizes: Sequence[int],
    *,
    seed: int,
    chain: Chain | None = None,
) -> list[torch.Tensor]:
    """Losses of micro-batches in one process; gradients are added. With a chain, random numbers are those of a pipeline."""
    outputs, start = [], 0
    run: Any = model
    if chain is not None:
        cut = cut_for_rows(model, (x[: sizes[0]],), {})
        stages = with_seeds(cut.stages, chain)

        def run(value: torch.Tensor) -> Any:
            return wiring_of(stages).run(cut.bind((value,), {}), stages)

    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        with seeded(mixed(seed, number)):
            loss = F.mse_loss(run(x[part]), target[part])
        (loss * (size / sum(sizes))).backward()
        outputs.append(loss.detach())
        start += size
    return outputs


def build(kind: str, options: PipelineOptions, memory_bytes: int | None = None) -> Any:
    """A pipeline, with its model, input and target."""
    model, x, target = model_of(kind)
    call = split(((x,), {}), sizes_of(ROWS, options.micro_batches))[0]
    made = pipelined(
        model,
        model,
        call,
        options=options,
        memory_bytes=memory_bytes,
        kept=lambda tensors: 0,
        processes=PipelineProcesses(torch.device("cpu")),
    )
    return model, x, target, made


def step(made: PipelinedModule, x: torch.Tensor, target: torch.Tensor, seed: int) -> dict[int, torch.Tensor]:
    """One training step of a pipeline: losses of micro-batches, by number, where they are known."""
    sizes = made.sizes(x)
    targets, losses = split(target, sizes), {}

    def loss(output: torch.Tensor, number: int) -> torch.Tensor:
        value = F.mse_loss(output, targets[number])
        losses[number] = value.detach()
        return value * (sizes[number] / sum(sizes))

    made.runner.run(made.runner.inputs(split(((x,), {}), sizes)), loss, seed=seed)
    return losses


def ten_steps(rank: int, kind: str, options: PipelineOptions) -> dict[str, float]:
    """How far losses and gradients of ten steps, and what they end in, are from those of one process."""
    model, x, target, made = build(kind, options)
    other = model_of(kind)[0]
    made.placement.give_up()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (model, other)]
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "buffer": 0.0}
    for number in range(10):
        rows = ROWS if number % 3 else 7  # smaller batches among them
        losses = step(made, x[:rows], target[:rows], seed=number)
        chain = made.partition.problem.chain if kind == "transformer" else None
        expected = reference_step(
            other, x[:rows], target[:rows], sizes_of(rows, options.micro_batches), seed=number, chain=chain
        )
        worst["loss"] = max([worst["loss"], *(float(abs(losses[n] - expected[n])) for n in losses)])
        for (_, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            if mine.device.type != "meta":
                worst["gradient"] = max(worst["gradient"], float((mine.grad - theirs.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    made.placement.restore()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    worst["weight"] = max(float((mine - theirs).abs().max().detach()) for mine, theirs in pairs)
    buffers = zip(model.buffers(), other.buffers(), strict=True)
    worst["buffer"] = max([0.0, *(float((mine - theirs).abs().max()) for mine, theirs in buffers)])
    return worst
