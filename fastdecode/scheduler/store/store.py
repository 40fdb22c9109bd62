"""The store of places: which R-workers hold which tokens of which sequences, and what they have yet to be told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from fastdecode.scheduler.sequence import TokenSequence
from fastdecode.scheduler.store.holdings import Holdings, Transfer, TransfersUnderWay
from fastdecode.scheduler.store.operations import (
    Attend,
    Close,
    CopyNext,
    CopySegment,
    DropTransfer,
    Extend,
    GiveUpCopy,
    Grow,
    GrowTransfer,
    MakeRoom,
    Move,
    Operation,
    Refresh,
)
from fastdecode.scheduler.store.residents import Residents
from fastdecode.scheduler.store.table import SequenceTable
from fastdecode.scheduler.store.tails import Tails


class Store:
    """Writes blocks, counters and controls, with its parts. It decides nothing: policies read it, and say what to do.

    ``tails``: what sequences append to. ``transfers``: copies under way, each to an R-worker that has blocks for it.
    ``adopted`` and ``parked``: sources of the prefix cache with doors of their own.

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
        self.tails = Tails(self.workers, self.table, self._holdings, self.prefixes.ids, self.names)
        self.transfers = TransfersUnderWay(self.workers, self.table, self._holdings)
        self._kept_rows = 1 + limits.num_speculative_tokens
        self.last_rows: tuple[MiniBatch, ...] = ()
        self.num_sound: dict[int, int] = {}

    def carry_out(self, operation: Operation) -> Any:
        """Do what a policy decided; the answer is that of the operation."""
        match operation:
            case Refresh():
                return self.table.refresh()
            case Attend():
                return self._attend(operation)
            case MakeRoom():
                return self.make_room(operation.worker, operation.num_blocks)
            case Grow():
                return self.tails.grow(operation.rows, operation.num_blocks)
            case Extend():
                return self.tails.extend(operation.sequence, operation.worker)
            case Close():
                return self.prefixes.close(operation.sequence)
            case GiveUpCopy():
                return self.give_up(operation.sequence, operation.segment, operation.worker)
            case _:
                return _carry_out_on(self.transfers, operation)

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
        """Return what an engine after this one has to know, and was not taken before."""
        self.names.progress(self.residents.prompts.values())
        return self.names.take()

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Have ``num_blocks`` blocks free on R-worker ``worker``; False if not even evicted prefixes leave them."""
        return self.workers[worker].free >= num_blocks or self.prefixes.make_room(worker, num_blocks)

    def begin(self, sequence: TokenSequence, segments: list[Segment], hit: Hit | None, second: int = -1) -> None:
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
        self.tails.count(sequence, 1)
        if second >= 0:
            self._begin_second(sequence, second, hit)
        self.prefixes.close(sequence)
        self.tails.go_on(sequence)
        self.names.segments(sequence, segments)
        self.residents.enter(sequence, may_use_scratch=hit is None)

    def send_away(self, sequence: TokenSequence, job_id: int, places: Iterable[StoredAt]) -> None:
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

    def finish_prompt(self, sequence: TokenSequence) -> None:
        """All of ``sequence``'s prompt is cached: it decodes from here on."""
        sequence.job_id = 0
        self.prefixes.leaders.stop(sequence)
        self.prefixes.kept.keep(sequence)
        self.residents.decode(sequence)

    def fork_siblings(self, parent: TokenSequence) -> None:
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
            self.tails.count(sibling, 1)
        own_blocks = self.workers.sizes.blocks_of_copy(parent.tail.num_tokens)
        parent.tail.num_blocks -= own_blocks * len(parent.siblings)
        self.residents.fork(parent)
        parent.siblings = ()

    def leave(self, sequence: TokenSequence, keep: bool) -> None:
        """``sequence`` gives up its cache; its full blocks are retained if ``keep`` and prefix caching say so."""
        if self.residents.leave(sequence):
            self.prefixes.leaders.stop(sequence)
        stays = keep and self.prefixes.leave(sequence)
        self.tails.count(sequence, -1)
        for segment in sequence.segments:
            for copy in segment.copies:
                self._holdings.give_up(segment, copy, is_known=sequence.job_id > 0, stays=stays)
        self.transfers.drop_of(sequence)
        self.table.close(sequence)
        self.names.progress([sequence])
        sequence.job_id = 0

    def give_up(self, sequence: TokenSequence, segment: Segment, worker: int) -> None:
        """R-worker ``worker`` gives up its copy of ``segment``, of ``sequence``."""
        self._holdings.remove(sequence, segment, worker)
        self.transfers.redirect(segment, worker)

    def _attend(self, chosen: Attend) -> None:
        """Have tails and closed segments attend where they were ``chosen`` to."""
        self.table.on_second[chosen.rows] = chosen.on_second
        for sequence, segment in chosen.swapped:
            segment.copies.reverse()
            self.table.put(sequence)
        self.table.sort()

    def place_again(self, sequence: TokenSequence, places: Iterable[tuple[Segment, int]]) -> None:
        """Segments of ``sequence`` are to be computed again, each on the R-worker beside it."""
        for segment, worker in places:
            segment.copies = [Copy(worker)]
            self._holdings.take(segment, segment.copies[0])
            self.workers[worker].num_sequences += segment is sequence.tail
        self.table.put(sequence)
        self.tails.go_on(sequence)

    def cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """What ``segment`` has beyond ``num_tokens`` tokens is wrong: it is forgotten, and ``num_blocks`` are kept, or
        fewer where False is returned; see :meth:`Holdings.cut`. Copies under way that have some of it are given up."""
        has_room = self._holdings.cut(segment, num_tokens, num_blocks)
        self.transfers.cut(segment, segment.num_tokens)
        return has_room

    def make_room_to_rewind(self, segment: Segment, num_tokens: int) -> bool:
        """Evict what cutting ``segment`` to ``num_tokens`` tokens needs; False where it cannot be cut to them: a state
        goes back behind the few rows that are kept beside it, and only to the very token."""
        if self.workers.sizes.rewinds:
            return True
        has_room = self._holdings.make_room_to_cut(segment, num_tokens, segment.num_blocks)
        return has_room and segment.num_tokens - num_tokens <= self._kept_rows

    def lose(self, sequence: TokenSequence, worker: int) -> None:
        """R-worker ``worker`` is lost with its copies of segments of ``sequence``; those without another are empty."""
        self.tails.count(sequence, -1)
        for segment in sequence.segments:
            was_here = segment.on(worker) is not None
            segment.copies = [copy for copy in segment.copies if copy.worker != worker]
            self.transfers.redirect(segment, worker)  # which ends one that has no source, by the name it had
            if was_here and not segment.copies:
                segment.cache_id, segment.num_tokens = self.prefixes.ids.new(), 0
                self.names.segments(sequence, [segment])
        self.table.put(sequence)
        self.tails.count(sequence, 1)

    def _begin_second(self, sequence: TokenSequence, worker: int, hit: Hit | None) -> None:
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


def _carry_out_on(transfers: TransfersUnderWay, operation: Operation) -> Transfer | None:
    """Do what a policy decided about copies under way."""
    match operation:
        case Move(sequence, segment, target, num_blocks):
            transfer = transfers.begin_move(sequence, segment, target, num_blocks)
            transfer.num_tokens = segment.num_tokens
            return transfer
        case CopySegment(sequence, segment, target, drops):
            return transfers.begin_copy(sequence, segment, target, drops)
        case GrowTransfer(transfer, num_blocks):
            transfers.grow(transfer, num_blocks)
        case CopyNext(transfer, num_tokens):
            transfer.num_tokens = num_tokens
        case DropTransfer(transfer):
            transfers.drop(transfer)
        case _:
            raise TypeError(f"the store carries out no {type(operation).__name__}")
    return None
