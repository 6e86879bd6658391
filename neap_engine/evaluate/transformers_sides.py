"""Ways to answer with transformers' `generate`, and what the full model says of an answer.
They run in one process of their own.

TIDE's published method (0.2.1) runs all layers and then answers from the first checkpoint whose state has converged.
Its routers learn whether the cosine of that state and the last one exceeds a limit; here the cosine itself decides, as
routers without errors would. TIDE norms only one of the two states, by which none converges on SmolLM2; here both are
normed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from neap_engine.evaluate.sides import TimedAnswer
from shared.model.cache import refuse_if_out_of_memory
from shared.model.load import load_model
from shared.model.loaded import LoadedModel

GENERATE, LOOKUP, EARLY_EXIT, TIDE = ("HF generate", "HF prompt lookup", "HF early exit", "TIDE's method")
PAD = 0
# The value that transformers' guide uses.
LOOKUP_TOKENS = 10
# Options of `load_model` that only neap's own kernels know.
KERNEL_OPTIONS = frozenset({"kv_dtype", "compute_dtype"})
# TIDE 0.2.1's defaults: layers between two checkpoints, and the cosine from which a state has converged.
CHECKPOINT_INTERVAL, CONVERGED = 4, 0.98


@dataclass(frozen=True)
class Score:
    """`nats`: negative log-likelihood of each token of an answer.
    `num_chosen`: how many are the full model's choice after what precedes."""

    nats: tuple[float, ...]
    num_chosen: int


class Clock(BaseStreamer):
    """Records the time, and the number of tokens, of each step of a generation. `generate` passes the prompt first, so
    `times[0]` is the prompt's. `on_step` is called with the number of steps so far."""

    def __init__(self, on_step: Callable[[int], object] = lambda steps: None) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._on_step = on_step

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())
        self._on_step(len(self.times) - 1)

    def end(self) -> None:
        pass


def generate(model: Any, prompts: Sequence[list[int]], max_tokens: int, **options: Any) -> Tensor:
    """The new tokens [B, N] of a greedy `generate` for prompts that are padded on the left."""
    width = max(map(len, prompts))
    padded = [[PAD] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    with torch.no_grad():
        out: Tensor = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            **options,
        )
    return out[:, width:]


class TransformersSides:
    """Answers and scores with one model, as transformers runs it."""

    def __init__(self, loaded: LoadedModel, max_tokens: int) -> None:
        self._loaded, self._max_tokens = loaded, max_tokens
        self._model: Any = loaded.model
        self._num_calls = 0
        for layer in loaded.parts.layers:
            layer.register_forward_pre_hook(self._count)

    def __call__(self, task: tuple[str, list[int], list[int]]) -> TimedAnswer | Score:
        """`task`: (side, prompt, []) gives a `TimedAnswer`, ("score", prompt, answer) a `Score`."""
        name, prompt, answer = task
        if name == "score":
            return self.score(prompt, answer)
        if name == EARLY_EXIT:
            return self._answer(prompt, assistant_early_exit=self._exit_depth)
        if name == LOOKUP:
            return self._answer(prompt, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        with self._converged_states() if name == TIDE else ExitStack():
            return self._answer(prompt)

    @property
    def _exit_depth(self) -> int:
        """A quarter of the layers."""
        return max(1, self._loaded.num_layers // 4)

    def _count(self, *_: object) -> None:
        self._num_calls += 1

    def _answer(self, prompt: list[int], **options: Any) -> TimedAnswer:
        before_decoding = 0

        def on_step(steps: int) -> None:
            nonlocal before_decoding
            if steps == 1:
                before_decoding = self._num_calls

        clock, start_s = Clock(on_step), time.perf_counter()
        new = generate(self._model, [prompt], self._max_tokens, streamer=clock, **options)
        return TimedAnswer(
            tuple(new[0].tolist()),
            clock.times[-1] - clock.times[1],
            time.perf_counter() - start_s,
            layer_executions=self._num_calls - before_decoding,
            num_first=clock.counts[1],
        )

    @contextmanager
    def _converged_states(self) -> Iterator[None]:
        """Within it, the final norm gets each token's state at the first checkpoint at which it has converged."""
        parts = self._loaded.parts
        norm = parts.final_norm
        assert norm is not None
        states: list[Tensor] = []

        def keep(_: object, __: object, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        def choose(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            last, *others = inputs
            chosen, normed = last, norm.forward(last).float()
            for state in reversed(states):
                cosine = F.cosine_similarity(norm.forward(state).float(), normed, dim=-1)
                chosen = torch.where((cosine > CONVERGED)[..., None], state, chosen)
            states.clear()
            return chosen, *others

        with ExitStack() as hooks:
            for index in range(CHECKPOINT_INTERVAL, parts.num_layers, CHECKPOINT_INTERVAL):
                hooks.callback(parts.layers[index - 1].register_forward_hook(keep).remove)
            hooks.callback(norm.register_forward_pre_hook(choose).remove)
            yield

    @torch.inference_mode()
    def score(self, prompt: list[int], answer: list[int]) -> Score:
        """What the full model says of the answer, in one pass."""
        ids = torch.tensor([[*prompt, *answer]], device=self._model.device)
        logits = self._model(ids[:, :-1]).logits[0, len(prompt) - 1 :].float()
        answer_ids = ids[0, len(prompt) :]
        nats = F.cross_entropy(logits, answer_ids, reduction="none")
        return Score(tuple(nats.tolist()), int((logits.argmax(-1) == answer_ids).sum()))

    def refusals(self) -> dict[str, str]:
        """Why a side cannot run with this model, by side."""
        reasons = {}
        if self._loaded.parts.final_norm is None:
            reasons[TIDE] = "the model has no final norm"
        config = self._model.base_model.config.get_text_config(decoder=True)
        whole, before = config.num_hidden_layers, self._num_calls
        config.num_hidden_layers = self._exit_depth
        try:
            with torch.inference_mode():
                self._model(torch.zeros(1, 1, dtype=torch.long, device=self._model.device))
            if self._num_calls - before != self._exit_depth:
                reasons[EARLY_EXIT] = "the model's forward runs all layers, whatever its config says"
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            refuse_if_out_of_memory(error)
            reasons[EARLY_EXIT] = f"the model's forward fails with fewer layers ({type(error).__name__})"
        finally:
            config.num_hidden_layers = whole
        return reasons


def transformers_sides(source: str, options: dict[str, Any], max_tokens: int) -> Callable[[Any], Any]:
    """`TransformersSides` in a process of its own: see `in_process`. `options`: of `load_model`.
    Those of neap's own kernels do not apply."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plain = {name: value for name, value in options.items() if name not in KERNEL_OPTIONS}
    sides = TransformersSides(load_model(source, accelerate=False, **plain), max_tokens)

    def run(task: Any) -> Any:
        return sides.refusals() if task == "refusals" else sides(task)

    return run
