"""What products with rounded inputs cost and save: perplexity, answers that differ, and the costs of passes.

    python -m bench.rounding --model FILE.gguf --text FILE [--windows 16] [--per-task 2] [--new-tokens 64]
    python -m bench.rounding --model DIR --dtype bfloat16 --compute-dtype bfloat16 --text FILE
    python -m bench.rounding --model FILE.gguf --text FILE --peers-cache DIR

Both sides have the same weights, and are loaded one after the other. Perplexity is that of the second half of windows
of 512 tokens, spread evenly over the text. "same choices" is the share of these positions after which both sides rank
the same token first. Answers are greedy and of full depth. Costs are multiples of the pass over one token without
rounding. --peers-cache: the cache of `bench.peers`, for llama.cpp's perplexity on the same windows.
"""

import gc
import math
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.batch import closed_loop
from bench.machine import described
from bench.options import add_dtypes, add_prompts, each_model, load, make_parser
from bench.peers.catalogue import PEERS
from bench.peers.environment import worker_environment
from bench.peers.models import LLAMA_CPP, environments
from bench.prompts import first_turns
from bench.table import head, row
from shared.configured_model import dtype_named
from shared.engine.drafting.costs import finished, pass_timings
from shared.engine.engine import Engine
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel

WINDOW = 512
WIDTHS = (1, 2, 3, 5, 9, 16, 32, 64)


@dataclass(frozen=True)
class Side:
    """choices: [N], the token ranked first after each measured position; surprise: the mean over them, in nats;
    seconds: of a pass, by its tokens."""

    choices: Tensor
    surprise: float
    answers: list[tuple[int, ...]]
    seconds: dict[int, float]


def windows_of(loaded: LoadedModel, text: str, count: int) -> Tensor:
    """[count, WINDOW] token ids."""
    assert loaded.tokenizer is not None
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    starts = torch.linspace(0, len(ids) - WINDOW, count).long()
    return torch.stack([ids[start : start + WINDOW] for start in starts])


@torch.inference_mode()
def read(runner: ContiguousRunner, windows: Tensor) -> tuple[Tensor, float]:
    """(choices, surprise) over the second halves."""
    choices, surprises = [], []
    for ids in windows:
        cache = runner.new_cache(WINDOW)
        states = runner.run(ids[None], cache, first=0, last=runner.num_layers, base=0)[0]
        logits = runner.logits(states[WINDOW // 2 : -1]).float()
        choices.append(logits.argmax(-1))
        surprises.append(torch.nn.functional.cross_entropy(logits, ids[WINDOW // 2 + 1 :]))
    return torch.cat(choices), torch.stack(surprises).mean().item()


def llama_cpp_surprise(cache: Path, model: str, windows: Tensor) -> float:
    """llama.cpp's surprise over the second halves, in nats. It is installed in `cache` if it is not there."""
    environment = environments(cache, 1)[LLAMA_CPP]
    environment.ensure(print)
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, windows.numpy())
        file.flush()
        command = [
            *environment.command(PEERS[LLAMA_CPP].module),
            "surprise",
            model,
            file.name,
            str(torch.get_num_threads()),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=worker_environment())
    return float(done.stdout.split()[-1])


def measured(loaded: LoadedModel, windows: Tensor, prompts: list[list[int]], new_tokens: int) -> Side:
    runner = ContiguousRunner(loaded)
    costs = finished(pass_timings(runner))
    seconds = dict(enumerate(costs.verify, start=1)) | dict(costs.wide)
    choices, surprise = read(runner, windows)
    with Engine(loaded) as engine:
        _, answers = closed_loop(engine, "full", None, prompts, 1, new_tokens)
    return Side(choices, surprise, answers, seconds)


def main() -> None:
    parser = make_parser(__doc__, many=True)
    add_dtypes(parser)
    parser.set_defaults(compute_dtype="int8")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--peers-cache", type=Path)
    add_prompts(parser, 2)
    for options in each_model(parser):
        print(described("cpu"))
        sides: dict[str, Side] = {}
        for name in ("float32", options.compute_dtype):
            loaded = load(options, compute_dtype=dtype_named(name))
            windows = windows_of(loaded, options.text.read_text(encoding="utf-8"), options.windows)
            prompts = first_turns(loaded, options.prompts, options.per_task)
            sides[name] = measured(loaded, windows, prompts, options.new_tokens)
            del loaded
            gc.collect()
        widths = [f"{width} tokens" for width in WIDTHS]
        head("products in", "perplexity", "same choices", "same answers", *widths)
        first = sides["float32"]
        for name, side in sides.items():
            same = (side.choices == first.choices).double().mean().item()
            answers = sum(a == b for a, b in zip(side.answers, first.answers, strict=True))
            row(
                name,
                f"{math.exp(side.surprise):.3f}",
                f"{same:.3f} of {len(side.choices)}",
                f"{answers} of {len(side.answers)}",
                *(f"{side.seconds[width] / first.seconds[1]:.2f}" for width in WIDTHS),
            )
        if options.peers_cache:
            row("llama.cpp", f"{math.exp(llama_cpp_surprise(options.peers_cache, options.model, windows)):.3f}")
        print(f"a pass over one token without rounding: {1000 * first.seconds[1]:.1f} ms")


if __name__ == "__main__":
    main()
