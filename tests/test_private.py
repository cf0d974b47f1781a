"""Each private name does what is taken for granted. Where one fails with a new release, ``lightning_rotor/private`` is the place to mend it."""

from __future__ import annotations

import copy
import ctypes
import math
import multiprocessing
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch import distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_rotor.private import autocast, lightning_names, messages, partitioning, process_groups, python_names
from lightning_rotor.private import functional_collectives as collectives
from lightning_rotor.private import torch_names as private
from lightning_rotor.private import values as pytree
from lightning_rotor.private.sharding import Unit, UnitSizes, is_dtensor, units_in
from tests.private_names import private_names, private_names_below
from tests.processes import ROOT

PACKAGE = ROOT / "lightning_rotor"


def test_private_names_stand_in_one_room() -> None:
    outside = {file: names for file, names in private_names_below(PACKAGE).items() if not file.startswith("private/")}
    assert not outside, (
        "say it in lightning_rotor/private, as a function with a plain name that tests/test_private.py asks"
    )


def test_private_names_are_found(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "from torch._compile import _disable_dynamo\nimport torch\n"
        "class Own:\n    def __init__(self): self._mine = torch._C._some(1)\n"
        "def use(other, module):\n"
        "    other._mine, module._buffers, module._theirs, torch.ops.aten._unsafe_view, module._modules['_orig_mod']\n"
        "    return getattr(module, '_hidden', None)\n"
    )
    assert private_names(file) == [
        "getattr(module, '_hidden', None)",
        "module._modules['_orig_mod']",
        "module._theirs",
        "torch._C._some",
        "torch._compile._disable_dynamo",
    ]


# -------------------------------------------------------------------- a running backward


def test_a_running_backward() -> None:
    seen: list[tuple[Any, ...]] = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    left, right = x * 2, y * 2
    loss = left * right

    def note(_: Any) -> None:
        reached = [private.backward_reaches(node.grad_fn) for node in (left, right)]
        seen.append((private.backward_number(), private.backward_keeps_graph(), *reached))

    loss.grad_fn.register_prehook(note)
    loss.backward(retain_graph=True)
    loss.backward(inputs=[x])
    (first, *of_first), (second, *of_second) = seen
    assert first is not None
    assert second not in (None, first)
    assert (of_first, of_second) == ([True, True, True], [False, True, False])
    assert private.backward_number() is None


def test_hooks_for_several_tensors_can_be_left_out() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    calls: list[str] = []
    first.register_hook(lambda _: calls.append("before"))
    torch.autograd.graph.register_multi_grad_hook((first, second), lambda _: calls.append("several"))
    first.register_hook(lambda _: calls.append("behind"))
    with private.without_hooks_of_several((first, second)):
        torch.autograd.grad((first * second).sum(), (first, second))
    assert calls == ["before", "behind"]
    (first * second).sum().backward()
    assert sorted(calls[2:]) == ["before", "behind", "several"]


def test_what_is_called_at_the_end_of_a_backward_comes_behind_its_last_node() -> None:
    leaf, order = torch.ones(2, requires_grad=True), list[str]()
    first = leaf * 2
    last = first.sin()
    for node, name in ((first.grad_fn, "first"), (last.grad_fn, "last")):
        assert node is not None
        node.register_hook(lambda *_, name=name: order.append(name))
    last.register_hook(lambda _: private.at_end_of_backward(lambda: order.append("end")))
    last.sum().backward()
    assert order == ["last", "first", "end"]


def test_hooks_for_saved_tensors() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert private.hooks_for_saved_tensors() is None
    with saved_tensors_hooks(pack, pack):
        assert private.hooks_for_saved_tensors() == (pack, pack)


# -------------------------------------------------------------------- settings


