# make demo   install, then see it work
# make test   install, then lint, types and tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA driver, pin the tested CPU builds: plain torch would bring gigabytes of CUDA.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
STAMP := $(VENV)/.installed

.PHONY: demo test lint sanitize clean

demo: $(STAMP)
	$(BIN)/fastdecode bench throughput --model examples/llama-demo-shape --load-format dummy --skip-tokenizer-init \
	  --num-prompts 64 --random-input-len 128 --random-output-len 64 --max-model-len 512

test: $(STAMP) lint
	$(BIN)/pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fastdecode tests/typings/fastdecode

# One pip command; again whenever the C++ or the packaging changed.
SOURCES := $(shell find rworker_cpp -name '*.cpp' -o -name '*.hpp' -o -name '*.inl' -o -name CMakeLists.txt)
$(STAMP): pyproject.toml CMakeLists.txt constraints-cpu.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[test]'
	touch $@

clean:
	rm -rf build dist out $(VENV) .pytest_cache .mypy_cache .ruff_cache
