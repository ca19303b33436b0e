#!/bin/sh
# Packs a release build into one archive for machines with a GPU and without packages or network:
#
#   tools/bundle.sh BUILD ARCHIVE        for example tools/bundle.sh build-cuda13 ballast-cuda13.tar.xz
#
# If BUILD does not exist, it is made, with machine code for GPUs of compute capability 8.0 (A100, and
# 8.6), 8.9 (RTX 4090, L40S), 9.0 (H100), 10.0 (B200, B300) and 12.0 (RTX 5090), as far as nvcc knows
# them. GPUs without machine code in a bundle spend up to a minute at the first start.
#
# The CUDA toolkit of the build decides where the program runs: CUDA 13 needs drivers from 580 on and
# cuBLASLt 13, CUDA 12 needs drivers from 525 on and cuBLASLt 12. Machines with older drivers need a
# second build. The first nvcc in PATH is taken:
#
#   PATH=/usr/local/cuda-12.9/bin:$PATH tools/bundle.sh build-cuda12 ballast-cuda12.tar.xz
#
# The archive holds one folder, ballast: the program, the MPI module if it was built, the GPU tests
# with their data, the tests of ranks, the libraries that they link, and tools/gpu_check.sh. It does not include libc,
# libstdc++ and libgcc, which must not be older than this machine's, or anything of NVIDIA, which
# the program finds on the machine. It needs no installation:
#
#   tar xf ballast.tar.xz                or: python3 -m tarfile -e ballast.tar.xz
#   ballast/bin/ballast --version
#   ballast/tools/gpu_check.sh correct
set -eu

fail() {
  echo "bundle: error: $*" >&2
  exit 1
}

[ $# -eq 2 ] || fail "usage: tools/bundle.sh BUILD ARCHIVE.tar.xz"
build=$1 archive=$2 largest=$((40 * 1024 * 1024))
source=$(cd "$(dirname "$0")/.." && pwd)
# Replaces an existing file only if it is such a bundle.
[ ! -L "$archive" ] || fail "$archive is a symbolic link; choose another file"
if [ -e "$archive" ]; then
  [ -f "$archive" ] || fail "$archive is not a regular file; choose another file"
  [ ! -s "$archive" ] || [ "$(tar -tf "$archive" 2>/dev/null | head -n 1)" = ballast/ ] ||
    fail "$archive exists and is not a bundle of ballast; choose another file"
fi
[ -d "$(dirname -- "$archive")" ] || fail "there is no folder $(dirname -- "$archive")"
for tool in ninja meson strip xz tar ldd python3; do
  command -v $tool >/dev/null || fail "there is no $tool"
done
if [ ! -e "$build" ]; then
  meson setup "$build" "$source" --buildtype=release -Dcuda=enabled -Dgpu_architectures=all >/dev/null ||
    fail "meson setup: $(sed -n 's/^.*ERROR: //p' "$build/meson-logs/meson-log.txt")"
fi
[ -f "$build/build.ninja" ] || fail "$build is not a build folder; name one that does not exist yet"
meson introspect "$build" --buildoptions | python3 -c '
import json, sys
options = {option["name"]: option["value"] for option in json.load(sys.stdin)}
sys.exit(options["buildtype"] != "release" or options["b_sanitize"] != "none")' ||
  fail "$build is not a release build; configure it with --buildtype=release"

tests=$(ninja -C "$build" -t targets all |
  sed -n 's/^\(tests\/[a-z0-9]*\/gpu_[a-z0-9_]*\): cpp_LINKER.*/\1/p')
# Tests of ranks, which run under mpirun.
ranks=$(ninja -C "$build" -t targets all |
  sed -n 's/^\(tests\/conformance\/conformance_comm\): cpp_LINKER.*/\1/p
          s/^\(tests\/e2e\/e2e_ranks_matrix\): cpp_LINKER.*/\1/p')
module=$(ninja -C "$build" -t targets all | sed -n 's/^\(tools\/ballast_mpi\.so\): cpp_LINKER.*/\1/p')
ninja -C "$build" tools/ballast $tests $ranks $module >/dev/null || fail "the build failed: ninja -C $build"

# "CUDA 13.0, for drivers from 580 on", or nothing.
cuda=$("$build/tools/ballast" --version | sed -n 's/^ *devices .*cuda (\(CUDA [^)]*\)).*/\1/p')
[ -n "$cuda" ] || fail "$build has no CUDA; see what meson setup says about it"
named=$(printf '%s' "${archive##*/}" | sed -n 's/.*cuda-\{0,1\}\(1[0-9]\).*/\1/p')
case "$cuda" in
  "CUDA ${named:-1}"*) ;;
  *) fail "$archive is named after CUDA $named, but $build is for $cuda" ;;
esac

stage=$(mktemp -d)
part=$archive.part-$$
trap 'rm -rf "$stage" "$part"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
top=$stage/ballast
mkdir -p "$top/bin" "$top/lib" "$top/tools/bench/peers" "$top/tests"
for program in tools/ballast $tests $ranks; do
  strip -o "$top/bin/${program##*/}" "$build/$program"
done
if [ -n "$module" ]; then
  strip -o "$top/lib/ballast_mpi.so" "$build/$module"
fi
# The module's MPI library must be installed on the machine.
for program in "$top"/bin/*; do ldd "$program"; done |
  awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so' |
  while read -r library; do
    strip -o "$top/lib/${library##*/}" "$library"
  done
cp -r "$source/tools/gpu_check.sh" "$source/tools/gpu_check" "$top/tools/"
cp "$source"/tools/bench/peers/step_*.py "$source"/tools/bench/peers/peers.py "$source"/tools/bench/peers/gpu_peers.py "$top/tools/bench/peers/"
cp -r "$source/tests/data" "$top/tests/"
rm -rf "$top/tests/data/__pycache__" "$top/tools/gpu_check/__pycache__"
# A build always gives the same archive, byte for byte. The dictionary is large enough to find the
# kernels of one program again in the next.
tar -C "$stage" --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf - ballast |
  xz -T1 --lzma2=preset=6,dict=128MiB >"$part"
bytes=$(wc -c <"$part")
if [ "$bytes" -gt "$largest" ]; then
  fail "the archive has $bytes bytes, more than $largest; build fewer -Dgpu_architectures"
fi
mv -f -- "$part" "$archive"
echo "bundle: $archive, $((bytes / 1024)) KiB, $(ls "$top/bin" | wc -l) programs," \
  "$(ls "$top/lib" | wc -l) libraries; $cuda;" \
  "$("$build/tools/ballast" --version | sed -n 's/^ *GPU kernels *//p')"
