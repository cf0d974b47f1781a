"""Modules that the user compiled, and the same code compiled under other activation memory budgets.

``torch.compile`` decides what a graph saves for its backward and what it recomputes there. The limit is
``torch._functorch.config.activation_memory_budget``, from 0 (the inputs alone) to 1 (whatever is fastest). Its
partitioner reads it once, when it compiles, so each budget gets compiled code of its own::

    block ──► compiled by the user                     option 0, keep
          ├─► compiled with the budget set to 0.7      option 1
          └─► ...

Modules that run the same code share it, as under the user's compiler: a compiled function takes the module as an
argument.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import fx, nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.compiling.partitioner import Partitioner, Saving
from lightning_rotor.errors import OptionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.partitioning import under_partitioner
from lightning_rotor.stages.draws import DrawsSeen
from lightning_rotor.stages.sequential import Stage

Variants: TypeAlias = Literal["exact", "close", "off"]
"""Which variants may be used, see :class:`CompiledModules`."""
BUDGETS = (0.7, 0.5, 0.3, 0.1, 0.0)
"""Activation memory budgets that are tried besides the user's own."""
INSIDE = "planned inside"
"""Name of the variant that is one graph with a plan of its own."""
_numbers = count()


class CannotRepeatError(Exception):
    """A compiled module can have no variants; says why."""


def uncompiled_warning(name: str, what: str = "it", *, reason: str = "") -> str:
    """A warning about what was compiled as a whole under this name, and is to run under plans that take it apart.

    The reason is why its graph cannot be planned inside.
    """
    because = f" ({reason})" if reason else ""
    return (
        f"{name} was compiled as a whole, but a plan takes it apart{because}, so {what} runs uncompiled from now on: "
        "expected blocks to be compiled (for block in net.blocks: block.compile()), which stay compiled under every "
        "plan"
    )


def compiled_in(stage: Stage) -> list[nn.Module]:
    """Modules in a stage that the user compiled, if its calls of them can be told."""
    return list(filter(private.is_compiled, stage.calls()))


def check_variants(choice: Variants) -> Variants:
    """The choice of variants; ``OptionError`` if it is none."""
    if choice not in get_args(Variants):
        raise OptionError(f"compiled_variants is {choice!r}: expected {', '.join(map(repr, get_args(Variants)))}")
    return choice


class CompiledModules:
    """Compiles the modules of one model under other budgets, equal ones once.

    ``"exact"`` variants compute the bits of the user's code, ``"close"`` ones may differ by rounding. With
    ``saving``, there is one variant instead: the user's graph planned inside, so that its counted peaks are
    lower by so much.

    Attributes:
        objections: Why variants that were measured must not be used, by their names.
    """

    def __init__(self, variants: Variants = "exact", *, saving: Saving | None = None) -> None:
        self.choice = check_variants(variants)
        self.saving = saving
        self.objections: dict[str, str] = {}
        self._settings: list[private.CompilerSettings] = []
        # Each with the backend that it is compiled by.
        self._functions: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def variants(
        self,
        stage: Stage,
        *,
        one_graph: bool = True,
    ) -> dict[str, Callable[[Any], Any]]:
        """By name, the stage with each of its compiled modules under each budget; empty if it calls none.

        Nothing is compiled before a variant is called. With ``one_graph``, code that is not a single graph is an error
        then: its pieces would count among the user's compiled code, of which torch allows a few. Raises
        ``CannotRepeatError`` if a compiled module cannot be compiled in the same way again.
        """
        if self.choice == "off":
            return {}
        modules = compiled_in(stage)
        if not modules:
            return {}
        if self.saving is not None:
            if len(modules) > 1:
                return {}
            objection = objection_to_planning_inside(_settings_of(modules[0]), modules[0])
            if objection:
                raise CannotRepeatError(objection)
            inside = partial(_compile_inside, saving=self.saving)
            replacements = {modules[0]: self._compiled_by(INSIDE, inside, modules[0], one_graph=one_graph)}
            return {INSIDE: _calling(stage, replacements)}
        variants = {}
        for budget in BUDGETS:
            under = partial(_compile_under, budget=budget)
            replacements = {}
            for module in modules:
                replacements[module] = self._compiled_by(budget, under, module, one_graph=one_graph)
            # The name is kept in plans and their files.
            variants[f"budget {budget:g}"] = _calling(stage, replacements)
        return variants

    def with_variants(self, stage: Stage, names: Sequence[str]) -> Stage:
        """The stage with these variants, to train with: the compiler gives up where it would for the user."""
        variants = self.variants(stage, one_graph=False)
        return replace(stage, variants=tuple(variants[name] for name in names))

    def identity(self, module: nn.Module) -> tuple[Any, frozenset[str]]:
        """A compiled module's settings, equal for equal ones; and the attributes that say nothing more."""
        try:
            number = self._number(_settings_of(module))
        except CannotRepeatError:
            return None, frozenset()
        if private.is_compiler_wrapper(module):
            return number, private.COMPILER_ATTRIBUTES
        return number, frozenset((private.COMPILED_CALL,))

    def _number(self, settings: private.CompilerSettings) -> int:
        """A number for a backend, equal for equal ones. Backends can be compared, but not hashed."""
        if settings not in self._settings:
            self._settings.append(settings)
        return self._settings.index(settings)

    def _compiled_by(
        self,
        variant: float | str,
        compiling: Callable[..., Any],
        module: nn.Module,
        *,
        one_graph: bool,
    ) -> Callable[..., Any]:
        """A module compiled as the user has, by a backend that ``compiling`` calls."""
        settings = _settings_of(module)
        inner = module
        if private.is_compiler_wrapper(module):
            inner = private.module_inside(module)
        # One function for each code of the user's: the compiler gives up when one has too many variants.
        key = self._number(settings), variant, type(inner).forward
        if key not in self._functions:
            # Compiled code is kept with the code object that it stands for, and what torch has seen of sizes with its
            # name: modules of two sizes would become ones of any size, which are slower.
            original = private.call_uncompiled
            own_code = original.__code__.replace(co_name=f"{original.__name__}_{next(_numbers)}")
            own = FunctionType(own_code, globals())
            self._functions[key] = own, partial(compiling, settings.backend)
        function, backend = self._functions[key]
        compiled = torch.compile(
            function,
            backend=backend,
            fullgraph=one_graph or settings.fullgraph,
            # Each size that is planned inside is measured, and gets a graph of its own.
            dynamic=False if variant == INSIDE else settings.dynamic,
        )
        return partial(compiled, inner)


