"""Loglikelihoods by Hugging Face for the comparison with lm-eval's."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CASES = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a banana"),
    ("Question: How many legs has a spider?\nAnswer:", " eight"),
    ("Question: How many legs has a spider?\nAnswer:", " The spider has eight legs."),
    ("def add(a, b):\n    return", " a + b"),
    ("Water boils at a temperature of", " 100 degrees Celsius"),
)


def loglikelihoods(base: Path) -> list[dict[str, object]]:
    """Returns for each case its texts, the sum over the continuation's tokens, and whether greedy
    decoding would write it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    found: list[dict[str, object]] = []
    for context, continuation in CASES:
        start = len(tokenizer(context)["input_ids"])
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        with torch.inference_mode():
            scores = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        wanted = ids[0, start:]
        found.append(
            {
                "context": context,
                "continuation": continuation,
                "loglikelihood": float(scores.gather(1, wanted[:, None]).sum()),
                "is_greedy": bool((scores.argmax(-1) == wanted).all()),
            }
        )
    return found
