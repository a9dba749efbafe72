"""lm-eval: loglikelihoods through local-completions, compared with Hugging Face's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

TOLERANCE = 0.02  # sums over a continuation of some tokens, both in fp32


@pytest.fixture(scope="module")
def lm(base_url, model):
    return LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model=model,
        tokenizer=os.environ["CONFORMANCE_TOKENIZER"],
        tokenizer_backend="huggingface",
        max_length=2048,
        max_retries=1,
        num_concurrent=1,
    )


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=tuple(one), idx=i)
        for i, one in enumerate(arguments)
    ]


def test_loglikelihoods_are_those_of_hugging_face(lm):
    cases = json.loads(Path(os.environ["CONFORMANCE_LOGLIKELIHOODS"]).read_text())
    asked = requests("loglikelihood", [(one["context"], one["continuation"]) for one in cases])
    for case, (total, is_greedy) in zip(cases, lm.loglikelihood(asked), strict=True):
        assert total == pytest.approx(case["loglikelihood"], abs=TOLERANCE), case
        assert is_greedy == case["is_greedy"], case


def test_generate_until(lm):
    settings = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0}
    answers = lm.generate_until(
        requests("generate_until", [("The capital of France is", settings)])
    )
    assert "Paris" in answers[0]
