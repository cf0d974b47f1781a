"""The FLOPs of a step by submodule, and that counting them leaves no trace."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import re
import warnings

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_rotor import ProfilingError, is_recomputing
from lightning_rotor.profiling import step_compute
from lightning_rotor.profiling.step_compute import measure_compute
from lightning_rotor.stages.generators import GeneratorStates
from tests.grids import few


def test_small_numbers_by_hand():
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    found = measure_compute(net, torch.ones(3, 8), lambda copy, batch: copy(batch).sum())
    first, relu, second = 2 * 3 * 8 * 4, 3 * 4, 2 * 3 * 4 * 2
    assert found.plannable == {"0": first, "1": relu, "2": second, "": first + relu + second}
    assert found.total == first + relu + second + 1
    assert found.share("2") == second / found.total
    assert found.share("no such module") == 0


def test_torchs_log_of_a_dry_run_is_not_shown(caplog):
    def step(copy, batch):
        logging.getLogger("torch._subclasses.fake_tensor").error("fake tensor raised TypeError")
        return copy(batch)

    measure_compute(nn.Linear(2, 2), torch.ones(1, 2), step)
    assert not caplog.records


@pytest.mark.parametrize("arch", few(["resnet18", "vit_b_16", "swin_t"], "resnet18"))
def test_it_agrees_with_torchs_counter(arch):
    torch.manual_seed(0)
    net, images = torchvision.models.get_model(arch), torch.randn(1, 3, 224, 224)
    found = measure_compute(net, images, lambda copy, batch: copy(batch))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        net(images)
    # What else a layer does, one FLOP for each element, is not in torch's number.
    assert counter.get_total_flops() <= found.plannable[""] <= 1.05 * counter.get_total_flops()


def test_recurrent_layers_count():
    for layer in (nn.LSTM(64, 64, 2), nn.GRU(64, 64, 2)):
        found = measure_compute(layer, torch.randn(5, 3, 64), lambda copy, batch: copy(batch))
        weights = sum(parameter.numel() for parameter in layer.parameters())
        assert 2 * 15 * 0.9 * weights < found.total < 2 * 15 * 1.2 * weights


class Restless(nn.Module):
    """Changes everything that a forward can reach."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.LazyLinear(2))
        self.layers(torch.ones(1, 3, 6, 6))
        self.history = []
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        self.history.append(images)
        random.random(), np.random.rand(), torch.rand(3)  # noqa: NPY002
        return self.layers(images)


def test_it_leaves_no_trace(capsys):
    net, images = Restless(), torch.randn(2, 3, 6, 6)
    seen = []
    net.layers.register_forward_hook(lambda *_: seen.append(1))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    names, generators, history = dict(net.__dict__), GeneratorStates(), list(net.history)
    flags = []

    def step(copy, images):
        flags.append(is_recomputing())
        warnings.warn("of the step", UserWarning, stacklevel=1)  # would be an error in this suite
        print("of the step", copy(images).sum())  # noqa: T201
        copy(images).sum().backward()
        with torch.no_grad():
            images.zero_()
            for parameter in copy.parameters():
                parameter.zero_()

    found = measure_compute(net, images, step)
    assert found.plannable["layers.0"] == 2 * 2 * (2 * 4 * 16 * 27)  # two calls, no backward
    assert set(flags) == {True}  # once more where other threads may draw
    assert not is_recomputing()
    assert images.count_nonzero() == images.numel()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert net.__dict__.keys() == names.keys()
    assert all(net.__dict__[name] is value for name, value in names.items())
    assert net.history == history == []
    assert (net.calls, seen, capsys.readouterr().out) == (0, [], "")
    assert generators.equals(GeneratorStates())


def test_no_copy_stays_alive():
    # What looks for all tensors, as a recording does, must not find those without storage.
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    others = (
        fake_tensors()
    )  # other tests' fixtures may hold some; held here, so that no new one takes an address of theirs
    for step in (lambda copy, batch: copy(batch).sum().backward(), lambda copy, batch: copy(batch).unique()):
        with contextlib.suppress(ProfilingError):
            measure_compute(layer, torch.ones(2, 4, 16), step)
        assert fake_tensors().keys() <= others.keys()


def fake_tensors():
    return {id(thing): thing for thing in gc.get_objects() if FakeTensor in type(thing).__mro__}


def test_only_forwards_that_a_plan_could_run_are_plannable():
    net = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for name in ("a", "b", "c", "d")})
    net["b"].eval()
    net["c"].requires_grad_(False)

    def step(copy, batch):
        with torch.no_grad():
            target = copy["d"](batch)
        return (copy["a"](batch) + copy["b"](batch) + copy["c"](batch) - target).sum()

    found = measure_compute(net, torch.ones(2, 4), step)
    assert found.share("a") > 0.2
    assert not {"b", "c", "d"} & found.plannable.keys()
    with_gradients = measure_compute(net, torch.ones(2, 4, requires_grad=True), step)
    assert with_gradients.share("c") > 0.2  # it has no parameters that learn, but activations that are kept


