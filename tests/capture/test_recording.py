"""Modules whose code symbols cannot run: recorded on a real call, refused where a recording would be wrong at another call."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from lightning_rotor import Checkpointable, ExecutionError, ModelError, sequentialize
from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.planning import minimum_budget
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.stages.sequential import wiring_of
from tests.grids import few
from tests.models import finite

X = (6, 16)


# -------------------------------------------------------------------- how a recording is compared with the module


def snapshot(net: nn.Module) -> Any:
    """Everything that a recording must leave alone."""
    tensors = [(key, id(value), value._version, value.clone()) for key, value in net.state_dict(keep_vars=True).items()]
    plain = [
        {key: value for key, value in module.__dict__.items() if isinstance(value, (bool, int, float, str, type(None)))}
        for module in net.modules()
    ]
    keys = [sorted(module.__dict__) for module in net.modules()]
    host: Any = np.random.get_state()  # noqa: NPY002
    generators = [torch.get_rng_state(), torch.tensor(host[1].astype(np.int64)), torch.tensor(random.getstate()[1])]
    return tensors, plain, keys, generators, [parameter.grad for parameter in net.parameters()]


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
    before = snapshot(net)
    try:
        yield
    finally:
        tensors, plain, keys, generators, gradients = snapshot(net)
        assert [entry[:3] for entry in tensors] == [entry[:3] for entry in before[0]]
        assert all(torch.equal(mine[3], theirs[3]) for mine, theirs in zip(tensors, before[0], strict=True))
        assert (plain, keys) == (before[1], before[2])
        assert all(map(torch.equal, generators, before[3]))
        assert all(mine is theirs for mine, theirs in zip(gradients, before[4], strict=True))


def step(net: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """A training step from the same seeds and buffers: the output, and everything that the step leaves behind."""
    buffers = [buffer.clone() for buffer in net.buffers()]
    net.zero_grad()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)  # noqa: NPY002
    output = forward(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    sum(tensor.float().square().sum() for tensor in tensors).backward()
    left = [*map(torch.clone, tensors), torch.get_rng_state(), torch.tensor([random.random()])]
    left += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]
    left += [buffer.clone() for buffer in net.buffers()]
    with torch.no_grad():
        for buffer, value in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(value)
    return output, left


def staged(cut: GraphCut) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        value = cut.bind(args, kwargs)
        assert value is not None
        return wiring_of(cut.stages).run(value, [partial(run_stage, stage) for stage in cut.stages])

    return forward


def agree(net: nn.Module, cut: GraphCut, *args: Any, **kwargs: Any) -> None:
    """The stages give the module's outputs, gradients, buffers and random numbers."""
    expected, plain = step(net, net, args, kwargs)
    received, ours = step(net, staged(cut), args, kwargs)
    assert type(received) is type(expected)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


def record(net: nn.Module, *args: Any, **kwargs: Any) -> GraphCut:
    """Record, leave the module alone, and compute the same bits."""
    with unchanged(net):
        cut = cut_graph(net, args, kwargs)
        require_same(net, cut, args, kwargs)
    assert cut.way == "graph"
    agree(net, cut, *args, **kwargs)
    return cut


def operations(cut: GraphCut) -> list[str]:
    """What the stages run, by name."""
    return [
        operator if isinstance(operator, str) else getattr(operator, "__name__", type(operator).__name__)
        for stage in cut.stages
        for piece in stage.modules
        for operator in piece.operators
    ]


