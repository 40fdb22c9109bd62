"""``bench attention``: its rows, formats, arithmetic and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.core.types import READ_AHEAD
from fastdecode.engine.compose.backends import tuning
from fastdecode.perfmodel.lab.measure.attention_bench import Roofline
from fastdecode.perfmodel.lab.measure.attention_cache import FilledCache, exact_attention, relative_error
from fastdecode.perfmodel.lab.measure.attention_shape import AttentionShape, ContextLen, sweep
from fastdecode.perfmodel.lab.measure.plots import roofline_lines

pytestmark = pytest.mark.slow

SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--context-len", "70", "--batch-size", "3"]
SMALL += ["--cache-bytes", "4MiB", "--repeats", "9"]

CONTRACT = ["isa", "kv_cache_dtype", "num_heads", "num_kv_heads", "head_dim", "context_len", "batch_size", "q_len"]
CONTRACT += ["threads", "seconds_p50", "kv_gb_per_s", "read_peak_gb_per_s", "scattered_read_gb_per_s"]
CONTRACT += [
    "mac_peak_g_per_s",
    "fraction_of_read_peak",
    "fraction_of_scattered",
    "fraction_of_roofline",
    "max_relative_error",
]


def bench(*more: str) -> list[str]:
    """Return the arguments of a benchmark small enough for a test; later flags win."""
    return ["bench", "attention", *SMALL, *more]


def rows_of(capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    """Return what ``-o json`` prints."""
    assert main(bench("-o", "json", *more)) == 0
    return json.loads(capsys.readouterr().out)


def shape(**changed: Any) -> AttentionShape:
    """Return the small shape with some changed fields."""
    fields: dict[str, Any] = {"isa": "scalar", "kv_cache_dtype": "float32", "num_heads": 4, "num_kv_heads": 2}
    fields |= {"head_dim": 16, "context_len": ContextLen(70, 70), "batch_size": 3, "q_len": 1, "threads": 1}
    return AttentionShape(**{**fields, **changed})


def test_latent_rows_are_read_once_for_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Latent rows take half the bytes of keys and values apart, for the same products, and agree with the oracle."""
    apart, latent = rows_of(capsys, "--latent-dim", "0,16", "--num-kv-heads", "1")
    assert latent["latent_dim"] == 16 and latent["max_relative_error"] < 1e-2
    assert 2 * latent["kv_bytes"] == apart["kv_bytes"]
    for row in (apart, latent):
        multiply_adds = row["mac_peak_g_per_s"] * row["kv_bytes"] / row["arithmetic_gb_per_s"]
        assert multiply_adds == pytest.approx(3 * 70 * 4 * (16 + 16))


def test_an_index_scans_its_keys_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """An index scans keys of 16 bits in any cache, with one product per element and head; its best scores are right."""
    asked = "--num-kv-heads", "1", "--kv-cache-dtype", "float32,int8", "--context-len", "70,600", "--q-len", "2"
    rows = rows_of(capsys, *asked, "--index-picks", "50,90")
    assert [row["index_picks"] for row in rows] == [50, 90] * 4
    for row in rows:
        assert row["max_relative_error"] < 1e-5
        assert row["kv_bytes"] == 3 * row["context_len"] * 16 * (4 if row["kv_cache_dtype"] == "float32" else 2)
        multiply_adds = row["mac_peak_g_per_s"] * row["kv_bytes"] / row["arithmetic_gb_per_s"]
        assert multiply_adds == pytest.approx(3 * row["context_len"] * 4 * 16 * 2)


