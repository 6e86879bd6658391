"""Logits and what is asked of them, drawn by hypothesis."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from hypothesis import strategies as st
from neap_client.fields import FIELDS
from torch import Tensor

from shared.model.sampling import SamplingParams, Trial

MIN_TEMPERATURE = FIELDS["Sampling"]["temperature"].least
SAMPLED = (MIN_TEMPERATURE, 0.3, 0.8, 1.0, 1.7, 1e308)


def _words(vocabulary_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """They do not end with the token 0, so that one is always left."""
    first = st.lists(st.integers(0, vocabulary_size - 1), max_size=2)
    return st.tuples(first, st.integers(1, max(vocabulary_size - 1, 1))).map(lambda two: (*two[0], two[1]))


def _params(draw: st.DrawFn, vocabulary_size: int, temperatures: Sequence[float]) -> SamplingParams:
    token = st.integers(0, vocabulary_size - 1)
    drawn = {
        "temperature": draw(st.sampled_from(temperatures)),
        "top_k": draw(st.sampled_from([0, 0, 1, 3, vocabulary_size // 2, vocabulary_size + 4])),
        "top_p": draw(
            st.one_of(
                st.just(1.0),
                st.floats(0.0, 1.0, exclude_min=True),
                st.sampled_from([0.9, 0.999999, math.nextafter(1.0, 0.0)]),
            )
        ),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 0.5, 1.3])),
        "seed": draw(st.integers(0, 99)),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.7, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.3, 2.0])),
        "logit_bias": draw(st.dictionaries(token, st.sampled_from([-100.0, 0.1, 3.0]), max_size=3)),
        "min_tokens": draw(st.sampled_from([0, 0, 1, 4])),
        "bad_words": draw(st.lists(_words(vocabulary_size), max_size=3 if vocabulary_size > 1 else 0)),
    }
    assert drawn.keys() == {field.name for field in fields(SamplingParams)}, "draw the new field"
    return SamplingParams(**drawn)


@st.composite
def cases(draw: st.DrawFn, temperatures: Sequence[float] = SAMPLED) -> tuple[Tensor, list[Trial]]:
    """Logits [T, V], V odd and even, with ties and with what cannot be; up to four trials of up to six rows."""
    size = draw(st.sampled_from([1, 2, 5, 64, 97, 1000, 1501]))
    token = st.integers(0, size - 1)
    trials = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.lists(token, min_size=1, max_size=8))
        trials.append(
            Trial(
                _params(draw, size, temperatures),
                context,
                draw(st.lists(token, max_size=5)),
                num_prompt_tokens=draw(st.integers(1, len(context))),
                end_token_ids=draw(st.frozensets(st.integers(1, size - 1), max_size=2)) if size > 1 else frozenset(),
            )
        )
    rows = sum(trial.num_rows for trial in trials)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = draw(st.sampled_from([0.1, 3.0, 30.0])) * torch.randn(rows, size, generator=generator)
    if draw(st.booleans()):  # as from a head in half precision: many are equal
        logits = logits.mul(2).round().div(2)
    if draw(st.booleans()):
        logits[:, 1:][torch.rand(rows, size - 1, generator=generator) < 0.2] = -math.inf
    return logits, trials


def row_alone(trial: Trial, row: int) -> Trial:
    """What plain decoding would ask where the trial asks for row `row`."""
    return replace(trial, context=[*trial.context, *trial.drafts[:row]], drafts=())
