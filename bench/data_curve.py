"""How often each rung says what the full model does, by how much text it was learnt from.

One text for all: less of it is its beginning. Every ladder is judged on what the largest amount set apart for it, which none has learnt
from, as sequences are dealt out one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrator_service.calibration.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.fit import fit_heads, fit_ladder
from calibrator_service.calibration.material import Material
from calibrator_service.calibration.report import held_out_report
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from shared.model.load import LoadedModel
from shared.model.runner import DepthRunner

TOKENS_PER_PASS = "rung0.tokens_per_pass_5"


@dataclass(frozen=True)
class CurvePoint:
    """`agreement` by rung over all held-out positions; `tokens_per_pass` of the tables alone, 0 where they drafted nothing."""

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
    """A point per amount, rising; each is trained when it is asked for. What is in `work_dir` is not done again.

    Nothing is certified for `relaxed`. Raises as `calibrate`.
    """
    runner = DepthRunner(loaded)

    def begun(tokens: int) -> tuple[Run, Material]:
        amount = replace(spec, max_tokens=tokens)
        run = Run(loaded, amount, work_dir, progress, lambda: False)
        material = Material(run, runner)
        material.gather()
        return run, material

    largest = max(amounts)
    _, judge = whole = begun(largest)
    for tokens in sorted(set(amounts)):
        run, material = whole if tokens == largest else begun(tokens)
        chosen = material.frequent_choices(run.plan.draft_vocabulary_size)
        vocabulary = DraftVocabulary.of(loaded, chosen)
        ladder = fit_ladder(run, material, vocabulary, fit_heads(run, material, vocabulary))
        report = held_out_report(run, runner, judge, vocabulary, ladder)
        yield CurvePoint(
            sum(material.num_tokens.values()),
            {name: float(figures["agreement"]) for name, figures in report["rungs"].items()},
            report["simulated"].get(TOKENS_PER_PASS, 0.0),
            run.elapsed_s(),
        )
