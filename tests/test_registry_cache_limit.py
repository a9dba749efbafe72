"""The cache's limit: trees that are evicted, trees that never are, agreement among processes."""

import hashlib
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from registry.cache import Cache
from registry.entities import FileEntry, content_digest
from registry.errors import CacheFullError
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
    start,
    use,
)


def test_the_longest_unused_leaves_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=3000)
    use(cache, *"abc", "a", "d")
    assert held_names(cache, "abcd") == "acd"
    use(cache, "e")
    assert held_names(cache, "abcde") == "ade"
    assert cache.size_bytes() == 3000
    stats = cache.stats()
    assert (stats.own_bytes, stats.max_bytes) == (3000, 3000)
    assert (stats.hits, stats.misses, stats.evictions) == (1, 5, 2)
    assert cache.manifest(digest_of("b")) is None
    assert len(list((tmp_path / "notes").iterdir())) == 3


def test_a_file_of_two_versions_stays_with_the_second(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1500)
    shared = {"adapter_config.json": b"{}" * 250}
    paths = []
    for weights in (b"one" * 100, b"two" * 100, b"six" * 100):
        files = shared | {"adapter_model.safetensors": weights}
        manifest = manifest_of(files)
        paths.append(cache.tree(content_digest(manifest), manifest, FarSide(files)))
        cache.release(paths[-1])
    assert cache.size_bytes() == 500 + 3 * 300
    use(cache, "a", size=700)
    assert [path.exists() for path in paths] == [False, False, True]
    assert (paths[2] / "adapter_config.json").read_bytes() == shared["adapter_config.json"]
    assert cache.size_bytes() == 800 + 700


def test_what_is_held_stays_and_the_newcomer_is_refused_with_numbers(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=2500)
    first, second = get(cache, "a"), get(cache, "b")
    with pytest.raises(CacheFullError, match=r"1000 bytes are wanted.* 2500, 2000 are in use"):
        get(cache, "c")
    assert is_right(first, "a")
    assert is_right(second, "b")
    assert leftovers(cache) == []
    cache.release(second)
    use(cache, "c")
    assert held_names(cache, "abc") == "ac"


def test_held_twice_is_released_twice(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1500)
    path = get(cache, "a")
    assert get(cache, "a") == path
    cache.release(path)
    with pytest.raises(CacheFullError):
        get(cache, "b")
    cache.release(path)
    use(cache, "b")
    assert held_names(cache, "ab") == "b"


def test_a_version_larger_than_the_limit_is_not_even_begun(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1500)
    far = FarSide(files_of("big", 2000))
    manifest = manifest_of(far.files)
    with pytest.raises(CacheFullError, match="2000 bytes are wanted"):
        cache.tree(content_digest(manifest), manifest, far)
    assert far.fetched == []


@pytest.mark.parametrize("size", [3001, 2001])
def test_a_version_that_does_not_fit_evicts_nothing(tmp_path: Path, size: int) -> None:
    cache = Cache(tmp_path, max_bytes=3000)
    held = get(cache, "a")
    use(cache, "b", "c")
    with pytest.raises(CacheFullError, match=f"{size} bytes are wanted.* 1000 are in use"):
        get(cache, "d", size)
    assert held_names(cache, "abcd") == "abc"
    assert cache.stats().evictions == 0
    cache.release(held)
    use(cache, "e", size=2000)
    assert held_names(cache, "abc") == "c"


