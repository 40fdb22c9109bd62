"""`make wheels`: the wheel for R-workers that is made from a built one, and what is refused."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

import pytest
from helpers.forks import true_starts
from helpers.processes import PATIENCE_SECONDS

from fastdecode import _rworker
from fastdecode.cli.main import WITHOUT_S_PART

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
from r_worker_wheel import DEPENDENCIES, r_worker_files, record  # noqa: E402
from wheels import unversioned  # noqa: E402

PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from fastdecode.cli.main import main; sys.exit(main())"


def whole_wheel() -> dict[str, bytes]:
    """Return the files of the wheel that `pip wheel .` makes here, without the demo model's weights."""
    files = {}
    for room in ("fastdecode", "sworker", "cluster", "perfmodel"):
        prefix = "" if room == "fastdecode" else "fastdecode/"
        files |= {f"{prefix}{path.relative_to(ROOT)}": path.read_bytes() for path in (ROOT / room).rglob("*.py")}
    files["fastdecode/demo_model/model.safetensors"] = b"weights"
    extension = Path(_rworker.__file__)
    files[f"fastdecode/{extension.name}"] = extension.read_bytes()
    files[f"fastdecode/{extension.name.replace('_rworker', '_sworker')}"] = b"extension"
    installed = importlib.metadata.distribution("fastdecode")
    for name in ("METADATA", "WHEEL", "entry_points.txt", "RECORD"):
        files[f"fastdecode-{installed.version}.dist-info/{name}"] = (installed.read_text(name) or "").encode()
    return files


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return r_worker_files(whole_wheel())


def test_the_wheel_of_r_workers_is_another_distribution_without_the_s_part(files: dict[str, bytes]) -> None:
    version = importlib.metadata.version("fastdecode")
    (metadata,) = (name for name in files if name.endswith("METADATA"))
    assert metadata == f"fastdecode_r_worker-{version}.dist-info/METADATA"
    assert not [name for name in files if "sworker" in name or "demo_model" in name or name.startswith("fastdecode-")]
    said = Parser().parsestr(files[metadata].decode())
    assert (said["Name"], said["Version"]) == ("fastdecode-r-worker", version)
    plain = [each for each in said.get_all("Requires-Dist") or [] if "extra ==" not in each]
    assert tuple(sorted(re.match(r"[\w-]+", each)[0] for each in plain)) == DEPENDENCIES  # type: ignore[index]
    whole = importlib.metadata.requires("fastdecode") or []
    assert {each.replace(" ", "") for each in plain} <= {each.replace(" ", "") for each in whole}
    own = metadata.replace("METADATA", "RECORD")
    assert files[own].decode() == record({name: content for name, content in files.items() if name != own}, own)


def test_a_symbol_that_the_oldest_c_library_lacks_is_found(tmp_path: Path) -> None:
    """The linker takes such a symbol as one of any library, without a version."""
    assert unversioned(Path(_rworker.__file__)) == []
    library = tmp_path / "library.so"
    code = 'extern "C" int of_a_later_glibc(); int called() { return of_a_later_glibc(); }'
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=code, text=True, check=True)
    assert unversioned(library) == ["of_a_later_glibc"]


@pytest.fixture(scope="module")
def site(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with that wheel's files and the packages that it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for package in DEPENDENCIES:
        installed = importlib.metadata.distribution(package)
        for top in {file.parts[0] for file in installed.files or () if ".." not in file.parts}:
            (folder / top).symlink_to(Path(str(installed.locate_file(top))).resolve())
    return folder


@contextmanager
def started(site: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    with true_starts():
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, str(site), *words],
            cwd=site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_commands_of_the_s_part_say_where_they_are(site: Path) -> None:
    with started(site, "serve") as process:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 2 and "serve is not in fastdecode-r-worker" in said
    with started(site, "--help") as process:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert {*re.findall(r"^ {4}([\w-]+)", said, re.MULTILINE)} == {*WITHOUT_S_PART}


@pytest.mark.slow
def test_an_r_worker_serves_from_that_wheel_and_four_packages(site: Path) -> None:
    """`doctor`, from the same wheel, lets it attend."""
    with started(site, "r-worker", "--listen", "tcp://127.0.0.1:0", "--kv-cache-memory", "64MiB") as r_worker:
        assert r_worker.stdout
        line = r_worker.stdout.readline()
        address = re.search(r"tcp://(\S+:\d+)", line)
        assert address, line
        with started(site, "doctor", "--r-workers", address[1]) as doctor:
            said, _ = doctor.communicate(timeout=PATIENCE_SECONDS)
    assert re.search(rf"R-worker {re.escape(address[1])}: \d+ thread.*reads", said), said
