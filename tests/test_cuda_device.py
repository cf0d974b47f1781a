"""Operators on the device that tests marked ``gpu`` run on compute what the CPU does: where it is simulated, the others rely on that."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = Callable[[torch.device, Tensor], Any]


def matrix() -> Tensor:
    return torch.randn(6, 8) + 0.1


def images() -> Tensor:
    return torch.randn(2, 4, 8, 8)


def heads() -> Tensor:
    return torch.randn(2, 2, 16, 64)


def of_module(make: Callable[[], nn.Module]) -> Case:
    """The module has the same parameters wherever it is."""
    made: dict[str, nn.Module] = {}

    def run(device: torch.device, input: Tensor) -> Any:
        torch.manual_seed(1)
        module = made[device.type] = make().to(device)
        return module(input), *module.parameters(), *(each for each in module.buffers() if each.is_floating_point())

    return run


def of(function: Callable[..., Any]) -> Case:
    return lambda device, input: function(input)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.attention(input[None], input[None], input[None], need_weights=False)[0]


def numbers(device: torch.device) -> Tensor:
    return torch.tensor([0, 3, 3, 7, 1, 2], device=device)


def rows(device: torch.device) -> Tensor:
    return torch.tensor([7, 0, 1, 1, 2, 5, 3, 4], device=device)


CASES: dict[str, tuple[Callable[[], Tensor], Case]] = {
    "elementwise": (matrix, of(lambda x: [
        x.exp().log1p(), x.abs().sqrt(), x.pow(3), x.clamp(-0.1, 0.2), 2 - x, x / 3, 1 / (x * x + 1), x.sin(), x.tanh(), x.sigmoid(), x.neg(),
        x.erf(),
        torch.lerp(x, x * 2, 0.3), torch.addcmul(x, x, x, value=0.5), torch.where(x > 0, x, x * 2), x.masked_fill(x > 0, 3.0), x.maximum(-x),
    ])),
    "activations": (matrix, of(lambda x: [
        f(x) for f in (F.relu, F.gelu, F.silu, F.mish, F.hardswish, F.elu, F.leaky_relu, F.softplus, F.logsigmoid, F.glu, F.hardtanh)
    ])),
    "in place": (matrix, of(lambda x: [(x * 1).add_(1).mul_(x).relu_(), (x * 1).copy_(x[0]), (x * 1).zero_(), (x * 1).fill_(2)])),
    "reductions": (matrix, of(lambda x: [
        x.sum(1), x.mean(), x.var(0), x.std(), x.min(), x.max(), x.amax(1), x.prod(1), x.norm(), x.logsumexp(1), x.cumsum(1), x.abs().amin(0),
    ])),
    "softmax": (matrix, of(lambda x: [x.softmax(-1), x.log_softmax(0)])),
    "shapes": (matrix, of(lambda x: [
        torch.cat([x, x * 2], 1), torch.stack([x, x * 2], 1), *x.split(3), *x.chunk(2, 1), x.roll(1, 0), x.flip(0), x.repeat_interleave(2, 0),
        x.tril(),
        x.T.contiguous(), x.repeat(2, 1), F.pad(x, (1, 1), value=2.0), x.expand(2, 6, 8).reshape(-1), x.unfold(0, 2, 1).clone(),
    ])),
    "ordering": (matrix, of(lambda x: [x.sort(1)[0], x.topk(2)[0], x.kthvalue(2)[0], x.median(), x.argmax(1), x.sort(0)[1]])),
    "indexing": (matrix, lambda device, x: [
        x[numbers(device) % 6], x[x[:, 0] > 0], x.gather(1, numbers(device)[:, None]), x.index_select(1, numbers(device)), x[:, 2],
        x.take(numbers(device)),
        torch.zeros_like(x).scatter_add(1, rows(device).expand(6, 8), x),
        torch.zeros(8, 8, device=device).index_add(0, numbers(device), x.float()),
        torch.zeros_like(x).index_put((numbers(device) % 6,), x, accumulate=True), x.masked_select(x > 0), x.nonzero(),
    ]),
    "whole numbers": (matrix, lambda device, x: [
        numbers(device).unique(), numbers(device).bincount(), F.one_hot(numbers(device), 8), numbers(device).int() * 2, numbers(device) / 2,
        numbers(device) // 2,
        torch.arange(5, device=device), torch.linspace(0, 1, 5, device=device), torch.eye(3, device=device), numbers(device) == 3, (x > 0).sum(),
    ]),
    "products": (matrix, of(lambda x: [
        x @ x.T, torch.addmm(x.T @ x, x.T, x), torch.einsum("ij,kj->ik", x, x), torch.bmm(x[None], x.T[None]), x @ x[0], x[0] @ x[0],
        torch.outer(x[0], x[1]),
        torch.cdist(x.float(), x.float() + 1), torch.baddbmm(x[None] @ x.T[None], x[None], x.T[None]),
    ])),
    "losses": (matrix, lambda device, x: [
        F.cross_entropy(x, numbers(device)), F.mse_loss(x, torch.ones_like(x)), F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        F.smooth_l1_loss(x, torch.zeros_like(x)), F.kl_div(x.log_softmax(1), torch.ones_like(x) / 8, reduction="batchmean"), F.l1_loss(x, x * 2),
        F.nll_loss(x.log_softmax(1), numbers(device), weight=torch.arange(8.0, device=device).to(x.dtype)), F.cosine_similarity(x, x + 1),
    ]),
    "pixel losses": (images, lambda device, x: F.cross_entropy(x, torch.ones(2, 8, 8, dtype=torch.long, device=device))),
    "linear": (matrix, of_module(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3, bias=False)))),
    "bilinear": (matrix, of_module(lambda: nn.Sequential(nn.PReLU(), nn.Linear(8, 4)))),
    "embedding": (matrix, lambda device, x: F.embedding(numbers(device), x.T.contiguous())),
    "layer norm": (matrix, of_module(lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)))),
    "group norm": (images, of_module(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)))),
    "batch norm": (images, of_module(lambda: nn.BatchNorm2d(4))),
    "batch norm, frozen": (images, of_module(lambda: nn.BatchNorm2d(4).eval())),
    "batch norm of rows": (matrix, of_module(lambda: nn.BatchNorm1d(8))),
    "convolution": (images, of_module(lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 3, 1)))),
    "convolution, channels last": (
        lambda: images().to(memory_format=torch.channels_last),
        of_module(lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)),
    ),
    "convolution by channel": (images, of_module(lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False))),
    "convolution, strided and dilated": (images, of_module(lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2))),
    "convolution, transposed": (images, of_module(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1))),
    "convolution of rows": (lambda: images()[0], of_module(lambda: nn.Conv1d(8, 6, 3))),
    "convolution of volumes": (lambda: images()[None], of_module(lambda: nn.Conv3d(2, 3, 3))),
    "pooling": (images, of(lambda x: [
        F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3), F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 2),
        F.max_pool2d(x, 3, 2, 1),
    ])),
    "resizing": (images, of(lambda x: [
        F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2, mode="bilinear"), F.pad(x, (1, 1, 1, 1), "reflect"),
        F.pixel_shuffle(x, 2), F.unfold(x, 3),
    ])),
    "attention": (heads, of(lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True))),
    "attention with a mask": (heads, lambda device, x: F.scaled_dot_product_attention(
        x, x * 2, x + 1, attn_mask=torch.ones(16, 16, device=device, dtype=torch.bool).tril()
    )),
    "attention with a bias": (heads, lambda device, x: F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=x.mean(-1)[:, :, None])),
    "attention of groups": (
        lambda: torch.randn(2, 4, 16, 32), of(lambda x: F.scaled_dot_product_attention(x, x[:, :2] * 2, x[:, 2:] + 1, enable_gqa=True)),
    ),
    "attention as a layer": (matrix, of_module(SelfAttention)),
    "transformer": (lambda: matrix()[None], of_module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))),
}  # fmt: skip


def outcome(case: Case, input: Tensor, device: torch.device, half: bool) -> list[Tensor]:
    """Results, and gradients of all that wants them."""
    input = input.to(device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        found = case(device, input)
    results = [
        each
        for part in (found if isinstance(found, (list, tuple)) else [found])
        for each in (part if isinstance(part, (list, tuple)) else [part])
    ]
    wanted = [input, *(each for each in results if each.is_leaf and each.requires_grad)]
    weighted = [each.double().square().sum() for each in results if each.grad_fn is not None]
    gradients = torch.autograd.grad(sum(weighted), wanted, allow_unused=True) if weighted else ()
    return [each.detach().cpu() for each in (*results, *gradients) if each is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_the_cpu_does(name: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make, case = CASES[name]
    input = make()
    expected, found = (outcome(case, input, torch.device(kind), half) for kind in ("cpu", "cuda"))
    assert [each.shape for each in found] == [each.shape for each in expected]
    tolerance = 0.06 if half else 1e-5  # the two kinds of device run other operators in bf16
    if "Simulated" not in torch.cuda.get_device_name():
        tolerance = 0.3 if half else 1e-3  # a real one has tensor cores, for attention in single precision, too
    for left, right in zip(found, expected, strict=True):
        scale = float(right.double().abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * max(scale, 1.0), check_dtype=not half)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_dropout_and_attention_draw_what_the_generator_says(half: bool) -> None:
    def drawn() -> list[Tensor]:
        x = torch.ones(2, 2, 16, 64, device="cuda", dtype=torch.bfloat16 if half else torch.float32, requires_grad=True)
        results = [
            F.dropout(x, 0.3),
            F.scaled_dot_product_attention(x, x, x.cumsum(0), dropout_p=0.3),
            torch.rand_like(x),
            torch.randn(5, device="cuda"),
        ]
        gradient = torch.autograd.grad(sum(each.float().sum() for each in results), x)
        return [each.detach().clone() for each in (*results, *gradient)]

    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first, second = drawn(), drawn()
    torch.cuda.set_rng_state(state)
    assert all(map(torch.equal, first, drawn()))
    assert not any(map(torch.equal, first, second))
    assert (first[0] == 0).float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert torch.equal(first[0].unique(), torch.tensor([0, 1 / 0.7], device="cuda", dtype=first[0].dtype))


OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in OPTIMIZERS for options in ({}, {"foreach": False}, {"fused": True})),
        (torch.optim.AdamW, {"capturable": True}),  # SGD has no such option
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_optimizers_step_as_on_the_cpu(kind: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
        of_this = {} if device == "cpu" and "capturable" in options else options
        optimizer = kind(model.parameters(), 1e-2, weight_decay=0.1, **of_this)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device=device)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return [each.detach().cpu() for each in model.parameters()]

    for left, right in zip(trained("cuda"), trained("cpu"), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


only_simulated = pytest.mark.skipif(
    torch.cuda.is_available() and "SIMULATED_DEVICES" not in os.environ, reason="a real device knows all of them"
)


@pytest.mark.gpu
@only_simulated
def test_an_operator_without_known_values_is_an_error() -> None:
    x = torch.ones(2, 8, device="cuda")
    with pytest.raises(RuntimeError, match=r"_thnn_fused_gru_cell: .*NotImplementedError"):
        nn.GRUCell(8, 4, device="cuda")(x)
    with pytest.raises(RuntimeError, match=r"the simulated device has no rule for .*spin_kernel"):
        torch.cuda._sleep(10)


@pytest.mark.gpu
def test_an_operator_that_runs_out_of_memory_changes_nothing() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # else the input may lie in a large segment that an earlier test has left, beside much room
    x, mean = torch.ones(2, 3, 2**22, device="cuda"), torch.zeros(3, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 2**22) / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            F.batch_norm(x, mean, torch.ones(3, device="cuda"), training=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert mean.tolist() == [0, 0, 0]
