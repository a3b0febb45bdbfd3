#!/usr/bin/env bash
# Everything worth running on a machine with a GPU, in about 20 minutes: build, tests, memory checker, benchmark.
#   benchmarks/on_gpu.sh FOLDER      logs, results.json and summary.txt go to FOLDER
# Nothing is downloaded: torch with CUDA, nvcc, pytest, pytest-xdist and hypothesis must be there. A step that fails does
# not keep the others from running; the exit status is 1 if any failed.
set -uo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0
: >"$folder/summary.txt"

step() {  # step NAME SECONDS COMMAND...
  local name=$1 start=$SECONDS verdict=ok
  timeout "$2" "${@:3}" >"$folder/$name.log" 2>&1 || { verdict="FAILED ($?)"; status=1; }
  echo "$name: $verdict, $((SECONDS - start)) s; $(tail -n 1 "$folder/$name.log" | cut -c1-200)" | tee -a "$folder/summary.txt"
}

{
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  git describe --always --dirty 2>/dev/null
  python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
} >>"$folder/summary.txt" 2>&1

arch=$(python3 -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))')
step build 420 env MAX_JOBS=16 MHA_EXT_CUDA=1 TORCH_CUDA_ARCH_LIST="$arch" NVCC_APPEND_FLAGS=-lineinfo \
  python3 setup.py build_ext --inplace
step info 60 python3 -m mha_ext info
step cuda_tests 420 env MHA_EXT_TEST_ON=cuda python3 -m pytest -q -p no:cacheprovider -m core -k cuda --maxfail=50
step gpu_tests 120 python3 -m pytest -q -p no:cacheprovider -n0 tests/test_gpu.py
if command -v compute-sanitizer >/dev/null; then
  for check in memcheck racecheck synccheck; do
    # Without torch's cache an access out of bounds leaves the allocation, and is seen.
    step "$check" 300 env MHA_EXT_TEST_ON=cuda PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$check" --error-exitcode 3 \
      python3 -m pytest -q -p no:cacheprovider -n0 tests/test_every_kernel.py
  done
fi
step benchmark 420 python3 -m mha_ext bench --suite cuda --json "$folder/results.json"
exit $status
