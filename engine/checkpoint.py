"""Reads a model's weights, and computes a checkpoint's fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from baton.cores import own_cores
from engine.model_config import ConfigFileError, ModelError, UnsupportedModelError, load_model_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""The safetensors format's own limit on the header of a file."""
HASHED_BYTES = 64 << 20
"""Of a file that one thread hashes at a time."""
READ_BYTES = 4 << 20
HASHING_THREADS_MAX = 8
BYTES_OF_TYPE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""By the names of safetensors."""

Progress = Callable[[int, int], None]
"""(loaded_bytes, total_bytes): called after each tensor, on the loading thread. Counts bytes as stored on disk."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, or does not fit the config."""


def load_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Read the named tensors into host memory of this process, converted to `dtype`. Other tensors are left out.

    All names and shapes are checked before the first tensor is read.

    Raises:
        WeightsError: names the tensor and the file.
        UnsupportedModelError: a tensor holds codes, not numbers.
    """
    index = _read_index(folder)
    names_of_file: dict[Path, list[str]] = {path: [] for path in weight_files(folder)}
    for name in shapes:
        if index is not None and name not in index:
            raise WeightsError(f"tensor {name} is missing in {folder / INDEX_FILE}: does config.json fit the weights?")
        names_of_file[folder / (SINGLE_FILE if index is None else index[name])].append(name)
    sizes: dict[str, int] = {}
    for path, names in names_of_file.items():
        sizes |= _check_file(path, names, shapes)
    loaded_bytes, total_bytes = 0, sum(sizes.values())
    tensors = {}
    for path, names in names_of_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                # Always a copy: the stored tensor is a mapping of the file, which may be replaced.
                tensors[name] = torch.empty(shapes[name], dtype=dtype).copy_(file.get_tensor(name))
                loaded_bytes += sizes[name]
                if progress is not None:
                    progress(loaded_bytes, total_bytes)
    return tensors


def checkpoint_fingerprint(folder: Path) -> str:
    """32 hex digits, equal for copies of a checkpoint, different for other weights or settings.

    Covers the parsed config and, of each weight file, name and all bytes: a fine-tune of one layer must not find the KV
    that an earlier process has left on disk, nor that of another node. Blocks; several threads read.

    Raises ModelError: the folder, its config or its weight files cannot be read.
    """
    config = asdict(load_model_config(folder))
    config["family"] = config["family"].value
    config["eos_token_ids"] = sorted(config["eos_token_ids"])
    digest = hashlib.blake2b(digest_size=16, person=b"baton-weights-2")
    _update(digest, json.dumps(config, sort_keys=True).encode())
    with ThreadPoolExecutor(min(HASHING_THREADS_MAX, own_cores().usable), thread_name_prefix="fingerprint") as threads:
        for path in weight_files(folder):
            _update(digest, path.name.encode())
            try:
                nbytes = _checked_nbytes(path)
                _update(digest, struct.pack("<Q", nbytes))
                for part in threads.map(partial(_hash_of_part, path), range(0, nbytes, HASHED_BYTES)):
                    digest.update(part)
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, part: bytes) -> None:
    """Add a part with its length, so that the borders between parts count."""
    digest.update(struct.pack("<Q", len(part)) + part)


def _checked_nbytes(path: Path) -> int:
    """How long a file is that has a whole header."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8 or int.from_bytes(prefix, "little") > min(HEADER_BYTES_MAX, nbytes - 8):
        raise WeightsError(f"{path} is damaged or cut short: its header is incomplete; download it again")
    return nbytes


def _hash_of_part(path: Path, at: int) -> bytes:
    """SHA-256, which processors have instructions for: twice as fast as BLAKE2b there."""
    found, buffer, left = hashlib.sha256(), memoryview(bytearray(READ_BYTES)), HASHED_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            found.update(buffer[:count])
            left -= count
    return found.digest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, by name: those of the index if there is one, else the single file.

    Raises:
        WeightsError: there are none, or one that the index names is missing.
        ConfigFileError: the index is damaged.
    """
    index = _read_index(folder)
    if index is not None:
        paths = [folder / name for name in sorted(set(index.values()))]
        for path in paths:
            if not path.is_file():
                raise WeightsError(f"{path} is missing, but {folder / INDEX_FILE} names it; download it again")
        return paths
    single = folder / SINGLE_FILE
    if single.is_file():
        return [single]
    hint = "; it holds pytorch_model*.bin, which is not read: convert it" if any(folder.glob("*.bin")) else ""
    raise WeightsError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # A name with a slash could lead out of the folder.
        valid = all(isinstance(name, str) and name and "/" not in name for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigFileError(f"{path} is no safetensors index: {error!r}; download it again") from error
    if not valid or not weight_map:
        raise ConfigFileError(f"{path}: weight_map must map tensor names to files of the same folder")
    return dict(weight_map)


def _check_file(path: Path, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Check that the file holds these tensors in these shapes -> bytes of each as stored."""
    try:
        path.open("rb").close()  # the library says of a file that may not be read that there is none
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    sizes = {}
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            for name in names:
                if name not in present:
                    raise WeightsError(f"tensor {name} is missing in {path}: does config.json fit the weights?")
                stored = file.get_slice(name)
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                if shape != shapes[name]:
                    raise WeightsError(
                        f"tensor {name} in {path} has shape {shape}, config.json asks for {shapes[name]}"
                    )
                if dtype not in BYTES_OF_TYPE:
                    raise UnsupportedModelError(
                        f"tensor {name} in {path} has type {dtype}; supported are {', '.join(BYTES_OF_TYPE)}: "
                        "use the unquantised checkpoint of this model"
                    )
                sizes[name] = math.prod(shape) * BYTES_OF_TYPE[dtype]
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged or cut short: {error}; download it again") from error
    return sizes
