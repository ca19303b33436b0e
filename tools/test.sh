#!/bin/sh
# Everything that must hold before a change is good: format, all quick suites with gcc, the same as
# on CPUs with fewer instruction sets, the suites that matter again under the sanitizers (thread
# sanitizer with clang), static analysis.
#
#   tools/test.sh            all of it
#   tools/test.sh quick      the suites with gcc only
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
build() {
  ninja -C "$1" >"$1/build.log" 2>&1 || {
    grep -E -A20 'FAILED|error' "$1/build.log" | head -n 80 >&2
    exit 1
  }
}

step "format"
tools/format.sh --check

step "build and test: gcc"
configure build-test
build build-test
meson test -C build-test --no-rebuild --print-errorlogs

if [ "${1:-}" = "quick" ]; then exit 0; fi

for isa in scalar avx2; do
  step "test as on a CPU with $isa kernels only"
  meson test -C build-test --no-rebuild --print-errorlogs --setup "masked_$isa"
done

# Clang links sanitizers to programs only.
sanitized="-Doptimization=1 -Db_lundef=false"

step "address and undefined-behaviour sanitizers: clang"
CXX=clang++ configure build-asan $sanitized -Db_sanitize=address,undefined -Dgpu_architectures=90
meson test -C build-asan --print-errorlogs --suite unit --suite conformance \
  --no-suite older-cpus --no-suite emulated --timeout-multiplier 4 >build-asan/test.log 2>&1 || {
  grep -E -A20 'FAILED|error' build-asan/test.log | head -n 80 >&2
  tail -n 100 build-asan/test.log >&2
  exit 1
}
tail -n 8 build-asan/test.log

step "thread sanitizer: clang"
CXX=clang++ configure build-tsan $sanitized -Db_sanitize=thread -Dcuda=disabled
meson test -C build-tsan --print-errorlogs --setup tsan --suite threads \
  --timeout-multiplier 8 >build-tsan/test.log 2>&1 || {
  grep -E -A20 'FAILED|error' build-tsan/test.log | head -n 80 >&2
  tail -n 100 build-tsan/test.log >&2
  exit 1
}
tail -n 8 build-tsan/test.log

step "static analysis, clang's warnings as errors"
tools/tidy.sh build-asan

printf '\nall good\n'
