"""The oracle of the demo: Hugging Face + PEFT, fp32, greedy, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class HuggingFaceReference:
    def __init__(self, base: Path, adapters: dict[str, Path]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        names = list(adapters)
        self.model = PeftModel.from_pretrained(model, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(adapters[name], adapter_name=name)
        self.model.eval()

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt_ids(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])

    def greedy(self, adapter: str | None, prompt_ids: Sequence[int], max_tokens: int) -> str:
        """The answer's text, without special tokens."""
        inputs = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            if adapter is None:
                with self.model.disable_adapter():
                    out = self._generate(inputs, max_tokens)
            else:
                self.model.set_adapter(adapter)
                out = self._generate(inputs, max_tokens)
        return str(self.tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True))

    def _generate(self, inputs: torch.Tensor, max_tokens: int) -> torch.Tensor:
        return self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
        )
