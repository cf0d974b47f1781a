# ruff: noqa: D101, D102, D103  (tables of small things whose names say what they are)
"""Programs of the fuzzer as data, and the layers and hooks that they are made of: each an entry of ``KINDS``, a few lines.

Those that have to do with objects of the user's own are in benchmarks/fuzz_objects.py.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Node:
    """A layer, or something around layers."""

    kind: str
    inner: tuple[Node, ...] = ()

    def __call__(self, *inner: Node) -> Node:
        return Node(self.kind, inner)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.inner))})" if self.inner else self.kind

    def walk(self) -> Iterator[Node]:
        yield self
        for node in self.inner:
            yield from node.walk()


@dataclass(frozen=True)
class Program:
    """A model and a loop.

    Attributes:
        limit: 0 for the least that a plan can do with, 1 for keeping all, more for more than enough, less for less than the least; None for
            schedules that chance makes rather than the planner.
    """

    body: tuple[Node, ...]
    way: str = "checkpointable"  # callback, pipeline, processes
    style: str = "sequential"  # traced, recorded
    family: str = "rows"  # sequence, image
    limit: float | None = 0.0
    features: tuple[str, ...] = ()
    width: int = 8
    batch: int = 4
    steps: int = 2
    seed: int = 0

    def __repr__(self) -> str:
        given = [field for field in fields(self) if field.name == "body" or getattr(self, field.name) != field.default]
        return f"Program({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in given)})"

    def has(self, *features: str) -> bool:
        return any(feature in self.features for feature in features)

    def kinds(self) -> set[str]:
        return {node.kind for each in self.body for node in each.walk()}


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Node:
        if name not in KINDS:
            raise KeyError(name)
        return Node(name)


def parse(text: str) -> Program:
    """The program of a text."""
    return eval(text, {"__builtins__": {}}, _Names(Program=Program))


# -------------------------------------------------------------------------------------------------------------- layers


@dataclass
class Build:
    """What the layers of one model have in common."""

    program: Program
    records: list[Any]  # of hooks
    collected: list[torch.Tensor]  # by hooks, for the loss
    net: list[L.LightningModule]
    states: list[Any]  # that hooks have
    changes: list[Callable[[float], Any]]  # of what objects around the model hold, at each step
    latest: nn.Module | None = None  # that has a weight

    @property
    def width(self) -> int:
        return self.program.width

    def state(self, hook: Any) -> Any:
        """The hook, whose attributes are looked at."""
        self.states.append(hook)
        return hook

    def projection(self, bias: bool = True) -> nn.Module:
        if self.program.family == "image":
            return nn.Conv2d(self.width, self.width, 3, padding=1, bias=bias)
        return nn.Linear(self.width, self.width, bias=bias)


@dataclass(frozen=True)
class Kind:
    make: Callable[..., nn.Module]
    weight: float
    families: str
    inner: int  # 0: none; 1: a row of layers; 2: two of them


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: float = 1.0, families: str = "rsi", inner: int = 0) -> Callable[[Any], Any]:
    """Enter a function or class that takes a :class:`Build` and the modules inside."""

    def enter(make: Any) -> Any:
        KINDS[name] = Kind(make, weight, families, inner)
        return make

    return enter


@kind("linear", 10)
def _linear(build: Build) -> nn.Module:
    build.latest = build.projection()
    return build.latest


STOCK: dict[str, tuple[float, str, Callable[[Build], nn.Module]]] = {
    "no_bias": (1, "rsi", lambda b: b.projection(bias=False)),
    "norm": (2, "rs", lambda b: nn.LayerNorm(b.width)),
    "group_norm": (1, "i", lambda b: nn.GroupNorm(2, b.width)),
    "batch_norm": (3, "ri", lambda b: (nn.BatchNorm2d if b.program.family == "image" else nn.BatchNorm1d)(b.width)),
    "relu": (2, "rsi", lambda b: nn.ReLU()),
    "relu_": (2, "rsi", lambda b: nn.ReLU(inplace=True)),
    "silu_": (1, "rsi", lambda b: nn.SiLU(inplace=True)),
    "gelu": (2, "rsi", lambda b: nn.GELU()),
    "tanh": (2, "rsi", lambda b: nn.Tanh()),
    "prelu": (1, "rsi", lambda b: nn.PReLU()),
    "softmax": (1, "rs", lambda b: nn.Softmax(-1)),
    "dropout": (3, "rsi", lambda b: nn.Dropout(0.2)),
    "dropout_": (1, "rsi", lambda b: nn.Dropout(0.2, inplace=True)),
    "alpha_dropout": (1, "rsi", lambda b: nn.AlphaDropout(0.2)),
    "identity": (0.5, "rsi", lambda b: nn.Identity()),
    "pool": (1, "i", lambda b: nn.MaxPool2d(3, 1, 1)),
    "spectral": (0.5, "rs", lambda b: spectral_norm(b.projection())),
    "weight_norm": (0.5, "rs", lambda b: weight_norm(b.projection())),
    "transformer": (1, "s", lambda b: nn.TransformerEncoderLayer(b.width, 2, 2 * b.width, 0.1, batch_first=True)),
}
for _name, (_weight, _families, _make) in STOCK.items():
    kind(_name, _weight, _families)(_make)


def _drop_path(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if self.training and random.random() < 0.3 else x * 0.9


def _normalized(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean, deviation = x.mean(), x.std() + 1
    return (x - mean) / deviation


def _by_value(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.mean() > 0 else x.sin()


def _numpy_noise(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + float(np.random.normal()) * 0.1  # noqa: NPY002


def _gated(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    left, right = torch.cat([x, x.cos()], 1).chunk(2, 1)
    return left * right


FORWARDS: dict[str, tuple[float, Callable[..., torch.Tensor]]] = {
    "add_": (1, lambda self, x: (x * 2).add_(1)),
    "clone_mul_": (1, lambda self, x: x.clone().mul_(0.5)),
    "view": (1, lambda self, x: x.flatten(1)),
    "detach_mix": (1, lambda self, x: x + 0.1 * x.detach()),
    "noise": (2, lambda self, x: x + 0.1 * torch.randn_like(x)),
    "bernoulli": (1, lambda self, x: x * torch.empty_like(x).bernoulli_(0.8)),
    "python_noise": (1, lambda self, x: x * (1 + 0.1 * random.random())),
    "numpy_noise": (1, _numpy_noise),
    "drop_path": (1, _drop_path),
    "normalized": (1, _normalized),
    "by_value": (0.7, _by_value),
    "by_shape": (0.5, lambda self, x: x * 0.5 if x.shape[0] > 4 else x.sin()),
    "gated": (1, _gated),
}
FORWARDS["view"] = (1, lambda self, x: x.flatten(1).view(x.shape))


def _of_forward(name: str, forward: Callable[..., torch.Tensor]) -> Callable[[Build], nn.Module]:
    made = type(name.title().replace("_", ""), (nn.Module,), {"forward": forward, "__module__": __name__})
    return lambda build: made()


for _name, (_weight, _forward) in FORWARDS.items():
    kind(_name, _weight)(_of_forward(_name, _forward))


class Square(torch.autograd.Function):
    """A function of the user's, which remembers its input in one of two ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * 0.1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0] * 0.2


