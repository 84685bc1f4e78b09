"""Prompts and sampling against the originals: transformers' templates, SGLang's parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plain_environ import plain_environ
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from evald.config import EvalSet
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles
from evald.evals.sampling import sampling_for

#: in the manner of Qwen's: tools, thinking, slices, namespaces, string methods, trimmed blocks.
TEMPLATE = """
{%- macro block(role, text) %}
{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>' + '\\n' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' if not loop.last }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- block('system', messages[0].content) }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == "user" and message.content is string %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content | default('', true) %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {% generation %}{{ block('assistant', content) }}{% endgeneration %}
    {%- elif message.role != 'system' %}
        {{- block(message.role, message.content | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SYSTEM = {"role": "system", "content": "Be <b>brief</b> & 'kind'."}
USER = {"role": "user", "content": "  Wieviel ist 2+2? 🙂\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Größe <x>"}}

CASES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    ([SYSTEM, USER], {"enable_thinking": False}),
    ([SYSTEM, USER, ASSISTANT, USER], {"enable_thinking": True}),
    ([SYSTEM, USER], {"tools": [TOOL, TOOL]}),
    ([USER, ASSISTANT], {"add_generation_prompt": False}),
    ([USER, {"role": "assistant", "content": None, "tool_calls": [TOOL]}, USER], {}),
]
TEXTS = ["plain", "<s>has its own", "<|im_start|>user\nhi<|im_end|>\n", "ä 🙂"]

ORIGINALS = """
import json, sys
from transformers import PreTrainedTokenizerFast
from sglang.srt.sampling.sampling_params import SamplingParams
given = json.load(sys.stdin)
tokenizer = PreTrainedTokenizerFast.from_pretrained(given["model"])
chats = []
for messages, kwargs in given["cases"]:
    kwargs = {"add_generation_prompt": True, "return_dict": False} | kwargs
    chats.append(tokenizer.apply_chat_template(messages, tokenize=True, **kwargs))
texts = [tokenizer(text)["input_ids"] for text in given["texts"]]
for sampling in given["sampling"]:
    SamplingParams(**sampling).verify(320)
known = [name for name in SamplingParams.__struct_fields__]
print(json.dumps({"chats": chats, "texts": texts, "known": known}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text('{"vocab_size": 320}')
    return directory


def sampling() -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "stop": ["\n"], "stop_token_ids": [3]},
        {"min_new_tokens": 2, "skip_special_tokens": False},
    ]
    sets = [msgspec.convert({"name": "s", "path": "p", **v}, EvalSet) for v in variants]
    return [params for one in sets for params in sampling_for(one, "1", [0, 1])]


@pytest.fixture(scope="module")
def originals(model: Path) -> dict[str, Any]:
    """What transformers and SGLang make of the same input; in a process of their own."""
    given = {"model": str(model), "cases": CASES, "texts": TEXTS, "sampling": sampling()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORIGINALS],
        input=json.dumps(given).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=110,
        env=plain_environ(),
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def encode(model: Path, prompt: Any, kwargs: dict[str, Any]) -> list[int]:
    encoder = PromptEncoder(TokenizerFiles.read(model), ModelLimits.read(model))
    return encoder.encode(prompt, apply_chat_template="auto", kwargs=kwargs, max_response_len=8)


def test_chats_are_those_of_transformers(model: Path, originals: dict[str, Any]) -> None:
    for (messages, kwargs), expected in zip(CASES, originals["chats"], strict=True):
        assert encode(model, messages, kwargs) == expected


def test_text_is_that_of_transformers_but_for_a_second_bos(
    model: Path, originals: dict[str, Any]
) -> None:
    bos = encode(model, "<s>", {})[0]
    for text, expected in zip(TEXTS, originals["texts"], strict=True):
        ids = encode(model, text, {})
        assert ids == (expected[1:] if text.startswith("<s>") else expected)
        assert ids.count(bos) == 1


def test_sglang_takes_every_parameter(originals: dict[str, Any]) -> None:
    assert {name for params in sampling() for name in params} <= set(originals["known"])
