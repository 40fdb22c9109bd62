"""Command lines written for vLLM start, or are refused with what to do instead."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastdecode.api.config import EngineConfig
from fastdecode.api.from_vllm import FOREIGN, OF_ENGINES, OF_SERVERS
from fastdecode.api.vllm.taken import TAKEN
from fastdecode.cli.flags import engine_config
from fastdecode.cli.main import build_parser, main
from fastdecode.cli.parser import Parser
from fastdecode.cli.serve import read_settings
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.vllm_bench import check_bench_flags
from fastdecode.server.server_settings import ServerSettings

ROOT = Path(__file__).parent.parent
VLLM = [line.split() for line in (ROOT / "tests" / "vllm_flags.txt").read_text("utf-8").splitlines()]
"""Flags of ``vllm serve`` 0.33: the long spelling, and the short ones."""

OTHERS = {"allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "chat_template_content_format"}
"""Flags that will be supported."""

STARTS = """
serve Qwen/Qwen3-0.6B
serve facebook/opt-125m --dtype half --host 0.0.0.0 --port 8000 --api-key token-abc123
serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key a b --chat-template ./t.jinja
serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --gpu-memory-utilization 0.90 --max-model-len 32768
serve Qwen/Qwen2.5-7B-Instruct --enable-auto-tool-choice --tool-call-parser hermes
serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --max-model-len 32k
serve deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --enable-reasoning --reasoning-parser deepseek_r1
serve openai/gpt-oss-20b --async-scheduling --tool-call-parser openai --enable-auto-tool-choice
serve zai-org/GLM-4.5-Air -tp 1 --tool-call-parser glm45 --reasoning-parser glm45 --served-model-name glm glm-4.5-air
serve moonshotai/Kimi-K2 -tp 1 --enable-expert-parallel --trust-remote-code --max-num-batched-tokens 8k
serve meta-llama/Llama-3.2-1B --enable-lora --lora-modules sql=./sql --max-loras 4 --max-lora-rank 64 --max-cpu-loras 8
serve m --enable-lora --lora-modules '{"name": "sql", "path": "./sql", "base_model_name": "m"}'
serve m --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
serve m --speculative-config.method ngram --speculative-config.num_speculative_tokens 5
serve m --speculative_config.method=ngram --speculative_config.num_speculative_tokens=5
serve m -sc.method ngram --speculative-config '{"num_speculative_tokens": 4}'
serve m --spec-method ngram --spec-tokens 3
serve m --speculative-config '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}'
serve m --max_model_len 4096 --max_num_seqs 64 --gpu_memory_utilization=0.8 --disable_log_requests --swap_space 16
serve m --no-enable-prefix-caching --no-enable-chunked-prefill --no-enforce-eager
serve m --enforce-eager --disable-log-stats --disable-log-requests --max-log-len 100 --uvicorn-log-level warning
serve m --compilation-config '{"mode": 3, "cudagraph_mode": "FULL"}' --max-num-seqs 128
serve m -O3 --cudagraph-capture-sizes 1 2 4 8 --attention-backend FLASHINFER
serve m -O 2 -cc.mode 3 -cc.cudagraph_mode FULL --attention-config.backend FLASH_ATTN
serve m --limit-mm-per-prompt '{"image": 2}' --mm-processor-cache-gb 0 --allowed-local-media-path /data
serve m --limit-mm-per-prompt image=2 --max-num-seqs 5
serve m --root-path /llm --disable-uvicorn-access-log --disable-fastapi-docs --enable-request-id-headers
serve m --enable-prompt-tokens-details --otlp-traces-endpoint http://localhost:4318/v1/traces
serve m --default-chat-template-kwargs '{"enable_thinking": false}' --generation-config vllm
serve m --default-chat-template-kwargs.enable_thinking false --override-generation-config '{"temperature": 0.5}'
serve m --max-model-len auto --max-num-batched-tokens 16384 --block-size 32 --kv-cache-dtype auto --seed 0
serve m --max-model-len -1 --hf-overrides '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'
serve m --hf-overrides.rope_parameters.rope_type yarn --hf-overrides.rope_parameters.factor 4.0
serve m --load-format safetensors --model-loader-extra-config '{"enable_multithread_load": true}' --tokenizer-mode auto
serve m --quantization gguf --tokenizer t --dtype bfloat16 --kv-cache-memory-bytes 4G --cpu-offload-gb 4
serve m --distributed-executor-backend ray --pipeline-parallel-size 1 --data-parallel-size=1 --nnodes 1 --node-rank 0
serve m --runner generate --task generate --convert none --scheduling-policy fcfs --model-impl auto --config-format hf
serve m --guided-decoding-backend xgrammar --structured-outputs-config.backend guidance --logprobs-mode raw_logprobs
serve m --api-server-count 4 --max-num-queued-reqs 100 --shutdown-timeout 60 --stream-interval 10
serve m --kv-cache-metrics --collect-detailed-traces all --show-hidden-metrics-for-version 0.10 --max-logprobs -1
serve --model m --served-model-name gpt-3.5-turbo --log-level INFO
serve m --device-memory-utilization 0.5 --numa-bind --use-tqdm-on-load --no-async-scheduling
""".strip().splitlines()
"""Command lines of vLLM's documentation, recipes, container images and charts."""

