"""Arguments that an operator writes to, as its schema tells them."""

import torch

from lightning_rotor.private.operators import packet_of, schema_of, written_arguments


def test_what_an_operator_writes_to_is_told_by_its_schema() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    add = torch.ops.aten.add
    assert packet_of(add.Tensor) is add
    assert [argument.name for argument in schema_of(add.Tensor).arguments] == ["self", "other", "alpha"]
    assert list(written_arguments(add.Tensor, (x, y), {})) == []
    (written,) = written_arguments(torch.ops.aten.add_.Tensor, (x, y), {})
    assert written is x
    (written,) = written_arguments(add.out, (x, y), {"out": y})
    assert written is y
