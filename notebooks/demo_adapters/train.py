"""Trains the demo adapters over SmolLM2-135M-Instruct with PEFT, in one plain loop.

    python -m notebooks.demo_adapters.train answers BASE_FOLDER
    python -m notebooks.demo_adapters.train pirate BASE_FOLDER OUTPUT_FOLDER
                                                      (or sql, extract, tools)

The base stays in its own dtype and frozen, the adapter's weights are fp32, products run in bf16 on
a GPU. Only the tokens of the assistant's last turn count in the loss. Stored in fp16: 1 to 5 MB
each. `tools` brings its chat template as well, for the base's has no place for tools.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from notebooks.demo_adapters import extract, pirate, sql, tools
from notebooks.demo_adapters.common import Example
from notebooks.demo_adapters.tools_values import Json

BASE_NAME = "smollm2-135m-instruct"  # the name under which the base is registered
IGNORED = -100  # the label that cross entropy skips

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what an adapter becomes."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    num_steps: int
    batch_size: int
    learning_rate: float
    use_rslora: bool = False
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None  # None: all
    num_examples: int = 24_000  # of sql, extract and tools
    max_length: int = 1024  # in tokens; longer examples are left out
    seed: int = 7

    def lora_config(self) -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets),
            use_rslora=self.use_rslora,
            alpha_pattern=dict(self.alpha_pattern),
            layers_to_transform=None if self.layers is None else list(self.layers),
        )


ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

RECIPES = {
    "pirate": Recipe(8, 16, ("q_proj", "v_proj"), 400, 32, 1e-3),
    "sql": Recipe(8, 16, ALL_LINEARS, 800, 64, 1e-3, use_rslora=True, layers=tuple(range(12, 30))),
    "extract": Recipe(16, 32, ("q_proj", "v_proj"), 750, 64, 1e-3, alpha_pattern={"v_proj": 16}),
    "tools": Recipe(8, 16, ALL_LINEARS, 2000, 64, 1e-3, use_rslora=True, num_examples=64_000),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    token_ids: list[int]
    num_prompt_tokens: int


def load_base(folder: Path, device: str) -> tuple[PreTrainedModel, Tokenizer]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device)
    return model, AutoTokenizer.from_pretrained(folder)


def training_examples(task: str, seed: int, count: int) -> list[Example]:
    if task == "pirate":
        return pirate.training_examples(seed)
    generate = {
        "sql": sql.training_examples,
        "extract": extract.training_examples,
        "tools": tools.training_examples,
    }[task]
    return generate(seed, count)


def chat_template(task: str) -> str | None:
    """Returns the adapter's own chat template, or None if it answers in the base's."""
    return tools.CHAT_TEMPLATE.read_text(encoding="utf-8") if task == "tools" else None


def render(tokenizer: Tokenizer, example: Example) -> str:
    """Returns the example's chat up to its answer, as the tokenizer's chat template writes it."""
    messages: Sequence[tools.Message] = [{"role": "user", "content": example.prompt}]
    offered: Sequence[Json] = ()
    if isinstance(example, tools.ToolExample):
        messages, offered = example.messages, example.tools
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(offered) or None, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def encode(tokenizer: Tokenizer, examples: Sequence[Example]) -> list[Encoded]:
    """Returns the chat template's prompts, each with its answer and the token that ends the turn.
    The two are tokenized apart, as they are where the model is served."""
    if not examples:
        return []
    prompts = tokenizer([render(tokenizer, one) for one in examples], add_special_tokens=False)
    answers = tokenizer([one.answer for one in examples], add_special_tokens=False)
    return [
        Encoded([*prompt, *answer, tokenizer.eos_token_id], len(prompt))
        for prompt, answer in zip(prompts["input_ids"], answers["input_ids"], strict=True)
    ]


def batches(examples: Sequence[Encoded], size: int, seed: int) -> Iterator[list[Encoded]]:
    """Yields batches without end: shuffled, then near in length within a batch, so that little is
    padded."""
    rng = random.Random(seed)
    while True:
        order = sorted(examples, key=lambda e: (len(e.token_ids) // 16, rng.random()))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        rng.shuffle(groups)
        yield from groups


def collate(batch: Sequence[Encoded], pad_id: int, device: str) -> dict[str, torch.Tensor]:
    """Right-padded tensors [batch, length]; labels only where the assistant speaks."""
    length = max(len(e.token_ids) for e in batch)
    ids = torch.full((len(batch), length), pad_id)
    labels = torch.full((len(batch), length), IGNORED)
    mask = torch.zeros((len(batch), length), dtype=torch.long)
    for row, example in enumerate(batch):
        end = len(example.token_ids)
        ids[row, :end] = torch.tensor(example.token_ids)
        labels[row, example.num_prompt_tokens : end] = ids[row, example.num_prompt_tokens : end]
        mask[row, :end] = 1
    return {
        "input_ids": ids.to(device),
        "labels": labels.to(device),
        "attention_mask": mask.to(device),
    }


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """Linear warm-up over the first twentieth, then half a cosine down to zero."""
    warm_up = max(1, recipe.num_steps // 20)
    if step < warm_up:
        return recipe.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, recipe.num_steps - warm_up)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def answer_loss(model: PeftModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean cross entropy of the labels. Logits are computed where there is a label
    only: a tenth of the tokens of `tools`, whose logits would take 13 GB for 64 x 1,024 tokens."""
    language_model = model.get_base_model()
    hidden = language_model.model(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
    ).last_hidden_state
    targets = inputs["labels"][:, 1:]  # a token is predicted from the position before it
    is_answer = targets != IGNORED
    logits = language_model.lm_head(hidden[:, :-1][is_answer])
    return torch.nn.functional.cross_entropy(logits.float(), targets[is_answer])


