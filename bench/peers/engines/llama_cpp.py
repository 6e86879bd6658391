"""llama.cpp by its C API: greedy decoding of sequences that share each `llama_decode`. With prompt look-up: by its
Python package, which answers one prompt after the other.

With the arguments quantise SOURCE TARGET TYPE, TYPE as in Q4_K_M, it quantises a .gguf file instead. With the arguments
surprise SOURCE WINDOWS THREADS it prints by how many nats the second half of windows of text surprises a model on
average; WINDOWS is a .npy file of token ids.
"""

import ctypes
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import llama_cpp as api
import numpy
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.peers.engines.serving import Answer, EngineSettings, serve

# Cells of a sequence's cache are allocated in multiples of this number.
CELLS = 256

# Tokens drafted by look-up: what the package advises for a CPU.
LOOK_UP_TOKENS = 2

# (token id, position, sequence, whether its logits are needed)
Entry = tuple[int, int, int, bool]


class LlamaCpp:
    def __init__(self, settings: EngineSettings) -> None:
        api.llama_backend_init()
        self._end_ids = frozenset(settings.end_ids)
        self._model = api.llama_model_load_from_file(settings.source.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings.source}")
        self._vocabulary_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        params = api.llama_context_default_params()
        cells = -(-settings.context_tokens // CELLS) * CELLS
        params.n_ctx = cells * settings.max_running
        params.n_seq_max = settings.max_running
        params.n_threads = params.n_threads_batch = settings.num_threads
        # Without it all sequences would share one range of cells, and each would attend over the cells of all.
        params.kv_unified = False
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch_tokens = api.llama_n_batch(self._context)
        self._batch = api.llama_batch_init(self._batch_tokens, 0, 1)
        self._reuses = settings.reuses
        self._read: list[int] = []
        self.answer([[1] * 8], 2, "")

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        num_kept = self._keep_beginning(prompts[0])
        answers = [Answer([], []) for _ in prompts]
        entries: list[Entry] = [
            (token, position, number, position == len(ids) - 1)
            for number, ids in enumerate(prompts)
            for position, token in enumerate(ids)
            if position >= num_kept
        ]
        while entries:
            self._decode(entries, lambda index, entry: answers[entry[2]].add(int(self._logits(index).argmax())))
            entries = [
                (answer.token_ids[-1], len(ids) + len(answer.token_ids) - 1, number, True)
                for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
                if len(answer.token_ids) < max_tokens and answer.token_ids[-1] not in self._end_ids
            ]
        return answers

    def _keep_beginning(self, ids: list[int]) -> int:
        """Forgets all but what the prompt before begins with, too, if that is reused. Returns its number of tokens."""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._read, ids[:-1], strict=False))
        num_kept = sum(1 for _ in same) if self._reuses else 0
        self._read = ids
        if not api.llama_memory_seq_rm(api.llama_get_memory(self._context), -1, num_kept, -1):
            raise RuntimeError("llama.cpp cannot forget")
        return num_kept

    def _decode(self, entries: list[Entry], look: Callable[[int, Entry], object]) -> None:
        """Shows `look` each entry whose logits are needed, and its place in the batch."""
        for first in range(0, len(entries), self._batch_tokens):
            part = entries[first : first + self._batch_tokens]
            batch = self._batch
            batch.n_tokens = len(part)
            for index, (token, position, number, needs_logits) in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = number
                batch.logits[index] = needs_logits
            if status := api.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for index, entry in enumerate(part):
                if entry[3]:
                    look(index, entry)

    def surprises(self, ids: list[int]) -> list[float]:
        """In nats, of the tokens of the second half of a window."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        half, found = len(ids) // 2, []
        entries = [(token, position, 0, position >= half) for position, token in enumerate(ids[:-1])]

        def look(index: int, entry: Entry) -> None:
            logits = self._logits(index).astype(numpy.float64)
            top = logits.max()
            found.append(top + math.log(numpy.exp(logits - top).sum()) - logits[ids[entry[1] + 1]])

        self._decode(entries, look)
        return found

    def _logits(self, index: int) -> Any:
        logits = api.llama_get_logits_ith(self._context, index)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return numpy.ctypeslib.as_array(address, (self._vocabulary_size,))


class LookUp:
    def __init__(self, settings: EngineSettings) -> None:
        self._end_ids = frozenset(settings.end_ids)
        self._llama = api.Llama(
            settings.source,
            n_ctx=settings.context_tokens + LOOK_UP_TOKENS,
            n_threads=settings.num_threads,
            n_threads_batch=settings.num_threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOK_UP_TOKENS),
            logits_all=True,  # with a draft model it writes them all, and has room for 512 rows otherwise
            verbose=False,
        )
        self.answer([[1] * 8], 2, "")

    def answer(self, prompts: list[list[int]], max_tokens: int, mode: str) -> list[Answer]:
        return [self._answer_one(ids, max_tokens) for ids in prompts]

    def _answer_one(self, ids: list[int], max_tokens: int) -> Answer:
        self._llama.reset()
        answer = Answer([], [])
        for token in self._llama.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
            answer.add(token)
            if len(answer.token_ids) == max_tokens or token in self._end_ids:
                break
        return answer


def load(settings: EngineSettings) -> LlamaCpp | LookUp:
    return LookUp(settings) if any(settings.modes) else LlamaCpp(settings)


def quantise(source: str, target: str, file_type: str) -> None:
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    if status := api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize returned {status}")


def surprise(source: str, windows: str, num_threads: str) -> None:
    rows = numpy.load(windows)
    engine = LlamaCpp(EngineSettings(source, "", int(num_threads), 1, rows.shape[1], ()))
    print(numpy.mean([engine.surprises(row.tolist()) for row in rows]))


if __name__ == "__main__":
    commands = {"quantise": quantise, "surprise": surprise}
    commands[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else serve(load)
