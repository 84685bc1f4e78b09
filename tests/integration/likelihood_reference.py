"""What transformers says about the same texts: ``python likelihood_reference.py MODEL < JOBS``.

A job is ``{"prefix": null | text, "text": text}``; the answer is the sum of the log-probabilities
of the text's tokens behind the prefix (or behind the end-of-text token), and how many they are.
"""

from __future__ import annotations

import json
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - its own warnings are not ours
from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: E402

#: tokens of context that the model was trained with: longer documents are scored in pieces.
WINDOW = 504


def main() -> None:
    """Answer every job on stdin."""
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    def score(ids: list[int], start: int) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        table = torch.log_softmax(logits, -1)
        return sum(float(table[i - 1, ids[i]]) for i in range(start, len(ids)))

    answers = []
    for job in json.load(sys.stdin):
        if job["prefix"] is None:
            ids = [tokenizer.eos_token_id, *tokenizer(job["text"])["input_ids"]]
            total, start = 0.0, 1
            while start < len(ids):
                piece = ids[start - 1 : start - 1 + WINDOW]
                total += score(piece, 1)
                start += len(piece) - 1
            answers.append([total, len(ids) - 1])
        else:
            before = tokenizer(job["prefix"])["input_ids"]
            ids = tokenizer(job["prefix"] + job["text"])["input_ids"]
            answers.append([score(ids, len(before)), len(ids) - len(before)])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
