"""OpenVINO GenAI's continuous batching pipeline, stepped by hand.

Prompt look-up has the numbers of its own sample: five tokens drafted, after up to three that match.
"""

import numpy
import openvino_genai
from openvino import Tensor

from bench.peers.engines.serving import Answer, EngineSettings, serve


class OpenVino:
    def __init__(self, settings: EngineSettings) -> None:
        self._end_ids = frozenset(settings.end_ids)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = settings.max_running
        scheduler.enable_prefix_caching = False
        properties: dict[str, object] = {
            "INFERENCE_NUM_THREADS": settings.num_threads,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        if settings.weights == "float32":
            # By default keys and values are kept in 8 bits.
            properties["KV_CACHE_PRECISION"] = "f32"
        self._looks_up = any(settings.modes)
        if self._looks_up:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings.source, scheduler, "CPU", properties)
        self.answer([[1] * 8], 2, "")

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = set(self._end_ids)
        if self._looks_up:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        answers = [Answer([], []) for _ in prompts]
        handles = [
            self._pipeline.add_request(number, Tensor(numpy.array([ids], numpy.int64)), config)
            for number, ids in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, answer in zip(handles, answers, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        for token_id in output.generated_ids:
                            answer.add(token_id)
        return answers


if __name__ == "__main__":
    serve(OpenVino)
