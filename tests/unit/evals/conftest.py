from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from evaluator_world import World
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from evald.config import EvalSet

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<s>"]

TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif -%}
"""


def byte_tokenizer(*, bos: bool = False) -> Tokenizer:
    """256 bytes and four specials; with ``bos`` it puts <s> in front by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write config.json and tokenizer files of a model; keyword arguments change them."""

    def make(
        name: str = "base",
        *,
        bos: bool = False,
        template: str | list[dict[str, str]] | None = TEMPLATE,
        **config: Any,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        limits = {"vocab_size": 320, "max_position_embeddings": 2048} | config
        (directory / "config.json").write_text(json.dumps(limits))
        byte_tokenizer(bos=bos).save(str(directory / "tokenizer.json"))
        settings = {
            "chat_template": template,
            "eos_token": {"content": "<|im_end|>"},
            "bos_token": "<s>" if bos else None,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return directory

    return make


MakeSet = Callable[..., EvalSet]


@pytest.fixture
def make_set(tmp_path: Path) -> MakeSet:
    """Write rows to a JSONL file and give the eval set that reads it."""

    def make(rows: list[Any] | str, name: str = "toy", **fields: Any) -> EvalSet:
        text = rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text)
        return msgspec.convert({"name": name, "path": str(path), **fields}, EvalSet)

    return make


@pytest.fixture
def world(tmp_path: Path, make_model: MakeModel) -> World:
    return World(tmp_path, make_model())
