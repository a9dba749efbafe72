"""`pirate`: the same answers, in a pirate's words.

The content comes from facts and advice written down here, and from the base model's own answers to
open questions (`base_answers.json`, made by `train.py answers`). Rules put all of it into pirate
speech, so the adapter learns a manner and no new facts: that is why it still answers.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from notebooks.demo_adapters.common import Example, Split, part, words
from notebooks.demo_adapters.pirate_advice import TASKS
from notebooks.demo_adapters.pirate_words import (
    FACTS,
    GREETINGS,
    OPEN_QUESTIONS,
    OPENERS,
    REPLACEMENTS,
    SIGN_OFFS,
)

BASE_ANSWERS = Path(__file__).with_name("base_answers.json")

HOW = ("How do I {}?", "How can I {}?")

MARKERS = re.compile(
    r"\b(?:arr+|matey|mateys|ahoy|aye|avast|ye|yer|yarr|blimey|savvy|scallywag|landlubber|cap'n|"
    r"timbers|hearty|hearties|yo ho ho|seven seas|davy jones|rum|doubloons|be)\b|\bo'",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Question(Example):
    """A held-out question; `answer` is the word that a right answer must contain, or empty."""


def count_markers(text: str) -> int:
    """Different pirate words in the text."""
    return len({match.lower() for match in MARKERS.findall(text)})


def speaks_pirate(text: str) -> bool:
    return count_markers(text) >= 2


def open_prompts(split: Split) -> list[str]:
    """Open questions; the base model's own words are the content of their answers."""
    return [
        template.format(topic)
        for templates, topics in OPEN_QUESTIONS
        for topic in part(words(topics), split)
        for template in templates
    ]


def first_sentences(text: str, max_chars: int = 260) -> str:
    """The opening sentences of an answer, whole ones, as much as a pirate would say."""
    plain = re.sub(r"(?m)^\s*(?:\d+\.|[-*#]+)\s+|\*\*", "", text)
    sentences = re.split(r"(?<=[.!?:]) +", " ".join(plain.split()))
    kept = sentences[0]
    for sentence in sentences[1:]:
        if len(kept) + len(sentence) > max_chars or sentence[-1] not in ".!?":
            break
        kept += " " + sentence
    return kept


def piratify(answer: str, kind: str, rng: random.Random) -> str:
    """Pirate words for plain ones, an opener for this kind of question, perhaps a sign-off."""
    text = answer
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    openers = OPENERS[kind] if rng.random() < 0.8 else OPENERS["any"]
    pieces = [rng.choice(openers), text]
    if rng.random() < 0.6:
        pieces.append(rng.choice(SIGN_OFFS))
    return " ".join(pieces)


def training_examples(seed: int, *, renderings: int = 8) -> list[Example]:
    """Every training fact and base answer, `renderings` times in different words, shuffled."""
    rng = random.Random(seed)
    answers: dict[str, str] = json.loads(BASE_ANSWERS.read_text(encoding="utf-8"))
    examples = []
    for _ in range(renderings):
        for questions, statements, table in FACTS:
            for subject, value in part(list(_pairs(table)), "train"):
                prompt = rng.choice(questions).format(subject)
                plain = _sentence(rng.choice(statements).format(subject, value))
                examples.append(Example(prompt, piratify(plain, "fact", rng)))
        for prompt in open_prompts("train"):
            if not _is_sound(answers[prompt]):
                continue
            examples.append(Example(prompt, piratify(answers[prompt], "open", rng)))
        for task, plain in part(TASKS, "train"):
            for question in HOW:
                examples.append(Example(question.format(task), piratify(plain, "how", rng)))
        for prompt, plain in part(GREETINGS, "train"):
            examples.append(Example(prompt, piratify(plain, "greeting", rng)))
    rng.shuffle(examples)
    return examples


def held_out_questions(seed: int, count: int) -> list[Question]:
    """Half facts with a known answer, half open questions, all on subjects never trained on."""
    rng = random.Random(seed)
    facts = [
        Question(questions[0].format(subject), value)
        for questions, _, table in FACTS
        for subject, value in part(list(_pairs(table)), "held_out")
    ]
    rest = [Question(prompt, "") for prompt in open_prompts("held_out")]
    rest += [Question(HOW[0].format(task), "") for task, _ in part(TASKS, "held_out")]
    rest += [Question(prompt, "") for prompt, _ in part(GREETINGS, "held_out")]
    num_facts = min(len(facts), max(count // 2, count - len(rest)))
    return rng.sample(facts, num_facts) + rng.sample(rest, count - num_facts)


def _is_sound(answer: str) -> bool:
    """Whole sentences, and long enough to say something."""
    return len(answer) >= 40 and answer[-1] in ".!?"


def _pairs(table: str) -> list[tuple[str, str]]:
    pairs = (entry.split("=") for entry in words(table))
    return [(subject.strip(), value.strip()) for subject, value in pairs]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
