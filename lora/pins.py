"""The limits of room: never so much is pinned that some other adapter waits for room for ever, and
no request waits for several adapters that are never on the device together.

A pinned adapter is dropped from neither tier, so pins occupy room permanently. Pure functions; the
pool calls them before each new pin and before each adapter that comes in next to pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lora.errors import PinnedMemoryError
from lora.page_image import AFFINE, PAGE_ROWS, PackedAdapter
from lora.page_lists import count_pages

_MAX_HOST_SHARE = 0.5  # other adapters need room to come and go


def check_room_beside(packed: PackedAdapter, pinned: Iterable[PackedAdapter], blocks: int) -> None:
    """Raises PinnedMemoryError if `packed` would never find its blocks among `blocks`."""
    held = sum(one.num_blocks for one in pinned if one.digest != packed.digest)
    if packed.num_blocks > blocks - held:
        raise PinnedMemoryError(
            f"adapter {packed.digest} needs {packed.num_blocks} blocks; {held} of {blocks} on the "
            "device are pinned (adapter_pool_bytes)"
        )


def check_pin(
    packed: PackedAdapter, known: Iterable[PackedAdapter], pinned: set[str], blocks: int, limit: int
) -> None:
    """Raises PinnedMemoryError if too little would be left. `limit`: bytes of the host tier."""
    wanted = pinned | {packed.digest}
    held = [one for one in known if one.digest in wanted]
    largest = max((one.num_blocks for one in known if one.digest not in wanted), default=1)
    num_blocks = sum(one.num_blocks for one in held)
    if num_blocks + largest > blocks:
        raise PinnedMemoryError(
            f"{num_blocks} of {blocks} blocks on the device would be pinned, other adapters need "
            f"{largest} (adapter_pool_bytes)"
        )
    num_bytes = sum(one.num_bytes for one in held)
    if num_bytes > _MAX_HOST_SHARE * limit:
        raise PinnedMemoryError(
            f"{num_bytes} bytes of {limit} in host memory would be pinned, half of them stays for "
            "other adapters (adapter_host_bytes)"
        )


def obstacle(
    key: str,  # of `adapter_key`
    adapters: Sequence[PackedAdapter],
    pinned: Callable[[], Iterable[PackedAdapter]],  # called for several adapters only
    blocks: int,
    max_list: int,
) -> str | None:
    """Returns why the adapters of a request can never be on the device together; None: they can.
    `max_list`: the most pages of a request. One adapter was checked before it came in."""
    if key == adapters[0].digest:
        return None
    for one in adapters:
        if AFFINE in one.site_kinds:  # kernels read these rows of the first page, unweighted
            return (
                f"adapter {one.digest} uses DoRA or has trained biases, and can neither have a "
                "weight nor be together with others"
            )
    if len(adapters) == 1:
        return None
    for one in adapters:
        if one.invocation:
            return (
                f"adapter {one.digest} has alora_invocation_tokens, and cannot be together with "
                "others"
            )
    num_pages = count_pages(adapters)
    if num_pages > max_list:
        blank = num_pages > sum(one.num_pages for one in adapters)
        words = " and theirs for different modules" if blank else ""
        return (
            f"the adapters take {num_pages * PAGE_ROWS} rank rows in pages of {PAGE_ROWS}{words}; "
            f"the limit is {max_list * PAGE_ROWS} (max_lora_rank)"
        )
    own = {one.digest for one in adapters}
    held = sum(one.num_blocks for one in pinned() if one.digest not in own)
    needed = max(sum(one.num_blocks for one in adapters) + held, num_pages)
    if needed > blocks:
        return (
            f"the adapters need {needed - held} blocks together; {held} of {blocks} on the device "
            "are pinned (adapter_pool_bytes)"
        )
    return None
