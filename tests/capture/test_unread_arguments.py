"""Plain arguments that differ from batch to batch: those that a forward does not read cost no further recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable
from lightning_rotor.capture.unread_arguments import Untouched, Use, UsedError, differing_leaves, without_leaves
from tests.grids import few

Batch = dict[str, Any]


def batch_of(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return {
        "image": torch.randn(8, 16, generator=generator),
        "name": [f"case{number}.png", f"other{number}.png"],
        "index": number,
        "weight": 0.5 + number,
        "raw": bytes([number]),
    }


class Net(nn.Module):
    """Layers, and ``read``, which makes a factor of a batch's plain values."""

    def __init__(self, read: Callable[[Any, Batch], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16)
        self.third = nn.Linear(16, 4)
        self.read = read

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.second(self.first(batch["image"]).tanh()).relu()
        if self.read is not None:
            x = x * self.read(self, batch)
        return self.third(x).tanh()


def train(net: nn.Module, run: nn.Module, numbers: tuple[int, ...] = (0, 3, 4)) -> list[torch.Tensor]:
    seen = []
    for number in numbers:
        loss = run(batch_of(number)).square().sum()
        loss.backward()
        seen += [loss.detach(), *[parameter.grad.clone() for parameter in net.parameters()]]
        net.zero_grad()
    return seen


def recorded(read: Callable[[Any, Batch], Any] | None) -> int:
    """Number of recordings of a training whose bits are those of plain training."""
    torch.manual_seed(0)
    plain = Net(read)
    torch.manual_seed(0)
    net = Net(read)
    planned = Checkpointable(net, mem_limit="1MiB", show_progress=False)
    expected = train(plain, plain)
    assert all(map(torch.equal, train(net, planned), expected))
    return planned._planned.plans.cuts_made


def test_what_is_not_read_needs_no_further_recording() -> None:
    assert recorded(None) == 1


def test_what_is_asked_for_its_type_alone_needs_none() -> None:
    assert recorded(lambda _, batch: 2.0 if isinstance(batch["index"], int) else 1.0) == 1


def _caught(_: Any, batch: Batch) -> float:
    try:
        return 1.0 + len(batch["name"][0])
    except Exception:
        return 1.0


READS: dict[str, Callable[[Any, Batch], Any]] = {
    "compared": lambda _, batch: 2.0 if batch["name"][0] == "case3.png" else 1.0,
    "method": lambda _, batch: 2.0 if batch["name"][1].startswith("other3") else 1.0,
    "length": lambda _, batch: 1.0 + len(batch["name"][0]),
    "searched": lambda _, batch: 1.0 + ("3" in batch["name"][0]),
    "looked up": lambda _, batch: {"case3.png": 2.0}.get(batch["name"][0], 1.0),
    "in a set": lambda _, batch: 1.0 + (batch["name"][0] in {"case4.png"}),
    "as text": lambda _, batch: 1.0 + float(f"{batch['index']}"),
    "as a string": lambda _, batch: 1.0 + str(batch["name"][0]).count("3"),
    "joined": lambda _, batch: 1.0 + "".join(batch["name"]).count("3"),
    "as a path": lambda _, batch: 1.0 + len(Path(batch["name"][0]).stem),
    "as a number": lambda _, batch: 1.0 + batch["index"],
    "from the right": lambda _, batch: 2 ** batch["index"],
    "times a tensor": lambda _, batch: batch["weight"] * torch.ones(()),
    "rounded": lambda _, batch: 1.0 + round(batch["weight"]),
    "as truth": lambda _, batch: 2.0 if batch["index"] else 1.0,
    "as a place": lambda _, batch: (1.0, 2.0, 3.0, 4.0, 5.0)[batch["index"]],
    "sorted": lambda _, batch: 1.0 + len(sorted(batch["name"])[0]),
    "bytes": lambda _, batch: 1.0 + batch["raw"][0],
    "error caught": _caught,
}


@pytest.mark.parametrize("name", few(READS, *(set(READS) - {"as a path", "joined", "method", "searched"})))
def test_what_is_read_is_never_taken_for_granted(name: str) -> None:
    assert recorded(READS[name]) > 1


def test_what_is_handed_on_is_that_of_the_call() -> None:
    class Handing(Net):
        def forward(self, batch: Batch) -> Any:
            return {"out": super().forward(batch), "name": batch["name"]}

    planned = Checkpointable(Handing(), mem_limit="1MiB", show_progress=False)
    for number in range(4):
        assert planned(batch_of(number))["name"] == batch_of(number)["name"]


def test_what_is_kept_is_that_of_the_call() -> None:
    class Keeping(Net):
        last = ""

        def forward(self, batch: Batch) -> torch.Tensor:
            self.last = batch["name"][0]
            return super().forward(batch)

    net = Keeping()
    planned = Checkpointable(nn.Sequential(net, nn.Linear(4, 4)), mem_limit="1MiB", show_progress=False)
    for number in range(4):
        planned(batch_of(number))
        assert net.last == f"case{number}.png"


def test_whether_is_never_free() -> None:
    def flags(is_on: bool | None) -> Batch:
        return {**batch_of(0), "on": is_on}

    net = Net(lambda _, batch: 2.0 if batch["on"] is True else 1.0)
    planned = Checkpointable(net, mem_limit="1MiB", show_progress=False)
    for is_on in (True, False, None, True):
        assert torch.equal(planned(flags(is_on)), net(flags(is_on)))


def test_an_untouched_object_has_the_type_and_notes_all_else() -> None:
    use = Use()
    stands = Untouched(str, use)
    assert isinstance(stands, str)
    assert not use.seen
    with pytest.raises(UsedError, match="was read"):
        stands.upper()  # type: ignore[attr-defined]
    assert use.seen


def test_keys_that_differ_in_plain_values() -> None:
    def key(*kinds: Any, structure: str = "s") -> Any:
        return (1,), structure, kinds

    recorded_key = key((str, "a"), torch.Tensor, (int, 1), (bool, True))
    assert differing_leaves(recorded_key, recorded_key) == frozenset()
    assert differing_leaves(recorded_key, key((str, "b"), torch.Tensor, (int, 2), (bool, True))) == {0, 2}
    assert differing_leaves(recorded_key, key((str, "a"), torch.Tensor, (int, 1), (bool, False))) is None
    assert differing_leaves(recorded_key, key((str, "a"), (str, "b"), (int, 1), (bool, True))) is None
    assert differing_leaves(recorded_key, key((int, 1), torch.Tensor, (int, 1), (bool, True))) is None
    assert differing_leaves(recorded_key, key((str, "b"), structure="t")) is None
    free = without_leaves(recorded_key, frozenset({0}))
    assert free == without_leaves(key((str, "b"), torch.Tensor, (int, 1), (bool, True)), frozenset({0}))
    assert free != without_leaves(key((bytes, b"b"), torch.Tensor, (int, 1), (bool, True)), frozenset({0}))
    assert free != without_leaves(key(torch.Tensor, torch.Tensor, (int, 1), (bool, True)), frozenset({0}))
