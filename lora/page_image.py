"""The layout of an adapter in memory: strips in blocks, the same on the host and on the device.

A strip is the rows of one page at one matrix: as many of 16 as the module's rank has left; or the
affine rows of a module, which are in the first page. A strip lies within one block; a matrix too
wide for that is cut into pieces of columns. So a block can go anywhere, and modules or rows that an
adapter lacks use no room. Packing casts to the pool's type, or rounds to int8, and checks for
overflow: slow work for any thread. Free of devices and residency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.lora_plan import PAGE_ROWS as PAGE_ROWS
from kernels.lora_rows import INT8_GROUP, ROW_BITS, SCALE_BYTES, UNIT_BYTES, make_entry
from lora.adapter import Adapter, ModuleWeights
from lora.convert import RowsCopy, copy_rows, fits
from lora.errors import AdapterError, AdapterTooLargeError
from lora.int8 import quantized
from lora.sites import Site

_MIN_BLOCK_BYTES = 8192
_SCALES_SHARE = 64  # of a block in int8, for the scales of the strips of A in it
_PIECE_COLUMNS = 128  # pieces of a wide matrix have a multiple of it

AFFINE = "affine"  # among the kinds of sites
Shapes = dict[str, tuple[int, int]]  # of modules: rank, number of affine rows


@dataclass(frozen=True, slots=True)
class Strip:
    """A matrix of the base, or some columns of one. Its place in the layout is its entry's place in
    the table."""

    site: str
    index: int  # slice index
    module: str
    side: Literal["a", "b", "affine"]
    start: int  # first column of the slice
    width: int  # columns, perhaps beyond the last of the matrix
    offset: int = 0  # of the slice, in the module's columns


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form of its blocks, and its rows of the table as if the blocks were the
    first of the heap."""

    digest: str
    memory: torch.Tensor  # [bytes] uint8: the blocks, the last one cut off, then the table's rows
    entries: torch.Tensor  # [pages, strips] int64
    num_blocks: int  # at least one for each page: pages have the numbers of blocks
    # The last parts of the names of its sites, e.g. qkv, and AFFINE if it has affine rows.
    site_kinds: frozenset[str]
    invocation: tuple[int, ...] = ()  # as `Adapter.invocation`

    @property
    def num_pages(self) -> int:
        return self.entries.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    @property
    def image(self) -> torch.Tensor:
        """The blocks."""
        return self.memory[: self.memory.numel() - 8 * self.entries.numel()]

    @property
    def rows(self) -> torch.Tensor:
        """Returns [pages, strips] int64 next to the image: room for the entries in the heap."""
        return self.memory[self.image.numel() :].view(torch.int64).view(self.entries.shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """A strip of one page in the image."""

    page: int
    entry: int
    start: int  # byte
    rows: int


class PageLayout:
    def __init__(
        self,
        sites: Sequence[Site],
        dtype: torch.dtype,
        *,
        has_affine: bool = True,
        is_int8: bool = False,
    ) -> None:
        """`has_affine`: the table has entries for affine rows. `is_int8`: A and B are in int8, by
        `lora.int8`, and a strip of A begins with its scales; affine rows are in `dtype`. Raises
        AdapterError if int8 does not suit the sites."""
        self.dtype = dtype
        self.is_int8 = is_int8
        self.row_dtype = torch.int8 if is_int8 else dtype  # of A and B
        self.has_affine = has_affine
        row_bytes = PAGE_ROWS * self.row_dtype.itemsize
        usual = [site for site in sites if not site.is_optional]
        slices = [part for site in usual for part in site.slices]
        widths = [site.in_features for site in usual] + [part.out_features for part in slices]
        widest = max(widths, default=1)
        # A power of two that holds any strip but those of optional sites.
        self.block_bytes = max(_MIN_BLOCK_BYTES, 1 << (widest * row_bytes - 1).bit_length())
        self._max_width = self.block_bytes // row_bytes
        if is_int8:  # room for the scales of all strips of A that share a block
            self.block_bytes += max(4 * UNIT_BYTES, self.block_bytes // _SCALES_SHARE)
        self.strips = tuple(strip for site in sites for strip in self._strips(site))
        if is_int8:
            _check_widths(self.strips)
        self._entries_of: dict[str, list[int]] = defaultdict(list)  # by module
        # Slices of one module have one A: its entry, and the entries of the other slices.
        self._sharers: dict[int, list[int]] = defaultdict(list)
        first_of: dict[tuple[str, int], int] = {}
        for entry, strip in enumerate(self.strips):
            first = entry
            if strip.side == "a":
                first = first_of.setdefault((strip.module, strip.start), entry)
            own = self._entries_of[strip.module] if first == entry else self._sharers[first]
            own.append(entry)
        self.num_entries = -(-len(self.strips) // 16) * 16  # of a page: rows of 128 bytes
        # Of the device, with the row of the table of the page that has the block's number.
        self.bytes_per_block = self.block_bytes + 8 * self.num_entries
        self.page_bytes = self._bytes_of({part.module: (PAGE_ROWS, 0) for part in slices})

    def num_bytes(self, adapter: Adapter) -> int:
        """Returns the bytes of the device that the adapter takes."""
        return self._bytes_of(_shapes(adapter))

    def pack(
        self,
        adapter: Adapter,
        allocate: Callable[[int], torch.Tensor],
        room_bytes: int | None = None,
        max_pages: int | None = None,
    ) -> PackedAdapter:
        """Packs an adapter. Raises AdapterTooLargeError if it needs more of the device than
        `room_bytes`, or more than `max_pages`: in int8 some rows become two.

        `allocate`: returns host memory of a given size, with any content.
        """
        has_affine = any(one.affine is not None for one in adapter.modules.values())
        if has_affine and not self.has_affine:
            raise AdapterError(
                "the adapter uses DoRA or has biases, for which this engine has no room: set "
                "affine_adapters to true"
            )
        if self.is_int8:
            adapter = quantized(adapter)
        places, size = self._place(_shapes(adapter))
        num_pages = -(-adapter.rank // PAGE_ROWS)
        num_blocks = self._num_blocks(size, num_pages)
        needed = num_blocks * self.bytes_per_block
        if room_bytes is not None and needed > room_bytes:
            raise AdapterTooLargeError(
                f"adapter {adapter.digest} of rank {adapter.rank} needs {needed} bytes on the "
                f"device; the whole pool has {room_bytes} (adapter_pool_bytes)"
            )
        for place in places:
            if place.page == 0:
                self._check_range(self.strips[place.entry], adapter)
        if max_pages is not None and num_pages > max_pages:
            raise AdapterTooLargeError(
                f"adapter {adapter.digest} has numbers far above the others of their row and takes "
                f"{adapter.rank} ranks in int8; the limit is {max_pages * PAGE_ROWS} "
                "(max_lora_rank); use lora_dtype: auto"
            )
        memory = allocate(size + 8 * num_pages * self.num_entries)
        entries = torch.zeros((num_pages, self.num_entries), dtype=torch.int64)
        table = entries.numpy()
        for place in places:
            sharers = self._sharers.get(place.entry, ())
            table[place.page, [place.entry, *sharers]] = make_entry(place.start, place.rows)
        copy_rows(self._copies(memory[:size], places, adapter))
        return PackedAdapter(
            adapter.digest,
            memory,
            entries,
            num_blocks,
            frozenset({AFFINE} if has_affine else ()).union(
                self.strips[place.entry].site.rsplit(".", 1)[-1] for place in places
            ),
            adapter.invocation,
        )

    def copies(self, adapter: Adapter, packed: PackedAdapter) -> list[tuple[Strip, RowsCopy]]:
        """Returns the copies that `pack` made of the adapter, whose A and B are not in int8."""
        places, _ = self._place(_shapes(adapter))
        copies = self._copies(packed.image, places, adapter)
        return [(self.strips[p.entry], copy) for p, copy in zip(places, copies, strict=True)]

    def _copies(
        self, image: torch.Tensor, places: Sequence[_Place], adapter: Adapter
    ) -> list[RowsCopy]:
        """`image`: [bytes] uint8, which the copies fill."""
        copies: list[RowsCopy] = []
        views = {dtype: image.view(dtype) for dtype in {self.dtype, self.row_dtype}}
        for place in places:
            copies.append(self._copy(views, place, adapter))
            if self.is_int8 and self.strips[place.entry].side == "a":
                weights = adapter.modules[self.strips[place.entry].module]
                copies.append(_scales_copy(image, place, weights))
        return copies

    def _place(self, shapes: Shapes) -> tuple[list[_Place], int]:
        """Places the strips of modules of these shapes, the largest first, each in the first block
        with room. Returns the places and the end of the last one."""
        by_size: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for module, (rank, num_affine) in shapes.items():
            for entry in self._entries_of.get(module, ()):
                strip = self.strips[entry]
                row = strip.width * self._dtype_of(strip).itemsize
                height = num_affine if strip.side == "affine" else rank
                for page in range(-(-height // PAGE_ROWS)):
                    rows = min(PAGE_ROWS, height - page * PAGE_ROWS)
                    size = -(-(rows * row + self._offset(strip)) // UNIT_BYTES) * UNIT_BYTES
                    by_size[size].append((page, entry, rows))
        places: list[_Place] = []
        filled: list[int] = []  # bytes of each block
        for size in sorted(by_size, reverse=True):
            block = 0
            for page, entry, rows in by_size[size]:
                while block < len(filled) and filled[block] + size > self.block_bytes:
                    block += 1
                if block == len(filled):
                    filled.append(0)
                start = block * self.block_bytes + filled[block]
                places.append(_Place(page, entry, start, rows))
                filled[block] += size
        return places, (len(filled) - 1) * self.block_bytes + filled[-1] if filled else 0

    def _bytes_of(self, shapes: Shapes) -> int:
        num_pages = -(-max((rank for rank, _ in shapes.values()), default=0) // PAGE_ROWS)
        return self._num_blocks(self._place(shapes)[1], num_pages) * self.bytes_per_block

    def _num_blocks(self, image_bytes: int, num_pages: int) -> int:
        return max(-(-image_bytes // self.block_bytes), num_pages)

    def _copy(
        self, views: Mapping[torch.dtype, torch.Tensor], place: _Place, adapter: Adapter
    ) -> RowsCopy:
        """Returns the copy into a strip of the image, of which these are views by type."""
        strip = self.strips[place.entry]
        numbers, scale = _side(adapter.modules[strip.module], strip)
        if place.page or len(numbers) > place.rows:
            numbers = numbers[PAGE_ROWS * place.page :][: place.rows]
        start = strip.offset + strip.start
        if start or numbers.shape[1] > strip.width:
            numbers = numbers[:, start:][:, : strip.width]
        image = views[self._dtype_of(strip)]
        at = image.storage_offset() + (place.start + self._offset(strip)) // image.element_size()
        rows = image.as_strided((place.rows, strip.width), (strip.width, 1), at)
        return RowsCopy(rows, numbers, scale)

    def _dtype_of(self, strip: Strip) -> torch.dtype:
        return self.dtype if strip.side == "affine" else self.row_dtype

    def _offset(self, strip: Strip) -> int:
        """Returns the bytes before the first row of a strip."""
        return SCALE_BYTES if self.is_int8 and strip.side == "a" else 0

    def _check_range(self, strip: Strip, adapter: Adapter) -> None:
        weights = adapter.modules[strip.module]
        if self._dtype_of(strip) == torch.int8:
            return
        if weights.bound > torch.finfo(self.dtype).max and not fits(
            *_side(weights, strip), self.dtype
        ):
            what = "the gain or offset" if strip.side == "affine" else f"lora_{strip.side.upper()}"
            raise AdapterError(f"{what} of {strip.module}, with its scale, overflows {self.dtype}")

    def _strips(self, site: Site) -> Iterator[Strip]:
        """Yields A of each slice, then B of each slice, then the affine rows of each."""
        for index, part in enumerate(site.slices):
            yield from self._pieces(site, index, part.module, "a", site.in_features)
        offsets: list[int] = []  # of the slices, in the columns of their modules
        ends: dict[str, int] = defaultdict(int)
        for index, part in enumerate(site.slices):
            offsets.append(ends[part.module])
            ends[part.module] += part.out_features
            yield from self._pieces(site, index, part.module, "b", part.out_features, offsets[-1])
        if self.has_affine and not site.is_optional:
            for index, part in enumerate(site.slices):
                width, offset = part.out_features, offsets[index]
                yield Strip(site.name, index, part.module, "affine", 0, width, offset)

    def _pieces(
        self,
        site: Site,
        index: int,
        module: str,
        side: Literal["a", "b"],
        width: int,
        offset: int = 0,
    ) -> Iterator[Strip]:
        if self.is_int8 and site.is_optional:
            width = -(-width // INT8_GROUP) * INT8_GROUP
        if width <= self._max_width:
            yield Strip(site.name, index, module, side, 0, width, offset)
            return
        num_pieces = -(-width // (self._max_width // _PIECE_COLUMNS * _PIECE_COLUMNS))
        piece = -(-width // (num_pieces * _PIECE_COLUMNS)) * _PIECE_COLUMNS
        for start in range(0, width, piece):
            yield Strip(site.name, index, module, side, start, piece, offset)


def in_blocks(entries: torch.Tensor, blocks: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Returns the entries [pages, strips] of an image whose blocks are at `blocks` [n] of the
    heap."""
    units = block_bytes // UNIT_BYTES
    place = entries >> ROW_BITS
    moved = (blocks[place // units] * units + place % units) << ROW_BITS
    return torch.where(entries != 0, moved | entries & (1 << ROW_BITS) - 1, 0)


def _scales_copy(image: torch.Tensor, place: _Place, weights: ModuleWeights) -> RowsCopy:
    assert weights.rank_scales is not None
    own = weights.rank_scales[PAGE_ROWS * place.page :][: place.rows]
    end = place.start + 4 * place.rows
    return RowsCopy(image[place.start : end].view(torch.float32)[None], own[None])


def _check_widths(strips: Sequence[Strip]) -> None:
    for strip in strips:
        if strip.side != "affine" and strip.width % INT8_GROUP:
            raise AdapterError(
                f"adapters in int8 need widths that are multiples of {INT8_GROUP}, but "
                f"{strip.module} has one of {strip.width}"
            )


def _side(weights: ModuleWeights, strip: Strip) -> tuple[torch.Tensor, float]:
    """Returns the numbers [r, width] and their scale."""
    if strip.side == "affine":
        assert weights.affine is not None
        return weights.affine, 1.0
    return (weights.lora_a, 1.0) if strip.side == "a" else (weights.lora_b, weights.scale)


def _shapes(adapter: Adapter) -> Shapes:
    return {
        name: (one.rank, 0 if one.affine is None else len(one.affine))
        for name, one in adapter.modules.items()
    }
