"""Putting an exported model on the Hugging Face hub, through its own client."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from blocktrain.errors import ConfigError, StorageError, first_line


def check_repository(name: str) -> None:
    """Raises `ConfigError` unless `name` is of the form `owner/name`."""
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        raise ConfigError(f"'{name}' is not a repository of the hub; write --push owner/name")


def push(folder: Path, repository: str, *, public: bool = False, api: HfApi | None = None) -> str:
    """Upload `folder` as one commit to `repository`, which is made (private unless `public`) where there is none.

    Returns the address of the repository; raises `StorageError` when the hub refuses. The token is the one of
    `hf auth login`, the place that of `HF_ENDPOINT`, unless `api` is another client.
    """
    check_repository(repository)
    api = api or HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by blocktrain")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise StorageError(
            f"'{folder}' could not be put on {api.endpoint} as '{repository}' ({first_line(error)}); the "
            f"folder is complete: log in with 'hf auth login' and run 'hf upload {repository} {folder}'"
        ) from error
    return str(address)
