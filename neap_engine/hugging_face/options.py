"""Reads the options of a `generate` call of transformers. An option that an engine cannot honour is an error."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from shared.errors import InvalidInput
from shared.model.cache_argument import CACHE_ARGUMENTS
from shared.model.sampling import SamplingParams

# In transformers' own order, which is the engine's: (class, its attribute, field of SamplingParams).
FILTERS = (
    (SequenceBiasLogitsProcessor, "sequence_bias", "logit_bias"),
    (RepetitionPenaltyLogitsProcessor, "penalty", "repetition_penalty"),
    (NoBadWordsLogitsProcessor, "sequence_bias", "bad_words"),
    (MinLengthLogitsProcessor, "min_length", "min_tokens"),
    (MinNewTokensLengthLogitsProcessor, "min_new_tokens", "min_tokens"),
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
)
WARPERS = {field for kind, _, field in FILTERS if kind.__name__.endswith("Warper")}
# They decide for each sequence on its own, so that they may be asked about one sequence at a time.
CRITERIA_OF_ONE_SEQUENCE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
# What transformers itself passes to each decoding method. The engine has its own cache and its own passes.
PASSED_ALWAYS = frozenset(
    {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHE_ARGUMENTS}
)  # fmt: skip
OUTPUTS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")


def unsupported(option: str, why: str = "an engine of neap does not have it") -> InvalidInput:
    return InvalidInput(
        f"generate: {option} cannot be used here: {why}", reason="UNSUPPORTED_OPTION", metadata={"option": option}
    )


def check_config(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` (UNSUPPORTED_OPTION) for a decoding mode, an output or a model input that an engine does
    not have."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise unsupported(mode.value.replace("_", " "), "an engine is greedy or samples")
    for name in OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name):
            raise unsupported(name, "an engine returns tokens only")
    check_cache(config.cache_implementation)
    for name in sorted(set(model_kwargs) - PASSED_ALWAYS):
        if model_kwargs[name] is not None:
            raise unsupported(name, "the model's only inputs are token ids")


def check_cache(implementation: str | None) -> None:
    """Raises `InvalidInput` (UNSUPPORTED_OPTION) for a cache whose numbers differ, and for one that makes transformers
    batch requests."""
    if implementation in ("paged", "quantized"):
        raise unsupported(f"cache_implementation={implementation!r}", "an engine has its own cache")


def prompts_of(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[tuple[int, ...]]:
    """input_ids [B, S], attention mask [B, S] and position ids [B, S] -> the prompt of each row, without its padding.

    Raises `InvalidInput` (UNSUPPORTED_OPTION) for padding that is not on the left, and for positions that do not count
    from 0.
    """
    if mask is None:
        mask = torch.ones_like(input_ids)
    seen = mask.bool()
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise unsupported("attention_mask", "only padding on the left can be masked")
    if positions is not None:
        counted = (seen.long().cumsum(-1) - 1).expand_as(seen)
        if not torch.equal(positions.expand_as(seen)[seen], counted[seen]):
            raise unsupported("position_ids", "the positions of a prompt count from 0")
    return [tuple(ids[is_seen].tolist()) for ids, is_seen in zip(input_ids, seen, strict=True)]


def sampling_of(
    processors: Iterable[Any],
    *,
    do_sample: bool,
    num_given: int,
    num_padding: Sequence[int],
    end_token_ids: Collection[int],
) -> dict[str, Any]:
    """The fields of `SamplingParams` that a list of logits processors stands for.

    `num_given`: tokens of each row, of which `num_padding` are padding. `end_token_ids`: the tokens that end an answer
    of the engine. Raises `InvalidInput` (UNSUPPORTED_OPTION) for other processors, and
    other orders.
    """
    classes = [kind for kind, _, _ in FILTERS]
    fields: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    last = -1
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:  # changes no order and no probability
            continue
        place = classes.index(kind) if kind in classes else -1
        _, attribute, field = FILTERS[place]
        if place < 0 or (field in WARPERS and not do_sample):
            raise unsupported(kind.__name__)
        if place <= last:
            raise unsupported(kind.__name__, "it comes twice, or before one that it must follow")
        if getattr(processor, "min_tokens_to_keep", 1) != 1:
            raise unsupported(f"{kind.__name__}.min_tokens_to_keep", "it must be 1")
        ignored = getattr(processor, "prompt_ignore_length", None)
        if ignored is not None and torch.as_tensor(ignored).tolist() != list(num_padding):
            raise unsupported("prompt_ignore_length", "the penalty counts the whole prompt")
        last, value = place, getattr(processor, attribute)
        if field == "logit_bias":
            if any(len(sequence) > 1 for sequence in value):
                raise unsupported("sequence_bias", "only single tokens can have a bias")
            value = {token: bias for (token,), bias in value.items()}
        elif field == "bad_words":
            value = tuple(value)
        elif field == "min_tokens":
            if set(processor.eos_token_id.tolist()) != set(end_token_ids):
                raise unsupported(kind.__name__, "it must be of the model's end-of-sequence tokens")
            value = max(value - (num_given if attribute == "min_length" else 0), 0)
        fields[field] = value
    return fields


def eos_token_ids(config: GenerationConfig) -> list[int]:
    ids = config.eos_token_id
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def with_seeds(fields: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """One `SamplingParams` per row. Their seeds come from torch's global generator, so `torch.manual_seed` makes a call
    repeatable."""
    if not fields["temperature"]:
        return [SamplingParams(**fields)] * count
    seeds = torch.randint(2**63 - 1, (count,)).tolist()
    return [SamplingParams(**fields, seed=seed) for seed in seeds]
