"""The source of adopted prefixes: sequences that an earlier engine left on R-workers.
Each segment of such a sequence is a retained prefix under its old cache id, with the tokens after its last full block.
If the client sends the sequence again, the sequence continues in these blocks: they count as its own, and its R-workers
need no control. Until then the prefixes may be evicted like all prefixes, and other sequences may start from their full
blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fastdecode.core.held import HeldSequence, KnownTokens
from fastdecode.scheduler.names import CacheIds
from fastdecode.scheduler.places.place import Block
from fastdecode.scheduler.places.workers import Prefix, Workers
from fastdecode.scheduler.prefix.index import IndexedSource, PrefixIndex, extend_hashes
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.sequence import TokenSequence

Held = Mapping[int, Sequence[HeldSequence]]
"""The sequences held by each R-worker, by its index."""


class Adopted(IndexedSource):
    """Finds adopted prefixes by the sequence that they belong to, and by their first position.
    If disabled, it adopts none.
    """

    is_own = True

    def __init__(self, workers: Workers, index: PrefixIndex, ids: CacheIds, segment_tokens: int, enabled: bool) -> None:
        super().__init__(workers, index)
        self._ids, self._enabled = ids, enabled
        self._segment_tokens = segment_tokens
        self._names: dict[int, dict[int, list[int]]] = {}
        self._hashes: dict[int, list[bytes]] = {}

    def adopt(self, held: Held, known: Mapping[int, KnownTokens], lowest_name: int = 0) -> dict[int, int]:
        """Keep the tokens on R-workers whose cache id is in ``known``, and release all other cache ids.
        Copies on several R-workers are cut to the tokens that all of them have. New cache ids will be below
        ``lowest_name`` and below all held ones.

        Returns:
          The number of tokens kept on each R-worker.
        """
        self._ids.begin_below(min((lowest_name, *(each.cache_id for several in held.values() for each in several))))
        known = known if self._enabled else {}
        ours = [each for one in held.values() for each in one if each.cache_id in known and not each.is_spoilt]
        kept = {each.cache_id: known[each.cache_id] for each in ours}
        lengths = {name: len(tokens.token_ids) - tokens.start for name, tokens in kept.items()}
        for each in ours:
            lengths[each.cache_id] = min(each.num_tokens, lengths[each.cache_id])
        kept = {name: tokens for name, tokens in kept.items() if lengths[name] > 0}
        for name, tokens in kept.items():
            self._names.setdefault(tokens.sequence_id, {}).setdefault(tokens.start, []).append(name)
            hashes = self._hashes.setdefault(tokens.sequence_id, [])
            extend_hashes(hashes, tokens.token_ids[: tokens.start + lengths[name]], self._workers.block_size)
        counts = {index: self._adopt_on(index, several, kept, lengths) for index, several in held.items()}
        self._hashes.clear()
        return counts

    def hits(self, sequence: TokenSequence) -> dict[int, Hit]:
        """Return, by R-worker, the tokens of ``sequence`` that an earlier engine left there, all of equal length.
        If the sequence has several segments, these R-workers hold its last segment.
        """
        pieces = self._pieces(sequence.sequence_id)
        if not pieces:
            return {}
        num_blocks, num_tokens = sum(each.num_blocks for each in pieces), sum(each.num_tokens for each in pieces)
        return {
            worker.index: Hit(num_blocks, prefix, num_tokens, self)
            for worker in self._workers
            if (prefix := worker.prefixes.get(pieces[-1].prefix.prefix_id))
            and self._hit(prefix).num_tokens == pieces[-1].num_tokens
        }

    def pieces(self, sequence: TokenSequence, hit: Hit) -> list[Hit]:
        own = self._pieces(sequence.sequence_id)
        return [*own[:-1], own[-1]._replace(prefix=hit.prefix)]

    def num_adopted(self, sequence_id: int) -> int:
        """Return how many tokens of sequence ``sequence_id``, from its first on, were kept from an earlier engine."""
        return sum(each.num_tokens for each in self._pieces(sequence_id))

    def twin(self, hit: Hit) -> Hit | None:
        """Return the same cached prefix on another R-worker; None if there is none. ``hit`` may already be in use."""
        others = (each for each in self._prefixes([hit.prefix.prefix_id]) if each is not hit.prefix)
        return next((found for each in others if (found := self._hit(each)).num_tokens == hit.num_tokens), None)

    def is_broken(self, sequence: TokenSequence) -> bool:
        """Return whether the first tokens of ``sequence`` were lost, so that it cannot continue in its old blocks."""
        return sequence.sequence_id in self._names and not self._pieces(sequence.sequence_id)

    def close(self, sequence: TokenSequence) -> None:
        """Release the adopted prefix that has the id of ``sequence``; the sequence's other ones stay retained."""
        if self._names.pop(sequence.sequence_id, None) is not None:
            for prefix in list(self._prefixes([sequence.sequence_id])):
                self._index.shorten(prefix, 0)

    def _pieces(self, sequence_id: int) -> list[Hit]:
        """Return hits for the kept segments of a sequence in order, up to the first that is incomplete."""
        by_start = self._names.get(sequence_id, {})
        pieces: list[Hit] = []
        while by_start and all(each.num_tokens == self._segment_tokens for each in pieces[-1:]):
            found = [self._hit(each) for each in self._prefixes(by_start.get(len(pieces) * self._segment_tokens, ()))]
            if not found:
                break
            pieces.append(max(found, key=lambda hit: (hit.num_tokens, hit.prefix.prefix_id == sequence_id)))
        return pieces

    def _prefixes(self, names: Sequence[int]) -> Iterator[Prefix]:
        found = (worker.prefixes.get(name) for name in names for worker in self._workers)
        return (prefix for prefix in found if prefix)

    def _hit(self, prefix: Prefix) -> Hit:
        num_blocks = len(prefix.blocks)
        return Hit(num_blocks, prefix, num_blocks * self._workers.block_size + len(prefix.rest), self)

    def _adopt_on(
        self,
        index: int,
        several: Sequence[HeldSequence],
        kept: Mapping[int, KnownTokens],
        wanted: Mapping[int, int],
    ) -> int:
        worker, size = self._workers[index], self._workers.block_size
        ours = {each.cache_id: each for each in several if each.cache_id in kept}
        lengths = self._lengths(ours, wanted)
        for each in several:
            if each.cache_id not in lengths:
                worker.release(each.cache_id)
        blocks: defaultdict[int, Block] = defaultdict(lambda: Block(num_sequences=0))
        for name, length in lengths.items():
            chain, num_full = [blocks[number] for number in ours[name].blocks[: -(-length // size)]], length // size
            sequence_id, start, token_ids = kept[name]
            hashes = self._hashes[sequence_id][start // size : start // size + num_full]
            rest = token_ids[start + num_full * size : start + length]
            own = chain[num_full:] + [Block(num_sequences=0) for _ in range(self._workers.sizes.fixed)]
            self._index.add(Prefix(name, index, hashes, chain[:num_full], name, own, rest))
            if length < ours[name].num_tokens:
                worker.truncate(name, length)
        num_blocks = len(blocks) + self._workers.sizes.fixed * len(lengths)
        worker.free -= num_blocks
        worker.cached += num_blocks
        return sum(lengths.values())

    def _lengths(self, ours: Mapping[int, HeldSequence], wanted: Mapping[int, int]) -> dict[int, int]:
        """Return how many tokens of each held sequence are kept, by cache id; ``wanted`` gives the most.
        A sequence keeps its last, partly full block only if no other sequence uses this block too, since more tokens
        are written there. A sequence whose recurrent state cannot go back to that length is dropped.
        """
        size = self._workers.block_size
        lengths = {name: wanted[name] for name in ours}
        last = {name: -(-length // size) for name, length in lengths.items()}
        holders = Counter(block for name, each in ours.items() for block in each.blocks[: last[name]])
        for name, each in ours.items():
            if holders[each.blocks[last[name] - 1]] > 1:
                lengths[name] -= lengths[name] % size
        return {name: length for name, length in lengths.items() if length and length >= ours[name].least}
