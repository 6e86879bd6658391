"""What changes scores, written once more, token by token, as transformers, vLLM and OpenAI's API define it."""

import torch
from torch import Tensor

from shared.model.sampling import Trial


def changed(logits: Tensor, trial: Trial) -> Tensor:
    """The scores [V] of a trial without drafts."""
    sampling, context = trial.sampling, [*trial.context]
    answer, scores = context[trial.num_prompt_tokens :], logits.tolist()
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    for token in set(context):
        penalty = sampling.repetition_penalty
        scores[token] *= penalty if scores[token] <= 0 else 1 / penalty
    for token in set(answer):
        scores[token] -= sampling.presence_penalty
        scores[token] -= sampling.frequency_penalty * answer.count(token)
    for token in trial.end_token_ids if len(answer) < sampling.min_tokens else ():
        scores[token] = -torch.inf
    for *before, last in sampling.bad_words:
        if context[len(context) - len(before) :] == before:
            scores[last] = -torch.inf
    return torch.tensor(scores)
