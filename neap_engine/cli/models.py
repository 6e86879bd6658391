"""`neap models`: fetches the files of a model into a folder, as the init container of a pod does."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from neap_engine.cli.console import exit_on_error, print_line
from shared.errors import NotFound, Unavailable
from shared.files import file_lock

app = typer.Typer(help="Fetch the files of models.", no_args_is_help=True)

# What `load_model` reads. No pickles, and no code.
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.json", "*.jinja", "*.model", "*.txt")
S3 = "s3://"


@app.command("fetch")
@exit_on_error
def fetch(
    source: Annotated[
        str,
        typer.Argument(
            help="A name on the Hugging Face Hub, as OWNER/NAME or OWNER/NAME@REVISION, or s3://BUCKET/PREFIX. A "
            "bucket's credentials, region and endpoint are read from the AWS_* variables, the Hub's token from "
            "HF_TOKEN."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
) -> None:
    """Fetch a model into a folder that does not exist yet.

    The folder appears only once it is complete. If it exists already, nothing is fetched. A command that is repeated
    goes on where the one before it stopped; its files are in a hidden folder beside the other. A file may take as long
    as it needs; the command fails if no byte arrives for minutes.
    """
    unfinished = folder.parent / f".fetch-{folder.name}"
    if folder.exists():
        print_line(f"{folder} exists; nothing is fetched")
        return
    unfinished.mkdir(parents=True, exist_ok=True)
    locked = Unavailable(f"another process fetches {folder}", reason="LOCKED")
    with file_lock(unfinished / "lock", locked=locked):
        if not folder.exists():  # another process may have fetched it meanwhile
            try:
                fetch_all(source, unfinished / "model")
            except NotFound:
                shutil.rmtree(unfinished)
                raise
            (unfinished / "model").rename(folder)
        shutil.rmtree(unfinished)
    size_mb = sum(path.stat().st_size for path in folder.rglob("*")) / 1e6
    print_line(f"fetched {source} into {folder} ({size_mb:.1f} MB)")


def fetch_all(source: str, work: Path) -> None:
    """Fetch what a model needs into `work`, and go on where an earlier process stopped.
    Raises NotFound, Unavailable."""
    if source.startswith(S3):
        fetch_from_bucket(source, work)
    else:
        begin(work, source)
        fetch_from_hub(source, work)
    if not (any(work.glob("*.safetensors")) or any(work.glob("*.gguf"))):
        raise NotFound(f"{source} has no .safetensors and no .gguf file", reason="MODEL_NOT_FOUND")
    shutil.rmtree(work / ".cache", ignore_errors=True)


def begin(work: Path, contents: str) -> None:
    """Create the folder, or keep what is in it if it was begun for the same `contents`."""
    record = work.parent / "contents"
    if not record.exists() or record.read_text() != contents:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(exist_ok=True)
    record.write_text(contents)


def fetch_from_hub(source: str, work: Path) -> None:
    """Raises NotFound (MODEL_NOT_FOUND), Unavailable (HUB_UNAVAILABLE)."""
    # Imported here because only this command needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    name, _, revision = source.partition("@")
    try:
        snapshot_download(name, revision=revision or None, local_dir=work, allow_patterns=list(PATTERNS))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise NotFound(f"the Hub has no model {name}", reason="MODEL_NOT_FOUND") from error
    except OSError as error:
        raise Unavailable(f"{name} cannot be fetched from the Hub: {error}", reason="HUB_UNAVAILABLE") from error


def fetch_from_bucket(source: str, work: Path) -> None:
    """Raises NotFound (MODEL_NOT_FOUND), Unavailable (BUCKET_UNAVAILABLE)."""
    import obstore

    from neap_engine.cli.bucket_download import download, open_bucket, summary

    bucket, _, prefix = source.removeprefix(S3).strip("/").partition("/")
    try:
        store = open_bucket(bucket, prefix)
        objects = [item for batch in obstore.list(store) for item in batch]
    except FileNotFoundError as error:
        raise NotFound(f"there is no bucket {bucket}", reason="MODEL_NOT_FOUND") from error
    except obstore.exceptions.BaseError as error:
        raise Unavailable(f"{source} cannot be fetched: {summary(error)}", reason="BUCKET_UNAVAILABLE") from error
    selected = [item for item in objects if any(Path(item["path"]).match(pattern) for pattern in PATTERNS)]
    listing = [(item["path"], item["size"], item["e_tag"]) for item in selected]
    begin(work, json.dumps([source, *sorted(listing)]))
    for item in selected:
        target = work / item["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        download(store, item, target, print_line)