class Block(nn.Module):
    """A residual block whose forward a test replaces."""

    def __init__(self, trap: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.trap = trap

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        return x if self.trap is None else self.trap(self, x, *rest)


class Net(nn.Module):
    """Blocks in a loop that symbols cannot run, with a trap in the root, in the second block, or nowhere."""

    def __init__(
        self, *, root: Callable[..., Any] | None = None, block: Callable[..., torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(block), Block()])
        self.head = nn.Linear(16, 4)
        self.trap = root

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        if x.shape[0] > 1000:
            raise ValueError("too long")
        for block in self.blocks:
            x = block(x, *rest)
        x = x if self.trap is None else self.trap(self, x, *rest)
        return self.head(x) if isinstance(x, torch.Tensor) else x


def refused_in_the_root(trap: Callable[..., Any], match: str, *rest: Any) -> None:
    """It is an error that names this file, and nothing has changed."""
    net, x = Net(root=trap), torch.randn(X)
    with unchanged(net), pytest.raises(ModelError, match=match) as caught:
        cut_graph(net, (x, *rest))
    assert "test_recording.py, line" in str(caught.value)


def opaque_in_a_block(trap: Callable[..., torch.Tensor], *rest: Any) -> GraphCut:
    """The block runs as it is, as one operation."""
    cut = record(Net(block=trap), torch.randn(X), *rest)
    assert list(cut.opaque) == ["blocks.1"]
    return cut


def both(trap: Callable[..., Any], match: str, *rest: Any) -> None:
    refused_in_the_root(trap, match, *rest)
    opaque_in_a_block(trap, *rest)


# -------------------------------------------------------------------- what becomes nodes


def test_code_that_looks_at_shapes_is_recorded_block_by_block() -> None:
    net, x = Net(), torch.randn(X)
    cut = record(net, x)
    assert cut.opaque == {}
    assert [stage.name for stage in cut.stages][-1] == "head"
    assert operations(cut)[:3] == ["Linear", "tanh", "add"]


def test_the_graph_is_the_last_way_and_says_why() -> None:
    cut = sequentialize(Net(), (torch.randn(X),))
    assert isinstance(cut, GraphCut)
    assert cut.way == "graph"
    assert "sequential" not in cut.reasons  # nobody said that it is one

    class Mostly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Net(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(x))

    cut = sequentialize(Mostly(), (torch.randn(X),))
    assert cut.way == "graph"
    assert len(cut.stages) > 4


def test_when_no_way_works_the_error_names_them_all() -> None:
    net = Net(root=lambda net, x: x * x.sum().item())
    with pytest.raises(ModelError, match=r"cannot be planned: .*its course depends on"):
        sequentialize(net, (torch.randn(X),))


def test_a_recorded_module_runs_under_a_plan() -> None:
    net, x = Net(), torch.randn(64, 16)
    _, expected = step(net, net, (x,), {})
    planned = Checkpointable(net)
    chain = planned.measure(x)
    assert planned.compute_sequence(minimum_budget(chain).peak_bytes).recomputed
    _, received = step(net, planned, (x,), {})
    assert all(map(torch.equal, received, expected))
    assert torch.equal(planned(x[:10]), net(x[:10]))  # another size is another recording


@pytest.mark.parametrize(
    "trap",
    [
        lambda net, x: 2 - x + 1 / (x + 9) + 2 ** (x / 9) + (3 * x).detach() // 2 + x % 5 - abs(-x),
        lambda net, x: (x > 0).int().logical_not() * ((x > 0) & ~(x < 1) | (x == 2) ^ (x != 0)) * x,
        lambda net, x: x @ x.T @ x.mT.mT + x[None, ..., :3].sum() + x[:, [0, 1]].sum() + x.real,
        lambda net, x: torch.cat([*x.chunk(2), *x.split(3)][:2]) + x.max(0).values + torch.max(x, 1)[0][:, None],
        lambda net, x: torch.stack([row * 2 for row in x]) + sum(x.unbind(0)) + x.unflatten(1, (4, 4)).flatten(1),
        lambda net, x: x + torch.arange(16, device=x.device) + x.new_ones(16) + torch.tensor([1.0] * 16, dtype=x.dtype),
        lambda net, x: torch.einsum("ij,kj->ik", x, x) @ x + F.pad(x, (1, 1))[:, 1:-1] + x.to(torch.float64).float(),
        lambda net, x: x + torch.from_numpy(np.arange(16, dtype=np.float32)) + torch.Tensor([2.0]),
        lambda net, x: torch.ops.aten.add(x, torch.ops.aten.mul.Tensor(x, 2)),
        lambda net, x: nn.LayerNorm(16, elementwise_affine=False)(x) + F.dropout(x, 0.5) * torch.rand_like(x),
        lambda net, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0],
        lambda net, x: torch.linalg.qr(x @ x.T + torch.eye(6)).Q @ x,
    ],
)
def test_operations(trap: Callable[..., torch.Tensor]) -> None:
    assert record(Net(block=trap), torch.randn(X)).opaque == {}


