"""Calibration of this machine, and profiles in live runs and in validate, with real engines and R-workers.

Measurements are checked for their shape alone, since other processes may use this machine too. Arithmetic is checked
against seconds that were recorded once (recorded_profile.json).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from helpers import model_zoo, r_workers, sparse_zoo, tiny_hybrids

from fastdecode._rworker import supported_isas
from fastdecode.api.config import EngineConfig
from fastdecode.cli.main import main
from fastdecode.core.errors import ProfileError
from fastdecode.engine.compose.timed_steps import with_absorption
from fastdecode.engine.engine import LLMEngine
from fastdecode.perfmodel.calibration import Steadied
from fastdecode.perfmodel.deployment import Deployment, deployed_step_model, this_machine
from fastdecode.perfmodel.lab.cli.calibrate import summary_lines
from fastdecode.perfmodel.lab.measure.attention_rig import AttentionRig
from fastdecode.perfmodel.lab.measure.calibration_plan import CalibrationPlan
from fastdecode.perfmodel.lab.measure.calibrator import Calibrator
from fastdecode.perfmodel.lab.measure.dataset import WorkloadSpec, make_workload
from fastdecode.perfmodel.lab.measure.decode_rig import DecodeRig
from fastdecode.perfmodel.lab.measure.offline_run import run_offline
from fastdecode.perfmodel.lab.measure.rank_calibrator import (
    RankCalibration,
    RankSeconds,
    measure_ranks,
    rank_configurations,
    rank_threads,
    with_rank_points,
)
from fastdecode.perfmodel.lab.measure.samples import measuring, r_worker_config
from fastdecode.perfmodel.lab.measure.throughput import run_throughput
from fastdecode.perfmodel.lab.measure.validation import (
    NUM_STEPS,
    Configuration,
    Validation,
    require_measured,
    validated_row,
)
from fastdecode.perfmodel.load import NO_RANGES, Load, RangeParts
from fastdecode.perfmodel.measurements import HERE, MachineIdentity
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import read_profile, write_profile
from fastdecode.perfmodel.storage_costs import StorageCosts
from fastdecode.sworker.model.shape import model_shape

pytestmark = pytest.mark.slow

PLAN = CalibrationPlan(
    batch_sizes=(16, 64), s_threads=(1,), r_threads=(1,), kv_dtypes=("float32",), groups=(1, 4),
    r_shapes=((4, 32), (4, 256)),
    links=("inproc", "spawn"), message_rows=(4, 16), contended=((1, 1),), rounds=1, most_tries=1,
)  # fmt: skip


RECORDED = Path(__file__).with_name("recorded_profile.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny Llama and return its folder."""
    return str(model_zoo.save_model("llama-gqa", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def profile(folder: str) -> HardwareProfile:
    """Return the recorded profile, with this machine and this model as its own."""
    recorded = read_profile(RECORDED.read_text())
    shape = model_shape(EngineConfig(folder, device="cpu", skip_tokenizer_init=True))
    assert dataclasses.replace(recorded.shape, name=shape.name, max_context=shape.max_context) == shape
    return dataclasses.replace(recorded, shape=shape, machine=this_machine("", HERE, supported_isas()[-1]))


@pytest.fixture
def path(profile: HardwareProfile, tmp_path: Path) -> str:
    """Write the profile and return its path."""
    file = tmp_path / "profile.json"
    file.write_text(write_profile(profile))
    return str(file)


def live_config(folder: str, path: str, **other: object) -> EngineConfig:
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 256, "enable_prefix_caching": False}
    settings |= {"s_threads": 1, "r_threads": 1, "kv_cache_memory": "16MiB", "max_num_seqs": 16, "profile": path}
    return EngineConfig(folder, **(settings | other))  # type: ignore[arg-type]


def test_everything_is_measured(folder: str) -> None:
    """The profile has a point above zero for every shape asked for, and says whose it is."""
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True)
    ticks: list[int] = []
    profile = Calibrator(config, model_shape(config), PLAN, lambda: ticks.append(1)).run()
    assert len(ticks) == PLAN.num_measurements
    assert read_profile(write_profile(profile)) == profile
    assert profile.machine == this_machine("", HERE, supported_isas()[-1])
    assert [(p.batch_size, p.threads) for p in profile.s_part] == [(16, 1), (64, 1)]
    heads = profile.shape.num_heads
    assert {(p.num_kv_heads, p.num_sequences, p.context_len) for p in profile.r_part} == {
        (kv_heads, *shape) for kv_heads in (heads, heads // 4) for shape in PLAN.r_shapes
    }
    assert {(p.r_worker, p.message_bytes // profile.shape.attending_row_bytes) for p in profile.links} == {
        (name, rows) for name in ("inproc", "spawn") for rows in (4, 16)
    }
    timed = [p.seconds for points in (profile.r_part, profile.host, profile.plans, profile.anchors) for p in points]
    assert min(timed) > 0 and all(point.layer_seconds > 0 for point in profile.s_part)
    assert any(line.startswith("T(B) of a layer, 1 thread(s), ms: 16: ") for line in summary_lines(profile))
    assert [p.num_kv_heads for p in profile.contention] == [heads, heads // 4]
    assert {p.part for p in profile.anchors} == {"s", "r"}


@pytest.mark.thorough
def test_absorption_and_the_scan_of_an_index_are_measured(tmp_path: Path) -> None:
    """An engine with such a profile leaves K and V to R-workers where they answer sooner that way."""
    sparse_zoo.build_model("deepseek_v32", num_hidden_layers=5).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, r_workers="inproc")
    plan = dataclasses.replace(PLAN, groups=(4,), links=("inproc",), contended=(), num_ranks=2)
    found = Calibrator(config, model_shape(config), plan, lambda: None).run()
    assert read_profile(write_profile(found)) == found
    assert [p.kind for p in found.r_part] == ["rows", "rows", "absorbing", "absorbing", "scan"] * 2
    assert found.measured_r_part("float32", num_ranks=2).seconds_per_token > 0
    assert found.measured_scan("float32").seconds_per_token > 0
    for factor, chosen in ((1e-3, "r"), (1e3, "auto")):
        points = [
            dataclasses.replace(p, seconds=p.seconds * factor) if p.kind == "absorbing" else p for p in found.r_part
        ]
        path = tmp_path / "profile.json"
        path.write_text(write_profile(dataclasses.replace(found, r_part=tuple(points))))
        live = with_absorption(dataclasses.replace(config, profile=str(path)))
        assert live.latent_absorption == chosen


def test_a_profile_of_int8_products_is_of_that_mode_alone(folder: str, path: str, tmp_path: Path) -> None:
    """An engine takes a profile of its own mode, and refuses one of the other."""
    plan = dataclasses.replace(PLAN, batch_sizes=(16,), groups=(4,), links=("inproc",), contended=())
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True, quantization="int8")
    found = Calibrator(config, model_shape(config), plan, lambda: None).run()
    assert found.shape.multiplies_int8
    own = tmp_path / "int8.json"
    own.write_text(write_profile(found))
    for file, mode, words in ((path, "int8", "without"), (str(own), None, "with")):
        with pytest.raises(ProfileError, match=f"measured {words} --quantization int8"):
            LLMEngine(live_config(folder, file, quantization=mode))


@pytest.mark.thorough
def test_states_are_measured_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_hybrids.built("qwen3_next").save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", skip_tokenizer_init=True, r_workers="inproc")
    plan = dataclasses.replace(PLAN, groups=(2,), links=("inproc",), contended=((1, 1),))
    found = Calibrator(config, model_shape(config), plan, lambda: None).run()
    assert read_profile(write_profile(found)) == found
    assert [p.kind for p in found.r_part] == ["rows", "state"] * 2
    assert found.measured_state("float32")[1] > 0
    assert any(line.startswith("states here, float32 cache, 1 thread(s): ") for line in summary_lines(found))
    path = tmp_path / "profile.json"
    path.write_text(write_profile(found))
    assert main(["plan", "--profile", str(path), "--seq-len", "64"]) == 0
    assert "3 of 4 layers are recurrent" in capsys.readouterr().out
    assert main(["plan", "--profile", str(path), "--seq-len", "64", "--state-on", "s"]) == 0
    assert "its memory is not checked" in capsys.readouterr().out
    per_call, per_row = found.measured_state("float32", 1)
    there, here = (
        deployed_step_model(found, found.shape.keeping_states(at_s_worker), "float32", Deployment(1, 1))
        for at_s_worker in (False, True)
    )
    load = Load.decode(5, 100)
    moved = 3 * (per_call + 5 * per_row)
    for part, sign in (("s_part", 1), ("r_part", -1)):
        seconds = [model.num_layers * getattr(model.stages(load), part) for model in (there, here)]
        assert seconds[1] - seconds[0] == pytest.approx(sign * moved)


def test_a_live_load_limit_comes_from_the_profile(folder: str, path: str, profile: HardwareProfile) -> None:
    """The limit is set before the first step, and step times do not change it."""
    engine = LLMEngine(live_config(folder, path))
    try:
        model = deployed_step_model(profile, engine.s_model.shape, "float32", Deployment(1, 1))
        expected = max(int(model.balanced_kv_tokens(16)), 1)
        assert engine.scheduler.load_limit.tokens == expected
        items = make_workload(WorkloadSpec(random_input_len=8, random_output_len=40, num_prompts=4), 64, 256, None)
        run_throughput(engine, items)
        assert engine.scheduler.load_limit.tokens == max(expected, 48)  # The limit is never below one longest request.
    finally:
        engine.close()


def test_a_target_between_tokens_is_met_by_the_profile(folder: str, path: str) -> None:
    """The budget comes from the profile's step times, and no step is timed."""
    config = live_config(folder, path, tbt_target=1e3, max_num_batched_tokens=640)
    engine = LLMEngine(config)
    try:
        assert engine.scheduler.limits.max_num_batched_tokens == 640
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("field", "words"),
    [("host", "machine"), ("s_worker", "S-worker"), ("isa", "instruction set"), ("fastdecode_version", "version")],
)
def test_others_profiles_are_refused(
    folder: str, path: str, profile: HardwareProfile, field: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Live runs and validate refuse another machine's profile, and plan accepts it."""
    machine = MachineIdentity(**{**vars(profile.machine), field: "another"})
    Path(path).write_text(write_profile(dataclasses.replace(profile, machine=machine)))
    with pytest.raises(ProfileError, match=f"another {words}, 'another'.*calibrate"):
        LLMEngine(live_config(folder, path))
    assert main(["validate", "--profile", path, "--model", folder]) == 1
    assert f"another {words}" in capsys.readouterr().err
    assert main(["plan", "--profile", path, "--seq-len", "64", "--mini-batch-size", "64"]) == 0


def test_another_models_profile_is_refused(path: str, tmp_path: Path) -> None:
    other = str(model_zoo.save_model("qwen2", tmp_path / "other"))
    with pytest.raises(ProfileError, match="the profile was measured on"):
        LLMEngine(live_config(other, path))


def validated(deployment: Deployment, context_len: int, kv_shard_tokens: int | None, kv_heads: int) -> Configuration:
    """Return a configuration of four sequences, with S on the first core and R on the second where each has its own."""
    cores = ((0,), (1,)) if deployment.separate_cores else None
    spec = "spawn:2" if deployment.r_worker == "spawn" else "inproc"
    return Configuration("test", deployment, spec, cores, 4, context_len, "float32", kv_heads, kv_shard_tokens)


TWO_ON_ONE = Deployment(1, 1, 2, 2, "spawn", True, r_workers_per_core=2)
WAYS = pytest.mark.parametrize(
    ("deployment", "context_len", "kv_shard_tokens"),
    [
        pytest.param(Deployment(1, 1), 64, None, marks=pytest.mark.thorough),
        pytest.param(TWO_ON_ONE, 64, None, marks=pytest.mark.thorough),
        (TWO_ON_ONE, 1600, 512),
    ],
    ids=["in turn", "two on one", "ranges"],
)


@WAYS
def test_a_configuration_is_measured(
    folder: str, profile: HardwareProfile, deployment: Deployment, context_len: int, kv_shard_tokens: int | None
) -> None:
    todo = validated(deployment, context_len, kv_shard_tokens, profile.shape.num_kv_heads)
    validation = Validation(EngineConfig(folder, device="cpu", skip_tokenizer_init=True), profile)
    try:
        (row,) = validation.run([todo], lambda: None)
    finally:
        validation.close()
    assert row.configuration == todo and min(row.predicted_step_seconds, row.drift.s_part, row.drift.r_part) > 0
    assert row.measured_step_seconds > row.measured_s_seconds > 0 and row.measured_r_seconds > 0
    assert np.isfinite(row.error) and 1 <= row.tries <= 3


def recorded_steps(kv_load: float) -> list[Steadied]:
    """Return NUM_STEPS steps, with an S anchor twice and an R anchor three times as slow as before."""
    seconds = np.array([9e-3, 4e-3, 2e-3, 1e-3])
    rows = np.array([[*(seconds * step), kv_load] for step in range(1, NUM_STEPS + 1)])
    return [Steadied(rows, drift=2.0, moved=0.01, tries=2), Steadied(rows, drift=3.0, moved=0.02, tries=2)]


@WAYS
def test_what_was_measured_is_held_against_its_prediction(
    profile: HardwareProfile, deployment: Deployment, context_len: int, kv_shard_tokens: int | None
) -> None:
    """The predicted time follows from the run's own load and the anchors' drift."""
    todo = validated(deployment, context_len, kv_shard_tokens, profile.shape.num_kv_heads)
    row = validated_row(profile, todo, recorded_steps(4 * context_len))
    shape = dataclasses.replace(profile.shape, num_layers=4)
    model = deployed_step_model(profile, shape, "float32", deployment, row.drift)
    model = dataclasses.replace(model, storage=StorageCosts.of(shape, slowness=2.0))
    # There are three closed ranges, and a tail of one split, for each sequence.
    parts = RangeParts(12, 16) if kv_shard_tokens else NO_RANGES
    assert todo.ranges == parts and (row.drift.s_part, row.drift.r_part) == (2.0, 3.0)
    predicted = model.seconds(Load.decode(4, 4 * context_len).with_ranges(parts))
    assert row.predicted_step_seconds == pytest.approx(predicted)
    measured = (row.measured_step_seconds, row.measured_s_seconds, row.measured_r_seconds, row.measured_host_seconds)
    assert measured == pytest.approx((6.5 * 9e-3, 6.5 * 4e-3, 6.5 * 2e-3, 6.5 * 1e-3))
    assert (row.moved, row.tries) == (0.02, 2) and row.error == pytest.approx(predicted / (6.5 * 9e-3) - 1)


RANKS = RankCalibration(2, (4,), anchor_threads=1, rounds=2, most_tries=1, num_engines=1)
RECORDED_RANKS = RankSeconds(1, np.array([[12e-3, 4e-3]]), np.array([[4e-3, 3e-3]]), np.array([[0.1, 0.2]]))


@pytest.mark.thorough
def test_two_ranks_are_measured(folder: str, profile: HardwareProfile) -> None:
    """Each rank has one thread, and the S-part includes the all-reduces."""
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True)
    ticks: list[int] = []
    found = measure_ranks(profile, config, RANKS, lambda: ticks.append(1))
    assert len(ticks) == RANKS.num_measurements and found.threads == rank_threads(2)
    assert found.many.shape == found.few.shape == found.spread.shape == (1, 2)
    assert np.all(found.many > 0) and np.all(found.few > 0) and np.all(found.spread >= 0)


