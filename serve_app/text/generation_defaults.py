"""The sampling defaults in a model's generation_config.json, as vLLM's `--generation-config auto`
reads it: the file's value applies where a request leaves a field out.

In a base's file a value outside a request's bounds is ignored, with one line in the log: a base
that has served with it so far must keep serving. An adapter's file is checked at registration: such
a value, or a field that cannot be served, refuses the adapter. The adapter's values apply where the
request has none, and the base's where the adapter has none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.admission import MIN_REPETITION_PENALTY
from engine.errors import UnsupportedModelError
from serve_app.field_problems import problem_of

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
_MAX_EOS_IDS = 16


class GenerationDefaults(BaseModel):
    """The fields of the file, under its names and with a request's bounds; None stands for the
    API's default."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=2)
    # For chats only; completions default to 16.
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31)

    def over(self, base: GenerationDefaults) -> GenerationDefaults:
        """Returns these values, and those of `base` where there are none."""
        return base.model_copy(update=self.model_dump(exclude_none=True))


NO_DEFAULTS = GenerationDefaults.model_validate({})
# Fields of the file that change answers and that no engine here computes, with the values that
# leave answers as they are.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([],),
}


def own_generation_config(
    base: Mapping[str, object], own: Mapping[str, object], num_tokens: int
) -> dict[str, object]:
    """Returns the served fields of an adapter's generation_config.json that differ from the
    base's. `num_tokens`: ids are below it. Raises UnsupportedModelError with the field and the
    value if one cannot be served."""
    changed = {name: value for name, value in own.items() if base.get(name) != value}
    for name, neutral in _UNSERVED.items():
        value = changed.get(name)
        if value is not None and value not in neutral:
            raise UnsupportedModelError(f"{FILE}: {name} is {_shown(value)}, which is not served")
    try:
        defaults = GenerationDefaults.model_validate(changed)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnsupportedModelError(
            f"{FILE}: {first['loc'][0]} is {_shown(first['input'])}: {problem_of(first)}"
        ) from None
    kept = defaults.model_dump(exclude_none=True)
    if (eos := changed.get("eos_token_id")) is not None:
        ids = eos if isinstance(eos, list) else [eos]
        is_id = all(type(one) is int and 0 <= one < num_tokens for one in ids)
        if not is_id or len(ids) > _MAX_EOS_IDS:
            raise UnsupportedModelError(
                f"{FILE}: eos_token_id is {_shown(eos)}: at most {_MAX_EOS_IDS} ids from 0 to "
                f"{num_tokens - 1} are allowed"
            )
        kept["eos_token_id"] = ids
    return kept


def _shown(value: object) -> str:
    return repr(value)[:100]


def read_generation_defaults(files: Mapping[str, bytes], name: str) -> GenerationDefaults:
    """Reads the defaults from a base's text `files`; `name` is the base's name, for the log."""
    try:
        config = json.loads(files.get(FILE, b"{}"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        logger.warning("%s: %s is ignored because it is not a JSON object", name, FILE)
        return NO_DEFAULTS
    try:
        return GenerationDefaults.model_validate(config)
    except ValidationError as error:
        invalid = sorted({str(one["loc"][0]) for one in error.errors()})
    logger.warning("%s: invalid values of %s in %s are ignored", name, ", ".join(invalid), FILE)
    valid = {field: value for field, value in config.items() if field not in invalid}
    return GenerationDefaults.model_validate(valid)
