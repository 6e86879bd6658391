"""What a pool's version is worth with heads of its own, with its parent's, and with a correction of these of low rank.

    python -m bench.pool_heads --model FILE --router DIR --requests FILE.jsonl [--served 200] [--ranks 16 64]

`--router` has statistics. `--served` requests of the kind are answered, greedily, and these answers are what all
versions learn from. Then the last `--held-out` requests of the file are answered at full depth, with the parent and
with each version, in turn. A correction of rank r is what is left of the difference between the own heads' and the
parent's matrices, in the metric of the inputs, by its r largest singular values; its version has confidences and
tables of its own, too.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import neap_engine
from bench.calibration import compare
from bench.options import add_dtypes, load, make_parser, parsed
from bench.prompts import BenchPrompt, encode_turns, read_texts
from bench.table import head, row
from calibrator_service.calibration import pipeline
from calibrator_service.calibration.pipeline import CalibrationResult
from calibrator_service.calibration.spec import CalibrationSpec, Progress, ServedTraffic
from calibrator_service.calibration.statistics import Parent, Statistics
from shared.engine.engine import Engine
from shared.ladder.artefact import pack_ladder
from shared.ladder.blob_names import LADDER_BLOB, STATISTICS_BLOB
from shared.ladder.exit_head import NUM_STATES, ExitHead
from shared.ladder.exits import Heads
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel

PARENT = "the parent"


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_dtypes(parser)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--served", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds that each calibration may take")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64])
    options = parsed(parser)
    loaded = load(options)
    texts = read_texts(options.requests, options.served + options.held_out)
    ladders: dict[str, Ladder] = {PARENT: read_ladder(options.router)}
    with tempfile.TemporaryDirectory() as folder:
        traffic = Path(folder) / "traffic.jsonl"
        traffic.write_text(answers(loaded, texts[: options.served], options.max_tokens))
        ladders |= versions(loaded, options, ladders[PARENT], traffic)
    print_memory(loaded, ladders)
    compare(loaded, ladders, [BenchPrompt("one kind", (text,)) for text in texts[options.served :]], options.max_tokens)


def answers(loaded: LoadedModel, texts: Sequence[str], max_tokens: int) -> str:
    """Lines as the calibration service writes what workers have kept."""
    with Engine(loaded, prefix_cache_bytes=0) as engine, ThreadPoolExecutor(engine.max_running) as threads:

        def line(text: str) -> str:
            prompt = encode_turns(loaded, [text])
            answer = engine.generate(prompt, policy="full", max_tokens=max_tokens).token_ids
            return json.dumps({"prompt": list(prompt), "answer": list(answer)})

        lines = [*threads.map(line, texts)]
    print(f"{len(texts)} requests served", flush=True)
    return "\n".join(lines) + "\n"


def versions(loaded: LoadedModel, options: argparse.Namespace, first: Ladder, traffic: Path) -> dict[str, Ladder]:
    """By the name of what they have as heads. Prints what each took to learn and how often its exit agrees, and by
    what its heads were compared with the parent's (`pipeline.tokens_per_pass`)."""
    parent = neap_engine.read_parent(options.router)
    head(
        "heads",
        "seconds",
        "of the router",
        "statistics",
        "first draft agrees",
        "tokens a pass, its own and parent's",
        "left out",
    )

    def learned(name: str, given: Parent) -> CalibrationResult:
        spec = CalibrationSpec(loaded.model_id, ServedTraffic("bench", str(traffic)), time_budget_s=options.budget)
        with tempfile.TemporaryDirectory() as work:
            told: list[Progress] = []
            began_s = time.monotonic()
            result = neap_engine.calibrate(loaded, spec, parent=given, work_dir=Path(work), progress=told.append)
            seconds = time.monotonic() - began_s
        _, blobs = result.pack()
        compared = told[-1].figures
        figures = result.report["proposers"].get("depth-0", {})
        size, sums = (len(blobs.get(blob, b"")) for blob in (LADDER_BLOB, STATISTICS_BLOB))
        row(
            name,
            f"{seconds:.0f}",
            f"{size / 1e6:.2f} MB",
            f"{sums / 1e6:.1f} MB",
            f"{figures.get('agreement_1', 0):.3f} of {figures.get('positions', 0)}",
            ", ".join(f"{compared.get(f'heads.{of}.tokens_per_pass', 0):.2f}" for of in ("own", "parents")),
            ", ".join(result.report["left_out"]) or "nothing",
        )
        return result

    assert first.draft_vocabulary is not None
    blob = pack_ladder(first, {})[1][LADDER_BLOB]
    vocabulary = first.draft_vocabulary
    given: dict[str, Mapping[int, ExitHead]] = {"the parent's": {one.depth: one.head for one in first.exits}}
    with patch.object(pipeline, "LEAST_GAIN", 0.0):
        own = learned("its own", replace(parent, heads=Heads(given["the parent's"], vocabulary), heads_blob=blob))
    found = {"its own": own.ladder}
    assert own.statistics is not None
    for rank in options.ranks:
        given[f"the parent's, corrected with rank {rank}"] = corrected(first, own.ladder, own.statistics, rank)
    for name, heads in given.items():
        # Without sums there are no own heads to compare with.
        sums = replace(parent.statistics, moments={})
        given_parent = replace(parent, statistics=sums, heads=Heads(heads, vocabulary), heads_blob=blob)
        found[name] = learned(name, given_parent).ladder
    return found