def _compile_inside(
    backend: Callable[..., Any], graph: fx.GraphModule, inputs: Sequence[Any], *, saving: Saving, **options: Any
) -> Any:
    """A backend that compiles with the user's, and splits forward and backward by a plan."""
    if private.is_aot_eager(backend):
        return private.aot_eager_under(Partitioner(saving=saving, fused=False))(graph, inputs)
    partitioner = Partitioner(saving=saving)
    with under_partitioner(partitioner, partitioner.key):
        return backend(graph, inputs, **options)


def _compile_under(
    backend: Callable[..., Any],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    budget: float,
    **options: Any,
) -> Any:
    """A backend that compiles with the user's under a budget, as long as the graph draws no random numbers.

    torch recomputes an operation that draws with other numbers, so gradients are wrong in silence
    (https://github.com/pytorch/pytorch/issues/190758). A dropout switched on later makes a new graph, which comes here.
    """
    with nullcontext() if _may_draw(graph) else private.activation_budget(budget):
        return backend(graph, inputs, **options)


def _may_draw(graph: fx.GraphModule) -> bool:
    """True if a graph draws random numbers, as far as a run without values can tell."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in placeholders]
    fakes = [value for value in values if isinstance(value, private.FakeTensor)]
    # Nothing to run it on, so that the careful answer is right.
    if not fakes:
        return True
    fake = fakes[0].fake_mode
    draws = DrawsSeen()
    # Symbols for values that are read out of tensors are those of this run alone.
    symbols: Any = nullcontext()
    if fake.shape_env is not None:
        symbols = fake.shape_env.ignore_fresh_unbacked_symbols()
    inputs = []
    for value in values:
        # An operation in place must not change the tensors that the compiler goes on with.
        inputs.append(value.detach() if isinstance(value, torch.Tensor) else value)
    try:
        with torch.no_grad(), symbols, fake, draws:
            graph(*inputs)
    except Exception:
        # Operations of higher order may refuse a mode that they do not know.
        return True
    return bool(draws.kinds)


def objection_to_planning_inside(settings: private.CompilerSettings | None, module: nn.Module) -> str:
    """Reason why a module that is compiled so cannot be planned inside, as far as settings tell; empty if it can."""
    if settings is None:
        return "this version of torch does not tell how it was compiled"
    if not private.is_inductor(settings.backend) and not private.is_aot_eager(settings.backend):
        return "planning inside takes the backend Inductor"
    if _has_cuda_graphs(settings, module):
        return "CUDA graphs hold on to their memory"
    return ""


def _has_cuda_graphs(settings: private.CompilerSettings, module: nn.Module) -> bool:
    """True if a module runs as CUDA graphs. ``mode="reduce-overhead"`` makes none on other devices."""
    wants_them = (getattr(settings.backend, "config", None) or {}).get("triton.cudagraphs")
    return bool(wants_them) and any(parameter.is_cuda for parameter in module.parameters())


def _settings_of(module: nn.Module) -> private.CompilerSettings:
    """Options that a module was compiled with; ``CannotRepeatError`` if it cannot be compiled so again."""
    settings = private.compiler_settings(module)
    if settings is None:
        raise CannotRepeatError("this version of torch does not tell how it was compiled")
    # A variant calls the module inside, so that hooks of the wrapper would not run.
    if private.is_compiler_wrapper(module) and any(getattr(module, hooks) for hooks in private.HOOKS):
        raise CannotRepeatError("there are hooks on what torch.compile returned: register them on the module itself")
    if settings.has_more:
        raise CannotRepeatError("it was compiled with guard_filter_fn or dynamic_shapes")
    if _has_cuda_graphs(settings, module):
        raise CannotRepeatError("CUDA graphs hold on to their memory")
    return settings


def _calling(stage: Stage, replacements: dict[nn.Module, Callable[..., Any]]) -> Callable[[Any], Any]:
    """The stage with other callables in the place of some modules."""
    functions: list[Callable[[Any], Any]] = []
    for module in stage.modules:
        if isinstance(module, GraphSlice):
            functions.append(module.calling(replacements))
        else:
            functions.append(replacements.get(module, module))
    if len(functions) == 1:
        return functions[0]
    return partial(stage.wiring.run, functions=functions)
