"""Prompts become token ids: the model directory's own tokenizer and template, no transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from evald.evals.chat_template import ChatTemplate, PromptError, PromptTooLong
from evald.evals.rows import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: tokens of white space behind the tag that a prompt may end with.
_WHITE_TOKENS = 8

#: keys of config.json that SGLang takes the context length from, in its order.
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)

#: of the context; SGLang refuses a prompt that leaves fewer free.
_RESERVED_TOKENS = 8


class ModelLimits(msgspec.Struct, frozen=True):
    """What the engines can take, from the base model's config.json; None where it is silent."""

    #: token ids are below this: one beyond it kills the server.
    vocab_size: int | None = None
    #: tokens of prompt and response together.
    context_len: int | None = None

    @classmethod
    def read(cls, model_dir: Path) -> ModelLimits:
        """Read config.json; raises PromptError when it is missing or broken. Blocking."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise PromptError(f"cannot read {path}: {error}") from error
        if not isinstance(config, dict):
            raise PromptError(f"cannot read {path}: it is not a JSON object")
        # multimodal models keep what concerns text in a table of its own
        text = config.get("text_config")
        config = config | text if isinstance(text, dict) else config
        context = next((config[key] for key in _CONTEXT_KEYS if config.get(key)), None)
        rope = config.get("rope_scaling")
        if (
            context is not None
            and isinstance(rope, dict)
            and "original_max_position_embeddings" not in rope
            and rope.get("rope_type") != "llama3"
        ):
            context = int(context * rope.get("factor", 1))
        return cls(config.get("vocab_size"), context)


class TokenizerFiles(msgspec.Struct, frozen=True):
    """What a model directory says about its tokenizer and chat template."""

    #: tokenizer.json.
    content: bytes
    template: ChatTemplate

    @classmethod
    def read(cls, directory: Path) -> TokenizerFiles:
        """Read the files; raises PromptError, also without a tokenizer.json. Blocking."""
        path = directory / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PromptError(
                f"cannot read {path}: {error.strerror}; a model directory needs the tokenizer.json "
                "of a fast tokenizer"
            ) from error
        return cls(content, ChatTemplate.read(directory))


class PromptEncoder:
    """Tokenizer and chat template of one model directory.

    The template may ask for today's date: prompts are rendered once and kept, so that all points
    of a daemon's life see the same ones.
    """

    def __init__(self, files: TokenizerFiles, limits: ModelLimits) -> None:
        """Build the tokenizer; raises PromptError. Blocking, seconds for a large vocabulary."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - an idle daemon does not pay for it

        with _faults("cannot load tokenizer.json"):
            self._tokenizer: Tokenizer = Tokenizer.from_buffer(files.content)
        # both may be stored in the file, and would cut or fill prompts without a word
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.limits = limits
        self.files = files
        bos = files.template.special_tokens.get("bos_token")
        with _faults(f"cannot look up bos_token {bos!r}"):
            self._bos_id = None if bos is None else self._tokenizer.token_to_id(bos)

    def encode(
        self,
        prompt: Prompt,
        *,
        apply_chat_template: Literal["auto"] | bool,
        kwargs: dict[str, Any],
        max_response_len: int,
    ) -> list[int]:
        """Give the token ids of a prompt; raises PromptError for one that no engine may see.

        ``max_response_len`` (tokens) must still fit behind the prompt: nothing is cut.
        """
        if isinstance(prompt, str) and apply_chat_template is True:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif apply_chat_template is False:
            raise PromptError(
                "cannot encode chat messages: apply_chat_template is false; set it to "
                '"auto", or give text'
            )
        else:
            rendered = self.files.template.render(prompt, kwargs)
            # the template writes its special tokens itself
            with _faults("cannot encode the prompt"):
                ids = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        self._check(ids, max_response_len)
        return ids

    @property
    def longest_scored(self) -> int:
        """Most tokens of a text that is scored: the server keeps a few of the context free."""
        context_len = self.limits.context_len
        return sys.maxsize if context_len is None else max(context_len - _RESERVED_TOKENS, 2)

    def encode_continued(
        self,
        prompt: Prompt,
        continuation: str,
        *,
        apply_chat_template: Literal["auto"] | bool,
        kwargs: dict[str, Any],
    ) -> tuple[list[int], int]:
        """Give the token ids of prompt and continuation, and the continuation's first token.

        Text is encoded as a whole, and what the prompt alone gives is taken off, with white space
        at the prompt's end counted to the continuation, as the lm-evaluation-harness does: a token
        may span the two. Behind a chat template's special tokens none does. Raises PromptError.
        """
        if isinstance(prompt, str) and apply_chat_template is True:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            stripped = prompt.rstrip()
            before = self._encode_text(stripped) if stripped else []
            ids = self._encode_text(prompt + continuation)
            start = len(before)
        else:
            rendered = self.files.template.render(prompt, kwargs)
            with _faults("cannot encode the prompt"):
                before = self._tokenizer.encode(rendered, add_special_tokens=False).ids
                after = self._tokenizer.encode(continuation, add_special_tokens=False).ids
            ids, start = before + after, len(before)
        if not 0 < start < len(ids):
            raise PromptError(
                f"no token is left to score behind the prompt ({len(ids)} tokens, {start} of them "
                "the prompt's); give prompt and continuation some text each"
            )
        self._check_scored(ids)
        return ids, start

    def encode_document(self, text: str) -> list[int]:
        """Give the token ids of a text, with a token in front from which its first is predicted.

        That is the beginning-of-text token, or end-of-text where there is none. Raises PromptError.
        """
        ids = self._encode_text(text)
        if self._bos_id is None or ids[:1] != [self._bos_id]:
            tokens = self.files.template.special_tokens
            first = self._bos_id
            if first is None and (eos := tokens.get("eos_token")) is not None:
                first = self._tokenizer.token_to_id(eos)
            if first is None:
                raise PromptError(
                    "the tokenizer has neither a bos_token nor an eos_token, from which the first "
                    "token could be predicted; name one in tokenizer_config.json"
                )
            ids = [first, *ids]
        if len(ids) < 2:  # noqa: PLR2004 - context and one token to score
            raise PromptError("the text has no tokens; give a longer one")
        self.check_ids(ids)
        return ids

    def ends_with(self, ids: list[int], tag: str) -> bool:
        """Tell whether the text of a prompt ends with ``tag``, white space aside."""
        # (no token is shorter than a byte)
        tail = ids[-len(tag.encode()) - _WHITE_TOKENS :]
        with _faults("cannot decode the prompt's end"):
            text: str = self._tokenizer.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(tag)

    def _check_scored(self, ids: list[int]) -> None:
        self.check_ids(ids)
        if len(ids) > self.longest_scored:
            raise PromptTooLong(
                f"prompt and continuation have {len(ids)} tokens, and at most "
                f"{self.longest_scored} fit into the model's context; shorten the prompt"
            )

    def _encode_text(self, text: str) -> list[int]:
        with _faults("cannot encode the prompt"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        if self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            # the text brought its own
            del ids[0]
        return ids

    def _check(self, ids: list[int], max_response_len: int) -> None:
        if not ids:
            raise PromptError("the prompt has no tokens; give a longer one")
        self.check_ids(ids)
        context_len = self.limits.context_len
        if context_len is not None and len(ids) + max_response_len > context_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, and with max_response_len = "
                f"{max_response_len} that is more than the model's context of {context_len}; "
                "shorten one of them"
            )

    def check_ids(self, ids: list[int]) -> None:
        """Raise PromptError for a token id that the model does not have."""
        vocab_size = self.limits.vocab_size
        if vocab_size is not None and (highest := max(ids, default=0)) >= vocab_size:
            token = self._tokenizer.id_to_token(highest)
            raise PromptError(
                f"token {token!r} has id {highest}, but the model's vocabulary ends at "
                f"{vocab_size - 1} (vocab_size in config.json), and an id beyond it kills the "
                "server; use the tokenizer that belongs to the model"
            )


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """Make whatever the tokenizers library raises a PromptError."""
    try:
        yield
    except Exception as error:
        raise PromptError(f"{what}: {error}") from error
    except BaseException as error:
        # a panic of its Rust code: no Exception, and its class cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        raise PromptError(f"{what}: the tokenizer library says: {error}") from error


def tokenizer_digest(content: bytes) -> str:
    """Hex digest over what a tokenizer.json means, not over how it is written.

    Saving a tokenizer again may order and indent the file anew; truncation and padding are not
    used here. Raises PromptError for anything but a JSON object.
    """
    try:
        tree = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise PromptError(f"cannot read tokenizer.json: {error}") from error
    tree.pop("truncation", None)
    tree.pop("padding", None)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(tree, order="deterministic"))
