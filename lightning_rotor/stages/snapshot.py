"""Remember, compare and put back what user code can reach and change besides buffers and parameters.

The library runs user code more often than the user does: it records, measures, and recomputes. What such a run
changes must not show::

    module ──► attributes ──► lists, dicts, sets, deques, arrays, tensors, generators, user objects, and what is in them
          └──► hooks ──► variables of enclosing functions, globals that they name, defaults, bound objects, partial's

Objects keep their identity: contents go back into the very list that had them. Not followed are the libraries' own
objects (torch's, NumPy's, the Trainer, data sets and loaders), children of a module that a hook refers to, code of
classes (unless asked for) and in attributes, and what holds locks, files or threads. Small tensors and arrays are
copied; of a larger tensor only its version is known.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_rotor.errors import ExecutionError
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import bytes_of, is_fake, uncounted_copy
from lightning_rotor.stages.containers import copy_of_bytes, entries_of, items_of, length_of
from lightning_rotor.stages.generators import rewinding
from lightning_rotor.stages.holders import (
    ARRAY,
    BYTES,
    CELL,
    CLASS_ENTRIES,
    CLASS_NAMES,
    DICT,
    ENTRIES,
    GENERATORS,
    LIBRARIES,
    LIST,
    NAMESPACE,
    PLAIN,
    SET,
    SLOTS,
    TENSORS,
    VARIABLE,
    Kind,
    drop_names,
    namespace_of,
    slots_of,
)
from lightning_rotor.stages.user_code import OUR_FOLDER, functions_of, globals_of, is_own, is_users, is_users_class

SMALL_BYTES = 64 * 1024
"""Below this, remembering costs less than thinking about it."""
MOST_ENTRIES = 1_000
"""A longer list or dict is put back, but its entries are not followed."""
_MUCH_BYTES = 64 * 1024**2
_MOST_VALUES = 20_000

_OURS_TO_KEEP = frozenset(("_lightning_rotor", "training"))
_DATA = (*PLAIN, list, dict, set, deque, tuple, torch.Tensor, np.ndarray, nn.Module, type, ContextVar, *GENERATORS)
"""Types of attributes for which an object of a library is followed: it holds nothing but data."""
_TORCHS_LAYERS = "torch.nn.modules."
_OURS = "lightning_rotor."


class Snapshot:
    """Everything that code of some modules and their hooks can reach, as it is now.

    Args:
        roots: Modules, without those inside of them; or functions, containers and other objects.
        objects: Tensors, functions, modules and other objects count as well, not only containers and generators.
        code: So does what methods of the user's own classes name, of modules and of other objects.
        small_bytes: Tensors and arrays up to this size are copied.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        hooks: bool = True,
        objects: bool = True,
        code: bool = False,
        also: Iterable[object] = (),
        small_bytes: int = _MUCH_BYTES,
    ) -> None:
        self._roots = tuple(roots)
        self._hooks = hooks
        self._follows_objects = objects
        self._follows_code = code
        self._small_bytes = small_bytes
        # Rows of a kind, an owner and its content.
        self._kept: list[tuple[Kind, Any, Any]] = []
        # Rows of a tensor, its version and a copy.
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        # Functions that set a generator back.
        self._generators: list[Callable[[], object]] = []
        # By id, kept alive so that no other thing gets it.
        self._seen: dict[int, Any] = {}
        self.objects: set[int] = set()
        self._pending: list[Any] = []
        self._look(also)

    def again(self) -> Snapshot:
        """A new snapshot of what this one has seen, and of what can be reached now."""
        return Snapshot(self._roots, code=self._follows_code, also=self._seen.values(), small_bytes=self._small_bytes)

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
        # Last, so that all the rest is back whoever catches this.
        if lost is not None:
            raise _lost(lost)

    def lend(self) -> None:
        """Put everything back, but with copies in the place of small tensors and arrays, which may then change."""
        # Copies of the copies, as there may be another replay after this one.
        loans: dict[int, Any] = {}
        for tensor, _, copy in self._tensors:
            if copy is not None:
                loans[id(tensor)] = copy.clone()
        for kind, owner, content in self._kept:
            if kind is ARRAY:
                loans[id(owner)] = content.copy()
        self._put(loans, ())

    def rewind(self) -> None:
        """Put everything back but tensors."""
        self._put({}, ())

    def _put(self, loans: Mapping[int, Any] | None, leaving: Collection[int]) -> None:
        for kind, owner, content in self._kept:
            if id(owner) in leaving or (loans and kind is ARRAY):
                continue
            if kind is TENSORS and loans is not None:
                # Others may stand there in a second run: gathered by FSDP, or lent.
                drop_names(owner, content)
            else:
                kind.put(owner, _with_loans(content, loans) if loans else content)
        for rewind in self._generators:
            rewind()

    def changed_large(self) -> list[Any]:
        """Long containers and large arrays that have changed."""
        changed = []
        for kind, owner, content in self._kept:
            if _is_large(kind, content) and not kind.same(owner, content):
                changed.append(owner)
        return changed

    @property
    def copied(self) -> list[torch.Tensor]:
        """Tensors of which there are copies."""
        return [tensor for tensor, _, copy in self._tensors if copy is not None]

    def changed(self) -> set[int]:
        """Things that have changed, by ``id``."""
        changed = {id(tensor) for tensor, _ in self._changed_tensors()}
        for kind, owner, content in self._kept:
            if not kind.same(owner, content):
                changed.add(id(owner))
        return changed

    @property
    def owners(self) -> set[int]:
        """Things in it that can change, by ``id``."""
        tensors = {id(tensor) for tensor, _, _ in self._tensors}
        return tensors | {id(owner) for _, owner, _ in self._kept}

    def require_undoable(self) -> None:
        """Raise ``ExecutionError`` if a tensor has changed whose earlier value is gone, or cannot be lent."""
        for tensor in self.gone():
            raise _lost(tensor)

    def gone(self) -> list[torch.Tensor]:
        """Tensors that have changed and cannot be put back or lent."""
        changed = self._changed_tensors()
        if not changed:
            return []
        # A copy can be lent where a container or an attribute has the tensor.
        in_containers: set[int] = set()
        for kind, _, content in self._kept:
            in_containers.update(map(id, kind.values(content)))
        gone = []
        for tensor, copy in changed:
            if copy is None or tensor.nbytes > SMALL_BYTES or id(tensor) not in in_containers:
                gone.append(tensor)
        return gone

    def _changed_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        # By versions: of large tensors there is no copy to compare with.
        changed = []
        for tensor, version, copy in self._tensors:
            if private.version_of(tensor) != version:
                changed.append((tensor, copy))
        return changed

    def _look(self, also: Iterable[object]) -> None:
        """Follow everything from the roots."""
        # A loop in the place of recursion, as chains of objects may be longer than Python's stack. This is done before
        # every run that must leave no trace, so looking at a value is one call, chosen by its type.
        modules = [root for root in self._roots if isinstance(root, nn.Module)]
        self._seen.update((id(module), module) for module in modules)
        for module in modules:
            self._root_module(module)
        self._pending += {type(module) for module in modules}
        if self._hooks:
            self._hook_tables(private.hook_tables(None))
        self._pending += (*also, *self._roots)
        left_out = () if self._follows_objects else _LOOKS_AT_OBJECTS
        # Bounded, for everything may hang together with everything.
        while self._pending and len(self._seen) < _MOST_VALUES:
            value = self._pending.pop()
            kind = type(value)
            look = _LOOKS[kind] if kind in _LOOKS else _look_for(kind)
            if look is not None and id(value) not in self._seen and look not in left_out:
                self._seen[id(value)] = value
                look(self, value)

    def _keep(self, kind: Kind, owner: Any, content: Any) -> None:
        """Remember a content, and follow its values."""
        # The very values, and no copies: what is in them is remembered with an owner of its own.
        self._kept.append((kind, owner, content))
        self._pending += kind.values(content)

    def _root_module(self, module: nn.Module) -> None:
        # It keeps what it has in C++.
        if isinstance(module, torch.jit.ScriptModule):
            return
        attributes = module.__dict__
        if self._hooks:
            self._hook_tables(private.hook_tables(module))
            for parameter in attributes["_parameters"].values():
                if parameter is not None:
                    self._pending += private.gradient_hooks(parameter)
        if type(module).__module__.startswith(_OURS):
            # A Checkpointable has its module as a plain attribute.
            self._pending += [value for value in attributes.values() if isinstance(value, nn.Module)]
            return
        self._kept.append((NAMESPACE, attributes, dict(attributes)))
        self._kept.append((DICT, attributes["_modules"], dict(attributes["_modules"])))
        # Which tensors stand there. Their values are copied by others, see kept_parameters and lent_buffers.
        for name in ("_parameters", "_buffers"):
            self._kept.append((TENSORS, attributes[name], dict(attributes[name])))
        self._pending += _users_values(attributes)

    def _module(self, module: nn.Module) -> None:
        """Look at a module that is referred to: its hooks are not called, and nobody else sees to its buffers."""
        is_known = type(module).__module__.startswith((_TORCHS_LAYERS, _OURS))
        if is_known or isinstance(module, torch.jit.ScriptModule):
            return
        attributes = module.__dict__
        # Its class may hold data that all its objects share, such as a counter.
        self._pending.append(type(module))
        self._kept.append((NAMESPACE, attributes, dict(attributes)))
        self._keep(DICT, attributes["_buffers"], dict(attributes["_buffers"]))
        self._pending += _users_values(attributes)

    def _hook_tables(self, tables: Iterable[dict[int, Any]]) -> None:
        # The tables too, as a hook may remove itself, or register another one.
        for table in tables:
            self._kept.append((DICT, table, dict(table)))
            self._pending += table.values()

    def _list(self, value: Any) -> None:
        entries = entries_of(value)
        self._kept.append((LIST, value, entries))
        if len(entries) <= MOST_ENTRIES:
            self._pending += entries

    def _dict(self, value: Any) -> None:
        entries = dict(items_of(value))
        self._kept.append((DICT, value, entries))
        if len(entries) <= MOST_ENTRIES:
            self._pending += entries.values()

    def _set(self, value: Any) -> None:
        # Its entries are not followed: they have a hash, and what may change seldom has one.
        # set() calls no method of a subclass.
        self._kept.append((SET, value, set(value)))

    def _tuple(self, value: Any) -> None:
        if length_of(value) <= MOST_ENTRIES:
            self._pending += entries_of(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        # Without values, without a version, or copied by others (kept_parameters).
        # torch counts no versions in inference mode, so nothing would tell of a change.
        if is_fake(tensor) or tensor.is_inference() or isinstance(tensor, nn.Parameter):
            return
        # Of what requires a gradient, a copy that is written back would be an operation of autograd's.
        is_dense = tensor.layout is torch.strided
        copy = None
        if is_dense and bytes_of(tensor) <= self._small_bytes and not tensor.requires_grad:
            # Not in the memory of torch's allocator, whose peak is measured.
            copy = uncounted_copy(tensor) if tensor.is_contiguous() else tensor.detach().clone()
        self._tensors.append((tensor, private.version_of(tensor), copy))

    def _array(self, array: Any) -> None:
        # The bytes of an array of objects are addresses.
        if array.nbytes <= self._small_bytes and array.dtype != object:
            self._kept.append((ARRAY, array, np.ndarray.copy(array)))

    def _bytes(self, value: Any) -> None:
        self._kept.append((BYTES, value, copy_of_bytes(value)))

    def _class(self, kind: type) -> None:
        """Look at the data that a class of the user's, or one that it is made from, has in its attributes."""
        for base in kind.__mro__:
            if is_users_class(base):
                self._kept.append((CLASS_NAMES, base, frozenset(vars(base))))
            # Code of packages names half of them.
            if self._follows_code and is_own(base):
                self._pending += functions_of(base)
            names = _data_in(base, len(vars(base)))
            if names:
                self._keep(CLASS_ENTRIES, base, _read_all(CLASS_ENTRIES, base, names))

    def _generator(self, generator: Any) -> None:
        rewind = rewinding(generator)
        if rewind is not None:
            self._generators.append(rewind)

    def _function(self, function: FunctionType) -> None:
        """Look at a function: variables around it, defaults, attributes, globals."""
        code = function.__code__
        # Variables of this library are none of the user's, and lead to everything.
        if code.co_filename.startswith(OUR_FOLDER):
            return
        for cell in function.__closure__ or ():
            self._keep(CELL, cell, {"": CELL.read(cell, "")})
        self._pending += function.__defaults__ or ()
        self._pending += (function.__kwdefaults__ or {}).values()
        self._keep(NAMESPACE, function.__dict__, dict(function.__dict__))
        if is_users(code.co_filename):
            self._keep(ENTRIES, function.__globals__, _read_all(ENTRIES, function.__globals__, globals_of(code)))

    def _method(self, method: Any) -> None:
        if isinstance(method, MethodType):
            self._pending.append(method.__func__)
        # A built-in function has its module there.
        if not isinstance(method.__self__, ModuleType):
            self._pending.append(method.__self__)

    def _partial(self, function: partial[Any]) -> None:
        self._pending += (function.func, *function.args)
        self._dict(function.keywords)

    def _variable(self, variable: ContextVar[Any]) -> None:
        self._keep(VARIABLE, variable, {"": VARIABLE.read(variable, "")})

    def _reference(self, reference: ReferenceType[Any]) -> None:
        # A gone referent is None, which is followed no further.
        self._pending.append(reference())

    def _object(self, value: Any) -> None:
        """Look at an object of the user's, or of a library if it holds nothing but data."""
        kind = type(value)
        if self._follows_objects:
            namespace = namespace_of(value)
            if self._follows_code and is_own(kind):
                self._pending.append(kind)
            if namespace is not None and (is_own(kind) or _holds_data(namespace)):
                self.objects.add(id(namespace))
                self._keep(NAMESPACE, namespace, dict(namespace))
            slots = slots_of(kind)
            if slots:
                self._keep(SLOTS, value, _read_all(SLOTS, value, slots))
        for base, look in _CONTAINERS:
            if issubclass(kind, base):
                look(self, value)


def _read_all(kind: Kind, owner: Any, names: Iterable[str]) -> dict[str, Any]:
    """The values that an owner has under some names."""
    return {name: kind.read(owner, name) for name in names}


def _holds_data(namespace: Mapping[str, Any]) -> bool:
    # Not isinstance, which asks an object for its class, and a proxy gives another.
    return all(issubclass(type(value), _DATA) for value in namespace.values())


def _is_large(kind: Kind, content: Any) -> bool:
    if kind is ARRAY:
        return bool(content.nbytes > SMALL_BYTES)
    # The content is a container of Python's own, so that len() is safe.
    return kind in (LIST, DICT, SET) and len(content) > MOST_ENTRIES


def _with_loans(content: Any, loans: Mapping[int, Any]) -> Any:
    if isinstance(content, dict):
        return {key: loans.get(id(value), value) for key, value in content.items()}
    if isinstance(content, list):
        return [loans.get(id(value), value) for value in content]
    return content


def _lost(tensor: torch.Tensor) -> ExecutionError:
    return ExecutionError(
        f"a forward or a hook changes a tensor of shape {tuple(tensor.shape)} in place that is no buffer, so "
        "its earlier value is gone and the forward cannot run again: expected register_buffer for it, or an "
        "attribute that is set anew (self.state = new)"
    )


def _users_values(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Attributes of the user's. What functions among them refer to does not count, like code of classes."""
    for name, value in attributes.items():
        is_ours = name in private.STRUCTURE or name in _OURS_TO_KEEP
        is_function = issubclass(type(value), (FunctionType, MethodType, partial))
        if not is_ours and not is_function:
            yield value


@lru_cache(maxsize=1024)
def _data_in(kind: type, _: int) -> list[str]:
    """Names of the data in a class of the user's; the number of all its attributes only tells of new ones."""
    if not is_users_class(kind):
        return []
    attributes = vars(kind).items()
    return [name for name, value in attributes if _is_data(type(value)) and not name.startswith("__")]


def _is_data(kind: type) -> bool:
    """True of values that a class holds as its data: plain ones, and objects of the user's but for descriptors."""
    return issubclass(kind, _DATA) or (is_users_class(kind) and not hasattr(kind, "__get__"))


_Look: TypeAlias = Callable[[Snapshot, Any], None]
_CONTAINERS: tuple[tuple[type | tuple[type, ...], _Look], ...] = (
    ((list, deque), Snapshot._list),
    (dict, Snapshot._dict),
    (set, Snapshot._set),
    ((tuple, frozenset), Snapshot._tuple),
)
_OTHERS: tuple[tuple[Any, _Look | None], ...] = (
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
_LOOKS_AT_OBJECTS = tuple(look for base, look in _OTHERS if base is not GENERATORS)
_LOOKS: dict[type, _Look | None] = dict.fromkeys(PLAIN)
"""The look at values of each type, as far as it was asked. Nearly all values are of a type in here."""
_LOOKS.update({list: Snapshot._list, dict: Snapshot._dict, tuple: Snapshot._tuple})
_LIBRARIES_OF_DATA = ("types", "collections", "weakref", "__main__")
"""Modules of Python whose objects are followed like the user's."""


def _look_for(kind: type) -> _Look | None:
    """The way to look at values of a type; None if nothing about them can change or matters."""
    is_librarys = kind.__module__.partition(".")[0] in LIBRARIES
    # In the order of the table: a data set is none of the objects that are followed, whoever wrote its class.
    listed = [look for base, look in _OTHERS if issubclass(kind, base)]
    look: _Look | None
    if listed:
        look = listed[0]
    elif is_librarys and kind.__module__ not in _LIBRARIES_OF_DATA:
        look = _look_for_container(kind)
    else:
        look = Snapshot._object
    # A class of the user's may be gone some day.
    if is_librarys:
        _LOOKS[kind] = look
    return look


def _look_for_container(kind: type) -> _Look | None:
    for base, look in _CONTAINERS:
        if issubclass(kind, base):
            return look
    return None