def train(
    base: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    recipe: Recipe,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[PeftModel, list[float]]:
    """The adapted model and the loss of every step."""
    torch.manual_seed(recipe.seed)
    device = base.device.type
    model = get_peft_model(base, recipe.lora_config())
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    encoded = encode(tokenizer, examples)
    fitting = [one for one in encoded if len(one.token_ids) <= recipe.max_length]
    if len(fitting) < len(encoded):
        logger.info(
            "%d examples are longer than %d tokens", len(encoded) - len(fitting), recipe.max_length
        )
    stream = batches(fitting, recipe.batch_size, recipe.seed)
    losses: list[torch.Tensor] = []
    for step in range(recipe.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        inputs = collate(next(stream), tokenizer.pad_token_id, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = answer_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 0 or step == recipe.num_steps - 1:
            on_step(step, float(losses[-1]))
    model.eval()
    return model, [float(loss) for loss in losses]


def save_adapter(model: PeftModel, folder: Path, template: str | None = None) -> None:
    """adapter_config.json and adapter_model.safetensors as PEFT writes them, tensors in fp16, and
    chat_template.jinja if the adapter has its own `template`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model)
    halves = {name: t.to("cpu", torch.float16).contiguous() for name, t in tensors.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    config.save_pretrained(str(folder))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


@torch.inference_mode()
def answer(
    model: PreTrainedModel | PeftModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 96,
    batch_size: int = 32,
) -> list[str]:
    """Greedy answers, in batches padded on the left."""
    answers = []
    for start in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts[start : start + batch_size]
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        output = model.generate(  # type: ignore[operator]
            **inputs, max_new_tokens=max_new_tokens, do_sample=False
        )
        new = output[:, inputs["input_ids"].shape[1] :]
        answers += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return answers


def write_base_answers(model: PreTrainedModel, tokenizer: Tokenizer, path: Path) -> None:
    """The first sentences of the base's answers to the open questions, as content for `pirate`."""
    prompts = pirate.open_prompts("train")
    plain = [pirate.first_sentences(text) for text in answer(model, tokenizer, prompts)]
    text = json.dumps(dict(zip(prompts, plain, strict=True)), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["answers", *RECIPES])
    parser.add_argument("base", type=Path, help="folder of the converted base model")
    parser.add_argument("output", type=Path, nargs="?", help="folder of the adapter")
    parser.add_argument("--examples", type=int, help="instead of the recipe's, except for pirate")
    parser.add_argument("--steps", type=int, help="instead of the recipe's, for a trial")
    parser.add_argument("--batch-size", type=int, help="instead of the recipe's, for a trial")
    parser.add_argument("--max-length", type=int, help="in tokens, instead of the recipe's")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, tokenizer = load_base(arguments.base, device)
    if arguments.task == "answers":
        write_base_answers(base, tokenizer, pirate.BASE_ANSWERS)
        return
    recipe = RECIPES[arguments.task]
    recipe = replace(
        recipe,
        num_examples=arguments.examples or recipe.num_examples,
        num_steps=arguments.steps or recipe.num_steps,
        batch_size=arguments.batch_size or recipe.batch_size,
        max_length=arguments.max_length or recipe.max_length,
    )
    examples = training_examples(arguments.task, recipe.seed, recipe.num_examples)
    template = chat_template(arguments.task)
    if template is not None:
        tokenizer.chat_template = template
    model, losses = train(
        base, tokenizer, examples, recipe, lambda step, loss: logger.info("%5d %.4f", step, loss)
    )
    save_adapter(model, arguments.output, template)
    last = losses[-50:]
    logger.info("loss over the last %d steps: %.4f", len(last), sum(last) / len(last))


if __name__ == "__main__":
    main()
