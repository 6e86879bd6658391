"""Settings that both services have. `shared.config` explains where the values come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_data_path
from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from shared.process_settings import Listed, ProcessSettings, listed
from shared.security_settings import OptionalFile, SecuritySettings


@dataclass(frozen=True)
class ModelSource:
    """The id of a model and its source: a Hugging Face folder, a .gguf file, or a hub name."""

    model_id: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "id=source". Raises ValueError."""
        model_id, equals, source = text.partition("=")
        if not (equals and model_id.strip() and source.strip()):
            raise ValueError(f"model is {text!r}; it must be ID=SOURCE")
        return cls(model_id.strip(), source.strip())


class ServiceSettings(ProcessSettings, SecuritySettings):
    """Settings of both services."""

    model_config = SettingsConfigDict(env_prefix="NEAP_", frozen=True, extra="forbid", populate_by_name=True)

    models: Annotated[tuple[ModelSource, ...], NoDecode] = Field(
        default=(),
        description="A model and its source: a Hugging Face folder, a .gguf file, or a name on the Hugging Face Hub. "
        "Clients use the ID. May be repeated; the variable takes a comma-separated list.",
        json_schema_extra={"metavar": "ID=SOURCE"},
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("neap"),
        description="Folder for jobs, caches and, unless another registry is set, the registry. Unset: the user's data "
        "folder of the platform, on Linux ~/.local/share/neap.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    registry: str = Field(
        default="",
        repr=False,
        description="Registry of routers: a folder, file:///PATH, or for several machines s3://BUCKET/PREFIX or "
        "redis://HOST/0?objects=s3://BUCKET/PREFIX. Give a URL with a password as a variable, because flags are "
        "visible in process lists. Unset: the folder registry below the data folder.",
        json_schema_extra={"metavar": "URL"},
    )
    require_signatures: Listed[Path] = Field(
        default=(),
        description="PEM file with a public key, or with certificates of authorities, whose signature every router "
        "must have: workers load no other, and the calibration service points no alias at another. May be repeated, "
        "and one of the files is enough; the variable takes a comma-separated list. Unset: no signature is needed.",
        json_schema_extra={"metavar": "FILE"},
    )
    traffic_key: OptionalFile = Field(
        default=None,
        description="File with 64 hexadecimal digits (openssl rand -hex 32): answers that are kept to learn from are "
        "encrypted with this key, and no others are read. Unset: they are not encrypted by neap.",
    )
    traffic_days: float = Field(
        default=7.0,
        gt=0,
        allow_inf_nan=False,
        description="Days after which answers that are kept to learn from are removed.",
    )
    context_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and answer together, per sequence; at most the model's own limit. Unset: "
        "the model's own limit.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    device: str = Field(
        default="cpu", description="Device that runs the models: cpu or cuda.", json_schema_extra={"metavar": "NAME"}
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Format in which weights are kept. auto: the checkpoint's own, which is the data type or the "
        "blocks of a .gguf file. A CPU computes in float32 whatever the format; other devices compute in it, and in "
        "bfloat16 for the blocks of a .gguf file.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto",
        description="Format in which a CPU multiplies. auto: int8 for the quantised weights of a .gguf file, float32 "
        "for all others. int8: quantised weights are multiplied by inputs rounded to 8 bits, as llama.cpp does; other "
        "models are refused. bfloat16: weights kept in bfloat16 are multiplied by inputs rounded to it, as Hugging "
        "Face does for such a model. With AVX-512 BF16, prompts and large batches then take little more than half the "
        "time. A model without weights in bfloat16 is refused; --dtype bfloat16 rounds them. exact gives the tokens of "
        "full in every format, but both may differ from those of float32. Bounds of relaxed hold for workers with the "
        "format of the calibration.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads that run the models; as a variable, also the threads of each library's pool. Unset: "
        "as many CPUs as the process may use, by its affinity and its container's CPU quota.",
    )
    max_connection_age_s: float | None = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a client is told to open a new connection, plus or minus a tenth. It then "
        "resolves the service's name again, so that new replicas get their share of calls. Running calls finish on the "
        "old connection.",
    )
    max_connection_age_grace_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that calls may still run on a connection that has reached its age; those that run longer "
        "are cut off. Unset: no limit.",
    )

    @property
    def sources(self) -> dict[str, ModelSource]:
        """The models by their ids."""
        return {model.model_id: model for model in self.models}

    @field_validator("models", mode="before")
    @classmethod
    def _models_from_text(cls, value: Any) -> Any:
        parts = listed(value)
        return tuple(ModelSource.parse(part) if isinstance(part, str) else part for part in parts)

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        ids = [model.model_id for model in self.models]
        if len(ids) != len(set(ids)):
            raise ValueError("two models have the same id")
        if not self.registry:
            # The class is frozen, so its own __setattr__ cannot be used here.
            object.__setattr__(self, "registry", str(self.data_dir / "registry"))
        return self
