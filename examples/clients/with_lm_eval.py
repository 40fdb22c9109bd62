"""Test lm-eval's local-completions: log-likelihoods and texts of a task. python with_lm_eval.py URL MODEL TOKENIZER

TOKENIZER is the model's folder, since lm-eval sends token ids and counts the tokens of each context.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

url, model, tokenizer = sys.argv[1:]
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: rows.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROWS = [
    {"text": "def read(self, path):\n    with", "choices": [" open(path)", " zqxv{{}}~"], "answer": 0},
    {"text": "for index in", "choices": [" range(10)", " Qq%%@@!"], "answer": 0},
]

with tempfile.TemporaryDirectory() as folder:
    task = CHOICES.replace("rows.json", str(Path(folder) / "rows.json"))
    (Path(folder) / "choices.yaml").write_text(task)
    (Path(folder) / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    settings = (
        f"model={model},base_url={url}/completions,tokenizer_backend=huggingface,tokenizer={tokenizer},max_length=200"
    )
    words = ["--model", "local-completions", "--model_args", settings, "--tasks", "choices", "--include_path", folder]
    command = [
        str(Path(sys.executable).with_name("lm_eval")),
        *words,
        "--output_path",
        f"{folder}/out",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (path,) = Path(folder).glob("out/**/results_*.json")
    found = json.loads(path.read_text())["results"]["choices"]
assert found["acc,none"] == 1.0 and math.isfinite(found["acc_stderr,none"]), found
print("lm-eval: ok")