@pytest.mark.parametrize("which", ["add", "setitem", "method", "view", "leaf", "masked"])
def test_what_changes_in_place_is_read_changed(which: str) -> None:
    relu = nn.ReLU(inplace=True)

    def change(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        same, view = x, x[:, :4]
        if which == "add":
            x += 1
            x *= 2
        elif which == "setitem":
            x[:, 0] = 0
            x[2, 3:5] = x[1, 1:3]
        elif which == "method":
            x.mul_(2).clamp_(max=1)
        elif which == "view":
            view.neg_()
        elif which == "leaf":
            x = net.relu(x)
        else:
            x[x > 0] = 0.5
        return same + x + view.sum()

    net = Net(block=change)
    net.blocks[1].relu = relu
    assert record(net, torch.randn(X)).opaque == {}


def test_buffers_are_updated_and_the_input_may_be() -> None:
    def update(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.steps += 1
        net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return net.norm(x) - net.mean + net.steps

    net = Net(block=update)
    net.blocks[1].norm = nn.BatchNorm1d(16)
    net.blocks[1].register_buffer("mean", torch.zeros(16))
    net.blocks[1].register_buffer("steps", torch.zeros((), dtype=torch.long))
    cut = record(net, torch.randn(X))
    assert cut.opaque == {}
    staged(cut)(torch.randn(X))
    assert net.blocks[1].steps.item() == 1

    class Eager(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0]
            x += 1
            return super().forward(x)

    x = torch.randn(X)
    before = x.clone()
    cut_graph(Eager(), (x,))
    assert torch.equal(x, before)


def test_functions_with_a_backward_of_their_own_keep_it() -> None:
    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return -3 * gradient, None

    assert record(Net(block=lambda net, x: Flip.apply(x, 2.0)), torch.randn(X)).opaque == {}
    kept = Flip.apply
    opaque_in_a_block(lambda net, x: kept(x, 2.0))
    module = nn.Linear(16, 16)

    class Hides(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient, None

    both(lambda net, x: Hides.apply(x, module), "hands the module Linear to a function")
    both(lambda net, x: Hides.apply(x, lambda: x), "hands function to an operation")


class Pair(NamedTuple):
    logits: torch.Tensor
    extra: dict[str, Any]


def test_nested_outputs() -> None:
    def nest(net: nn.Module, x: torch.Tensor) -> Any:
        return Pair(net.head(x), {"x": [x, (x.sum(), None)], "flag": True, "name": "pair", 3: torch.Size([2])})

    net = Net(root=nest)
    output = staged(record(net, torch.randn(X)))(torch.randn(X))
    assert isinstance(output, Pair)
    assert (output.extra["flag"], output.extra["name"], output.extra["x"][1][1]) == (True, "pair", None)


@dataclass
class Halves:
    low: torch.Tensor
    high: torch.Tensor


class Halving(nn.Module):
    """Runs as one operation, for its hook, and returns what torch does not know as a nesting yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> Halves:
        return Halves(x[:, :8], x[:, 8:])


def test_a_leaf_may_return_a_dataclass_that_nobody_has_seen() -> None:
    def root(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        halves = net.halving(x)
        return torch.cat([halves.high, halves.low], 1)

    net = Net(root=root)
    net.halving = Halving()
    record(net, torch.randn(X))


class Holder:
    """Has no namespace that shows what it holds."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_an_output_that_hides_tensors_is_refused() -> None:
    net = Net(root=lambda net, x: {"holder": Holder(x), "x": x})
    x = torch.randn(X)
    with unchanged(net), pytest.raises(ModelError, match=r"returns Holder, which may hold tensors .* use_cache=False"):
        cut_graph(net, (x,))


# -------------------------------------------------------------------- leaves


def test_torchs_layers_are_leaves_and_its_containers_and_transformer_layers_are_not() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net, x = nn.TransformerEncoder(layer, 3), torch.randn(2, 5, 16)
    cut = record(net, x)
    inside = ["linear", "scaled_dot_product_attention", "linear", "Dropout", "add", "LayerNorm"]
    inside += ["Linear", "relu", "Dropout", "Linear", "Dropout", "add", "LayerNorm"]
    assert [name for name in operations(cut) if name in inside] == 3 * inside
    names = [stage.name for stage in cut.stages]
    assert {"layers.0.self_attn.scaled_dot_product_attention", "layers.1.norm1", "layers.2.linear2"} <= set(names)
    norm_first = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, norm_first=True), 2, nn.LayerNorm(16), enable_nested_tensor=False
    )
    assert record(norm_first, x).stages[-1].name == "norm"
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    record(net, x, mask=mask)
    record(net, x, mask=mask, is_causal=True)
    cut = record(net, x, src_key_padding_mask=torch.tensor([[False] * 4 + [True]] * 2))
    assert [name for name in operations(cut) if name in inside] == 3 * inside
    both_sides = nn.Transformer(16, 2, 1, 2, 32, batch_first=True)
    cut = record(both_sides, x, torch.randn(2, 4, 16), tgt_mask=nn.Transformer.generate_square_subsequent_mask(4))
    assert operations(cut).count("scaled_dot_product_attention") == 1 + 2 * 2
    recurrent = Net(block=lambda net, x: net.lstm(x)[0] + net.lstm(x)[1][0])
    recurrent.blocks[1].lstm = nn.LSTM(16, 16)
    assert record(recurrent, torch.randn(X)).opaque == {}


def test_hooks_run_at_every_call() -> None:
    net, x = Net(), torch.randn(X)
    seen: list[int] = []
    net.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    cut = record(net, x)
    assert "Block" in operations(cut)
    seen.clear()
    staged(cut)(x)
    assert seen == [1]


def test_parametrized_and_frozen_and_shared_layers() -> None:
    net = Net()
    nn.utils.parametrizations.weight_norm(net.blocks[0].linear)
    net.blocks[1].requires_grad_(False)
    net.blocks[2] = net.blocks[1]
    net.head.weight = nn.Parameter(torch.randn(4, 16))
    cut = record(net, torch.randn(X))
    net.head.weight = nn.Parameter(torch.ones(4, 16))  # a stage reads it where it is
    agree(net, cut, torch.randn(X))


def test_a_leaf_that_hands_on_its_input_now_and_something_new_later() -> None:
    def skip(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.5 else x * 2

    class Residual(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0]
            x = self.blocks[0](x)
            return self.head(x + 3 * self.skipping(x))

    net, x = Residual(), torch.randn(X)
    net.skipping = Skipping(skip)
    cut = record(net, x)
    assert list(cut.opaque) == ["skipping"]
    seen = set()
    for seed in range(8):
        outputs = []
        for forward in (net, staged(cut)):
            random.seed(seed)
            outputs.append(forward(x))
        assert torch.equal(*outputs)
        seen.add(outputs[0].sum().item())
    assert len(seen) == 2


class Skipping(nn.Module):
    def __init__(self, trap: Callable[..., Any]) -> None:
        super().__init__()
        self.trap = trap

    def forward(self, x: torch.Tensor) -> Any:
        return self.trap(self, x)


@pytest.mark.parametrize(
    "trap",
    [
        lambda net, x: (x, int(x.detach().sum().abs() > 5)),
        lambda net, x: (x, x if x.sum().abs() > 5 else None),
    ],
)
def test_what_a_leaf_returns_must_look_as_recorded(trap: Callable[..., Any]) -> None:
    class Uses(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0]
            y, number = self.leaf(x * self.one)
            return self.head(y.sum(0) * y.shape[0] + (number if isinstance(number, int) else 3))

    net = Uses()
    net.leaf, net.one = Skipping(trap), nn.Parameter(torch.ones(1))
    small, large = torch.ones(X) * 1e-3, torch.ones(X)
    cut = record(net, small)
    assert list(cut.opaque) == ["leaf"]
    with pytest.raises(ExecutionError, match=r"a submodule returned .* where its recording has"):
        staged(cut)(large)


@pytest.mark.parametrize("asks", [False, True])
def test_the_size_of_what_a_leaf_returns_may_differ_unless_it_decides(asks: bool) -> None:
    class Uses(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.leaf(x * self.one)
            return self.head(y.sum(0) * y.shape[0] + (y.shape[0] > 1 if asks else 0))

    net = Uses()
    net.leaf = Skipping(lambda net, x: x[: int(x.detach().sum().abs() > 5) + 1])
    net.one = nn.Parameter(torch.ones(1))
    large = torch.ones(X)
    cut = record(net, large * 1e-3)
    if asks:
        with pytest.raises(ExecutionError, match=r"a submodule returned .* where its recording has"):
            staged(cut)(large)
    else:
        assert torch.equal(staged(cut)(large), net(large))


# -------------------------------------------------------------------- what is refused


def test_code_that_no_recording_sees() -> None:
    with pytest.warns(FutureWarning, match="script"):
        scripted = torch.jit.script(double)
    both(lambda net, x: scripted(x), "in a way that no recording sees")
    both(lambda net, x: x + torch.from_numpy(x.detach().numpy() * 2), r"asks for a tensor's memory \(numpy\)")
    both(lambda net, x: torch.utils.dlpack.from_dlpack(x.detach()) + x, r"asks for a tensor's memory|no recording sees")
    both(lambda net, x: x + x.data_ptr() * 0, r"asks for a tensor's memory \(data_ptr\)")
    both(lambda net, x: torch.vmap(lambda row: row * 2)(x), r"torch\.func|no recording sees")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_tensor_that_a_leaf_has_kept() -> None:
    kept: list[torch.Tensor] = []

    class Reads(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0]
            kept.clear()
            return self.head(self.blocks[1](x) + kept[0])

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output * 2)

    net = Reads()
    net.blocks[1].register_forward_hook(keep)
    x = torch.randn(X)
    with unchanged(net), pytest.raises(ModelError, match="reads a tensor that was made where no recording sees it"):
        cut_graph(net, (x,))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: 1 if x.sum() > 0 else 2,
        lambda x: x.sum().item(),
        lambda x: float(x.detach().sum()),
        lambda x: int(x.detach().sum()),
        lambda x: x.detach().tolist()[0][0],
        lambda x: range(x.sum().abs().long() + 9)[3],
        lambda x: len(repr(x)),
        lambda x: len(f"{x.sum()}"),
        lambda x: 2 if 3.0 in x else 1,
        lambda x: 2 if torch.equal(x, x) else 1,
        lambda x: 2 if torch.allclose(x, x) else 1,
        lambda x: x[x > 0].shape[0],
        lambda x: x.nonzero().shape[0],
        lambda x: x.unique().numel(),
        lambda x: torch.arange(x.sum().abs().long() + 9).shape[0],
    ],
)
def test_values_of_activations_must_decide_nothing(read: Callable[[torch.Tensor], Any]) -> None:
    both(lambda net, x: x * read(x), r"its course depends on .* which depends on the output of 'blocks\.")


