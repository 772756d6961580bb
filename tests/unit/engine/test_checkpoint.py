"""Finding a model, reading its weights, and telling checkpoints apart."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoint as checkpoint_module
from engine.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightsError,
    checkpoint_fingerprint,
    load_tensors,
)
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import (
    ConfigFileError,
    ModelFolderError,
    UnsupportedModelError,
    load_model_config,
    resolve_model,
    weight_shapes,
)

PARAMS = DemoModelParams(num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, head_dim=8, vocab_size=300)
SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2)}


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(folder, PARAMS)
    return folder


@pytest.fixture
def demo_copy(demo_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder, tmp_path / "copy"))


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def write_shards(folder: Path, shards: dict[str, list[str]]) -> None:
    """Write the tensors `SHAPES` as a sharded checkpoint."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    for file, names in shards.items():
        save_file({name: tensors()[name] for name in names}, folder / file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_single_file_is_read_and_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whatever float type is stored, float32 of the same values comes out; a tensor nobody asked for is left out."""
    stored = tensors(dtype)
    save_file(stored | {"unused": torch.zeros(7)}, tmp_path / SINGLE_FILE)
    loaded = load_tensors(tmp_path, SHAPES)
    assert list(loaded) == ["a", "b", "c"]
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, stored[name].float())


def test_loaded_weights_outlive_the_file(tmp_path: Path) -> None:
    """The file is overwritten in place after loading, as a careless update does: the loaded weights do not change."""
    save_file(tensors(), tmp_path / SINGLE_FILE)
    loaded = load_tensors(tmp_path, SHAPES)
    size = (tmp_path / SINGLE_FILE).stat().st_size
    with (tmp_path / SINGLE_FILE).open("r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


def test_a_sharded_checkpoint_is_read_with_progress(tmp_path: Path) -> None:
    """Two shards through the index; progress counts up to the stored bytes of the tensors that are read."""
    write_shards(tmp_path, {"one.safetensors": ["a", "c"], "two.safetensors": ["b"]})
    seen: list[tuple[int, int]] = []
    loaded = load_tensors(tmp_path, SHAPES, progress=lambda done, total: seen.append((done, total)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert seen == [(48, 84), (64, 84), (84, 84)]


def test_missing_and_misshapen_tensors_are_named_with_their_file(tmp_path: Path) -> None:
    """The checks come before anything is read: progress is never called."""
    save_file(tensors(), tmp_path / SINGLE_FILE)

    def no_progress(done: int, total: int) -> None:
        raise AssertionError("read before the check")

    with pytest.raises(WeightsError, match=r"tensor d is missing in .*model\.safetensors"):
        load_tensors(tmp_path, SHAPES | {"d": (1,)}, progress=no_progress)
    with pytest.raises(WeightsError, match=r"tensor b in .*model\.safetensors has shape \(5,\), .* asks for \(6,\)"):
        load_tensors(tmp_path, SHAPES | {"b": (6,)}, progress=no_progress)


def test_integer_weights_are_refused_as_quantised(tmp_path: Path) -> None:
    """A checkpoint that stores codes, without saying so in its config."""
    save_file({"a": torch.zeros(4, 3, dtype=torch.int8)}, tmp_path / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=r"tensor a in .* has type I8"):
        load_tensors(tmp_path, {"a": (4, 3)})


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_file_is_an_error(tmp_path: Path, keep: int) -> None:
    """A download that stopped: empty, within the length, within the header, one byte short."""
    path = tmp_path / SINGLE_FILE
    save_file(tensors(), path)
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or cut short"):
        load_tensors(tmp_path, SHAPES)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    """No weights at all, weights in the old pickled form, a shard or a tensor that the index lacks."""
    with pytest.raises(WeightsError, match=r"holds neither model\.safetensors nor"):
        load_tensors(tmp_path, SHAPES)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="convert it"):
        load_tensors(tmp_path, SHAPES)
    write_shards(tmp_path, {"one.safetensors": ["a", "c"], "two.safetensors": ["b"]})
    with pytest.raises(WeightsError, match=rf"tensor d is missing in .*{INDEX_FILE}"):
        load_tensors(tmp_path, SHAPES | {"d": (1,)})
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"two\.safetensors is missing"):
        load_tensors(tmp_path, SHAPES)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'])
def test_a_damaged_index_is_an_error(tmp_path: Path, index: str) -> None:
    """Broken JSON, wrong kinds, and a file name that leads out of the folder."""
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ConfigFileError, match=INDEX_FILE):
        load_tensors(tmp_path, SHAPES)


def test_the_names_of_a_model_are_those_in_its_file(demo_folder: Path) -> None:
    """The shapes derived from the config are exactly the tensors of the checkpoint."""
    stored = load_file(demo_folder / SINGLE_FILE)
    shapes = weight_shapes(load_model_config(demo_folder))
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes


def no_hub(name: str) -> str:
    raise AssertionError(f"the hub was asked for {name}")


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative, and one that looks like a hub name: the hub is not asked."""
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    assert resolve_model(str(folder), download=no_hub) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/model", download=no_hub) == Path("owner/model")


def test_a_hub_name_is_downloaded(tmp_path: Path) -> None:
    """No such folder, but the form of a hub name."""
    asked: list[str] = []

    def download(name: str) -> str:
        asked.append(name)
        return str(tmp_path)

    assert resolve_model("owner/no-such-model", download=download) == tmp_path
    assert asked == ["owner/no-such-model"]


@pytest.mark.parametrize("error", [ConnectionError("no route to host"), ValueError("bad name"), OSError("not found")])
def test_when_the_hub_has_nothing_both_tries_are_named(error: Exception) -> None:
    """The hub cannot be reached, refuses the name, or does not know it."""

    def download(name: str) -> str:
        raise error

    with pytest.raises(ModelFolderError, match=rf"no folder owner/none, and the hub gave no model .*: {error}"):
        resolve_model("owner/none", download=download)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "../a/b", "none", "a/b/c", "~/none", "owner/"])
