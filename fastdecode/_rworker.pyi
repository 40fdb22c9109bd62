"""The C++ R-worker: paged KV cache and attention on this machine's cores. It knows no network and no model.

Functions raise ValueError for a bad value, an array of another dtype or shape, a call out of order or after ``close``,
and too few free blocks. They raise KeyError for an unknown sequence, TypeError for an argument of another type, and
MemoryError if there is no address space for a cache or buffer. A call that raises an error has changed nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdecode.kinds import Layer

def supported_isas() -> list[str]:
    """Return the instruction sets that this machine supports, the best last.

    On x86: of "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16" and "avx512_amx". On ARM: of "scalar", "neon",
    "neon_dot" and "neon_bf16". If the CPU has AMX, the call asks the kernel to let this process use tile registers.
    """

def self_test(isa: str) -> str | None:
    """Compare the kernels of ``isa`` with the scalar kernels; return None if they agree. This takes some milliseconds.

    Otherwise return one sentence: the instruction set, what it computes wrongly and, after a semicolon, what to set
    instead. Stored bytes, and a sequence after export and import, must be equal; outputs may differ by the rounding of
    the cache's dtype. Raise ValueError if this CPU does not support ``isa``.
    """

def block_bytes(
    layers: Sequence[Layer],
    kv_dtype: str,
    block_size: int,
) -> int:
    """Return the bytes of one block of ``block_size`` tokens over all ``layers``. Arguments: see :class:`RWorker`."""

def state_blocks(
    layers: Sequence[Layer],
    kv_dtype: str,
    block_size: int,
) -> int:
    """Return the blocks of one sequence's state; 0 if no layer is recurrent. Arguments: see :class:`RWorker`."""

def checksum(data: npt.NDArray[np.uint8], start: bytes, *, by_tables: bool = False) -> bytes:
    """Return the checksum, 16 bytes, of ``data``, uint8 [bytes], with the seed ``start``, 16 bytes.

    The checksum is four CRC-32C of interleaved words. It is as fast as memory if the processor has an instruction for
    CRC-32C; ``by_tables`` computes it without the instruction. It detects any change within 32 consecutive bits; it
    misses one in 2**32 other changes. Raise ValueError for other arrays.
    """

def read_peak(num_threads: int, num_bytes: int, repeats: int) -> float:
    """Return the read bandwidth in GB/s (1e9 bytes): the median of ``repeats`` passes over a buffer of ``num_bytes``.

    Raise ValueError unless ``num_bytes`` is at least 1 MB per thread, ``num_threads`` 1 to 1024 and ``repeats`` at
    least 1.
    """

class Peaks:
    """Measures this machine's peak speeds with as many threads as an R-worker has, to compare its attention with."""

    def __init__(self, *, num_threads: int, num_bytes: int, cores: list[int] = ..., isa: str = "auto") -> None:
        """Start the threads and fill a buffer of ``num_bytes``. Raise ValueError for less than 1 MB per thread.

        ``num_threads``, ``cores`` and ``isa`` are as in :class:`RWorker`.
        """

    def read(self) -> float:
        """Return the read bandwidth in GB/s (1e9 bytes): the faster of a pass with prefetching and one without."""

    def read_scattered(self, *, piece_bytes: int, read_ahead: str | None) -> float:
        """Return GB/s of reading the buffer in pieces of ``piece_bytes`` in random order, prefetched as in attention.

        ``read_ahead``: as in :class:`RWorker`; None reads eight pages in parallel without prefetching. The best of
        these is the peak for a cache in blocks. Raise ValueError for pieces below 64 bytes or above an eighth of
        ``num_bytes``.
        """

    def multiply_add(self, *, kv_dtype: str) -> float:
        """Return 1e9 multiply-adds per second of all threads together, on the operands of a cache of ``kv_dtype``."""

