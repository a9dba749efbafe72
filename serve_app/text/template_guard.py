"""A jinja sandbox that counts the work of a rendering, for templates that run on the event loop.

Every iteration, call, filter, operator and output is charged before it happens; a rendering that
exceeds its budget, or uses an operation whose cost cannot be bounded beforehand (`%`, `**`,
`center`, `indent`, ...), raises TemplateBudgetError. Such a template is valid: a worker process
under limits of the kernel may render it (see `text_workers`). Each thread has its own budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from functools import wraps
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

from engine.errors import InvalidRequestError

# A step is an iteration, a call or an operator, about 5 us at most; a character costs 30 ns at
# most. Ten messages in a common template cost 20,000 units; a whole budget is 40 ms.
STEP_COST = 200
FREE_WORK = 2_000_000
WORK_PER_CHARACTER = 64  # per character of the messages, which templates process about ten times
MAX_SOURCE_CHARS = 64 * 1024  # a longer template is never rendered here

_ELEMENT_COST = 32  # per element of a list that is read
_MAX_BITS = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters that read only the outermost list, of the messages for instance, not the texts in it.
_SHALLOW_FILTERS = _words(
    "abs attr count d default first float int items last length list map reject rejectattr reverse "
    "round select selectattr"
)
_DEEP_FILTERS = _words("capitalize e escape join lower replace safe string title tojson trim upper")
_CHEAP_TESTS = _words(
    "boolean callable defined divisibleby even false filter float integer iterable mapping none "
    "number odd sameas sequence string test true undefined"
)
_CHEAP_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper "
        "lower lstrip removeprefix removesuffix replace rfind rindex rsplit rstrip split "
        "splitlines startswith strip title upper"
    ),
    dict: _words("get items keys values"),
    list: _words("count index"),
}


class TemplateBudgetError(InvalidRequestError):
    """A rendering exceeds the work budget of the event loop."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param)


