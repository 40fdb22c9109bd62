"""Settings: each wrong one gives one clear line with its name, and each right form is read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fastdecode.api import engine_settings, worker_checks
from fastdecode.api.config import EngineConfig
from fastdecode.api.settings import WorkerSpec, parse_bytes
from fastdecode.core.errors import CapacityError, ConfigError
from fastdecode.core.machine import total_memory_bytes
from fastdecode.core.types import RWorkerInfo
from fastdecode.engine.compose import setup as engine_setup
from fastdecode.engine.compose.backends import check_room, kv_cache_bytes
from fastdecode.engine.compose.setup import scratch_tokens
from fastdecode.kinds import Dense
from fastdecode.kinds.layout import KVLayout

BAD: list[tuple[str, Any]] = [
    ("dtype", "int3"),
    ("dtype", ""),
    ("kv_cache_dtype", "fp8"),
    ("dtype", "int8"),
    ("load_format", "gguf"),
    ("device", "tpu"),
    ("schedule", "random"),
    ("kv_load_limit", 0),
    ("micro_batch_interval", 1.5),
    ("tbt_target", -1.0),
    ("block_size", 0),
    ("block_size", 33),
    ("block_size", -32),
    ("max_num_seqs", 0),
    ("max_num_seqs", -1),
    ("max_num_seqs", 2.5),
    ("max_num_seqs", True),
    ("max_num_seqs", "8"),
    ("max_num_batched_tokens", 0),
    ("max_num_batched_tokens", 255),
    ("max_model_len", 0),
    ("num_mini_batches", 0),
    ("num_mini_batches", "auto"),
    ("r_threads", 0),
    ("s_threads", -2),
    ("kv_cache_memory", "lots"),
    ("kv_cache_memory", "0"),
    ("kv_cache_memory", "-4GiB"),
    ("kv_cache_memory", "4XB"),
    ("kv_cache_memory", 0),
    ("kv_cache_memory", 1),
    ("kv_cache_memory", "999"),
    ("profile", "no.json"),
    ("security", "none"),
    ("uniform_arithmetic", "sse"),
    ("kv_cache_memory", "99999TiB"),
    ("prefill_scratch", ""),
    ("prefill_scratch", "99999TiB"),
    ("r_workers", ""),
    ("r_workers", "join:0"),
    ("r_workers", "join:2"),
    ("r_workers", "inproc:0"),
    ("r_workers", "inproc:two"),
    ("r_workers", "inproc:1025"),
    ("r_workers", "spawn:0"),
    ("r_workers", "spawn:100000"),
    ("r_workers", "spawn"),
    ("r_workers", "127.0.0.1"),
    ("r_workers", "127.0.0.1:0"),
    ("r_workers", "127.0.0.1:5580,127.0.0.1:5580"),
    ("r_workers", "127.0.0.1:99999"),
    ("r_workers", "127.0.0.1:5580,"),
    ("r_workers", "mpi:2"),
    ("r_workers", "nonsense"),
    ("prefill_workers", "mpi"),
    ("prefill_workers", "mpi:0"),
    ("prefill_workers", "spawn"),
    ("prefill_workers", "spawn:1025"),
    ("prefill_workers", "127.0.0.1:1,127.0.0.1:1"),
    ("s_cores", "a-b"),
    ("s_cores", ""),
    ("s_cores", "3-1"),
    ("s_cores", "100000"),
    ("r_cores", "0,,1"),
    ("r_cores", "0-99999"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(name) and "\n" not in message
    assert str(value) in message


@pytest.mark.parametrize("name", ["kv_cache_memory", "r_threads", "r_cores", "key_file"])
def test_what_r_workers_of_an_mpi_job_have_themselves(name: str) -> None:
    assert EngineConfig(r_workers="mpi").r_worker_spec == WorkerSpec("mpi", 0)
    with pytest.raises(ConfigError, match=f"^{name}"):
        EngineConfig(r_workers="mpi", **{name: 1 if name == "r_threads" else "1"})


def test_the_defaults_are_the_contracts() -> None:
    config = EngineConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.seed) == (256, 2048, 32, 0)
    assert (config.dtype, config.kv_cache_dtype, config.device, config.load_format) == ("auto", "auto", "auto", "auto")
    assert (config.num_r_workers, config.num_mini_batches, config.r_workers) == (1, None, "inproc")
    assert not config.separate_cores


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"block_size": 256, "dtype": "bfloat16", "kv_cache_dtype": "float16", "load_format": "dummy", "device": "cpu"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_memory": "64MiB", "prefill_scratch": 1 << 20, "hf_overrides": {"num_hidden_layers": 2}},
    ],
)
def test_good_values_are_taken(settings: dict[str, Any]) -> None:
    config = EngineConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(("spec", "count"), [("inproc", 1), ("inproc:1", 1), ("inproc:12", 12)])
def test_inproc_workers(spec: str, count: int) -> None:
    config = EngineConfig(r_workers=spec, kv_cache_memory="1MiB")
    assert (config.num_r_workers, kv_cache_bytes(config)) == (count, 1 << 20)


@pytest.mark.parametrize("spec", ["127.0.0.1:5580", "localhost:5580,127.0.0.1:5581"])
def test_listening_workers_have_their_own_settings(spec: str) -> None:
    config = EngineConfig(r_workers=spec)
    assert config.r_worker_spec == WorkerSpec("tcp", 1 + spec.count(","), tuple(spec.split(",")))
    for settings in ({"kv_cache_memory": "1GiB"}, {"r_threads": 1}, {"r_cores": "0"}):
        with pytest.raises(ConfigError, match=r"to `fastdecode r-worker`"):
            EngineConfig(r_workers=spec, **settings)


def test_beyond_this_machine_takes_a_key() -> None:
    for spec in ("node1:5580", "127.0.0.1:5580,10.0.0.2:5580", "0.0.0.0:5580"):
        with pytest.raises(ConfigError, match=r"r_workers: \S+ is reached over a network, which takes a --key-file"):
            EngineConfig(r_workers=spec)
        assert EngineConfig(r_workers=spec, key_file="key").r_worker_spec.addresses == tuple(spec.split(","))
    with pytest.raises(ConfigError, match="key_file is for R-workers at host:port"):
        EngineConfig(key_file="key")


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_settings, worker_checks):
        monkeypatch.setattr(module, "usable_cores", lambda: [0, 1, 2, 5])
    config = EngineConfig(s_cores="5,0-1,0", r_cores="2")
    assert (config.s_core_list, config.r_core_list, config.separate_cores) == ([0, 1, 5], [2], True)
    assert not EngineConfig(s_cores="0-1", r_cores="1-2").separate_cores
    assert EngineConfig(s_cores="0").r_core_list is None
    spawned = EngineConfig(r_workers="spawn:2", r_cores="1-2")
    assert (spawned.s_core_list, spawned.separate_cores) == ([0, 5], True)
    assert EngineConfig(r_workers="spawn:2", r_cores="0-2,5").s_core_list is None
    assert EngineConfig(r_workers="spawn:2", r_cores="1", s_cores="1").s_core_list == [1]
    with pytest.raises(ConfigError, match=r"s_cores.*\[3\].*\[0, 1, 2, 5\]"):
        EngineConfig(s_cores="2-3")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4294967296, 1 << 32),
        ("4294967296", 1 << 32),
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("4Gi", 4 << 30),
        ("512MB", 512 * 10**6),
        ("1.5G", 1_500_000_000),
        ("0.5KiB", 512),
        ("2T", 2 * 10**12),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("7k", 7000),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", 0, "0.0GiB", "1e9", "4 GiB more", "4iB", "nan", "4,5G", "0.1B"])
def test_parse_bytes_refuses(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"^prefill_scratch must be a positive number of bytes") as caught:
        parse_bytes("prefill_scratch", text)
    assert repr(text) in str(caught.value)


def test_memory_up_to_the_machines() -> None:
    assert EngineConfig(kv_cache_memory=total_memory_bytes()).bytes_of("kv_cache_memory") == total_memory_bytes()
    assert EngineConfig().bytes_of("kv_cache_memory") is None
    with pytest.raises(ConfigError, match=r"kv_cache_memory: .* is more than this machine's .* GiB"):
        EngineConfig(kv_cache_memory=total_memory_bytes() + 1)


# What the model's layout makes of them.

LAYOUT = KVLayout((Dense(4, 2, 16, 8, 0.25), Dense(4, 1, 16, 16, 0.25)), "float32", "bfloat16")
"""The layout has 48 + 32 elements per token: 320 bytes in the model's dtype, 160 in the cache's."""


def worker(num_blocks: int, block_size: int = 32) -> RWorkerInfo:
    return RWorkerInfo("r", num_blocks, block_size, 1, "scalar", False)


def test_scratch_tokens_are_as_the_cache_stores_them_but_on_a_gpu() -> None:
    assert LAYOUT.kv_bytes_per_token == 160
    assert replace(LAYOUT, kv_dtype="int8").kv_bytes_per_token == 80 + 3 * 2 * 4
    assert replace(LAYOUT, kv_dtype="int4").kv_bytes_per_token == 40 + 3 * (2 * 4 + 4)
    assert scratch_tokens(EngineConfig(prefill_scratch=1600), LAYOUT, 0) == 10
    assert scratch_tokens(EngineConfig(prefill_scratch=1599), LAYOUT, 0) == 9
    assert scratch_tokens(EngineConfig(), LAYOUT, 25600) == 20
    assert scratch_tokens(EngineConfig(), LAYOUT, 25600, on_gpu=True) == 10


@pytest.mark.parametrize(
    ("settings", "kv_dtype", "on_gpu", "own_cores", "expected"),
    [
        ({}, "bfloat16", False, False, 0),
        ({}, "bfloat16", False, True, 20),
        ({}, "bfloat16", True, False, 10),
        ({}, "int4", False, False, 0),
        ({"prefill_scratch": 1600}, "bfloat16", False, False, 10),
    ],
    ids=["shared cores", "own cores", "GPU", "quantised", "as told"],
)
def test_prompts_attend_on_r_workers_that_share_the_cores(
    settings: dict[str, Any], kv_dtype: str, on_gpu: bool, own_cores: bool, expected: int
) -> None:
    layout = replace(LAYOUT, kv_dtype=kv_dtype)
    model = SimpleNamespace(layout=layout, on_gpu=on_gpu, free_memory_bytes=lambda: 25600)
    workers = [replace(worker(8), own_cores=own_cores)]
    assert engine_setup.prompt_tokens(EngineConfig(**settings), model, workers) == expected  # type: ignore[arg-type]


def test_default_memory_is_shared_among_the_workers() -> None:
    one, four = (kv_cache_bytes(EngineConfig(r_workers=spec)) for spec in ("inproc", "inproc:4"))
    assert 0 < one < total_memory_bytes() * 0.4 + 1
    assert one / four == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("blocks", [[4], [4, 9], [100, 4]])
def test_there_is_room_for_one_longest_sequence(blocks: list[int]) -> None:
    check_room(EngineConfig(), 128, LAYOUT, [worker(count) for count in blocks])


@pytest.mark.parametrize(
    ("range_tokens", "blocks", "longest"),
    [(None, [16, 16, 20], 1664), (512, [20, 35, 16], 2052), (1024, [32, 5], 1124)],
)
def test_there_is_room_for_the_ranges_of_a_longest_sequence(
    range_tokens: int | None, blocks: list[int], longest: int
) -> None:
    """The longest sequence of whole ranges (16 or 32 blocks of 32 tokens) and one more for the rest fits."""
    config, workers = EngineConfig(kv_shard_tokens=range_tokens), [worker(count) for count in blocks]
    check_room(config, longest, LAYOUT, workers)
    held = {None: 1664, 512: 2176, 1024: 1184}[range_tokens]
    check_room(config, held, LAYOUT, workers)
    with pytest.raises(CapacityError, match=f"all {len(blocks)} together too little for its ranges"):
        check_room(config, held + 1, LAYOUT, workers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_shard_tokens": 3000}, "512 times a power of two, not 3000; nearest are 2048 and 4096"),
        ({"kv_shard_tokens": 100}, "not 100; nearest are 512 and 1024"),
        ({"kv_shard_tokens": 512, "schedule": "hybrid"}, "schedule hybrid imitates .* in one piece"),
    ],
)  # fmt: skip
def test_ranges_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize("blocks", [[4], [4, 4], [3, 4]])
def test_too_little_room_says_how_much_it_takes(blocks: list[int]) -> None:
    """The message names the memory, or the length, with which the longest sequence fits on the smallest worker."""
    with pytest.raises(CapacityError) as caught:
        check_room(EngineConfig(), 129, LAYOUT, [worker(count) for count in blocks])
    message = str(caught.value)
    longest = f"--max-model-len {32 * min(blocks)}"
    assert "max_model_len 129" in message and "--kv-cache-memory 1MiB" in message and longest in message
    assert "\n" not in message


def test_what_it_says_is_enough() -> None:
    """The memory named in the message (6.1 MiB) holds 40,000 tokens."""
    with pytest.raises(CapacityError, match="--kv-cache-memory 7MiB"):
        check_room(EngineConfig(), 40_000, LAYOUT, [worker(100)])
    check_room(EngineConfig(), 40_000, LAYOUT, [worker((7 << 20) // (160 * 32))])
