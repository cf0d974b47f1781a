"""A recomputation runs under the settings of its forward, whatever is set when the backward comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_rotor.execution.segment import recomputed
from lightning_rotor.execution.settings import Settings, settings
from lightning_rotor.invertible import AdditiveCoupling, invertible_checkpoint
from lightning_rotor.stages.generators import GeneratorStates, generator_state, rewinding

MATMULS: tuple[tuple[str, Any], ...] = (("cuda", cuda.matmul), ("mkldnn", mkldnn.matmul))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """torch's older setters write several settings: setting them back does not bring the others back."""
    with Settings().restored():
        yield


@contextmanager
def _set(write: Callable[[Any], None], read: Callable[[], Any], value: Any):
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _dtype() -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, torch.get_default_dtype, torch.bfloat16)


def _deterministic(mode: int) -> AbstractContextManager[None]:
    return _set(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, mode)


def _attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return _set(lambda value: setattr(owner, name, value), lambda: getattr(owner, name), value)


def _matmul(name: str) -> AbstractContextManager[None]:
    return _set(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, name)


def _kernels() -> Any:
    enabled = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled
    return [read() for read in enabled], torch._C._get_sdp_priority_order()


def _deterministic_mode() -> Any:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast(device: str) -> Callable[[], Any]:
    return lambda: (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


CASES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "default dtype": (_dtype, lambda: torch.ones(1).dtype),
    "default device": (lambda: torch.device("meta"), lambda: torch.ones(1).device),
    "deterministic": (lambda: _deterministic(2), _deterministic_mode),
    "deterministic, warnings only": (lambda: _deterministic(1), _deterministic_mode),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), _autocast("cpu")),
    "autocast to float16, without cache": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        _autocast("cpu"),
    ),
    "no autocast": (nullcontext, _autocast("cpu")),
    "grad mode": (nullcontext, torch.is_grad_enabled),
    "float32 products": (lambda: _matmul("medium"), torch.get_float32_matmul_precision),
    "TF32 products": (lambda: _attribute(cuda.matmul, "allow_tf32", True), lambda: cuda.matmul.allow_tf32),
    "no TF32 convolutions": (lambda: _attribute(cudnn, "allow_tf32", False), lambda: cudnn.allow_tf32),
    "TF32 on CUDA alone": (
        lambda: _attribute(cuda.matmul, "fp32_precision", "tf32"),
        lambda: [owner.fp32_precision for _, owner in MATMULS],
    ),
    "float32 for one kind of layers": (
        lambda: _attribute(cudnn.rnn, "fp32_precision", "ieee"),
        lambda: (cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision),
    ),
    "oneDNN's bfloat16 convolutions": (
        lambda: _attribute(mkldnn.conv, "fp32_precision", "bf16"),
        lambda: mkldnn.conv.fp32_precision,
    ),
    "TF32 everywhere": (
        lambda: _attribute(torch.backends, "fp32_precision", "tf32"),
        lambda: [torch.backends.fp32_precision, *(owner.fp32_precision for _, owner in MATMULS)],
    ),
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), _kernels),
    "sdpa_kernel, in this order": (
        lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True),
        _kernels,
    ),
    "cuDNN": (
        lambda: cudnn.flags(enabled=False, benchmark=True, deterministic=True),
        lambda: (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
    ),
    "oneDNN": (
        lambda: mkldnn.flags(enabled=False, deterministic=True, allow_tf32=None),
        lambda: (mkldnn.enabled, mkldnn.deterministic),
    ),
    "sums in float16": (
        lambda: _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
@pytest.mark.parametrize("setting", CASES)
def test_a_setting_holds_in_the_recomputation(setting: str, elsewhere: bool) -> None:
    change, read = CASES[setting]
    seen: list[Any] = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        seen.append(read())
        return value.sin().exp()

    value = torch.randn(3, requires_grad=True)
    with change():
        loss = recomputed(forward, value).sum()
    outside, everything = read(), settings()
    with torch.autocast("cpu", enabled=True) if setting == "no autocast" else nullcontext():
        _run(loss.backward, elsewhere)
    assert seen[0] == seen[1]
    assert (read(), settings()) == (outside, everything)
    if change is not nullcontext:
        assert outside != seen[0], "the case shows nothing"


@pytest.mark.parametrize("setting", CASES)
def test_a_setting_of_the_backward_is_none_of_the_recomputation(setting: str) -> None:
    change, read = CASES[setting]
    seen: list[Any] = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        seen.append(read())
        return value.sin().exp()

    value = torch.randn(3, requires_grad=True)
    loss = recomputed(forward, value).sum()
    with change():
        inside = read(), settings()
        loss.backward()
        assert (read(), settings()) == inside
    assert seen[0] == seen[1]


def _run(function: Callable[[], Any], elsewhere: bool) -> None:
    """Call a function, in another thread if wanted: autograd's threads for CUDA know no settings of the forward's thread."""
    thread = threading.Thread(target=function)
    if elsewhere:
        thread.start()
        thread.join()
    else:
        function()


def test_what_a_forward_sets_itself_is_undone_after_the_recomputation() -> None:
    seen = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        seen.append(torch.ones(1).dtype)
        return value.sin().exp()

    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.float32)
        loss = recomputed(forward, torch.randn(3, requires_grad=True)).sum()
        torch.set_default_dtype(torch.float32)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
    assert seen == [torch.float64, torch.float64]


def test_weights_that_autocast_has_cast_for_a_recomputation_are_not_used_when_they_have_changed() -> None:
    weight, sample = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    for _ in range(2):
        with torch.autocast("cpu"):
            expected, received = forward(sample), recomputed(forward, sample)
        assert torch.equal(expected, received)
        received.sum().backward()
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            weight += 1
        torch.set_autocast_enabled("cpu", True)  # without a context, whose end would forget them
        try:
            assert torch.equal(forward(sample), torch.tanh(sample.bfloat16() @ weight.bfloat16()))
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()


class _Positions(nn.Module):
    """Adds numbers that it makes anew, of the default dtype and on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.linspace(0, 1, 8)
        assert made.dtype == x.dtype
        return torch.tanh(self.linear(x + made) * made)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another thread"])
def test_segments_in_segments_under_half_precision_as_lightning_sets_it(elsewhere: bool) -> None:
    with _dtype():
        first, second, third = (_Positions() for _ in range(3))
        sample = torch.randn(64, 8)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return second(first(x))

        def outer(x: torch.Tensor) -> torch.Tensor:
            return third(recomputed(inner, x))  # torch makes tensors of its own for it

        plain = third(inner(sample)).sum()
        planned = recomputed(outer, sample).sum()
    parameters = [*first.parameters(), *second.parameters(), *third.parameters()]
    expected = torch.autograd.grad(plain, parameters)
    _run(planned.backward, elsewhere)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_an_inverse_runs_under_the_settings_of_the_forward() -> None:
    noted: SimpleQueue[list[bool]] = SimpleQueue()  # a list would be put back after a recomputation

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noted.put(_kernels()[0])
            return super().forward(x)

    x = torch.randn(2, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        loss = invertible_checkpoint(AdditiveCoupling(Noting(4, 4), Noting(4, 4)), x).sum()
    loss.backward()
    seen = [noted.get() for _ in range(noted.qsize())]
    assert len(seen) > 2
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_generators_of_numpy_are_set_back_whatever_makes_their_bits(kind: Callable[[int], Any]) -> None:
    own, numbers = np.random.RandomState(kind(1)), np.random.get_bit_generator()
    np.random.set_bit_generator(kind(1))
    try:
        states, state, rewind = GeneratorStates(), generator_state(own), rewinding(own)
        assert states.equals(GeneratorStates())
        drawn = [*np.random.rand(2), *own.rand(2)]  # noqa: NPY002
        assert not states.equals(GeneratorStates())
        assert generator_state(own) != state
        states.restore()
        assert rewind is not None
        rewind()
        assert [*np.random.rand(2), *own.rand(2)] == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(numbers)
