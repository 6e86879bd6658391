"""neap as a library: load a frozen language model, calibrate its early exits, and generate, without services and gRPC.

    >>> import neap_engine
    >>> model = neap_engine.load(source)
    >>> text = neap_engine.TextFile("notes.txt")
    >>> router = neap_engine.calibrate(model, neap_engine.CalibrationSpec(source=text, max_tokens=2_000))
    >>> router.save("router")
    >>> with neap_engine.Engine(model, neap_engine.read_router("router")) as engine:
    ...     answer = engine.generate("Once upon a time", max_tokens=16)
    >>> answer.stats.num_tokens
    16

`source` is a Hugging Face folder, a .gguf file, or a name on the Hugging Face Hub. Without a spec, `calibrate` takes
150 seconds, on text that the model writes itself. A calibration teaches small exits at a few depths of the model which
token the full model would choose, and how far to trust them; the model's weights stay as they are. It is needed once
per model. The engine then drafts with the exits and verifies with the full model, so the answer is that of the full
model unless a request asks for the policy `relaxed`.

Names:
    load, wrap          a model from its source; a model that transformers has built already
    calibrate           trains a ladder of exits; `CalibrationSpec` says on which text and for how long,
                        `ProgressLine` shows how far it is
    read_router         the ladder that `CalibrationResult.save` has written
    read_parent         the same router as what `calibrate(..., parent=)` goes on from
    Engine              generates: `generate` for one answer, `submit` for streams and for many requests at once
    attach              lets an engine decode for `model.generate(...)` and `pipeline(...)` of transformers
    DepthPolicy         whether nothing is drafted (`full`), or which drafts are accepted (`exact`; `relaxed`, lossy)
    Constraint          what an answer must be: JSON of a schema, a regular expression, a grammar, a choice
    SamplingParams      temperature, top-k, top-p, min-p, penalties, biases, forbidden tokens, seed
    NeapError           base of all errors that neap raises; `shared.errors` has the tree

The names of `__all__` are stable: a later version that changes one announces it in CHANGELOG.md. docs/library.md has
examples, and `neap_engine.tide` takes the calls of TIDE. The names are loaded when the first of them is used. neap then
logs through `logging`, to loggers whose names begin with `neap.`, unless the application has configured structlog
already, and lowers torch's number of threads to the CPUs that the process' quota allows, unless OMP_NUM_THREADS or
`torch.set_num_threads` has chosen another number. Where torch is not imported yet, its threads wait for a shorter time
before they sleep (`shared.cpus`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shared.cpus import wait_briefly

if TYPE_CHECKING:
    from neap_engine.face import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Imports the library when it is needed: the command line and the gateway, which are in this package too, run
        without torch."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        wait_briefly()
        return getattr(import_module(f"{__name__}.face"), name)

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
