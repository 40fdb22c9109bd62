"""Files of parked chains: what is read is what was written, or is refused; `fastdecode cache` lists them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.cli.doctor_parking import check_parking
from fastdecode.cli.main import main
from fastdecode.cluster.r_worker.parking.chain_file import ChainReader, ChainWriter, Head
from fastdecode.cluster.r_worker.parking.directory import ParkDirectory
from fastdecode.core.errors import ChainError, ConfigError
from fastdecode.core.parked import Chain, ParkPlace

FINGERPRINT, OTHER = "ab" * 32, "cd" * 32


def _chain(first: int, num_blocks: int, block_size: int = 32) -> Chain:
    return Chain.of([bytes([first]) * 8 + index.to_bytes(8, "big") for index in range(num_blocks)], block_size)


def _write(directory: ParkDirectory, chain: Chain, fingerprint: str = FINGERPRINT, block_bytes: int = 96) -> Path:
    head = Head(fingerprint, 32, chain.num_blocks, block_bytes, "float32", "int8", "avx2")
    path = directory.path(fingerprint, chain.name)
    assert directory.make_room(head, path.name) is not None
    writer = ChainWriter(path, head, chain.marks)
    numbers = np.random.default_rng(chain.name[0])
    for number in range(head.num_pieces):
        writer.append(numbers.integers(0, 256, head.piece_bytes(number), np.uint8))
    assert not path.exists()  # The file appears only once it is whole.
    writer.finish()
    directory.add(path)
    return path


def _read(path: Path) -> tuple[tuple[bytes, ...], bytes]:
    with ChainReader(path) as reader:
        return reader.marks, b"".join(piece.tobytes() for piece in reader.pieces())


def _truncate(data: bytes, numbers: np.random.Generator, other: bytes) -> bytes:
    return data[: numbers.integers(0, len(data))]


def _flip(data: bytes, numbers: np.random.Generator, other: bytes) -> bytes:
    changed = bytearray(data)
    changed[numbers.integers(0, len(data))] ^= 1 << numbers.integers(0, 8)
    return bytes(changed)


def _zero(data: bytes, numbers: np.random.Generator, other: bytes) -> bytes:
    at = int(numbers.integers(0, len(data)))
    return data[:at] + bytes(len(data) - at)


def _cross(data: bytes, numbers: np.random.Generator, other: bytes) -> bytes:
    """Return ``data`` with the end of another chain of the same length, as if a disk wrote a block to a wrong place."""
    at = int(numbers.integers(1, len(data)))
    return data[:at] + other[at:]


def _repeat(data: bytes, numbers: np.random.Generator, other: bytes) -> bytes:
    at, count = numbers.integers(0, len(data)), numbers.integers(1, 100)
    return data[:at] + data[at - count if at > count else 0 : at] + data[at:] + b"x"


WRONGS: list[Callable[[bytes, np.random.Generator, bytes], bytes]] = [_truncate, _flip, _zero, _cross, _repeat]


def test_systems_that_take_no_advice_of_how_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has neither such advice nor fdatasync."""
    for name in ("fdatasync", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    chain = _chain(1, 3)
    assert _read(_write(ParkDirectory(ParkPlace(tmp_path, 1 << 20, 0.0)), chain))[0] == chain.marks
    assert [each.level for each in check_parking(str(tmp_path))] == ["ok"]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.thorough)])
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path: Path, count: int) -> None:
    directory = ParkDirectory(ParkPlace(tmp_path))
    path, other = _write(directory, _chain(1, 40)), _write(directory, _chain(2, 40))
    good, data, foreign = _read(path), path.read_bytes(), other.read_bytes()
    numbers = np.random.default_rng(0)
    assert good == _read(path) and len(good[1]) == 40 * 32 * 3
    for number in range(count):
        wrong = WRONGS[number % len(WRONGS)](data, numbers, foreign)
        path.write_bytes(wrong)
        if wrong == foreign:  # The file is whole but has another name inside, which readers check.
            with ChainReader(path) as reader:
                assert reader.name == other.name
        elif wrong != data:
            with pytest.raises(ChainError, match=path.name):
                _read(path)
    path.write_bytes(data)
    assert _read(path) == good