class _Budget(threading.local):
    left = 0

    def charge(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            refuse("it needs too much work")


BUDGET = _Budget()


def refuse(reason: str) -> NoReturn:
    raise TemplateBudgetError(f"The model's chat template cannot render these messages: {reason}")


def size_of(value: object) -> int:
    """Returns the approximate length of `str(value)`. The counting itself is charged, because a
    list may hold the same list a million times."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, bool) or value is None:
        return 8
    if isinstance(value, dict):
        BUDGET.charge(_ELEMENT_COST * len(value))
        return sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, list | tuple | ItemsView | KeysView | ValuesView):
        BUDGET.charge(_ELEMENT_COST * len(value))
        return sum(size_of(item) for item in value) + 4 * len(value)
    if isinstance(value, range):
        return _ELEMENT_COST * len(value)
    if isinstance(value, int):
        return 8 if value.bit_length() <= _MAX_BITS else refuse("it computes too large a number")
    if isinstance(value, float | Undefined | Macro | LoopContext):
        return 8
    if callable(value) or isinstance(value, _ChargedIterable):
        return 8
    return refuse(f"it handles a {type(value).__name__}")


class _ChargedIterable:
    """The values of a loop, each charged as a step."""

    def __init__(self, values: Iterable[object]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[object]:
        for value in self._values:
            BUDGET.charge(STEP_COST)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # jinja expects a TypeError


class GuardedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that charges the thread's budget. Call `guard_filters` after adding all filters."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return tree

    def guard_filters(self) -> None:
        self.filters = {
            name: _guarded_filter(name, function) for name, function in self.filters.items()
        } | {"_turns": _turns, "_touch": _touch, "_emit": _emit, "_concat": _concat}
        self.tests = {
            name: function if name in _CHEAP_TESTS else _deep(name, function)  # type: ignore[arg-type]
            for name, function in self.tests.items()
        }

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        BUDGET.charge(STEP_COST)
        if isinstance(left, str) and isinstance(right, str) and operator == "+":
            BUDGET.charge(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            BUDGET.charge(8 * (len(left) + len(right)))
        elif not (_is_number(left) and _is_number(right)) or operator == "**":
            refuse(f"it uses {operator} on values for which the cost is unknown")
        result: object = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            size_of(result)
        return result

    def call(
        __self,
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        _charge_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        size_of(value)
    return isinstance(value, int | float)


def _charge_call(function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    BUDGET.charge(STEP_COST + sum(map(size_of, args)) + sum(map(size_of, kwargs.values())))
    if isinstance(function, Macro | LoopContext | Undefined) or function is safe_range:
        return
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if name in _CHEAP_METHODS.get(type(owner), ()):
        size = size_of(owner)
        if name == "replace":
            size += _max_replaced(size, args)
        BUDGET.charge(2 * size)
    elif not getattr(function, "is_cheap", False):
        refuse(f"it calls {name or type(function).__name__}")


def _max_replaced(size: int, args: tuple[object, ...]) -> int:
    """Returns an upper bound of the characters that a replacement inserts."""
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return 0  # a TypeError follows
    return (size // max(1, len(args[0])) + 1) * len(args[1])


def _guarded_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    if name in _SHALLOW_FILTERS:
        return _shallow(function)
    return (_deep if name in _DEEP_FILTERS else _refusing)(name, function)


def _first_argument(function: Callable[..., object]) -> int:
    """Returns the index of the filtered value: 1 if jinja passes a context or environment first."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _shallow(function: Callable[..., object]) -> Callable[..., object]:
    first = _first_argument(function)

    @wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
        value = args[first] if len(args) > first else None
        BUDGET.charge(STEP_COST + (8 * len(value) if isinstance(value, Sized) else 0))
        if isinstance(value, Iterator):
            args = (*args[:first], list(_ChargedIterable(value)), *args[first + 1 :])
        return function(*args, **kwargs)

    return guarded


def _deep(name: str, function: Callable[..., object]) -> Callable[..., object]:
    first = _first_argument(function)

    @wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
        values: list[Any] = list(args)
        if len(values) > first and isinstance(values[first], Iterator):
            values[first] = list(_ChargedIterable(values[first]))
        sizes = [size_of(value) for value in values[first:]]
        named = sum(map(size_of, kwargs.values())) if kwargs else 0
        BUDGET.charge(STEP_COST + 2 * sum(sizes) + named)
        if name == "replace":
            BUDGET.charge(_max_replaced(sizes[0], tuple(values[first + 1 :])))
        elif name == "tojson":
            BUDGET.charge(8 * sum(sizes))  # escapes and separators
            if not kwargs.keys() <= {"ensure_ascii", "sort_keys"} or len(sizes) > 2:
                refuse("it uses tojson with indent or separators")
        elif name == "join" and isinstance(values[first], Sized):
            BUDGET.charge((sum(sizes[1:]) + named) * len(values[first]))
        return function(*values, **kwargs)

    return guarded


def _refusing(name: str, function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def refusing(*args: object, **kwargs: object) -> object:
        refuse(f"it uses the filter {name}")

    return refusing


# These have the context as an argument, so that the compiler does not run them on constants.
@pass_context
def _turns(context: Context, values: Iterable[object]) -> _ChargedIterable:
    return _ChargedIterable(values)


@pass_context
def _touch(context: Context, value: object) -> object:
    """Charges an operand that may be read over its whole length."""
    BUDGET.charge(size_of(value))
    return value


@pass_context
def _emit(context: Context, value: object) -> object:
    BUDGET.charge(STEP_COST // 4 + size_of(value))
    return value


@pass_context
def _concat(context: Context, values: tuple[object, ...]) -> str:
    BUDGET.charge(STEP_COST + size_of(values))
    return "".join(map(str, values))


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Charging(NodeTransformer):
    """Wraps the operations of a template that are not calls in the filters above."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(child, "_emit") for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        together = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return _filtered(together, "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_touch")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_touch")
        return node

    def _with_spread(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        """Charges the spread arguments of `f(*values)` and `f(**values)`, which read all values."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _filtered(node.dyn_args, "_touch")
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _filtered(node.dyn_kwargs, "_touch")
        return node

    visit_Call = visit_Filter = visit_Test = _with_spread

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "_touch")
        return node
