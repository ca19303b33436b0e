#!/bin/sh
# Runs every check that a change must pass: format, all tests with gcc, tests of vector kernels as
# on CPUs with fewer instruction sets, address and undefined-behaviour sanitizers over unit and
# conformance tests, the thread sanitizer over tests of threads, static analysis, and the Python
# package if PyTorch is installed.
#
#   tools/test.sh            all of it
#   tools/test.sh quick      for daily work: format, unit, architecture and conformance tests with
#                            gcc, without those that emulate a GPU or start several ranks
set -eu
cd "$(dirname "$0")/.."

tools/setup.sh --tests

started=$(date +%s)
step() { printf '\n== %s (%d s so far)\n' "$*" $(($(date +%s) - started)); }
configure() {
  folder=$1
  shift
  [ -f "$folder/build.ninja" ] || meson setup "$folder" --werror "$@" >"$folder.log" 2>&1 || {
    cat "$folder.log" >&2
    exit 1
  }
  rm -f "$folder.log"
}
# Builds what the chosen tests need and runs one more than there are cores, since many wait.
check() {
  folder=$1
  shift
  meson test -C "$folder" --num-processes $(($(nproc) + 2)) --print-errorlogs "$@" >"$folder/test.log" 2>&1 || {
    grep -E -A20 'FAILED|error' "$folder/test.log" | head -n 80 >&2
    tail -n 100 "$folder/test.log" >&2
    exit 1
  }
  sed -n '/^Ok:/,/^Timeout:/p' "$folder/test.log"
}

step "format"
tools/format.sh --check

if [ "${1:-}" = "quick" ]; then
  step "build and test: gcc"
  configure build-test -Dgpu_architectures=80
  check build-test --suite unit --suite arch --suite conformance \
    --no-suite emulated --no-suite kernels --no-suite older-cpus --no-suite ranks
  exit 0
fi

# Compiles several sources as one, which is faster for a build from scratch.
joined="-Dunity=on -Dunity_size=32"

step "build and test: gcc"
configure build-test $joined -Dgpu_architectures=80
check build-test

for isa in scalar avx2; do
  step "test as on a CPU with $isa kernels only"
  check build-test --no-rebuild --setup "masked_$isa" --suite isa
done

# Excluded from sanitizers: calibrations, which run alone and measure the time of code that other
# tests cover. Clang links sanitizers to programs only.
sanitized="-Doptimization=1 -Db_lundef=false $joined"

step "address and undefined-behaviour sanitizers: clang"
CXX=clang++ configure build-asan $sanitized -Db_sanitize=address,undefined -Dgpu_architectures=90
check build-asan --setup asan --suite unit --suite conformance --no-suite older-cpus --no-suite emulated \
  --no-suite rates --no-suite other-sizes --timeout-multiplier 4

step "thread sanitizer: clang"
CXX=clang++ configure build-tsan $sanitized -Db_sanitize=thread -Dcuda=disabled
check build-tsan --setup tsan --suite threads --timeout-multiplier 8

step "static analysis, clang's warnings as errors"
tools/tidy.sh build-asan

step "Python package"
if "${PYTHON:-python3}" -c 'import torch' 2>/dev/null; then
  tools/python_test.sh
else
  echo "left out: ${PYTHON:-python3} has no torch, which the tests of the optimizers need"
fi

printf '\nall good\n'
