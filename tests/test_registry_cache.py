"""The content-addressed cache, with a dictionary as the store."""

import errno
import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest

from registry.cache import TEXT_FILES, Cache
from registry.entities import FileEntry, Manifest, content_digest
from registry.errors import CacheFullError, DigestMismatchError

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "sub/chat.jinja": b"{{ }}"}


def manifest_of(files: dict[str, bytes]) -> Manifest:
    return tuple(
        FileEntry(path, len(data), hashlib.sha256(data).hexdigest())
        for path, data in sorted(files.items())
    )


class FarSide:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []

    def __call__(self, entry: FileEntry, target: Path) -> None:
        self.fetched.append(entry.path)
        target.write_bytes(self.files[entry.path])


def get(
    cache: Cache,
    far: FarSide,
    manifest: Manifest | None = None,
    files: tuple[str, ...] | None = None,
) -> Path:
    manifest = manifest or manifest_of(far.files)
    return cache.tree(content_digest(manifest), manifest, far, files)


def leftovers(cache: Cache) -> list[Path]:
    return list((cache.root / "tmp").iterdir())


def test_tree_holds_every_file_and_is_fetched_once(tmp_path: Path) -> None:
    cache, far = Cache(tmp_path), FarSide(FILES)
    path = get(cache, far)
    assert {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*.*")} == FILES
    assert get(Cache(tmp_path), far) == path
    assert far.fetched == sorted(FILES)
    assert leftovers(cache) == []


def test_subset_comes_without_weights_and_shares_blobs(tmp_path: Path) -> None:
    cache, far = Cache(tmp_path), FarSide(FILES)
    text = get(cache, far, files=TEXT_FILES)
    assert not (text / "model.safetensors").exists()
    whole = get(cache, far)
    assert far.fetched == ["config.json", "sub/chat.jinja", "model.safetensors"]
    assert (text / "config.json").samefile(whole / "config.json")
    assert cache.size_bytes() == sum(map(len, FILES.values()))


@pytest.mark.parametrize("wrong", [b"WEIGHTS" * 1000, b"weights", b""])
def test_wrong_bytes_are_never_visible(tmp_path: Path, wrong: bytes) -> None:
    cache, manifest = Cache(tmp_path), manifest_of(FILES)
    with pytest.raises(DigestMismatchError, match=r"model\.safetensors"):
        get(cache, FarSide(FILES | {"model.safetensors": wrong}), manifest)
    assert cache.digests() == frozenset()
    assert leftovers(cache) == []
    get(cache, FarSide(FILES))


def test_manifest_that_is_not_the_digests_is_refused(tmp_path: Path) -> None:
    far = FarSide(FILES)
    with pytest.raises(DigestMismatchError):
        Cache(tmp_path).tree("0" * 64, manifest_of(FILES), far)
    assert far.fetched == []


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "", ".", "a\\b", "a\0"])
def test_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    far = FarSide({path: b"x"})
    with pytest.raises(DigestMismatchError, match="illegal path"):
        get(Cache(tmp_path), far)
    assert far.fetched == []


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def full(entry: FileEntry, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    manifest = manifest_of(FILES)
    with pytest.raises(CacheFullError):
        cache.tree(content_digest(manifest), manifest, full)
    assert leftovers(cache) == []
    assert cache.size_bytes() == 0


def die_half_way(root: Path) -> None:
    def die(entry: FileEntry, target: Path) -> None:
        target.write_bytes(b"half")
        os._exit(1)

    manifest = manifest_of(FILES)
    Cache(root).tree(content_digest(manifest), manifest, die)


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=die_half_way, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 1
    assert list((tmp_path / "tmp").iterdir()) != []
    assert leftovers(Cache(tmp_path)) == []


def fetch_with_witness(root: Path, witness: Path) -> None:
    def fetch(entry: FileEntry, target: Path) -> None:
        with witness.open("a") as file:
            file.write(entry.path + "\n")
        target.write_bytes(FILES[entry.path])

    manifest = manifest_of(FILES)
    Cache(root).tree(content_digest(manifest), manifest, fetch)


def test_two_processes_fetch_a_digest_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path / "cache", tmp_path / "witness")
    children = [context.Process(target=fetch_with_witness, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "witness").read_text().splitlines() == sorted(FILES)


def test_remove_frees_only_what_no_other_tree_uses(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    one = manifest_of(FILES)
    get(cache, FarSide(FILES))
    other = FILES | {"model.safetensors": b"other"}
    kept = get(cache, FarSide(other))
    assert cache.remove(content_digest(one)) == 7000
    assert cache.manifest(content_digest(one)) is None
    assert cache.digests() == {content_digest(manifest_of(other))}
    assert (kept / "config.json").read_bytes() == b"{}"
    assert cache.size_bytes() == sum(map(len, other.values()))