def test_a_forward_called_by_its_name_counts_and_a_recursive_one_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x, depth=2):
            return self.layer.forward(x if depth == 0 else self(x, depth - 1))

    net = Twice()
    found = measure_compute(net, torch.ones(1, 4), lambda copy, batch: copy(batch))
    assert found.plannable == {"layer": 3 * 32, "": 3 * 32}


def test_values_are_taken_as_one_and_masks_as_true():
    def step(copy, batch):
        loss = copy(batch)
        if loss.sum() > 0 and loss.mean().item() == 1:
            loss = loss[loss > 0].reshape(3, 4) + torch.masked_select(loss, loss > 0).reshape(3, 4)
        loss[batch[:, 0] > 0] = 0
        assert (batch > 0).nonzero().shape == (24, 2)
        return copy(loss @ torch.ones(4, 8)).sum()

    found = measure_compute(nn.Linear(8, 4), torch.ones(3, 8), step)
    assert found.assumed_values == 4  # masks of the batch are known
    assert found.plannable == {"": 2 * 192}


def test_what_a_step_asks_of_its_batch_is_known_and_of_activations_assumed():
    """Lines of ordinary steps: none of them ends a dry run."""
    layer, recurrent = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True)
    net = nn.ModuleDict({"layer": layer, "recurrent": recurrent})
    lengths, labels = torch.tensor([2, 5, 3]), torch.tensor([4, 0, 4])

    def pack(copy, hidden, lengths, labels):
        packed = nn.utils.rnn.pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        output, state = copy["recurrent"](packed)
        assert state.shape == (1, 3, 8)
        padded, found = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        assert padded.shape == (3, 5, 8)
        assert found.shape == (3,)
        return padded

    def of_the_batch(copy, hidden, lengths, labels):
        assert torch.unique(labels).tolist() == [0, 4]
        assert lengths.tolist() == [2, 5, 3]
        assert hidden[labels > 2].shape == (2, 5, 8)
        assert torch.repeat_interleave(hidden.mean(1), lengths, dim=0).shape == (10, 8)
        assert int(labels.max()) == 4
        assert (labels.numpy() == [4, 0, 4]).all()
        return hidden

    def of_activations(copy, hidden, lengths, labels):
        assert torch.unique(hidden.argmax(-1)).numel() == 15
        assert hidden.detach().numpy().sum() == 120
        assert torch.bincount(hidden.argmax(-1).flatten(), minlength=8).shape == (8,)
        spectrum = torch.stft(hidden[:, :, 0].repeat(1, 20), 16, window=torch.ones(16), return_complex=True)
        return torch.istft(spectrum, 16, window=torch.ones(16))

    def ctc(copy, hidden, lengths, labels):
        scores = hidden.transpose(0, 1).log_softmax(-1)
        return nn.functional.ctc_loss(scores, torch.ones(3, 2, dtype=torch.long), lengths, torch.full((3,), 2))

    for line in (pack, of_the_batch, of_activations, ctc):
        found = measure_compute(
            net,
            (torch.ones(3, 5, 8), lengths, labels),
            lambda copy, batch, line=line: line(copy, copy["layer"](batch[0]), *batch[1:]).sum(),
        )
        assert not found.stopped_at, line
        assert found.plannable["layer"] == 2 * 15 * 64
        assert (found.plannable["recurrent"] > 2 * 10 * 2 * 3 * 64) == (line is pack)


def test_what_ran_before_a_line_that_needs_values_counts(monkeypatch):
    monkeypatch.setattr(step_compute, "_MOST_READS", 20)  # a thousand take long

    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, batch):
            hidden = self.first(batch)
            torch.nested.nested_tensor([hidden])
            return self.second(hidden)

    found = measure_compute(Stops(), torch.ones(3, 8), lambda copy, batch: copy(batch).sum())
    assert found.plannable == {"first": 192, "": 192}
    assert found.unfinished == {""}
    assert re.fullmatch(r"test_step_compute.py, line \d+: torch.nested.nested_tensor\(\[hidden\]\)", found.stopped_at)

    def waits(copy, batch):
        while copy(batch).sum().item() > 0.5:
            pass

    assert "while copy(batch)" in measure_compute(nn.Linear(8, 4), torch.ones(3, 8), waits).stopped_at
    with pytest.raises(ProfilingError, match="its dry run computes nothing"):
        measure_compute(nn.Linear(8, 4), torch.ones(3, 8), lambda copy, batch: None)


class NoCopy:
    def __deepcopy__(self, memo):
        raise RuntimeError("only one of me")


def test_a_model_that_cannot_be_copied_says_so():
    net = nn.Linear(2, 2)
    net.resource = NoCopy()
    with pytest.raises(ProfilingError, match="cannot be copied: RuntimeError: only one of me"):
        measure_compute(net, torch.ones(1, 2), lambda copy, batch: copy(batch))
