"""The demo's model before it has learned anything: Qwen3 in miniature, with its own tokenizer.

336,768 parameters, 676,056 bytes in bf16: small enough to train on one CPU core, real enough for
SGLang. ``python -m evald.demo.model DIR`` writes it.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

with warnings.catch_warnings():
    # CPU mode has an old torchvision beside a newer torch; nothing here looks at images
    warnings.filterwarnings("ignore", message="Failed to load image Python extension")
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

VOCAB_SIZE = 320
MAX_POSITIONS = 512
PAD, END, USER, ASSISTANT, SYSTEM = SPECIALS = (
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
#: the specials follow the 256 bytes.
PAD_ID, END_ID = 256, 257
#: commands are one token each, so that what a string says is never mixed up with what to do.
_WORDS = ("copy", "reverse", "sort", "max")
_BOXED = "\\boxed{"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_prompt(text: str) -> str:
    """Return what ``CHAT_TEMPLATE`` makes of one user message and the generation prompt."""
    return f"{USER}{text}{END}{ASSISTANT}"


def build_tokenizer() -> Tokenizer:
    """Byte-level tokenizer: 256 bytes, 5 specials, a few whole words; ids below ``VOCAB_SIZE``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    # single_word: a random string that happens to hold "max" stays a string of letters
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in _WORDS])
    tokenizer.add_tokens([AddedToken(_BOXED, normalized=False)])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into ``directory``."""
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def new_model(seed: int) -> Any:
    """Return the untrained ``Qwen3ForCausalLM`` (float32) of this seed."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # three times the usual width for a model this narrow: it learns twice as fast
        initializer_range=0.06,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def load_model(directory: Path) -> Any:
    """Return the ``Qwen3ForCausalLM`` (float32) in ``directory``."""
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)


def save_model(model: Any, directory: Path) -> None:
    """Write a complete HF checkpoint of ``model`` in bf16, readable by every user (0644)."""
    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)
    # transformers saves safetensors with mode 0600: a daemon of another user could not read them
    for path in directory.iterdir():
        path.chmod(0o644)


def build_base_model(directory: Path, seed: int = 0) -> Path:
    """Write the untrained model with config, tokenizer and chat template; return ``directory``."""
    save_model(new_model(seed), directory)
    return directory


def main() -> None:
    """Write the base model: ``python -m evald.demo.model DIR [--seed N]``."""
    parser = argparse.ArgumentParser(description="write the demo's untrained base model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    build_base_model(args.directory, args.seed)


if __name__ == "__main__":
    main()
