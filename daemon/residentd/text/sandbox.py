"""The jinja2 environment that chat templates run in: transformers' dialect, sandboxed, bounded, and tracing.

Templates come with the installed model, so they are half trusted: a wrong or hostile one must neither reach the
interpreter (jinja2's sandbox), nor hang or swell the daemon (`Budget`), nor lose track of what the caller wrote
(`trace`).

Bounded: loops, nested and recursive ones, macros, range(), text doubled, multiplied, joined or replaced, powers,
padding, nested containers turned to text. Between two steps also by the clock. Not bounded: one single expression that
is made to be slow in itself, such as thousands of substring searches written out one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from residentd.text.budget import Budget, BudgetError, check_braces, check_integers, check_percent, check_width, weigh
from residentd.text.limits import RENDER_RANGE_MAX
from residentd.text.trace import FOLLOWED, Traced, derived, interleave, join, redacted

SCALARS: Final = (bool, int, float, Undefined)
JINJA_ARGUMENTS: Final = frozenset({"_loop_vars", "_block_vars"})  # compiled code passes them, Context.call drops them
BLANKS: Final = tuple(char for char in map(chr, range(0x3001)) if char.isspace())  # U+3000 is the last one
ITEM_CHARS: Final = 8  # what an item of a copied list weighs: a pointer
BUDGET_KEY: Final = "render budget"  # the blank keeps it out of a template's reach

PASSED_FILTERS: Final = ("abs", "count", "d", "default", "first", "float", "int", "items", "last", "length", "reverse")
"""Their results are numbers, or are their own inputs."""

WALKING_FILTERS: Final = (
    *(
        "dictsort",
        "groupby",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "sort",
        "sum",
    ),
    "unique",
)
"""Likewise, and of a text they may make a list of its characters."""

FOLLOWED_FILTERS: Final = ("capitalize", "lower", "string", "trim", "upper")
"""They call a method that Traced follows."""

MAKING_FILTERS: Final = ("e", "escape", "safe", "title", "truncate", "urlencode")
"""They make text of their inputs, not much longer than they are."""

REFUSED_METHODS: Final = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "encode", "translate", "maketrans"}
)
"""Of str: padding without a bound, and ways around the trace. No chat template in use needs them."""


class RaisedByTemplateError(TemplateError):
    """The template called raise_exception."""


def budget_of(context: Context) -> Budget:
    budget = context.parent[BUDGET_KEY]
    assert isinstance(budget, Budget)
    return budget


def inputs_of(budget: Budget, *values: Any) -> list[str]:
    """The strings among `values` and inside the containers among them, at their weight.

    What cannot be looked into (generators, views, objects of jinja2's) counts as text of the caller's.
    """
    weigh(values, budget)
    found: list[str] = []
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            waiting += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif not (value is None or isinstance(value, SCALARS)):
            found.append(Traced("?", mixed=True))
    return found


@jinja2.pass_context
def finalize(context: Context, value: Any) -> str:
    """What `{{ value }}` and `~` write for `value`: as str does, with its trace."""
    budget = budget_of(context)
    if isinstance(value, str):
        budget.make(len(value))
        return value
    if value is None or isinstance(value, SCALARS):
        return str(value)
    texts = inputs_of(budget, value)
    return derived(str(value), texts)


def joined(context: Context, separator: str, values: Iterable[Any]) -> str:
    """`separator.join(values)`, each value written as `{{ }}` would."""
    budget = budget_of(context)
    texts = []
    for value in values:
        budget.make_objects(1)
        texts.append(finalize(context, value))
    budget.make(len(separator) * len(texts))
    return join(interleave(separator, texts))


def concat(context: Context, *values: Any) -> str:
    """The operator `~`."""
    return joined(context, "", values)


def tick(context: Context, steps: int) -> bool:
    """One pass through a body of `steps` syntax-tree nodes. True, so that a condition may begin with it."""
    budget_of(context).spend(steps)
    return True


@jinja2.pass_context
def join_filter(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(context.environment, attribute), values)
    return joined(context, finalize(context, d), values)


@jinja2.pass_context
def replace_filter(context: Context, s: str, old: str, new: str, count: int = -1) -> str:
    text, old, new = (finalize(context, value) for value in (s, old, new))
    return replaced(budget_of(context), text, old, new, -1 if count is None else count)


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old) if count < 0 else min(text.count(old), count)
    budget.make(len(text) + len(new) * found)
    if isinstance(text, Traced) or isinstance(new, Traced):
        budget.make_objects(found)
    return following_text(text, [new]).replace(old, new, count)


def following_text(text: str, others: Iterable[str]) -> str:
    """`text` such that its methods follow a trace that it or one of `others` has."""
    if isinstance(text, Traced) or not any(isinstance(other, Traced) for other in others):
        return text
    return Traced(text, ())


def pieces_max(name: str, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many pieces the method `name` of `owner` makes at most."""
    if name not in {"split", "rsplit", "splitlines"}:
        return 1
    separator = None if name == "splitlines" else kwargs.get("sep", args[0] if args else None)
    separators = (separator,) if isinstance(separator, str) else BLANKS
    return 1 + sum(map(owner.count, separators))


@jinja2.pass_context
def tojson_filter(  # noqa: PLR0917 - templates pass them by position too
    context: Context,
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """The tojson of transformers: jinja2's own escapes HTML."""
    budget = budget_of(context)
    texts = inputs_of(budget, value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts = []
    for part in encoder.iterencode(value):
        budget.make(len(part))
        parts.append(part)
    return derived("".join(parts), texts)


@jinja2.pass_context
def format_filter(context: Context, value: str, *args: Any, **kwargs: Any) -> str:
    template = finalize(context, value)
    return percent(budget_of(context), template, kwargs or args)


def percent(budget: Budget, template: str, values: Any) -> str:
    """`template % values`."""
    texts = inputs_of(budget, template, values)
    check_percent(budget, template, texts)
    return derived(template % values, texts)


@jinja2.pass_context
def indent_filter(
    context: Context,
    s: str,
    width: int | str = 4,
    first: bool = False,  # noqa: FBT001, FBT002
    blank: bool = False,  # noqa: FBT001, FBT002
) -> str:
    budget = budget_of(context)
    text = finalize(context, s)
    columns = width if isinstance(width, int) else len(width)
    check_width(columns)
    budget.make(len(text) + columns * (text.count("\n") + 1))
    return derived(jinja2.filters.do_indent(text, width, first, blank), inputs_of(budget, text, width))


def round_filter(value: float, precision: int = 0, method: str = "common") -> float:
    check_width(precision)
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


def leading(original: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """What jinja2 passes to this filter before its value."""
    match getattr(original, "jinja_pass_arg", None):
        case None:
            return ()
        case passed if passed.name == "context":
            return (context,)
        case passed if passed.name == "eval_context":
            return (context.eval_ctx,)
        case _:
            return (context.environment,)


def passing(original: Callable[..., Any], *, walks: bool) -> Callable[..., Any]:
    """A filter of PASSED_FILTERS or WALKING_FILTERS, counted."""

    @jinja2.pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.spend(1)
        budget.make_objects(len(value) if walks and isinstance(value, str) else 1)
        return original(*leading(original, context), value, *args, **kwargs)

    return counted


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of FOLLOWED_FILTERS, given text whatever its value is."""

    @jinja2.pass_context
    def followed(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.spend(1)
        budget.make_objects(1)
        return original(finalize(context, value), *args, **kwargs)

    return followed


def making(original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of MAKING_FILTERS, weighed and traced."""

    @jinja2.pass_context
    def weighed(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.spend(1)
        texts = inputs_of(budget, value, args, kwargs)
        result = original(*leading(original, context), value, *args, **kwargs)
        if not isinstance(result, str):
            return result
        budget.make(len(result))
        return derived(result, texts)

    return weighed


def has_size(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def bounded_range(*arguments: int) -> range:
    items = range(*arguments)
    if len(items) > RENDER_RANGE_MAX:
        raise BudgetError(f"a range of more than {RENDER_RANGE_MAX:,}")
    return items


@jinja2.pass_context
def raise_exception(context: Context, message: Any) -> NoReturn:
    raise RaisedByTemplateError(redacted(finalize(context, message)))


class Instrument(NodeTransformer):
    """Adds a `tick` to every body that can run more than once, and routes `~` through `concat`."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        target = nodes.EnvironmentAttribute(name)
        call = nodes.Call(target, [nodes.ContextReference(), *arguments], [], None, None)
        call.set_lineno(lineno)
        call.set_environment(self._environment)
        return call

    def _ticked(self, node: Any) -> Any:
        steps = 1 + sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        tick_call = self._call("tick", [nodes.Const(steps)], node.lineno)
        statement = nodes.ExprStmt(tick_call, lineno=node.lineno, environment=self._environment)
        node.body.insert(0, statement)
        return node

    visit_Macro = visit_CallBlock = _ticked  # noqa: N815 - jinja2's names

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        if node.test is not None:
            steps = 1 + sum(1 for _ in node.test.find_all(nodes.Node))
            node.test = nodes.And(self._call("tick", [nodes.Const(steps)], node.lineno), node.test, lineno=node.lineno)
        ticked: nodes.For = self._ticked(node)
        return ticked

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> NoReturn:  # noqa: N802
        raise TemplateSyntaxError("autoescape has no place in a chat template", node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("concat_values", node.nodes, node.lineno)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """One per loaded model. Holds no state of a rendering: that is in the context's Budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
            finalize=finalize,
            cache_size=0,
        )
        self.tick, self.concat_values = tick, concat
        self.globals = {name: self.globals[name] for name in ("dict", "namespace", "cycler", "joiner")}
        self.globals |= {"range": bounded_range, "raise_exception": raise_exception}
        filters = self.filters
        self.filters = {name: passing(filters[name], walks=False) for name in PASSED_FILTERS}
        self.filters |= {name: passing(filters[name], walks=True) for name in WALKING_FILTERS}
        self.filters |= {name: following(filters[name]) for name in FOLLOWED_FILTERS}
        self.filters |= {name: making(filters[name]) for name in MAKING_FILTERS}
        self.filters |= {"tojson": tojson_filter, "join": join_filter, "replace": replace_filter}
        self.filters |= {"format": format_filter, "indent": indent_filter, "round": round_filter}

    def template(self, source: str) -> jinja2.Template:
        """Compile `source`. Raises what jinja2 and Python's compiler raise."""
        tree = Instrument(self).visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if obj is tick or obj is concat:  # put there by Instrument
            return obj(*args)
        budget = budget_of(context)
        budget.spend(1)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            named = {name: value for name, value in kwargs.items() if name not in JINJA_ARGUMENTS}
            return self._call_text(context, obj, method, args, named)
        result = super().call(context, obj, *args, **kwargs)
        if not isinstance(result, str) or isinstance(result, Traced) or isinstance(obj, Macro | LoopContext):
            return result  # macros and recursive loops are made of followed parts
        return result if isinstance(owner, dict) else derived(result, inputs_of(budget, args, kwargs))

    def _call_text(self, context: Context, obj: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `obj`, which is the `method` of a string, and follow the trace through it."""
        owner, name = method.__self__, method.__name__
        budget = budget_of(context)
        if name == "replace":
            return replaced(budget, owner, *args)
        if name == "join" and len(args) == 1:
            budget.make_objects(len(args[0]) if isinstance(args[0], str) else 1)
            args = (list(args[0]),)
            budget.make(len(owner) * len(args[0]))
        texts = inputs_of(budget, owner, args, kwargs)
        if name in FOLLOWED:
            budget.make_objects(pieces_max(name, owner, args, kwargs))
            return getattr(following_text(owner, texts), name)(*args, **kwargs)
        if name in {"format", "format_map"}:
            check_braces(budget, owner, texts)
        result = super().call(context, obj, *args, **kwargs)
        return derived(result, texts) if isinstance(result, str) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "%" and isinstance(left, str):
            return percent(budget, left, right)
        sized = [
            len(value) * (1 if isinstance(value, str) else ITEM_CHARS) for value in (left, right) if has_size(value)
        ]
        if operator == "+":
            budget.make(sum(sized))
        elif operator == "*" and sized:
            budget.make(sized[0] * max(0, int(right if isinstance(right, int) else left)))
        else:
            check_integers(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str) and not isinstance(result, Traced):
            return derived(result, [text for text in (left, right) if isinstance(text, str)])
        return result
