#!/usr/bin/env bash
# What is worth running on a machine with a GPU, most important first: build, tests, benchmark, memory checkers.
#   benchmarks/on_gpu.sh FOLDER [STEP...]      without STEP all of them, 25 minutes at most
# FOLDER gets summary.txt with a line for each step, logs.tar and the benchmark's results.json; a later call with the
# same FOLDER adds to it. A step that fails does not keep the others from running, but the exit status is 1. Without a
# GPU, or without a library for it, nothing else would be tested: the script stops.
# Nothing is downloaded. It needs nvcc, a C++ compiler, and for Python torch with CUDA, setuptools>=77, ninja, rich,
# numpy, pytest, pytest-xdist, hypothesis and expecttest.
set -uo pipefail
steps="build info gpu_tests cuda_tests benchmark memcheck synccheck racecheck"

usage() {
  echo "usage: benchmarks/on_gpu.sh FOLDER [STEP...]; steps: $steps; $1" >&2
  exit 2
}

[ $# -gt 0 ] && [[ $1 != -* ]] || usage "got ${1:-no FOLDER}"
for name in "${@:2}"; do
  [[ " $steps " == *" $name "* ]] || usage "got $name"
done
chosen=${*:2}
chosen=${chosen:-$steps}
folder=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

say() {
  echo "$1" | tee -a "$folder/summary.txt"
}

stop() {
  say "stopped: $1"
  exit 1
}

step() {  # step NAME SECONDS COMMAND...
  local name=$1 start=$SECONDS verdict=ok
  timeout --kill-after=10 "$2" "${@:3}" >"$logs/$name.log" 2>&1 || { verdict="FAILED ($?)"; status=1; }
  tar -rf "$folder/logs.tar" -C "$logs" "$name.log"
  say "$name: $verdict, $((SECONDS - start)) s; $(grep . "$logs/$name.log" | tail -n 1 | cut -c1-200)"
}

tests() {  # tests NAME SECONDS ARGUMENT...: an import that fails takes only its own file's tests away
  step "$1" "$2" python3 -m pytest -q -p no:cacheprovider --continue-on-collection-errors "${@:3}"
}

checker() {  # checker TOOL SECONDS
  if ! command -v compute-sanitizer >/dev/null; then
    say "$1: skipped: no compute-sanitizer"
    return
  fi
  # Without torch's cache an access out of bounds leaves the allocation, and is seen.
  MHA_EXT_TEST_ON=cuda PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$1" "$2" \
    compute-sanitizer --tool "$1" --error-exitcode 3 \
    python3 -m pytest -q -p no:cacheprovider -n0 tests/test_every_kernel.py
}

build() {
  local arch
  arch=$(python3 -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU")
print("{}.{}".format(*torch.cuda.get_device_capability()))' 2>&1) || stop "${arch##*$'\n'}"
  MAX_JOBS=${MAX_JOBS:-16} MHA_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$arch" NVCC_APPEND_FLAGS=-lineinfo \
    step build 420 python3 setup.py build_ext --inplace
  [ $status = 0 ] || stop "the build failed, see build.log in logs.tar"
}

info() {
  step info 30 python3 -c '
from mha_ext import _load, cli
cli.main(["info"])
print(_load.shared_objects["_C_cuda"], "for", _load.cuda.archs)'
}

gpu_tests() { tests gpu_tests 120 -n0 tests/test_gpu.py; }
cuda_tests() { MHA_EXT_TEST_ON=cuda tests cuda_tests 300 -m core -k cuda --maxfail=50; }
benchmark() { step benchmark 300 python3 -m mha_ext bench --suite cuda --json "$folder/results.json"; }
memcheck() { checker memcheck 150; }
synccheck() { checker synccheck 60; }
racecheck() { checker racecheck 120; }

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  git describe --always --dirty 2>/dev/null
  python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
} >>"$folder/summary.txt" 2>&1

[[ " $chosen " != *" build "* ]] || build
reason=$(python3 -c 'import sys; from mha_ext._load import why_no_gpu; sys.exit(why_no_gpu())' 2>&1) ||
  stop "${reason##*$'\n'}"
for name in ${steps#build }; do
  [[ " $chosen " != *" $name "* ]] || "$name"
done
exit $status
