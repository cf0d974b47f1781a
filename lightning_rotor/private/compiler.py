"""``torch.compile``: modules that were compiled, with which settings, and code that must not be."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from inspect import getclosurevars, unwrap
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._compile import _disable_dynamo


def outside_of_graphs(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """``torch.compiler.disable`` without importing the compiler now; ``reason`` is told under ``fullgraph=True``."""
    kept_out: Any = _disable_dynamo(function)
    if reason is not None:
        kept_out._torchdynamo_disable = True
        kept_out._torchdynamo_disable_msg = reason
    return kept_out  # type: ignore[no-any-return]


def uncompiled() -> AbstractContextManager[Any]:
    """Context in which what was given to ``torch.compile`` runs as it is written, as it does under a mode anyway.

    torch < 2.14 never compiles code again that it has once met under a mode.
    """
    # Nothing is compiled yet, and importing the compiler takes a second.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


# What users' compiled code may call between its graphs: hooks for saved tensors, modes, and all that these call. Not
# modules that may be in a user's graph (skip, invertible), nor this file, in which a compiled function lies.
_NEVER_COMPILED = ("execution", "memory", "planned", "planning", "profiling", "stages")
# Through these the compiler follows a call of a planned module to the module's own code, as torch.export does.
_FOLLOWED = ("planned/attachment", "planned/forward", "private/modes")
_kept_out: list[str] = []


def keep_library_out_of_graphs() -> None:
    """Let the compiler leave this library's own frames alone, if there is a compiler.

    Where a user's compiled code breaks into several graphs, all frames that run between them would be compiled, and
    compiled again for each tensor that they see.
    """
    if _kept_out or "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo import trace_rules

    root = Path(__file__).parent.parent
    followed = {__file__, *(str(root / f"{name}.py") for name in _FOLLOWED)}
    for folder in (*_NEVER_COMPILED, "private"):
        _kept_out.extend(path.as_posix() for path in (root / folder).glob("*.py") if str(path) not in followed)
    # Not by trace_rules.add for each file: that compiles the pattern for all of them anew each time, for over a second.
    trace_rules.SKIP_DIRS.extend(_kept_out)
    trace_rules._recompile_re()


COMPILED_CALL = "_compiled_call_impl"
"""Attribute in which ``module.compile()`` keeps what runs instead."""
INNER = "_orig_mod"
"""Name under which what ``torch.compile(module)`` returns holds the module. It is in the keys of state_dicts."""


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after ``module.compile()``."""
    return module.__dict__.get(COMPILED_CALL) is not None


def is_compiler_wrapper(module: nn.Module) -> bool:
    """True if a module is what ``torch.compile(module)`` returns. Its class is behind an import of the compiler."""
    return type(module).__name__ == "OptimizedModule" and INNER in module._modules


def is_compiled(module: nn.Module) -> bool:
    """True if the user compiled this very module, by ``module.compile()`` or ``torch.compile(module)``."""
    return is_compiler_wrapper(module) or is_compiled_in_place(module)


def is_compiled_function(value: Any) -> bool:
    """True if a function or method is what ``torch.compile`` returns for one."""
    own = getattr(value, "__dict__", {})
    # torch.compiler.disable leaves the same attribute, and another one.
    return "_torchdynamo_orig_callable" in own and not own.get("_torchdynamo_disable")


def has_compiled_method(module: nn.Module, name: str) -> bool:
    """True if the user has put ``torch.compile`` of a method in its place, in the instance or in the class.

    The ``forward`` of what ``torch.compile(module)`` returns is the compiler's own, and does not count.
    """
    if name == "forward" and is_compiler_wrapper(module):
        return False
    return is_compiled_function(module.__dict__.get(name, getattr(type(module), name, None)))


def compiled_method_of(module: nn.Module, name: str) -> Any | None:
    """The result of ``torch.compile`` of a module's own method, if it stands in the method's place; else None."""
    compiled = module.__dict__.get(name)
    if is_compiler_wrapper(module) or not is_compiled_function(compiled):
        return None
    # Methods of torch's own modules are wrapped once more.
    original: Any = unwrap(compiled)  # type: ignore[arg-type]
    is_own = getattr(original, "__self__", None) is module
    return compiled if is_own and original.__func__ is getattr(type(module), name) else None


class CompiledCall(NamedTuple):
    """Code that runs when a module is called that was compiled as a whole.

    Attributes:
        slot: Key of the module's ``__dict__`` under which something else can stand in its place.
        run: What ``torch.compile`` has returned, bound to the module.
        uncompiled: What was given to it, bound to the module, too.
        get_compiler_config: torch's function behind which the settings are, see :func:`settings_told_by`.
    """

    slot: str
    run: Callable[..., Any]
    uncompiled: Callable[..., Any]
    get_compiler_config: Any