def test_no_limit_keeps_all(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    use(cache, *"abcdefgh")
    assert held_names(cache, "abcdefgh") == "abcdefgh"


def test_a_lower_limit_counts_from_the_start(tmp_path: Path) -> None:
    use(Cache(tmp_path), *"abcd")
    assert held_names(Cache(tmp_path, max_bytes=2000), "abcd") == "cd"


def test_what_the_store_has_by_hardlink_costs_nothing(tmp_path: Path) -> None:
    files = files_of("base", 5000)
    store = tmp_path / "store"
    store.mkdir()
    for name, content in files.items():
        (store / name).write_bytes(content)

    def link(entry: FileEntry, target: Path) -> bool:
        os.link(store / entry.path, target)
        return True

    cache = Cache(tmp_path / "cache", max_bytes=2000)
    manifest, far = manifest_of(files), FarSide({})
    path = cache.tree(content_digest(manifest), manifest, far, link=link)
    assert (path / "adapter_model.safetensors").samefile(store / "adapter_model.safetensors")
    use(cache, "a", "b")
    assert cache.stats().own_bytes == 2000
    assert held_names(cache, "ab") == "ab"


def test_room_is_kept_for_what_others_are_fetching(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=2500)
    use(cache, "a")
    during: list[str] = []

    def fetch(entry: FileEntry, target: Path) -> None:
        if entry.path.endswith(".json"):
            assert cache.stats().fetches_in_flight == 1
            try:
                get(Cache(tmp_path, max_bytes=2500), "c")  # 2000 of 2500 are reserved
            except CacheFullError as error:
                during.append(str(error))
        target.write_bytes(files[entry.path])

    files = files_of("b", 2000)
    manifest = manifest_of(files)
    assert is_right(cache.tree(content_digest(manifest), manifest, fetch), "b", 2000)
    assert len(during) == 1
    assert "2000 are being fetched" in during[0]
    assert cache.size_bytes() <= 2500


def test_many_threads_fetch_once_and_all_get_it(tmp_path: Path) -> None:
    cache, far = Cache(tmp_path), FarSide(files_of("a"))
    manifest = manifest_of(far.files)
    paths: list[Path] = []

    def work() -> None:
        paths.append(cache.tree(content_digest(manifest), manifest, far))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert far.fetched == sorted(far.files)
    assert len(paths) == 16
    assert (cache.stats().hits, cache.stats().misses) == (15, 1)


HOLDER = """
from pathlib import Path
from registry.cache import Cache
from tests.cache_helpers import get
get(Cache(Path(sys.argv[1])), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_what_another_process_holds_stays_until_it_dies(tmp_path: Path) -> None:
    with start(HOLDER, tmp_path, "a") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        cache = Cache(tmp_path, max_bytes=1500)
        with pytest.raises(CacheFullError):
            get(cache, "b")
        assert held_names(cache, "a") == "a"
        holder.kill()
    use(cache, "b")
    assert held_names(cache, "ab") == "b"


STORM = """
import random
from pathlib import Path
from registry.cache import Cache
from tests.cache_helpers import get, is_right
cache = Cache(Path(sys.argv[1]), max_bytes=5000)
draw = random.Random(int(sys.argv[2]))
for _ in range(60):
    name = draw.choice("abcdefghij")
    path = get(cache, name)
    assert is_right(path, name), name  # nobody takes it away under our eyes
    cache.release(path)
print(cache.stats().evictions)
"""


def test_processes_that_crowd_each_other_out_always_see_whole_versions(tmp_path: Path) -> None:
    children = [start(STORM, tmp_path, seed) for seed in range(3)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sum(map(int, outputs)) > 10
    cache = Cache(tmp_path, max_bytes=5000)
    assert cache.stats().own_bytes == cache.size_bytes() <= 5000
    assert leftovers(cache) == []
    for name in "abcdefghij":
        assert is_right(get(cache, name), name) is True
        cache.remove(digest_of(name))
    assert cache.size_bytes() == 0
    assert [p.name for p in (tmp_path / "locks").iterdir()] == ["space"]


KILLED = """
import random, threading
from pathlib import Path
from registry.cache import Cache
from tests.cache_helpers import get
cache = Cache(Path(sys.argv[1]), max_bytes=300_000)
print("go", flush=True)
draw = random.Random(int(sys.argv[2]))
while True:
    cache.release(get(cache, draw.choice("abcdefgh"), 100_000))
"""


def test_processes_killed_at_any_moment_leave_nothing_half_done(tmp_path: Path) -> None:
    """SIGKILL lands in fetches, evictions and between: the next process finds only whole
    versions."""
    draw = random.Random(5)
    for seed in range(6):
        child = start(KILLED, tmp_path, seed)
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=draw.uniform(0.02, 0.1))
        child.kill()
        child.communicate()
        for tree in (tmp_path / "trees").iterdir():
            name = next(n for n in "abcdefgh" if digest_of(n, 100_000) == tree.name)
            assert is_right(tree, name, 100_000)
        for blob in (tmp_path / "blobs").iterdir():
            assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    cache = Cache(tmp_path, max_bytes=300_000)
    assert leftovers(cache) == []
    assert cache.size_bytes() <= 300_000
    use(cache, *"abcdefgh", size=100_000)


def test_a_cache_without_a_limit_of_its_own_leaves_a_fifth_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_bytes(quota: Quota) -> int:
        return 5000 - quota.own_bytes()

    monkeypatch.setattr(Quota, "_free_bytes", free_bytes)
    cache = Cache(tmp_path, leaves_room=True)
    use(cache, *"abcde")
    assert held_names(cache, "abcde") == "bcde"
    assert cache.stats().max_bytes == 4000
    again = Cache(tmp_path, leaves_room=True)  # its present bytes count as its own
    assert again.stats().max_bytes == 4000
    assert Cache(tmp_path, max_bytes=4500, leaves_room=True).stats().max_bytes == 4500