def corrected(first: Ladder, own: Ladder, statistics: Statistics, rank: int) -> Mapping[int, ExitHead]:
    """The heads of `first`, corrected towards those of `own`, by depth."""
    aims = {layer_exit.depth: layer_exit.head for layer_exit in own.exits}
    heads = {}
    for layer_exit in first.exits:
        if (aim := aims.get(layer_exit.depth)) is None:
            continue
        size = aim.hidden_size
        second = statistics.moments[layer_exit.depth].second
        num_first = (NUM_STATES + 1) * size
        made = copy.deepcopy(layer_exit.head)
        difference = (aim.fuse - made.fuse).T  # [6D, D]: of a chain's first step, then of further ones
        # What further steps begin with is known by what the first one says; its own metric is near the identity.
        parts = (
            nearest_of_rank(difference[:num_first], second[:num_first, :num_first], rank),
            nearest_of_rank(difference[num_first:], None, rank),
        )
        made.fuse.add_(torch.cat(parts).T)
        made.gain.copy_(aim.gain)
        heads[layer_exit.depth] = made
    return heads


def nearest_of_rank(matrix: Tensor, second: Tensor | None, rank: int) -> Tensor:
    """The matrix [I, O] of this rank whose outputs are nearest to those of `matrix`, for inputs with the sums x x' of
    `second` [I, I]; None: uncorrelated ones."""
    root = torch.eye(len(matrix), dtype=torch.float64) if second is None else _root(second)
    left, values, right = torch.linalg.svd(root @ matrix.double(), full_matrices=False)
    kept = left[:, :rank] * values[:rank] @ right[:rank]
    nearest: Tensor = torch.linalg.solve_triangular(root, kept, upper=True).float()
    return nearest


def _root(second: Tensor) -> Tensor:
    exact = second.double()
    exact.diagonal().add_(1e-4 * exact.diagonal().mean())
    root: Tensor = torch.linalg.cholesky(exact).T
    return root


@torch.no_grad()
def print_memory(loaded: LoadedModel, ladders: Mapping[str, Ladder]) -> None:
    """What each takes while it is bound, and what it adds where the parent is bound, too."""
    runner = ContiguousRunner(loaded)
    parent = ladders[PARENT].bind(runner)
    head("heads", "MB alone", "MB beside the parent")
    for name, ladder in ladders.items():
        memory = ladder.bind(runner, [parent]).memory()
        beside = sum(size for address, size in memory.items() if address not in parent.memory())
        row(name, f"{sum(memory.values()) / 1e6:.1f}", f"{beside / 1e6:.2f}")


if __name__ == "__main__":
    main()
