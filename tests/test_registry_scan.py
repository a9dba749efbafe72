"""The limits of a folder at registration: the same as at fetching, and checked before any byte is
read or sent.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from registry import manifest
from registry.entities import Manifest
from registry.errors import RegistrationError
from registry.manifest import (
    MAX_ADAPTER_BYTES,
    MAX_BASE_BYTES,
    MAX_FILES,
    MAX_TEXT_BYTES,
    scan_folder,
)
from tests.registry_helpers import ADAPTER_FACTS, adapter_folder, base_folder, embedded

TERABYTE = 1024**4


def scan(folder: Path, max_bytes: int = MAX_ADAPTER_BYTES) -> Manifest:
    return scan_folder(folder, "adapter_config.json", max_bytes)


def make_sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("name", "size", "limit"),
    [
        ("adapter_model.safetensors", 10 * TERABYTE, MAX_ADAPTER_BYTES),
        ("tokenizer.json", 10 * TERABYTE, MAX_TEXT_BYTES),
        ("tokenizer.json", MAX_TEXT_BYTES + 1, MAX_TEXT_BYTES),
    ],
)
def test_a_file_of_any_size_is_refused_unread(
    tmp_path: Path, name: str, size: int, limit: int
) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    make_sparse(folder / name, size)
    with pytest.raises(RegistrationError, match=f"{name} has {size} bytes, at most {limit}"):
        scan(folder)


def test_files_that_are_too_large_together_are_refused_unread(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base")
    for number in range(3):
        make_sparse(folder / f"model-{number}.safetensors", TERABYTE)
    with pytest.raises(RegistrationError, match=rf"bytes in all, at most {MAX_BASE_BYTES} are"):
        scan_folder(folder, "config.json", MAX_BASE_BYTES)


def test_registration_has_the_limits_of_an_adapter(tmp_path: Path) -> None:
    registry = embedded(tmp_path / "home")
    folder = adapter_folder(tmp_path / "adapter")
    make_sparse(folder / "adapter_model.safetensors", MAX_ADAPTER_BYTES + 1)
    with pytest.raises(RegistrationError, match=f"at most {MAX_ADAPTER_BYTES} are allowed"):
        registry.register_adapter(folder, "pirate", base="tiny", facts=ADAPTER_FACTS)
    assert registry.snapshot().entries() == ()


def test_more_files_than_a_manifest_names_are_refused(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    for number in range(MAX_FILES):
        (folder / f"{number}.txt").touch()
    with pytest.raises(RegistrationError, match=f"{MAX_FILES + 2} files, at most {MAX_FILES}"):
        scan(folder)


def test_a_listing_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    for number in range(20):
        (folder / f"{number}.bin").touch()
    monkeypatch.setattr(manifest, "MAX_LISTED", 10)
    with pytest.raises(RegistrationError, match="holds more than 10 names"):
        scan(folder)


def test_what_is_left_out_is_named_in_few_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    for number in range(300):
        (folder / f"{number:03}.bin").touch()
    caplog.set_level("INFO")
    assert len(scan(folder)) == 2
    assert "and 292 more" in caplog.text
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(RegistrationError, match="and 292 more cannot be used") as refused:
        scan(folder)
    assert len(str(refused.value)) < 500


def test_folders_however_deep_are_never_entered(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    expected = scan(folder)
    deep = folder / "checkpoint-1" / "/".join(["d"] * 500)
    deep.mkdir(parents=True)
    make_sparse(deep / "adapter_model.safetensors", 10 * TERABYTE)
    assert scan(folder) == expected


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe.json", b"a\nb.json", b"a\x1b[2J.txt", b"a\\b.json", b"x" * 201 + b".json"],
)
def test_a_served_file_with_a_name_that_nobody_can_fetch_is_refused(
    tmp_path: Path, name: bytes
) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    (folder / os.fsdecode(name)).touch()
    with pytest.raises(RegistrationError, match="illegal name") as refused:
        scan(folder)
    assert str(refused.value).isprintable()


def test_a_left_out_name_that_is_no_text_stays_out_of_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    (folder / os.fsdecode(b"\xff\x1b[2J.bin")).touch()
    caplog.set_level("INFO")
    scan(folder)
    assert "\\udcff" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling"])
def test_what_only_looks_like_a_file_is_refused_and_not_opened(tmp_path: Path, kind: str) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    strange = folder / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(strange)  # opening it would block for ever
    elif kind == "folder":
        (folder / "inside").mkdir()
        strange.symlink_to("inside")
    else:
        strange.symlink_to("nowhere")
    with pytest.raises(RegistrationError, match="not a regular file"):
        scan(folder)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"

    def grow(stage: str, done_bytes: int, total_bytes: int) -> None:
        with weights.open("ab") as file:
            file.write(b"more")

    with pytest.raises(RegistrationError, match=r"adapter_model.safetensors in .* changed while"):
        scan_folder(folder, "adapter_config.json", MAX_ADAPTER_BYTES, grow)
