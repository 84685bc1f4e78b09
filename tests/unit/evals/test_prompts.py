from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from evald.evals.chat_template import ChatTemplate, PromptError
from evald.evals.prompts import ModelLimits, PromptEncoder, TokenizerFiles, tokenizer_digest


def encoder(model: Path) -> PromptEncoder:
    return PromptEncoder(TokenizerFiles.read(model), ModelLimits.read(model))


def text_of(model: Path, prompt: Any, *, chat: Any = "auto", **kwargs: Any) -> str:
    """Encode and decode again, specials and all."""
    ids = encoder(model).encode(prompt, apply_chat_template=chat, kwargs=kwargs, max_response_len=8)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(ids, skip_special_tokens=False))


USER = [{"role": "user", "content": "hi"}]
WRAPPED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_auto_wraps_messages_and_sends_text_as_it_is(make_model: Any) -> None:
    model = make_model()
    assert text_of(model, USER) == WRAPPED
    assert text_of(model, WRAPPED) == WRAPPED
    assert text_of(model, "hi", chat=True) == WRAPPED
    assert text_of(model, "hi", chat=False) == "hi"
    with pytest.raises(PromptError, match="apply_chat_template is false"):
        text_of(model, USER, chat=False)


def test_template_kwargs_reach_the_template(make_model: Any) -> None:
    model = make_model()
    assert text_of(model, USER, enable_thinking=False).endswith("assistant\n<think></think>")
    assert text_of(model, USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_there_is_never_a_second_bos(make_model: Any) -> None:
    model = make_model(bos=True, template="{{ bos_token }}{{ messages[0].content }}")
    assert text_of(model, "hi") == "<s>hi"
    assert text_of(model, "<s>hi") == "<s>hi"
    assert text_of(model, USER) == "<s>hi"


def test_a_model_without_template_says_so_only_for_messages(make_model: Any) -> None:
    model = make_model(template=None)
    assert text_of(model, "hi") == "hi"
    with pytest.raises(PromptError, match="the model has no chat template; put a"):
        text_of(model, USER)


def test_templates_are_found_where_hugging_face_puts_them(make_model: Any) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    model = make_model(template=named)
    assert text_of(model, USER) == "D"
    (model / "chat_template.jinja").write_text("J")
    assert text_of(model, USER) == "J"
    with pytest.raises(PromptError, match="names tool_use, and none is called default"):
        text_of(make_model("b", template=named[:1]), USER)
    with pytest.raises(PromptError, match="neither text nor a list"):
        text_of(make_model("c", template=5), USER)


def test_templates_have_what_hugging_face_gives_them(make_model: Any) -> None:
    source = (
        "{% set ns = namespace(n=0) %}\n"
        "{% for m in messages %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ eos_token }}{{ strftime_now('%Y')[:2] }}"
        "{% if tools is none and documents is none %}!{% endif %}"
    )
    assert text_of(make_model(template=source), USER * 2) == '{"a": "<é>"}<|im_end|>20!'


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "the template says"),
        ("{{ messages[0].content + 1 }}", "the template says"),
        ("{{ messages.append(1) }}", "the template says"),
        ("{{ ''.__class__.__mro__ }}", "the template says"),
        ("{{ 1 // 0 }}", "the template says"),
    ],
)
def test_faults_of_a_template_are_one_sentence(make_model: Any, source: str, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        text_of(make_model(template=source), USER)


def test_special_tokens_come_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "E"}}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "B", "eos_token": "X"}')
    template = ChatTemplate.read(tmp_path)
    assert template.special_tokens == {"bos_token": "B", "eos_token": "E"}
    assert template.digest is None


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_broken_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(PromptError, match=r"cannot read .*tokenizer_config.json"):
        ChatTemplate.read(tmp_path)


def test_an_unreadable_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match=r"cannot read .*chat_template.jinja"):
        ChatTemplate.read(tmp_path)


def test_an_id_beyond_the_vocabulary_never_reaches_the_server(make_model: Any) -> None:
    model = make_model(vocab_size=257)
    assert text_of(model, "<|pad|>") == "<|pad|>"
    with pytest.raises(PromptError, match=r"token '<\|im_start\|>' has id 257, but .* ends at 256"):
        text_of(model, "<|im_start|>")


def test_a_prompt_that_does_not_fit_is_refused_and_not_cut(make_model: Any) -> None:
    model = make_model(max_position_embeddings=20)
    assert text_of(model, "x" * 12) == "x" * 12
    with pytest.raises(
        PromptError, match="the prompt has 13 tokens, and with max_response_len = 8"
    ):
        text_of(model, "x" * 13)
    with pytest.raises(PromptError, match="no tokens"):
        text_of(make_model("e", template=""), USER)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({}, ModelLimits()),
        ({"vocab_size": 9, "max_position_embeddings": 100}, ModelLimits(9, 100)),
        ({"text_config": {"vocab_size": 9, "seq_length": 50}}, ModelLimits(9, 50)),
        ({"max_position_embeddings": 100, "rope_scaling": {"factor": 4.0}}, ModelLimits(None, 400)),
        (
            {"max_position_embeddings": 100, "rope_scaling": {"factor": 8, "rope_type": "llama3"}},
            ModelLimits(None, 100),
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {"factor": 4, "original_max_position_embeddings": 25},
            },
            ModelLimits(None, 100),
        ),
    ],
)
def test_limits_are_those_that_the_server_computes(
    tmp_path: Path, config: dict[str, Any], limits: ModelLimits
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelLimits.read(tmp_path) == limits


def test_missing_and_broken_files_are_named(make_model: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"cannot read .*config.json"):
        ModelLimits.read(tmp_path)
    with pytest.raises(PromptError, match=r"cannot read .*tokenizer.json: No such file"):
        TokenizerFiles.read(tmp_path)
    model = make_model()
    (model / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(PromptError, match=r"cannot load tokenizer\.json"):
        encoder(model)


def test_truncation_and_padding_in_the_file_do_nothing(make_model: Any) -> None:
    model = make_model()
    path = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    assert text_of(model, "a long prompt") == "a long prompt"


def test_the_digest_is_that_of_the_meaning(make_model: Any) -> None:
    content = (make_model() / "tokenizer.json").read_bytes()
    tree = json.loads(content)
    again = dict(reversed(tree.items())) | {"truncation": {"max_length": 5}}
    assert tokenizer_digest(json.dumps(again, indent=4).encode()) == tokenizer_digest(content)
    tree["added_tokens"] = tree["added_tokens"][:-1]
    assert tokenizer_digest(json.dumps(tree).encode()) != tokenizer_digest(content)
    with pytest.raises(PromptError, match=r"cannot read tokenizer\.json"):
        tokenizer_digest(b"[]")