@pytest.mark.parametrize(
    "trap",
    [
        lambda net, x: finite(x) * 2,
        lambda net, x: torch.distributions.Normal(x, x.exp()).rsample(),
        lambda net, x: x * torch.distributions.Normal(x, net.head.weight.norm()).log_prob(x.relu()),
        lambda net, x: torch.distributions.kl_divergence(
            torch.distributions.Gamma(x.abs() + 1, x.abs() + 2), torch.distributions.Gamma(1.0, 1.0)
        ),
    ],
    ids=["assert", "normal", "log_prob", "gamma"],
)
def test_a_check_of_values_stays_a_check(trap: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off
    net, x = Net(root=trap), torch.randn(X)
    cut = record(net, x)
    assert cut.opaque == {}
    assert "require_check" in operations(cut)
    with pytest.raises(ExecutionError, match=r"the check at .*\.py:\d+ has failed"):
        staged(cut)(x * float("nan"))


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: x if (x > 0).all() else x + 1,
        lambda x: x if bool((x > 0).all()) else x + 1,
        lambda x: next(x + number for number in range(3) if (x.abs() < 1e9).all()),
    ],
)
def test_what_raises_in_no_case_is_no_check(decide: Callable[[torch.Tensor], torch.Tensor]) -> None:
    both(lambda net, x: decide(x), "its course depends on __bool__ of a tensor, which depends on the output of")