def test_json_has_the_contracts_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """The keys have the contract's order, and the figures agree with each other."""
    (row,) = rows_of(capsys)
    assert list(row)[: len(CONTRACT)] == CONTRACT
    assert row["isa"] == tuning().isa
    assert (row["kv_cache_dtype"], row["context_len"], row["batch_size"], row["threads"]) == ("bfloat16", 70, 3, 1)
    assert row["kv_bytes"] == 3 * 70 * 2 * 2 * 16 * 2
    assert row["kv_gb_per_s"] == pytest.approx(row["kv_bytes"] / row["seconds_p50"] / 1e9)
    assert row["fraction_of_read_peak"] == pytest.approx(row["kv_gb_per_s"] / row["read_peak_gb_per_s"])
    # An element has two bytes and two query heads.
    ceiling = min(row["scattered_read_gb_per_s"], row["mac_peak_g_per_s"] * 2 / 2)
    assert row["fraction_of_roofline"] == pytest.approx(row["kv_gb_per_s"] / ceiling)
    assert row["seconds_p10"] <= row["seconds_p50"] <= row["seconds_p90"]
    assert 0 < row["max_relative_error"] <= 5e-3


def test_a_row_says_which_limit_binds_and_what_bfloat16_does(capsys: pytest.CaptureFixture[str]) -> None:
    """A row has both limits and the smaller one's name, and tokens per second relative to bfloat16."""
    for row in rows_of(capsys, "--kv-cache-dtype", "bfloat16,int8", "--q-len", "1,60"):
        bound = row["arithmetic_gb_per_s"]
        assert row["roofline_gb_per_s"] == pytest.approx(min(row["scattered_read_gb_per_s"], bound))
        assert row["limit"] == ("reads" if row["scattered_read_gb_per_s"] <= bound else "arithmetic")
        assert row["tokens_over_bfloat16"] > 0
        assert (row["tokens_over_bfloat16"] == 1.0) == (row["kv_cache_dtype"] == "bfloat16")


def test_lists_sweep_and_every_dtype_and_isa_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Lists give the cross product, also with q_len above 1, and errors stay within the dtype's rounding."""
    isas = _rworker.supported_isas()
    dtypes = ["float32", "float16", "bfloat16"]
    rows = rows_of(capsys, "--isa", ",".join(isas), "--kv-cache-dtype", ",".join(dtypes), "--q-len", "1,3")
    assert {(row["isa"], row["kv_cache_dtype"], row["q_len"]) for row in rows} == {
        (isa, dtype, q_len) for isa in isas for dtype in dtypes for q_len in (1, 3)
    }
    assert len(rows) == len(isas) * 6
    assert all(row["max_relative_error"] <= (1e-5 if row["kv_cache_dtype"] == "float32" else 5e-3) for row in rows)


def test_shared_prefix_is_needed_once_and_drawn_lengths_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """64 of 70 shared tokens lie in a shared block, and lengths of a range come from the seed."""
    prefix = ["--shared-prefix-len", "70", "--context-len", "90"]
    (row,) = rows_of(capsys, *prefix)
    assert row["kv_bytes"] == (64 + 3 * 26) * 128
    assert row["max_relative_error"] <= 5e-3
    mixed = ["--context-len", "1-300", "--batch-size", "auto", "--cache-bytes", "1MiB"]
    first, again, other = (rows_of(capsys, *mixed, "--seed", seed)[0] for seed in ("1", "1", "2"))
    assert first["context_len"] == "1-300" and first["kv_bytes"] >= 1 << 20
    assert first["kv_bytes"] == again["kv_bytes"] != other["kv_bytes"]


