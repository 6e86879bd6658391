"""Hugging Face's `generate` on PyTorch, several prompts in one left-padded batch."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from bench.peers.engines.serving import Answer, EngineSettings, serve

PAD = 0


class _Watch(StoppingCriteria):
    """Notes each new token of each row while the row is running. Stops nothing."""

    def __init__(self, answers: list[Answer], end_ids: frozenset[int]) -> None:
        self._answers, self._end_ids = answers, end_ids

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """`input_ids` [rows, tokens so far] int64."""
        for answer, token_id in zip(self._answers, input_ids[:, -1].tolist(), strict=True):
            if not answer.token_ids or answer.token_ids[-1] not in self._end_ids:
                answer.add(token_id)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class HuggingFace:
    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.num_threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._end_ids = frozenset(settings.end_ids)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings.source, dtype=getattr(torch, settings.weights), use_safetensors=True, trust_remote_code=False
        ).eval()
        self.answer([[1] * 8], 2, "")

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        width = max(map(len, prompts))
        answers = [Answer([], []) for _ in prompts]
        padded = [[PAD] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self._end_ids) or None,
                pad_token_id=PAD,
                stopping_criteria=StoppingCriteriaList([_Watch(answers, self._end_ids)]),
            )
        return answers


if __name__ == "__main__":
    serve(HuggingFace)
