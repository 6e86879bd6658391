"""The names of the library, each documented where it is defined.
`neap_engine` gives them, and imports this module for the first.

The import sends neap's log lines to `logging`, and fits torch's number of threads.
"""

from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, HubDataset, SelfGenerated, TextFile
from neap_engine.hugging_face.attach import attach
from neap_engine.logs import log_to_logging
from neap_engine.parents import read_parent
from neap_engine.progress import ProgressLine
from neap_engine.threads import fit_torch_threads
from shared.constraints.constraint import Constraint
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.errors import NeapError
from shared.ladder.folder import read_ladder as read_router
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model as load
from shared.model.loaded import LoadedModel
from shared.model.loaded import wrap_model as wrap
from shared.model.sampling import SamplingParams

__all__ = [
    "AnswerFile",
    "CalibrationResult",
    "CalibrationSpec",
    "Constraint",
    "DepthPolicy",
    "Engine",
    "Generation",
    "HubDataset",
    "LoadedModel",
    "NeapError",
    "ProgressLine",
    "SamplingParams",
    "SelfGenerated",
    "TextFile",
    "attach",
    "calibrate",
    "load",
    "read_parent",
    "read_router",
    "wrap",
]

log_to_logging()
fit_torch_threads()
