"""Layers that keep noise, statistics or state where a recomputation may miss them: three steps under a tight limit, and plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization
from torch.nn.utils import prune
from torchmetrics import MeanMetric

from lightning_rotor import Checkpointable, ModelError, RotorCallback, RotorWarning, SampleError
from lightning_rotor.planning import minimum_budget
from tests.grids import few
from tests.training import train


class Body(nn.Module):
    """Residual blocks, with something between two of them."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.GELU, between: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), activation(), nn.Linear(128, 32)) for _ in range(4)
        )
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            x = self.between(x) if number == 1 and self.between is not None else x
        return x


class Row(nn.Module):
    """Blocks of one kind, one after the other."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(nn.Module):
    """Reads the running statistics before they are updated, as torch's own layers for quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.normalization = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (self.normalization.running_var + 1e-5).rsqrt()[None, :, None, None]
        return F.relu(self.normalization(self.convolution(x * scale) / scale.sqrt()))


class Standardized(Scaled):
    """Reads them when they have been updated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normalization(self.convolution(x))
        return F.relu(y * self.normalization.running_var.sqrt()[None, :, None, None])


class Closed(Scaled):
    """Can be recorded by nobody."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > -1e9 else x


class Later(Scaled):
    """Reads them in later steps alone, when all is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        early = x.sum() > -1e9 and self.calls == 1
        return F.relu(self.normalization(self.convolution(x))) if early else super().forward(x)


class Codebook(nn.Module):
    """Vector quantization whose code follows the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.randn(16, 32))
        self.register_buffer("count", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        index = torch.cdist(flat, self.code).argmin(1)
        with torch.no_grad():
            chosen = F.one_hot(index, 16).float()
            self.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.code.lerp_((chosen.t() @ flat) / self.count[:, None], 0.1)
        return x + (self.code[index].view_as(x) - x).detach()


class Experts(nn.Module):
    """Each position goes to two of four experts, some of which get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            found.index_add_(0, row, expert(flat[row]) * weight[row, place, None])
        return x + found.view_as(x)


class Averaged(nn.Module):
    """Reads a metric, whose hash is another whenever its values change."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.metric.update(x.detach().mean())
        return x + 0.01 * self.metric.compute()


class Randomized(nn.Module):
    """RReLU as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.linear(x), training=self.training)


def for_quantization() -> nn.Module:
    net = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
    )
    for block in net:
        quantization.fuse_modules_qat(block.train(), ["0", "1", "2"], inplace=True)
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(net.train(), inplace=True)


def pruned() -> nn.Module:
    net = Body()
    for block in net.blocks:
        prune.l1_unstructured(block[0], "weight", 0.3)
    return net


FLAT, IMAGE = (32, 8, 32), (4, 4, 16, 16)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "RReLU": (lambda: Body(nn.RReLU), FLAT),
    "RReLU in place": (lambda: Row(lambda: nn.Sequential(nn.Linear(32, 32), nn.RReLU(inplace=True))), FLAT),
    "rrelu": (lambda: Row(Randomized), FLAT),
    "AlphaDropout": (lambda: Body(lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.1))), FLAT),
    "statistics before": (lambda: Row(Scaled), IMAGE),
    "statistics behind": (lambda: Row(Standardized), IMAGE),
    "statistics, unrecorded": (lambda: nn.Sequential(*(Closed() for _ in range(5))), IMAGE),
    "statistics, later": (lambda: nn.Sequential(*(Later() for _ in range(5))), IMAGE),
    "quantization": (for_quantization, IMAGE),
    "fake quantization": (
        lambda: Body(
            between=quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        ),
        FLAT,
    ),
    "codebook": (lambda: Body(between=Codebook()), FLAT),
    "experts": (lambda: Body(between=Experts()), FLAT),
    "pruned": (pruned, FLAT),
    "metric": (lambda: Body(between=Averaged()), FLAT),
}


# Others among these draw random numbers, quantize, keep statistics, or leave a graph in the same way.
ALIKE = {"RReLU", "rrelu", "AlphaDropout", "fake quantization", "experts", "metric"}
ALIKE |= {"statistics behind", "statistics, later", "statistics, unrecorded"}


@pytest.mark.parametrize("name", few(LAYERS, *(set(LAYERS) - ALIKE)))
@pytest.mark.filterwarnings("ignore:stage .* gives other bits when it runs again:lightning_rotor.RotorWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min and quant_max")
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    net = make().train()
    plain, probe = copies(make, net), copies(make, net)
    batches = torch.randn(3, *shape)
    chain = Checkpointable(probe).measure(batches[0])
    limit = minimum_budget(chain).peak_bytes
    planned = Checkpointable(net, mem_limit=limit)
    runs = [trained(plain, plain, batches), trained(planned, net, batches)]
    assert all(map(torch.equal, *runs))
    assert planned.plan is not None
    assert planned.plan.recomputed or name.startswith(("RReLU in", "rrelu"))  # all of their stages are kept


def copies(make: Callable[[], nn.Module], net: nn.Module) -> nn.Module:
    """A model of the same values. One that is pruned cannot be copied."""
    other = make().train()
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    return other


def trained(run: nn.Module, net: nn.Module, batches: torch.Tensor) -> list[torch.Tensor]:
    """Losses, weights, buffers and the generator's state after a step with each batch."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *net.state_dict().values(), torch.get_rng_state()]


def test_a_layer_whose_noise_comes_too_late_is_kept() -> None:
    """torch's own checkpoint gives other gradients there: it ends when the noise is saved, before that is drawn."""
    net = nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8))
    with pytest.warns(RotorWarning, match=r"'1' gives other bits.*RReLU"):
        chain = Checkpointable(net).measure(torch.randn(4, 8))
    assert [stage.recomputable for stage in chain] == [True, False, True]


