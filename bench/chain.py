"""Times chains of drafts by an exit head, whole chains in one native call, in each weight format.

    python -m bench.chain [--formats F16 Q8_0 Q8_0/Q4_0 ..] [--sequences 1 4 8 16] [--paths avx512 avx2] [--rounds 5]

Random weights in the shapes of SmolLM2-135M with 8,192 draft tokens. In a format such as Q8_0/Q4_0, the draft rows have
the second one. Each cell has three times in ms: of the first draft, of each further draft of a chain, and of feeding
the head a token that another rung drafted. Memory is read before each call, as a verify pass does, so the first step
finds no weights in the caches.
"""

from functools import partial

import torch

from bench.floor import available
from bench.machine import described
from bench.options import make_parser, parsed
from bench.stopwatch import ClockStopwatch
from bench.table import head, row
from shared import ops
from shared.ladder.confidence_head import HIGHEST, LOWEST
from shared.ladder.native_chain import packed_as
from shared.ops.chains import ChainStart, ChainWeights, draft_chains
from shared.ops.exits import ConfidenceWeights

WIDTH, MLP, DRAFT_VOCABULARY, VOCABULARY, ROUTER = 576, 1536, 8192, 49152, 128
SHAPES = {
    "fuse": (WIDTH, 4 * WIDTH),
    "next": (WIDTH, 2 * WIDTH),
    "gate": (MLP, WIDTH),
    "up": (MLP, WIDTH),
    "down": (WIDTH, MLP),
    "rows": (DRAFT_VOCABULARY, WIDTH),
    "hidden": (ROUTER, WIDTH),
}
# Any format by its name in GGUF can be named.
FORMATS = ("F32", "BF16", "Q8_0", "Q8_0/Q4_0")
NUM_MORE = 4


def random_weights(form: str) -> tuple[ChainWeights, int]:
    """Weights in the format `form`, and the bytes that a draft reads after the first."""
    torch.manual_seed(0)
    block, _, rows = form.partition("/")
    packed = {
        name: packed_as(torch.randn(shape) / shape[1] ** 0.5, rows if rows and name == "rows" else block)
        for name, shape in SHAPES.items()
    }
    zeros = torch.zeros(ROUTER)
    confidence = ConfidenceWeights(
        hidden=torch.empty(0), bias=zeros, output=zeros, features=torch.zeros(3, ROUTER), skip=torch.zeros(3),
        shift=3.0, eps=1e-6,
    )  # fmt: skip
    weights = ChainWeights(
        **packed, embedding=torch.randn(VOCABULARY, WIDTH), vocabulary=torch.arange(DRAFT_VOCABULARY),
        norm=torch.ones(WIDTH), gain=torch.ones(WIDTH), bias=None, confidence=confidence,
    )  # fmt: skip
    return weights, sum(matrix.numel() for name, matrix in packed.items() if name != "fuse")


def cell(weights: ChainWeights, count: int, stopwatch: ClockStopwatch) -> str:
    """The three times for `count` sequences at once."""
    states, begun = torch.randn(count, 3, WIDTH), torch.empty(0, WIDTH)
    one = ChainStart([7], 0, 1, 1.0, 1.0, 0.0)
    starts = {"one": one, "more": one._replace(room=1 + NUM_MORE), "fed": one._replace(tokens=[7] * (1 + NUM_MORE))}
    times_us = stopwatch.times_us(
        {
            name: partial(draft_chains, states, begun, [start] * count, weights, LOWEST, HIGHEST, start.room)
            for name, start in starts.items()
        }
    )
    first = times_us["one"]
    more, fed = ((times_us[name] - first) / NUM_MORE for name in ("more", "fed"))
    return " ".join(f"{each / 1000:.2f}" for each in (first, more, fed))


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--paths", nargs="+", default=["avx512", "avx2"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parsed(parser)
    stopwatch = ClockStopwatch(options.rounds)
    print(f"{described('cpu')}; this machine serves with {ops.cpu_isa()}")
    head("format", "MB a draft", "path", *options.sequences)
    paths = available(options.paths)
    with torch.inference_mode():
        for form in options.formats:
            weights, num_bytes = random_weights(form)
            for path in paths:
                ops.set_cpu_isa(path)
                cells = [cell(weights, count, stopwatch) for count in options.sequences]
                row(form, f"{num_bytes / 1e6:.1f}", path, *cells)


if __name__ == "__main__":
    main()