def compiled_call_of(module: nn.Module) -> CompiledCall | None:
    """Code that runs when a module is called that the user compiled as a whole; None for any other module."""
    slot = "forward"
    told_by: Any = module
    run: Any
    uncompiled: Any
    # torch.compile(module)
    if is_compiler_wrapper(module):
        run, uncompiled = module.__dict__["forward"], module_inside(module).__call__
    # module.compile()
    elif is_compiled_in_place(module):
        slot, run, uncompiled = COMPILED_CALL, module.__dict__[COMPILED_CALL], module._call_impl
        told_by = run
    # module.forward = torch.compile(module.forward)
    elif compiled_method_of(module, "forward") is not None:
        run = told_by = module.__dict__["forward"]
        uncompiled = unwrap(run)
    # @torch.compile above the forward of the class
    elif has_compiled_method(module, "forward") and "forward" not in module.__dict__:
        run = told_by = MethodType(type(module).forward, module)
        uncompiled = MethodType(unwrap(type(module).forward), module)
    else:
        # A function of another module's in the place of the forward counts for none, too.
        return None
    return CompiledCall(slot, run, uncompiled, getattr(told_by, "get_compiler_config", None))


@contextmanager
def compilation_heard(begins: Callable[[], None], ends: Callable[[], None]) -> Iterator[None]:
    """Context in which these are called when ``torch.compile`` begins and ends to compile, a backward's graph too."""
    from torch._dynamo.callback import callback_handler

    starts = callback_handler.register_start_callback(lambda _: begins())
    stops = callback_handler.register_end_callback(lambda _: ends())
    try:
        yield
    finally:
        # Dynamo's reset may have forgotten them.
        with suppress(ValueError):
            callback_handler.remove_start_callback(starts)
        with suppress(ValueError):
            callback_handler.remove_end_callback(stops)


def module_inside(wrapper: nn.Module) -> nn.Module:
    """The module that was given to ``torch.compile``."""
    return wrapper.get_submodule(INNER)


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but without what ``module.compile()`` has put there."""
    return module._call_impl(*args, **kwargs)


COMPILER_ATTRIBUTES = frozenset(
    ("forward", "dynamo_ctx", "get_compiler_config", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id")
)
"""Attributes of what ``torch.compile(module)`` returns that say nothing about the module."""


class CompilerSettings(NamedTuple):
    """Settings that a module was compiled with; ``has_more`` stands for guard_filter_fn or dynamic_shapes."""

    backend: Any
    fullgraph: bool
    dynamic: bool | None
    has_more: bool


def compiler_settings(module: nn.Module) -> CompilerSettings | None:
    """Settings that a module was compiled with, behind its ``get_compiler_config``; None if torch does not tell."""
    return settings_told_by(module if is_compiler_wrapper(module) else getattr(module, COMPILED_CALL))


def settings_told_by(compiled: Any) -> CompilerSettings | None:
    """Settings behind the ``get_compiler_config`` of what ``torch.compile`` has returned; None if torch tells none."""
    ask = getattr(compiled, "get_compiler_config", None)
    if not isinstance(ask, FunctionType):
        return None
    # The function is a closure over what has the settings, and returns other ones.
    context = getclosurevars(ask).nonlocals.get("self")
    try:
        backend, fullgraph, dynamic = context.callback, context.fullgraph, context._dynamic  # type: ignore[union-attr]
    except AttributeError:
        return None
    # The one that the user gave is inside of what torch has wrapped around it.
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    hooks = getattr(context, "_hooks", None)
    shapes = getattr(context, "_dynamic_shapes", None)
    has_more = bool(getattr(hooks, "guard_filter_fn", None) or shapes)
    return CompilerSettings(backend, fullgraph, dynamic, has_more)


def is_inductor(backend: Any) -> bool:
    """True if a backend is what ``torch.compile`` takes by default."""
    return type(backend).__name__ == "_TorchCompileInductorWrapper"


def is_aot_eager(backend: Any) -> bool:
    """True if a backend is ``"aot_eager"``: it traces forward and backward as Inductor does, and compiles nothing."""
    # torch.compile wraps what is registered under the name.
    function = getattr(backend, "compiler_fn", backend)
    return getattr(function, "__qualname__", "") == "aot_eager" and function.__module__.startswith("torch._dynamo.")


def aot_eager_under(partition: Callable[..., Any]) -> Callable[..., Any]:
    """The backend ``"aot_eager"`` with a function that splits joint graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )


def activation_budget(budget: float) -> AbstractContextManager[Any]:
    """Context in which graphs are compiled under an activation memory budget, documented under this name alone."""
    # The compiler, which takes a second to import.
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)  # type: ignore[no-any-return]
