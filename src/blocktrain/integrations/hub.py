"""Uploads an exported model to the Hugging Face hub, through the hub's own client."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from blocktrain.errors import ConfigError, StorageError, first_line


def check_repository(name: str) -> None:
    """Raises `ConfigError` unless `name` is of the form `owner/name`."""
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name):
        raise ConfigError(f"'{name}' is not the name of a hub repository; write --push owner/name")


def push(folder: Path, repository: str, *, public: bool = False, api: HfApi | None = None) -> str:
    """Upload `folder` as one commit to `repository`, which is created (private unless `public`) if it does not exist.

    Returns the address of the repository. Raises `StorageError` when the hub refuses. The client `api` uses the token
    of `hf auth login` and the address in `HF_ENDPOINT`, unless another one is given.
    """
    check_repository(repository)
    api = api or HfApi()
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by blocktrain")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise StorageError(
            f"'{folder}' could not be uploaded to {api.endpoint} as '{repository}' ({first_line(error)}). The folder "
            f"itself is complete: log in with 'hf auth login' and run 'hf upload {repository} {folder}'"
        ) from error
    return str(address)