def test_points_of_two_ranks(profile: HardwareProfile) -> None:
    """A layer is a fourth of the difference between five layers and one, and sending plans has a point of its own."""
    found = read_profile(write_profile(with_rank_points(profile, RANKS, RECORDED_RANKS)))
    assert found.s_part[:-1] == profile.s_part and found.host[:-1] == profile.host
    s_part, host = found.s_part[-1], found.host[-1]
    assert (s_part.batch_size, s_part.threads, s_part.tensor_parallel_size) == (4, 1, 2)
    assert (s_part.layer_seconds, s_part.head_seconds, s_part.spread) == pytest.approx((2e-3, 2e-3, 0.1))
    once, per_row = dataclasses.replace(profile, host=()).step_overhead_seconds("inproc")
    assert (host.num_sequences, host.tensor_parallel_size) == (4, 2)
    assert (host.seconds, host.spread) == pytest.approx((4e-3 - once - 4 * per_row, 0.2))
    assert any("2 ranks of" in line for line in summary_lines(found))


def test_layers_that_take_no_time_are_no_points(profile: HardwareProfile) -> None:
    disturbed = dataclasses.replace(RECORDED_RANKS, few=RECORDED_RANKS.many)
    with pytest.raises(ProfileError, match="5 layers at batch size 4 took no longer than 1: other processes use"):
        with_rank_points(profile, RANKS, disturbed)


