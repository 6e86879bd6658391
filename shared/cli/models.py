"""`neap models`: fetches the files of a model into a folder, as the init container of a pod does."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.console import exit_on_error, print_line
from shared.errors import NotFound, Unavailable

app = typer.Typer(
    help="List the models of a worker, and fetch the files of models.", no_args_is_help=True
)

# What `load_model` reads. No pickles, and no code.
PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
)
S3 = "s3://"


@app.command("fetch")
@exit_on_error
def fetch(
    source: Annotated[
        str,
        typer.Argument(
            help="A name on the Hugging Face Hub, as OWNER/NAME or OWNER/NAME@REVISION, or s3://BUCKET/PREFIX. A bucket's "
            "credentials, region and endpoint are read from the AWS_* variables, the Hub's token from HF_TOKEN."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Fetch a model into a folder that does not exist yet.

    The folder appears only once it is complete. If it exists already, nothing is fetched.
    """
    if folder.exists():
        print_line(f"{folder} exists; nothing is fetched")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as name:
        work = Path(name) / "model"
        if source.startswith(S3):
            fetch_from_bucket(source, work)
        else:
            fetch_from_hub(source, work)
        if not (any(work.glob("*.safetensors")) or any(work.glob("*.gguf"))):
            raise NotFound(
                f"{source} has no .safetensors and no .gguf file", reason="MODEL_NOT_FOUND"
            )
        shutil.rmtree(work / ".cache", ignore_errors=True)
        work.rename(folder)
    size_mb = sum(path.stat().st_size for path in folder.rglob("*")) / 1e6
    print_line(f"fetched {source} into {folder} ({size_mb:.1f} MB)")


def fetch_from_hub(source: str, work: Path) -> None:
    """Raises NotFound (MODEL_NOT_FOUND), Unavailable (HUB_UNAVAILABLE)."""
    # Imported here because only this command needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    name, _, revision = source.partition("@")
    try:
        snapshot_download(
            name, revision=revision or None, local_dir=work, allow_patterns=list(PATTERNS)
        )
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise NotFound(f"the Hub has no model {name}", reason="MODEL_NOT_FOUND") from error
    except OSError as error:
        raise Unavailable(
            f"{name} cannot be fetched from the Hub: {error}", reason="HUB_UNAVAILABLE"
        ) from error


def fetch_from_bucket(source: str, work: Path) -> None:
    """Raises NotFound (MODEL_NOT_FOUND), Unavailable (BUCKET_UNAVAILABLE)."""
    import obstore
    from obstore.store import S3Store

    bucket, _, prefix = source.removeprefix(S3).strip("/").partition("/")
    try:
        store = S3Store(bucket, prefix=prefix or None, client_options={"allow_http": True})
        found = [item["path"] for batch in obstore.list(store) for item in batch]
        wanted = [path for path in found if any(Path(path).match(one) for one in PATTERNS)]
        for path in wanted:
            target = work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for chunk in obstore.get(store, path):
                    file.write(chunk)
    except FileNotFoundError as error:
        raise NotFound(f"there is no bucket {bucket}", reason="MODEL_NOT_FOUND") from error
    except obstore.exceptions.BaseError as error:
        raise Unavailable(
            f"{source} cannot be fetched: {error}", reason="BUCKET_UNAVAILABLE"
        ) from error
