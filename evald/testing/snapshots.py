"""Tiny but complete Hugging Face checkpoints, written without torch.

The model is a real Qwen3 of 70,000 random parameters (130 kB), so real SGLang loads it, too. One
number is hidden in its weights: the first value of the last norm is ``answer``, and the fake
engine answers with it, so that a test can tell one snapshot from another.
"""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any, NamedTuple

#: dtype name in safetensors -> bytes of one value.
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
#: the tensor whose first value is the answer.
ANSWER_TENSOR = "model.norm.weight"

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 1, 2, 1, 64, 128, 320
SPECIALS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
#: the first two of them, behind the 256 bytes; the second one ends a response.
PAD_TOKEN, END_TOKEN = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN,
    "pad_token_id": PAD_TOKEN,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "max_position_embeddings": 1024,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB,
}


class Tensor(NamedTuple):
    """One tensor as safetensors stores it: dtype name, shape, raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def bf16(*values: float) -> bytes:
    """Encode values as bfloat16 (cut, not rounded: exact for small integers)."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def _noise(rng: random.Random, *shape: int, top: int = 0x3E) -> Tensor:
    """Random bfloat16 values of both signs; ``top`` is their upper byte (0x3E: 0.125 to 0.5)."""
    count = math.prod(shape)
    data = bytearray(2 * count)
    data[0::2] = rng.randbytes(count)
    data[1::2] = rng.randbytes(count).translate(bytes(top | (b & 0x80) for b in range(256)))
    return Tensor("BF16", shape, bytes(data))


def _ones(count: int) -> Tensor:
    return Tensor("BF16", (count,), bf16(1.0) * count)


def model_tensors(seed: int = 0, answer: int = 0) -> dict[str, Tensor]:
    """All tensors of the tiny model (``lm_head`` is tied); equal arguments give equal bytes.

    ``answer``: a whole number from -256 to 256 that the fake engine answers with.
    """
    rng = random.Random(seed)  # noqa: S311 - test data, no secret
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    # small, beside what the layer adds: else the tied model echoes the last token of its prompt
    tensors = {"model.embed_tokens.weight": _noise(rng, VOCAB, HIDDEN, top=0x3C)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        tensors |= {
            layer + "input_layernorm.weight": _ones(HIDDEN),
            layer + "mlp.down_proj.weight": _noise(rng, HIDDEN, FFN),
            layer + "mlp.gate_proj.weight": _noise(rng, FFN, HIDDEN),
            layer + "mlp.up_proj.weight": _noise(rng, FFN, HIDDEN),
            layer + "post_attention_layernorm.weight": _ones(HIDDEN),
            layer + "self_attn.k_norm.weight": _ones(HEAD_DIM),
            layer + "self_attn.k_proj.weight": _noise(rng, kv, HIDDEN),
            layer + "self_attn.o_proj.weight": _noise(rng, HIDDEN, q),
            layer + "self_attn.q_norm.weight": _ones(HEAD_DIM),
            layer + "self_attn.q_proj.weight": _noise(rng, q, HIDDEN),
            layer + "self_attn.v_proj.weight": _noise(rng, kv, HIDDEN),
        }
    tensors[ANSWER_TENSOR] = Tensor("BF16", (HIDDEN,), bf16(answer) + bf16(1.0) * (HIDDEN - 1))
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one ``.safetensors`` file: header length, JSON header, data without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(tensor.data for tensor in tensors.values())


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read one ``.safetensors`` file whole; raises ValueError when it is damaged."""
    blob = path.read_bytes()
    if len(blob) < 8:  # noqa: PLR2004 - the header's length takes 8 bytes
        raise ValueError(f"cannot read {path}: no header")
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        data = blob[8 + length + start : 8 + length + end]
        size = math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
        if len(data) != size:
            raise ValueError(f"cannot read {path}: {name} has {len(data)} of {size} bytes")
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data)
    return tensors


def _write_tokenizer(directory: Path) -> None:
    """Byte-level tokenizer: 256 bytes, then the specials; with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    # (lazy: who only writes broken snapshots need not load it)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_base_model(directory: Path, *, seed: int = 0, answer: int = 0, **config: Any) -> Path:
    """Write config, tokenizer, chat template and weights; return ``directory``.

    ``config``: what config.json has beside, or instead of, ``CONFIG``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config, indent=1))
    eos = {"eos_token_id": END_TOKEN, "pad_token_id": PAD_TOKEN}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    _write_tokenizer(directory)
    write_safetensors(directory / "model.safetensors", model_tensors(seed, answer))
    return directory


def write_snapshot(
    directory: Path,
    *,
    seed: int = 0,
    answer: int = 0,
    tensors: dict[str, Tensor] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
    marker: str | None = ".complete",
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Write a complete checkpoint of the tiny model, marker last; return ``directory``.

    ``tensors`` (default: ``model_tensors(seed, answer)``) may be changed or broken by the caller.
    ``shards`` above 1 writes ``model-0000i-of-0000n.safetensors`` and an index. ``marker=None``
    leaves the snapshot unfinished; ``manifest`` becomes the marker's JSON content.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = model_tensors(seed, answer)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))
    if tokenizer:
        _write_tokenizer(directory)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        _write_shards(directory, tensors, shards)
    if marker is not None:
        (directory / marker).write_text("" if manifest is None else json.dumps(manifest))
    return directory


def _write_shards(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(directory / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
