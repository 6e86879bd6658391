"""On a GPU: a row's distribution has the same bits whatever is beside it, and verification waits for the device once.

Also asked of the CPU, so that the cases are known to be sound where there is no GPU.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared import ops
from shared.engine.verification import compute_choices, verify
from shared.model.choosing import num_accepted
from shared.model.distribution import candidates, nucleus
from shared.model.sampling import SamplingParams, Trial
from tests.drawn_trials import row_alone
from tests.masks import drawn_masks

KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.1, top_p=0.9, seed=4),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=0.8),
    SamplingParams(presence_penalty=0.6, frequency_penalty=0.3, logit_bias={3: 20.0, 9: -3.0}),
    SamplingParams(temperature=1.1, seed=6, min_tokens=3, bad_words=((700, 0), (5,)), frequency_penalty=1.0),
]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
# At an odd width every row starts at another alignment.
every_size = pytest.mark.parametrize("size", [49152, 50257])


def case(size: int, device: str) -> tuple[Tensor, list[Trial]]:
    """Logits [T, V], every third row with ties as from a head in half precision, and trials of one to four rows."""
    trials = [
        Trial(kind, [5, 9, 5, 700], list(range(count)), None, 2, frozenset({1})) for kind in KINDS for count in (0, 3)
    ]
    masks = drawn_masks(size, trials, size)
    trials += [replace(trial, allowed=own) for trial, own in zip(trials, masks, strict=True)]
    logits = 3 * torch.randn(sum(trial.num_rows for trial in trials), size)
    logits[::3] = logits[::3].bfloat16().float()
    return logits.to(device), trials


def masses(logits: Tensor, trials: list[Trial]) -> Tensor:
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    return nucleus(*candidates(logits, trials), params)


@every_device
@every_size
def test_rows_have_the_same_bits_alone_and_in_company(device: str, size: int) -> None:
    logits, trials = case(size, device)
    rows = logits.split([trial.num_rows for trial in trials])
    members = [index for index, trial in enumerate(trials) if not trial.sampling.is_greedy]
    together = masses(torch.cat([rows[i] for i in members]), [trials[i] for i in members])
    alone = [
        masses(rows[i][row : row + 1], [row_alone(own, row)])
        for i in members
        for own in [trials[i]]
        for row in range(own.num_rows)
    ]
    assert torch.equal(together, torch.cat(alone))


@every_device
@every_size
def test_verdicts_are_the_same_alone_and_in_company(device: str, size: int) -> None:
    if device == "cuda" and not ops.runs_on("cuda"):
        pytest.fail("there is a GPU, but neap's kernels were built without CUDA")
    logits, trials = case(size, device)
    rows = logits.split([trial.num_rows for trial in trials])
    for trial, own, verdict in zip(trials, rows, verify(logits, trials), strict=True):
        assert verify(own, [trial]) == [verdict]
        assert num_accepted(verdict.tokens, trial.drafts) == len(verdict.tokens) - 1


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_the_driver_sees_no_wait_before_the_answer_is_read(device: str) -> None:
    logits, trials = case(49152, device)
    wanted = ([None, 0, 5] * len(trials))[: len(trials)]
    verify(logits, trials, wanted)  # what is made once only is made now
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute_choices(logits, trials, wanted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
