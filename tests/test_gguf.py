"""``--model PATH.gguf``: weights, configuration and tokenizer of one file, as transformers reads it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdecode import LLM, SamplingParams
from fastdecode.cli.main import main

pytestmark = pytest.mark.slow

HIDDEN, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama with quantized matrices and a byte-level tokenizer, and return its path."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer)
    _add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<s>", "</s>", "<unk>", *(chr(code) for code in range(33, 127)), "Ġ", "ab"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)


def _add_weights(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(1)
    head_dim = HIDDEN // HEADS

    def add(name: str, rows: int, columns: int) -> None:
        weights = rng.standard_normal((rows, columns), dtype=np.float32) * 0.3
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(weights, kind), raw_dtype=kind)

    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    add("token_embd", 99, HIDDEN)
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(HIDDEN, np.float32))
        add(f"blk.{layer}.attn_q", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_v", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_output", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_up", MLP, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, MLP)


def test_a_gguf_file_answers_as_transformers_reads_it(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :].tolist()
    with LLM(path, kv_cache_memory="16MiB", s_threads=1, device="cpu") as llm:
        (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        assert output.prompt_token_ids == ids[0].tolist() and len(set(wanted)) > 3
        assert list(output.outputs[0].token_ids) == wanted


def test_plan_and_the_baseline_take_it_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(path), "--gpu", "a10", "--cpu", "epyc-7452", "--seq-len", "128"]) == 0
    assert f"{path} on a10" in capsys.readouterr().out
    bench = ["bench", "throughput", "--model", str(path), "--backend", "transformers", "--device", "cpu"]
    assert main([*bench, "--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2"]) == 0


def test_without_the_file_or_its_reader_the_error_says_what_to_do(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", "--model", str(path.with_name("other.gguf"))]) == 1
    assert "other.gguf': no such file" in capfd.readouterr().err
    for data in (b"GGUF and nothing else", path.read_bytes()[:-5000]):
        path.with_name("broken.gguf").write_bytes(data)
        assert main(["generate", "hi", "--model", str(path.with_name("broken.gguf"))]) == 1
        assert "broken.gguf': it is no complete GGUF file: fetch it again" in capfd.readouterr().err
    monkeypatch.setattr("fastdecode.sworker.files.weight_files.GGUF_NEEDS", ("gguf", "no_such_package"))
    assert main(["generate", "hi", "--model", str(path)]) == 1
    assert "GGUF files need no_such_package: pip install 'fastdecode[gguf]'" in capfd.readouterr().err