def test_two_ranks_are_held_against_their_prediction(folder: str, profile: HardwareProfile) -> None:
    """A prediction takes the ranks' own S-part, and the R-part of one thread that holds all heads."""
    found = with_rank_points(profile, RANKS, RECORDED_RANKS)
    todo = next(each for each in rank_configurations(profile.shape, [0], 2) if each.kv_dtype == "float32")
    todo = dataclasses.replace(todo, batch_size=4, context_len=64, num_kv_heads=profile.shape.num_kv_heads)
    # The number of threads is fixed, whatever cores this machine has.
    deployment = dataclasses.replace(todo.deployment, s_threads=1, r_threads=1)
    row = validated_row(found, dataclasses.replace(todo, deployment=deployment), recorded_steps(4 * 64))
    assert row.predicted_s_seconds == pytest.approx(2.0 * (4 * 2e-3 + 2e-3))
    whole = profile.measured_r_part("float32", 1, profile.shape)
    assert row.predicted_r_seconds == pytest.approx(3.0 * 4 * whole.seconds(4 * 64, 4))
    engine = todo.engine_config(EngineConfig(folder, device="cpu", skip_tokenizer_init=True), 64)
    assert (engine.tensor_parallel_size, engine.s_threads, engine.r_threads) == (2, rank_threads(2), rank_threads(2))
    with pytest.raises(ProfileError, match=r"no S-part of 2 rank\(s\)"):
        require_measured(profile, [todo], None)


