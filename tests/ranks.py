"""Ranks on this machine's CPU: this process, and others that follow it from model to model."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from shared.light_imports import import_transformers_lightly

if __name__ == "__main__":  # as a worker's ranks do
    import_transformers_lightly(shards=True)

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from shared.errors import PreconditionFailed, UnsupportedModel
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.ranks.following import follow
from shared.model.ranks.group import Ranks, first_store, join_ranks

TIMES = {"device": "cpu", "timeout_s": 240.0, "pass_timeout_s": 20.0}


@contextmanager
def ranks_of(size: int, *, end_well: bool = True) -> Iterator[Ranks]:
    """This process as rank 0. It tells the others a model's folder before it loads it, and None at the end, unless they
    do not `end_well`."""
    store = first_store(size)
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    others = [
        subprocess.Popen([sys.executable, "-m", "tests.ranks"], env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(1, size)
    ]
    try:
        with patch.dict(os.environ, {**shared, "RANK": "0", "LOCAL_RANK": "0"}):
            ranks = join_ranks(size, store=store, **TIMES)
            yield ranks
            if end_well:
                ranks.tell(None)
                assert [other.wait(60) for other in others] == [0] * len(others)
    finally:
        for other in others:
            other.kill()
            other.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def _without_tokenizer(**where: Any) -> Any:
    """Models of families have none."""
    name = where["pretrained_model_name_or_path"]
    return AutoTokenizer.from_pretrained(name) if (Path(name) / "tokenizer.json").exists() else None


_AS_IT_IS = patch("shared.model.load.AutoTokenizer", SimpleNamespace(from_pretrained=_without_tokenizer))


@contextmanager
def shared_model(ranks: Ranks, folder: Path, *, theirs: Path | None = None) -> Iterator[LoadedModel]:
    """A folder's model on all ranks, which follow the runners that are made of it. `theirs`: what the others load."""
    yield begin_model(ranks, folder, theirs or folder)
    ranks.tell(None)


def begin_model(ranks: Ranks, folder: Path, theirs: Path) -> LoadedModel:
    """As `shared_model`, which the others follow for good."""
    ranks.tell(str(theirs))
    with _AS_IT_IS:
        return load_model(folder, model_id="tiny", ranks=ranks)


def _follow_all() -> None:
    """Models that are refused everywhere are passed over."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    ranks = join_ranks(int(os.environ["WORLD_SIZE"]), **TIMES)
    with _AS_IT_IS:
        while (folder := ranks.hear()) is not None:
            if folder == TOTALS:
                check_totals(ranks)
            else:
                with suppress(UnsupportedModel, PreconditionFailed):
                    follow(load_model(folder, model_id="tiny", ranks=ranks), ranks)
    assert not {"scipy", "torch._dynamo.utils", "torch._inductor"} & sys.modules.keys(), "ranks run none of these"


# In place of a folder: all ranks call `check_totals`.
TOTALS = "totals"


def check_totals(ranks: Ranks) -> None:
    """Sums are those of the parts in the order of the ranks, whatever the size of the tensor."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks.size)]
    for rows in (1, 7, 300):
        parts = [torch.randn(rows, 1001, generator=each) * 10.0**rank for rank, each in enumerate(generators)]
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        assert torch.equal(ranks.total(parts[ranks.rank]), expected)
        assert torch.equal(ranks.joined(parts[ranks.rank]), torch.cat(parts, -1))


if __name__ == "__main__":
    _follow_all()
