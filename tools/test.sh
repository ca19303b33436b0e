#!/bin/sh
# Runs every check that a change must pass: format, all tests with gcc, tests of vector kernels as
# on CPUs with fewer instruction sets, address and undefined-behaviour sanitizers over unit and
# conformance tests, the thread sanitizer over tests of threads, static analysis, and the Python
# package if PyTorch is installed.
#
#   tools/test.sh            all of it
#   tools/test.sh quick      for daily work: format, unit, architecture and conformance tests with
#                            gcc, without those that emulate a GPU or start several ranks
#   tools/test.sh --all      all of it, also what has passed before in the same state
#
# Build folders remember which tests have passed and which units were clean, with a digest of what
# they depend on. See tools/dev/run_tests.py.
set -eu
cd "$(dirname "$0")/.."

tools/setup.sh --tests

all=
[ "${1:-}" != "--all" ] || all=--all
tests() {
  python3 -B tools/dev/run_tests.py "$@"
}
started=$(date +%s)
# CPU seconds of the whole machine.
busy() { awk '/^cpu / { print int(($2 + $3 + $4 + $7 + $8) / 100) }' /proc/stat; }
busy_before=$(busy)
step() {
  printf '\n== %s (so far: %d s, %d CPU-s)\n' "$*" $(($(date +%s) - started)) $(($(busy) - busy_before))
}
# A hundred programs are linked. LLVM's linker needs a quarter of the time for each.
linker=
command -v ld.lld >/dev/null && linker=CXX_LD=lld
# Programs have only the functions that they use, so that a change of others does not change them.
sections="-ffunction-sections -fdata-sections"
configure() {
  folder=$1
  shift
  [ -f "$folder/build.ninja" ] || env $linker CXXFLAGS="${CXXFLAGS:-} $sections" LDFLAGS="${LDFLAGS:-} -Wl,--gc-sections" \
    meson setup "$folder" --werror "$@" >"$folder.log" 2>&1 || {
    cat "$folder.log" >&2
    exit 1
  }
  rm -f "$folder.log"
}
errors() {
  grep -E -A20 'FAILED|error' "$1" | head -n 80 >&2
}
# Runs a command with the CPU time that tests leave, since many of them wait.
background=
start() {
  ("$@") >build-test/background.log 2>&1 &
  background=$!
}
finish() {
  pid=$background
  background=
  wait "$pid" || {
    errors build-test/background.log
    exit 1
  }
}
leisurely() {
  exec setsid nice -n 19 "$@"
}
trap '[ -z "$background" ] || kill -- "-$background" 2>/dev/null || kill "$background"' EXIT
trap 'exit 1' INT TERM
# Builds what the tests of these suites need: `build_tests FOLDER SUITES OPTIONS...`.
build_tests() {
  folder=$1
  suites=$2
  shift 2
  configure "$folder" "$@"
  files=$(tests "$folder" $suites --needed)
  leisurely ninja -C "$folder" $files
}
# Builds what the chosen tests need and runs two more than there are cores, since many wait.
check() {
  folder=$1
  shift
  tests "$folder" $all --num-processes $(($(nproc) + 2)) --print-errorlogs "$@" >"$folder/test.log" 2>&1 || {
    errors "$folder/test.log"
    tail -n 100 "$folder/test.log" >&2
    exit 1
  }
  sed -n '/passed before/p; /^Ok:/,/^Timeout:/p' "$folder/test.log"
}

step "format"
tools/format.sh --check $all

if [ "${1:-}" = "quick" ]; then
  step "build and test: gcc"
  configure build-test -Dgpu_architectures=80
  check build-test --suite unit --suite arch --suite conformance \
    --no-suite emulated --no-suite kernels --no-suite older-cpus --no-suite ranks
  exit 0
fi

# Compiles several sources as one, which is faster for a build from scratch.
joined="-Dunity=on -Dunity_size=64"
# Clang links sanitizers to programs only.
sanitized="-Doptimization=1 -Db_lundef=false $joined"
# Calibrations run alone and measure the time of code that other tests cover.
asan_suites="--suite unit --suite conformance --no-suite older-cpus --no-suite emulated --no-suite rates
--no-suite other-sizes"
tsan_suites="--suite threads"

step "build: gcc"
# A precompiled header takes gcc longer than the two or three units of a library take to read it.
configure build-test $joined -Db_pch=false -Dgpu_architectures=80
# Only a GPU runs the machine code of CUDA kernels. Without one, nvcc compiles it without optimisation.
nvcc_flags="-Xcicc=-O0 -Xptxas=-O0"
nvidia-smi -L >/dev/null 2>&1 && nvcc_flags=
NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} $nvcc_flags" ninja -C build-test >build-test/build.log 2>&1 || {
  errors build-test/build.log
  exit 1
}

step "test: gcc"
# Clang would keep all strings of a library in each program.
CXX=clang++ CXXFLAGS="${CXXFLAGS:-} -fsanitize-address-globals-dead-stripping -Qunused-arguments" \
  start build_tests build-asan "$asan_suites" $sanitized -Db_sanitize=address,undefined -Dgpu_architectures=90
check build-test

# A CPU without AVX-512 has tested AVX2 already.
fewer=scalar
grep -qw avx512f /proc/cpuinfo && fewer="$fewer avx2"
for isa in $fewer; do
  step "test as on a CPU with $isa kernels only"
  check build-test --no-rebuild --setup "masked_$isa" --suite isa
done

step "address and undefined-behaviour sanitizers: clang"
finish
CXX=clang++ start build_tests build-tsan "$tsan_suites" $sanitized -Db_sanitize=thread -Dcuda=disabled
check build-asan --setup asan $asan_suites --timeout-multiplier 4

step "thread sanitizer: clang"
finish
start leisurely tools/tidy.sh build-asan $all
check build-tsan --setup tsan $tsan_suites --timeout-multiplier 8

step "static analysis, clang's warnings as errors"
finish
cat build-test/background.log

step "Python package"
if "${PYTHON:-python3}" -c 'import torch' 2>/dev/null; then
  tools/python_test.sh
else
  echo "left out: ${PYTHON:-python3} has no torch, which the tests of the optimizers need"
fi

printf '\nall good\n'
