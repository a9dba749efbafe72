"""The block tables of sequences: prefix taken from the cache, growth, publication, release.

Between the scheduler, which thinks in sequences and tokens, and the pool, which thinks in blocks.
Only running sequences hold blocks.
"""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.prefix_digests import chunk_size, extend_digests
from engine.types import ScheduledSequence, Sequence


def needs_prompt_logprobs(sequence: Sequence) -> bool:
    """Its prompt must be computed whole: cached positions have no logits."""
    params = sequence.request.params
    return params.prompt_logprobs is not None and not sequence.num_output_tokens


class BlockTables:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._blocks_a_chunk = chunk_size(pool.block_size) // pool.block_size
        self.prefix_queries = 0  # tokens looked up at first admissions, since start
        self.prefix_hits = 0  # of these found

    def can_share(self, sequence: Sequence) -> bool:
        return self.pool.can_share and not needs_prompt_logprobs(sequence)

    def place(self, sequence: Sequence, budget: int) -> int:
        """Takes the known prefix and blocks for the first chunk; the number of tokens in it. 0: not
        now. All its tokens must find room, or half a prompt would soon be preempted."""
        hits = self._find_prefix(sequence)
        num_cached = len(hits) * self.pool.block_size
        total = self.pool.blocks_for(len(sequence.token_ids)) - len(hits)
        if total > self.pool.num_free - sum(self.pool.is_idle(block) for block in hits):
            return 0
        count = min(len(sequence.token_ids) - num_cached, budget)
        self.pool.hold(hits)
        missing = self.pool.blocks_for(num_cached + count) - len(hits)
        sequence.block_table = hits + self.pool.allocate(missing)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_cached
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            if self.can_share(sequence):
                self.prefix_queries += len(sequence.token_ids)
                self.prefix_hits += num_cached
        return count

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for the first `num_tokens`. False: not enough are free, and nothing changed."""
        missing = max(0, self.pool.blocks_for(num_tokens) - len(sequence.block_table))
        if missing > self.pool.num_free:
            return False
        sequence.block_table += self.pool.allocate(missing)
        return True

    def publish(self, item: ScheduledSequence) -> None:
        """Blocks that this step filled can be found from now on."""
        if not self.pool.can_share:
            return
        sequence, size = item.sequence, self.pool.block_size
        self._extend_chain(sequence, item.end)
        for index in range(item.start // size, item.end // size):
            block = sequence.block_table[index]
            is_new = self.pool.publish(block, sequence.block_hashes[index])
            if is_new and (index + 1) % self._blocks_a_chunk == 0:
                self.pool.name_prefix(block, self._prefix_digest(sequence, index))

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Never the block of the very last token: its logits are what the step is for."""
        if not self.can_share(sequence):
            return []
        self._extend_chain(sequence, len(sequence.token_ids))
        usable = (len(sequence.token_ids) - 1) // self.pool.block_size
        return self.pool.find(sequence.block_hashes[:usable])

    def _prefix_digest(self, sequence: Sequence, index: int) -> int:
        """Of the chunks up to the block at `index`. Those before it have names where their blocks
        were found."""
        size, request, digests = self._blocks_a_chunk, sequence.request, sequence.prefix_digests
        count = (index + 1) // size
        while len(digests) < count - 1:
            known = self.pool.prefix_of(sequence.block_table[(len(digests) + 1) * size - 1])
            if known is None:
                break
            digests.append(known)
        extend_digests(
            digests,
            sequence.token_ids,
            (index + 1) * self.pool.block_size,
            request.adapter,
            request.cache_salt,
            size * self.pool.block_size,
        )
        return digests[count - 1]

    def _extend_chain(self, sequence: Sequence, num_tokens: int) -> None:
        request = sequence.request
        self.pool.extend_chain(
            sequence.block_hashes,
            sequence.token_ids,
            num_tokens,
            request.adapter,
            request.cache_salt,
        )
