"""Remember, compare and put back what user code can reach and change besides buffers and parameters.

The library runs user code more often than the user does: it records, measures, and recomputes. What such a run
changes must not show::

    module ──► attributes ──► lists, dicts, sets, deques, arrays, tensors, generators, user objects, and what is in them
          └──► hooks ──► variables of enclosing functions, globals that they name, defaults, bound objects, partial's

Objects keep their identity: contents go back into the very list that had them. Not followed are the libraries' own
objects (torch's, NumPy's, the Trainer, data sets and loaders), children of a module that a hook refers to, code of
classes and in attributes, and what holds locks, files or threads. Small tensors and arrays are copied; of a larger
tensor only its version is known.
"""

from __future__ import annotations

import dis
import os
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from operator import is_
from pathlib import Path
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import attribute_of, bytes_of, is_fake, uncounted_copy
from lightning_rotor.stages.generators import rewinding

SMALL_BYTES = 64 * 1024
"""Below this, remembering costs less than thinking about it."""
_MUCH_BYTES = 64 * 1024**2
_MOST_VALUES = 20_000
MOST_ENTRIES = 1_000
"""What is in a longer list or dict is put back, but not followed."""
ABSENT = object()
"""In the place of a variable that has no value."""

_OURS_TO_KEEP = frozenset(("_lightning_rotor", "training"))
_LIBRARIES = frozenset(
    ("torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_rotor",
     *sys.stdlib_module_names)
)  # fmt: skip
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change."""
GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
_DATA = (*PLAIN, list, dict, set, deque, tuple, torch.Tensor, np.ndarray, nn.Module, type, ContextVar, *GENERATORS)


class Snapshot:
    """Everything that code of some modules and their hooks can reach, as it is now.

    Args:
        roots: Modules, without those inside of them; or functions, containers and other objects.
        objects: Tensors, functions, modules and other objects count as well, not only containers and generators.
        small_bytes: Tensors and arrays up to this size are copied.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        hooks: bool = True,
        objects: bool = True,
        also: Iterable[object] = (),
        small_bytes: int = _MUCH_BYTES,
    ) -> None:
        self._roots, self._hooks, self._follows_objects, self._small_bytes = tuple(roots), hooks, objects, small_bytes
        self._kept: list[tuple[Kind, Any, Any]] = []  # how each thing is put back, the thing, and what was in it
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._generators: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}
        self.objects: set[int] = set()
        self._pending: list[Any] = []
        self._look(also)

    def again(self) -> Snapshot:
        """A new snapshot of what this one has seen, and of what can be reached now."""
        return Snapshot(self._roots, also=self._seen.values(), small_bytes=self._small_bytes)

    # ---------------------------------------------------------------- putting back

    def restore(self, leaving: Collection[int] = ()) -> None:
        """Put everything back but attributes in ``leaving``; ``ExecutionError`` if a changed tensor has no copy."""
        self._put(None, leaving)
        lost = None
        with torch.no_grad():
            for tensor, copy in self._changed_tensors():
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
            if id(owner) in leaving or (loans and kind is _ARRAY):
                continue
            if kind is _TENSORS and loans is not None:
                _drop_names(owner, content)  # others may stand there in a second run: gathered by FSDP, or lent
            else:
                kind.put(owner, _with_loans(content, loans) if loans else content)
        for rewind in self._generators:
            rewind()

    # ---------------------------------------------------------------- asking

    def changed_large(self) -> list[Any]:
        """Long containers and large arrays that have changed."""
        return [
            owner for kind, owner, content in self._kept if _is_large(kind, content) and not kind.same(owner, content)
        ]

    @property
    def copied(self) -> list[torch.Tensor]:
        """Tensors of which there are copies."""
        return [tensor for tensor, _, copy in self._tensors if copy is not None]

    def changed(self) -> set[int]:
        """Things that have changed, by ``id``."""
        found = {id(owner) for kind, owner, content in self._kept if not kind.same(owner, content)}
        return found | {id(tensor) for tensor, _ in self._changed_tensors()}

    @property
    def owners(self) -> set[int]:
        """Things in it that can change, by ``id``."""
        return {id(owner) for _, owner, _ in self._kept} | {id(tensor) for tensor, _, _ in self._tensors}

    def require_undoable(self) -> None:
        """Raise ``ExecutionError`` if a tensor has changed whose earlier value is gone, or cannot be lent."""
        for tensor in self.gone():
            raise _lost(tensor)

    def gone(self) -> list[torch.Tensor]:
        """Tensors that have changed and cannot be put back or lent."""
        changed = self._changed_tensors()
        slots = {id(value) for kind, _, content in self._kept for value in kind.values(content)} if changed else ()
        return [
            tensor for tensor, copy in changed if copy is None or tensor.nbytes > SMALL_BYTES or id(tensor) not in slots
        ]

    def _changed_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(tensor, copy) for tensor, version, copy in self._tensors if private.version_of(tensor) != version]

    # ---------------------------------------------------------------- what is followed

    def _look(self, also: Iterable[object]) -> None:
        modules = [root for root in self._roots if isinstance(root, nn.Module)]
        self._seen.update((id(module), module) for module in modules)
        for module in modules:
            self._root_module(module)
        self._pending += {type(module) for module in modules}
        if self._hooks:
            self._hook_tables(private.hook_tables(None))
        self._pending += (*also, *self._roots)
        left_out = () if self._follows_objects else _OBJECTS
        while self._pending and len(self._seen) < _MOST_VALUES:
            value = self._pending.pop()
            look = _LOOKS[type(value)] if type(value) in _LOOKS else _look_for(type(value))
            if look is not None and id(value) not in self._seen and look not in left_out:
                self._seen[id(value)] = value
                look(self, value)

    def _keep(self, kind: Kind, owner: Any, content: Any) -> None:
        self._kept.append((kind, owner, content))
        self._pending += kind.values(content)

    def _root_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        attributes = module.__dict__
        if self._hooks:
            self._hook_tables(private.hook_tables(module))
            for parameter in attributes["_parameters"].values():
                self._pending += () if parameter is None else private.gradient_hooks(parameter)
        if type(module).__module__.startswith("lightning_rotor."):
            # A Checkpointable has its module as a plain attribute.
            self._pending += [value for value in attributes.values() if isinstance(value, nn.Module)]
            return
        self._kept.append((_NAMESPACE, attributes, dict(attributes)))
        self._kept.append((_DICT, attributes["_modules"], dict(attributes["_modules"])))
        for name in ("_parameters", "_buffers"):
            self._kept.append((_TENSORS, attributes[name], dict(attributes[name])))
        self._pending += _values_of(attributes)

    def _module(self, module: nn.Module) -> None:
        """Look at a module that is referred to: its hooks are not called, and nobody else sees to its buffers."""
        is_torchs = type(module).__module__.startswith(("torch.nn.modules.", "lightning_rotor."))
        if isinstance(module, torch.jit.ScriptModule) or is_torchs:
            return
        attributes = module.__dict__
        self._pending.append(type(module))
        self._kept.append((_NAMESPACE, attributes, dict(attributes)))
        self._keep(_DICT, attributes["_buffers"], dict(attributes["_buffers"]))
        self._pending += _values_of(attributes)

    def _hook_tables(self, tables: Iterable[dict[int, Any]]) -> None:
        for table in tables:
            self._kept.append((_DICT, table, dict(table)))
            self._pending += table.values()

    def _list(self, value: Any) -> None:
        entries = entries_of(value)
        self._kept.append((_LIST, value, entries))
        self._pending += entries if len(entries) <= MOST_ENTRIES else ()

    def _dict(self, value: Any) -> None:
        entries = dict(_items(value))
        self._kept.append((_DICT, value, entries))
        self._pending += entries.values() if len(entries) <= MOST_ENTRIES else ()

    def _set(self, value: Any) -> None:
        self._kept.append((_SET, value, set(value)))  # which calls no method of a set

    def _tuple(self, value: Any) -> None:
        self._pending += entries_of(value) if length_of(value) <= MOST_ENTRIES else ()

    def _tensor(self, tensor: torch.Tensor) -> None:
        if is_fake(tensor) or tensor.is_inference() or isinstance(tensor, nn.Parameter):
            return
        is_small = tensor.layout is torch.strided and bytes_of(tensor) <= self._small_bytes and not tensor.requires_grad
        copy = None
        if is_small:
            copy = uncounted_copy(tensor) if tensor.is_contiguous() else tensor.detach().clone()
        self._tensors.append((tensor, private.version_of(tensor), copy))

    def _array(self, array: Any) -> None:
        if array.nbytes <= self._small_bytes and array.dtype != object:
            self._kept.append((_ARRAY, array, np.ndarray.copy(array)))

    def _bytes(self, value: Any) -> None:
        self._kept.append((_BYTES, value, _bytes_base(value).__getitem__(value, slice(None))))

    def _class(self, kind: type) -> None:
        """Look at the data that a class of the user's, or one that it is made from, has in its attributes."""
        for base in kind.__mro__:
            if names := _data_in(base, len(vars(base))):
                self._keep(CLASS_ENTRIES, base, {name: CLASS_ENTRIES.read(base, name) for name in names})

    def _generator(self, generator: Any) -> None:
        self._generators += filter(None, [rewinding(generator)])

    def _function(self, function: FunctionType) -> None:
        """Look at a function: variables around it, defaults, attributes, globals."""
        if function.__code__.co_filename.startswith(_OURS):
            return
        for cell in function.__closure__ or ():
            self._keep(CELL, cell, {"": CELL.read(cell, "")})
        self._pending += function.__defaults__ or ()
        self._pending += (function.__kwdefaults__ or {}).values()
        self._keep(_NAMESPACE, function.__dict__, dict(function.__dict__))
        if is_users(function.__code__.co_filename):
            names = function.__globals__
            self._keep(ENTRIES, names, {name: names.get(name, ABSENT) for name in globals_of(function.__code__)})

    def _method(self, method: Any) -> None:
        self._pending += (method.__func__,) if isinstance(method, MethodType) else ()
        self._pending += () if isinstance(method.__self__, ModuleType) else (method.__self__,)

    def _partial(self, function: partial[Any]) -> None:
        self._pending += (function.func, *function.args)
        self._dict(function.keywords)

    def _variable(self, variable: ContextVar[Any]) -> None:
        self._keep(VARIABLE, variable, {"": VARIABLE.read(variable, "")})

    def _reference(self, reference: ReferenceType[Any]) -> None:
        self._pending += (reference(),)

    def _object(self, value: Any) -> None:
        """Look at an object of the user's, or of a library if it holds nothing but data."""
        if self._follows_objects:
            namespace, kind = namespace_of(value), type(value)
            if namespace is not None and (
                _is_own(kind) or all(issubclass(type(each), _DATA) for each in namespace.values())
            ):
                self.objects.add(id(namespace))
                self._keep(_NAMESPACE, namespace, dict(namespace))
            if slots := slots_of(kind):
                self._keep(SLOTS, value, {name: slot(value, name) for name in slots})
        for base, look in _FILLED:
            if issubclass(type(value), base):
                look(self, value)


