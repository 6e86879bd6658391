"""What a model's `generation_config` says of answers: how they end, and what requests may take from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from neap_client.fields import FIELDS
from transformers import PreTrainedModel

from shared.errors import InvalidInput
from shared.model.sampling import SamplingParams

log = structlog.get_logger("neap.model")

# What changes greedy answers of `generate`, and the value with which it does not, beside None. A request has no option
# for most of them.
NEUTRAL = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "watermarking_config": None,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """`sampling`: arguments of `SamplingParams`, by name; those that a config leaves open are absent.
    `max_tokens` None: it states none."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_tokens: int | None = None


def generation_defaults(model: PreTrainedModel, model_id: str) -> GenerationDefaults:
    """What the config states beyond transformers' own defaults. A value that no request may have is left out, and
    logged."""
    config = getattr(model, "generation_config", None)
    stated: dict[str, Any] = config.to_diff_dict() if config is not None else {}
    sampling: dict[str, float | int] = {}
    for name, option in FIELDS["Sampling"].items():
        # transformers' 0 switches top_k off, as an absent one does here.
        if not option.in_generation_config or (value := stated.get(name)) is None or (name == "top_k" and value == 0):
            continue
        try:
            checked = option.python_type(value)
            SamplingParams(**{name: checked})
        except (InvalidInput, TypeError, ValueError) as error:
            log.warning("a default of the model's generation_config is not used", model_id=model_id, reason=str(error))
        else:
            sampling[name] = checked
    most = stated.get("max_new_tokens")
    return GenerationDefaults(sampling, most if isinstance(most, int) and most > 0 else None)


def eos_token_ids(model: PreTrainedModel, model_id: str, vocabulary_size: int) -> frozenset[int]:
    """The end-of-sequence tokens, as for Hugging Face's own `generate`. The config has one id or a list."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        return frozenset()
    named = frozenset([ids] if isinstance(ids, int) else ids)
    tokens = frozenset(token for token in named if 0 <= token < vocabulary_size)
    if tokens != named:
        log.warning("end tokens outside the vocabulary end nothing", model_id=model_id, ids=sorted(named - tokens))
    return tokens


def warn_of_rules(model: PreTrainedModel, model_id: str) -> None:
    """Names what `generate` would apply to every answer, and an engine does not unless a request asks for it."""
    generation = getattr(model, "generation_config", None)
    values = {name: getattr(generation, name, None) for name in NEUTRAL}
    fields = {name: value for name, value in values.items() if value is not None and value != NEUTRAL[name]}
    if fields:
        log.warning(
            "the model's generation_config has rules that transformers' generate applies and answers here do not have "
            "unless a request asks for them",
            model_id=model_id,
            **fields,
        )
