"""A jinja sandbox that counts the work of a rendering, for templates that run on the event loop.

Every iteration, call, filter, operator and output is charged before it happens, and every run of a
loop's or a macro's body by its length; a rendering that exceeds its budget, or uses an operation
whose cost cannot be bounded beforehand (`%`, `**`, `center`, `indent`, ...), raises
TemplateBudgetError. Such a template is valid: a worker process under limits of the kernel may
render it (see `text_workers`). Each thread has its own budget.
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
_NODE_COST = 5  # per name, literal or statement of a body, 100 ns
_SLOW_NODE_COST = 40  # per attribute or comparison, which look at types
_MAX_BITS = 64
_MAX_DIGITS = 64  # that `round` keeps: it computes a power of ten


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters that read only the outermost list, of the messages for instance, not the texts in it.
_SHALLOW_FILTERS = _words(
    "abs attr count d default first float int items last length list map reject rejectattr reverse "
    "round select selectattr"
)
_DEEP_FILTERS = _words("capitalize e escape join lower replace safe string title tojson trim upper")
_CHEAP_TESTS = _words(
    "boolean callable defined divisibleby even false float integer iterable mapping none number "
    "odd sameas sequence string true undefined"
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
        } | {one.__name__: one for one in (_turns, _body, _touch, _emit, _concat)}
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
        return _shallow(name, function)
    return (_deep if name in _DEEP_FILTERS else _refusing)(name, function)


def _first_argument(function: Callable[..., object]) -> int:
    """Returns the index of the filtered value: 1 if jinja passes a context or environment first."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _shallow(name: str, function: Callable[..., object]) -> Callable[..., object]:
    first = _first_argument(function)

    @wraps(function)
    def guarded(*args: object, **kwargs: object) -> object:
        value = args[first] if len(args) > first else None
        if isinstance(value, Iterator):
            value = list(_ChargedIterable(value))
            args = (*args[:first], value, *args[first + 1 :])
        BUDGET.charge(STEP_COST + (8 * len(value) if isinstance(value, Sized) else 0))
        options = (*args[first + 1 :], *kwargs.values())
        BUDGET.charge(sum(map(size_of, options)) + _paths_cost(value, options))
        if name == "round" and not all(map(_is_small, (value, *options))):
            refuse("it rounds too large a number, or to too many digits")
        return function(*args, **kwargs)

    return guarded


def _paths_cost(value: object, options: Iterable[object]) -> int:
    """Returns the cost of reading paths of attributes, such as `function.name`, of all values."""
    num_steps = sum(option.count(".") for option in options if isinstance(option, str))
    return STEP_COST * num_steps * (len(value) if isinstance(value, Sized) else 1)


def _is_small(value: object) -> bool:
    """Returns False for an integer that is no number of digits and needs more than 64 bits."""
    return not isinstance(value, int) or abs(value) <= _MAX_DIGITS


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
        options = (*values[first + 1 :], *kwargs.values())
        BUDGET.charge(_paths_cost(values[first] if sizes else None, options))
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
def _body(context: Context, cost: int) -> str:
    """Charges one run of a body, whose simple operations are not charged one by one."""
    BUDGET.charge(cost)
    return ""


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


def _hashable(key: nodes.Expr) -> nodes.Expr:
    """Returns a key that is read before it is hashed: Python hashes nested tuples without a limit
    of their depth, until the stack overflows."""
    return key if isinstance(key, nodes.Const) else _filtered(key, "_touch")


def _charge_of(parts: Iterable[nodes.Node], line: int) -> nodes.ExprStmt:
    """Returns a statement that charges one run of these parts of a body."""
    cost = nodes.Const(sum(map(_cost_of, parts)), lineno=line)
    return nodes.ExprStmt(_filtered(cost, "_body"), lineno=line)


def _cost_of(node: nodes.Node) -> int:
    """Returns the largest cost of one run of a node: of one branch of each `if`, and without the
    bodies in it that are charged by themselves."""
    if isinstance(node, nodes.If):
        branches = (node.body, *(one.body for one in node.elif_), node.else_)
        tests = (node.test, *(one.test for one in node.elif_))
        longest = max(sum(map(_cost_of, branch)) for branch in branches)
        return _NODE_COST + sum(map(_cost_of, tests)) + longest
    if isinstance(node, nodes.Macro):
        return _NODE_COST
    if isinstance(node, nodes.CallBlock):
        return _NODE_COST + _cost_of(node.call)
    if isinstance(node, nodes.For):
        return _NODE_COST + sum(map(_cost_of, (node.iter, *node.else_)))
    is_slow = isinstance(node, nodes.Getattr | nodes.Compare)
    own = _SLOW_NODE_COST if is_slow else _NODE_COST
    return own + sum(map(_cost_of, node.iter_child_nodes()))


class _Charging(NodeTransformer):
    """Wraps the operations of a template that are not calls in the filters above, and charges the
    bodies that run more than once."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        tests = () if node.test is None else (node.test,)
        charge = _charge_of((*node.body, *tests), node.lineno)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        node.body.insert(0, charge)
        return node

    def _with_body(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        charge = _charge_of((*node.body, *node.defaults), node.lineno)
        self.generic_visit(node)
        node.body.insert(0, charge)
        return node

    visit_Macro = visit_CallBlock = _with_body

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _hashable(pair.key)
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
        else:
            node.arg = _hashable(node.arg)
        return node
