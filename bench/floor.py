"""Times passes of the whole model and compares them with the time to read its weights once.

    python -m bench.floor --model DIR [--tokens 1 2 4 8 16] [--context 200] [--rounds 25]

Medians in ms, logits included, float32 on a CPU. `floor`: all threads read as many bytes as the model's matrices have, from one block.
`modules`: the same model with its layers' modules run one by one instead of fused. `HF`: Hugging Face's own forward over one token, in
a separate process (docs/decisions/004). The contenders take turns within each round, so that a busy machine slows all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bench.hugging_face import hugging_face_token
from bench.options import make_parser, parsed
from shared import ops
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import LoadedModel, load_model
from shared.model.runner import Runner
from shared.model.substitution.layer import FusedLayer


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of all matrices that a pass reads. Freed weights count, because their packed form has the same size."""
    kinds = (nn.Linear, Conv1D)
    return sum(m.weight.nbytes for m in loaded.model.modules() if isinstance(m, kinds))


def model_pass(runner: Runner, num_tokens: int, context: int) -> Callable[[], Tensor]:
    """A pass through all layers and the LM head over `num_tokens` tokens, after `context` cached ones."""
    cache = runner.new_cache(context + num_tokens)
    ids = torch.randint(runner.loaded.vocabulary_size, (1, context + num_tokens))
    depth = runner.num_layers
    if context:
        runner.run(ids[:, :context], cache, first=0, last=depth, base=0)
    own = ids[:, context:]
    return lambda: runner.logits(runner.run(own, cache, first=0, last=depth, base=context))


@contextmanager
def layers_by_modules() -> Iterator[None]:
    """Within this context, fused layers run their modules instead of the fused op."""
    fused = FusedLayer.fused
    FusedLayer.fused = lambda self, args, kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FusedLayer.fused = fused  # type: ignore[method-assign]


def timed_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parsed(parser)
    runner = ContiguousRunner(load_model(arguments.model))
    num_bytes = weight_bytes(runner.loaded)
    block = torch.ones(num_bytes // 4)
    print(
        f"{ops.cpu_isa()}, {torch.get_num_threads()} threads, {num_bytes / 1e6:.0f} MB of matrices"
    )
    with hugging_face_token(arguments.model) as hugging_face:
        for num_tokens in arguments.tokens:
            run = model_pass(runner, num_tokens, arguments.context)
            samples: dict[str, list[float]] = {"floor": [], "neap": [], "modules": []}
            if num_tokens == 1:
                samples["HF"] = []
            for index in range(arguments.rounds + 2):
                round_ms = {"floor": timed_ms(block.sum), "neap": timed_ms(run)}
                with layers_by_modules():
                    round_ms["modules"] = timed_ms(run)
                if num_tokens == 1:
                    round_ms["HF"] = hugging_face(arguments.context) * 1e3
                if index >= 2:
                    for name, value in round_ms.items():
                        samples[name].append(value)
            medians = {name: statistics.median(values) for name, values in samples.items()}
            figures = "  ".join(
                f"{name} {value:6.2f} ({value / medians['floor']:.2f}x)"
                for name, value in medians.items()
            )
            print(f"{num_tokens:>3} tokens: {figures}", flush=True)


if __name__ == "__main__":
    main()
