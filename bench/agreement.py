"""How often exits agree with the full model on text of kinds that no router has learned from: the model's answers to
Spec-Bench.

    python -m bench.agreement --model FILE --router FOLDER .. [--per-task 20]

The full model answers the first turns. At each token of the answers a router's exit begins a chain of drafts, and so do
its tables. "beside the tables": where their draft is wrong or missing. A choice outside the draft vocabulary counts as
missed.
"""

import argparse
import tempfile
from contextlib import closing
from pathlib import Path

import torch

import neap_engine
from bench.machine import described
from bench.options import add_prompts, load, make_parser, parsed
from bench.prompts import first_turns
from bench.table import head, row
from calibrator_service.calibration.plan import num_decoded_rows
from calibrator_service.calibration.report.held_out import chain_agreement, table_figures, tables_are_right
from calibrator_service.calibration.states.chunk import StateChunks
from calibrator_service.calibration.states.collect import Collector, LabelledSequence
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.writer import Pace, WriteRequest, write_all
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.ladder import Ladder
from shared.ladder.proposers import exit_name
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.runner import captured_depths

MAX_STATE_BYTES = 4 << 30
PLACES = (1, 2, 3, 4)


def main() -> None:
    parser = make_parser(__doc__)
    add_prompts(parser, per_task=0)
    parser.add_argument("--router", type=Path, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parsed(parser)
    loaded = load(options)
    ladders = {str(path): neap_engine.read_router(path) for path in options.router}
    depths = {one.depth for ladder in ladders.values() for one in ladder.exits}
    with tempfile.TemporaryDirectory() as folder:
        sequences, chunks = _labelled(loaded, _answers(loaded, options), depths, Path(folder))
        print(described(loaded.device))
        print_table(loaded, ladders, sequences, chunks)


def print_table(
    loaded: LoadedModel, ladders: dict[str, Ladder], sequences: list[LabelledSequence], chunks: StateChunks
) -> None:
    drafts = [f"draft {place}" for place in PLACES]
    head("router", "proposer", "positions", *drafts, "draft 1 beside the tables")
    num_positions = sum(sequence.num_labelled for sequence in sequences)
    for name, ladder in ladders.items():
        for proposer, figures in table_figures(ladder, sequences).items():
            row(name, proposer, num_positions, f"{figures['agreement']:.3f}", *[""] * len(PLACES))
        if ladder.draft_vocabulary is None:
            continue
        vocabulary = DraftVocabulary.of(loaded, ladder.draft_vocabulary)
        with torch.inference_mode():
            heads = {layer_exit.depth: layer_exit.head for layer_exit in ladder.exits}
            found = chain_agreement(tables_are_right(ladder, sequences), heads, chunks, vocabulary, loaded.num_layers)
        keys = [f"agreement_{place}" for place in (*PLACES, "1_beside_tables")]
        for depth, own in found.items():
            row(name, exit_name(depth), own["positions"], *(f"{own[key]:.3f}" for key in keys))


def _answers(loaded: LoadedModel, options: argparse.Namespace) -> list[TokenSequence]:
    """The full model's greedy answers."""
    prompts = first_turns(loaded, options.prompts, options.per_task)
    requests = [WriteRequest(tuple(prompt), options.max_tokens, stop_loops=False) for prompt in prompts]
    with closing(EngineWriter(loaded, num_decoded_rows(loaded))) as writer:
        answers = [written.tokens for written in write_all(writer, requests, Pace())]
    return [TokenSequence((*prompt, *answer), len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def _labelled(
    loaded: LoadedModel, answers: list[TokenSequence], depths: set[int], folder: Path
) -> tuple[list[LabelledSequence], StateChunks]:
    captured = sorted({*depths, *captured_depths(loaded.num_layers)})
    collector = Collector(ContiguousRunner(loaded), captured, folder, max_state_bytes=MAX_STATE_BYTES)
    found = [one for answer in answers for one in collector.add("report", answer)]
    found += collector.finish("report")
    return found, collector.chunks("report")


if __name__ == "__main__":
    main()
