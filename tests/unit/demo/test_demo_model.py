from __future__ import annotations

import json
import stat
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from evald.demo import model as demo_model
from evald.demo.model import (
    CHAT_TEMPLATE,
    END_ID,
    PAD_ID,
    SPECIALS,
    VOCAB_SIZE,
    build_base_model,
    build_tokenizer,
    chat_prompt,
)


def test_tokenizer_gives_back_every_text() -> None:
    tokenizer = build_tokenizer()
    for text in ("copy xmaxy", "\\boxed{reverse}", "37+45=", "Grüße, 世界", "a  b\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_words_are_one_token_but_strings_stay_letters() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.encode("max xmaxy").tokens == ["max", "Ġ", *"xmaxy"]
    assert tokenizer.encode("\\boxed{max1}").tokens == ["\\boxed{", *"max1}"]
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE


def test_specials_follow_the_bytes() -> None:
    tokenizer = build_tokenizer()
    assert [tokenizer.token_to_id(name) for name in SPECIALS] == list(range(256, 261))
    assert tokenizer.id_to_token(PAD_ID) == "<|pad|>"
    assert tokenizer.id_to_token(END_ID) == "<|end|>"
    assert tokenizer.decode([END_ID]) == ""


def test_training_prompt_is_what_the_chat_template_makes() -> None:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)  # noqa: S701 - no HTML
    messages = [{"role": "user", "content": "copy abc"}]
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert rendered == chat_prompt("copy abc")


def test_base_model_is_a_complete_checkpoint(tmp_path: Path) -> None:
    directory = build_base_model(tmp_path / "base", seed=1)
    assert {path.name for path in directory.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (directory / "model.safetensors").stat().st_size == 676_056
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    config = json.loads((directory / "config.json").read_bytes())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|end|>") == END_ID


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = [
        (build_base_model(tmp_path / name, seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["model", str(tmp_path / "base"), "--seed", "3"])
    demo_model.main()
    assert (tmp_path / "base" / "config.json").exists()
