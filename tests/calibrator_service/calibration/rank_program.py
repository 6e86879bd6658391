"""A rank of `test_ranks`, which calls the first one itself: calibrates what is asked for in FOLDER/asked, case by case.

python -m tests.calibrator_service.calibration.rank_program FOLDER
"""

import pickle
import sys
from pathlib import Path
from unittest.mock import patch

from shared.light_imports import import_transformers_lightly

if __name__ == "__main__":  # as in a job's process
    import_transformers_lightly()

import torch

from calibrator_service.calibration import plan
from calibrator_service.calibration.pipeline import calibrate_together
from calibrator_service.calibration.ranks import joined
from calibrator_service.calibration.spec import Progress
from shared.errors import NeapError
from tests.calibrator_service.calibration.conftest import make_model

TIMEOUT_S = 60.0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    asked, weights = pickle.loads((folder / "asked").read_bytes())
    loaded = make_model(chat=False, weights=weights)
    with joined(TIMEOUT_S) as ranks:
        for name, spec, training in asked:
            heard: list[Progress] = []
            own = loaded
            if name == "differ" and ranks.rank:
                own = make_model(chat=False, weights={key: 2 * weight for key, weight in weights.items()})
            try:
                with patch.object(plan, "TRAINING_TOKENS", training):
                    found = calibrate_together(own, spec, ranks, work_dir=folder / name, progress=heard.append)
                result = None if found is None else (found.ladder, found.report, found.pack()[1])
            except NeapError as error:
                result = error.reason
            (folder / f"{name}-{ranks.rank}").write_bytes(pickle.dumps((result, [now.fraction for now in heard])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
