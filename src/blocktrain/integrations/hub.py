"""Uploads an exported model to the Hugging Face hub, through the hub's own client."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi

from blocktrain.errors import ConfigError, StorageError, first_line


def check_repository(name: str) -> None:
    """Raises `ConfigError` unless `name` is of the form `owner/name`."""
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        raise ConfigError(f"'{name}' is not the name of a hub repository; write --push owner/name")


def push(folder: Path, repository: str, *, public: bool = False, api: HfApi | None = None) -> str:
    """Upload `folder` as one commit to `repository`, which is created (private unless `public`) if it does not exist.

    Returns the address of the repository. Raises `StorageError` when the hub refuses or cannot be reached. The client
    `api` uses the token of `hf auth login` and the address in `HF_ENDPOINT`, unless another one is given.
    """
    check_repository(repository)
    api = api or HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by blocktrain")
    except Exception as error:  # of the hub's client, of the one for HTTP below it, or of a wrong answer
        is_answer = isinstance(error, ValueError | LookupError | TypeError) and not isinstance(error, OSError)
        words = f"its answer is not that of a hub: {first_line(error)}" if is_answer else first_line(error)
        raise StorageError(
            f"'{folder}' could not be uploaded to {api.endpoint} as '{repository}' ({words}). The folder itself is "
            f"complete: log in with 'hf auth login' and run 'hf upload {repository} {folder}'"
        ) from error
    return str(address)