def test_the_default_device_of_this_thread() -> None:
    seen: list[torch.device | None] = []
    assert private.default_device() is None
    with torch.device("meta"):
        assert private.default_device() == torch.device("meta")
        thread = threading.Thread(target=lambda: seen.append(private.default_device()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_float32_precision_is_that_of_the_backend_or_of_torch() -> None:
    before = private.float32_precision("mkldnn", "conv")
    private.set_float32_precision("generic", "all", "tf32")
    try:
        assert private.float32_precision("mkldnn", "conv") == "tf32"
    finally:
        private.set_float32_precision("generic", "all", "none")
    assert private.float32_precision("mkldnn", "conv") == before
    private.set_float32_precision("mkldnn", "conv", "bf16")
    assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
    private.set_float32_precision("mkldnn", "conv", "none")


def test_the_order_of_kernels_for_attention() -> None:
    before = private.attention_order()
    private.set_attention_order(before[::-1])
    assert private.attention_order() == before[::-1]
    private.set_attention_order(before)
    assert private.attention_order() == before


# -------------------------------------------------------------------- capture, modes, transforms


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_capture_for_another_runtime() -> None:
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(private.is_captured())
            return x + 1

    x = torch.ones(2)
    Asks()(x)
    torch.jit.trace(Asks(), x, check_trace=False)
    torch.export.export(Asks(), (x,), strict=False)
    assert seen[0] is False
    assert seen[1:] == [True] * (len(seen) - 1)
    assert len(seen) >= 3


def test_the_compiler_takes_nothing_for_captured() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if private.is_captured() else x - 1

    assert torch.compile(answer, backend="eager")(torch.zeros(1)).item() == -1


def test_what_an_operator_writes_to() -> None:
    add, x, y = torch.ops.aten.add, torch.ones(1), torch.ones(1)
    assert [each is x for each in private.written_arguments(add.out, (x, y), {"out": x})] == [True]
    assert [each is x for each in private.written_arguments(torch.ops.aten.add_.Tensor, (x, y), {})] == [True]
    assert not [*private.written_arguments(add.Tensor, (x, y), {})]


def test_modes() -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class Dispatch(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append("dispatch")
            return func(*args, **(kwargs or {}))

    x = torch.ones(1)
    assert private.function_modes() == []
    with Dispatch(), Mode() as mode:
        assert private.function_modes() == [mode]
        x.add(1)
        with private.without_function_mode():
            assert private.function_modes() == []
            x.add(1)
        with private.without_modes():
            x.add(1)
        with private.no_dispatch():
            torch.add(x, 1)
    assert seen == ["function", "dispatch", "dispatch", "function"]


def test_transforms() -> None:
    seen = []
    assert not private.is_transformed()
    torch.func.vmap(lambda x: (seen.append(private.is_transformed()), x)[1])(torch.ones(2))
    assert seen == [True]


# -------------------------------------------------------------------- tensors and operators


def test_versions_and_storages() -> None:
    x = torch.zeros(4)
    version = private.version_of(x)
    x.view(2, 2).add_(1)
    assert private.version_of(x) > version
    for device in ("cpu", "meta"):
        x, y = torch.empty(4, device=device), torch.empty(4, device=device)
        same = private.identity_of(x[1:].untyped_storage()) == private.identity_of(x.untyped_storage())
        assert same
        assert private.identity_of(x.untyped_storage()) != private.identity_of(y.untyped_storage())


def test_sparse_tensors_that_are_not_coalesced() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,))
    indices, values = private.sparse_parts(tensor)
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])


def test_copying_many() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    private.copy_each(targets, sources)
    assert all(map(torch.equal, targets, sources))
    sources.append(torch.tensor(2.0))
    row = private.flattened(sources)
    assert row.tolist() == [1, 1, 1, 1, 1, 2]
    parts = private.unflattened(row, sources)
    assert all(map(torch.equal, parts, sources))
    assert all(part.shape == source.shape for part, source in zip(parts, sources, strict=True))


def test_operators() -> None:
    add = torch.ops.aten.add_.Tensor
    assert isinstance(add, private.OpOverload)
    assert isinstance(torch.ops.aten.add_, private.OpOverloadPacket)
    assert private.packet_of(add) is torch.ops.aten.add_
    schema = private.schema_of(add)
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert str(schema.returns[0].type) == "Tensor"


