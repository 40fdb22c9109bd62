"""The store of cached tokens: which tokens each R-worker holds, and which controls wait to be sent."""

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
from fastdecode.scheduler.store.residents import Residents, Tails
from fastdecode.scheduler.store.table import SequenceTable


class Store:
    """Writes blocks, counters and controls. It decides nothing: policies read it, and return operations.
    ``tails``: the segments to which sequences append. ``transfers``: unfinished copies. ``adopted``, ``parked``:
    sources of the prefix cache that are also used directly. ``last_rows``: the last committed rows, which show what
    becomes wrong if an R-worker is lost. ``num_sound``: how many tokens were cached before these rows, by id of
    sequences that have several segments or whose prompt had just arrived.
    """

    def __init__(self, limits: Limits, retains: bool) -> None:
        """``retains``: keep the prefixes of ended sequences for others with the same prefix, if ``limits`` allow."""
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
        """Carry out ``operation``, which a policy asked for; return its answer."""
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
        """The number of present R-workers, and of sequences with one copy and with two copies."""
        held, twice = len(self.residents.prompts) + len(self.residents.decoding), self.residents.num_twice
        return Pool(len(self.workers.present), held - twice, twice)

    def note_rows(self, mini_batches: tuple[MiniBatch, ...], arrived: Iterable[int] = ()) -> None:
        """Record the rows that will count as cached, and the ids of prompts that ``arrived`` from prefill workers.
        There are no rows if R-workers received only controls. If an arrived prompt loses a segment, the prompt's last
        row is computed again too, since its first output token is sampled from that row.
        """
        self.last_rows = mini_batches
        self.num_sound = self.table.cached_of_several() if mini_batches else {}
        self.num_sound |= {each: self.residents.prompts[each].num_prefill - 1 for each in arrived}

    def take_notes(self) -> Notes:
        """Return the facts for the journal that were recorded since the last call."""
        self.names.progress(self.residents.prompts.values())
        return self.names.take()

    def make_room(self, worker: int, num_blocks: int) -> bool:
        """Free ``num_blocks`` blocks on R-worker ``worker``; return False if evicting prefixes is not enough."""
        return self.workers[worker].free >= num_blocks or self.prefixes.make_room(worker, num_blocks)

    def begin(self, sequence: TokenSequence, segments: list[Segment], hit: Hit | None, second: int = -1) -> None:
        """Start the prompt of ``sequence`` in ``segments``, which have copies and blocks, those of ``hit`` included.
        ``second``: the R-worker of a second copy of its single segment; -1 for none.
        """
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
        """Record that prefill workers compute the prompt of ``sequence`` as job ``job_id``.
        R-workers reserve blocks at ``places``, where prefill workers store the prompt or read its cached prefix.
        """
        self.residents.leave_scratch(sequence)
        sequence.job_id = job_id
        for each in places:
            self.workers[each.r_worker].reserve(each.cache_id, each.ticket, each.end - each.start)

    def arrive(self, places: Iterable[StoredAt]) -> None:
        """Queue COMMIT controls for a prompt whose keys and values prefill workers have stored at ``places``."""
        for each in places:
            self.workers[each.r_worker].commit(each.cache_id, each.ticket, each.end - each.start)

    def finish_prompt(self, sequence: TokenSequence) -> None:
        """Record that the prompt of ``sequence`` is fully cached, and that it decodes."""
        sequence.job_id = 0
        self.prefixes.leaders.stop(sequence)
        self.prefixes.kept.keep(sequence)
        self.residents.decode(sequence)

    def fork_siblings(self, parent: TokenSequence) -> None:
        """Start the siblings of ``parent`` by forking its cached prompt."""
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
        for each in (*parent.closed, parent.tail):
            each.num_blocks -= self.workers.sizes.blocks_of_copy(each.num_tokens) * len(parent.siblings)
        self.residents.fork(parent)
        parent.siblings = ()

    def leave(self, sequence: TokenSequence, keep: bool) -> None:
        """Drop the cache of ``sequence``; retain it as a prefix if ``keep`` and prefix caching allow that."""
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
        """Drop the copy of ``segment`` of ``sequence`` on R-worker ``worker``."""
        self._holdings.remove(sequence, segment, worker)
        self.transfers.redirect(segment, worker)

    def _attend(self, chosen: Attend) -> None:
        self.table.on_second[chosen.rows] = chosen.on_second
        for sequence, segment in chosen.swapped:
            segment.copies.reverse()
            self.table.put(sequence)
        self.table.sort()

    def place_again(self, sequence: TokenSequence, places: Iterable[tuple[Segment, int]]) -> None:
        """Give each lost segment of ``sequence`` the R-worker in ``places``, where it will be recomputed."""
        for segment, worker in places:
            segment.copies = [Copy(worker)]
            self._holdings.take(segment, segment.copies[0])
            self.workers[worker].num_sequences += segment is sequence.tail
        self.table.put(sequence)
        self.tails.go_on(sequence)

    def cut(self, segment: Segment, num_tokens: int, num_blocks: int) -> bool:
        """Drop the tokens of ``segment`` after the first ``num_tokens``, which are wrong, also in unfinished copies.
        ``num_blocks`` blocks are kept, or fewer if the result is False; see :meth:`Holdings.cut`.
        """
        has_room = self._holdings.cut(segment, num_tokens, num_blocks)
        self.transfers.cut(segment, segment.num_tokens)
        return has_room

    def make_room_to_rewind(self, segment: Segment, num_tokens: int) -> bool:
        """Evict prefixes so that ``segment`` can be cut to ``num_tokens`` tokens; return False if it cannot.
        A recurrent state can only go back by as many rows as the R-worker keeps beside it.
        """
        if self.workers.sizes.rewinds:
            return True
        has_room = self._holdings.make_room_to_cut(segment, num_tokens, segment.num_blocks)
        return has_room and segment.num_tokens - num_tokens <= self._kept_rows

    def lose(self, sequence: TokenSequence, worker: int) -> None:
        """Remove the copies of ``sequence`` on the lost R-worker ``worker``.

        Segments without another copy stay empty.
        """
        self.tails.count(sequence, -1)
        for segment in sequence.segments:
            was_here = segment.on(worker) is not None
            segment.copies = [copy for copy in segment.copies if copy.worker != worker]
            # this releases dropped transfers by the cache id, so it must come before the id changes
            self.transfers.redirect(segment, worker)
            if was_here and not segment.copies:
                segment.cache_id, segment.num_tokens = self.prefixes.ids.new(), 0
                self.names.segments(sequence, [segment])
        self.table.put(sequence)
        self.tails.count(sequence, 1)

    def _begin_second(self, sequence: TokenSequence, worker: int, hit: Hit | None) -> None:
        """Give ``sequence``, which starts in one segment, a second copy on ``worker``.
        If it starts from ``hit``, the second copy starts from the same prefix there.
        """
        segment, copy = sequence.tail, Copy(worker)
        if hit:
            twin = hit.source.twin(hit)
            if twin is None:
                raise ValueError("a second copy needs the same prefix on another R-worker")
            twin.source.take(segment, copy, twin)
        self._holdings.take(segment, copy)
        segment.copies.append(copy)
        self.workers[worker].num_sequences += 1
        self.table.put(sequence)


def _carry_out_on(transfers: TransfersUnderWay, operation: Operation) -> Transfer | None:
    """Carry out ``operation``, which a policy asked for, on unfinished copies; return a transfer that begins."""
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
            raise TypeError(f"the store knows no operation {type(operation).__name__}")
    return None
