"""Converts a GGUF file once into a folder that the engine reads: safetensors, tokenizer and chat
template.

Uses transformers, which has the block formats; no other module of the engine imports it. Weights
are stored in bfloat16: half the bytes of float32, and finer than any 4-bit source.
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)


def convert_gguf(
    gguf_path: Path, out_dir: Path, progress: Callable[[str], None] = logger.info
) -> None:
    """Writes `out_dir` as a whole or not at all. Raises OSError or ValueError for an unreadable
    file."""
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists")
    folder, name = str(gguf_path.parent), gguf_path.name
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    progress(f"reading {name}")
    # The bar over a GGUF's tensors ignores the line above; errors are exceptions.
    with contextlib.redirect_stderr(io.StringIO()):
        quantized = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    progress("converting to bfloat16 safetensors")
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    config.dtype = torch.bfloat16
    # A fresh model: the one that was read counts as quantized and refuses to be saved.
    plain = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantized.state_dict())
    plain.to(torch.bfloat16)
    plain.generation_config = quantized.generation_config
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        progress(f"saved {out_dir}")
        partial.chmod(0o755)
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
