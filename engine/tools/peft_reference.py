"""The logits of transformers and PEFT, against which the engine's are compared.

Needs both packages, which serving does not: only `engine.checks.parity` imports this module, when a
comparison is asked for. Everything is read from the two local folders; code of a model is never
run, and pickles are not read.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import peft
import torch
import transformers
from peft import PeftModel
from transformers.utils import logging as transformers_logging

from engine.model_config import read_model_config

VERSIONS = f"transformers {transformers.__version__}, peft {peft.__version__}"


def peft_logits(
    base_folder: Path, folder: Path, prompts: Sequence[Sequence[int]]
) -> Iterator[torch.Tensor]:
    """Yields the logits [len(prompt), V] of each prompt, in float32 on the CPU. Raises the errors
    of the two libraries for folders that they cannot read."""
    transformers_logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # warnings of loading; errors are exceptions
        # The class by its name: no single one of the automatic classes knows the models of text and
        # those of text and images.
        architecture = read_model_config(base_folder).architecture
        model_class = getattr(transformers, architecture, None)
        if model_class is None:
            raise ValueError(f"transformers {transformers.__version__} has no {architecture}")
        base = model_class.from_pretrained(
            base_folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
        )
        model = PeftModel.from_pretrained(base, str(folder), torch_device="cpu").eval()
    with torch.inference_mode():
        for prompt in prompts:
            # Each alone: PEFT finds the invocation tokens of aLoRA in a prompt's own row.
            ids = torch.tensor([list(prompt)])
            found: torch.Tensor = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits[0]
            yield found.float()
