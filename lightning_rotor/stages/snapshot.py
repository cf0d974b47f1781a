"""What user code can reach and change besides buffers and parameters, as it is at one moment, and how to put it back.

The library runs user code more often than the user does: it traces, measures, and recomputes. What such a run changes must not show::

    module ──► attributes ──► lists, dicts, sets, deques, arrays, tensors, generators, objects of the user's, and what is in them
          └──► hooks ──► variables of enclosing functions, globals that they name, defaults, bound objects, arguments of partial

Objects keep their identity: contents are put back into the very list that had them. Not followed are the libraries' own objects (torch's,
NumPy's, the Trainer, data sets and loaders), children of a module that a hook refers to, code of classes and in attributes, and what holds
locks, files or threads. Tensors and arrays are copied if they are small; of a larger tensor it is only known whether it has changed.
"""

from __future__ import annotations

import dis
import os
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from operator import is_
from pathlib import Path
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import is_fake, uncounted_copy
from lightning_rotor.stages.generators import rewinding

SMALL_BYTES = 64 * 1024
"""Below this, remembering costs less than thinking about it."""
_MUCH_BYTES = 64 * 1024**2
_MOST_VALUES = 20_000
_MOST_ENTRIES = 1_000
"""What is in a longer list or dict is put back, but not followed."""
_ABSENT = object()

_OURS_TO_KEEP = frozenset(("_lightning_rotor", "training"))
_LIBRARIES = frozenset(
    ("torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_rotor", *sys.stdlib_module_names)
)  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_DATA = (*_PLAIN, list, dict, set, deque, tuple, torch.Tensor, np.ndarray, nn.Module, type, ContextVar, *_GENERATORS)


