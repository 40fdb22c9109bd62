"""The store of places: which R-workers hold which tokens of which sequences, and what they have yet to be told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastdecode.core.metrics import Pool
from fastdecode.core.placing import UNLIMITED
from fastdecode.core.remote_prefill import StoredAt
from fastdecode.core.step import MiniBatch
from fastdecode.scheduler.names import Names, Notes
from fastdecode.scheduler.places.place import Copy, Segment
from fastdecode.scheduler.places.workers import Workers
from fastdecode.scheduler.prefix.cache import PrefixCache
from fastdecode.scheduler.prefix.source import Hit
from fastdecode.scheduler.schedules import Limits
from fastdecode.scheduler.sequence import Sequence
from fastdecode.scheduler.store.holdings import Holdings
from fastdecode.scheduler.store.residents import Residents
from fastdecode.scheduler.store.table import SequenceTable
from fastdecode.scheduler.store.transfers import TransfersUnderWay


class Store:
    """The only writer of blocks, counters and controls. It decides nothing: policies read it, and say what to do.

    ``transfers``: copies under way, each to an R-worker that has blocks for it. ``adopted`` and ``parked``: sources of
    the prefix cache with doors of their own.
    ``last_rows``: those committed last, which say what the loss of an R-worker that attended them spoils;
    ``num_sound``: tokens that sequences of several segments, and those whose prompts had just arrived, had cached
    before.
    """

    def __init__(self, limits: Limits, retains: bool) -> None:
        """``retains``: what sequences leave is kept for others that begin alike, where ``limits`` say so."""
        self.workers = Workers(limits.num_blocks, limits.bandwidths, limits.sizes, limits.hosts)
        placing = limits.placing
        self.names = Names(placing.twice or placing.segment_tokens < UNLIMITED)
        self.prefixes = PrefixCache(self.workers, limits, retains and limits.prefix_caching, self.names)
        self.adopted, self.parked = self.prefixes.adopted, self.prefixes.parked
        self.table = SequenceTable(limits.max_num_seqs, limits.num_speculative_tokens, limits.placing.segment_tokens)
        self.residents = Residents(self.table, limits.scratch_tokens)
        self._holdings = Holdings(self.workers, self.prefixes, self.table)
        self.transfers = TransfersUnderWay(self.workers, self.table, self._holdings)
        self._kept_rows = 1 + limits.num_speculative_tokens
        self.last_rows: tuple[MiniBatch, ...] = ()
        self.num_sound: dict[int, int] = {}

    @property
    def pool(self) -> Pool:
        """The R-workers that are there, and how the sequences lie on them."""
        held, twice = len(self.residents.prompts) + len(self.residents.decoding), self.residents.num_twice
        return Pool(len(self.workers.present), held - twice, twice)

    def note_rows(self, mini_batches: tuple[MiniBatch, ...], arrived: Iterable[int] = ()) -> None:
        """The rows of ``mini_batches``, and the prompts ``arrived`` of prefill workers, are about to count as cached;
        there are none where R-workers heard controls alone. Of a prompt that arrived the last row is computed again
        where something else is, for the token that follows it."""
        self.last_rows = mini_batches
        self.num_sound = self.table.cached_of_several() if mini_batches else {}
        self.num_sound |= {each: self.residents.prompts[each].num_prefill - 1 for each in arrived}

    def take_notes(self) -> Notes:
        """What an engine after this one has to know, and was not taken before."""
        self.names.progress(self.residents.prompts.values())
        return self.names.take()

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Have ``num_blocks`` blocks free on R-worker ``worker``; False where not even evicted prefixes leave them."""
        return self.workers[worker].free >= num_blocks or self.prefixes.make_room(worker, num_blocks)

    def begin(self, sequence: Sequence, segments: list[Segment], hit: Hit | None, second: int = -1) -> None:
        """``sequence`` begins its prompt in ``segments``, which have copies and blocks, ``hit``'s among them; with a
        second copy of its only segment on R-worker ``second``, or none."""
        sequence.outputs_at_start = len(sequence.output_token_ids)
        self.prefixes.begin(sequence, hit)
        self.prefixes.name(sequence, segments, hit)
        for segment, piece in zip(segments, hit.source.pieces(sequence, hit) if hit else (), strict=False):
            piece.source.take(segment, segment.copies[0], piece)
        for segment in segments:
            for copy in segment.copies:
                self._holdings.take(segment, copy)
        sequence.segments, sequence.num_closed = segments, 0
        self.table.open(sequence)
        self._count_tail(sequence, 1)
        if second >= 0:
            self._begin_second(sequence, second, hit)
        self.prefixes.close(sequence)
        self.go_on(sequence)
        self.names.segments(sequence, segments)
        self.residents.enter(sequence, may_use_scratch=hit is None)

    def go_on(self, sequence: Sequence) -> None:
        """Make the segment ahead the tail of ``sequence`` where its tail is whole."""
        while sequence.ahead and sequence.tail.num_tokens == self.table.segment_tokens:
            self.set_tail(sequence, sequence.num_closed + 1)

    def set_tail(self, sequence: Sequence, num_closed: int) -> None:
        """``sequence`` appends to the segment after its first ``num_closed`` from now on."""
        self._count_tail(sequence, -1)
        sequence.num_closed = num_closed
        self.table.put(sequence)
        self._count_tail(sequence, 1)

    def extend(self, sequence: Sequence, worker: int) -> None:
        """``sequence``, whose tail is whole, gets a new one on R-worker ``worker``, of no blocks yet."""
        segment = Segment(self.prefixes.ids.new(), sequence.num_cached, workers=[worker])
        self._holdings.take(segment, segment.copies[0])
        sequence.segments.append(segment)
        self.names.segments(sequence, [segment])
        self.go_on(sequence)

    def grow(self, rows: np.ndarray, num_blocks: np.ndarray | int = 1) -> None:
        """Each of these rows of the table takes ``num_blocks`` more; fewer than none give some back."""
        self.table.num_blocks[rows] += num_blocks
        for worker, count in enumerate(self.table.count_held(rows, num_blocks, len(self.workers)).tolist()):
            self.workers[worker].grow(count)

    def truncate(self, sequence: Sequence) -> None:
        """R-workers hold more tokens of ``sequence``, which decodes, than are cached: they are to drop the others."""
        tail = sequence.tail
        for worker in tail.workers:
            self.workers[worker].truncate(tail.cache_id, tail.num_tokens)
        surplus = tail.num_blocks - self.workers.blocks_for(tail.num_tokens)
        self.grow(np.array([sequence.row]), -surplus)

    def send_away(self, sequence: Sequence, job_id: int, places: Iterable[StoredAt]) -> None:
        """Prefill workers compute the prompt of ``sequence``, just started, as job ``job_id``, and store it at
        ``places``, or read there what was cached."""
        self.residents.leave_scratch(sequence)
        sequence.job_id = job_id
        for each in places:
            self.workers[each.r_worker].reserve(each.cache_id, each.ticket, each.end - each.start)

    def arrive(self, places: Iterable[StoredAt]) -> None:
        """Prefill workers have stored all keys and values of a prompt at ``places``, which a sequence still holds."""
        for each in places:
            self.workers[each.r_worker].commit(each.cache_id, each.ticket, each.end - each.start)

    def fill_prompt(self, sequence: Sequence) -> None:
        """All of ``sequence``'s prompt is cached at once, since prefill workers stored it."""
        while sequence.in_prompt:
            end = sequence.tail.start + self.table.segment_tokens
            self.table.num_cached[sequence.row] = min(end, sequence.num_prefill)
            self.go_on(sequence)

    def finish_prompt(self, sequence: Sequence) -> None:
        """All of ``sequence``'s prompt is cached: it decodes from here on."""
        sequence.job_id = 0
        self.prefixes.leaders.stop(sequence)
        self.prefixes.kept.keep(sequence)
        self.residents.decode(sequence)

    def fork_siblings(self, parent: Sequence) -> None:
        """The siblings of ``parent``, whose prompt has just been cached, start from a shared copy and decode."""
        if not parent.siblings:
            return
        for sibling in parent.siblings:
            sibling.num_prefill = parent.num_prefill
            sibling.block_hashes = list(parent.block_hashes)
            closed = [self._holdings.fork(each, self.prefixes.ids.new()) for each in parent.closed]
            sibling.segments = [*closed, self._holdings.fork(parent.tail, sibling.sequence_id)]
            self.names.segments(sibling, sibling.segments)
            sibling.num_closed = parent.num_closed
            self.table.open(sibling)
            self._count_tail(sibling, 1)
        own_blocks = self.workers.sizes.blocks_of_copy(parent.tail.num_tokens)
        parent.tail.num_blocks -= own_blocks * len(parent.siblings)
        self.residents.fork(parent)
        parent.siblings = ()

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """``sequence`` gives up its cache; its full blocks are retained if ``keep`` and prefix caching say so."""
        if self.residents.leave(sequence):
            self.prefixes.leaders.stop(sequence)
        stays = keep and self.prefixes.leave(sequence)
        self._count_tail(sequence, -1)
        for segment in sequence.segments:
            for copy in segment.copies:
                self._holdings.give_up(segment, copy, is_known=sequence.job_id > 0, stays=stays)
        self.transfers.drop_of(sequence)
        self.table.close(sequence)
        self.names.progress([sequence])
        sequence.job_id = 0

    def give_up(self, sequence: Sequence, segment: Segment, worker: int) -> None:
        """R-worker ``worker`` gives up its copy of ``segment``, of ``sequence``."""
        self._holdings.remove(sequence, segment, worker)
        self.transfers.redirect(segment, worker)

    def change_home(self, sequence: Sequence, segment: Segment) -> None:
        """The home of ``segment``, a closed one of ``sequence``, is from now on the R-worker of its second copy."""
        segment.copies.reverse()
        self.table.put(sequence)

    def place_again(self, sequence: Sequence, places: Iterable[tuple[Segment, int]]) -> None:
        """Segments of ``sequence`` are to be computed again, each on the R-worker beside it."""
        for segment, worker in places:
            segment.copies = [Copy(worker)]
            self._holdings.take(segment, segment.copies[0])
            self.workers[worker].num_sequences += segment is sequence.tail
        self.table.put(sequence)
        self.go_on(sequence)

    def cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """What ``segment`` has beyond ``num_tokens`` tokens is wrong: it is forgotten, and ``num_blocks`` are kept, or
        fewer where False is returned; see :meth:`Holdings.cut`. Copies under way that have some of it are given up."""
        has_room = self._holdings.cut(segment, num_tokens, num_blocks)
        self.transfers.cut(segment, segment.num_tokens)
        return has_room

    def goes_back(self, segment: Segment, num_tokens: int) -> bool:
        """Whether ``segment`` can be cut to ``num_tokens`` tokens: where it has a state it goes back behind the few
        rows that are kept beside that, and only to the very token."""
        if self.workers.sizes.rewinds:
            return True
        has_room = self._holdings.has_room_to_cut(segment, num_tokens, segment.num_blocks)
        return has_room and segment.num_tokens - num_tokens <= self._kept_rows

    def lose(self, sequence: Sequence, worker: int) -> None:
        """R-worker ``worker`` is lost with its copies of segments of ``sequence``; those without another are empty."""
        self._count_tail(sequence, -1)
        for segment in sequence.segments:
            was_here = segment.on(worker) is not None
            segment.copies = [copy for copy in segment.copies if copy.worker != worker]
            self.transfers.redirect(segment, worker)  # which ends one that has no source, by the name it had
            if was_here and not segment.copies:
                segment.cache_id, segment.num_tokens = self.prefixes.ids.new(), 0
                self.names.segments(sequence, [segment])
        self.table.put(sequence)
        self._count_tail(sequence, 1)

    def _begin_second(self, sequence: Sequence, worker: int, hit: Hit | None) -> None:
        """The only segment of ``sequence``, which just begins, is on ``worker`` too, from the twin of ``hit``."""
        segment, copy = sequence.tail, Copy(worker)
        if hit:
            twin = hit.source.twin(hit)
            if twin is None:
                raise ValueError("a second copy can start from a twin only")
            twin.source.take(segment, copy, twin)
        self._holdings.take(segment, copy)
        segment.copies.append(copy)
        self.workers[worker].num_sequences += 1
        self.table.put(sequence)

    def _count_tail(self, sequence: Sequence, count: int) -> None:
        """Sequences that append on each R-worker: ``count`` more or less."""
        for worker in sequence.tail.workers:
            self.workers[worker].num_sequences += count