REFUSED = {
    "serve m -tp 8 -pp 2": "pipeline_parallel_size: the layers run on one S-worker",
    "serve m --tensor-parallel-size 1 --data-parallel-size 4": "data_parallel_size: start one engine each",
    "serve m -dp 2 -dpl 1 -dpa 10.0.0.1 -dpp 13345 --headless": "start one engine each, or one with more R-workers",
    "serve m --nnodes 2 --node-rank 0 --master-addr 10.0.0.1": "start them with `fastdecode launch`",
    "serve m --headless --nnodes 1": "headless: other hosts run R-workers",
    "serve m --kv-cache-dtype fp8": "fp8 is not there: int8 takes as many bytes",
    "serve m --kv-cache-dtype fp8_e4m3 --calculate-kv-scales": "int8 takes as many bytes",
    "serve m --quantization experts_int8": "so leave it out; for others give one of",
    "serve m -q hqq": "packed checkpoints and GGUF say themselves",
    'serve m --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'': "prefill_workers",
    "serve m --kv-transfer-config.kv_connector NixlConnector": "kv_transfer_config: give prefill_workers",
    "serve BAAI/bge-m3 --runner pooling": "models that embed, classify or score are not run here",
    "serve m --task embed": "models that embed, classify or score are not run here",
    'serve m --speculative-config \'{"method": "eagle3", "model": "e", "num_speculative_tokens": 2}\'': "early_exit",
    "serve m --speculative-model d --num-speculative-tokens 5": 'give speculative_config, such as {"method": "ngram"',
    "serve m --download-dir /models": "download_dir: set the environment variable HF_HUB_CACHE",
    "serve m --hf-token abc": "hf_token: set the environment variable HF_TOKEN",
    "serve m --uds /tmp/s.sock": "uds: give host and port",
    "serve m --enable-sleep-mode": "the model stays loaded",
    "serve m --tool-parser-plugin p.py --tool-call-parser hermes": "no code is loaded by name",
    "serve m --max-model-len 1.5M": "a power of two: give 1.5m",
    "serve m --max-model-len many": "must be a whole number such as 4096, 4k",
    "serve m --load-format tensorizer": "invalid choice: 'tensorizer' (choose from 'auto', 'dummy')",
    "serve m --scheduling-policy priority": "scheduling_policy: requests come first in, first out",
    "serve m --ssl-ca-certs ca.pem": "give ssl_keyfile and ssl_certfile as well",
    "serve m --lora-modules a=x b=y": "one adapter is merged into the weights",
    "serve m --default-chat-template-kwargs '{\"tools\": []}'": "must not name tools",
    "serve m --root-path llm": "root_path must be a path such as /llm",
    "serve m --device-ids 0,1": "CUDA_VISIBLE_DEVICES",
    "serve m --decode-context-parallel-size 2": "give more of them, or kv_shard_tokens",
    "serve m --middleware a.b --grpc": "grpc: clients speak HTTP to it",
    "serve m --max-model-len 4096 --max-modle-len 3": "is --max-model-len meant?",
    "serve --api-key k some/model": "give the model first, as in `serve MODEL --api-key …`, or as --model",
    "serve --served-model-name n some/model": "give the model first, as in `serve MODEL --served-model-name …`",
    "serve --cudagraph-capture-sizes 1 2 some/model": "give the model first",
    "bench serve --tensor-parallel-size 2": "--tensor-parallel-size is for commands that load a model",
}
"""Command lines, and a part of the message that refuses each."""