def test_values_of_parameters_must_decide_nothing() -> None:
    refused_in_the_root(
        lambda net, x: x * 2 if net.head.weight.sum() > 0 else x, r"the parameter 'head\.weight', which learns"
    )


@pytest.mark.parametrize(
    "decide",
    [
        lambda: bool(torch.rand([]) < 0.5),
        lambda: random.random() < 0.5,
        lambda: np.random.rand() < 0.5,  # noqa: NPY002
    ],
)
def test_a_block_that_is_skipped_at_random(decide: Callable[[], bool]) -> None:
    both(lambda net, x: x * 2 if decide() else x + 1, "a block is skipped at random")


def test_random_numbers_of_python_before_a_random_operation() -> None:
    both(lambda net, x: F.dropout(x, random.random()), "random numbers outside of torch's operations")
    both(lambda net, x: (torch.manual_seed(3), F.dropout(x))[1], "seeds a generator")
    generator = torch.Generator()
    state = generator.get_state()
    refused_in_the_root(
        lambda net, x: x * torch.rand(16, generator=generator), r"a torch\.Generator of its own \(rand\)"
    )
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    "trap",
    [
        lambda net, x: x * np.random.default_rng().random(),
        lambda net, x: x * random.Random().random(),
        lambda net, x: x * next(COUNTER),
        lambda net, x: x + 1 if next(COUNTER) % 2 else x,
        lambda net, x: x * torch.from_numpy(np.random.default_rng().random(16).astype(np.float32)),
    ],
)
def test_code_that_does_something_else_each_time(trap: Callable[..., torch.Tensor]) -> None:
    net, x = Net(root=trap), torch.randn(X)
    match = "it does something else each time that it runs on the same input"
    with unchanged(net), pytest.raises(ModelError, match=match):
        cut_graph(net, (x,))
    assert list(cut_graph(Net(block=trap), (x,)).opaque) == ["blocks.1"]


COUNTER = count()