def _is_large(kind: Kind, content: Any) -> bool:
    if kind is _ARRAY:
        return bool(content.nbytes > SMALL_BYTES)
    return kind in (_LIST, _DICT, _SET) and len(content) > MOST_ENTRIES  # which is a container of Python's


def _lost(tensor: torch.Tensor) -> ExecutionError:
    return ExecutionError(
        f"a forward or a hook changes a tensor of shape {tuple(tensor.shape)} in place that is no buffer, so "
        "its earlier value is gone and the forward cannot run again: expected register_buffer for it, or an "
        "attribute that is set anew (self.state = new)"
    )


# -------------------------------------------------------------------- how each kind of thing is put back


class Kind(NamedTuple):
    """How to compare what something holds, to make it hold that again, and which values are in it to be followed."""

    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    values: Callable[[Any], Iterable[Any]] = lambda _: ()
    read: Callable[[Any, str], Any] = getattr

    def put(self, owner: Any, then: Any) -> None:
        """Put back what something held, if it holds anything else."""
        if not self.same(owner, then):
            self.write(owner, then)


def _with_loans(content: Any, loans: Mapping[int, Any]) -> Any:
    if isinstance(content, dict):
        return {key: loans.get(id(value), value) for key, value in content.items()}
    return [loans.get(id(value), value) for value in content] if isinstance(content, list) else content


