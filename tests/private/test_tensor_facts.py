"""Versions, storages and parts of tensors, as one function a fact tells them."""

import torch

from lightning_rotor.private.tensor_facts import identity_of, sparse_parts, stamps, version_of


def test_stamps_change_with_values_and_with_storages() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    before = stamps([x, y])
    assert before == [version_of(x), version_of(y), identity_of(x.untyped_storage()), identity_of(y.untyped_storage())]
    y.add_(1)
    assert stamps([x, y]) == [before[0], before[1] + 1, *before[2:]]


def test_a_tensor_without_a_version_has_the_stamp_0() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
    assert stamps([x])[0] == 0


def test_a_sparse_tensor_is_taken_apart_as_it_is() -> None:
    indices, values = sparse_parts(torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True))
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])
