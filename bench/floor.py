"""Times passes of the whole model on each instruction set and in each format, and compares them with the time to read
the weights once.

    python -m bench.floor --model DIR [--formats float32 bfloat16 Q8_0 ..] [--paths avx512 avx2 portable] [--tokens 1 2
    4 8 16]
        [--context 200] [--rounds 15]

Medians in ms, logits included. `floor`: all threads read as many bytes as the model's packed matrices have, from one
block. In parentheses: the ratio to the floor. The path in bold is the one that serves on this machine. All contenders
take turns within each round, so that a busy machine slows all of them alike.
"""

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from bench.forms import Form, add_formats, forms
from bench.machine import described
from bench.options import each_model, make_parser
from bench.stopwatch import medians_s
from bench.table import head, row
from shared import ops
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner
from shared.model.weights.lazy import lazy

PATHS = ("avx512", "avx2", "portable")
FLOOR = "floor"


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes of all matrices that a pass reads, in the format in which they are packed."""
    matrices = [m.weight for m in loaded.model.modules() if isinstance(m, nn.Linear | Conv1D)]
    return sum(_stored_bytes(weight) for weight in matrices)


def _stored_bytes(weight: Tensor) -> int:
    stored = lazy(weight)
    return weight.nbytes if stored is None else sum(packed.nbytes for packed in stored.memory)


def model_pass(runner: Runner, num_tokens: int, context: int) -> Callable[[], Tensor]:
    """A pass through all layers and the LM head over `num_tokens` tokens, after `context` cached ones."""
    cache = runner.new_cache(context + num_tokens)
    ids = torch.randint(runner.loaded.vocabulary_size, (1, context + num_tokens))
    depth = runner.num_layers
    if context:
        runner.run(ids[:, :context], cache, first=0, last=depth, base=0)
    own = ids[:, context:]
    return lambda: runner.logits(runner.run(own, cache, first=0, last=depth, base=context))


def available(paths: Sequence[str]) -> list[str]:
    """The paths that this machine has."""
    found = []
    for path in paths:
        try:
            ops.set_cpu_isa(path)
        except RuntimeError:
            continue
        found.append(path)
    ops.set_cpu_isa("auto")
    return found


def measure(
    form: Form, paths: Sequence[str], token_counts: Sequence[int], context: int, rounds: int
) -> tuple[int, dict[tuple[str, int], float]]:
    """(bytes of the matrices, median ms by path and number of tokens, and of the floor by (FLOOR, 0))."""
    loaded = form.load()
    num_bytes = weight_bytes(loaded)
    runner = ContiguousRunner(loaded)

    def on(path: str, run: Callable[[], object]) -> Callable[[], object]:
        def switched() -> None:
            ops.set_cpu_isa(path)
            run()

        return switched

    passes = {count: model_pass(runner, count, context) for count in token_counts}
    runs: dict[tuple[str, int], Callable[[], object]]
    runs = {(FLOOR, 0): torch.ones(num_bytes // 4).sum}
    runs |= {(path, count): on(path, passes[count]) for path in paths for count in token_counts}
    medians = medians_s(runs, rounds)
    ops.set_cpu_isa("auto")
    return num_bytes, {key: 1e3 * seconds for key, seconds in medians.items()}


def main() -> None:
    parser = make_parser(__doc__, many=True)
    add_formats(parser)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=15)
    for options in each_model(parser):
        paths, serving = available(options.paths), ops.cpu_isa()
        print(f"{described('cpu')}; {serving} serves on this machine")
        head("format", "MB", "floor", "path", *options.tokens)
        for form in forms(options):
            num_bytes, ms = measure(form, paths, options.tokens, options.context, options.rounds)
            gc.collect()  # models hold cycles, and the next form needs the memory
            floor = ms[FLOOR, 0]
            for path in paths:
                own = [ms[path, count] for count in options.tokens]
                cells = [f"{one:.1f} ({one / floor:.2f}x)" for one in own]
                name = f"**{path}**" if path == serving else path
                row(form.weights, f"{num_bytes / 1e6:.0f}", f"{floor:.1f}", name, *cells)


if __name__ == "__main__":
    main()
