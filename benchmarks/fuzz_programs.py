# ruff: noqa: D102  (tables of small things whose names say what they are)
"""What the fuzzer draws: habits of users, each a few lines of a table, and models with their training steps.

A program is data. It is drawn from a seed and a number, its text is Python that makes it again, and :class:`Net` is built from it, the same each
time::

    Program(body=(linear, residual(linear, relu_), append_hook(dropout)), style="traced", limit=0.3, features=("adamw", "two_calls"))

A new layer is an entry of ``KINDS`` (benchmarks/fuzz_kinds.py), a new habit an entry of ``FEATURES`` and the line of code that follows it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torchmetrics import MeanMetric

from benchmarks.fuzz_kinds import HOOKS, KINDS, Build, Node, Program, parse
from benchmarks.fuzz_objects import CARRIERS, DRAWS, GLOBALS, SENDERS, WRAPPERS, Carrier, Prefetched, Tagged

__all__ = [
    "COMPILED",
    "HOOKS",
    "Net",
    "Node",
    "Program",
    "UserError",
    "batches",
    "compiled",
    "draw",
    "legal",
    "loader",
    "parse",
]

# ------------------------------------------------------------------------------------------------------------ features

# Name: how often, and where: c(allback), k (Checkpointable), p(ipeline), m(essages between processes).
FEATURES: dict[str, tuple[float, str]] = {
    "adamw": (0.4, "ckpm"),
    "clip": (0.15, "ckpm"),
    "accumulate": (0.15, "ckpm"),
    "schedule": (0.1, "ckp"),
    "manual": (0.08, "c"),
    "two_optimizers": (0.05, "c"),
    "bf16-mixed": (0.1, "ck"),
    "64-true": (0.05, "ckp"),
    "bf16-true": (0.05, "ckp"),
    "two_calls": (0.1, "ckm"),
    "no_grad_call": (0.06, "ck"),
    "eval_call": (0.04, "ck"),
    "uneven": (0.15, "ckpm"),
    "lengths": (0.3, "ckm"),
    "validation": (0.15, "ckp"),
    "error": (0.05, "ck"),
    "resume": (0.06, "ck"),
    "refit": (0.05, "ck"),
    "log": (0.3, "cp"),
    "metric": (0.1, "ck"),
    "history": (0.1, "ck"),
    "records_in_loss": (0.15, "ck"),
    "input_gradient": (0.06, "ck"),
    "overwrite_input": (0.02, "ck"),
    "edit_bias": (0.015, "ck"),
    "edit_weights": (0.05, "ck"),
    "thaw": (0.03, "ck"),
    "late_hook": (0.04, "ck"),
    "global_hook": (0.03, "ck"),
    "copy": (0.03, "ck"),
    "retain": (0.04, "ck"),
    "penalty": (0.03, "ck"),
    "anomaly": (0.02, "ck"),
    "offload": (0.02, "ck"),
    "stem": (0.5, "ckpm"),
    "unnamed": (0.25, "c"),
    "whole": (0.05, "c"),
    "mask": (0.1, "ck"),
    "pair_output": (0.08, "ck"),
    "dict_output": (0.05, "ck"),
    "micro_batches": (0.5, "p"),
    "gpipe": (0.3, "p"),
    "interleaved": (0.3, "p"),
    "always": (0.3, "p"),
    "foreach": (0.06, "ckm"),
    "fused": (0.05, "ck"),
    "lbfgs": (0.05, "ck"),
    "calls": (0.07, "ckm"),
    "calls_vary": (0.04, "ck"),
    "side": (0.06, "ckm"),
    "prefetch": (0.04, "ck"),
    "change_early": (0.03, "ckm"),
    "subclass_input": (0.03, "ck"),
    "alias": (0.05, "ck"),
    **{f"in_{name}": (0.03, "ck") for name in WRAPPERS},
    # Those of which nobody knows how to make another one are refused.
    **{
        f"{use}_{name}": (0.025 if each.is_known else 0.003, "ck")
        for use in ("takes", "gives")
        for name, each in CARRIERS.items()
    },
    "ddp": (0.4, "m"),
    "ragged": (0.4, "m"),
    # The planned module is compiled as a whole by this backend. Never drawn, see ``compiled``.
    "aot_eager": (0.0, "ck"),
    "inductor": (0.0, "ck"),
}
COMPILED = {"aot_eager", "inductor"}
TAKES = {"mask", *(f"takes_{name}" for name in CARRIERS)}
GIVES = {"pair_output", "dict_output", *(f"gives_{name}" for name in CARRIERS)}
EXCLUSIVE = [
    {"bf16-mixed", "64-true", "bf16-true"},
    {"error", "resume", "refit"},
    {"manual", "accumulate"},
    {"manual", "clip"},
    *({"two_optimizers", other} for other in ("accumulate", "clip", "retain", "schedule")),
    *({"retain", other} for other in ("accumulate", "clip")),
    {"manual", "schedule"},
    {"unnamed", "whole"},
    {"gpipe", "interleaved"},
    TAKES,
    GIVES,
    {"adamw", "foreach", "fused", "lbfgs"},
    COMPILED,
    *({"lbfgs", other} for other in ("accumulate", "clip", "manual", "two_optimizers", "retain", "error")),
    {f"in_{name}" for name in WRAPPERS},
    {"calls", "calls_vary", "two_calls"},
    *({"whole", other} for other in ("side", "alias")),
    *({"side", other} for other in ("two_optimizers", "thaw")),
    # Documented: under autocast, a weight that is used more than once is cast for each use.
    *({"bf16-mixed", other} for other in ("two_calls", "calls", "calls_vary", "eval_call", "no_grad_call", "penalty")),
]
REUSING = {"again", "tied", "twice", "two_names", "random_depth"}
SPARSE = {"sparse_embedding"}
# Each process goes a way of its own there, so that one sends what the other does not expect: plain training hangs, too.
ROUTED = {"routed", "experts", "stochastic_depth"}
# Which global generator a kind of layer draws from.
DRAWING = {
    "torch": {
        "dropout",
        "dropout_",
        "alpha_dropout",
        "transformer",
        "noise",
        "bernoulli",
        "noisy_hook",
        "stochastic_depth",
    },
    "python": {"python_noise", "drop_path", "layerdrop"},
    "numpy": {"numpy_noise", "random_depth"},
}
IN_PLACE = {"relu_", "silu_", "dropout_"}
# Whose output nobody saves, so that it may be changed in place.
CHANGEABLE = {
    "linear",
    "no_bias",
    "norm",
    "group_norm",
    "batch_norm",
    "gelu",
    "identity",
    "residual",
    "add_",
    "noise",
    "detach_mix",
}
# Without what a pipeline has on one process only, or draws otherwise there (see docs/pipeline.md).
PIPED = {"linear", "no_bias", "norm", "group_norm", "batch_norm", "relu", "relu_", "gelu", "tanh", "prelu", "softmax", "identity", "pool", "add_",
         "clone_mul_", "view", "gated", "function", "residual", "looped", "branches", "keyword", "row", "pair", "frozen",
         "changing_hook"}  # fmt: skip

# What the compiler takes into one graph.
GRAPHED = PIPED - {"function"} | {
    "dropout",
    "alpha_dropout",
    "transformer",
    "noise",
    "bernoulli",
    "tied",
    "again",
    "twice",
}


def draw(seed: int, number: int) -> Program:
    """A program, the same whenever it is asked for."""
    chance = random.Random(f"{seed}-{number}")
    way = chance.choices(["checkpointable", "callback", "pipeline", "processes"], [0.67, 0.295, 0.015, 0.02])[0]
    family = chance.choices(["rows", "sequence", "image"], [0.5, 0.35, 0.15])[0]
    style = chance.choices(["sequential", "traced", "recorded"], [0.5, 0.25, 0.25])[0]
    features = [
        name for name, (share, ways) in FEATURES.items() if share and chance.random() < share and LETTERS[way] in ways
    ]
    limits = [None, 0.0, round(chance.random(), 2), 1.0, 2.0, -0.1]
    by_chance = 0.3 if way == "callback" else 0.5  # only there limits are for whole steps
    limit = chance.choices(limits, [by_chance, 0.2, 0.2, 0.05, 0.042, 0.008])[0]
    if way == "processes" and limit is None:
        limit = 0.5  # chance would give each process another schedule
    program = Program(
        body=(Node("linear"),),
        way=way,
        style=style,
        family=family,
        limit=limit,
        features=tuple(features),
        width=chance.choice([4, 6, 8]),
        batch=chance.choice([3, 4, 6, 12, 24, 48]),
        steps=chance.choice([2, 2, 3, 4]),
        seed=chance.randrange(1000),
    )
    program = legal(program)
    length = chance.choices([2, 3, 4, 6, 9], [2, 4, 4, 2, 1])[0]
    return replace(program, body=_row(chance, program, length, depth=2))


def compiled(program: Program, backend: str, number: int) -> Program:
    """The program with its planned module compiled as a whole, and with batches of which something can be saved."""
    chance = random.Random(f"compiled-{number}")
    # The compiler sets Python's generator back behind each compilation, with what a thread has drawn in between, so
    # that plain training with a prefetching thread differs from run to run.
    features = [name for name in program.features if name != "prefetch"]
    program = legal(
        replace(
            program,
            way=chance.choice(["callback", "checkpointable"]),
            limit=chance.choice([2.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
            features=(backend, *features),
            batch=chance.choice([48, 192, 768]),
            steps=max(program.steps, 3),
        )
    )
    # Most layers break the graph, and then nothing is planned inside of it.
    if chance.random() < 0.75:
        length = chance.choice([4, 6, 9])
        program = replace(program, body=_row(chance, program, length, depth=1, without=KINDS.keys() - GRAPHED))
    return program


LETTERS = {"callback": "c", "checkpointable": "k", "pipeline": "p", "processes": "m"}


def legal(program: Program) -> Program:
    """The program without features that do not go with others, or with its way; the first of them stays."""
    kept: list[str] = []
    for name in program.features:
        clashes = any(name in group and group & {*kept} for group in EXCLUSIVE)
        foreign = LETTERS[program.way] not in FEATURES[name][1] or (name == "lengths" and program.family == "rows")
        needs_call = name in TAKES | GIVES and program.style == "sequential"
        if not (clashes or foreign or needs_call):
            kept.append(name)
    return replace(program, features=tuple(kept))


def _row(
    chance: random.Random, program: Program, length: int, depth: int, without: Collection[str] = ()
) -> tuple[Node, ...]:
    names = [
        name
        for name, each in KINDS.items()
        if program.family[0] in each.families
        and name not in without
        and (depth or not each.inner)
        and (program.way != "pipeline" or name in PIPED)
        and not (program.has("bf16-mixed") and name in REUSING)
        and not (name in SENDERS and program.way != "processes")
        and not (name in SPARSE | ROUTED and program.way == "processes")
        and not (name in SPARSE and program.has("clip", "lbfgs", "two_optimizers", "retain", "accumulate", "penalty"))
    ]
    nodes: list[Node] = []
    while len(nodes) < length:
        name = chance.choices(names, [KINDS[name].weight for name in names])[0]
        if name in IN_PLACE and (nodes[-1].kind not in CHANGEABLE if nodes else chance.random() < 0.8):
            name = "linear"
        inner = KINDS[name].inner
        count = 0 if not inner else 2 if inner == 2 else 1 if name in HOOKS else chance.randint(1, 3)
        # Documented: torch's checkpoint sets back torch's generator alone, so it repeats with other numbers of these. A plan
        # for a module inside of it repeats with those of the forward.
        within = DRAWING["python"] | DRAWING["numpy"] if name == "checkpointed" and program.has("unnamed") else without
        nodes.append(Node(name, _row(chance, program, count, depth - 1, within) if count else ()))
    return tuple(nodes)


# --------------------------------------------------------------------------------------------------------------- model


class UserError(Exception):
    """Of the program itself."""


class Body(nn.Module):
    """The planned module where it is no nn.Sequential."""

    def __init__(self, program: Program, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.pair, self.dict = program.has("pair_output"), program.has("dict_output")
        self.takes, self.gives = carrier(program, "takes"), carrier(program, "gives")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, both: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        if mask is not None:
            x = x * mask
        if self.takes is not None:
            x = x * self.takes.left(both) + self.takes.right(both)
        if self.gives is not None:
            return self.gives.pack(x, x.mean())
        if self.dict:
            return {"out": x, "mean": x.mean()}
        return (x, x.detach().mean()) if self.pair else x


class RecordedBody(Body):
    """Asks what no symbol can answer."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, both: Any = None) -> Any:
        if len(x) > 1000 or int(x.shape[1]) < 2:
            raise UserError("shape")
        return super().forward(x, mask=mask, both=both)


