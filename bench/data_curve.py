"""The agreement of each rung with the full model as a function of the amount of text it was trained on.

All amounts are prefixes of one text. Every ladder is judged on the held-out split of the largest amount. No ladder was trained on that
split: sequences are assigned to splits in order, so a sequence belongs to the same split in every prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrator_service.calibration.plan import resolve
from calibrator_service.calibration.progress import Progress
from calibrator_service.calibration.report.held_out import held_out_report
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import CalibrationSpec
from calibrator_service.calibration.states.training_data import TrainingData, collect_training_data
from calibrator_service.calibration.text.splits import Splitter
from calibrator_service.calibration.text.stream import (
    CollectingProgress,
    plan_text,
    split_sequences,
)
from calibrator_service.calibration.training.draft_vocabulary import choose_draft_vocabulary
from calibrator_service.calibration.training.heads import fit_heads
from calibrator_service.calibration.training.routers import fit_ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import LoadedModel

TOKENS_PER_PASS = "rung0.tokens_per_pass_5"


@dataclass(frozen=True)
class CurvePoint:
    """The ladder of one amount of text.

    `tokens`: the amount. `agreement`: by rung, over all held-out positions. `tokens_per_pass`: simulated, with the suffix and
    successor rungs alone; 0 if they drafted nothing. `seconds`: time of the training.
    """

    tokens: int
    agreement: dict[str, float]
    tokens_per_pass: float
    seconds: float

    def row(self) -> str:
        cells = [f"{self.tokens:,}", *(f"{share:.3f}" for share in self.agreement.values())]
        return f"| {' | '.join(cells)} | {self.tokens_per_pass:.2f} | {self.seconds:.0f} |"

    def header(self) -> str:
        cells = ["tokens", *self.agreement, "tokens per pass, tables", "seconds"]
        return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def data_curve(
    loaded: LoadedModel,
    spec: CalibrationSpec,
    amounts: Sequence[int],
    work_dir: Path,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[CurvePoint]:
    """One point per amount, in ascending order. Each is trained when the iterator reaches it; work found in `work_dir` is reused.

    No risk of `relaxed` is certified. Raises as `calibrate`.
    """
    runner = ContiguousRunner(loaded)

    def collect(tokens: int) -> tuple[Run, TrainingData]:
        amount = replace(spec, max_tokens=tokens)
        run = Run(loaded, resolve(amount, loaded), work_dir, progress, lambda: False)
        text = plan_text(run)
        collecting = CollectingProgress(run, text)
        sequences = split_sequences(run, text, Splitter(), collecting)
        return run, collect_training_data(run, runner, sequences, collecting)

    largest = max(amounts)
    _, judge = whole = collect(largest)
    for tokens in sorted(set(amounts)):
        run, material = whole if tokens == largest else collect(tokens)
        vocabulary = choose_draft_vocabulary(run, material)
        heads = fit_heads(run, runner, material, vocabulary)
        ladder = fit_ladder(run, material, vocabulary, heads)
        report = held_out_report(run, judge, vocabulary, ladder, {})
        yield CurvePoint(
            sum(material.num_tokens.values()),
            {name: float(figures["agreement"]) for name, figures in report["rungs"].items()},
            report["simulated"].get(TOKENS_PER_PASS, 0.0),
            run.elapsed_s(),
        )
