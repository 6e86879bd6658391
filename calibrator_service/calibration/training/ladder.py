"""The training phases: exit heads, kept on disk once they are trained, then routers, and the ladder they make up."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.plan import HEADS_END, RISK_TEXT_ENDS, ROUTERS_END
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.states.material import Material
from calibrator_service.calibration.text.shards import write_atomically
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.heads import train_heads
from calibrator_service.calibration.training.routers import exit_samples, train_router
from calibrator_service.calibration.training.tables import fit_table_routers
from shared.ladder.artefact import round_weights
from shared.ladder.head_rows import head_width, projection
from shared.ladder.heads import ExitHead
from shared.ladder.ladder import Ladder, LayerExit, ModelIdentity
from shared.ladder.table_router import fit_table_router


def fit_heads(run: Run, material: Material, vocabulary: DraftVocabulary) -> dict[int, ExitHead]:
    """Depth -> head, rounded as shipped; read where an earlier run left them. Raises `Cancelled`."""
    heads = _new_heads(run, vocabulary.rows.device)
    path = run.folder / "heads.safetensors"
    if path.exists():
        _load_heads(heads, path)
        return heads

    def on_step(done: float, losses: dict[str, float]) -> None:
        run.figures.update(losses)
        run.tell("training_heads", RISK_TEXT_ENDS + (HEADS_END - RISK_TEXT_ENDS) * done)

    train_heads(
        heads,
        material.chunks("heads"),
        vocabulary.rows,
        vocabulary.bias,
        vocabulary.lookup,
        replace(run.plan.training, seconds=run.left_s(HEADS_END)),
        read=material.read,
        should_stop=run.should_stop,
        on_step=on_step,
    )
    for head in heads.values():
        round_weights(head)
        head.eval().requires_grad_(False)
    stored = {f"{d}.{n}": t.cpu() for d, h in heads.items() for n, t in h.state_dict().items()}
    write_atomically(path, save(stored))
    return heads


def _new_heads(run: Run, device: torch.device) -> dict[int, ExitHead]:
    parts = run.loaded.parts
    gain = getattr(parts.final_norm, "weight", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.spec.seed % 2**63)
        return {
            depth: ExitHead(
                run.spec.head_form,
                run.loaded.hidden_size,
                head_width(parts.head),
                run.plan.rank if run.spec.head_form == "gated" else 0,
                gain if isinstance(gain, Tensor) and gain.device.type != "meta" else None,
            ).to(device)
            for depth in run.plan.depths
        }


def _load_heads(heads: dict[int, ExitHead], path: Path) -> None:
    tensors = load(path.read_bytes())
    for depth, head in heads.items():
        prefix = f"{depth}."
        head.load_state_dict(
            {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        )


def fit_ladder(
    run: Run, material: Material, vocabulary: DraftVocabulary, heads: dict[int, ExitHead]
) -> Ladder:
    """The ladder with all its routers trained; its exits' agreement is not measured yet. Raises `Cancelled`."""
    blank = fit_table_router([], [])
    ladder = Ladder(
        ModelIdentity.of(run.loaded),
        suffix_router=blank,
        successors=material.builder.build(run.plan.table_bytes),
        successor_router=blank,
    )
    suffix_router, successor_router = fit_table_routers(ladder, material.judged["routers"])
    exits = []
    project = projection(vocabulary.rows, vocabulary.bias)
    for number, (depth, head) in enumerate(heads.items(), 1):
        samples = exit_samples(
            depth,
            head,
            material.chunks("routers"),
            project,
            vocabulary.lookup,
            run.spec.label,
            seed=run.spec.seed,
            device=vocabulary.rows.device,
            read=material.read,
        )
        share = HEADS_END + (ROUTERS_END - HEADS_END) * number / len(heads)
        router = train_router(
            samples,
            run.spec.router_width,
            seed=run.spec.seed,
            seconds=run.left_s(share),
            should_stop=run.should_stop,
        )
        exits.append(LayerExit(depth, head, router))
        run.tell("training_routers", share)
    return replace(
        ladder,
        suffix_router=suffix_router,
        successor_router=successor_router,
        exits=tuple(exits),
        draft_vocabulary=vocabulary.tokens,
    )
