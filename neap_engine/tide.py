"""The calls of TIDE 0.2.1 on neap, for code that was written for TIDE. docs/from-tide.md compares the two name by name.

    from neap_engine.tide import TIDE, TIDEConfig, calibrate      # instead of: from TIDE import ...

    calibrate(model, tokenizer, save_path="router")               # a folder of two files, no pickle
    with TIDE(model, "router") as engine:
        output = engine.generate(input_ids, max_new_tokens=64, temperature=0)
    print(engine.last_stats.summary())

`model` is a model of transformers, which runs on neap's kernels from then on, or one that `neap_engine.load` returned.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calibrator_service.calibration.spec import Source
from neap_engine.face import (
    CalibrationResult,
    CalibrationSpec,
    DepthPolicy,
    Engine,
    HubDataset,
    LoadedModel,
    ProgressLine,
    SelfGenerated,
    attach,
    read_router,
    wrap,
)
from neap_engine.face import calibrate as calibrate_ladder
from neap_engine.hugging_face.attach import ExitStats
from shared.errors import InvalidInput
from shared.field_types import check_types
from shared.ladder.proposers import DEFAULT_CONFIDENCE_WIDTH

# TIDE cuts each text of a calibration off after so many tokens.
TOKENS_PER_SAMPLE = 512
WIKITEXT: Source = HubDataset("Salesforce/wikitext", config="wikitext-103-raw-v1")
# Fields that have no effect in TIDE 0.2.1, with their defaults.
WITHOUT_EFFECT = {
    "exit_strategy": "identity",
    "kv_cache_strategy": "zero_pad",
    "compaction_threshold": 0.25,
    "profile": False,
}

Model = PreTrainedModel | LoadedModel


@dataclass(frozen=True)
class TIDEConfig:
    """TIDE's fields. None leaves a choice to neap, which differs from TIDE's default.

    `exit_threshold` None: policy exact, whose answers are those of the full model. A number: policy relaxed with that
    threshold, under which a draft is accepted if the full model chooses it with at least that probability, as
    calibrated, or chooses it indeed.
    The fields that TIDE itself does not use may only have TIDE's defaults. Raises `InvalidInput`.
    """

    exit_threshold: float | None = None
    min_layers: int = 0
    checkpoint_interval: int | None = None
    calibration_samples: int | None = None
    calibration_dataset: str | None = None
    convergence_threshold: float | None = None
    router_bottleneck_dim: int = DEFAULT_CONFIDENCE_WIDTH
    exit_strategy: str = "identity"
    kv_cache_strategy: str = "zero_pad"
    compaction_threshold: float = 0.25
    profile: bool = False

    def __post_init__(self) -> None:
        for name, default in WITHOUT_EFFECT.items():
            if getattr(self, name) != default:
                raise InvalidInput(
                    f"{name} is {getattr(self, name)!r}; TIDE 0.2.1 does not use it, and neap has nothing like it",
                    reason="UNSUPPORTED_OPTION",
                    metadata={"option": name},
                )
        check_types(self)
        if self.checkpoint_interval is not None and self.checkpoint_interval < 1:
            raise InvalidInput(f"checkpoint_interval is {self.checkpoint_interval}; it must be at least 1")

    @property
    def policy(self) -> DepthPolicy:
        """The depth policy of answers."""
        if self.exit_threshold is None:
            return DepthPolicy("exact", min_layers=self.min_layers)
        return DepthPolicy("relaxed", threshold=self.exit_threshold, min_layers=self.min_layers)

    def spec(self, num_layers: int) -> CalibrationSpec:
        """The calibration of a model with `num_layers` layers."""
        every = self.checkpoint_interval
        name = self.calibration_dataset
        source: Source = HubDataset(name) if name else SelfGenerated()
        cosine = self.convergence_threshold
        return CalibrationSpec(
            source=WIKITEXT if name == "wikitext" else source,
            max_tokens=(self.calibration_samples or 0) * TOKENS_PER_SAMPLE,
            exit_depths=tuple(range(every, num_layers, every)) if every else (),
            label="agreement" if cosine is None else "cosine",
            cosine_threshold=0.98 if cosine is None else cosine,
            confidence_width=self.router_bottleneck_dim,
        )


def calibrate(
    model: Model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: TIDEConfig | None = None,
    save_path: str | Path = "./router",
    *,
    time_budget_s: float | None = None,
) -> CalibrationResult:
    """Calibrates a router, shows its progress on standard error, and saves it in the folder `save_path`.

    `time_budget_s`: a limit, beside the number of samples. Raises as `neap_engine.calibrate`.
    """
    loaded = _loaded(model, tokenizer)
    spec = replace((config or TIDEConfig()).spec(loaded.num_layers), time_budget_s=time_budget_s)
    result = calibrate_ladder(loaded, spec, progress=ProgressLine())
    result.save(save_path)
    return result


class TIDE:
    """Generates for `model` with the router in the folder `router_path`. A context manager, which closes.

    One at a time may use a model. Raises as `neap_engine.read_router`, `Engine` and `attach`.
    """

    def __init__(self, model: Model, router_path: str | Path, config: TIDEConfig | None = None) -> None:
        self._loaded = _loaded(model)
        self._engine = Engine(self._loaded, read_router(router_path))
        self._attached = attach(self._engine, (config or TIDEConfig()).policy)

    @property
    def last_stats(self) -> ExitStats | None:
        """Where the tokens of the last `generate` left the model. None before the first."""
        return self._attached.last_stats

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.9,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """input_ids [B, S] -> [B, S + N]. `temperature` 0 is greedy.
        An answer ends at the model's end-of-sequence token.

        Rows are padded on the left, and `attention_mask` [B, S] says where.
        Raises as `model.generate` with an engine: see `attach`.
        """
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        model: PreTrainedModel = self._loaded.model
        answer: Tensor = model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            **(sampling if temperature > 0 else {}),
        )
        return answer

    def close(self) -> None:
        """Gives the model its own `generate` back and ends the engine. Idempotent."""
        self._attached.detach()
        self._engine.close()

    def __enter__(self) -> "TIDE":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(model: Model, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedModel:
    """A model of transformers is wrapped once, because its layers are replaced in place, and keeps the result as an
    attribute."""
    if isinstance(model, LoadedModel):
        return model
    known: LoadedModel | None = vars(model).get("_neap_loaded")
    if known is None:
        known = vars(model)["_neap_loaded"] = wrap(model, tokenizer, accelerate=True)
    return known
