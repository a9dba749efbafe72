"""Collected only by tests/test_interpreter.py, whose process has the interpreter on.

Triton's interpreter spends most of a launch on bookkeeping: with what is replaced here, the tests
take half of the time.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from kernels.backend import IS_INTERPRETED, allow_triton

collect_ignore_glob = [] if IS_INTERPRETED else ["*"]


@pytest.fixture(scope="module", autouse=True)
def allowed_triton() -> None:
    """Lets each file begin as in a process of its own: a runner of the reference sets the choice
    for the whole process, and kernels' tests would compare the reference with itself."""
    allow_triton(True)


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


def _let_integers_overflow() -> None:
    """Leaves out the check of each integer sum and product, a fifth of a run: it reports in
    Triton's debug mode alone."""
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if IS_INTERPRETED:
    _replace_once_a_launch()
    _remember_types()
    _call_at_once()
    _let_integers_overflow()
