"""How long a pass takes by several ranks over one process, with gloo on this machine's CPU.

    python -m bench.ranks [--ranks 2] [--layers 12] [--passes 40]

A Llama of random weights in float32, 1,024 wide, with 16 heads and 8 key heads. Every rank has one thread, and so has
the process that is compared; a second column gives that process as many threads as there are ranks. Passes of each
size run in turn at all of them, over 128 keys; the medians are shown. "sums" is what ranks take to meet: two sums for
each layer of a pass, alone. Needs a core for each rank.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf

from bench.machine import described
from bench.options import make_parser
from bench.table import head, row
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.ranks.following import follow
from shared.model.ranks.group import Ranks, first_store, join_ranks
from shared.model.runner import Runner
from shared.model.runners import make_runner

WIDTH, INNER, HEADS, KEY_HEADS, VOCABULARY = 1024, 2816, 16, 8, 4096
SIZES, KEYS = (1, 4, 16, 64), 128
TIMES: dict[str, Any] = {"device": "cpu", "timeout_s": 300.0, "pass_timeout_s": 60.0}


def write_model(folder: str, num_layers: int) -> None:
    config = hf.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        vocab_size=VOCABULARY,
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)


def load(folder: str, ranks: Ranks | None) -> LoadedModel:
    """Without a tokenizer, which random weights do not need."""
    with patch("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None):
        return load_model(folder, ranks=ranks)


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    """This process as rank 0 of `size`; the others run this program."""
    store = first_store(size)
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    places = [os.environ | {"RANK": str(rank)} for rank in range(1, size)]
    others = [subprocess.Popen([sys.executable, "-m", "bench.ranks"], env=place) for place in places]
    try:
        yield join_ranks(size, store=store, **TIMES)
        assert not any(other.wait(60) for other in others)
    finally:
        for other in others:
            other.kill()


def passes_of(runner: Runner, size: int, num_threads: int) -> Callable[[], float]:
    """Runs a pass over `size` tokens after KEYS keys, and returns its seconds."""
    cache, tokens = runner.new_cache(KEYS + size), list(range(KEYS))
    layers: dict[str, Any] = {"first": 0, "last": runner.num_layers}
    runner.run(runner.ids(tokens), cache, base=0, **layers)
    ids = runner.ids(tokens[:size])

    def measured() -> float:
        torch.set_num_threads(num_threads)
        began_s = time.perf_counter()
        runner.run(ids, cache, base=KEYS, **layers)
        return time.perf_counter() - began_s

    return measured


def sums_of(ranks: Ranks, size: int, num_layers: int) -> float:
    """Seconds for the sums of a pass. All ranks call it."""
    part = torch.ones(1, size, WIDTH)
    began_s = time.perf_counter()
    for _ in range(2 * num_layers):
        ranks.total(part)
    return time.perf_counter() - began_s


def all_sums(ranks: Ranks, num_layers: int, num_passes: int) -> dict[int, float]:
    return {size: statistics.median(sums_of(ranks, size, num_layers) for _ in range(num_passes + 3)) for size in SIZES}


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--passes", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if os.environ.get("RANK", "0") != "0":
        ranks = join_ranks(int(os.environ["WORLD_SIZE"]), **TIMES)
        told = ranks.hear()
        follow(load(told["folder"], ranks), ranks)
        all_sums(ranks, told["layers"], told["passes"])
        return
    print(described("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.layers)
        alone = make_runner(load(folder, None), 1 << 30)
        with ranks_of(options.ranks) as ranks:
            ranks.tell({"folder": folder, "layers": options.layers, "passes": options.passes})
            together = make_runner(load(folder, ranks), 1 << 30)
            medians = []
            for size in SIZES:
                ways = [(alone, 1), (alone, options.ranks), (together, 1)]
                runs = [passes_of(runner, size, num_threads) for runner, num_threads in ways]
                rounds = [[run() for run in runs] for _ in range(options.passes)]
                medians.append([statistics.median(times) for times in zip(*rounds, strict=True)])
            ranks.tell(None)
            sums = all_sums(ranks, options.layers, options.passes)
    head("tokens", "1 thread, ms", f"{options.ranks} threads", f"{options.ranks} ranks", "ranks / 1 thread", "sums, ms")
    for size, (one, several, by_ranks) in zip(SIZES, medians, strict=True):
        times = [f"{1000 * seconds:.2f}" for seconds in (one, several, by_ranks)]
        row(size, *times, f"{by_ranks / one:.2f}", f"{1000 * sums[size]:.2f}")


if __name__ == "__main__":
    main()
