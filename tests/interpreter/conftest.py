"""Collected only by tests/test_interpreter.py, whose process has the interpreter on.

Triton's interpreter spends most of a launch on bookkeeping: with what is replaced here, the tests
take half of the time.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest

from kernels.backend import IS_INTERPRETED, allow_triton

collect_ignore_glob = [] if IS_INTERPRETED else ["*"]


@pytest.fixture(scope="module", autouse=True)
def allowed_triton() -> None:
    """Lets each file begin as in a process of its own: a runner of the reference sets the choice
    for the whole process, and kernels' tests would compare the reference with itself."""
    allow_triton(True)


@pytest.fixture(scope="session", autouse=True)
def few_programs() -> Iterator[None]:
    """Reduces the programs that walk the tiles: thousands, as on a device, are slow here, one after
    the other."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("embed", "expand", "head", "rope_kv_write", "shrink", "silu_mul"):
            module = importlib.import_module(f"kernels.triton_lora_{name}")
            patched.setattr(module, "NUM_PROGRAMS", 16)
        yield


def _replace_once_a_launch() -> None:
    """Keeps the interpreter from replacing the functions of `triton.language` again at every call
    of a device function: a launch makes about 60 such calls, of 0.4 ms each."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    replaced: set[int] = set()  # empty between launches

    @functools.cache
    def languages(fn: Any) -> frozenset[int]:
        """Returns the ids of the modules whose functions are replaced for `fn`."""
        named = {id(value) for value in fn.__globals__.values()}
        return frozenset(named & {id(tl), id(tl.core)})

    def replace_once(fn: Any) -> Any:
        if languages(fn) and languages(fn) <= replaced:
            return interpreter._LangPatchScope()
        is_launch = not replaced
        scope = replace(fn)
        replaced.update(languages(fn))
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = replace_once


def _remember_types() -> None:
    """Keeps the interpreter from describing the types and shapes of each value anew."""
    import triton.language as tl
    from triton.runtime import interpreter

    np_dtype = interpreter._get_np_dtype
    np_dtypes: dict[str, Any] = {}

    def known_np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(type)
        return np_dtypes[name]

    interpreter._get_np_dtype = known_np_dtype

    @functools.cache
    def tensor(*shape: int) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.core.tuple([tl.constexpr(n) for n in shape])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensor(*(type.shape if type.is_block() else ()))

    @functools.lru_cache(maxsize=None, typed=True)
    def block(element: str, *shape: Any) -> tuple[Any, int, str]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        sizes = tl.core.tuple(tl.core._unwrap_shape(shape))
        return sizes, tl.core.validate_block_shape(sizes), f"<{sizes}, {element}>"

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = block(element_ty.name, *shape)

    tl.tensor.__init__ = init_tensor
    tl.block_type.__init__ = init_block


def _call_at_once() -> None:
    """Passes the interpreter's semantics on without a copy of the arguments."""
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        bare = getattr(member, "__wrapped__", member)  # without the check of `_semantic`

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return bare(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _remember_operands() -> None:
    """Keeps the interpreter from deciding again, for each pair of operands, which type and shape
    they take, and from making each constant anew. Pairs that need a cast take the usual way."""
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    check, broadcast = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
    )
    cast = TritonSemantic.cast
    whole = {"int32", "int64"}
    floats = {"fp16", "fp32"}
    alike = whole | floats | {"int1", "int8", "int16", "uint8", "uint32"}
    divided = alike - {"int1", "fp16"}  # a half is divided as a float
    sizes_of: dict[int, tuple[int, ...]] = {}  # of the shapes that `_remember_types` keeps

    def sizes(shape: Any) -> tuple[int, ...]:
        if id(shape) not in sizes_of:
            sizes_of[id(shape)] = tuple(size.value for size in shape)
        return sizes_of[id(shape)]

    @functools.cache
    def constant(value: float, kind: type, type: Any, shape: tuple[int, ...]) -> Any:
        """Returns the handle of a constant, which no operation may write to."""
        data = np.full(shape or (1,), value, dtype=interpreter._get_np_dtype(type))
        data.setflags(write=False)
        return interpreter.TensorHandle(data, type)

    def takes_type_of(number: Any, name: str) -> bool:
        """Returns True if a block and a number give the block's type."""
        if type(number) is int:  # Triton refuses one beyond 64 bits, whatever the block
            most = 2**63 if name in floats else 2**31
            return name in floats | whole and -most <= number < most
        is_negative_zero = number == 0 and math.copysign(1, number) < 0  # equal to 0 in the cache
        return type(number) is float and name in floats and not is_negative_zero

    def filled(number: Any, block: Any) -> Any:
        handle = constant(number, type(number), block.dtype, sizes(block.shape))
        return tl.tensor(handle, block.type)

    def remembered_check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        known = divided if div_or_mod else alike
        if isinstance(lhs, tl.tensor):
            name = lhs.dtype.name
            if isinstance(rhs, tl.tensor):
                other = rhs.dtype.name
                if (other == name and name in known) or (
                    allow_lhs_ptr and other in whole and lhs.dtype.is_ptr()
                ):
                    return remembered_broadcast(self, lhs, rhs)
            elif arithmetic_check and name in known and takes_type_of(rhs, name):
                return lhs, filled(rhs, lhs)
        elif isinstance(rhs, tl.tensor) and arithmetic_check:
            name = rhs.dtype.name
            if name in known and takes_type_of(lhs, name):
                return filled(lhs, rhs), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    @functools.cache
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
        return np.broadcast_shapes(left, right)

    def spread(value: Any, shape: tuple[int, ...]) -> Any:
        """Returns a scalar or a block in a larger shape."""
        data = value.handle.data
        if value.type.is_block():
            data = np.broadcast_to(data, shape)
        else:
            data = np.full(shape, data, dtype=data.dtype)
        handle = interpreter.TensorHandle(data, value.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(value.dtype, shape))

    def remembered_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = sizes(lhs.shape), sizes(rhs.shape)
        try:
            shape = common(left, right)
        except ValueError:
            return broadcast(self, lhs, rhs)  # which names the dimension
        return (
            lhs if left == shape else spread(lhs, shape),
            rhs if right == shape else spread(rhs, shape),
        )

    def remembered_cast(self: Any, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        if input.dtype is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, *rounding, **named)

    TritonSemantic.binary_op_type_checking_impl = remembered_check
    TritonSemantic.broadcast_impl_value = remembered_broadcast
    TritonSemantic.cast = remembered_cast


def _let_integers_overflow() -> None:
    """Leaves out the check of each integer sum and product, a fifth of a run: it reports in
    Triton's debug mode alone."""
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if IS_INTERPRETED:
    _replace_once_a_launch()
    _remember_types()
    _remember_operands()
    _call_at_once()
    _let_integers_overflow()
