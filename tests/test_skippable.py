"""Skip connections as torchgpipe's users write them: what works, what is refused, and what plans make of them."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from lightning_rotor import Checkpointable, Schedule, profile_chain, sequential_stages, simulate
from lightning_rotor.execution.executor import Executor
from lightning_rotor.skip import Namespace, SkipDeclarationError, SkipError, pop, skippable, stash, verify_skippables
from tests.grids import few


@skippable(stash=["skip"])
class Down(nn.Module):
    """Keeps what it has made for the other side."""

    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        y = torch.tanh(self.conv(x))
        yield stash("skip", y)
        return y * 2


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        skip = yield pop("skip")
        return torch.tanh(self.conv(x) + skip)


class Middle(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(torch.sigmoid(self.conv(x)))


class PlainUNet(nn.Module):
    """The same as below without this package."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        kept = []
        for layer in self.layers:
            if isinstance(layer, Down):
                y = torch.tanh(layer.conv(x))
                kept.append(y)
                x = y * 2
            elif isinstance(layer, Up):
                x = torch.tanh(layer.conv(x) + kept.pop())
            else:
                x = layer(x)
        return x


def u_net():
    torch.manual_seed(0)
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down().isolate(outer),
        Middle(),
        Down().isolate(inner),
        Middle(),
        Up().isolate(inner),
        Middle(),
        Up().isolate(outer),
    )


