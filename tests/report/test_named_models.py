"""Models and optimizers by the names that a command line gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ModelError
from lightning_rotor.report.named_models import assignment, model_maker, optimizers_for


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model, and names that are none; what is imported is forgotten again."""
    path = tmp_path / "one_model.py"
    path.write_text(
        "from torch import nn\nNUMBER = 3\ndef text():\n    return 'a'\n"
        "def net(width=2):\n    return nn.Linear(width, width)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_a_model_is_made_by_a_name_in_a_module_or_a_file(file: Path) -> None:
    assert isinstance(model_maker("torch.nn.Linear", {"in_features": 2, "out_features": 3})(), nn.Linear)
    made = model_maker(f"{file}:net", {"width": 5})()
    assert isinstance(made, nn.Linear)
    assert made.in_features == 5


def test_a_file_is_read_again_once_it_has_changed(file: Path) -> None:
    assert not isinstance(model_maker(f"{file}:net", {})(), nn.Identity)
    file.write_text("from torch import nn\n\n\ndef net():\n    return nn.Identity()\n")
    assert isinstance(model_maker(f"{file}:net", {})(), nn.Identity)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:net", "there is no file 'absent.py': expected file.py:name"),
        ("no_such_package.models.net", r"cannot be imported: .* Try pip install no_such_package"),
        ("torch.nn.NoLayer", r"torch.nn has no 'NoLayer': expected a class or function that makes a module"),
        ("torch.version.__version__", r"is \w+: expected a class or function"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_maker(name, {})


def test_what_a_maker_does_not_take_or_make_is_refused(file: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be called: .* Expected its arguments as --model-arg name=value"):
        model_maker(f"{file}:net", {"depth": 2})()
    with pytest.raises(ModelError, match=r"makes str: expected a torch.nn.Module"):
        model_maker(f"{file}:text", {})()


def test_optimizers_have_arguments_and_train_what_learns() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (optimizer,) = optimizers_for(model, "sgd:momentum=0.9,nesterov=True")
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, True, 1e-3)
    assert group["params"] == [model.weight]
    (other,) = optimizers_for(model, "AdamW:lr=0.5")
    assert other.param_groups[0]["lr"] == 0.5
    assert optimizers_for(model, "none") == []
    assert optimizers_for(model.requires_grad_(False), "adamw") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adamx", r"optimizer 'adamx' is unknown: expected one of .*adamw.*, or none"),
        ("sgd:momentum=-1", "optimizer 'sgd:momentum=-1' cannot be made: Invalid momentum"),
        ("sgd:=3", "'=3' is no assignment: expected name=value"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        optimizers_for(nn.Linear(2, 2), text)


@pytest.mark.parametrize(
    ("text", "value"), [("a=3", 3), ("a=(1, 2)", (1, 2)), ("a=None", None), ("a=max pool", "max pool"), ("a=", "")]
)
def test_values_are_literals_or_words(text: str, value: object) -> None:
    assert assignment(text) == ("a", value)
