"""Gradients of shared parameters: every copy gets the sum, in pieces, and only the owner's is added to later."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from pipelines import Failure, Processes, good, processes
from torch import nn

from lightning_rotor.pipeline import shared_gradients
from lightning_rotor.pipeline.processes import PipelineProcesses
from lightning_rotor.pipeline.shared_gradients import SharedGradients, SharedParameter

# Of three processes: parameters that some of them hold, by name.
HOLDERS = {"all": (0, 1, 2), "ends": (0, 2), "frozen": (0, 1), "late": (1, 2)}
SHAPE = (3, 5)


@pytest.fixture(scope="module")
def group() -> Iterator[Processes]:
    with processes(3) as made:
        yield made


def part(rank: int, name: str, step: int) -> torch.Tensor:
    """The gradient that a process's backward gives, of the same numbers everywhere."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + list(HOLDERS).index(name))
    return torch.randn(SHAPE, generator=generator)


def expected(name: str, step: int) -> torch.Tensor:
    """The sum as autograd adds it: what later layers give comes first."""
    *earlier, total = [part(rank, name, step) for rank in HOLDERS[name]]
    for each in reversed(earlier):
        total = each + total
    return total


def train(rank: int, piece_bytes: int) -> list[dict[str, torch.Tensor | None]]:
    """The gradients that this process has behind each of two steps, the second of which adds to the first's."""
    parameters = {name: nn.Parameter(torch.zeros(SHAPE)) for name, ranks in HOLDERS.items() if rank in ranks}
    # As a placement does it, each process names all shared parameters.
    shared = [SharedParameter(name, parameters.get(name, nn.Parameter()), HOLDERS[name]) for name in HOLDERS]
    behind: list[dict[str, torch.Tensor | None]] = []
    with patch.object(shared_gradients, "PIECE_BYTES", piece_bytes):
        gradients = SharedGradients(shared, PipelineProcesses(torch.device("cpu")))
        for step in range(2):
            gradients.begin()
            for name, parameter in parameters.items():
                # Nobody has a gradient of a frozen parameter; one process alone of "late".
                if name == "frozen" or (name == "late" and rank != 2):
                    continue
                own = part(rank, name, step)
                # Not contiguous, as the gradient of a transposed weight.
                own = own.t().contiguous().t()
                parameter.grad = own if parameter.grad is None else parameter.grad + own
            gradients.add_up()
            behind.append({name: each.grad for name, each in parameters.items()})
            behind[-1] = {name: None if grad is None else grad.clone() for name, grad in behind[-1].items()}
    return behind


# A number, part of a row, and the whole in one piece.
@pytest.mark.parametrize("piece_bytes", [1, 16, 2**20])
def test_every_copy_has_the_sum(group: Processes, piece_bytes: int) -> None:
    answers = good(group.run(3, train, piece_bytes))
    for answer in answers:
        for step, gradients in enumerate(answer):
            for name, gradient in gradients.items():
                if name == "frozen":
                    assert gradient is None
                elif name == "late":
                    total = sum(part(2, name, each) for each in range(step + 1))
                    torch.testing.assert_close(gradient, total)
                else:
                    total = sum(expected(name, each) for each in range(step + 1))
                    torch.testing.assert_close(gradient, total)
                    assert step or torch.equal(gradient, total)
    for name, ranks in HOLDERS.items():
        if name != "frozen":
            owner, *others = [answers[rank][1][name] for rank in ranks]
            assert all(torch.equal(owner, other) for other in others)


def sparse(rank: int) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    shared = SharedParameter("words", embedding.weight, (0, 1))
    SharedGradients([shared], PipelineProcesses(torch.device("cpu"))).add_up()


def test_a_sparse_gradient_is_refused_by_name(group: Processes) -> None:
    for answer in group.run(2, sparse):
        assert isinstance(answer, Failure)
        assert answer.kind == "PipelineError"
        assert "the gradient of 'words' is torch.sparse_coo, and layers on 2 devices share it" in answer.message


def test_nothing_shared_needs_no_other_process() -> None:
    gradients = SharedGradients([], PipelineProcesses(torch.device("cpu")))
    gradients.begin()
    gradients.add_up()