def results(run, module, x):
    """Output and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


# -------------------------------------------------------------------- plain calls


def test_a_plain_sequential_hands_tensors_on():
    net, x = u_net(), torch.randn(2, 4, 8, 8)
    assert same(results(net, net, x), results(PlainUNet(net), net, x))


def test_keys_classes_and_pickles_stay_as_they_are():
    net = u_net()
    assert list(net.state_dict())[:2] == ["0.conv.weight", "0.conv.bias"]
    assert Down.__name__ == "Down"
    assert isinstance(net[0], Down)
    x = torch.randn(1, 4, 8, 8)
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        verify_skippables(again)  # namespaces are still shared by both ends
        assert same(results(again, again, x), results(net, net, x))


def test_nothing_is_left_behind():
    from lightning_rotor.skip import _plainly

    u_net()(torch.randn(1, 4, 8, 8))
    assert _plainly.tensors == {}


def test_threads_do_not_see_each_others_tensors():
    Down()(torch.ones(1, 4, 8, 8))
    failures = []

    def elsewhere():
        try:
            Up()(torch.ones(1, 4, 8, 8))
        except SkipError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(failures) == 1
    Up()(torch.ones(1, 4, 8, 8))


def test_none_can_be_stashed():
    @skippable(stash=["nothing"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("nothing", None)
            return x + 1

    @skippable(pop=["nothing"])
    class Pop(nn.Module):
        def forward(self, x):
            nothing = yield pop("nothing")
            assert nothing is None
            return x + 1

    assert nn.Sequential(Stash(), Pop())(torch.zeros(())) == 2


def test_a_skippable_layer_without_skips_may_have_a_plain_forward():
    @skippable()
    class Plain(nn.Module):
        def forward(self, x):
            return x + 1

    assert Plain()(torch.zeros(())) == 1


# -------------------------------------------------------------------- chains and plans


def test_stages_carry_skips_as_values_of_their_own():
    stages = sequential_stages(u_net())
    assert [(stage.reads, stage.writes) for stage in stages] == [
        ((0,), (1, 8)),
        ((1,), (2,)),
        ((2,), (3, 9)),
        ((3,), (4,)),
        ((4, 9), (5,)),
        ((5,), (6,)),
        ((6, 8), (7,)),
    ]


def test_the_profiler_sees_what_skips_take():
    x = torch.randn(2, 4, 16, 16)
    chain = profile_chain(sequential_stages(u_net()), x.requires_grad_()).chain
    assert [(skip.born, skip.uses, skip.size_bytes) for skip in chain.skips] == [
        (0, (6,), x.nbytes),
        (2, (4,), x.nbytes),
    ]


@pytest.mark.parametrize(
    "text", ["0-6", "(0-5) 6", "0 (1-5) 6", "(0 1) (2 3) 4-6", "0 (1 (2-4) 5) 6", "(0) (1) (2) (3) (4) (5) 6"]
)
def test_recomputation_gets_skips_again_and_the_same_bits(text):
    net, x = u_net(), torch.randn(2, 4, 16, 16)
    profile = profile_chain(sequential_stages(net), x.clone().requires_grad_())
    executor = Executor(profile.stages, profile.chain, Schedule.parse(text), profile.states)
    assert same(results(executor, net, x), results(net, net, x))


@pytest.mark.parametrize("part", few([0.8, 0.9], 0.8))
def test_a_u_net_trains_within_a_limit(part):
    net, x = u_net(), torch.randn(2, 4, 16, 16)
    profile = profile_chain(sequential_stages(net), x.clone().requires_grad_())
    full = simulate(profile.chain, Schedule.keep_all(len(profile.chain))).peak_bytes
    expected = results(net, net, x)
    limited = Checkpointable(net, x.clone().requires_grad_(), mem_limit=int(part * full))
    assert same(results(limited, net, x), expected)
    assert limited.plan.recomputed


# -------------------------------------------------------------------- declarations


def layer(stashes=(), pops=()):
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        pass

    return Layer()


def test_matching_declarations_pass():
    verify_skippables(nn.Sequential(layer(["a"]), nn.ReLU(), nn.Sequential(layer(["b"], ["a"])), layer(pops=["b"])))
    first, second = Namespace(), Namespace()
    verify_skippables(
        nn.Sequential(
            layer(["a"]).isolate(first),
            layer(["a"]).isolate(second),
            layer(pops=["a"]).isolate(first),
            layer(pops=["a"]).isolate(second),
        )
    )


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([layer(["a"])], "no module declared 'a' as poppable but stashed"),
        ([layer(pops=["a"])], "'0' declared 'a' as poppable but it was not stashed"),
        ([layer(pops=["a"]), layer(["a"])], "'0' declared 'a' as poppable but it was not stashed"),
        ([layer(["a"], ["a"])], "'0' declared 'a' both as stashable and as poppable"),
        (
            [layer(["a"]), layer(["a"]), layer(pops=["a"])],
            "'1' redeclared 'a' as stashable but not isolated by namespace",
        ),
        (
            [layer(["a"]), layer(pops=["a"]), nn.Sequential(layer(pops=["a"]))],
            "'2.0' redeclared 'a' as poppable but not isolated by namespace",
        ),
        ([layer(["a"]).isolate(Namespace()), layer(pops=["a"])], "'1' declared 'a' as poppable but it was not stashed"),
    ],
)
def test_declarations_that_do_not_match_are_all_listed(layers, text):
    with pytest.raises(SkipDeclarationError, match="one or more pairs of stash and pop do not match") as refused:
        verify_skippables(nn.Sequential(*layers))
    assert f"* {text}" in str(refused.value)
    assert isinstance(refused.value, TypeError)
    with pytest.raises(SkipDeclarationError, match="do not match"):
        sequential_stages(nn.Sequential(*layers))


def test_only_some_names_can_be_isolated():
    both = layer(["a", "b"])
    space = Namespace()
    assert both.isolate(space, only=["b"]) is both
    assert both.stashable() == ((None, "a"), (space, "b"))
    with pytest.raises(SkipDeclarationError, match="does not declare 'c': expected some of 'a', 'b'"):
        both.isolate(space, only=["c"])


def test_namespaces_are_equal_to_their_copies_only_and_can_be_sorted():
    first, second = Namespace(), Namespace()
    assert first == copy.deepcopy(first) == pickle.loads(pickle.dumps(first))
    assert first != second
    assert (first < second) != (second < first)
    assert len({first, second, copy.copy(second)}) == 2


@pytest.mark.parametrize("names", [{"stash": "skip"}, {"pop": "skip"}])
def test_a_string_is_no_list_of_names(names):
    with pytest.raises(SkipDeclarationError, match=r"is a string: expected a list of names, .*=\['skip'\]"):
        skippable(**names)


def test_only_layers_can_be_skippable():
    with pytest.raises(SkipDeclarationError, match=r"no class of nn\.Module"):
        skippable(stash=["a"])(dict)


# -------------------------------------------------------------------- layers that do otherwise


def doing(generator, stashes=(), pops=()):
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        def forward(self, x):
            return (yield from generator(x))

    return Layer()


def stashes_twice(x):
    yield stash("a", x)
    yield stash("b", x)
    return x


def pops_twice(x):
    yield pop("a")
    yield pop("a")
    return x


def does_nothing(x):
    yield from ()
    return x


def asks_for_something_else(x):
    yield "a"
    return x


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (doing(stashes_twice, ["a"]), r"'b' has not been declared as stashable: @skippable\(stash=\['b'\]\)"),
        (doing(pops_twice), r"'a' has not been declared as poppable: @skippable\(pop=\['a'\]\)"),
        (doing(does_nothing, ["a"]), "'a' must be stashed but has not been"),
        (doing(does_nothing, ["a", "b"]), "'a', 'b' must be stashed but have not been"),
        (doing(asks_for_something_else), "'a' is no command of a skippable layer"),
        (doing(pops_twice, pops=["a"]), "Layer pops 'a', which no layer has stashed"),
    ],
)
def test_layers_that_do_not_do_what_they_declare_are_refused(wrong, text):
    with pytest.raises(SkipError, match=text):
        wrong(torch.zeros(1))


@pytest.mark.parametrize(
    ("generator", "text"),
    [(pops_twice, "'a' has been popped already"), (does_nothing, "'a' must be popped but has not")],
)
def test_what_is_popped_is_popped_once(generator, text):
    def give(x):
        yield stash("a", x)
        return x

    with pytest.raises(SkipError, match=text):
        nn.Sequential(doing(give, ["a"]), doing(generator, pops=["a"]))(torch.zeros(1))