def test_what_cannot_be_a_hub_name_is_not_sent_there(name: str) -> None:
    """A mistyped path is an error at once."""
    with pytest.raises(ModelFolderError, match="has not the form of a hub name"):
        resolve_model(name, download=no_hub)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """The user named a file within the folder."""
    (tmp_path / SINGLE_FILE).touch()
    with pytest.raises(ModelFolderError, match="is a file"):
        resolve_model(str(tmp_path / SINGLE_FILE), download=no_hub)


def refuse(*_: object, **__: object) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("call", ["is_dir", "iterdir", "exists"])
def test_a_folder_that_this_user_may_not_read(demo_folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Nor enter, or the one above it: the message says so, and that it is about the process's user."""
    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(
        ModelFolderError, match=r"cannot be read: Permission denied; the user that this process runs as"
    ):
        resolve_model(str(demo_folder), download=no_hub)


def test_weights_that_this_user_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not damaged, and need not be downloaded again."""
    save_file(tensors(), tmp_path / SINGLE_FILE)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: Permission denied$"):
        load_tensors(tmp_path, SHAPES)


def test_copies_have_the_same_fingerprint(demo_folder: Path, demo_copy: Path) -> None:
    """Another place, and config.json with other order, spacing and keys that define nothing."""
    expected = checkpoint_fingerprint(demo_folder)
    assert len(expected) == 32
    config = json.loads((demo_copy / "config.json").read_text())
    config = dict(reversed(config.items())) | {"transformers_version": "9"}
    (demo_copy / "config.json").write_text(json.dumps(config))
    assert checkpoint_fingerprint(demo_copy) == expected


def test_the_fingerprint_shows_other_settings(demo_folder: Path, demo_copy: Path) -> None:
    """Same weights, but another rotary base, or other end-of-sequence ids."""
    seen = {checkpoint_fingerprint(demo_folder)}
    config = json.loads((demo_copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (demo_copy / "config.json").write_text(json.dumps(config))
    seen.add(checkpoint_fingerprint(demo_copy))
    (demo_copy / "generation_config.json").write_text('{"eos_token_id": 5}')
    seen.add(checkpoint_fingerprint(demo_copy))
    assert len(seen) == 3


def test_the_fingerprint_shows_other_weights(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another training (seed) of the same sizes; one byte changed, wherever it is; a renamed tensor. A file is hashed
    in many parts here, each read in four pieces."""
    monkeypatch.setattr(checkpoint_module, "HASHED_BYTES", 1_000)
    monkeypatch.setattr(checkpoint_module, "READ_BYTES", 300)
    write_demo_model(tmp_path / "other", replace(PARAMS, seed=1))
    seen = {checkpoint_fingerprint(demo_folder), checkpoint_fingerprint(tmp_path / "other")}
    content = (demo_folder / SINGLE_FILE).read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    for name, position in {
        "first": header_end,
        "last": len(content) - 1,
        "middle": len(content) // 2,
        "any": header_end + 1_234,
    }.items():
        folder = Path(shutil.copytree(demo_folder, tmp_path / name))
        changed = bytearray(content)
        changed[position] ^= 1
        (folder / SINGLE_FILE).write_bytes(changed)
        seen.add(checkpoint_fingerprint(folder))
    folder = Path(shutil.copytree(demo_folder, tmp_path / "renamed"))
    (folder / SINGLE_FILE).write_bytes(content.replace(b"model.norm.weight", b"model.norn.weight"))
    seen.add(checkpoint_fingerprint(folder))
    assert len(seen) == 7


@pytest.mark.parametrize("keep", [0, 5, 40])
def test_the_fingerprint_of_a_damaged_file_is_an_error(demo_copy: Path, keep: int) -> None:
    """Cut within the length or the header: refused, not hashed."""
    path = demo_copy / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="damaged or cut short"):
        checkpoint_fingerprint(demo_copy)
