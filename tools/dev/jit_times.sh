#!/bin/sh
# Times how long a driver takes to compile the PTX of all kernels for GPUs without machine code:
#     tools/dev/jit_times.sh [ARCHITECTURE...]      for example 100 103 120 (default: 100 120)
# Compiles the kernels to the PTX that releases include (compute_80) and this PTX to machine code by
# ptxas, one file after the other. Prints the CPU seconds of ptxas per architecture. The compiler in
# a driver is of the same kind, but may be of another version. Needs nvcc and ptxas in PATH or in
# /usr/local/cuda/bin, not a GPU.
set -eu
cd "$(dirname "$0")/../.."
PATH=$PATH:/usr/local/cuda/bin
[ $# -gt 0 ] || set -- 100 120
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

count=0
for kernel in $(find src -name '*.cu' | sort); do
  count=$((count + 1))
  nvcc -std=c++20 -O3 --expt-relaxed-constexpr -Iinclude -I. -arch=compute_80 -ptx "$kernel" \
    -o "$folder/$count.ptx"
done
echo "$count files, $(cat "$folder"/*.ptx | grep -c '\.entry') kernels," \
  "$(cat "$folder"/*.ptx | wc -c) bytes of PTX, $(ptxas --version | sed -n 's/.*release \(.*\)/CUDA \1/p')"
for architecture in "$@"; do
  python3 - "$folder" "$architecture" <<'P'
import pathlib, resource, subprocess, sys
folder, architecture = sys.argv[1:]
spent = []
for file in sorted(pathlib.Path(folder).glob("*.ptx")):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["ptxas", f"-arch=sm_{architecture}", "-O3", "-o", "/dev/null", file], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
print(f"sm_{architecture}: {sum(spent):.1f} s of CPU time, {max(spent):.1f} s for the largest file")
P
done