class Ring:
    """One end of a one-way queue of 64-bit words between two processes, in memory that both have mapped.

    One process pushes, the other pops. Memory that is all zeros is an empty ring.
    """

    NUM_BYTES: int
    """Bytes of memory that a ring takes."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        """``memory``: writeable uint8, at least ``NUM_BYTES``, aligned to 64 bytes. Raise ValueError for others."""

    def push(self, word: int) -> None:
        """Add ``word``, 0 to 2**64 - 1, and wake the reader if it sleeps. Raise ValueError if 1024 words are unread."""

    def pop(self, timeout_seconds: float) -> int | None:
        """Return the next word; None if none came in time. Spin for 20 microseconds, then sleep, without the GIL."""

def merge_partials(
    partials: list[npt.NDArray[np.float32]],
    parts: npt.NDArray[np.int64],
    spans: npt.NDArray[np.int64],
    sinks: Sequence[float],
    out: npt.NDArray[np.float32 | np.uint16],
    model_dtype: str,
    isa: str = "auto",
) -> None:
    """Merge the partial results of ranges into rows of ``out``, without the GIL.

    The result has the same bits as attention on one R-worker that held all ranges, if ``isa`` rounds as that R-worker
    does. All instruction sets but "scalar" round alike here. Raise ValueError for impossible arguments.

    Args:
        partials: partial results as R-workers return them, [rows, num_heads, 2 + Dv] each.
        parts: int64 [num_parts, 5]. A part is one range's results for one span: the index in ``partials``, the row
            there of the span's first row, the distance there from one row of the span to the next, and the first split
            and number of splits that it covers. The number is a power of two, and the first split a multiple of it.
        spans: int64 [num_spans, 4]: first row of ``out``, number of rows, first part, number of parts. A span's parts
            are consecutive; the spans name all parts in order.
        sinks: one per head, or none.
    """

def share_picks(
    partials: list[npt.NDArray[np.float32]], parts: npt.NDArray[np.int64], spans: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int32]]:
    """Return how many of the tokens that each range ranked in an index layer are picked.

    The result has int32 [rows, heads] for each of ``partials``, which are [rows, heads, most], as R-workers return
    them. The ``most`` best of all parts of a row are picked; among equal ranks, those of earlier parts. ``parts`` and
    ``spans`` are as for ``merge_partials``; rows that these do not name pick nothing. Raise ValueError for a part or
    row that does not exist.
    """

class RWorker:
    """A KV cache and the threads that compute attention over it. Only one thread may call it, unless a method says so.

    A step is ``begin_step``, then ``submit`` and ``wait`` for every layer of every mini-batch with rows, then
    ``end_step`` (or ``abandon_step``). A sequence's output has the same bits whatever else is in the step, however
    many threads run, whatever the block size, and however its rows are divided into steps.
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
        """Reserve address space for the cache, whose memory is committed as it fills, and start the threads.

        Args:
            layers: records of ``fastdecode.kinds``; a ValueError names a missing field. Heads have up to 1,088 dims, or
                512 with int8 and int4.
            model_dtype: dtype of q, k, v and out: "float32", "float16" or "bfloat16".
            kv_dtype: dtype of the cache: one of these, "int8" or "int4". This worker rounds keys and values to it.
            block_size: 16, 32, 64, 128 or 256 tokens. If no layer attends, it may be any power of two up to 2**30; a
                block then has 256 rows of states.
            num_threads: 1 to 1024.
            cores: thread i is pinned to ``cores[i % len(cores)]``; threads are not pinned if it is empty.
            isa: "auto" is FASTDECODE_ISA if it is set, else the best. Raise ValueError for an unsupported one.
            read_ahead: how the next tokens are prefetched, one of ``fastdecode.core.types.READ_AHEAD``. It changes
                speed and not results.
        """

    @property
    def isa(self) -> str:
        """The instruction set in use."""

    @property
    def num_threads(self) -> int:
        """Number of threads that compute attention."""

    @property
    def state_blocks(self) -> int:
        """Number of blocks that one sequence's states take, in addition to the blocks of its tokens."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the cache."""

    @property
    def block_size(self) -> int:
        """Number of tokens of one block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""

    @property
    def blocks_free(self) -> int:
        """Number of blocks that no sequence holds."""

    @property
    def blocks_touched(self) -> int:
        """All blocks below this number were in use at some time; the next new block is this one. For any thread."""

    @property
    def blocks_used(self) -> int:
        """Number of blocks that sequences hold; a shared block counts once."""

    def set_weights(self, layer: int, first_head: int, rows: npt.NDArray[np.float32 | np.uint16]) -> None:
        """Set the K and V projections of some heads of a latent layer with an ``absorption``, from ``first_head`` on.

        ``rows``: [heads, nope_dim + value_dim, value_head_dim] in the model's dtype, K's rows before V's. Raise
        ValueError for another layer or shape, or while a step is open. Until all heads of all such layers are set,
        ``begin_step`` raises ValueError. Heads may be set again.
        """

    def begin_step(self, controls: npt.NDArray[np.int64], mini_batches: list[npt.NDArray[np.int64]]) -> None:
        """Apply the controls, take blocks for all rows and plan the work.

        ``controls``: int64 [n, 4], columns of ``core.types.CONTROL``, applied in order. ``mini_batches``: int64
        [m, 4] each, columns of ``core.types.SPAN``, in the order READ, ATTEND, PARTIAL, APPEND. A sequence may
        appear once in a step; an unknown one with context_len 0 is created. READ spans, of sequences of 512 * 2^n
        tokens, may name a sequence several times. Raise KeyError for any other unknown sequence, and ValueError for a
        bad control or span, or too few free blocks.
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

        Arrays are C-contiguous and, except for ``partials``, in the model's dtype (float32, or uint16 with the bits of
        16-bit floats). They are in use until ``wait`` and must not change. Raise ValueError for other arrays, without
        an open step, for a layer that was submitted before, and before ``wait`` for this mini-batch's previous layer.

        Args:
            q: [rows of all spans but APPEND, num_heads, Dk].
            k: [rows of all spans but READ, num_kv_heads, Dk].
            v: [rows of all spans but READ, num_kv_heads, Dv].
            out: [rows of ATTEND spans, num_heads, Dv], filled with the attention.
            partials: float32 [n, num_heads, 2 + Dv], filled with (max, sum, output before division): one per row of a
                READ span, and one per row and node of a PARTIAL span. A span whose last row sees n splits of 512 tokens
                has as many nodes as n has bits that are 1. None if there are no such spans. An index layer instead
                fills uint32 (as float32 bits) [n, heads that pick, picks]: the ranks of a range's best scores, the best
                first, then zeros.
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
        """Submit a layer and wait for it, without the GIL. The calling thread attends in place of the first thread.

        This saves waking that thread, for a process that has nothing else to do. Raise ValueError as ``submit`` does,
        and while any mini-batch has a layer that was not waited for.
        """

    def share(self, mini_batch: int, layer: int, counts: npt.NDArray[np.int32]) -> None:
        """Set how many of the tokens that rows of READ and PARTIAL spans ranked in index layer ``layer`` are picked.

        Call this after ``wait`` for the index layer and before the layers that read its picks. ``counts``: [rows of
        partial results, heads that pick]; of a row's nodes, only the first is used. Raise ValueError for more than were
        ranked, or if the layer ranked nothing.
        """

    def ready(self, mini_batch: int) -> bool:
        """Return whether ``wait`` would return at once."""

    def wait(self, mini_batch: int) -> None:
        """Wait, without the GIL, until the submitted layer of this mini-batch is done."""

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
        """Return a query's attention weight on each block of ``block`` tokens: float32 [num_blocks].

        A weight is the mean over heads, then over ``layers``. It takes a second pass over the keys. Call this for a
        sequence of the open step after all its layers are done. Raise ValueError for impossible arguments.

        Args:
            position: position of the query, counted from the first token of the sequence on this R-worker.
            offset: if that sequence is a range of a longer one, the range's first token in the longer one; else 0.
                Blocks begin at multiples of ``block`` in the longer sequence.
            layers: ascending; an index layer among them picks for the layers that use its picks.
            queries: for each layer [1, num_heads, Dq], as in ``submit``.
            norms: float32 [1, heads of all layers that attend, 2]: max and sum of scores over the longer sequence. By
                default over the tokens here and the sinks.
            finds_norms: return these norms, of the tokens here and without sinks, in place of weights.
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
        """Commit the step's rows; return (busy_start, busy_end, bytes_read, blocks_free).

        Busy times are [num_mini_batches, num_layers] seconds of ``time.perf_counter``, 0 where nothing ran. Raise
        ValueError if a layer of a mini-batch with rows was not submitted or not waited for.
        """

    def abandon_step(self) -> None:
        """Wait for running jobs, then drop the step's rows and the sequences that it created. Controls stay applied."""

    def sequence_length(self, sequence_id: int) -> int:
        """Return the number of committed tokens. This and the next methods raise KeyError for an unknown id."""

    def least_length(self, sequence_id: int) -> int:
        """Return the fewest tokens to which a sequence can be cut: 0 if no layer is recurrent.

        The number is more than the sequence's length if its state is spoilt.
        """

    def block_table(self, sequence_id: int) -> list[int]:
        """Return a sequence's block ids in order, including blocks of the open step's rows."""

    def sequence_ids(self) -> list[int]:
        """Return the ids of all sequences, ascending."""

    def incoming_ids(self) -> list[int]:
        """Return the ids of the sequences that prefill workers store into, ascending."""

    def read_tokens(self, sequence_id: int, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return cached keys [length, num_kv_heads, Dk] and values [length, num_kv_heads, Dv] as float32, for tests.

        Raise ValueError while a step is open.
        """

    def export(self, sequence_id: int, start: int = 0, num_tokens: int | None = None) -> npt.NDArray[np.uint8]:
        """Return committed tokens of a sequence from ``start`` on as uint8 [bytes], which ``import_`` takes.

        ``num_tokens``: None for all that follow. For each layer and each token come keys [num_kv_heads, Dk], then
        values [num_kv_heads, Dv], as the stored bits of the KV dtype. They do not depend on block size and instruction
        set. In int8 and int4 a head's codes come before its scales. int4 has two codes in a byte, the lower dim in the
        low bits. int8 has one float32 scale; int4 has a bfloat16 scale and a bfloat16 zero for every 64 dims. Raise
        ValueError for tokens that the sequence lacks, or while a step is open.
        """

    def import_(self, sequence_id: int, num_tokens: int, data: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Create a sequence of ``num_tokens`` committed tokens from ``data``, bit for bit the one that was exported.

        The exporting worker must have the same layers and KV dtype. With ``start`` > 0, a multiple of the block size,
        the tokens are added to a sequence that has exactly ``start`` tokens. ``data``: C-contiguous uint8 [bytes].
        Raise ValueError for an id that exists already, another ``start``, too few free blocks, another number of bytes,
        another kind of array, or while a step is open.
        """

    def export_blocks(self, sequence_id: int, start: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Return whole blocks as they lie in this cache, uint8 [blocks * block_bytes]: for each layer, for each block.

        Only workers with the same layers, KV dtype, block size and instruction set can import them. States are not
        included. Raise ValueError for tokens that the sequence lacks or that are no whole blocks, or while a step is
        open.
        """

    def import_blocks(self, sequence_id: int, num_tokens: int, data: npt.NDArray[np.uint8], start: int = 0) -> None:
        """Import whole blocks from ``export_blocks``, as ``import_`` does. Then ``import_`` must set any state."""

    def read_blocks(self, sequence_id: int, start: int, fd: int, pieces: list[tuple[int, int, bytes]]) -> list[bytes]:
        """Import blocks from consecutive ``pieces`` of the open file ``fd``; return each piece's checksum.

        A piece is (number of tokens, offset in the file, seed of its ``checksum``). Each thread of this worker reads
        one piece at a time, straight into the cache.

        Raises:
            ValueError: as for ``import_blocks``; then nothing has changed. Or the file ends too early.
            OSError: a piece cannot be read. Then, and if the file ends too early, the sequence has all these tokens,
                with wrong content.
        """

    def commit_ahead(self, least: int = 0) -> None:
        """Commit memory for free blocks while no step is open. Call this on the thread that takes the steps.

        It commits the largest of: ``least`` blocks, one per sequence of the last step, half of the blocks ever used.
        """

    def check_store(self, job_id: int, layer: int, start: int, num_rows: int) -> None:
        """Raise KeyError for an unknown job, and ValueError for rows that the job does not expect.

        Any thread may call this, ``store``, ``store_state`` and ``read_prefix`` while another takes steps.
        """

    def store(self, job_id: int, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
        """Store rows of an incoming sequence from token ``start`` on, in any order and each row once.

        ``k``: [num_rows, num_kv_heads, key_head_dim]; ``v``: [num_rows, num_kv_heads, stored_value_dim], in the
        model's dtype. Raise errors as ``check_store`` does, and ValueError for other arrays. KeyError may also come
        midway, if a control releases the sequence meanwhile.
        """

    def store_state(self, job_id: int, layer: int, data: npt.NDArray[np.uint8]) -> None:
        """Store the state of an incoming sequence after all its tokens, in one layer.

        ``data``: the bytes that ``export`` returns for that layer, uint8 of any shape. Raise errors as ``check_store``
        does, and ValueError for another number of bytes.
        """

    def read_prefix(self, job_id: int, layer: int, start: int, num_rows: int) -> npt.NDArray[np.uint8]:
        """Return tokens of the prefix from which an incoming sequence was forked: uint8 [num_rows, bytes].

        Each row has a token's keys, then its values, as ``export`` returns them for a layer. Raise KeyError for an
        unknown job, also midway, and ValueError for rows that are not in the prefix.
        """

    def statistics(self) -> dict[str, int]:
        """Return counts of the cache by name.

        ``blocks_used``, ``blocks_free``, ``blocks_shared`` (held by several sequences), ``sequences``, ``incoming``
        (sequences whose rows have not all arrived), ``tokens`` (committed; a shared token counts once per sequence),
        ``bytes_read`` (keys and values, in all steps) and ``bytes_committed`` (memory of all blocks
        that were ever used or are committed ahead).
        """

    def close(self) -> None:
        """Wait for running jobs and free everything; may be called twice."""