def test_tensors_of_the_users_can_be_resized_afterwards() -> None:
    net = Body(between=Codebook())
    batch = torch.randn(FLAT)
    limit = int(1.15 * minimum_budget(Checkpointable(net).measure(batch)).peak_bytes)
    Checkpointable(net, mem_limit=limit)(batch).sum().backward()
    assert all(tensor.untyped_storage().resizable() for tensor in (batch, *net.state_dict().values()))


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (torch.Tensor.to_sparse_csr, "sparse_csr"),
        (lambda tensor: torch.nested.nested_tensor(list(tensor.split([1, 3])), layout=torch.jagged), "nested"),
    ],
    ids=["coordinates", "rows", "jagged"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_that_are_not_dense_are_refused(make: Callable[[torch.Tensor], torch.Tensor], layout: str) -> None:
    tensor = make(torch.eye(4))
    net = Checkpointable(Body(), mem_limit="1GiB")
    with pytest.raises(SampleError, match=rf"a tensor of layout torch\.{layout}: expected dense ones"):
        net(tensor)
    with pytest.raises(SampleError, match=rf"a tensor of layout torch\.{layout}: expected dense ones"):
        net.measure(tensor)


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu().to_sparse()


def test_a_tensor_between_stages_that_is_not_dense_is_refused() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Sparse(), nn.Linear(8, 8))
    with pytest.raises(
        ModelError, match=r"stage '1' returns a tensor of layout torch\.sparse_coo: expected dense ones"
    ):
        Checkpointable(net).measure(torch.randn(4, 8))


def test_weights_that_calls_share_are_refused() -> None:
    net = Body()
    for block in net.blocks:
        nn.utils.parametrizations.weight_norm(block[0])
    planned = Checkpointable(net, mem_limit="1GiB")
    with nn.utils.parametrize.cached(), pytest.raises(ModelError, match="expected each call to compute its own"):
        planned(torch.randn(FLAT))
    planned(torch.randn(FLAT)).sum().backward()


class Sharing(L.LightningModule):
    """Calls a net twice with the same weights, whose only other module with compute is one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Body()
        for block in self.net.blocks:
            nn.utils.parametrizations.weight_norm(block[0])

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        with nn.utils.parametrize.cached():
            return (self.net(batch[0]) + self.net(batch[0].flip(0))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_the_error_names_the_module_with_most_compute_when_none_can_be_planned(tmp_path: Path) -> None:
    with pytest.warns(RotorWarning, match="plans nothing.*: Body is called inside of"):
        train(Sharing, [torch.randn(16, 8, 32)], tmp_path, callback=RotorCallback("1GiB", show_table=False))