def test_an_offline_run_has_the_simulations_schedule(folder: str, profile: HardwareProfile) -> None:
    """The load limit comes from the profile; `fastdecode validate` compares the times."""
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True)
    threads = {point.threads for point in profile.anchors}
    spec = WorkloadSpec(random_input_len=16, random_output_len=24, num_prompts=12)
    found = run_offline(config, profile, (), spec, threads.pop())
    assert found.same_schedule and found.num_steps >= 24 and found.simulated_seconds > 0


@pytest.mark.thorough
def test_r_workers_elsewhere_are_measured_one_by_one(folder: str) -> None:
    """R-workers over TCP serve one session at a time; the profile has none of this machine's R-workers."""
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True)
    with r_workers.listening("--threads", "1", "--kv-cache-memory", "64MiB") as (_, address):
        plan = dataclasses.replace(PLAN, batch_sizes=(16,), links=(address,), contended=(), groups=(4,))
        found = Calibrator(config, model_shape(config), plan, lambda: None).run()
    assert {point.r_worker for point in (*found.r_part, *found.links, *found.plans)} == {address}
    assert found.machine.r_worker == address and len(found.r_part) == len(PLAN.r_shapes)


def test_a_rig_decodes_at_the_size_asked_for(folder: str) -> None:
    """The caches are full though no prompt was computed, and empty again afterwards."""
    config = measuring(EngineConfig(folder, device="cpu", max_model_len=256, kv_cache_memory="16MiB"))
    rig = DecodeRig(config)
    try:
        for batch_size, context_len in ((3, 100), (5, 40)):
            steps = rig.decode(batch_size, context_len, 4)
            assert [step.kv_load for step in steps] == [batch_size * (context_len - left) for left in (3, 2, 1, 0)]
            assert all(step.is_decode and step.num_tokens == batch_size and step.kv_bytes_read for step in steps)
        assert not rig.engine.has_unfinished_requests() and rig.engine.backend.blocks_used == 0  # type: ignore[attr-defined]
    finally:
        rig.close()


