"""Chat templates: found in a model directory and rendered as Hugging Face renders them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from evald.errors import EvaldError

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes, parser

#: tokens that a template may name.
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class PromptError(EvaldError):
    """One prompt cannot become token ids; the sentence says why."""


class ChatTemplate:
    """The chat template of a model directory, if it has one.

    It is ``chat_template.jinja``, else ``chat_template`` in ``tokenizer_config.json``: text, or a
    list of named templates of which ``default`` is taken.
    """

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens
        #: hex, xxh3-128 over the template and the tokens it may name; None without a template.
        self.digest = None
        if source is not None:
            text = json.dumps([source, special_tokens], sort_keys=True)
            self.digest = xxhash.xxh3_128_hexdigest(text.encode())
        self._compiled: jinja2.Template | None = None

    @classmethod
    def read(cls, directory: Path) -> ChatTemplate:
        """Read the template of a model directory; a missing file is no template. Blocking.

        Raises PromptError for files that are there and cannot be used.
        """
        config = _read_json(directory / "tokenizer_config.json")
        special_map = _read_json(directory / "special_tokens_map.json")
        tokens = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name) or special_map.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
        return cls(_template_source(directory, config), tokens)

    def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """Render chat messages, the assistant's header at the end; raises PromptError."""
        import jinja2  # noqa: PLC0415 - an idle daemon does not pay for it

        if self.source is None:
            raise PromptError(
                "cannot render chat messages: the model has no chat template; put a "
                "chat_template.jinja beside its tokenizer.json, or give pre-rendered text"
            )
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
            **kwargs,
            "messages": messages,
        }
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(variables)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # whatever a template's own expressions raise is a fault of template and messages
            raise PromptError(f"cannot render chat messages: the template says: {error}") from error


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        if "default" not in named:
            raise PromptError(
                f"cannot choose a chat template: {directory / 'tokenizer_config.json'} names "
                f"{', '.join(map(str, named)) or 'none'}, and none is called default"
            )
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise PromptError(
            f"cannot use chat_template in {directory / 'tokenizer_config.json'}: it is neither "
            "text nor a list of named templates"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is empty."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"cannot read {path}: it is not a JSON object")
    return value


def _environment() -> jinja2.Environment:
    """Build the environment that templates are written for: sandboxed, blocks trimmed."""
    import jinja2  # noqa: PLC0415 - an idle daemon does not pay for it
    from jinja2 import ext, sandbox  # noqa: PLC0415 - as above

    class Generation(ext.Extension):
        """``{% generation %}`` marks what a trainer masks; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates expect local time

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


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
