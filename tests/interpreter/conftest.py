"""Collected only by tests/test_interpreter.py, whose process has the interpreter on.

Triton's interpreter spends most of a launch on bookkeeping: with what is replaced here and in
tests/interpreter/operators.py, the tests take a quarter of the time.
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


def _replace_once() -> None:
    """Keeps the interpreter from replacing the functions of `triton.language` again at every call
    of a device function, of 0.4 ms each: a launch makes about 60 such calls. They stay replaced
    between launches."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    replaced: set[int] = set()

    @functools.cache
    def languages(fn: Any) -> frozenset[int]:
        """Returns the ids of the modules whose functions are replaced for `fn`."""
        named = {id(value) for value in fn.__globals__.values()}
        return frozenset(named & {id(tl), id(tl.core)})

    def replace_once(fn: Any) -> Any:
        if not languages(fn) or not languages(fn) <= replaced:
            replace(fn)
            replaced.update(languages(fn))
        return interpreter._LangPatchScope()  # which restores nothing

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
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.interpreter.operators import fast_operator

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        bare = getattr(member, "__wrapped__", member)  # without the check of `_semantic`

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return bare(*args, **kwargs)

        is_operator = obj is tl.tensor and name.startswith("__")
        scope.set_attr(obj, name, fast_operator(name, call) if is_operator else call)

    interpreter._patch_attr = patch


def _let_integers_overflow() -> None:
    """Leaves out the check of each integer sum and product, a fifth of a run: it reports in
    Triton's debug mode alone."""
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


if IS_INTERPRETED:
    _replace_once()
    _remember_types()
    _call_at_once()
    _let_integers_overflow()
    from tests.interpreter.operators import use_shortcuts

    use_shortcuts()