class Doubled(torch.autograd.Function):
    """Its gradient is none that autograd would find."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inside: bool) -> torch.Tensor:
        with torch.no_grad() if inside else nullcontext():
            return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3, None


KEPT = Doubled.apply


@pytest.mark.parametrize("inside", [False, True])
def test_an_autograd_function_that_was_kept_is_no_region_without_gradients(inside: bool) -> None:
    def kept(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.mean() + 1
        return KEPT(x, inside) * scale

    both(kept, "an autograd function")


@pytest.mark.parametrize(
    "context",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        torch.autograd.graph.save_on_cpu,
    ],
)
def test_a_context_within_the_forward(context: Callable[[], Any]) -> None:
    def within(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context():
            y = torch.tanh(x)
        return x + y

    both(within, "computes inside of a context")


def test_inference_mode_and_torchs_checkpoint() -> None:
    def infer(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = torch.tanh(x.detach())
        return x + y.clone()

    both(infer, "computes inside of a context")
    checkpoint = torch.utils.checkpoint.checkpoint
    refused_in_the_root(
        lambda net, x: checkpoint(net.blocks[0], x, use_reentrant=False), "computes inside of a context"
    )


@pytest.mark.parametrize(
    ("trap", "match"),
    [
        (lambda net, x: torch.add(x, 1, out=torch.empty(X)), r"gives add a tensor to write to \(out=\)"),
        (lambda net, x: (x.register_hook(lambda gradient: gradient * 2), x * 1)[1], "sets a hook on a tensor"),
        (lambda net, x: (x.retain_grad(), x * 1)[1], "computes or changes gradients by itself"),
        (lambda net, x: torch.autograd.grad(x.sum(), x)[0] + x, "computes or changes gradients by itself"),
        (lambda net, x: (setattr(x, "data", x.data * 2), x * 1)[1], "assigns to the attribute 'data'"),
        (lambda net, x: x if x.is_leaf else x * 2, r"asks what autograd knows about a tensor \(is_leaf\)"),
    ],
)
def test_what_belongs_to_autograd(trap: Callable[..., Any], match: str) -> None:
    refused_in_the_root(trap, match)


def test_attributes_that_the_forward_changes() -> None:
    def count(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        net.last = x.shape
        return x

    net = Net(root=count)
    x = torch.randn(X)
    with unchanged(net), pytest.raises(ModelError, match="its forward changes attributes of the module"):
        cut_graph(net, (x,))
    net = Net(block=count)
    with unchanged(net):
        assert list(cut_graph(net, (x,)).opaque) == ["blocks.1"]


class Settings:
    kind: str | None = None
    calls = 0


def test_a_setting_that_the_first_forward_makes_and_one_that_every_forward_changes() -> None:
    def settle(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if net.settings.kind is None:
            net.settings.kind = "known"
        return x * len(net.settings.kind)

    def count(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.settings.calls += 1
        return x

    net = Net(root=settle)
    net.settings = Settings()
    record(net, torch.randn(X))
    assert net.settings.kind == "known"  # as after a forward
    net = Net(root=count)
    net.settings = Settings()
    with pytest.raises(ModelError, match="its forward changes attributes of the module"):
        cut_graph(net, (torch.randn(X),))
    assert vars(net.settings) == {}


def test_parameters_that_the_forward_changes_in_place() -> None:
    def clip(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        net.linear.weight.data.clamp_(max=0.01)
        return net.linear(x)

    net, x = Net(block=clip), torch.randn(X)
    with unchanged(net):
        assert list(cut_graph(net, (x,)).opaque) == ["blocks.1"]
    net, x = Net(root=lambda net, x: (net.head.weight.data.clamp_(max=0.01), x)[1]), torch.randn(X)
    with unchanged(net), pytest.raises(ModelError, match=r"changes a parameter, or another tensor .* in place"):
        cut_graph(net, (x,))
    cached = torch.zeros(16)

    def remember(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        cached.add_(1)
        return x + cached

    refused_in_the_root(remember, "another tensor that is no buffer and was there before, .* in place")
    assert cached.sum() == 0

    def constant(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.from_numpy(np.zeros(16, np.float32))
        numbers += 1
        return x + numbers

    refused_in_the_root(constant, "made without any input, in place")


def test_parameters_that_are_kept_out_of_sight() -> None:
    hidden = nn.Linear(16, 16)
    both(lambda net, x: hidden(x), "Linear is called but is no submodule")
    both(lambda net, x: F.linear(x, hidden.weight), "keeps elsewhere than in attributes")


def test_an_error_of_the_forward_is_told() -> None:
    refused_in_the_root(lambda net, x: x.reshape(7), r"shape '\[7\]' is invalid")


# -------------------------------------------------------------------- guards


def attend(net: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if mask.all() else x.masked_fill(~mask, 0.0)


def test_a_mask_may_decide_and_is_looked_at_in_every_call() -> None:
    net, x = Net(root=attend), torch.randn(X)
    full, padded = torch.ones(X, dtype=torch.bool), torch.ones(X, dtype=torch.bool)
    padded[2:, 3:] = False
    cut = record(net, x, full)
    assert not {"all", "__bool__"} & set(operations(cut))
    assert cut.bind((x, padded), {}) is None
    other = record(net, x, padded)
    assert other.bind((x, full), {}) is None
    assert other.bind((x, padded.roll(1, 0)), {}) is not None
    agree(net, other, x, padded.roll(1, 0))
    planned = Checkpointable(net, (x, full), "1GiB")
    for mask in (full, padded, full):
        assert torch.equal(planned(x, mask), net(x, mask))


def test_answers_that_make_no_difference_are_accepted_together() -> None:
    net, x = Net(root=lambda net, x, mask: (mask.any().item(), x * 2)[1]), torch.randn(X)
    yes, no = torch.ones(X, dtype=torch.bool), torch.zeros(X, dtype=torch.bool)
    cut = cut_graph(net, (x, yes))
    assert cut.bind((x, no), {}) is None
    assert cut_graph(net, (x, no), known=[cut]) is cut
    assert cut.bind((x, no), {}) is not None
    assert cut.bind((x, yes), {}) is not None
    assert cut_graph(Net(root=attend), (x, yes), known=[cut]) is not cut


@pytest.mark.parametrize(
    ("read", "other"),
    [
        (lambda mask: mask[mask].shape[0], lambda mask: mask.logical_not()),
        (lambda mask: mask.nonzero().shape[0], lambda mask: mask.logical_not()),
        (lambda mask: mask.sum().item(), lambda mask: mask.logical_not()),
        (lambda mask: sum(mask.int().tolist()[0]), lambda mask: mask.logical_not()),
        (lambda mask: torch.arange(mask.sum()).shape[0], lambda mask: mask.logical_not()),
        (lambda mask: len(repr(mask)), lambda mask: mask.logical_not()),
    ],
)
def test_values_of_inputs_are_guarded(read: Callable[[torch.Tensor], int], other: Callable[..., torch.Tensor]) -> None:
    net, x = Net(root=lambda net, x, mask: x * read(mask)), torch.randn(X)
    mask = torch.ones(X, dtype=torch.bool)
    cut = record(net, x, mask)
    assert cut.bind((x, mask.clone()), {}) is not None
    assert cut.bind((x, other(mask)), {}) is None


def test_values_of_buffers_are_guarded_and_constants_need_no_guard() -> None:
    net, x = Net(root=lambda net, x: x * net.scale.item() + torch.arange(3).sum().item()), torch.randn(X)
    net.register_buffer("scale", torch.tensor(2.0))
    cut = record(net, x)
    assert "item" not in operations(cut)
    net.scale.fill_(3.0)
    assert cut.bind((x,), {}) is None
    constant = record(Net(root=lambda net, x: x * torch.linspace(0, 1, 3).tolist()[1]), x)
    assert not constant.recording.guards.asks_values
    assert "linspace" not in operations(constant)


def test_a_guard_on_what_was_changed_in_place_is_refused() -> None:
    def change(net: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.clone()
        mask[0] = False
        return x if mask.all() else x * 2

    refused_in_the_root(change, "which was changed in place before", torch.ones(X, dtype=torch.bool))


# -------------------------------------------------------------------- for which calls it holds


def test_a_recording_holds_for_inputs_of_the_same_kind() -> None:
    net, x = Net(), torch.randn(X)
    cut = cut_graph(net, (x,))
    assert cut.bind((torch.randn(X),), {}) is not None
    for other in (
        torch.randn(5, 16), torch.randn(X, dtype=torch.float64), torch.randn(X, requires_grad=True), torch.randn(16, 6).T
    ):  # fmt: skip
        assert cut.bind((other,), {}) is None
    assert cut.bind((x, 1), {}) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert cut.bind((x,), {}) is None
    net.blocks[1].training = False
    assert cut.bind((x,), {}) is None
    net.blocks[1].training = True
    assert cut.bind((x,), {}) is not None
    net.remark = 3
    assert cut.bind((x,), {}) is None


def test_a_tensor_that_is_given_twice_may_be_noticed() -> None:
    net, x = Net(root=lambda net, x, left, right: x * 2 if left is right else x), torch.randn(X)
    cut = cut_graph(net, (x, x, x))
    assert cut.bind((x, x, x), {}) is not None
    assert cut.bind((x, x, x.clone()), {}) is None


def test_autocast_around_the_call() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        record(Net(), torch.randn(X))


# -------------------------------------------------------------------- memory


def test_a_recording_takes_no_more_memory_than_a_forward_without_gradients() -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(20))

    net, x = Deep(), torch.randn(4096, 16)

    def peak(run: Callable[[], Any]) -> int:
        gc.collect()
        meter = StepMeter(torch.device("cpu"))
        meter.start()
        run()
        return meter.stop().peak_bytes

    class Long(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x) if x.shape[0] else x

    net = Long()
    with torch.no_grad():
        least = peak(lambda: net(x))
    most = peak(lambda: net(x))
    recorded = peak(lambda: cut_graph(net, (x,)))
    assert recorded <= least + 2 * x.nbytes < most / 3  # the copy of the input, and what the operation at hand saves


# -------------------------------------------------------------------- models of others


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class GPT(nn.Module):
    """In the style of nanoGPT."""

    def __init__(self, words: int = 50, width: int = 16, longest: int = 12) -> None:
        super().__init__()
        self.longest = longest
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "attend": Attention(width, 2), "mlp": nn.Linear(width, width)})
            for _ in range(3)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        _, length = ids.size()
        assert length <= self.longest, f"cannot read {length} words"
        x = self.drop(self.words(ids) + self.places(torch.arange(0, length, dtype=torch.long, device=ids.device)))
        for layer in self.layers:
            x = x + layer["attend"](layer["norm"](x))
            x = x + F.gelu(layer["mlp"](x))
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def test_a_transformer_written_by_hand() -> None:
    ids = torch.randint(50, (2, 8))
    cut = record(GPT(), ids)
    assert len(cut.stages) >= 6
    record(GPT(), ids, ids)
    with pytest.raises(ModelError, match="cannot read 13 words"):
        cut_graph(GPT(), (torch.randint(50, (2, 13)),))


SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "config", "settings"),
    [
        ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
        pytest.param("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 1}, marks=pytest.mark.wide),
        pytest.param("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 1}, marks=pytest.mark.wide),
        pytest.param(
            "Gemma2ForCausalLM", "Gemma2Config", {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
            marks=pytest.mark.wide,
        ),
        pytest.param("BertForMaskedLM", "BertConfig", SMALL, marks=pytest.mark.wide),
        pytest.param(
            "T5ForConditionalGeneration", "T5Config",
            {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_language_models_of_transformers(hugging: Any, name: str, config: str, settings: dict[str, Any]) -> None:
    net = getattr(hugging, name)(getattr(hugging, config)(**settings)).train()
    ids, labels = torch.randint(3, 60, (2, 2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    padded = mask.clone()
    padded[1, 6:] = 0
    options = {} if name.startswith("Bert") else {"use_cache": False}
    full = record(net, input_ids=ids, attention_mask=mask, labels=labels, **options)
    assert not full.opaque
    cut = record(net, input_ids=ids, attention_mask=padded, labels=labels, **options)
    other = torch.ones_like(mask)
    other[0, 7:] = 0
    agree(net, cut, input_ids=ids.roll(1, 1), attention_mask=other, labels=labels, **options)
    if full.recording.guards.asks_values:
        assert full.bind((), {"input_ids": ids, "attention_mask": padded, "labels": labels, **options}) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "options"), [("Bert", {}), pytest.param("GPTNeoX", {"use_cache": False}, marks=pytest.mark.wide)]
)
def test_base_models_of_transformers(hugging: Any, name: str, options: dict[str, Any]) -> None:
    net = getattr(hugging, f"{name}Model")(getattr(hugging, f"{name}Config")(**SMALL)).train()
    ids = torch.randint(3, 60, (2, 9))
    assert len(record(net, ids, **options).stages) > 10
    assert len(record(net, input_ids=ids, attention_mask=torch.ones_like(ids).tril(7), **options).stages) > 10


@pytest.mark.parametrize("padded", few([False, True], True))
@pytest.mark.parametrize("masked", few([False, True], True))
def test_torchs_transformer_with_and_without_masks(masked: bool, padded: bool) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
            self.layers = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor, mask: Any, padding: Any) -> torch.Tensor:
            hidden = self.layers(
                self.words(source), self.words(target), mask, mask,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )  # fmt: skip
            return self.head(hidden)

    net, ids = Translator(), torch.randint(50, (2, 9))
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1) if masked else None
    padding = torch.zeros(2, 9, dtype=torch.bool) if padded else None
    if padding is not None:
        padding[1, 6:] = True
    cut = record(net, ids, ids.roll(1), mask, padding)
    assert not cut.opaque
    assert len(cut.stages) > 40
    if mask is not None:
        assert cut.bind((ids, ids, ~mask, padding), {}) is None  # no longer causal


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.wide
def test_other_models_of_transformers(hugging: Any) -> None:
    config = hugging.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4
    )
    net = hugging.ViTForImageClassification(config).train()
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    cut = record(net, images, labels=labels)
    assert type(staged(cut)(images, labels=labels)) is hugging.modeling_outputs.ImageClassifierOutput
    assert config.problem_type == "single_label_classification"  # as after a forward
    llama = hugging.LlamaForCausalLM(hugging.LlamaConfig(**SMALL))
    ids = torch.randint(3, 60, (2, 9))
    with unchanged(llama), pytest.raises(ModelError, match=r"returns DynamicCache.* use_cache=False"):
        cut_graph(llama, (ids,), {"use_cache": True})
    cut = sequentialize(llama, (ids,), {"use_cache": False})
    assert cut.way == "graph"
    assert len(cut.stages) > 5
    planned = Checkpointable(copy.deepcopy(llama).train(), mem_limit="1GiB")
    assert torch.equal(planned(ids, use_cache=False).logits, llama(ids, use_cache=False).logits)


@pytest.mark.wide
def test_models_of_timm() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("mobilevit_xxs", num_classes=5).train()
    cut = cut_graph(net, (torch.randn(2, 3, 32, 32),))
    assert cut.opaque == {}
    assert len(cut.stages) > 100
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.1, drop_path_rate=0.2).train()
    assert record(vit, torch.randn(2, 3, 32, 32)).opaque == {}