BENCHES = """
bench serve --backend vllm --model m --endpoint /v1/completions --dataset-name random --random-input-len 512
bench serve --backend openai-chat --base-url http://127.0.0.1:1 --endpoint /v1/chat/completions --max-concurrency 8
bench serve --dataset-name sharegpt --dataset-path x.json --request-rate 2 --burstiness 0.8 --no-oversample
bench serve --percentile-metrics ttft,tpot,itl --metric-percentiles 50,99 --goodput ttft:500 tpot:50 --trust-remote-code
bench serve --save-result --result-dir /tmp --result-filename r.json --metadata a=b --save-detailed --label x
bench serve --input-len 100 --output-len 20 --ignore-eos --temperature 0 --request-id-prefix b- --disable-shuffle
bench serve --chat-template-kwargs '{"enable_thinking": false}' --extra-body '{"n": 1}' --num-warmups 1
bench serve --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 5 --ready-check-timeout-sec 0
bench throughput --backend vllm --model m --input-len 32 --output-len 8 --num-prompts 4 --gpu-memory-utilization 0.9
bench throughput --model m --dataset-name random --random-input-len 32 --async-engine --enforce-eager --dtype half -tp 1
bench throughput --model m --n 1 --prefix-len 0 --output-json /tmp/r.json --max-model-len 4k --disable-log-stats
bench latency --model m --batch-size 4 --input-len 32 --output-len 8 --num-iters-warmup 1 --num-iters 2 -tp 1 -O3
""".strip().splitlines()

REFUSED |= {
    "bench serve --profile": "profile: give --trace FILE to the command that has the engine",
    "bench serve --dataset-name sonnet": "invalid choice: 'sonnet' (choose from 'random', 'sharegpt', 'custom')",
    "bench serve --hf-split train": "hf_split: give --dataset-name random, sharegpt or custom",
    "bench serve --lora-modules a b": "lora_modules: all requests ask for one model: give --served-model-name",
    "bench serve --append-result --save-result": "append_result: give another --result-filename",
    "bench serve --insecure": "SSL_CERT_FILE",
    "bench throughput --model m --lora-path x": "lora_path: give --lora-modules NAME=FOLDER",
    "bench throughput --model m --prefix-len 5": "prefix_len: give --random-prefix-len",
    "bench throughput --model m -tp 1 -pp 2": "pipeline_parallel_size: the layers run on one S-worker",
    "bench latency --model m --use-beam-search": "use_beam_search: there is no beam search",
}


def settings_of(line: str) -> tuple[EngineConfig, ServerSettings]:
    """Return the settings that a command line of ``serve`` gives."""
    words = shlex.split(line)
    return read_settings(build_parser(words).parse_args(words))


@pytest.fixture(scope="module")
def flags() -> dict[str, Any]:
    """Return all spellings of flags that ``serve`` accepts."""
    return parser_of("serve")._option_string_actions


def parser_of(command: str) -> Parser:
    words = command.split()
    parser: Any = build_parser(words)
    for word in words:
        parser = next(each for each in parser._actions if hasattr(each, "choices") and word in (each.choices or ()))
        parser = parser.choices[word]
    return parser


@pytest.mark.parametrize("line", STARTS)
def test_lines_that_start(line: str) -> None:
    config, settings = settings_of(line)
    assert config.model in line and settings.port in (0, 8000)