# ------- Contents of containers. A user's class may make entries anew whenever it is asked, refuse len(), or lie, so
# that the container it derives from is asked.

_CONTAINERS: tuple[type, ...] = (tuple, list, dict, set, frozenset, deque)


def _base_of(container: Any) -> Any:
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def length_of(container: Any) -> int:
    """Number of entries in a container of Python's, or of a class that derives from one."""
    return int(_base_of(container).__len__(container))


def entries_of(container: Any) -> list[Any]:
    """Entries of a container of Python's, or of a class that derives from one; keys of a dict."""
    return [*_base_of(container).__iter__(container)]


def _items(entries: Any) -> Iterable[tuple[Any, Any]]:
    """Entries of a dict."""
    return OrderedDict.items(entries) if isinstance(entries, OrderedDict) else dict.items(entries)


def _bytes_base(value: Any) -> Any:
    return bytearray if isinstance(value, bytearray) else array


def _same_entries(entries: Any, then: Mapping[Any, Any]) -> bool:
    return dict.__len__(entries) == len(then) and all(
        key is key_then and value is value_then
        for (key, value), (key_then, value_then) in zip(_items(entries), then.items(), strict=True)
    )


def _write_entries(entries: Any, then: Mapping[Any, Any]) -> None:
    base = OrderedDict if isinstance(entries, OrderedDict) else dict
    base.clear(entries)
    base.update(entries, then)


