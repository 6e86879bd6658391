"""What a calibration learns from and is evaluated on: the labelled text and the states of each split."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from calibrator_service.calibration.plan import MAX_STATE_BYTES
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.states.chunk import StateChunks
from calibrator_service.calibration.states.collect import Collector, LabelledSequence
from calibrator_service.calibration.states.moments import Moments, MomentsLayout, Sums
from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.splits import SPLITS, Split
from calibrator_service.calibration.text.stream import CollectingProgress, too_little_text
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread
from shared.model.runner import captured_depths

# Tokens of the confidence split, and of the report split, on which the table proposers are evaluated; they are held in
# memory.
MAX_TABLE_TOKENS = 100_000


@dataclass(frozen=True)
class TrainingData:
    """moments: of the heads split, by exit, which heads are solved from; chunks: states of each split that is read
    again; table_sequences: sequences of the routers and report splits, for the tables.

    choice_counts: [V], how often the full model chose each token in the heads split; ngrams: has counted the n-grams
    of that split; num_tokens: tokens learned from, per split.
    """

    moments: Mapping[int, Moments]
    chunks: Mapping[Split, StateChunks]
    table_sequences: Mapping[Split, tuple[LabelledSequence, ...]]
    choice_counts: Tensor
    ngrams: NgramTableBuilder
    num_tokens: Mapping[Split, int]


def collect_training_data(
    run: CalibrationRun,
    runner: ContiguousRunner,
    sequences: Iterable[tuple[Split, TokenSequence]],
    progress: CollectingProgress,
) -> TrainingData:
    """Passes `sequences` through the model, and adds what is summed over all ranks. States stay where they are.

    Raises `InvalidInput` (TOO_LITTLE_TEXT, BUDGET_TOO_SHORT) if a split stays empty, what `sequences` raises, and
    `Cancelled`.
    """
    plan = run.plan
    # What the LM head reads: deep states after the final norm, or, without one, scaled to a root mean square of 1.
    dtype = run.loaded.model.dtype
    sums = Sums(
        layouts_of(run.loaded, plan.depths) if plan.solves else {},
        lambda deep: runner.normed(deep.to(dtype)),
        run.loaded.device,
        run.folder / "sums.safetensors",
    )
    collector = Collector(
        runner,
        plan.captured_depths(run.loaded.num_layers),
        run.folder,
        max_state_bytes=MAX_STATE_BYTES,
        sums=sums if plan.solves else None,
        stored=SPLITS if plan.trains else [split for split in SPLITS if split != "heads"],
        cosine_threshold=run.spec.cosine_threshold if run.spec.label == "cosine" else None,
        chunk_positions=plan.sizes.chunk_positions,
        pass_tokens=plan.sizes.pass_tokens,
        keeps_states=plan.sizes.keeps_states,
    )
    num_tokens: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    table_sequences: dict[Split, list[LabelledSequence]] = {"confidence": [], "report": []}
    num_table_tokens: dict[Split, int] = {"confidence": 0, "report": 0}
    choice_counts = torch.zeros(run.loaded.vocabulary_size, dtype=torch.long)
    ngrams = NgramTableBuilder()

    def take(split: Split, labelled: list[LabelledSequence]) -> None:
        for sequence in labelled:
            num_tokens[split] += sequence.num_labelled
            if split == "heads":
                ngrams.add(sequence.tokens, sequence.choices, sequence.first)
            elif num_table_tokens[split] < MAX_TABLE_TOKENS:
                table_sequences[split].append(sequence)
                num_table_tokens[split] += len(sequence.tokens)
        if split == "heads" and labelled:
            choices = np.concatenate([s.choices[s.first :] for s in labelled])
            choice_counts.add_(torch.bincount(torch.from_numpy(choices), minlength=len(choice_counts)))
        progress.set_learned(sum(num_tokens.values()))

    # Passes run in threads that end, beside the thread of the engine that writes (docs/decisions/007).
    for split, sequence in sequences:
        take(split, run_in_own_thread(collector.add, split, sequence))
    for split in SPLITS:
        take(split, run_in_own_thread(collector.finish, split))
    own, of_ranks = sum(num_tokens.values()), run.ranks.everyones(num_tokens)
    for split in SPLITS:
        num_tokens[split] = sum(of_rank[split] for of_rank in of_ranks)
        if num_tokens[split] == 0:
            raise too_little_text(run, f"nothing is left for the {split} split", is_cut=progress.is_late())
    progress.by_others = progress.by_others[0], sum(num_tokens.values()) - own
    progress.set_learned(own)
    sums.save()
    for moments in sums.moments.values():
        moments.add_over(run.ranks)
    ngrams.add_over(run.ranks)
    run.ranks.add(choice_counts)
    return TrainingData(
        moments=sums.moments,
        chunks={split: collector.chunks(split) for split in SPLITS},
        table_sequences={split: tuple(of_split) for split, of_split in table_sequences.items()},
        choice_counts=choice_counts,
        ngrams=ngrams,
        num_tokens=num_tokens,
    )


def layouts_of(loaded: LoadedModel, depths: Iterable[int]) -> dict[int, MomentsLayout]:
    """Which states each exit is solved from, by its depth."""
    captured, size = captured_depths(loaded.num_layers), loaded.hidden_size
    return {depth: MomentsLayout(size, depth, captured) for depth in depths}
