"""vLLM's engine in this process, stepped by hand."""

import os

# The engine's loop runs in this process. vLLM reads both when it is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Bytes for keys and values, in GiB.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.peers.engines.serving import Answer, EngineSettings, serve


class Vllm:
    def __init__(self, settings: EngineSettings) -> None:
        self._end_ids = list(settings.end_ids)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings.source,
                dtype=settings.weights,
                max_model_len=settings.context_tokens,
                max_num_seqs=settings.max_running,
                enable_prefix_caching=False,
            )
        )
        self._num_requests = 0
        self.answer([[1] * 8], 2, "")

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=self._end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        answers: dict[str, Answer] = {}
        for ids in prompts:
            self._num_requests += 1
            answers[str(self._num_requests)] = Answer([], [])
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": ids}, params)
        while self._engine.has_unfinished_requests():
            for request in self._engine.step():
                for token_id in request.outputs[0].token_ids:
                    answers[request.request_id].add(token_id)
        return list(answers.values())


if __name__ == "__main__":
    serve(Vllm)
