"""What a training process holds: exact against the storages themselves and against the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.memory.held import (
    block_bytes,
    buffer_bytes,
    existing_gradient_bytes,
    gradient_bytes,
    is_on,
    optimizer_state_bytes,
    parameter_bytes,
    storage_bytes,
)
from lightning_rotor.profiling.meters import CpuMeter


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


PARAMETERS = 4 * (8 * 3 * 9 + 8 + 8 + 8 + 2880 + 10)


def test_parameters_and_buffers_count_by_their_types():
    model = convolutional()
    assert parameter_bytes(model) == PARAMETERS
    assert buffer_bytes(model) == 4 * 8 + 4 * 8 + 8
    assert parameter_bytes(model.bfloat16()) == PARAMETERS // 2
    assert parameter_bytes(nn.ReLU()) == buffer_bytes(nn.ReLU()) == gradient_bytes(nn.ReLU()) == 0


def test_a_non_persistent_buffer_counts_and_one_that_views_a_parameter_does_not():
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.ones(10), persistent=False)
    model.register_buffer("view", model.weight.detach()[:2])
    assert buffer_bytes(model) == 40


def test_tied_parameters_count_once():
    first, second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert parameter_bytes(model) == gradient_bytes(model) == 4 * 256


def test_parameters_in_one_storage_count_once_but_each_has_a_gradient():
    model = nn.Module()
    flat = torch.zeros(100)
    model.a, model.b = nn.Parameter(flat[:40]), nn.Parameter(flat[:60])
    assert parameter_bytes(model) == 400
    assert gradient_bytes(model) == 400
    (model.a.sum() + model.b.sum()).backward()
    assert existing_gradient_bytes(model) == gradient_bytes(model) == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_gradients_are_what_a_backward_leaves(dtype):
    model = convolutional().to(dtype)
    model[0].weight.requires_grad_(False)
    predicted = gradient_bytes(model)
    assert existing_gradient_bytes(model) == 0
    model(torch.ones(2, 3, 8, 8, dtype=dtype)).sum().backward()
    assert predicted == existing_gradient_bytes(model) == gradient_bytes(model)
    assert predicted == (PARAMETERS - 4 * 216) // (4 // dtype.itemsize)


def test_predicted_gradients_are_what_the_allocator_shows():
    model = nn.Linear(300, 200)
    x = torch.ones(4, 300)
    model(x).sum().backward()  # whatever a backward sets up once
    model.zero_grad()
    predicted = gradient_bytes(model)
    with CpuMeter().recording() as recording:
        recording.mark("backward")
        model(x).sum().backward()
        recording.mark("end")
    (phase,) = (phase for phase in recording.phases if phase.label == "backward")
    assert phase.end_bytes == predicted


def test_gradients_that_exist_count_as_they_are():
    model = nn.Embedding(1000, 8, sparse=True)
    assert gradient_bytes(model) == 4 * 8000
    model(torch.tensor([1, 5])).sum().backward()
    assert gradient_bytes(model) == 2 * 8 + 2 * 8 * 4  # two indices and two rows


def test_optimizer_state_is_what_lies_in_it_but_not_parameters():
    weight = nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.Adam([weight])
    assert optimizer_state_bytes(optimizer) == 0
    weight.grad = torch.ones(50)
    optimizer.step()
    optimizer.state[weight]["alias"] = weight.detach()
    optimizer.state[weight]["gradients"] = [weight.grad]
    assert optimizer_state_bytes(optimizer) == optimizer_state_bytes(optimizer, "cpu") == 2 * 200 + 4
    assert optimizer_state_bytes(optimizer, "cuda") == 0


def test_tensors_count_on_their_device():
    tensors = [torch.zeros(10), torch.zeros(20, device="meta")]
    assert storage_bytes(tensors) == 120
    assert storage_bytes(tensors, "cpu") == 40
    assert storage_bytes(tensors, torch.device("meta")) == 80
    assert storage_bytes([tensors[0], tensors[0][2:]]) == 40


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:Sparse invariant checks")
def test_sparse_tensors_count_their_parts():
    values, few, many = torch.ones(6), torch.tensor([0, 3, 6]), torch.tensor([0, 1, 2, 0, 1, 2])
    assert storage_bytes([torch.sparse_coo_tensor(torch.stack([many, many]), values, (9, 9))]) == 8 * 12 + 24
    assert storage_bytes([torch.sparse_csr_tensor(few, many, values, (2, 3))]) == 8 * 9 + 24
    assert storage_bytes([torch.sparse_csc_tensor(few, many, values, (3, 2))]) == 8 * 9 + 24


def test_gpu_blocks_are_rounded_as_the_allocator_does():
    assert [block_bytes(size, torch.device("cuda", 0)) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert block_bytes(513, torch.device("cpu")) == 513


def test_a_device_without_index_means_any_of_its_kind():
    assert is_on(torch.device("cuda", 1), "cuda")
    assert is_on(torch.device("cuda", 1), "cuda:1")
    assert not is_on(torch.device("cuda", 1), "cuda:0")
    assert is_on(torch.device("cpu"), "cpu:0")
    assert not is_on(torch.device("cpu"), "cuda")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_parameters_may_be_views_as_those_of_fsdp1() -> None:
    module = nn.Linear(2, 3, bias=False)
    module._parameters["weight"] = (torch.zeros(10, requires_grad=True) * 1)[:6].view(3, 2)  # type: ignore[assignment]
    assert gradient_bytes(module) == 24


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_says_to_run_a_batch_first():
    with pytest.raises(ModelError, match=r"'0.weight' belongs to a lazy module.*run one batch"):
        parameter_bytes(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.gpu
def test_sizes_on_a_gpu_are_what_the_allocator_counts():
    before = torch.cuda.memory_allocated()
    model = convolutional().cuda()
    assert parameter_bytes(model, "cuda") + buffer_bytes(model, "cuda") == torch.cuda.memory_allocated() - before
    before = torch.cuda.memory_allocated()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert gradient_bytes(model) == torch.cuda.memory_allocated() - before