def test_a_library_is_taken_back() -> None:
    x = torch.ones(1, requires_grad=True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("sin", lambda x: x + 41, "AutogradCPU")
    assert x.sin().item() == 42
    private.take_back(library)
    assert x.sin().item() < 1


def test_tensors_without_values() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.ones(2)
        assert isinstance(x, private.FakeTensor)
        with pytest.raises(private.DataDependentOutputException):
            x[0].item()
        with pytest.raises(private.DynamicOutputShapeException):
            x.nonzero()
    with private.FakeCopyMode(mode):
        from copy import deepcopy

        assert isinstance(deepcopy(torch.ones(2)), private.FakeTensor)
    assert issubclass(private.UnsupportedOperatorException, Exception)
    assert not private.is_traceable_wrapper_subclass(torch.ones(1))


def test_nestings() -> None:
    value = {"b": (1, [2]), "a": 3}
    flat, spec = pytree.tree_flatten(value)
    assert flat == pytree.tree_leaves(value) == [1, 2, 3]
    assert pytree.tree_unflatten(flat, spec) == value
    assert spec == pytree.tree_structure(value)
    assert isinstance(spec, pytree.TreeSpec)
    assert hash(spec) == hash(pytree.tree_structure(value))
    assert pytree.tree_map_only(int, lambda x: x + 1, value) == pytree.tree_map(lambda x: x + 1, value)


def test_dataclasses_are_nestings_once_they_are_known() -> None:
    @dataclass
    class Record:
        tensor: torch.Tensor
        more: Any = None

    record = Record(torch.ones(1), [2])
    assert pytree.tree_leaves([record]) == [record]
    assert pytree.flatten([record])[0] == [record.tensor, 2]
    leaves, spec = pytree.tree_flatten([record])
    assert leaves == [record.tensor, 2]
    assert pytree.tree_unflatten(leaves, spec) == [record]
    paths = [path for path, _ in pytree.leaves_by_path(record)]
    assert list(map(pytree.keystr, paths)) == [".tensor", ".more[0]"]
    assert pytree.flatten(leaves)[0] == leaves
    changed = pytree.watch_containers((record,))
    assert not changed()
    record.more[0] = 3
    assert changed()


# -------------------------------------------------------------------- modules and optimizers


def test_hooks_of_modules() -> None:
    assert all(isinstance(getattr(nn.Linear(1, 1), name), dict) for name in private.HOOKS)
    assert set(vars(nn.Module())) - private.STRUCTURE == {"training", "_is_full_backward_hook"}
    forward, backward = nn.Linear(1, 1), nn.Linear(1, 1)
    forward.register_forward_pre_hook(lambda *_: None)
    backward.register_full_backward_hook(lambda *_: None)
    assert [private.has_forward_hooks(module) for module in (forward, backward)] == [True, False]
    assert [private.has_backward_hooks(module) for module in (forward, backward)] == [False, True]
    assert not private.any_hooks_of_all()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert private.any_hooks_of_all()
        assert private.has_backward_hooks(forward)
    finally:
        handle.remove()


def test_hooks_of_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert all(name in vars(optimizer) for name in private.OPTIMIZER_HOOKS)
    assert {name for name in vars(optimizer) if name.endswith("_hooks")} == set(private.OPTIMIZER_HOOKS)


def test_weights_that_calls_share() -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert not private.shares_weights(net)
    with nn.utils.parametrize.cached():
        assert private.shares_weights(nn.Sequential(net))
        assert not private.shares_weights(nn.Linear(2, 2))


# -------------------------------------------------------------------- torch.compile


def test_compiled_modules() -> None:
    module, wrapped = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager", dynamic=False)
    wrapper: Any = torch.compile(wrapped, backend="eager", fullgraph=True)
    assert private.is_compiled_in_place(module)
    assert not private.is_compiler_wrapper(module)
    assert private.is_compiler_wrapper(wrapper)
    assert private.module_inside(wrapper) is wrapped
    assert set(vars(wrapper)) - set(vars(nn.Module())) - {"_super_module_initialized"} <= private.COMPILER_ATTRIBUTES
    for compiled, fullgraph, dynamic in ((module, False, False), (wrapper, True, None)):
        settings = private.compiler_settings(compiled)
        assert settings is not None
        assert (settings.fullgraph, settings.dynamic, settings.has_more) == (fullgraph, dynamic, False)
        assert callable(settings.backend)
    x = torch.ones(1, 2)
    assert torch.equal(private.call_uncompiled(module, x), F.linear(x, module.weight, module.bias))


def test_compiled_methods() -> None:
    class Decorated(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    plain, own, stock, other = nn.Linear(2, 2), Doubling(), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    kept_out: Any = torch.compiler.disable(own.forward)
    assert not private.has_compiled_method(plain, "forward")
    assert not private.is_compiled_function(kept_out)
    assert private.has_compiled_method(Decorated(2, 2), "forward")
    assert private.compiled_method_of(Decorated(2, 2), "forward") is None
    assert not private.has_compiled_method(torch.compile(plain, backend="eager"), "forward")  # type: ignore[arg-type]
    for module in (own, stock):
        module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
        assert private.has_compiled_method(module, "forward")
        assert private.compiled_method_of(module, "forward") is module.__dict__["forward"]
    other.forward = torch.compile(plain.forward, backend="eager")  # type: ignore[method-assign]
    assert private.compiled_method_of(other, "forward") is None


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_compilation_is_heard() -> None:
    heard: list[str] = []
    compiled = torch.compile(Doubling(), backend="eager")
    with private.compilation_heard(lambda: heard.append("begins"), lambda: heard.append("ends")):
        compiled(torch.ones(3))
        assert heard == ["begins", "ends"]
        compiled(torch.ones(3))
    compiled(torch.ones(3, 3))
    assert heard == ["begins", "ends"]


def test_what_the_compiler_leaves_alone() -> None:
    seen = []

    def aside(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    kept_out = private.outside_of_graphs(aside, "the reason")
    assert torch.compile(lambda x: kept_out(x) * 2, backend="eager")(torch.ones(1)).item() == 4
    assert seen == [False]
    with pytest.raises(Exception, match="the reason"):
        torch.compile(lambda x: kept_out(x) * 2, backend="eager", fullgraph=True)(torch.ones(1))


def test_code_that_was_met_under_a_mode_is_compiled_later() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    module = Block()
    module.compile(backend=backend)
    with private.uncompiled(), Mode():
        module(torch.ones(1))
    assert not compiled
    module(torch.ones(1))
    assert len(compiled) == 1


def test_the_activation_budget_holds_for_a_while() -> None:
    from torch._functorch import config

    before = config.activation_memory_budget
    with private.activation_budget(0.25):
        assert config.activation_memory_budget == 0.25
    assert config.activation_memory_budget == before


# -------------------------------------------------------------------- profiler


def test_the_profiler_tells_of_blocks() -> None:
    assert not private.is_profiling()
    with profile(use_cpu=True, use_kineto=False, profile_memory=True) as profiler:
        assert private.is_profiling()
        x = torch.empty(1000)
        address = x.data_ptr()
        del x
    pending, sizes = list(profiler.kineto_results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        block = private.allocation_of(event)
        if block is not None and block.ptr == address:
            sizes.append((block.alloc_size, block.device.type))
    assert sorted(sizes) == [(-4000, "cpu"), (4000, "cpu")]


def test_the_log_of_allocations_sees_no_ranges_of_the_users() -> None:
    with private.AllocationLog() as log, torch.autograd.profiler.record_function("of the user's"):
        torch.ones(1000).sum()
    assert all(private.allocation_of(event) is not None for event in log.kineto_results.experimental_event_tree())
    # Else one that begins in a log and ends in another one would end the process.
    first, second = private.AllocationLog(), private.AllocationLog()
    first.__enter__()
    with torch.autograd.profiler.record_function("of the user's"):
        first.__exit__(None, None, None)
        second.__enter__()
    second.__exit__(None, None, None)


# -------------------------------------------------------------------- processes


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    yield
    distributed.destroy_process_group()


def test_masks_of_spread_tables_can_be_forgotten() -> None:
    from torch.distributed.tensor import debug

    from lightning_rotor.private.sharding import forget_masks

    assert callable(debug._clear_sharding_prop_cache)
    forget_masks()
    assert debug._get_python_sharding_prop_cache_info().currsize == 0


def test_fsdp_units(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    outer, inner = units_in((model,))
    assert inner == Unit(model[0])
    assert not inner.shares_hooks
    assert inner.sizes == UnitSizes(80, 80, 80, 80)
    assert not inner.stays_whole
    loss = model(torch.ones(1, 4)).sum()
    assert [len(order) for order in inner._orders] == [1, 2]
    loss.backward()
    assert inner._orders[1] is outer._orders[1]
    before = len(inner._orders[0])
    with inner.gathered():
        assert inner.is_whole
        model[0](torch.ones(1, 4))
    assert len(inner._orders[0]) == before
    assert not inner.is_whole


# -------------------------------------------------------------------- Lightning


class _Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 2}, logger=False)
        self.layer = nn.Linear(2, 2)
        self.seen: list[tuple[Any, ...]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append((lightning_names.logs_this_step(self.trainer), lightning_names.logging_step(self.trainer)))

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)}


@pytest.fixture
def trainer(tmp_path: Path) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        log_every_n_steps=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("kind", ["tensor", "handle", "list", "functional", "object", "method", "barrier"])
def test_messages_pass_the_dispatcher(alone: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda group: [0, 1])  # as if there were two
    x, group = torch.ones(2), distributed.group.WORLD
    sends: dict[str, Any] = {
        "tensor": lambda: distributed.all_reduce(x),
        "handle": lambda: distributed.all_reduce(x, async_op=True).wait(),
        "list": lambda: distributed.all_gather([torch.zeros(2)], x),
        "functional": lambda: functional_collectives.all_reduce(x, "sum", group).sum(),
        "object": lambda: distributed.all_gather_object([None], {"a": 1}),
        "method": lambda: group.allreduce([x]).wait(),
        "barrier": distributed.barrier,
    }
    before = x._version
    with messages.MessageWatch(marks=True) as seen:
        sends[kind]()
        x + x  # no message
    assert seen.members == {frozenset((0, 1))}
    assert (x._version > before) is (kind in ("tensor", "handle", "method"))  # what c10d receives in place


def test_messages_of_dtensors_are_seen() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # as if there were another
    try:
        spread = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
        with messages.MessageWatch(marks=False) as seen:
            doubled = spread + spread
            assert not seen.members
            doubled.redistribute(placements=[Replicate()])
        assert seen.members == {frozenset((0, 1))}
    finally:
        distributed.destroy_process_group()


def test_messages_in_a_backward_are_seen(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda group: [0, 1])
    x = torch.ones(2, requires_grad=True)
    x_hooked = x * 2
    x_hooked.register_hook(lambda gradient: distributed.all_reduce(gradient.clone()))
    with messages.MessageWatch(marks=False) as seen:
        total = x_hooked.sum()
        assert not seen.members
        total.backward()
    assert seen.members


def test_nothing_is_sent_without_values(alone: None) -> None:
    sent = distributed.group.WORLD._get_sequence_number_for_group()
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(2)
        distributed.all_reduce(x, async_op=True).wait()
        distributed.all_to_all_single(torch.empty(2), x)
        for work in distributed.batch_isend_irecv([distributed.P2POp(distributed.isend, x, 0)]):
            work.wait()
        assert functional_collectives.all_reduce(x, "sum", distributed.group.WORLD).shape == (2,)
    assert distributed.group.WORLD._get_sequence_number_for_group() == sent


def test_groups_are_copied_as_they_are(alone: None) -> None:
    with process_groups.copied_as_they_are():
        assert copy.deepcopy({"group": distributed.group.WORLD})["group"] is distributed.group.WORLD
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(distributed.group.WORLD)


def test_a_group_beside_has_the_patience_of_all(alone: None) -> None:
    group = process_groups.group_beside(frozenset((0,)))
    assert group is process_groups.group_beside(frozenset((0,)))
    assert (
        process_groups._patience_of(group)
        == process_groups._patience_of(distributed.group.WORLD)
        == timedelta(seconds=30)
    )


def test_a_functional_collective_waits_where_it_is_recorded(alone: None) -> None:
    x = torch.ones(2)
    assert collectives.is_on_its_way(functional_collectives.all_reduce(x, "sum", distributed.group.WORLD))
    function = torch.ops._c10d_functional.all_reduce.default
    assert collectives.is_functional(function)
    assert not collectives.is_functional(torch.ops.aten.add.Tensor)
    result = collectives.arrived(function)(x, "sum", distributed.group.WORLD.group_name)
    assert not collectives.is_on_its_way(result)
    assert torch.equal(result, x)


def test_arguments_on_their_way_are_waited_for_and_keep_their_graph(alone: None) -> None:
    x = torch.ones(2, requires_grad=True)
    sent = functional_collectives.all_reduce(x * 2, "sum", distributed.group.WORLD)
    (arrived, other), named = collectives.waited_for((sent, 1), {"mask": sent, "flag": True})
    assert other == 1
    assert named["flag"] is True
    for tensor in (arrived, named["mask"]):
        assert not collectives.is_on_its_way(tensor)
        assert torch.equal(tensor, torch.full((2,), 2.0))
    # A plain one, as a recording that runs again may have, goes through.
    (gradient,) = torch.autograd.grad(collectives.wait_for(x * 2).sum(), x)
    assert torch.equal(gradient, torch.full((2,), 2.0))
    given = (x,), {"flag": True}
    assert collectives.waited_for(*given) == given


def test_a_tensor_that_is_spread_is_known() -> None:
    assert not is_dtensor(torch.ones(2))


def test_what_lightning_keeps(trainer: pl.Trainer) -> None:
    model = _Model()
    assert lightning_names.trainer_of(model) is None
    assert not lightning_names.compiled_whole(model)
    assert not lightning_names.logs_hyperparameters(model)
    trainer.fit(model, DataLoader(torch.ones(8, 2), batch_size=2))
    assert lightning_names.trainer_of(model) is trainer
    assert all(vars(model)[name] is trainer for name in lightning_names.TRAINERS[:1])
    assert model.seen == [(False, 0), (True, 1), (False, 2), (True, 3)]
    assert [type(optimizer) for optimizer in lightning_names.optimizers_of(model)] == [torch.optim.SGD]
    assert not any(map(lightning_names.stands_in, trainer.optimizers))
    assert not lightning_names.synchronizes_layers(pl.strategies.DDPStrategy())
    assert lightning_names.before_batch_transfer(model, [1]) == [1]
    lightning_names.keep_batches_whole(trainer)


def test_parameters_of_other_optimizers(trainer: pl.Trainer) -> None:
    class Two(_Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]

        def training_step(self, batch: torch.Tensor, _: int) -> None:
            optimizer, _ = self.optimizers()
            assert not lightning_names.toggled_parameters(self)
            self.toggle_optimizer(optimizer)
            toggled = lightning_names.toggled_parameters(self)
            assert toggled
            assert all(toggled.values())
            assert not self.other.weight.requires_grad
            self.untoggle_optimizer(optimizer)
            optimizer.step()

    trainer.fit(Two(), DataLoader(torch.ones(2, 2), batch_size=2))


@pytest.mark.parametrize("reset", [False, True])
def test_the_loader_of_a_loop_is_taken(trainer: pl.Trainer, reset: bool) -> None:
    model = _Model()
    taken: list[Any] = []

    class Takes(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
            taken.append(trainer.fit_loop._combined_loader)
            if reset:
                lightning_names.reset_loaders(trainer)
            taken.append(lightning_names.take_loader(trainer.fit_loop))
            taken.append(lightning_names.take_loader(trainer.fit_loop))

    trainer.callbacks.append(Takes())
    trainer.fit(model, DataLoader(torch.ones(8, 2), batch_size=2))
    before, loader, after = taken
    assert len(list(loader.iterables)) == 4
    assert (loader is before) != reset
    assert after is None


def test_a_compiled_lightning_module() -> None:
    from lightning.pytorch.utilities.compile import from_compiled

    model = from_compiled(torch.compile(_Model(), backend="eager"))
    assert lightning_names.compiled_whole(model)


def test_the_last_value_of_a_metric() -> None:
    from torchmetrics import MeanMetric

    metric = MeanMetric()
    metric(torch.tensor(3.0))
    assert lightning_names.last_value(metric).item() == 3
    lightning_names.set_last_value(metric, torch.tensor(4.0))
    assert lightning_names.last_value(metric).item() == 4
    assert metric.compute().item() == 3


# -------------------------------------------------------------------- what recomputation watches


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_others_are_noticed(reentrant: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with private.noticed_checkpoints() as seen:
        assert not seen
        checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    assert seen == {reentrant}
    with private.noticed_checkpoints() as seen:
        pass
    checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    assert not seen


def test_checkpoints_of_other_threads_are_not_noticed() -> None:
    """The second thread begins to notice while the first does, and ends after it."""
    originals = torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction
    begun, go_on = threading.Event(), threading.Event()
    found: list[set[bool]] = []

    def other() -> None:
        with private.noticed_checkpoints() as seen:
            begun.set()
            go_on.wait(60)
            checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
        found.append(seen)

    thread = threading.Thread(target=other)
    with private.noticed_checkpoints() as seen:
        thread.start()
        begun.wait(60)
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
    go_on.set()
    thread.join(60)
    assert (seen, found) == ({True}, [{False}])
    assert originals == (torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction)


def test_stamps_change_with_tensors() -> None:
    tensor, other = torch.ones(2), torch.ones(2)
    before = private.stamps([tensor, other])
    other.add_(1)
    assert [now == then for now, then in zip(private.stamps([tensor, other]), before, strict=True)] == [1, 0, 1, 1]
    tensor.data = torch.ones(2)
    assert [now == then for now, then in zip(private.stamps([tensor, other]), before, strict=True)] == [1, 0, 0, 1]
    with torch.inference_mode():
        odd = [torch.ones(2), torch.eye(2).to_sparse()]
    assert private.stamps(odd) == private.stamps(odd)


# -------------------------------------------------------------------- values of tensors without values


def test_fake_tensors_may_have_values_that_operations_on_them_follow() -> None:
    mode, lengths = private.FakeTensorMode(allow_non_fake_inputs=True), torch.tensor([3, 1, 2])
    with private.with_values(8), mode:
        known = private.fake_with_value(mode, lengths)
        unknown = mode.from_tensor(torch.ones(3))
        assert (known + 1).tolist() == [4, 2, 3]
        assert private.value_of(unknown) is None
        assert private.value_of(known + unknown) is None
        assert private.mode_of(unknown) is mode
        known.add_(1)
    assert lengths.tolist() == [3, 1, 2]
    with mode:  # outside of the context, only single numbers are followed
        assert private.value_of(private.fake_with_value(mode, lengths) + 1) is None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_call_functions_that_modes_see(kind: type[nn.RNNBase]) -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in private.RECURRENT:
                calls.append(isinstance(args[2], (torch.Tensor, tuple)))
            calls.extend(["pack"] * (func is private.pack_sequences) + ["pad"] * (func is private.pad_sequences))
            return func(*args, **(kwargs or {}))

    calls: list[Any] = []
    layer = kind(4, 4, batch_first=True)
    with Seen():
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
        nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
        layer(torch.ones(2, 3, 4))
    assert calls == ["pack", True, "pad", False]


def test_istft_in_parts_is_istft() -> None:
    window, wave = torch.hann_window(16), torch.randn(2, 128)
    spectrum = torch.stft(wave, 16, window=window, return_complex=True)
    torch.testing.assert_close(
        private.istft_in_parts(spectrum, 16, window=window), torch.istft(spectrum, 16, window=window)
    )


# -------------------------------------------------------------------- threads, and the generators that they share


def test_threads_are_counted_and_global_generators_are_those_of_the_functions() -> None:
    before, stop = private.threads(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert private.threads() == before + 1
    stop.set()
    thread.join()
    waiting: multiprocessing.Queue[None] = multiprocessing.Queue()
    waiting.put(None)  # a thread of Python's own hands it on, as for each worker of a DataLoader
    assert private.threads() == before
    waiting.get()

    def users_thread() -> None:
        waiting.get()

    thread = threading.Thread(target=users_thread)  # a user's thread that waits in the same file
    thread.start()
    assert private.threads() == before + 1
    waiting.put(None)
    thread.join()
    python, numpy = private.global_generators()
    random.seed(3)
    assert python.getstate() == random.getstate()
    assert numpy.get_state()[1].tolist() == np.random.get_state()[1].tolist()  # noqa: NPY002


def test_addresses_in_a_tuple_are_those_of_its_objects() -> None:
    objects = (object(), [1], "a", None)
    assert python_names.addresses_of(objects) == python_names.addresses_of((*objects,))
    assert python_names.addresses_of(objects) != python_names.addresses_of((objects[0], [1], "a", None))
    assert python_names.addresses_of(()) == python_names.addresses_of(())
    assert python_names.addresses_of is python_names._entries_of  # the quick way, on the Python that runs the suite
    assert python_names._ids_of(objects) == [id(each) for each in objects]


class _Question:
    """A truth value that notes whether the other answer would raise an error."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.raises: bool | None = None

    def __bool__(self) -> bool:
        self.raises = python_names.raises_otherwise(sys._getframe(1), self.answer)
        return self.answer


def test_an_assert_is_told_from_a_choice() -> None:
    def asserts(question: _Question) -> None:
        # Written out, as pytest rewrites ``assert``.
        if not question:
            raise AssertionError("no")

    def refuses(question: _Question) -> None:
        if question:
            raise ValueError("yes")

    def chooses(question: _Question) -> int:
        if question:
            return 1
        return 2

    def compiled(question: _Question) -> None:
        namespace: dict[str, Any] = {}
        exec("def check(question):\n    assert question, 'no'\n    return 1", namespace)
        namespace["check"](question)

    def keeps(question: _Question) -> bool:
        return bool(question)

    for code, answer, expected in (
        *((asserts, True, True), (compiled, True, True), (refuses, False, True)),
        *((chooses, True, False), (chooses, False, False), (keeps, True, False)),
    ):
        question = _Question(answer)
        code(question)
        assert question.raises is expected, (code.__name__, answer)


def test_an_object_passes_for_its_value_and_is_none() -> None:
    class Number(python_names.PassesForItsValue):
        def __init__(self, value: float) -> None:
            self.value = value

    number: Any = Number(0.5)
    assert isinstance(number, float)
    assert not isinstance(number, int)
    assert type(number) is Number
    with pytest.raises(TypeError, match="must be real number"):
        math.sqrt(number)  # C asks for __float__


def test_autocast_is_read_and_set_in_one_place() -> None:
    plain = autocast.autocast_state()
    assert [is_on for is_on, _ in plain] == [False, False]
    assert not autocast.autocast_enabled()
    with torch.autocast("cpu", torch.float16):
        inside = autocast.autocast_state()
        assert inside == ((True, torch.float16), plain[1])
        assert autocast.autocast_enabled()
        with torch.autocast("cpu", enabled=False):
            assert not autocast.autocast_enabled()
        assert autocast.autocast_dtypes([torch.zeros(1), torch.zeros(2)]) == [torch.float16]
        autocast.set_autocast_state(plain)
        assert autocast.autocast_state() == plain
        autocast.set_autocast_state(inside)
        assert autocast.autocast_state() == inside
    assert autocast.autocast_dtypes([torch.zeros(1)]) == []
    autocast.set_autocast_state((plain[0], (True, torch.bfloat16)))
    try:
        assert autocast.autocast_enabled()
        assert autocast.autocast_dtypes([torch.zeros(1)]) == []  # on another kind of device
    finally:
        autocast.set_autocast_state(plain)


# -------------------------------------------------------------------- joint graphs


def test_the_parts_of_a_joint_graph() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    seen: dict[str, Any] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        parts = partitioning.parts_of(joint, num_fwd_outputs, options.get("static_lifetime_input_indices") or ())
        operations = [node.target for node in parts.forward if node.op == "call_function"]
        seen["forward"] = [str(target) for target in operations]
        seen["outputs"] = len(parts.outputs)
        seen["gradients"] = len(parts.gradients)
        seen["changed"] = [node.name for node in parts.changed_inputs]
        tangents = [node for node in joint.graph.nodes if partitioning.is_tangent(node)]
        seen["tangents"] = [tuple(node.meta["val"].shape) for node in tangents]
        assert all(partitioning.is_forward(parts, node) for node in parts.forward)
        assert not any(partitioning.is_forward(parts, node) for node in tangents)
        seen["saved"] = len(partitioning.chosen_by_torch(joint, parts, 1.0))
        assert not any(map(partitioning.is_of_sizes, joint.graph.nodes))
        forward, backward = partitioning.finished(*partitioning.split(joint, parts, parts.info.inputs))
        assert isinstance(partitioning.with_graph(joint, backward.graph), torch.fx.GraphModule)
        with partitioning.outside_of_fakes():
            assert torch.ones(1).item() == 1
        del forward, backward
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def as_it_is(graph: Any, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
    torch.compile(module, backend=backend, dynamic=False)(torch.randn(4, 2)).sum().backward()
    assert "aten.tanh.default" in seen["forward"]
    assert not any("tanh_backward" in name for name in seen["forward"])
    assert seen["gradients"] == 4
    assert seen["tangents"] == [(4, 2)]
    assert len(seen["changed"]) == 3  # running mean and variance, and the number of batches
    assert seen["saved"] > 2


def test_a_partitioner_of_inductor_is_copied_and_pickled_as_its_key() -> None:
    import pickle

    from torch._inductor import config

    with partitioning.under_partitioner(lambda *_, **__: None, "the key"):
        partitioner = config.custom_partitioner_fn
        assert copy.deepcopy(partitioner) is partitioner
        assert partitioner.uuid() == "the key"
        assert pickle.loads(pickle.dumps(partitioner)) == "the key"
    assert config.custom_partitioner_fn is None


def test_inductor_is_known() -> None:
    settings = private.compiler_settings(torch.compile(nn.Linear(1, 1)))  # type: ignore[arg-type]
    assert settings is not None
    assert private.is_inductor(settings.backend)
    assert not private.is_inductor(lambda graph, inputs: graph)


def test_numbers_and_semaphores_in_c_are_known_by_their_types() -> None:
    assert isinstance(ctypes.c_double(), python_names.C_DATA)
    assert isinstance((ctypes.c_double * 2)(), python_names.C_DATA)
    assert memoryview(ctypes.c_double(1.0)).nbytes == 8
    event = multiprocessing.Event()
    (semaphores,) = python_names.SEMAPHORES
    held = event._flag._semlock  # type: ignore[attr-defined]
    assert type(held) is semaphores
    values = [python_names.value_of_semaphore(held)]
    event.set()
    values.append(python_names.value_of_semaphore(held))
    assert values == [0, 1]
