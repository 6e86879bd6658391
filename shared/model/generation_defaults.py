"""What a model's generation_config says of every answer: the tokens that end it count, the rest is said."""

import structlog
from transformers import PreTrainedModel

log = structlog.get_logger("neap.model")

# What changes greedy answers of `generate`, and the value with which it does not, beside None. They are options of a
# request here: rules of its own are no part of what a router has learned.
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


def warn_of_defaults(model: PreTrainedModel, model_id: str) -> None:
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
