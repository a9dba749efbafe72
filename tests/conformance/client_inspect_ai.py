"""inspect-ai: a task of one sample through its OpenAI-compatible provider."""

from __future__ import annotations

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes


def test_task(base_url, model, tmp_path):
    served = get_model(f"openai-api/loraplex/{model}", base_url=base_url, api_key="none")
    task = Task(
        dataset=[Sample(input="What is the capital of France?", target="Paris")],
        scorer=includes(),
        config=GenerateConfig(max_tokens=48, temperature=0.0),
    )
    log = eval(task, model=served, log_dir=str(tmp_path), display="none")[0]
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