@kind("function")
class _Function(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(x)


# ------------------------------------------------------------------------------------ layers that remember something


class Remembering(nn.Module):
    """A layer with what its class says in ``start``."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.start(build)


def remembering(name: str, weight: float = 1.0) -> Callable[[type], type]:
    """Enter a class with ``start`` and ``forward``."""
    return lambda cls: kind(name, weight)(type(cls.__name__, (cls, Remembering), {"__module__": __name__}))


@remembering("counter")
class _Counter:
    def start(self, build: Build) -> None:
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin()


@remembering("growing_list")
class _GrowingList:
    def start(self, build: Build) -> None:
        self.means: list[torch.Tensor] = []
        self.last = deque(maxlen=3)
        self.stats = {"calls": 0, "inner": {"sums": []}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.append(x.detach().mean())
        self.last.append(x.shape[0])
        self.stats["calls"] += 1
        self.stats["inner"]["sums"].append(float(x.detach().sum()))
        return x.cos()


@remembering("uses_count", 0.7)
class _UsesCount:
    def start(self, build: Build) -> None:
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


@remembering("average", 0.6)
class _Average:
    def start(self, build: Build) -> None:
        self.mean, self.assigned = torch.zeros(build.width), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().transpose(1, -1).reshape(-1, x.shape[1]).mean(0).float().mean()
        self.mean.mul_(0.9).add_(mean, alpha=0.1)
        self.assigned = 0.9 * self.assigned + mean
        return x - 0.01 * self.mean[0].to(x.dtype)


@remembering("buffer")
class _Buffer:
    def start(self, build: Build) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x * (1 + 0.01 * self.count).to(x.dtype)


@remembering("own_generator")
class _OwnGenerator:
    def start(self, build: Build) -> None:
        self.generator, self.python = torch.Generator().manual_seed(5), random.Random(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape[1], generator=self.generator).mean().to(x.dtype)
        return x * (noise + 0.1 * self.python.random())


@remembering("metric", 0.6)
class _Metric:
    def start(self, build: Build) -> None:
        self.metric = MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.metric.update(x.detach().float().mean())
        return x.sin()


@remembering("logging", 0.7)
class _Logging:
    def start(self, build: Build) -> None:
        self.net = build.net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net = self.net[0]
        if net._trainer is not None and self.training:
            net.log("activation", x.detach().float().mean(), on_step=True, on_epoch=True)
        return x.cos()


# ---------------------------------------------------------------------------------------------- something around layers


class Around(nn.Module):
    """Holds a row of layers, or two."""

    def __init__(self, build: Build, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)


def around(name: str, weight: float, forward: Callable[..., Any], inner: int = 1, **more: Any) -> None:
    made = type(name.title().replace("_", ""), (Around,), {"forward": forward, "__module__": __name__, **more})
    kind(name, weight, inner=inner)(made)


def _no_grad(self: Around, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        aside = self.inner(x)
    return x + aside


def _no_autocast(self: Around, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.inner(x.to(self.marker.dtype)).to(x.dtype)


def _looped(self: Around, x: torch.Tensor) -> torch.Tensor:
    for layer in self.inner:
        x = layer(x)
    return x


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.tanh()


class OnFirst(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(pair[0]), pair[1]


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


around("residual", 4, lambda self, x: x + self.inner(x))
around("looped", 1, _looped)
around("branches", 1, lambda self, x: self.inner[0](x) + self.inner[1](x), inner=2)
around("keyword", 0.7, lambda self, x: self.inner[0](x) * torch.sigmoid(x), inner=1)
around("twice", 1, lambda self, x: self.inner(self.inner(x)))
around("no_grad", 1, _no_grad)
around("checkpointed", 0.3, lambda self, x: checkpoint(self.inner, x, use_reentrant=False))
kind("row", 2, inner=1)(lambda build, *inner: nn.Sequential(*inner))
kind("pair", 1, inner=1)(lambda build, *inner: nn.Sequential(Fork(), *map(OnFirst, inner), Join()))


@kind("no_autocast", 0.7, inner=1)
class _NoAutocast(Around):
    def __init__(self, build: Build, *inner: nn.Module) -> None:
        super().__init__(build, *inner)
        self.marker = nn.Parameter(torch.zeros(()))

    forward = _no_autocast


@kind("frozen", 1, inner=1)
def _frozen(build: Build, *inner: nn.Module) -> nn.Module:
    return nn.Sequential(*inner).requires_grad_(False)


@kind("evaluated", 1, inner=1)
class _Evaluated(Around):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x


@kind("again", 1)
def _again(build: Build) -> nn.Module:
    return build.latest or _linear(build)


@kind("tied", 1)
def _tied(build: Build) -> nn.Module:
    made = build.projection()
    if build.latest is not None:
        made.weight = build.latest.weight
    return made


# --------------------------------------------------------------------------------------------------------------- hooks


class Counting:
    """A hook with a state of its own."""

    def __init__(self) -> None:
        self.calls, self.means = 0, []

    def __call__(self, module: nn.Module, x: Any, y: torch.Tensor) -> None:
        self.calls += 1
        self.means.append(float(y.detach().mean()))


def _once(build: Build, module: nn.Module) -> None:
    def hook(_: nn.Module, x: Any, y: torch.Tensor) -> None:
        build.records.append("once")
        handle.remove()

    handle = module.register_forward_hook(hook)


def _on_gradient(build: Build, y: torch.Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda gradient: build.records.append(gradient.float().norm()))


HOOKS: dict[str, tuple[float, Callable[[Build, nn.Module], Any]]] = {
    "append_hook": (3, lambda b, m: m.register_forward_hook(lambda _, x, y: b.records.append(y.detach().float().mean()))),
    "pre_hook": (1, lambda b, m: m.register_forward_pre_hook(lambda _, x: b.records.append(x[0].shape))),
    "keyword_hook": (1, lambda b, m: m.register_forward_hook(lambda _, x, k, y: b.records.append(len(k)), with_kwargs=True)),
    "changing_hook": (2, lambda b, m: m.register_forward_hook(lambda _, x, y: y * 0.5)),
    "changing_pre_hook": (1, lambda b, m: m.register_forward_pre_hook(lambda _, x: (x[0] + 0.1,))),
    "collecting_hook": (2, lambda b, m: m.register_forward_hook(lambda _, x, y: b.collected.append(y))),
    "counting_hook": (1, lambda b, m: m.register_forward_hook(b.state(Counting()))),
    "noisy_hook": (0.7, lambda b, m: m.register_forward_hook(lambda _, x, y: y + 0.1 * torch.randn_like(y))),
    "once_hook": (0.7, _once),
    "backward_hook": (1, lambda b, m: m.register_full_backward_hook(lambda _, i, o: b.records.append(o[0].float().norm()))),
    "changing_backward_hook": (0.7, lambda b, m: m.register_full_backward_hook(lambda _, i, o: tuple(g if g is None else g * 0.5 for g in i))),
    "gradient_hook": (1, lambda b, m: m.register_forward_hook(lambda _, x, y: _on_gradient(b, y))),
    "parameter_hook": (1, lambda b, m: [p.register_hook(lambda g: g * 0.5) for p in m.parameters() if p.requires_grad]),
    "accumulated_hook": (0.7, lambda b, m: [p.register_post_accumulate_grad_hook(lambda p: b.records.append(p.grad.float().norm()))
                                            for p in m.parameters() if p.requires_grad]),
}  # fmt: skip


def _hooked(register: Callable[[Build, nn.Module], Any]) -> Callable[..., nn.Module]:
    def make(build: Build, *inner: nn.Module) -> nn.Module:
        module = inner[0] if len(inner) == 1 else nn.Sequential(*inner)
        register(build, module)
        return module

    return make


for _name, (_weight, _register) in HOOKS.items():
    kind(_name, 0.4 * _weight, inner=1)(_hooked(_register))
