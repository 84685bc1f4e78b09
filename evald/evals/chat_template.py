"""Chat templates: found in a model directory and rendered as Hugging Face renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from evald.errors import EvaldError

if TYPE_CHECKING:
    import jinja2

    from evald.evals.template_sandbox import TemplateSandbox

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


class PromptTooLong(PromptError):
    """The prompt and its response do not fit into the model's context."""


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
        self._compiled: tuple[TemplateSandbox, jinja2.Template] | None = None

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
        # an idle daemon does not pay for jinja2
        from evald.evals.template_sandbox import TemplateSandbox  # noqa: PLC0415

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
                sandbox = TemplateSandbox()
                self._compiled = sandbox, sandbox.compile_bounded(self.source)
            sandbox, template = self._compiled
            return sandbox.render(template, variables)
        # whatever a template's own expressions raise is a fault of template and messages
        except Exception as error:
            # (it goes into records, where half a surrogate pair has no place)
            cause = str(error).encode("utf-8", "backslashreplace").decode() or type(error).__name__
            raise PromptError(f"cannot render chat messages: the template says: {cause}") from error


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
        named = {
            str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)
        }
        if "default" not in named:
            raise PromptError(
                f"cannot choose a chat template: {directory / 'tokenizer_config.json'} names "
                f"{', '.join(named) or 'none'}, and none is called default"
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
    except (OSError, ValueError, RecursionError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"cannot read {path}: it is not a JSON object")
    return value
