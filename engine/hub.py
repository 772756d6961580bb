"""Finds a model's folder, on disk or on the Hugging Face hub. No torch: the router needs tokenizers too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.model_config import ModelFolderError


def resolve_model(name_or_folder: str, *, weights: bool = True, download: Callable[[str], str] | None = None) -> Path:
    """The folder of a model given by folder, or by its hub name when there is no such folder.

    A hub model is downloaded into the hub's own cache, or found there; without `weights`, its small files only. Blocks
    meanwhile. `download` replaces the hub.

    Raises:
        ModelFolderError: neither a folder nor a model that the hub gives out; says what was tried. Or a folder that
            this user may not read.
    """
    folder = Path(name_or_folder).expanduser()
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
            (folder / "config.json").exists()  # listing a folder is one right, looking into it another
            return folder
        if folder.exists():
            raise ModelFolderError(f"{folder} is a file; name the folder that holds config.json")
    except OSError as error:
        raise ModelFolderError(
            f"the model folder {folder} cannot be read: {error.strerror}; the user that this process runs as needs the "
            "right to read it and to enter it and the folders above"
        ) from error
    owner, _, rest = name_or_folder.partition("/")
    if not owner or owner[0] in ".~" or not rest or "/" in rest:
        raise ModelFolderError(
            f"there is no folder {folder}, and {name_or_folder!r} has not the form of a hub name (owner/model); "
            "give an existing folder or a hub name"
        )
    # Imported here: the library takes a third of a second to load, and most models are folders.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, which it also raises

    try:
        return Path(download(name_or_folder) if download else _download(name_or_folder, weights))
    except (OSError, ValueError, HTTPError) as error:
        raise ModelFolderError(
            f"there is no folder {folder}, and the hub gave no model {name_or_folder!r}: {error}; check the name, "
            "the network and your access to the model, or download it and name its folder"
        ) from error


def _download(name: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"] if weights else ["*.json", "*.jinja"])
