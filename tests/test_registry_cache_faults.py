"""Faults below the cache: SIGKILL, a full disk, bytes that change. Real processes and a real small
file system; no half of a tree is ever visible.
"""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from registry.cache import Cache
from registry.entities import content_digest
from registry.errors import CacheFailedError, CacheFullError, DigestMismatchError, QuarantinedError
from registry.locks import Locks
from registry.quarantine import FolderQuarantine
from registry.quota import Quota
from tests.cache_helpers import (
    FarSide,
    digest_of,
    files_of,
    get,
    held_names,
    is_right,
    leftovers,
    manifest_of,
    python,
    start,
    use,
)

DOWNLOADER = """
from pathlib import Path
from registry.cache import Cache
from registry.entities import content_digest
from tests.cache_helpers import files_of, manifest_of
files = files_of("a")

def fetch(entry, target):
    if entry.path.endswith(".json"):
        target.write_bytes(files[entry.path])
        return
    with target.open("wb") as file:
        file.write(files[entry.path][:400])
        file.flush()
        print("half", flush=True)
        sys.stdin.read()

manifest = manifest_of(files)
Cache(Path(sys.argv[1])).tree(content_digest(manifest), manifest, fetch)
"""


def test_killed_in_mid_download_nothing_is_visible_and_the_next_goes_on(tmp_path: Path) -> None:
    with start(DOWNLOADER, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        watcher = Cache(tmp_path)  # does not remove live fetches
        assert len(leftovers(watcher)) == 1
        assert watcher.digests() == frozenset()
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert (tmp_path / "tmp" / digest_of("a") / "blob").stat().st_size == 400
    far = FarSide(files_of("a"))
    manifest = manifest_of(far.files)
    path = watcher.tree(content_digest(manifest), manifest, far)
    assert is_right(path, "a")
    assert far.fetched == ["adapter_model.safetensors"]  # the complete file is kept
    assert leftovers(watcher) == []


def test_what_the_killed_left_goes_when_room_is_wanted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    with start(DOWNLOADER, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.kill()
    use(cache, "b")
    assert leftovers(cache) == []
    assert cache.size_bytes() == 1000


def test_who_waited_for_the_killed_takes_over(tmp_path: Path) -> None:
    with start(DOWNLOADER, tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        with start(WAITER, tmp_path) as waiter:
            assert waiter.stdout is not None
            assert waiter.stdout.readline() == "asks\n"
            child.kill()
            assert waiter.communicate()[0] == "True\n"


WAITER = """
from pathlib import Path
from registry.cache import Cache
from tests.cache_helpers import get, is_right
cache = Cache(Path(sys.argv[1]))
print("asks", flush=True)
print(is_right(get(cache, "a"), "a"))
"""

FILLER = """
from pathlib import Path
from registry.cache import Cache
from registry.errors import CacheFullError
from tests.cache_helpers import digest_of, get, held_names, is_right, leftovers, use
cache = Cache(Path(sys.argv[1]))
use(cache, *"abc", size=300_000)
held = get(cache, "d", 300_000)
use(cache, "e", size=700_000)  # fits if the unused leave
assert held_names(cache, "abcd", 300_000) == "cd"
also_held = get(cache, "e", 700_000)
try:
    get(cache, "f", 2_000_000)
except CacheFullError as error:
    print(error)
assert leftovers(cache) == []
assert cache.size_bytes() == 1_300_000  # what could not have made enough room has not left
assert held_names(cache, "abcd", 300_000) == "cd"
assert is_right(held, "d", 300_000) and is_right(also_held, "e", 700_000)
assert digest_of("f", 2_000_000) not in cache.digests()
"""


def test_full_file_system_lets_the_unused_go_and_then_says_so(tmp_path: Path) -> None:
    """Mounts 1.5 MB of memory as a disk, in the child's own mount namespace."""
    command = python(FILLER, tmp_path)
    mount = f'mount -t tmpfs -o size=1500k none {tmp_path} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small file system: `unshare` is refused")
    done = subprocess.run(
        [*inside, mount, "sh", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bytes are wanted" in done.stdout
    assert "free on the cache's disk and 300000 could be freed" in done.stdout


LIMITED = """
import resource
from pathlib import Path
from registry.cache import Cache
from registry.errors import CacheFullError
from tests.cache_helpers import get, leftovers, use
cache = Cache(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    get(cache, "a", 100_000)
except CacheFullError as error:
    print(error)
assert (leftovers(cache), cache.digests()) == ([], frozenset())
use(cache, "a", size=10_000)
"""


def test_file_that_the_system_allows_nobody_to_write_is_a_full_disk(tmp_path: Path) -> None:
    done = subprocess.run(python(LIMITED, tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "File too large" in done.stdout


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def fetched_again(cache: Cache, name: str = "a") -> list[str]:
    far = FarSide(files_of(name))
    manifest = manifest_of(far.files)
    path = cache.tree(content_digest(manifest), manifest, far)
    assert is_right(path, name)
    return far.fetched


def test_changed_file_is_seen_at_the_next_use_and_fetched_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = get(cache, "a")  # still held: it may be read right now
    flip_a_bit(path / "adapter_model.safetensors")
    assert fetched_again(cache) == ["adapter_model.safetensors"]
    assert fetched_again(cache) == []


def test_truncated_missing_and_replaced_files_are_fetched_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = get(cache, "a")
    (path / "adapter_config.json").unlink()
    assert fetched_again(cache) == []  # its blob is still there
    os.truncate(path / "adapter_model.safetensors", 10)
    assert fetched_again(cache) == ["adapter_model.safetensors"]
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to("/etc/hostname")
    assert fetched_again(cache) == ["adapter_config.json"]
    assert not (path / "adapter_config.json").is_symlink()


def test_file_of_another_time_and_the_right_bytes_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    path = get(cache, "a")
    os.utime(path / "adapter_model.safetensors")
    inode = path.stat().st_ino
    assert fetched_again(cache) == []
    assert path.stat().st_ino == inode
    (tmp_path / "notes" / path.name).unlink()
    assert fetched_again(cache) == []
    assert path.stat().st_ino == inode


def test_silent_rot_is_found_by_reading_again(tmp_path: Path) -> None:
    """A disk changes a bit silently: size and time stay."""
    cache = Cache(tmp_path)
    path = get(cache, "a")
    use(cache, "b")
    weights = path / "adapter_model.safetensors"
    status = weights.stat()
    flip_a_bit(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fetched_again_would_trust(cache) is True
    assert cache.verify(digest_of("b")) is True
    assert cache.verify(digest_of("a")) is False
    assert held_names(cache, "ab") == "b"
    assert fetched_again(cache) == ["adapter_model.safetensors"]
    assert cache.verify(digest_of("a")) is True


def fetched_again_would_trust(cache: Cache) -> bool:
    return not is_right(get(cache, "a"), "a")


def test_damaged_bookkeeping_costs_a_hashing_and_no_more(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    use(cache, "a")
    digest = digest_of("a")
    for text in (b"\xff\x00", b"{}", b"[1, 2]", b"[" * 100_000):
        (tmp_path / "notes" / digest).write_bytes(text)
        (tmp_path / "manifests" / f"{digest}.json").write_bytes(text)
        assert cache.manifest(digest) is None
        assert fetched_again(Cache(tmp_path)) == []


def test_bad_files_are_fetched_once_however_many_wait(tmp_path: Path) -> None:
    """A quarantined version's reason is known to this process, to others and to later processes."""
    bad = files_of("a") | {"adapter_model.safetensors": b"forged"}
    far = FarSide(bad)
    manifest = manifest_of(files_of("a"))
    digest = content_digest(manifest)
    now_s = [1000.0]

    def new_cache() -> Cache:
        quarantine = FolderQuarantine(tmp_path / "q", lambda: now_s[0], lambda: 1.0)
        return Cache(tmp_path / "cache", quarantine=quarantine)

    with pytest.raises(DigestMismatchError):
        new_cache().tree(digest, manifest, far)
    assert far.fetched == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(QuarantinedError, match=r"adapter_model\.safetensors: got 6 bytes") as seen:
        new_cache().tree(digest, manifest, far)
    assert seen.value.retry_after_s == 5
    assert len(far.fetched) == 2
    use(new_cache(), "b")  # another version is not affected
    assert new_cache().stats().num_quarantined == 1
    now_s[0] += 6
    with pytest.raises(DigestMismatchError):
        new_cache().tree(digest, manifest, far)
    assert far.fetched[2:] == ["adapter_model.safetensors"]
    now_s[0] += 6
    with pytest.raises(QuarantinedError) as again:
        new_cache().tree(digest, manifest, far)
    assert again.value.retry_after_s == 4  # of 10
    now_s[0] += 6
    cache = new_cache()
    assert fetched_again(cache) == ["adapter_model.safetensors"]  # repaired in the store
    assert cache.stats().num_quarantined == 0


@pytest.mark.parametrize(
    "lost", [".", "blobs", "trees", "notes", "manifests", "locks", "tmp", "quarantine"]
)
def test_a_folder_that_was_removed_is_made_again(tmp_path: Path, lost: str) -> None:
    """Users free a disk by hand while a server runs."""
    root = tmp_path / "cache"
    cache = Cache(root, quarantine=FolderQuarantine(root / "quarantine"))
    get(cache, "a")
    shutil.rmtree(root / lost)
    assert cache.digests() <= {digest_of("a")}
    assert cache.stats().num_quarantined == 0
    for name in ("a", "b"):
        assert is_right(get(cache, name), name)
    shutil.rmtree(root / lost, ignore_errors=True)
    bad, manifest = (
        FarSide(files_of("c") | {"adapter_model.safetensors": b"forged"}),
        manifest_of(files_of("c")),
    )
    with pytest.raises(DigestMismatchError):
        cache.tree(content_digest(manifest), manifest, bad)
    with pytest.raises(QuarantinedError):
        cache.tree(content_digest(manifest), manifest, bad)
    assert cache.stats().num_quarantined == 1
    shutil.rmtree(root / lost)
    cache.remove(digest_of("a"))


def test_a_folder_that_is_removed_while_it_is_measured_is_an_error_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)

    def removed(_: Quota) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Quota, "own_bytes", removed)
    with pytest.raises(CacheFailedError):
        cache.stats()


def test_a_cache_that_cannot_be_opened_names_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for opened in (Cache, FolderQuarantine):
        with pytest.raises(CacheFailedError, match=r"Not a directory|File exists"):
            opened(tmp_path / "file")

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Locks, "acquire", read_only)
    with pytest.raises(CacheFailedError, match=r"disk of the local copies fails.*Read-only"):
        Cache(tmp_path / "cache")


def test_a_tree_is_held_though_its_lock_was_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    get(cache, "a")
    shutil.rmtree(tmp_path / "cache")
    again = get(cache, "a")
    with pytest.raises(CacheFullError):  # others see that the files are in use
        get(Cache(tmp_path / "cache", max_bytes=1500), "b")
    assert is_right(again, "a")


def test_a_lock_that_cannot_be_made_again_leaves_the_old_one_to_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that is closed twice is, the second time, that of another file."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = Cache(tmp_path / "cache")
    held = get(cache, "a")
    shutil.rmtree(tmp_path / "cache" / "locks")
    with monkeypatch.context() as patch:
        patch.setattr(Locks, "acquire", full)
        with pytest.raises(CacheFullError):
            get(cache, "a")
    with (tmp_path / "another file").open("w") as file:
        cache.release(held)
        os.fstat(file.fileno())
    assert is_right(get(cache, "a"), "a")


def test_a_disk_that_fails_is_an_error_of_the_registry(tmp_path: Path) -> None:
    """Clients get 503, and other replicas a try; an OSError would be a fault of the server."""
    cache = Cache(tmp_path, quarantine=FolderQuarantine(tmp_path / "q"))
    get(cache, "a")
    for name in ("locks", "trees"):
        (tmp_path / name).rename(tmp_path / f"{name}.gone")
        (tmp_path / name).touch()
    with pytest.raises(CacheFailedError):
        get(cache, "b")
    with pytest.raises(CacheFailedError):
        cache.digests()
    (tmp_path / "manifests").rename(tmp_path / "manifests.gone")
    (tmp_path / "manifests").touch()
    with pytest.raises(CacheFailedError):
        cache.manifest(digest_of("a"))


def test_a_network_or_a_disk_that_fails_condemns_nobody(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=500, quarantine=FolderQuarantine(tmp_path / "q"))
    with pytest.raises(CacheFullError):
        get(cache, "a")
    assert cache.stats().num_quarantined == 0
    assert hashlib.sha256(b"").hexdigest() not in cache.digests()
