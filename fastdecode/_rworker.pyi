"""The C++ R-worker: paged KV cache and attention on this machine's cores (knows no network and no model).

Errors are ValueError (a bad value, an array of another dtype or shape, a call out of order or after ``close``, out of
blocks), KeyError (an unknown sequence), TypeError (an argument of another type) or MemoryError (no address space for a
cache or buffer of that size); whatever raised one has changed nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdecode.kinds import Layer

def supported_isas() -> list[str]:
    """Which of "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16" and "avx512_amx", on ARM "neon",
    "neon_dot" and "neon_bf16" run here, best last.

    Asks the kernel for the tile registers of the last one, for the whole process, where the CPU has them.
    """

def self_test(isa: str) -> str | None:
    """Hold an instruction set's kernels against the scalar ones, in some milliseconds and a few MB: None if they agree.

    Otherwise one sentence: which instruction set, what it got wrong, and, behind a semicolon, what to set instead.
    Stored bytes and a sequence after export and import must be the same, outputs within each cache dtype's rounding.
    ValueError for an ``isa`` that this CPU does not support.
    """

def block_bytes(
    layers: Sequence[Layer],
    kv_dtype: str,
    block_size: int,
) -> int:
    """Bytes that one block of ``block_size`` tokens takes over all ``layers``; arguments as in :class:`RWorker`."""

def state_blocks(
    layers: Sequence[Layer],
    kv_dtype: str,
    block_size: int,
) -> int:
    """Blocks that the state of one sequence takes, 0 where no layer is recurrent; arguments as in :class:`RWorker`."""

def checksum(data: npt.NDArray[np.uint8], start: bytes, *, by_tables: bool = False) -> bytes:
    """16 bytes of ``data``, uint8 [bytes], and ``start``, 16 bytes: four CRC-32C side by side, at the speed of memory
    where the processor has an instruction for it; ``by_tables``: as where it has none.

    Any change within 32 consecutive bits is seen, any other one but once in 2**32. ValueError for other arrays.
    """

def read_peak(num_threads: int, num_bytes: int, repeats: int) -> float:
    """Read bandwidth in GB/s (1e9 bytes): the median over ``repeats`` passes through a buffer of ``num_bytes``.

    ``num_bytes``: at least 1 MB per thread, ``num_threads``: 1 to 1024, ``repeats``: at least 1; else ValueError.
    """

class Peaks:
    """What this machine gives, for as many threads as an R-worker has: the ceilings its figures are read against."""

    def __init__(self, *, num_threads: int, num_bytes: int, cores: list[int] = ..., isa: str = "auto") -> None:
        """Start the threads and fill a buffer of ``num_bytes``; ValueError for less than 1 MB per thread.

        ``num_threads``, ``cores`` and ``isa`` as in :class:`RWorker`.
        """

    def read(self) -> float:
        """Read bandwidth in GB/s (1e9 bytes): the faster of a pass through the buffer with and one without prefetch."""

    def read_scattered(self, *, piece_bytes: int, read_ahead: str | None) -> float:
        """GB/s of reading the buffer in pieces of ``piece_bytes`` in random order, asked for as attention does it.

        ``read_ahead`` as in :class:`RWorker`, or None: eight pages side by side, none asked for. The best of these is
        the ceiling of a cache in blocks. ValueError for pieces below 64 bytes or above an eighth of ``num_bytes``.
        """

    def multiply_add(self, *, kv_dtype: str) -> float:
        """1e9 multiply-adds per second with ``isa``, of all threads, of the kind a cache of ``kv_dtype`` needs."""

class Ring:
    """One end of a one-way queue of words between two processes, in memory that both have mapped.

    One process pushes and one pops; memory that is all zeros is an empty ring.
    """

    NUM_BYTES: int
    """Memory of a ring."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """``memory``: uint8, at least ``NUM_BYTES``, writeable, aligned to 64 bytes; else ValueError."""

    def push(self, word: int) -> None:
        """Add a word of 0 to 2**64 - 1, and wake the reader if it sleeps; ValueError when 1024 are unread."""

    def pop(self, timeout_seconds: float) -> int | None:
        """The next word, None when none came in time. Spins for 20 microseconds, then sleeps, without the GIL."""

def merge_partials(
    partials: list[npt.NDArray[np.float32]],
    parts: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
    sinks: Sequence[float],
    out: npt.NDArray[np.float32 | np.uint16],
    model_dtype: str,
    isa: str = "auto",
) -> None:
    """Merge the partial results of ranges into rows of ``out``, as an R-worker that held all of them would, bit for
    bit where ``isa`` rounds as its instruction set does (all but "scalar" are the same here). Without the GIL.

    ``partials``: [rows, num_heads, 2 + Dv] each, as R-workers give them. ``parts``: int64 [num_parts, 5]: index in
    ``partials``, row there of the span's first row, rows there from one row of the span to the next, and the first
    split and number of splits that it stands for: a power of two, from a multiple of it on. ``spans``: int64
    [num_spans, 4]: first row of ``out``, rows, first part, parts, which follow one another; together they name all
    parts in order. ``sinks``: one per head, or none. ValueError for anything else.
    """

def share_picks(
    partials: list[npt.NDArray[np.float32]], parts: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int32]]:
    """Of what ranges ranked in an index layer, how much is picked: int32 [rows, heads] for each of ``partials``.

    ``partials``: [rows, heads, most] each, as R-workers give them. Picked are the ``most`` best of a row's parts, of
    equal ones those of earlier parts. ``parts`` and ``spans`` as for ``merge_partials``; rows that these do not name
    pick nothing. ValueError for what is not there.
    """

class RWorker:
    """A KV cache with the threads that attend to it; called from one thread.

    A step is ``begin_step``, then ``submit`` and ``wait`` for every layer of every mini-batch with rows, then
    ``end_step`` (or ``abandon_step``). A sequence's output has the same bits whatever else is in the step, however
    many threads run, whatever the block size, and however its rows are cut into steps.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        model_dtype: str,
        kv_dtype: str,
        block_size: int,
        num_blocks: int,
        num_threads: int,
        cores: list[int] = ...,
        isa: str = "auto",
        read_ahead: str = "run",
    ) -> None:
        """Reserve address space for the cache (committed as it fills) and start the threads.

        ``layers``: ValueError names the field of ``fastdecode.kinds`` that one lacks; head dims up to 1,088, of int8
        and int4 up to 512. ``model_dtype`` (of q, k, v and out): "float32",
        "float16" or "bfloat16"; ``kv_dtype`` (of the cache): these, "int8" or "int4", rounded to by this worker.
        ``block_size``: 16, 32, 64, 128 or 256 tokens; where no layer attends also more, a power of two up to 2**30, for
        256 rows of states then. ``num_threads``: 1 to 1024.
        ``cores``: thread i is pinned to ``cores[i % len(cores)]``; empty: not pinned. ``isa``: "auto" is the
        environment's FASTDECODE_ISA where set, else the best; ValueError if this machine does not support it.
        ``read_ahead``: how the tokens read next are asked for, "run", "run-l2" or "pages" (as
        ``fastdecode.core.types.READ_AHEAD``); changes speed, not results.
        """

    @property
    def isa(self) -> str:
        """The instruction set in use."""

    @property
    def num_threads(self) -> int:
        """Threads that attend."""

    @property
    def state_blocks(self) -> int:
        """Blocks that the states of one sequence take beside those of its tokens."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""

    @property
    def block_size(self) -> int:
        """Tokens of one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds."""

    @property
    def blocks_touched(self) -> int:
        """Blocks below this one were ever in use; those above come next, lowest first. From any thread."""

    @property
    def blocks_used(self) -> int:
        """Blocks that some sequence holds, shared ones once."""

    def set_weights(self, layer: int, first_head: int, rows: npt.NDArray[np.float32 | np.uint16]) -> None:
        """K above V of some heads of a layer that has an ``absorption``, from ``first_head`` on: [heads, nope_dim +
        value_dim, value_head_dim] in the model's dtype. ValueError for another layer or shape, or in a step.

        ``begin_step`` raises ValueError until all heads of all such layers have come; they may come again.
        """

    def begin_step(self, controls: npt.NDArray[np.int64], mini_batches: list[npt.NDArray[np.int64]]) -> None:
        """Apply the controls, take blocks for all rows and plan the work.

        ``controls``: int64 [n, 4], columns of ``core.types.CONTROL``, applied in order. ``mini_batches``: int64
        [m, 4] each, columns of ``core.types.SPAN``, in the order READ, ATTEND, PARTIAL, APPEND. A sequence may
        appear once in a step, and one with context_len 0 that is unknown is opened; READ spans, of sequences of
        512 * 2^n tokens, may name one several times. KeyError for any other unknown sequence; ValueError for a bad
        control or span, and when the blocks do not suffice.
        """

    def submit(
        self,
        mini_batch: int,
        layer: int,
        q: npt.NDArray[np.float32 | np.uint16],
        k: npt.NDArray[np.float32 | np.uint16],
        v: npt.NDArray[np.float32 | np.uint16],
        out: npt.NDArray[np.float32 | np.uint16],
        partials: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Start one layer of one mini-batch and return at once; jobs run in the order of submission.

        C-contiguous, in the model's dtype (float32, or uint16 bits): ``q`` [rows of all but APPEND spans, num_heads,
        Dk], ``k`` [rows of all but READ spans, num_kv_heads, Dk], ``v`` [those rows, num_kv_heads, Dv], ``out`` [rows
        of ATTEND spans, num_heads, Dv], written. ``partials`` float32 [n, num_heads, 2 + Dv], written: (max, sum,
        output before division) of each row of READ spans, and of each row and node of PARTIAL spans, of which a span
        whose last row sees n splits of 512 tokens has as many as n has bits that are 1. May be None where there are
        none. Those of an index layer, [n, heads that pick, picks], are uint32 as bits: the ranks of a range's best
        scores, the best first, 0 where there are no more. The arrays are kept, and must be left alone, until ``wait``.
        ValueError for arrays of another kind, with no step open, and for a layer submitted before or while this
        mini-batch is still to be waited for.
        """

    def run(
        self,
        mini_batch: int,
        layer: int,
        q: npt.NDArray[np.float32 | np.uint16],
        k: npt.NDArray[np.float32 | np.uint16],
        v: npt.NDArray[np.float32 | np.uint16],
        out: npt.NDArray[np.float32 | np.uint16],
        partials: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """``submit`` and ``wait`` in one, without the GIL: this thread attends itself, with the others' help.

        For a process that has nothing else to do: no thread is woken to lead. ValueError as for ``submit``, and while
        any mini-batch is to be waited for.
        """

    def share(self, mini_batch: int, layer: int, counts: npt.NDArray[np.int32]) -> None:
        """Tell, once index layer ``layer`` is done, how many of what rows of READ and PARTIAL spans ranked is picked.

        ``counts``: [rows of partial results, heads that pick], of several nodes of a row that of the first. Before the
        layers that read what it picks. ValueError for more than were ranked, or where nothing is to be told.
        """

    def ready(self, mini_batch: int) -> bool:
        """True when ``wait`` would return at once."""

    def wait(self, mini_batch: int) -> None:
        """Wait, without the GIL, until what was submitted for this mini-batch is done."""

    def weigh(
        self,
        *,
        sequence_id: int,
        position: int,
        offset: int,
        block: int,
        layers: Sequence[int],
        queries: Sequence[npt.NDArray[np.float32 | np.uint16]],
        norms: npt.NDArray[np.float32] | None = None,
        finds_norms: bool = False,
    ) -> npt.NDArray[np.float32]:
        """Share one query's attention among blocks of ``block`` tokens of a sequence of the open step, whose layers are
        all done: float32 [num_blocks], the mean over heads and then over ``layers``, in a second pass over the keys.

        The query is at ``position``, counted from the sequence's first token, which is token ``offset`` of the whole
        where the sequence is a range. Blocks begin at multiples of ``block`` of the whole; the first is that of token
        ``offset``. ``layers`` ascend; an index layer among them tells what those read that it picks. ``queries``: of
        each [1, num_heads, Dq], as in ``submit``. ``norms``: float32 [1, heads of all layers that attend, 2], max and
        sum of scores over the whole; by default over the tokens here and sinks. With ``finds_norms`` the answer is
        these of the tokens here, without sinks. ValueError for anything else, and for layers that are not done.
        """

    def attend_again(
        self, sequence_id: int, layer: int, position: int, mode: int, query: npt.NDArray[np.float32 | np.uint16]
    ) -> npt.NDArray[np.float32 | np.uint16]:
        """Compute the attention of one stored row again, bit for bit as in its step; store nothing.

        ``position``: the row's position in the sequence, or in the segment. ``mode``: ATTEND, PARTIAL or READ, as the
        row's span had. ``query``: [1, num_heads, Dq]. Return o [1, num_heads, Dv] in the model's dtype, or the row's
        partial results, float32 [nodes, num_heads, 2 + Dv]. Raise ValueError for a row that is not stored, for a layer
        that is recurrent, an index, or picked by one, and while a layer of the open step is missing.
        """

    def export_layer(self, sequence_id: int, layer: int, as_blocks: bool = False) -> npt.NDArray[np.uint8]:
        """Return one layer of all tokens of a sequence, as ``export`` orders it; the open step's rows are included.

        With ``as_blocks``, full blocks come first, as ``export_blocks`` orders them, and then the tokens of the last
        block; ValueError for a layer whose blocks are larger than their tokens.
        """

    def keep_checksums(self) -> None:
        """Keep, from now on, a checksum of each full block in each layer. Call this before the first step."""

    def find_damage(self, sequence_id: int, num_tokens: int = -1, layer: int = -1) -> int:
        """Return the first full block of a sequence whose bytes differ from their checksum; -1 if none does.

        ``num_tokens``: only the blocks of these first tokens; -1 for all. ``layer``: only this layer; -1 for all.
        """

    def flip_bit(self, sequence_id: int, layer: int, token: int, bit: int) -> None:
        """Flip one bit of the block that holds ``token``, for tests of ``find_damage``."""

    def end_step(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], int, int]:
        """Commit the lengths: (busy_start, busy_end, bytes_read, blocks_free).

        Busy times are [num_mini_batches, num_layers] seconds of ``time.perf_counter``, 0 where nothing ran. ValueError
        if some layer of a mini-batch with rows was not submitted or not waited for.
        """

    def abandon_step(self) -> None:
        """Wait for what runs, then be as the controls left it: the rows' blocks return, new sequences vanish."""

    def sequence_length(self, sequence_id: int) -> int:
        """Committed tokens; KeyError for an unknown sequence, here and below."""

    def least_length(self, sequence_id: int) -> int:
        """Fewest tokens to which it can be cut: 0 without a state; more than it has where its state is spoilt."""

    def block_table(self, sequence_id: int) -> list[int]:
        """Block ids in order, those of the open step's rows included."""

    def sequence_ids(self) -> list[int]:
        """All sequences, ascending."""

    def incoming_ids(self) -> list[int]:
        """Those that prefill workers store into, ascending."""

    def read_tokens(self, sequence_id: int, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cached keys [length, num_kv_heads, Dk] and values [length, num_kv_heads, Dv], as float32 whatever the
        KV dtype, for oracles. ValueError while a step is open."""

    def export(self, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> npt.NDArray[np.uint8]:
        """``num_tokens`` committed tokens of a sequence from token ``start`` on, or all that follow, as bytes, uint8
        [bytes]: what ``import_`` takes.

        For each layer, for each token, keys [num_kv_heads, Dk] and then values [num_kv_heads, Dv], the stored bits of
        the KV dtype: the same for every block size and instruction set. In int8 and int4 the codes of a head's Dk or Dv
        (int4: two to a byte, the lower dim in the low bits) come before its scales: one float32, or for every 64 dims a
        bfloat16 scale and a bfloat16 zero. ValueError for tokens that it has not, or while a step is open.
        """

    def import_(self, sequence_id: int, num_tokens: int, data: npt.NDArray[np.uint8], start: int = 0) -> None:
        """A new sequence of ``num_tokens`` committed tokens from ``data``, exported by a worker of the same layers and
        KV dtype; bit for bit the one that was exported. From ``start`` > 0 on, a multiple of the block size, as many
        more tokens of a sequence that has exactly those before.

        ``data``: uint8 [bytes], C-contiguous. ValueError for an id that exists or a start that is not its length, too
        few free blocks, a length that is not that of ``num_tokens``, another kind of array, or while a step is open.
        """

    def export_blocks(self, sequence_id: int, start: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Whole blocks as they lie in this cache, uint8 [blocks * block_bytes]: for each layer, for each block.

        Copies of memory: for workers of the same layers, KV dtype, block size and instruction set only. ValueError for
        tokens that it has not or that are no whole blocks, or while a step is open. States are not among them.
        """

    def import_blocks(self, sequence_id: int, num_tokens: int, data: npt.NDArray[np.uint8], start: int = 0) -> None:
        """As ``import_``, of whole blocks that ``export_blocks`` gave. A state is spoilt until ``import_`` sets it."""

    def read_blocks(self, sequence_id: int, start: int, fd: int, pieces: list[tuple[int, int, bytes]]) -> list[bytes]:
        """As ``import_blocks``, of consecutive ``pieces`` of the open file ``fd``, straight into their places; each of
        this worker's threads reads one at a time.

        A piece is its number of tokens, its offset in the file, and the ``start`` of its ``checksum``; that of each is
        returned.
        ValueError as of ``import_blocks``, and nothing has changed then. OSError where a piece cannot be read,
        ValueError where the file ends before: the sequence has all these tokens then, and not the right ones.
        """

    def commit_blocks(self, first: int, count: int) -> None:
        """Commit the memory of ``count`` blocks from block ``first`` on, used or not, which is otherwise done as they
        are first written. From any thread, while another takes steps. ValueError for blocks that there are not.
        """

    def check_store(self, job_id: int, layer: int, start: int, num_rows: int) -> None:
        """KeyError for a job that is not under way, ValueError for rows that it does not wait for.

        From any thread, while another takes steps; so are ``store`` and ``read_prefix``.
        """

    def store(self, job_id: int, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store rows of an incoming sequence as append-only rows are, from the token ``start`` on.

        ``k`` [num_rows, num_kv_heads, key_head_dim], ``v`` [num_rows, num_kv_heads, stored_value_dim], in the model's
        dtype. Rows come in any order, each once. Errors as of ``check_store``, and ValueError for other arrays; a
        KeyError may also come midway, when a control releases the sequence meanwhile.
        """

    def store_state(self, job_id: int, layer: int, data: npt.NDArray[np.uint8]) -> None:
        """Store the state of an incoming sequence after all its tokens, in one layer: the bytes that ``export`` gives
        of that layer, uint8 of any shape. Errors as of ``check_store``, and ValueError for another number of bytes.
        """

    def read_prefix(self, job_id: int, layer: int, start: int, num_rows: int) -> npt.NDArray[np.uint8]:
        """Tokens that an incoming sequence had when it was reserved, those of the prefix that it was forked from: uint8
        [num_rows, bytes], each token's keys and then values in the stored bits, as ``export`` gives them of a layer.

        KeyError for a job that is not under way, at once or midway, ValueError for other rows.
        """

    def statistics(self) -> dict[str, int]:
        """``blocks_used``, ``blocks_free``, ``blocks_shared`` (by several sequences), ``sequences``, ``incoming``
        (those whose rows are still to come), ``tokens`` (committed, those of shared blocks once per sequence),
        ``bytes_read`` (keys and values, by all steps so far) and ``bytes_committed`` (of blocks ever used, the memory
        that the cache may hold)."""

    def close(self) -> None:
        """Wait for what runs and free everything; may be called twice."""
