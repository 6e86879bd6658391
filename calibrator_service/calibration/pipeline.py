"""A whole calibration, from top to bottom: text, states, training, report. Streaming, in bounded memory, resumable."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from calibrator_service.calibration.plan import resolve
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.report.held_out import (
    chain_agreement,
    held_out_report,
    joint_figures,
    tables_are_right,
)
from calibrator_service.calibration.report.relaxed import relaxed_figures
from calibrator_service.calibration.report.speed import speed_figures
from calibrator_service.calibration.report.worth import without_unpaid
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import CalibrationSpec, Progress, published_spec, source_record
from calibrator_service.calibration.states.training_data import TrainingData, collect_training_data, layouts_of
from calibrator_service.calibration.statistics import Parent, Statistics
from calibrator_service.calibration.text.engine_writer import text_writer
from calibrator_service.calibration.text.splits import Split, Splitter
from calibrator_service.calibration.text.stream import (
    CollectingProgress,
    GivenText,
    plan_text,
    split_sequences,
    too_little_text,
)
from calibrator_service.calibration.text.writer import Writer
from calibrator_service.calibration.training.closed_form import seconds_to_solve, share_to_solve
from calibrator_service.calibration.training.confidence import fit_ladder
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary, choose_draft_vocabulary
from calibrator_service.calibration.training.heads import fit_heads
from calibrator_service.calibration.training.joint import fit_joint, joint_positions
from calibrator_service.calibration.training.tables import fit_tables
from shared.digests import digest_of
from shared.errors import InvalidInput
from shared.ladder.artefact import pack_ladder
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.ladder.exit_head import ExitHead
from shared.ladder.folder import write_router_folder
from shared.ladder.ladder import Ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread
from shared.termination import unwinding_on_sigterm

# A pool gets heads of its own where these give so many times the tokens a pass (`tokens_per_pass`), and its parent's
# elsewhere.
LEAST_GAIN = 1.15

# Draft vocabulary, and heads by depth.
MadeHeads = tuple[DraftVocabulary, dict[int, ExitHead]]

log = structlog.get_logger("neap.calibration")


@dataclass(frozen=True)
class CalibrationResult:
    """The ladder and its held-out figures. `report` is ready for JSON and for `pack_ladder`. `statistics`: what a later
    calibration goes on from. `heads_blob`: the parent's, whose heads it has, if it has no own ones."""

    ladder: Ladder
    report: dict[str, Any]
    statistics: Statistics | None = None
    heads_blob: bytes | None = None

    def pack(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """(manifest, blobs) of the router, with its statistics unless they are too large."""
        data = self.statistics.to_bytes() if self.statistics is not None else None
        if self.statistics is None or data is None:
            log.warning("published without statistics: no calibration can go on from this router")
            return pack_ladder(self.ladder, self.report, self.heads_blob)
        record = {
            "digest": digest_of(data),
            "num_tokens": self.statistics.num_tokens,
            "generation": self.statistics.generation,
        }
        manifest, blobs = pack_ladder(self.ladder, {**self.report, "statistics": record}, self.heads_blob)
        return manifest, {**blobs, STATISTICS_BLOB: data}

    def save(self, folder: Path | str) -> None:
        """Writes the router as files, which `shared.ladder.folder.read_ladder` reads and `neap routers import`
        publishes."""
        write_router_folder(Path(folder), *self.pack())


def calibrate(
    loaded: LoadedModel,
    spec: CalibrationSpec | None = None,
    *,
    parent: Parent | None = None,
    work_dir: Path | str | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    fleet_of: Callable[[Writer], Writer] | None = None,
) -> CalibrationResult:
    """As `calibrate_together`, by one rank alone."""
    result = calibrate_together(
        loaded,
        spec,
        Ranks(),
        parent=parent,
        work_dir=work_dir,
        progress=progress,
        should_stop=should_stop,
        fleet_of=fleet_of,
    )
    assert result is not None
    return result


def calibrate_together(
    loaded: LoadedModel,
    spec: CalibrationSpec | None,
    ranks: Ranks,
    *,
    parent: Parent | None = None,
    work_dir: Path | str | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    fleet_of: Callable[[Writer], Writer] | None = None,
) -> CalibrationResult | None:
    """Calibrates a ladder for a frozen model. Without a spec, or without a limit in it: for `plan.QUICK_BUDGET_S`.

    `work_dir` keeps collected and trained files, so that a killed run can continue; None means a temporary folder,
    which is removed also if SIGTERM ends the program. It may be deleted afterwards. The same spec, model and folder
    give the same ladder but for rounding, unless a time budget ends a phase elsewhere, or an exit is left out that
    would not pay on this machine. `fleet_of` makes a writer that lets others write, from the one that writes here and
    takes over what they leave. With a `parent` the ladder is made from the parent's statistics and those of the new
    text together, and, if the parent gives heads, has these unless its own are better (`made_heads`). Text that the
    parent has learned from is not learned from again. Raises `RouterMismatch` and `PreconditionFailed`
    (LAYOUT_MISMATCH) for a parent of another model, tokenizer or layout, `InvalidInput` (also if nothing that was
    learned agrees with the model), `NotFound`, `PermissionDenied` and `Unavailable` for sources that cannot be read,
    `Cancelled` once `should_stop`, `Corrupt` for a damaged work folder, and `Exhausted` for a full disk.

    All of several `ranks` are called with the same; the first one gets the result, the others None. Each may have a
    `work_dir` of its own. Raises also `PreconditionFailed` (RANKS_DIFFER) and `Unavailable` (RANK_LOST).
    """
    spec = spec or CalibrationSpec(loaded.model_id)
    if parent is not None:
        spec = parent.spec_of_child(spec)
    elif spec.parent is not None:
        raise InvalidInput("the spec has a parent, but its statistics are not given")
    plan = resolve(spec, loaded)
    if parent is not None and parent.gives_heads:
        given = parent.heads.by_depth if parent.heads else {}
        # A parent that had its own parent's heads has no sums to solve from.
        plan = plan.with_given_heads(given, solves=bool(plan.depths and given) and parent.statistics.has_sums(given))
    if parent is not None:
        parent.statistics.check(loaded, layouts_of(loaded, plan.depths) if plan.solves else {})
    with ExitStack() as stack:
        if work_dir is None:
            stack.enter_context(unwinding_on_sigterm())
            scratch = TemporaryDirectory(prefix="neap-calibration-", ignore_cleanup_errors=True)
            work_dir = stack.enter_context(scratch)
        run = CalibrationRun(loaded, plan, Path(work_dir), progress, should_stop, ranks)
        # A thread of its own, because OpenMP keeps a pool of threads per calling thread (docs/decisions/007).
        return run_in_own_thread(run_phases, run, parent, fleet_of)


def run_phases(
    run: CalibrationRun, parent: Parent | None = None, fleet_of: Callable[[Writer], Writer] | None = None
) -> CalibrationResult | None:
    """All phases in order, in the calling thread. Returns and raises as `calibrate_together`."""
    run.report("loading", 0.0)
    runner = ContiguousRunner(run.loaded)
    hidden_size = run.loaded.hidden_size
    solving_s = len(run.plan.depths) * seconds_to_solve(hidden_size, run.loaded.device) if run.plan.solves else 0.0
    # What a parent has learned from is known by its sums alone.
    run.schedule.expect_solving(
        lambda count: solving_s * share_to_solve(hidden_size, count if parent is None else math.inf)
    )

    with run.phase("collecting"), closing(text_writer(run, fleet_of)) as writer:
        source = source_record(run.spec.source) if run.ranks.is_first else {}
        text = plan_text(run)
        splitter = Splitter(
            text.held_out_kinds if isinstance(text, GivenText) else (),
            parent.statistics.learned.tolist() if parent is not None else (),
        )
        collecting = CollectingProgress(run, text)
        sequences = split_sequences(run, text, splitter, collecting, writer)
        material = collect_training_data(run, runner, sequences, collecting)
        is_cut = collecting.is_late()
        statistics = Statistics.of(run.loaded, material, splitter.learned)
        if parent is not None and run.ranks.is_first:
            statistics = statistics.plus(parent.statistics, parent.router.share)
            material = replace(
                material, moments=statistics.moments, ngrams=statistics.ngrams, choice_counts=statistics.choice_counts
            )

    if not run.plan.trains:
        # From here on the first rank is alone: only training needs the others.
        if not run.ranks.is_first:
            return None
        run.ranks = Ranks()
    with run.phase("training_heads"):
        own = made_heads(run, runner, material, parent)
    if not run.ranks.is_first:
        return None

    with run.phase("training_confidence"):
        tables = fit_tables(run, material)
        (vocabulary, heads), heads_blob = chosen_heads(run, material, tables, own, parent)
        if heads_blob is not None:
            statistics = replace(statistics, moments={})
        ladder = fit_ladder(run, material, tables, vocabulary, heads)

    with run.phase("evaluating"):
        report = held_out_report(run, material, vocabulary, ladder)
        is_child = parent is not None
        if heads_blob is None:  # the parent's calibration has judged its own
            ladder, left_out = without_unpaid(run, runner, ladder, report, is_child=is_child)
            report["left_out"] |= left_out
        ladder, report["joint"] = with_joint_weights(ladder, material, vocabulary)
        agrees = any(report["proposers"][name]["agreement"] for name in ladder.proposer_names)
        if not agrees and not ladder.exits and not is_child:
            raise too_little_text(run, "what was learned agrees with the model nowhere", is_cut=is_cut)
        ladder = with_measured_agreement(ladder, report)
        report["speed"] = speed_figures(run, runner, ladder, material.table_sequences["report"])
        report["relaxed"] = relaxed_figures(run, runner, ladder, material.table_sequences["report"])

    report["spec"] = published_spec(run.spec, source)
    report["seconds"] = {**run.seconds, "total": run.elapsed_s()}
    run.report("publishing", 1.0)
    return CalibrationResult(ladder, report, statistics, heads_blob)


def made_heads(
    run: CalibrationRun, runner: ContiguousRunner, material: TrainingData, parent: Parent | None
) -> MadeHeads | None:
    """Heads of its own. None: they cannot be solved, and the parent gives its."""
    if not run.plan.solves and parent is not None and parent.heads is not None:
        return None
    vocabulary = choose_draft_vocabulary(run, material)
    return vocabulary, fit_heads(run, runner, material, vocabulary)


def chosen_heads(
    run: CalibrationRun, material: TrainingData, tables: Ladder, own: MadeHeads | None, parent: Parent | None
) -> tuple[MadeHeads, bytes | None]:
    """The heads to publish. If they are the parent's, also the blob that has them: that is where its own give hardly
    more tokens a pass on the confidence split, or there are none."""
    if parent is None or parent.heads is None:
        assert own is not None
        return own, None
    theirs = DraftVocabulary.of(run.loaded, parent.heads.vocabulary), dict(parent.heads.by_depth)
    if own is not None:
        chunks, layers = material.chunks["confidence"], run.loaded.num_layers
        helped = tables_are_right(tables, material.table_sequences["confidence"])
        figures = {
            name: tokens_per_pass(chain_agreement(helped, heads, chunks, vocabulary, layers))
            for name, (vocabulary, heads) in (("own", own), ("parents", theirs))
        }
        log.info("tokens a pass with heads of its own, and with the parent's", **figures)
        run.figures |= {f"heads.{name}.tokens_per_pass": figure for name, figure in figures.items()}
        if figures["own"] > LEAST_GAIN * figures["parents"]:
            return own, None
    return theirs, parent.heads_blob


def tokens_per_pass(along_chains: Mapping[int, Mapping[str, float]]) -> float:
    """By the figures of `chain_agreement`, if a token takes a pass unless the tables or the best head's first draft is
    right."""
    missed = [
        figures["positions_beside_tables"] * (1 - figures["agreement_1_beside_tables"]) / max(figures["positions"], 1)
        for figures in along_chains.values()
    ]
    return 1 / max(min(missed, default=1.0), 1e-3)


def with_joint_weights(
    ladder: Ladder, material: TrainingData, vocabulary: DraftVocabulary
) -> tuple[Ladder, dict[str, dict[str, float]]]:
    """The ladder that has learned on the confidence split what to make of all that its proposers say, and
    `joint_figures` on the report split."""
    splits: tuple[Split, Split] = ("confidence", "report")
    learned_from, measured_on = (
        joint_positions(ladder, material.chunks[split], material.table_sequences[split], vocabulary) for split in splits
    )
    weights = fit_joint(learned_from)
    return replace(ladder, joint_weights=weights), joint_figures(weights, measured_on)


def with_measured_agreement(ladder: Ladder, report: dict[str, Any]) -> Ladder:
    """The ladder whose exits know the agreement that was measured for them."""
    measured = tuple(
        replace(layer_exit, agreement=report["proposers"][layer_exit.name]["agreement"]) for layer_exit in ladder.exits
    )
    return replace(ladder, exits=measured)
