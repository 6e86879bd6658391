"""What it costs a head that the sums of its parent were projected, as those of a wide model are when it is published.

    python -m bench.projected --model FILE --text FILE [--field text] --child-text FILE [--child-field text]
        [--tokens 30000] [--child-tokens 5000] [--shares .23 .1 .05]

Sums of --tokens of a text are projected to shares of their inputs. Heads of depth 0 are solved from these alone, and
from these and the sums of --child-tokens of another text, as a child of the router would solve them. "Agrees": how
often the head's drafts are the full model's choices, at both steps, on the confidence splits of both texts. "Left": of
the inputs' squares.
"""

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import neap_engine
from bench.machine import described
from bench.options import add_dtypes, load, make_parser, parsed
from bench.table import head, row
from calibrator_service.calibration import pipeline
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.states.moments import Moments
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.closed_form import solve_head
from calibrator_service.calibration.training.confidence import exit_samples
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary, choose_draft_vocabulary
from shared.errors import Cancelled
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel


@dataclass(frozen=True)
class Learned:
    """What a calibration has collected from a text."""

    run: CalibrationRun
    material: TrainingData
    vocabulary: DraftVocabulary
    sums: Moments

    def agreement(self, sums: Moments) -> float:
        """Of a head that is solved from these sums, on this text."""
        solved, chunks = solve_head(sums, self.run.plan.mlp_width), self.material.chunks["confidence"]
        samples = exit_samples(0, solved, chunks, self.vocabulary, self.run.loaded.num_layers, "agreement")
        return float(samples.label.float().mean())


def learned(loaded: LoadedModel, source: neap_engine.TextFile, num_tokens: int, folder: Path) -> Learned:
    found: list[Learned] = []

    def keep(run: CalibrationRun, runner: ContiguousRunner, material: TrainingData, *_: object) -> NoReturn:
        sums = Moments(material.moments[0].layout)
        sums.merge(material.moments[0])
        found.append(Learned(run, material, choose_draft_vocabulary(run, material), sums))
        raise Cancelled("its sums are all that is wanted")

    spec = neap_engine.CalibrationSpec(source=source, max_tokens=num_tokens, exit_depths=(0,))
    # Heads that gradients train need the same sums.
    with patch.object(pipeline, "made_heads", keep), suppress(Cancelled):
        neap_engine.calibrate(loaded, spec, work_dir=folder)
    return found[0]


def main() -> None:
    parser = make_parser(__doc__)
    add_dtypes(parser)
    for name in ("", "child-"):
        parser.add_argument(f"--{name}text", type=Path, required=True)
        parser.add_argument(f"--{name}field", default="text")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--child-tokens", type=int, default=5000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.23, 0.1, 0.05])
    options = parsed(parser)
    loaded = load(options)
    with tempfile.TemporaryDirectory() as folder:
        of_parent: dict[str, Any] = {"path": str(options.text), "field": options.field}
        of_child: dict[str, Any] = {"path": str(options.child_text), "field": options.child_field}
        parent = learned(loaded, neap_engine.TextFile(**of_parent), options.tokens, Path(folder) / "parent")
        child = learned(loaded, neap_engine.TextFile(**of_child), options.child_tokens, Path(folder) / "child")
        print(described("cpu"))
        print(f"{parent.sums.count:.0f} and {child.sums.count:.0f} positions of {parent.sums.layout.width} inputs")
        head("sums", "MB", "seconds", "left", "alone, parent's text", "child, parent's text", "child, own text")
        for share in [0.0, *options.shares, None]:
            show(parent, child, share)


def show(parent: Learned, child: Learned, share: float | None) -> None:
    """`share`: 0 for sums as they are, None for none of the parent's."""
    layout, left = parent.sums.layout, ""
    told, took_s, size = parent.sums, 0.0, 4 * layout.num_sums
    if share:
        began_s = time.perf_counter()
        most_bytes = share * layout.width * 2 * (layout.width + 2 * layout.hidden_size)
        tensors = parent.sums.to_tensors(most_bytes=most_bytes)
        took_s, size = time.perf_counter() - began_s, sum(tensor.nbytes for tensor in tensors.values())
        told = Moments(layout)
        told.merge(Moments.from_tensors(tensors, layout))
        left = f"{float(told.second.trace() / parent.sums.second.trace()):.4f}"
    both = Moments(layout)
    both.merge(child.sums)
    if share is not None:
        both.merge(told)
    name = "none of the parent's" if share is None else f"projected to {share:.2f}" if share else "as they are"
    alone = "" if share is None else f"{parent.agreement(told):.4f}"
    figures = [f"{of.agreement(both):.4f}" for of in (parent, child)]
    row(name, f"{size / 1e6:.1f}", f"{took_s:.1f}", left, alone, *figures)


if __name__ == "__main__":
    main()