class Snapshot:
    """Everything that code of some modules and their hooks can reach, as it is now.

    Args:
        roots: Modules, without those inside of them; or functions, containers and other objects.
        hooks: Hooks of modules count.
        objects: Not only containers and generators count, but tensors, functions, modules and other objects as well.
        also: Other things to look at, of whatever kind.
        small_bytes: Tensors and arrays up to this size are copied.
    """

    __slots__ = (
        "_follows_objects",
        "_generators",
        "_hooks",
        "_kept",
        "_objects",
        "_roots",
        "_seen",
        "_small_bytes",
        "_tensors",
    )

    def __init__(
        self,
        roots: Iterable[object],
        *,
        hooks: bool = True,
        objects: bool = True,
        also: Iterable[object] = (),
        small_bytes: int = _MUCH_BYTES,
    ) -> None:
        self._hooks, self._follows_objects, self._small_bytes = hooks, objects, small_bytes
        self._roots = tuple(roots)
        self._kept: list[tuple[_Kind, Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._generators: list[Callable[[], object]] = []
        self._objects: set[int] = set()
        self._seen: dict[int, Any] = {}
        pending: list[Any] = []
        modules = [root for root in self._roots if isinstance(root, nn.Module)]
        self._seen.update((id(module), module) for module in modules)
        for module in modules:
            self._look_at_module(module, pending)
        if hooks:
            self._look_at_hooks(private.hook_tables(None), pending)
        pending += (*also, *self._roots)
        self._follow(pending)

    def again(self) -> Snapshot:
        """What it has seen, and what can be reached now, as it is now."""
        return Snapshot(
            self._roots,
            hooks=self._hooks,
            objects=self._follows_objects,
            also=self._seen.values(),
            small_bytes=self._small_bytes,
        )

    # ---------------------------------------------------------------- putting back

    def restore(self, leaving: Collection[int] = ()) -> None:
        """Put everything back.

        Args:
            leaving: Attributes of plain objects to leave as they are, see :attr:`objects`.
        Raises:
            ExecutionError: A tensor has changed of which there is no copy.
        """
        self._put(None, leaving)
        lost = None
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                if private.version_of(tensor) == version:
                    continue
                if copy is None:
                    lost = tensor
                else:
                    tensor.copy_(copy)
        if lost is not None:
            raise _lost(lost)

    def lend(self) -> None:
        """Put everything back, but with copies in the place of small tensors and arrays, which may then change."""
        loans: dict[int, Any] = {id(tensor): copy.clone() for tensor, _, copy in self._tensors if copy is not None}
        loans.update((id(array), copy.copy()) for kind, array, copy in self._kept if kind is _ARRAY)
        self._put(loans, ())

    def rewind(self) -> None:
        """Put everything back but tensors."""
        self._put({}, ())

    def _put(self, loans: Mapping[int, Any] | None, leaving: Collection[int]) -> None:
        for kind, owner, content in self._kept:
            if id(owner) not in leaving and not (loans and kind is _ARRAY):
                kind.put(owner, content, loans)
        for rewind in self._generators:
            rewind()

    # ---------------------------------------------------------------- asking

    @property
    def objects(self) -> Collection[int]:
        """By ``id``, the namespaces of objects that are neither modules nor containers: configurations, meters."""
        return self._objects

    @property
    def copied(self) -> list[torch.Tensor]:
        """Tensors that it can put back."""
        return [tensor for tensor, _, copy in self._tensors if copy is not None]

    def changed(self) -> set[int]:
        """By ``id``, what is not as it was."""
        found = {id(owner) for kind, owner, content in self._kept if not kind.same(owner, content)}
        return found | {id(tensor) for tensor, version, _ in self._tensors if private.version_of(tensor) != version}

    @property
    def owners(self) -> set[int]:
        """By ``id``, what can change of it."""
        return {id(owner) for _, owner, _ in self._kept} | {id(tensor) for tensor, _, _ in self._tensors}

    def require_undoable(self) -> None:
        """Check that a recomputation can start from here.

        Raises:
            ExecutionError: A tensor has changed meanwhile whose value from before is gone, or cannot be lent.
        """
        lost = self._lost()
        if lost is not None:
            raise _lost(lost)

    def is_undoable(self) -> bool:
        """Whether :meth:`require_undoable` would find nothing."""
        return self._lost() is None

    def _lost(self) -> torch.Tensor | None:
        changed = [(tensor, copy) for tensor, version, copy in self._tensors if private.version_of(tensor) != version]
        slots = {id(value) for kind, _, content in self._kept for value in kind.values(content)} if changed else ()
        return next(
            (
                tensor
                for tensor, copy in changed
                if copy is None or tensor.nbytes > SMALL_BYTES or id(tensor) not in slots
            ),
            None,
        )

    # ---------------------------------------------------------------- looking around

    def _follow(self, pending: list[Any]) -> None:
        seen, looks = self._seen, _LOOKS
        left_out = () if self._follows_objects else _OBJECTS
        while pending and len(seen) < _MOST_VALUES:
            value = pending.pop()
            kind = type(value)
            look = looks[kind] if kind in looks else _look_for(kind)
            if look is not None and id(value) not in seen and look not in left_out:
                seen[id(value)] = value
                look(self, value, pending)

    def _look_at_module(self, module: nn.Module, pending: list[Any]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        attributes = module.__dict__
        if self._hooks:
            self._look_at_hooks(private.hook_tables(module), pending)
            for parameter in attributes["_parameters"].values():
                if parameter is not None:
                    pending.extend(private.gradient_hooks(parameter))
        if type(module).__module__.startswith("lightning_rotor."):
            return
        self._kept.append((_NAMESPACE, attributes, dict(attributes)))
        self._kept.append((_DICT, attributes["_modules"], dict(attributes["_modules"])))
        for name in ("_parameters", "_buffers"):
            self._kept.append((_TENSORS, attributes[name], dict(attributes[name])))
        pending.extend(_values_of(attributes))

    def _look_at_other_module(self, module: nn.Module, pending: list[Any]) -> None:
        """One that is referred to: its hooks are not called, and nobody else sees to its buffers."""
        if isinstance(module, torch.jit.ScriptModule) or _is_torchs(type(module)):
            return
        attributes = module.__dict__
        self._kept.append((_NAMESPACE, attributes, dict(attributes)))
        self._kept.append((_DICT, attributes["_buffers"], dict(attributes["_buffers"])))
        pending.extend(attributes["_buffers"].values())
        pending.extend(_values_of(attributes))

    def _look_at_hooks(self, tables: Iterable[dict[int, Any]], pending: list[Any]) -> None:
        for table in tables:
            self._kept.append((_DICT, table, dict(table)))
            pending.extend(table.values())

    def _look_at_list(self, value: Any, pending: list[Any]) -> None:
        entries = list.copy(value) if isinstance(value, list) else [*deque.__iter__(value)]
        self._kept.append((_LIST, value, entries))
        if len(entries) <= _MOST_ENTRIES:
            pending.extend(entries)

    def _look_at_dict(self, value: Any, pending: list[Any]) -> None:
        entries = dict(_items(value))
        self._kept.append((_DICT, value, entries))
        if len(entries) <= _MOST_ENTRIES:
            pending.extend(entries.values())

    def _look_at_set(self, value: Any, pending: list[Any]) -> None:
        self._kept.append((_SET, value, set(value)))

    def _look_at_tuple(self, value: Any, pending: list[Any]) -> None:
        if len(value) <= _MOST_ENTRIES:
            pending.extend(value)

    def _look_at_tensor(self, tensor: torch.Tensor, pending: list[Any]) -> None:
        if is_fake(tensor) or tensor.is_inference() or isinstance(tensor, nn.Parameter):
            return
        is_small = tensor.layout is torch.strided and tensor.nbytes <= self._small_bytes and not tensor.requires_grad
        self._tensors.append((tensor, private.version_of(tensor), _copy(tensor) if is_small else None))

    def _look_at_array(self, array: Any, pending: list[Any]) -> None:
        if array.nbytes <= self._small_bytes and array.dtype != object:
            self._kept.append((_ARRAY, array, array.copy()))

    def _look_at_generator(self, generator: Any, pending: list[Any]) -> None:
        if not isinstance(generator, random.SystemRandom):
            self._generators.append(rewinding(generator))

    def _look_at_function(self, function: FunctionType, pending: list[Any]) -> None:
        if function.__code__.co_filename.startswith(_OURS):
            return
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._kept.append((_CELL, cell, content))
            pending.append(content)
        pending.extend(function.__defaults__ or ())
        pending.extend((function.__kwdefaults__ or {}).values())
        self._kept.append((_NAMESPACE, function.__dict__, dict(function.__dict__)))
        pending.extend(function.__dict__.values())
        if is_users(function.__code__.co_filename):
            namespace = function.__globals__
            found = {name: namespace.get(name, _ABSENT) for name in _globals_of(function.__code__)}
            self._kept.append((_GLOBALS, namespace, found))
            pending.extend(found.values())

    def _look_at_method(self, method: Any, pending: list[Any]) -> None:
        if isinstance(method, MethodType):
            pending.append(method.__func__)
        if not isinstance(method.__self__, ModuleType):
            pending.append(method.__self__)

    def _look_at_partial(self, function: partial[Any], pending: list[Any]) -> None:
        pending += (function.func, *function.args)
        self._look_at_dict(function.keywords, pending)

    def _look_at_variable(self, variable: ContextVar[Any], pending: list[Any]) -> None:
        pending.append(variable.get(None))

    def _look_at_object(self, value: Any, pending: list[Any]) -> None:
        namespace = namespace_of(value) if self._follows_objects else None
        if namespace is not None and (
            _is_own(type(value)) or all(isinstance(entry, _DATA) for entry in namespace.values())
        ):
            self._objects.add(id(namespace))
            self._kept.append((_NAMESPACE, namespace, dict(namespace)))
            pending.extend(namespace.values())
        slots = _slots_of(type(value)) if self._follows_objects else ()
        if slots:
            content = {name: getattr(value, name, _ABSENT) for name in slots}
            self._kept.append((_SLOTS, value, content))
            pending.extend(content.values())
        for kind, look in _FILLED:
            if isinstance(value, kind):
                look(self, value, pending)


# -------------------------------------------------------------------- how each kind of thing is put back


class _Kind(NamedTuple):
    """How to compare and put back what something holds."""

    same: Callable[[Any, Any], bool]
    put: Callable[[Any, Any, Mapping[int, Any] | None], None]
    values: Callable[[Any], Iterable[Any]]


def _items(entries: Any) -> Iterable[tuple[Any, Any]]:
    """Not by methods of a class of the user's, which may make entries anew whenever they are asked for."""
    return OrderedDict.items(entries) if isinstance(entries, OrderedDict) else dict.items(entries)


def _same_entries(entries: Any, then: Mapping[Any, Any]) -> bool:
    if len(entries) != len(then):
        return False
    return all(
        key is key_then and value is value_then
        for (key, value), (key_then, value_then) in zip(_items(entries), then.items(), strict=True)
    )


def _put_entries(entries: Any, then: Mapping[Any, Any], loans: Mapping[int, Any] | None) -> None:
    if loans:
        then = {key: loans.get(id(value), value) for key, value in then.items()}
    if not _same_entries(entries, then):
        base = OrderedDict if isinstance(entries, OrderedDict) else dict
        base.clear(entries)
        base.update(entries, then)


def _put_names(namespace: dict[str, Any], then: Mapping[str, Any], loans: Mapping[int, Any] | None) -> None:
    """Attributes one by one: somebody may look at them meanwhile, and their order is nobody's business."""
    for name in [name for name in namespace if name not in then]:
        del namespace[name]
    for name, value in then.items():
        value = loans.get(id(value), value) if loans else value
        if namespace.get(name, _ABSENT) is not value:
            namespace[name] = value


def _put_tensors(tensors: dict[str, Any], then: Mapping[str, Any], loans: Mapping[int, Any] | None) -> None:
    """Parameters or buffers. While a module runs again, others may be in their places: those that FSDP gathers, those that are lent."""
    if loans is None:
        _put_entries(tensors, then, loans)
    else:
        for name in [name for name in tensors if name not in then]:
            del tensors[name]


def _put_list(entries: Any, then: list[Any], loans: Mapping[int, Any] | None) -> None:
    if loans:
        then = [loans.get(id(value), value) for value in then]
    if not _same_list(entries, then):
        if isinstance(entries, list):
            list.__setitem__(entries, slice(None), then)
        else:
            deque.clear(entries)
            deque.extend(entries, then)


def _same_list(entries: Any, then: list[Any]) -> bool:
    return len(entries) == len(then) and all(map(is_, entries, then))


def _put_set(entries: Any, then: set[Any], loans: Mapping[int, Any] | None) -> None:
    if set(entries) != then:
        set.clear(entries)
        set.update(entries, then)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _ABSENT


def _put_content(cell: CellType, then: Any, loans: Mapping[int, Any] | None) -> None:
    then = loans.get(id(then), then) if loans else then
    if then is _ABSENT:
        if _content(cell) is not _ABSENT:
            del cell.cell_contents
    elif _content(cell) is not then:
        cell.cell_contents = then


def _put_globals(namespace: dict[str, Any], then: Mapping[str, Any], loans: Mapping[int, Any] | None) -> None:
    for name, value in then.items():
        value = loans.get(id(value), value) if loans else value
        if namespace.get(name, _ABSENT) is value:
            continue
        if value is _ABSENT:
            del namespace[name]
        else:
            namespace[name] = value


def _put_slots(owner: Any, then: Mapping[str, Any], loans: Mapping[int, Any] | None) -> None:
    for name, value in then.items():
        value = loans.get(id(value), value) if loans else value
        if getattr(owner, name, _ABSENT) is value:
            continue
        if value is _ABSENT:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, value)


def _same_bytes(array: Any, then: Any) -> bool:
    return bool(array.tobytes() == then.tobytes())


def _put_array(array: Any, then: Any, loans: Mapping[int, Any] | None) -> None:
    if not _same_bytes(array, then):
        array[...] = then


def _nothing(_: Any) -> Iterable[Any]:
    return ()


_DICT = _Kind(_same_entries, _put_entries, dict.values)
_NAMESPACE = _Kind(_same_entries, _put_names, dict.values)
_TENSORS = _Kind(_same_entries, _put_tensors, _nothing)
_LIST = _Kind(_same_list, _put_list, iter)
_SET = _Kind(lambda now, then: set(now) == then, _put_set, _nothing)
_CELL = _Kind(lambda cell, then: _content(cell) is then, _put_content, lambda then: (then,))
_GLOBALS = _Kind(
    lambda now, then: all(now.get(name, _ABSENT) is value for name, value in then.items()), _put_globals, dict.values
)  # fmt: skip
_SLOTS = _Kind(
    lambda owner, then: all(getattr(owner, name, _ABSENT) is value for name, value in then.items()), _put_slots, dict.values
)  # fmt: skip
_ARRAY = _Kind(_same_bytes, _put_array, _nothing)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return uncounted_copy(tensor) if tensor.is_contiguous() else tensor.detach().clone()


def _lost(tensor: torch.Tensor) -> ExecutionError:
    return ExecutionError(
        f"a forward or a hook changes a tensor of shape {tuple(tensor.shape)} in place that is no buffer, so its earlier value is gone and the "
        "forward cannot run again: expected register_buffer for it, or an attribute that is set anew (self.state = new)"
    )


# -------------------------------------------------------------------- what is followed


def _look_for(kind: type) -> Callable[[Snapshot, Any, list[Any]], None] | None:
    """How to look at values of a type; None if nothing about them can change, or if it is nobody's business."""
    found = _choose(kind)
    if kind.__module__.partition(".")[0] in _LIBRARIES:  # others may be gone some day
        _LOOKS[kind] = found
    return found


def _choose(kind: type) -> Callable[[Snapshot, Any, list[Any]], None] | None:
    for base, look in _KINDS:
        if issubclass(kind, base):
            return look
    if kind.__module__.partition(".")[0] in _LIBRARIES and kind.__module__ not in (
        "types",
        "collections",
        "weakref",
        "__main__",
    ):
        return next((look for base, look in _FILLED if issubclass(kind, base)), None)
    return Snapshot._look_at_object


_FILLED: tuple[tuple[type | tuple[type, ...], Callable[[Snapshot, Any, list[Any]], None]], ...] = (
    ((list, deque), Snapshot._look_at_list),
    (dict, Snapshot._look_at_dict),
    (set, Snapshot._look_at_set),
    ((tuple, frozenset), Snapshot._look_at_tuple),
)
_KINDS: tuple[tuple[Any, Callable[[Snapshot, Any, list[Any]], None] | None], ...] = (
    ((*_PLAIN, type, ModuleType, BaseException, Dataset, DataLoader), None),
    (torch.Tensor, Snapshot._look_at_tensor),
    (nn.Module, Snapshot._look_at_other_module),
    (np.ndarray, Snapshot._look_at_array),
    (_GENERATORS, Snapshot._look_at_generator),
    (FunctionType, Snapshot._look_at_function),
    ((MethodType, BuiltinMethodType), Snapshot._look_at_method),
    (partial, Snapshot._look_at_partial),
    (ContextVar, Snapshot._look_at_variable),
)
_OBJECTS = tuple(look for base, look in _KINDS if base is not _GENERATORS)
_LOOKS: dict[type, Callable[[Snapshot, Any, list[Any]], None] | None] = {
    **dict.fromkeys(_PLAIN), list: Snapshot._look_at_list, dict: Snapshot._look_at_dict, tuple: Snapshot._look_at_tuple,
}  # fmt: skip


def _values_of(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Attributes of the user's. What functions among them refer to is their own affair, as it is with code of classes."""
    for name, value in attributes.items():
        if (
            name not in private.STRUCTURE
            and name not in _OURS_TO_KEEP
            and not isinstance(value, (FunctionType, MethodType, partial))
        ):
            yield value


def code_of(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Functions in the user's own classes of modules."""
    kinds = dict.fromkeys(base for module in modules for base in type(module).__mro__ if _is_own(base))
    return (entry for kind in kinds for entry in vars(kind).values() if isinstance(entry, FunctionType))


@cache
def is_users(filename: str) -> bool:
    """Whether code is neither torch's nor Python's nor ours."""
    if filename.startswith(_TORCHS_AND_OURS):
        return False
    return not filename.startswith(_PYTHONS) or "-packages" in filename


_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCHS_AND_OURS = (f"{Path(torch.__file__).parent}{os.sep}", _OURS)
_PYTHONS = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith(("torch.nn.modules.", "lightning_rotor."))


def _is_own(kind: type) -> bool:
    """Whether a class comes from the user's own files."""
    return "-packages" not in (getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """The dict that an object keeps its attributes in, if it has one. Asks no code of the object's class."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found.extend((slots,) if isinstance(slots, str) else slots)
    return [name for name in found if not name.startswith("__")]


@lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Names that code, and functions in it, look up or set among globals. Names of attributes are not among them."""
    return tuple(dict.fromkeys(_named(code)))


def _named(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            yield str(step.argval)
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _named(inside)
