"""The block tables of sequences: cached prefix, growth, publication, release.

Translates between the scheduler, which counts sequences and tokens, and the pool, which counts
blocks. Only running sequences hold blocks. Models with windows: `engine.window_tables`.
"""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.prefix_digests import chunk_size, extend_digests
from engine.types import Sequence


def needs_prompt_logprobs(sequence: Sequence) -> bool:
    """Returns True if the prompt must be computed whole: cached positions have no logits."""
    params = sequence.request.params
    return params.prompt_logprobs is not None and not sequence.num_output_tokens


class BlockTables:
    num_groups = 1  # of layers: the most blocks that one more token needs

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._chunk = chunk_size(pool.block_size)  # tokens that a digest of a prefix adds
        self._blocks_per_chunk = self._chunk // pool.block_size
        self.prefix_queries = 0  # tokens looked up at first admissions, since start
        self.prefix_hits = 0  # tokens found among these

    def can_share(self, sequence: Sequence) -> bool:
        return self.pool.can_share and not needs_prompt_logprobs(sequence)

    def place(self, sequence: Sequence, budget: int) -> int:
        """Allocates the cached prefix and the blocks of the first chunk, and returns the number of
        tokens in that chunk, or 0 if there is no room now. All its tokens must find room; otherwise
        half a prompt would soon be preempted."""
        hits = self._find_prefix(sequence)
        num_cached = len(hits) * self.pool.block_size
        total = self.pool.blocks_for(len(sequence.token_ids)) - len(hits)
        if total > self.pool.num_free - sum(self.pool.is_idle(block) for block in hits):
            return 0
        count = min(len(sequence.token_ids) - num_cached, budget)
        self.pool.hold(hits)
        missing = self.pool.blocks_for(num_cached + count) - len(hits)
        sequence.block_table = hits + self.pool.allocate(missing)
        self._begin(sequence, num_cached)
        return count

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the number of blocks that `grow` allocates."""
        return max(0, self.pool.blocks_for(num_tokens) - len(sequence.block_table))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for the first `num_tokens`. Returns False, with nothing changed, if too
        few are free."""
        if num_tokens <= len(sequence.block_table) * self.pool.block_size:
            return True
        missing = self.num_missing(sequence, num_tokens)
        if missing > self.pool.num_free:
            return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """Makes the blocks that a step filled with these positions available to other
        sequences."""
        if not self.pool.can_share:
            return
        size = self.pool.block_size
        if start // size == end // size:
            return
        self._extend_chain(sequence, end)
        for index in range(start // size, end // size):
            block = sequence.block_table[index]
            is_new = self.pool.publish(block, sequence.block_hashes[index])
            if is_new and (index + 1) % self._blocks_per_chunk == 0:
                self.pool.name_prefix(block, self._prefix_digest(sequence, index))

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        """Notes that a placed sequence has so many tokens from the cache."""
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            if self.can_share(sequence):
                self.prefix_queries += len(sequence.token_ids)
                self.prefix_hits += num_cached

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the cached blocks, never that of the very last token: the step exists to compute
        its logits."""
        if not self.can_share(sequence):
            return []
        self._extend_chain(sequence, len(sequence.token_ids))
        usable = (len(sequence.token_ids) - 1) // self.pool.block_size
        return self.pool.find(sequence.block_hashes[:usable])

    def _prefix_digest(self, sequence: Sequence, index: int) -> int:
        """Returns the digest of the chunks up to the block at `index`. Earlier chunks already have
        names if their blocks were found."""
        size, digests = self._blocks_per_chunk, sequence.prefix_digests
        count = (index + 1) // size
        while len(digests) < count - 1:
            known = self.pool.prefix_of(self._block(sequence, (len(digests) + 1) * size - 1))
            if known is None:
                break
            digests.append(known)
        return self._digest_of(sequence, count)

    def _digest_of(self, sequence: Sequence, num_chunks: int) -> int:
        request = sequence.request
        extend_digests(
            sequence.prefix_digests,
            sequence.token_ids,
            num_chunks * self._chunk,
            request.adapter,
            request.cache_salt,
            self._chunk,
            request.active_from,
        )
        return sequence.prefix_digests[num_chunks - 1]

    def _block(self, sequence: Sequence, index: int) -> int:
        """Returns the block of the first group of layers."""
        return sequence.block_table[index]

    def _extend_chain(self, sequence: Sequence, num_tokens: int) -> None:
        request = sequence.request
        self.pool.extend_chain(
            sequence.block_hashes,
            sequence.token_ids,
            num_tokens,
            request.adapter,
            request.cache_salt,
            request.active_from,
        )