@pytest.mark.parametrize("line", REFUSED)
def test_lines_that_are_refused_say_what_to_do(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(shlex.split(line)) == 2
    except SystemExit as end:
        assert end.code == 2
    error = [each for each in capfd.readouterr().err.splitlines() if not each.startswith("WARNING")]
    assert REFUSED[line] in error[0]
    assert error[0].startswith("fastdecode") and len(error) <= 2, "an error, and one line on help"


@pytest.mark.parametrize("line", BENCHES)
def test_benchmarks_that_start(line: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each runs up to the model, or the server, of which there is none."""
    words = shlex.split(line)
    args = build_parser(words).parse_args(words)
    check_bench_flags(args)
    assert len(caplog.records) <= 1
    if words[1] == "serve":
        assert args.backend in ("openai", "openai-chat")
    else:
        assert engine_config(args).model == "m"


def test_every_flag_of_vllm_serve_is_known(flags: dict[str, Any]) -> None:
    """Both spellings and the short forms are known."""
    for long, *shorts in VLLM:
        name = long[2:].replace("-", "_")
        assert long in flags or name in OTHERS, long
        assert (name in FOREIGN) != (name in TAKEN), f"{name} must be taken, without effect or refused"
        assert all(flags[short].dest == flags[long].dest for short in shorts), shorts


def test_what_is_taken_has_a_setting() -> None:
    settings = EngineConfig.__dataclass_fields__.keys() | ServerSettings.__dataclass_fields__.keys()
    for name in TAKEN.keys() - {"config", "kv_cache_memory_bytes", "log_level", *OTHERS}:
        assert name in settings or name.startswith("spec_"), name
    assert not FOREIGN.keys() & settings, "a name is ours, or vLLM's alone"
    assert not OF_ENGINES.keys() & OF_SERVERS.keys()


def test_values_are_read_as_vllm_reads_them() -> None:
    config, settings = settings_of(
        "serve m --dtype half --max-model-len 4k --max-num-batched-tokens 2K --served-model-name a b,c"
    )
    assert (config.dtype, config.max_model_len, config.max_num_batched_tokens) == ("float16", 4000, 2048)
    assert settings.model_names("m") == ("a", "b", "c")
    assert settings_of("serve m --kv-cache-memory-bytes 4G")[0].kv_cache_memory == 4 << 30
    assert settings_of("serve m --kv-cache-memory 4G")[0].kv_cache_memory == "4G"
    assert settings_of("serve m --max-model-len -1")[0].max_model_len is None
    config, _ = settings_of('serve m --hf-overrides \'{"a": {"b": 1}}\' --hf-overrides.a.c 4k --hf_overrides.d+ x,y')
    assert config.hf_overrides == {"a": {"b": 1, "c": 4000}, "d": ["x", "y"]}
    config, _ = settings_of("serve m --spec-model d --spec-tokens 3")
    assert config.speculative_config == {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}


def test_a_switch_has_both_ways() -> None:
    for line, on in (("--enforce-eager", True), ("--enforce-eager --no-enforce-eager", False)):
        assert settings_of(f"serve m {line}")[0].enforce_eager is on
    for line, on in (("--disable-prefix-caching", False), ("--no-enable-prefix-caching", False), ("", True)):
        assert settings_of(f"serve m {line}")[0].enable_prefix_caching is on


def test_one_line_names_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    settings_of(
        "serve m --gpu-memory-utilization 0.9 --swap-space 4 --no-async-scheduling --max-log-len 3 --no-enable-lora"
    )
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "settings of vLLM that mean nothing here are ignored: async_scheduling, gpu_memory_utilization, max_log_len, "
        "swap_space; gpu_memory_utilization: KV caches are not on the GPU here: --kv-cache-memory sizes them"
    )


def test_a_list_of_adapters_does_not_eat_the_prompt() -> None:
    words = ["generate", "--lora-modules", "a=b", "a prompt", "--max-tokens", "3"]
    args = build_parser(words).parse_args(words)
    assert (args.lora_modules, args.prompts) == (["a=b"], ["a prompt"])


def test_a_prompt_keeps_its_words() -> None:
    """Words that look like a dotted flag, or like a flag with underscores, stay in the prompt."""
    words = ["generate", "--max_tokens", "3", "--", "--max_tokens", "-O3", "-x.y"]
    args = build_parser(words).parse_args(words)
    assert (args.prompts, args.max_tokens) == (["--max_tokens", "-O3", "-x.y"], 3)


def test_a_file_has_flags_below_those_of_the_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: of-file\nport: 12323\ntensor-parallel-size: 1\nmax_model_len: 4k\nserved-model-name: [a, b]\n"
        "enable-prefix-caching: false\ngpu-memory-utilization: 0.9\nhf-overrides: {a: {b: 1}}\nseed: null\n"
        "default-chat-template-kwargs:\n  enable_thinking: false\n"
    )
    config, settings = settings_of(f"serve of-line --config {path} --port 1234")
    assert (config.model, config.max_model_len, config.enable_prefix_caching) == ("of-line", 4000, False)
    assert (settings.port, settings.served_model_name, config.hf_overrides) == (1234, ["a", "b"], {"a": {"b": 1}})
    assert settings.default_chat_template_kwargs == {"enable_thinking": False}
    assert settings_of(f"serve --config={path}")[0].model == "of-file"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-modle-len: 3", "'max-modle-len' is no flag of this command (is max-model-len meant?)"),
        ("- a\n- b", "must hold lines such as"),
        ("a: [", "is no YAML"),
        ("enforce-eager: 3", "enforce-eager must be true or false, not 3"),
    ],
)
def test_a_file_that_cannot_be_meant(text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["serve", "m", "--config", str(tmp_path / "c.yaml")])
    assert end.value.code == 2 and said in capfd.readouterr().err.splitlines()[0]
    with pytest.raises(SystemExit):
        main(["serve", "m", "--config", str(tmp_path / "none.yaml")])
    assert "cannot read" in capfd.readouterr().err


def test_variables_of_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An API key guards the server; one line names the other variables that are set, except Kubernetes' own."""
    for name, value in {
        "VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_USE_V1": "1",
        "VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_PORT_80_TCP": "x", "VLLM_EMPTY": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    words = ["serve", "m"]
    args = build_parser(words).parse_args(words)
    _, settings = read_settings(args)
    assert settings.api_keys == ("k",) and args.log_level == "error"
    (record,) = caplog.records
    assert record.getMessage() == (
        "environment variables of vLLM that mean nothing here are ignored: VLLM_CPU_KVCACHE_SPACE (give "
        "--kv-cache-memory), VLLM_USE_V1"
    )
    monkeypatch.setenv("FASTDECODE_API_KEY", "own")
    assert read_settings(build_parser(words).parse_args(words))[1].api_keys == ("own",)


@pytest.mark.parametrize("name", sorted(OF_ENGINES))
def test_settings_in_python_are_known_as_flags_are(name: str) -> None:
    from fastdecode import EngineArgs

    each = OF_ENGINES[name]
    EngineArgs(**{name: None})
    if each.refused:
        with pytest.raises(ConfigError, match=f"^{name}: {re.escape(each.text)}"):
            EngineArgs(**{name: 0.5})
    else:
        EngineArgs(**{name: 3})


def test_settings_in_python_have_vllm_s_values() -> None:
    from fastdecode import EngineArgs

    config = EngineArgs(
        model="m", dtype="half", max_model_len=-1, seed=None, max_num_seqs=None, gpu_memory_utilization=0.9,
        kv_cache_memory_bytes="1G", speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        tensor_parallel_size=1, disable_log_stats=True, served_model_name="a", reasoning_parser="qwen3",
    )  # fmt: skip
    assert (config.dtype, config.max_model_len, config.seed, config.max_num_seqs) == ("float16", None, 0, 256)
    assert config.kv_cache_memory == 1 << 30
    assert EngineArgs(dtype=torch.bfloat16).dtype == "bfloat16"


def test_the_table_of_the_page_is_today_s() -> None:
    """A change of what is accepted of vLLM's needs ``python scripts/vllm_table.py``."""
    script = _script()
    page = script.PAGE.read_text("utf-8")
    assert script.rendered(page) == page
    table = script.full()
    for long, *_ in VLLM:
        assert f"`{long[2:].replace('-', '_')}`" in table
    assert json.dumps(table)  # The table has no lone surrogates.


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_table", ROOT / "scripts" / "vllm_table.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