def test_attention_is_rewound(folder: str) -> None:
    """Steps add a token to each sequence, and rewinding removes these tokens."""
    config = EngineConfig(folder, device="cpu", skip_tokenizer_init=True)
    layout = model_shape(config).kv_layout("int8")
    rig = AttentionRig(r_worker_config(measuring(config), "here", 1, 4 * 128 * layout.kv_bytes_per_token), layout)
    try:
        rig.fill(4, 30)
        for _ in range(2):
            steps = [rig.step() for _ in range(4)]
            assert all(step.busy_seconds.shape == (len(layout.layers),) and step.plan_seconds > 0 for step in steps)
            assert rig.backend.blocks_used == 4 * 2  # type: ignore[attr-defined]
            rig.rewind(30)
            assert rig.backend.blocks_used == 4  # type: ignore[attr-defined]
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--r-workers", "mpi"], "ranks of an MPI job not yet"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size must be"),
        (["--output", "/no/such/folder/profile.json"], "there is no such folder"),
        (["--output", "."], ".: is a folder; name a file to write"),
        (["--model", "/no/such/model"], "no such folder"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-configurations", "0"], "num_configurations must be at least 1"),
        (["--tensor-parallel-size", "2", "--ranges"], "ranges"),
        (["--output-json", "."], ".: is a folder; name a file to write"),
        (["--plot", "rows.txt"], "a plot must end in"),
        ([], "no.json"),
    ],
)
def test_what_cannot_be_validated_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--profile", "no.json", "--model", "no", *arguments]) != 0
    assert message in capsys.readouterr().err
