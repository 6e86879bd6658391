"""Times neap's CPU kernels against PyTorch's and oneDNN's, and a whole model with and without them.

    python -m bench.bench_ops --model /path/to/hf/model [--threads 2] [--rounds 15]

Medians in ms. The contenders of a line take turns within each round, so that a busy machine slows all of them alike.
The floor is the time to read the line's weights once. Compare figures within a line, not across runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from bench.stopwatch import Contenders
from shared import ops
from shared.model.cache import ContiguousCache
from shared.model.cache_argument import with_cache
from shared.model.substitution.apply import accelerate
from shared.model.substitution.rotary import FUNCTION

CONTEXT = 200  # tokens in the cache of a whole-model pass


def medians_ms(contenders: Contenders, rounds: int) -> dict[str, float]:
    """The median time of each contender in ms, after one untimed call of each."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if index:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def print_row(label: str, figures: Mapping[str, float]) -> None:
    print(
        f"{label:>24} " + " ".join(f"{name} {value:9.2f}" for name, value in figures.items()),
        flush=True,
    )


def floor_of(weights: list[Tensor]) -> Callable[[], object]:
    """A contender in which all threads together read as many bytes as the weights have."""
    block = torch.ones(sum(w.numel() for w in weights))
    return block.sum


def onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x @ weight.T by oneDNN, on weights in its own packed layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    op = torch.ops.mkldnn._linear_pointwise
    return lambda x: op(x, packed, None, "none", [], "")


def bench_linears(title: str, weights: list[Tensor], rounds: int) -> None:
    """Times the products with all `weights` [N, K] in turn, as a model runs them."""
    packed = [(w.shape[1], ops.pack_linear(w), w.shape[0]) for w in weights]
    onednn_runs = [(w.shape[1], onednn(w)) for w in weights]
    floor = floor_of(weights)

    def contenders(tokens: int) -> Contenders:
        x = {width: torch.randn(1, tokens, width) for width, _, _ in packed}
        return {
            "neap": lambda: [ops.packed_linear(x[width], p, n) for width, p, n in packed],
            "F.linear": lambda: [F.linear(x[w.shape[1]], w) for w in weights],
            "oneDNN": lambda: [run(x[width]) for width, run in onednn_runs],
            "floor": floor,
        }

    for tokens in (1, 2, 4, 8, 16):
        print_row(f"{title} M={tokens}", medians_ms(contenders(tokens), rounds))


def attention_contenders(tokens: int, length: int) -> Contenders:
    q = torch.randn(1, tokens, 9, 64).transpose(1, 2)
    k, v = torch.randn(2, 1, 3, length, 64).unbind()
    square = tokens in (1, length)
    mask = None if square else torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    causal = square and tokens > 1
    return {
        "neap": lambda: ops.contiguous_attention(q, k, v, length),
        "sdpa": lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
        ),
    }


def bench_attention(rounds: int) -> None:
    """Times attention with 9 query heads on 3 key heads of width 64, SmolLM2's sizes."""
    for tokens, length in ((1, 200), (8, 208), (1, 2000), (8, 2000), (1, 8000), (300, 300)):
        figures = medians_ms(attention_contenders(tokens, length), rounds)
        print_row(f"attention Q={tokens} S={length}", figures)


def model_pass(model: PreTrainedModel, tokens: int, contiguous: bool) -> Callable[[], object]:
    """A pass over `tokens` tokens after CONTEXT cached ones. Each call restores the cache's length."""
    ids = torch.randint(model.config.vocab_size, (1, CONTEXT + tokens))
    if contiguous:
        contiguous_cache = ContiguousCache(CONTEXT + 64)
        contiguous_cache.begin(0, CONTEXT)
        model(input_ids=ids[:, :CONTEXT], **with_cache(model, contiguous_cache))

        def run_contiguous() -> None:
            contiguous_cache.begin(CONTEXT, tokens)
            model(input_ids=ids[:, CONTEXT:], **with_cache(model, contiguous_cache))

        return run_contiguous
    cache = DynamicCache()
    model(input_ids=ids[:, :CONTEXT], **with_cache(model, cache))

    def run() -> None:
        model(input_ids=ids[:, CONTEXT:], **with_cache(model, cache))
        cache.crop(-tokens)

    return run


def bench_model(path: str, rounds: int) -> None:
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fast = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain.requires_grad_(False).train(False)
    fast.requires_grad_(False).train(False)
    # `accelerate` replaces the rotary function for the whole process, so it is switched back for the plain model's turns.
    modeling = sys.modules[
        type(next(m for m in plain.modules() if "Attention" in type(m).__name__)).__module__
    ]
    original = getattr(modeling, FUNCTION)
    print(accelerate(fast))
    replaced = getattr(modeling, FUNCTION)

    def with_rotary(function: object, run: Callable[[], object]) -> Callable[[], object]:
        def switched() -> None:
            setattr(modeling, FUNCTION, function)
            run()

        return switched

    floor = floor_of([m.weight for m in plain.modules() if isinstance(m, nn.Linear)])
    for tokens in (1, 2, 4, 8, 16):
        figures = medians_ms(
            {
                "neap": with_rotary(replaced, model_pass(fast, tokens, contiguous=True)),
                "HF": with_rotary(original, model_pass(plain, tokens, contiguous=False)),
                "floor": floor,
            },
            rounds,
        )
        print_row(f"whole model M={tokens}", figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", help="a Hugging Face model folder; without it only kernels are timed"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    with torch.no_grad():
        print(f"{ops.cpu_isa()}, {arguments.threads} threads, medians of {arguments.rounds} in ms")
        mlp = [(1536, 576), (1536, 576), (576, 1536)] * 30
        bench_linears("30 MLPs", [torch.randn(shape) for shape in mlp], arguments.rounds)
        attention = [(576, 576), (192, 576), (192, 576), (576, 576)] * 30
        bench_linears("30 q,k,v,o", [torch.randn(shape) for shape in attention], arguments.rounds)
        bench_linears("LM head", [torch.randn(49152, 576)], arguments.rounds)
        bench_attention(arguments.rounds)
        if arguments.model:
            bench_model(arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