def carrier(program: Program, use: str) -> Carrier | None:
    """How the program's body takes two tensors, or gives them."""
    return next((each for name, each in CARRIERS.items() if program.has(f"{use}_{name}")), None)


class Net(L.LightningModule):
    """The model of a program, with its training step."""

    def __init__(self, program: Program, note: Callable[..., None]) -> None:
        super().__init__()
        self.program, self.note = program, note
        self.records: list[Any] = []
        self.collected: list[torch.Tensor] = []
        self.failed = False
        self.split = 1  # micro-batches, where no pipeline makes them
        self.states: list[Any] = []
        self.changes: list[Callable[[float], Any]] = []  # of what objects around the model hold
        GLOBALS.clear()
        build = Build(program, self.records, self.collected, [self], self.states, self.changes)
        layers = [self._make(build, node) for node in program.body]
        width, image = program.width, program.family == "image"
        self.stem = (
            (nn.Conv2d(width, width, 1) if image else nn.Linear(width, width)) if program.has("stem") else nn.Identity()
        )
        kind = {"sequential": None, "traced": Body, "recorded": RecordedBody}[program.style]
        self.body = nn.Sequential(*layers) if kind is None else kind(program, layers)
        self.head = nn.Linear(width, 3)
        self.metric = MeanMetric() if program.has("metric") else None
        self.history: list[Any] = []
        self.takes, self.gives = carrier(program, "takes"), carrier(program, "gives")
        self.automatic_optimization = not (
            program.has("manual", "two_optimizers", "retain") or SPARSE & program.kinds()
        )
        if program.has("thaw"):
            self.body[0].requires_grad_(False) if kind is None else self.body.layers[0].requires_grad_(False)
        for name, wrapper in WRAPPERS.items():
            if program.has(f"in_{name}"):
                self.body = wrapper(self.body)
        if program.has("alias"):
            self.backbone = self.body
        for backend in COMPILED & {*program.features}:
            self._compile(backend)
        if program.has("side"):
            again = [self._make(build, node) for node in program.body[:2]]
            self.side = nn.Sequential(*again, build.projection())

    def _compile(self, backend: str) -> None:
        """Compile the planned module in one of the ways that users have."""
        match self.program.seed % 3:
            case 0:
                self.body.compile(backend=backend)
            case 1:
                self.body = torch.compile(self.body, backend=backend)
            case _:
                self.body.forward = torch.compile(self.body.forward, backend=backend)

    @staticmethod
    def _make(build: Build, node: Node) -> nn.Module:
        inner = [Net._make(build, each) for each in node.inner]
        return KINDS[node.kind].make(build, *inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.call(self.stem(x))
        return self.head(y.flatten(2).mean(2) if self.program.family == "image" else y)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        """Of the planned module, in the program's manner."""
        keywords = {}
        if self.program.has("mask"):
            keywords["mask"] = (torch.arange(x.shape[-1]) % 3 > 0).to(x.dtype)
        if self.takes is not None:
            keywords["both"] = self.takes.pack(x.detach().cos(), x.detach().mean())
        if self.program.has("subclass_input"):
            x = x.as_subclass(Tagged)
        y = self.body(x, **keywords)
        if self.program.has("subclass_input"):
            y = tree_map_only(Tagged, lambda each: each.as_subclass(torch.Tensor), y)
        if self.gives is not None:
            return self.gives.left(y) + self.gives.right(y)
        if isinstance(y, dict):
            return y["out"] + y["mean"]
        return y[0] + y[1] if isinstance(y, tuple) else y

    def loss(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Of one step, with all that the program does on the way."""
        program = self.program
        x = batch.clone() if program.has("input_gradient", "overwrite_input") else batch
        if program.has("input_gradient"):
            x.requires_grad_()
        if program.has("no_grad_call"):
            with torch.no_grad():
                self(x)
            self.collected.clear()
            self.note("mark")
        if program.has("eval_call"):
            self.body.eval()
            self.note("mark")
            self.history.append(self(x).detach().float().sum())
            self.body.train()
            self.collected.clear()
            self.note("mark")
        with torch.autograd.graph.save_on_cpu() if program.has("offload") else nullcontext():
            first, *others = self.parts(x, batch_idx)
            loss = self(first).float().square().mean()
            self.note("mark")
            for part in others:
                loss = loss + self(part).float().square().mean()
                self.note("mark")
            if program.has("side"):
                loss = loss + self.side(x[: 2 + batch_idx % 3]).float().square().mean()
                self.note("mark")
            if program.has("two_calls"):
                loss = loss + self(x * 0.5 + 1).float().square().mean()
                self.note("mark")
        for value in self.collected:
            loss = loss + 0.1 * value.float().mean()
        self.collected.clear()
        if program.has("records_in_loss"):
            loss = loss * (1 + 0.01 * len(self.records))
            self.note("records", self.records)
            self.records.clear()
        if program.has("penalty"):
            weight = self.head.weight
            (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
            loss = loss + gradient.square().sum()
        if program.has("overwrite_input"):
            with torch.no_grad():
                x.normal_()
        if program.has("edit_bias"):
            with torch.no_grad():
                for parameter in self.body.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.01)
                self.note("mark")
        if self.metric is not None:
            self.metric.update(loss.detach())
        if program.has("history"):
            self.history.append((batch_idx, float(loss.detach())))
        if program.has("error") and batch_idx == 1 and not self.failed:
            self.failed = True
            raise UserError("in the second step")
        self.input = x if program.has("input_gradient") else None
        if program.has("change_early"):  # as behind a ``with`` around the forward
            for change in self.changes:
                change(batch_idx + 5)
        self.note("mark")
        return loss

    def parts(self, x: torch.Tensor, batch_idx: int) -> list[torch.Tensor]:
        """Rows of the step's calls, whose sizes and number may change from step to step."""
        number = 2 if self.program.has("calls") else 1 + batch_idx % 3 if self.program.has("calls_vary") else 1
        # Of processes, each makes as many calls as the one of fewest rows, or plain training hangs.
        least = len(x) - int(os.environ["RANK"]) if self.program.has("ragged") else len(x)
        edge = 2 + (batch_idx + self.program.seed) % max(least - 3, 1)
        if number == 1 or edge + 2 > least:
            return [x]
        return [x[:edge], x[edge:], x[1:edge]][:number]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        parts = batch.tensor_split(self.split)
        loss = sum(self.loss(part, batch_idx) * (len(part) / len(batch)) for part in parts)
        if self.program.has("log"):
            self.log("loss", loss, on_step=True, on_epoch=True)
            if self.program.way == "callback":
                self.log("largest", loss.detach(), reduce_fx="max", on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        if SPARSE & self.program.kinds():
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.note("gradients")
            for optimizer in optimizers:
                optimizer.step()
            self.note("mark")
            return loss.detach()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            if self.program.has("two_optimizers"):
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=self.program.has("retain"))
            if self.program.has("retain"):
                self.manual_backward(loss)
            self.note("gradients")
            optimizer.step()
            self.note("mark")
            if self.program.has("two_optimizers"):
                self.untoggle_optimizer(optimizer)
                loss = self.loss(batch, batch_idx)
        return loss.detach()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = self(batch).float().square().mean()
        self.collected.clear()
        self.note("validation", loss)
        if self._trainer is not None:
            self.log("val_loss", loss)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.program.has("foreach", "fused"):
            how = {"foreach" if self.program.has("foreach") else "fused": True}
            return torch.optim.Adam(parameters, lr=1e-2, **how)
        if self.program.has("lbfgs"):
            return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=2)
        if self.program.has("adamw"):
            return torch.optim.AdamW(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        if self.program.has("two_optimizers"):
            return [
                self.optimizer([*self.stem.parameters(), *self.body.parameters()]),
                self.optimizer(self.head.parameters()),
            ]
        if SPARSE & self.program.kinds():
            return self.with_sparse()
        optimizer = self.optimizer(self.parameters())
        if self.program.has("schedule"):
            step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": step, "interval": "step"}]
        return optimizer

    def optimizers_of_a_loop(self) -> list[torch.optim.Optimizer]:
        """Those of a program without a Trainer."""
        return self.with_sparse() if SPARSE & self.program.kinds() else [self.optimizer(self.parameters())]

    def with_sparse(self) -> list[torch.optim.Optimizer]:
        """One optimizer for tables whose gradient is sparse, and one for all else."""
        tables = [each for each in self.modules() if isinstance(each, nn.Embedding) and each.sparse]
        sparse = list({each.weight: None for each in tables})
        others = [each for each in self.parameters() if all(each is not table for table in sparse)]
        return [self.optimizer(others), torch.optim.SparseAdam(sparse, lr=1e-2)]


def loader(program: Program, data: list[torch.Tensor]) -> Any:
    """Batches as the step gets them: from a thread that draws from a global generator, if the program says so and no layer does."""
    used = {name for name, kinds in DRAWING.items() if kinds & program.kinds()}
    free = [name for name in DRAWS if name not in used]
    if not program.has("prefetch") or not free:
        return data
    return Prefetched(data, free[program.seed % len(free)])


def batches(program: Program) -> list[torch.Tensor]:
    """Of one training, made anew each time since programs may change them."""
    rank = int(os.environ["RANK"]) if program.way == "processes" else 0
    generator = torch.Generator().manual_seed(program.seed + 1000 * rank)
    made = []
    for step in range(program.steps):
        rows = program.batch - 1 if program.has("uneven") and step == program.steps - 1 else program.batch
        rows += rank * program.has("ragged")
        length = [5, 3, 4, 2][step % 4] if program.has("lengths") else 4
        shape = {
            "rows": (rows, program.width),
            "sequence": (rows, length, program.width),
            "image": (rows, program.width, length, length),
        }
        made.append(torch.randn(shape[program.family], generator=generator))
    if program.has("64-true", "bf16-true"):
        made = [batch.to(torch.float64 if program.has("64-true") else torch.bfloat16) for batch in made]
    return made
