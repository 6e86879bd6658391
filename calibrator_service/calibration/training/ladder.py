"""The ladder of trained heads: the successor table is built and all routers are trained."""

from dataclasses import replace

from calibrator_service.calibration.plan import HEADS_END, ROUTERS_END
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.states.material import Material
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.routers import exit_samples, train_router
from calibrator_service.calibration.training.tables import fit_table_routers
from shared.ladder.heads import ExitHead
from shared.ladder.ladder import Ladder, LayerExit, ModelIdentity
from shared.ladder.table_router import fit_table_router


def fit_ladder(
    run: Run, material: Material, vocabulary: DraftVocabulary, heads: dict[int, ExitHead]
) -> Ladder:
    """The ladder with its routers trained on the routers split. The agreement of its exits is not measured yet.

    Raises `Cancelled`.
    """
    untrained = fit_table_router([], [])
    ladder = Ladder(
        ModelIdentity.of(run.loaded),
        suffix_router=untrained,
        successors=material.successors.build(run.plan.table_bytes),
        successor_router=untrained,
    )
    suffix_router, successor_router = fit_table_routers(ladder, material.table_sequences["routers"])
    exits = []
    for number, (depth, head) in enumerate(heads.items(), 1):
        samples = exit_samples(
            depth,
            head,
            material.chunks["routers"],
            vocabulary,
            run.spec.label,
            seed=run.spec.seed,
        )
        end_share = HEADS_END + (ROUTERS_END - HEADS_END) * number / len(heads)
        router = train_router(
            samples,
            run.spec.router_width,
            seed=run.spec.seed,
            seconds=run.seconds_until(end_share),
            should_stop=run.should_stop,
        )
        exits.append(LayerExit(depth, head, router))
        run.report("training_routers", end_share)
    return replace(
        ladder,
        suffix_router=suffix_router,
        successor_router=successor_router,
        exits=tuple(exits),
        draft_vocabulary=vocabulary.tokens,
    )