def test_a_folder_keeps_to_its_bytes_and_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    chains = [_chain(number, 16) for number in range(4)]
    size = Head(FINGERPRINT, 32, 16, 96, "float32", "int8", "avx2").file_bytes
    directory = ParkDirectory(ParkPlace(tmp_path, 3 * size))
    paths = [_write(directory, chain) for chain in chains[:3]]
    assert {path.stat().st_size for path in paths} == {size}
    directory.use(paths[0])
    for age, path in enumerate((paths[0], paths[2], paths[1])):
        os.utime(path, (1e9 - age, 1e9 - age))
    directory.close()
    directory = ParkDirectory(ParkPlace(tmp_path, 3 * size))
    assert [chain.marks for chain in directory.chains(FINGERPRINT)] == [chains[each].marks for each in (1, 2, 0)]
    assert list(directory.chains(OTHER)) == []
    paths.append(_write(directory, chains[3]))
    assert [path.exists() for path in paths] == [True, False, True, True] and directory.num_bytes == 3 * size
    assert directory.make_room(Head(FINGERPRINT, 32, 1 << 20, 96), "x") is None and directory.num_chains == 3
    directory.close()


def test_two_r_workers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = ParkDirectory(ParkPlace(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=r"park_dir: .* is another R-worker's"):
        ParkDirectory(ParkPlace(tmp_path / "a" / "b"))
    first.close()
    assert not (tmp_path / "a").exists(), "nothing was parked in what it had made"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.part").touch()
    ParkDirectory(ParkPlace(tmp_path / "a" / "b")).close()
    assert not (tmp_path / "a" / "b" / "x.part").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"park_dir: .*file: File exists"):
        ParkDirectory(ParkPlace(tmp_path / "file"))


def test_cache_lists_verifies_and_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ParkDirectory(ParkPlace(tmp_path))
    paths = [_write(directory, _chain(1, 5)), _write(directory, _chain(2, 17), OTHER)]
    os.utime(paths[0], (1, 1))
    assert main(["cache", "ls", str(tmp_path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["file"], row["tokens"], row["fingerprint"]) for row in rows] == [
        (paths[0].name, 160, FINGERPRINT), (paths[1].name, 544, OTHER),
    ]  # fmt: skip
    assert main(["cache", "verify", str(tmp_path)]) == 0
    paths[1].rename(wrong := tmp_path / paths[1].name.replace("cdcd", "cdce"))
    assert main(["cache", "verify", str(tmp_path), wrong.name]) == 1
    assert "this file belongs to another prefix" in capsys.readouterr().out
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert "another prefix" in capsys.readouterr().out
    assert main(["cache", "drop", str(tmp_path)]) == 2 and main(["cache", "drop", str(tmp_path), "x"]) == 2
    assert "has no file x" in capsys.readouterr().err
    assert main(["cache", "drop", str(tmp_path), "--unused", "1000"]) == 0
    assert not paths[0].exists() and wrong.exists()
    assert main(["cache", "drop", str(tmp_path), "--all"]) == 0 and not wrong.exists()
    assert main(["cache", "ls", str(tmp_path / "none")]) == 2
    directory.close()


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_marks_are_the_hashes_at_the_ends_of_pieces(block_size: int) -> None:
    hashes = [index.to_bytes(16, "big") for index in range(100)]
    for count in range(1, 100):
        ends = {*range(512, count * block_size + 1, 512), count * block_size}
        assert Chain.of(hashes[:count], block_size).marks == tuple(
            hashes[end // block_size - 1] for end in sorted(ends)
        )


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 31, 32, 33, 64, 100, 255])
def test_checksums_are_four_crc_32c(num_bytes: int) -> None:
    """The processor's instruction and the tables agree with a computation bit by bit."""
    numbers = np.random.default_rng(num_bytes)
    data, start = numbers.integers(0, 256, num_bytes, np.uint8), numbers.bytes(16)

    def crc(lane: int, text: bytes) -> int:
        for byte in text:
            lane ^= byte
            for _ in range(8):
                lane = lane >> 1 ^ (0x82F63B78 if lane & 1 else 0)
        return lane

    lanes = [int.from_bytes(start[at : at + 4], "little") for at in range(0, 16, 4)]
    for number in range(-(-num_bytes // 8)):
        word = data.tobytes()[8 * number : 8 * number + 8].ljust(8, b"\0")
        lanes[number % 4] = crc(lanes[number % 4], word)
    expected = b"".join(crc(lane, num_bytes.to_bytes(8, "little")).to_bytes(4, "little") for lane in lanes)
    assert _rworker.checksum(data, start) == _rworker.checksum(data, start, by_tables=True) == expected