def test_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown is the default; CSV and JSON lines equal the file's, and the plot is a PNG."""
    path, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    assert main(bench("--context-len", "40,70", "--output-json", str(path), "--plot", str(plot))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "of limit" in lines[0] and len({line.count("|") for line in lines}) == 1
    rows = json.loads(path.read_text())
    assert [row["context_len"] for row in rows] == [40, 70]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(bench("-o", "csv")) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert list(row) == list(rows[0]) and float(row["kv_gb_per_s"]) > 0
    assert main(bench("-o", "jsonl", "--context-len", "40,70")) == 0
    assert [json.loads(line)["context_len"] for line in capsys.readouterr().out.splitlines()] == [40, 70]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--isa", "mmx"], 2, "isa must be one of auto, scalar"),
        (["--kv-cache-dtype", "fp8"], 2, "kv_cache_dtype must be one of float32, float16, bfloat16"),
        (["--num-heads", "5"], 2, "num_heads (5) must be a multiple of num_kv_heads (2)"),
        (["--num-heads", "4,x"], 2, "num_heads must be a whole number"),
        (["--head-dim", "0"], 2, "head_dim must be at least 1"),
        (["--head-dim", "1089"], 2, "head_dim must be at most 1088"),
        (["--context-len", "9-1"], 2, "context_len must be a number of tokens, or LOW-HIGH"),
        (["--context-len", "2", "--q-len", "3"], 2, "must hold q_len (3) new tokens"),
        (["--shared-prefix-len", "70"], 2, "after shared_prefix_len (70)"),
        (["--latent-dim", "17"], 2, "latent_dim must be at most head_dim (16), not 17"),
        (["--index-picks", "8"], 2, "index_picks 8: an index has num_kv_heads 1 and latent_dim 0"),
        (["--batch-size", "0"], 2, "batch_size must be 1 to"),
        (["--threads", "4096"], 2, "threads is 4096, and this process may use"),
        (["--repeats", "3"], 2, "repeats must be at least 9"),
        (["--cache-bytes", "much"], 2, "cache_bytes must be a positive number of bytes"),
        (["--output-json", "/no/such/folder/x.json"], 2, "no such folder"),
        (["--batch-size", "999999999"], 2, "batch_size must be 1 to"),
        (["--batch-size", "1000000", "--head-dim", "512"], 1, "give a smaller batch_size or cache_bytes"),
    ],
)
def test_refusals(arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each refusal is one clear line, before anything is measured."""
    assert main(bench(*arguments)) == status
    captured = capfd.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_environments_isa_is_used_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FASTDECODE_ISA decides what "auto" means."""
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    assert rows_of(capsys)[0]["isa"] == "scalar"
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    assert main(bench()) == 2
    assert "FASTDECODE_ISA: this machine supports scalar" in capsys.readouterr().err


def test_roofline_arithmetic() -> None:
    """At 20 GB/s and 50 G multiply-adds a second bfloat16 allows 25 GB/s for 4 query heads and 12.5 GB/s for 8."""
    tokens, elements = 1000, 2 * 8 * 128
    groups = {group: Roofline(tokens * elements * 2, tokens * elements * group, 20.0, 50.0) for group in (1, 4, 8)}
    assert [roofline.arithmetic_gb_per_s for roofline in groups.values()] == pytest.approx([100.0, 25.0, 12.5])
    assert [roofline.gb_per_s for roofline in groups.values()] == pytest.approx([20.0, 20.0, 12.5])
    assert [roofline.limit for roofline in groups.values()] == ["reads", "reads", "arithmetic"]


def test_sizes_are_chosen_to_fill_the_cache() -> None:
    """At 16 KiB a token and 1,024 tokens a sequence, 512 MiB are 32 sequences; a prefix's tokens count once."""
    wide = shape(
        num_heads=32, num_kv_heads=32, head_dim=128, context_len=ContextLen.parse("1024"), kv_cache_dtype="bfloat16"
    )
    lengths = AttentionShape(**{**vars(wide), "batch_size": None}).lengths(512 << 20, 0)
    assert lengths.tolist() == [1024] * 32
    shared = shape(context_len=ContextLen.parse("1000-2000"), shared_prefix_len=640, batch_size=10)
    drawn = shared.lengths(1, seed=3)
    assert len(drawn) == 10 and drawn.min() >= 1000 and drawn.max() <= 2000 and len(set(drawn.tolist())) > 1
    assert shared.tokens_needed(drawn) == 640 + sum(int(length) - 640 for length in drawn)


def test_sweep_is_the_cross_product_with_threads_outermost() -> None:
    """The peaks are measured once per instruction set and number of threads."""
    one = {name: [value] for name, value in vars(shape()).items()}
    shapes = sweep(one | {"threads": [1, 2], "num_heads": [2, 4, 8]})
    assert [(each.threads, each.num_heads) for each in shapes] == [(t, h) for t in (1, 2) for h in (2, 4, 8)]
    with pytest.raises(ConfigError, match="multiple"):
        sweep(one | {"num_heads": [2, 3]})


def test_a_call_leaves_the_cache_as_it_was() -> None:
    """Every sequence has its own blocks except for the prefix's, and they do not lie in order."""
    many = shape(shared_prefix_len=64, context_len=ContextLen(300, 300), batch_size=8)
    cache = FilledCache(many, many.lengths(1, 0), 0)
    before = [cache.worker.block_table(i) for i in range(8)]
    planned, seconds = cache.call()
    assert planned > 0 and seconds > 0
    assert [cache.worker.block_table(i) for i in range(8)] == before
    assert len({table[0] for table in before}) == 1
    assert len({block for table in before for block in table[1:]}) == 8 * 4
    assert any(np.diff(table[1:]).min() < 0 or len(set(np.diff(table[1:]))) > 1 for table in before)
    assert cache.commit_and_check() < 1e-5
    assert cache.worker.sequence_length(7) == 300
    cache.close()


def test_oracle_by_hand() -> None:
    """Equal scores average the values, and a query sees its own token and those before it."""
    q, k = np.zeros((2, 2, 1), np.float32), np.zeros((3, 1, 1), np.float32)
    v = np.array([3.0, 6.0, 12.0], np.float32).reshape(3, 1, 1)
    np.testing.assert_allclose(exact_attention(q, k, v, 1.0), [[[4.5], [4.5]], [[7.0], [7.0]]])
    assert relative_error(np.array([[3.0, 4.5]]), np.array([[3.0, 4.0]])) == pytest.approx(0.1)


def test_plot_has_a_line_per_group() -> None:
    """The label names what differs between rows besides the group, and a range stands at its middle."""
    base = {"isa": "avx2", "kv_cache_dtype": "bfloat16", "head_dim": 64, "threads": 1, "q_len": 1}
    base |= {"shared_prefix_len": 0, "num_kv_heads": 8}
    rows = [
        base | {"num_heads": heads, "context_len": context, "threads": threads, "fraction_of_roofline": heads / 100}
        for heads in (8, 32)
        for context in (64, "1-127")
        for threads in (1, 2)
    ]
    lines = roofline_lines(rows)
    assert list(lines) == [f"group {g}, {t} thread(s)" for g in (1, 4) for t in (1, 2)]
    assert lines["group 4, 1 thread(s)"] == {64.0: 0.32}


def test_peaks() -> None:
    """Peaks are positive, and unknown ones are refused by name."""
    peaks = _rworker.Peaks(num_threads=1, num_bytes=1 << 22, isa="scalar")
    assert peaks.read() > 0.1
    assert all(peaks.multiply_add(kv_dtype=dtype) > 0.01 for dtype in ("float32", "bfloat16", "int8"))
    for way in (None, *READ_AHEAD):
        assert all(peaks.read_scattered(piece_bytes=size, read_ahead=way) > 0.1 for size in (64, 3 << 10, 1 << 19))
    with pytest.raises(ValueError, match="num_bytes is 1000; it must be at least 1 MB per thread"):
        _rworker.Peaks(num_threads=1, num_bytes=1000)
    with pytest.raises(ValueError, match="num_threads is 0"):
        _rworker.Peaks(num_threads=0, num_bytes=1 << 22)
    with pytest.raises(ValueError, match="isa is 'mmx'"):
        _rworker.Peaks(num_threads=1, num_bytes=1 << 22, isa="mmx")
    with pytest.raises(ValueError, match="read_ahead is '8'; it must be run, run-l2 or pages"):
        peaks.read_scattered(piece_bytes=64, read_ahead="8")
