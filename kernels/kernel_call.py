"""A call of a Triton or Gluon kernel as far as its compilation depends on it: types, alignment and
constants, no data.

Equal calls share one binary. A call travels as JSON to the processes that compile it, and stands
for a real launch in the tests. The rules by which a value belongs to the binary are Triton's own: a
constant by its value, an integer by its width, by being 1 and by being a multiple of 16, a pointer
by its type and by being a multiple of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

_INT32 = 2**31
_WIDE = 2**40  # stands for integers that need 64 bits
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor: its type, as torch names it, and whether its address is a multiple of 16."""

    dtype: str
    is_aligned: bool = True


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor descriptor of the bulk copy engine: the box that one copy moves, and its layout in
    shared memory by the fields of Gluon's `NVMMASharedLayout`."""

    dtype: str
    box: tuple[int, ...]
    layout: tuple[tuple[str, Any], ...]


Scalar = int | float | bool | str | None
Argument = Pointer | Descriptor | Scalar


@dataclass(frozen=True, slots=True)
class KernelCall:
    module: str  # "kernels.triton_silu_mul"
    name: str  # "_silu_mul_kernel"
    arguments: tuple[Argument, ...]  # by position
    options: tuple[tuple[str, Scalar], ...]  # constants by name, and options of the compiler

    def kernel(self) -> Any:
        return getattr(import_module(self.module), self.name)

    def to_json(self) -> dict[str, object]:
        return {
            "module": self.module,
            "name": self.name,
            "arguments": [_to_json(argument) for argument in self.arguments],
            "options": [list(pair) for pair in self.options],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KernelCall:
        return cls(
            value["module"],
            value["name"],
            tuple(_from_json(argument) for argument in value["arguments"]),
            tuple((name, option) for name, option in value["options"]),
        )


def describe_call(
    kernel: Any, arguments: Sequence[object], options: Mapping[str, object]
) -> KernelCall:
    """Describes `kernel[grid](*arguments, **options)`. The options keep their order: it is part of
    the key by which a process finds a kernel that it has compiled or read."""
    function = kernel.fn
    parameters = _parameters(function.__module__, function.__name__)
    found = tuple(
        _describe(value, parameter) for value, parameter in zip(arguments, parameters, strict=False)
    )
    named = {parameter.name: parameter for parameter in parameters}
    given = tuple(
        (name, value if name not in named else _describe(value, named[name]))
        for name, value in options.items()
    )
    return KernelCall(function.__module__, function.__name__, found, given)  # type: ignore[arg-type]


def binary_key(kernel: Any, arguments: Sequence[object]) -> tuple[object, ...]:
    """Returns a key of the arguments by position, equal where `describe_call` finds equal calls, in
    a quarter of its time. The layout of a descriptor follows from its type and its box here."""
    function = kernel.fn
    parameters = _parameters(function.__module__, function.__name__)
    key: list[object] = []
    for value, parameter in zip(arguments, parameters, strict=False):
        if parameter.is_constant or value is None or isinstance(value, bool):
            key += (type(value), value)
        elif isinstance(value, torch.Tensor):
            key += (value.dtype, not value.data_ptr() % _ALIGNMENT or not parameter.is_aligned)
        elif isinstance(value, float):
            key.append(float)
        elif isinstance(value, int):
            key.append(_class_of(value, parameter.is_specialized))
        else:
            key += (value.base.dtype, *value.block_shape)  # type: ignore[attr-defined]
    return tuple(key)


@cache
def constants_of(module: str, name: str, num_arguments: int) -> tuple[str, ...]:
    """Returns the names of the parameters behind so many arguments by position."""
    return tuple(parameter.name for parameter in _parameters(module, name)[num_arguments:])


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    is_constant: bool
    is_specialized: bool  # integers: by 1 and by multiples of 16
    is_aligned: bool  # pointers: by multiples of 16


@cache
def _parameters(module: str, name: str) -> tuple[_Parameter, ...]:
    kernel = getattr(import_module(module), name)
    # The interpreter's functions keep their decorator's arguments in `kwargs`.
    given = getattr(kernel, "kwargs", None) or vars(kernel)
    unspecialized = given.get("do_not_specialize") or ()
    unaligned = given.get("do_not_specialize_on_alignment") or ()
    return tuple(
        _Parameter(
            parameter,
            "constexpr" in str(signature.annotation),
            parameter not in unspecialized,
            parameter not in unaligned,
        )
        for parameter, signature in inspect.signature(kernel.fn).parameters.items()
    )


def _describe(value: object, parameter: _Parameter) -> Argument:
    if isinstance(value, torch.Tensor):
        is_aligned = value.data_ptr() % _ALIGNMENT == 0 or not parameter.is_aligned
        return Pointer(_name(value.dtype), is_aligned)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        layout = value.layout  # type: ignore[attr-defined]
        assert is_dataclass(layout)
        fields = tuple((name, _frozen(field)) for name, field in asdict(layout).items())  # type: ignore[arg-type]
        return Descriptor(_name(value.base.dtype), tuple(value.block_shape), fields)  # type: ignore[attr-defined]
    assert value is None or isinstance(value, int | float | bool | str), (
        f"{parameter.name}: {value!r}"
    )
    if parameter.is_constant or isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, float):
        return 0.5
    return _class_of(value, parameter.is_specialized)


def _class_of(value: int, is_specialized: bool) -> int:
    """Returns an integer that stands for all with which Triton compiles the same binary."""
    is_wide = not -_INT32 <= value < _INT32
    if not is_specialized:
        return _WIDE + 1 if is_wide else 2
    if value == 1:
        return 1
    remainder = 0 if value % _ALIGNMENT == 0 else 2
    return (_WIDE if is_wide else _ALIGNMENT) + remainder


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value


def _to_json(argument: Argument) -> object:
    if isinstance(argument, Pointer):
        return {"pointer": argument.dtype, "aligned": argument.is_aligned}
    if isinstance(argument, Descriptor):
        return {"descriptor": argument.dtype, "box": argument.box, "layout": argument.layout}
    return argument


def _from_json(value: Any) -> Argument:
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    if "pointer" in value:
        return Pointer(value["pointer"], value["aligned"])
    return Descriptor(value["descriptor"], tuple(value["box"]), _frozen(value["layout"]))
