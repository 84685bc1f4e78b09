"""The jinja2 environment of chat templates: what Hugging Face offers them, within bounds.

A snapshot's own template is a stranger's program: it cannot reach Python, turn for ever in loops,
or ask for all memory. A thread that renders cannot be killed, so it must come to an end by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, sandbox

#: turns of loops and calls of macros in one rendering; a long conversation takes thousands.
MAX_TURNS = 200_000
#: what ``*`` may make of a text or a list, items; numbers and ``**``: bits.
MAX_PRODUCT = 1 << 20


class _Generation(ext.Extension):
    """``{% generation %}`` marks what a trainer masks; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(sandbox.ImmutableSandboxedEnvironment):
    """Compile and render one template, one rendering at a time."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
        )
        self._turns = 0
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template that counts its turns; raises TemplateError."""
        tree = self.parse(source)
        loops: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for node in loops:
            call = nodes.Call(nodes.EnvironmentAttribute("count_turn"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render; whatever the template's own expressions raise passes through."""
        self._turns = 0
        return template.render(variables)

    def count_turn(self) -> None:
        """Count one turn; raises TemplateError beyond the last."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise jinja2.TemplateRuntimeError(f"it takes more than {MAX_TURNS} turns of loops")

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Multiply and raise to powers, unless the result would be huge."""
        if _product_size(operator, left, right) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError(f"a result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _product_size(operator: str, left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), 1)
        return bits * right if operator == "**" else bits + right.bit_length()
    for items, times in ((left, right), (right, left)):
        if isinstance(items, Sequence) and isinstance(times, int):
            return len(items) * times
    return 0


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates expect local time


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which models never saw."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