def _drop_names(namespace: dict[str, Any], then: Mapping[str, Any]) -> None:
    for name in [name for name in namespace if name not in then]:
        del namespace[name]


def _write_names(namespace: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Set attributes one by one: another thread may look at them meanwhile, and their order does not matter."""
    _drop_names(namespace, then)
    ENTRIES.write(namespace, then)


def _same_list(entries: Any, then: list[Any]) -> bool:
    return length_of(entries) == len(then) and all(map(is_, entries_of(entries), then))


def _write_list(entries: Any, then: list[Any]) -> None:
    if isinstance(entries, list):
        list.__setitem__(entries, slice(None), then)
    else:
        deque.clear(entries)
        deque.extend(entries, then)


def _write_set(entries: Any, then: set[Any]) -> None:
    set.clear(entries)
    set.update(entries, then)


def _by_name(read: Callable[[Any, str], Any], write: Callable[..., None], remove: Callable[..., None]) -> Kind:
    """The values of some names of an owner."""

    def same(owner: Any, then: Mapping[str, Any]) -> bool:
        return all(read(owner, name) is value for name, value in then.items())

    def write_changed(owner: Any, then: Mapping[str, Any]) -> None:
        for name, value in then.items():
            if read(owner, name) is value:
                continue
            if value is ABSENT:
                remove(owner, name)
            else:
                write(owner, name, value)

    return Kind(same, write_changed, dict.values, read)


def dict_of_thread(local: Any) -> dict[str, Any]:
    """The attributes that this thread sees in a ``threading.local``."""
    found: dict[str, Any] = vars(local)
    return found


def _keep_it(*_: Any) -> None:
    """Do nothing."""


def _content(cell: CellType, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


def slot(owner: Any, name: str) -> Any:
    """What is in a slot, or a mark if there is nothing."""
    return attribute_of(owner, name, ABSENT)


_DICT = Kind(_same_entries, _write_entries, dict.values)
_NAMESPACE = Kind(_same_entries, _write_names, dict.values)
_TENSORS = Kind(_same_entries, _write_entries)
_LIST = Kind(_same_list, _write_list, iter)
_SET = Kind(lambda now, then: set(map(id, entries_of(now))) == set(map(id, then)), _write_set)
_ARRAY = Kind(
    lambda now, then: np.ndarray.tobytes(now) == np.ndarray.tobytes(then),
    lambda now, then: np.ndarray.__setitem__(now, ..., then),
)
_BYTES = Kind(
    lambda now, then: bytes(memoryview(now)) == bytes(memoryview(then)),
    lambda now, then: _bytes_base(now).__setitem__(now, slice(None), then),
)
ENTRIES = _by_name(lambda names, name: names.get(name, ABSENT), dict.__setitem__, dict.__delitem__)
"""Some entries of a namespace; of a class; the variable of a closure, whatever it is called."""
CLASS_ENTRIES = _by_name(lambda kind, name: vars(kind).get(name, ABSENT), setattr, delattr)
SLOTS = _by_name(slot, object.__setattr__, object.__delattr__)
ATTRIBUTE = _by_name(lambda owner, name: getattr(owner, name, ABSENT), setattr, delattr)
OWN_THREAD = _by_name(
    lambda owner, name: dict_of_thread(owner).get(name, ABSENT),
    lambda owner, name, value: dict_of_thread(owner).update({name: value}),
    lambda owner, name: dict_of_thread(owner).pop(name),
)
"""Attributes of a ``threading.local``, which differ from thread to thread."""
VARIABLE = _by_name(lambda variable, _: variable.get(ABSENT), lambda variable, _, value: variable.set(value), _keep_it)
REFERENT = _by_name(lambda reference, _: reference(), _keep_it, _keep_it)
"""What a context variable has now, and what a weak reference refers to; nobody can set these back to nothing."""
CELL = _by_name(
    _content,
    lambda cell, _, value: setattr(cell, "cell_contents", value),
    lambda cell, _: delattr(cell, "cell_contents"),
)


# -------------------------------------------------------------------- what is followed


def _look_for(kind: type) -> Callable[[Snapshot, Any], None] | None:
    """The way to look at values of a type; None if nothing about them can change or matters."""
    is_librarys = kind.__module__.partition(".")[0] in _LIBRARIES
    other: Callable[[Snapshot, Any], None] | None = Snapshot._object
    if is_librarys and kind.__module__ not in ("types", "collections", "weakref", "__main__"):
        other = next((look for base, look in _FILLED if issubclass(kind, base)), None)
    found = next((look for base, look in _KINDS if issubclass(kind, base)), other)
    if is_librarys:  # others may be gone some day
        _LOOKS[kind] = found
    return found


_FILLED: tuple[tuple[type | tuple[type, ...], Callable[[Snapshot, Any], None]], ...] = (
    ((list, deque), Snapshot._list),
    (dict, Snapshot._dict),
    (set, Snapshot._set),
    ((tuple, frozenset), Snapshot._tuple),
)
_KINDS: tuple[tuple[Any, Callable[[Snapshot, Any], None] | None], ...] = (
    (type, Snapshot._class),
    ((bytearray, array), Snapshot._bytes),
    ((*PLAIN, ModuleType, BaseException, Dataset, DataLoader), None),
    (torch.Tensor, Snapshot._tensor),
    (nn.Module, Snapshot._module),
    (np.ndarray, Snapshot._array),
    (GENERATORS, Snapshot._generator),
    (FunctionType, Snapshot._function),
    ((MethodType, BuiltinMethodType), Snapshot._method),
    (partial, Snapshot._partial),
    (ContextVar, Snapshot._variable),
    (ReferenceType, Snapshot._reference),
)
_OBJECTS = tuple(look for base, look in _KINDS if base is not GENERATORS)
_LOOKS: dict[type, Callable[[Snapshot, Any], None] | None] = {
    **dict.fromkeys(PLAIN), list: Snapshot._list, dict: Snapshot._dict, tuple: Snapshot._tuple,
}  # fmt: skip


def _values_of(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Attributes of the user's. What functions among them refer to does not count, like code of classes."""
    for name, value in attributes.items():
        is_ours = name in private.STRUCTURE or name in _OURS_TO_KEEP
        if not is_ours and not issubclass(type(value), (FunctionType, MethodType, partial)):
            yield value


def code_of(modules: Iterable[nn.Module]) -> Iterator[FunctionType]:
    """Functions in the user's own classes of modules."""
    kinds = dict.fromkeys(base for module in modules for base in type(module).__mro__ if _is_own(base))
    return (entry for kind in kinds for entry in vars(kind).values() if isinstance(entry, FunctionType))


@cache
def is_users(filename: str) -> bool:
    """True if code is neither torch's nor Python's nor ours, nor that of a test's runner."""
    # An ``assert`` in a forward that pytest has rewritten leads to all tests of the session.
    if filename.startswith(_TORCHS_AND_OURS) or f"{os.sep}_pytest{os.sep}" in filename:
        return False
    return not filename.startswith(_PYTHONS) or "-packages" in filename


_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCHS_AND_OURS = (f"{Path(torch.__file__).parent}{os.sep}", _OURS)
_PYTHONS = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def _is_own(kind: type) -> bool:
    """True if a class comes from the user's own files."""
    return "-packages" not in (getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def is_users_class(kind: type) -> bool:
    """True if a class is neither torch's nor Python's nor ours."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""  # a notebook has none
    return kind.__module__ != "builtins" and is_users(file)


@lru_cache(maxsize=1024)
def _data_in(kind: type, _: int) -> list[str]:
    """Names of the data in a class of the user's; the number of all its attributes only tells of new ones."""
    if not is_users_class(kind):
        return []
    return [name for name, value in vars(kind).items() if issubclass(type(value), _DATA) and not name.startswith("__")]


def namespace_of(holder: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes, or None. Runs no code of the object's class."""
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class; none of a library's."""
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return []
    # Not __slots__, in which private names are not spelled as they are looked up, and which may be used up.
    return [
        name
        for base in kind.__mro__
        for name, entry in vars(base).items()
        if type(entry) is MemberDescriptorType and base is not object
    ]


_SETS = ("STORE_GLOBAL", "DELETE_GLOBAL")


@lru_cache(maxsize=4096)
def globals_of(code: CodeType, *, only_set: bool = False) -> tuple[str, ...]:
    """Names that code, and functions in it, look up or set among globals. Names of attributes are not among them."""
    return tuple(dict.fromkeys(_names_in(code, _SETS if only_set else ("LOAD_GLOBAL", "LOAD_NAME", *_SETS))))


def _names_in(code: CodeType, operations: Collection[str]) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname in operations:
            yield str(step.argval)
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names_in(inside, operations)
