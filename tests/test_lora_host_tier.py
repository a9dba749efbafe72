"""The order in which adapters leave host memory."""

from __future__ import annotations

from tests.lora_helpers import ADAPTER_BYTES, acquire_and_release, loaded, make_adapter


def test_loads_that_nobody_uses_do_not_take_the_room_of_adapters_in_use() -> None:
    """Adapters on the device are idle between two requests; a catalog that was preloaded dropped
    them all."""
    pool = loaded("a", "b", "c", host_bytes=8 * ADAPTER_BYTES)
    assert all(acquire_and_release(pool, digest) for digest in "abc")
    for number in range(20):
        pool.add(make_adapter(f"preloaded {number}"))
    assert pool.on_device() == ("a", "b", "c")
    newest = {f"preloaded {number}" for number in range(16, 20)}
    assert {"a", "b", "c", *newest} < set(pool.on_host())
