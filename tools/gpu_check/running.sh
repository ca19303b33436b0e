# Runs checks with time limits and reports them. Sourced by tools/gpu_check.sh, which sets `part`,
# `out`, `logs`, `bin` and `top`.

# Seconds for all checks together.
all=${GPU_CHECK_SECONDS:-570}
no_gpu="" ok=0 failed=0 skipped=0
here=$top/tools/gpu_check
started=() # checks that run now, as arguments of results.py

report() { # NAME VERDICT SECONDS TEXT
  case $2 in ok) ok=$((ok + 1)) ;; skipped) skipped=$((skipped + 1)) ;; *) failed=$((failed + 1)) ;; esac
  printf '%-30s %-7s %4s s  %s\n' "$1" "$2" "$3" "${4:0:260}"
}

# Reports a check that did not run.
skip() { # NAME REASON
  python3 -B "$here/results.py" skip "$out/results.jsonl" "$part" "$1" "$2"
  report "$1" skipped 0 "$2"
}

# Starts a check in the background, as SHARDS processes that share the tests of a program of Google
# Test. conclude() waits for it.
launch() { # NAME SECONDS SHARDS COMMAND...
  local name=$1 most=$2 shards=$3 log left shard
  shift 3
  log=$logs/${name//[^A-Za-z0-9.]/_}.log
  left=$((all - SECONDS))
  if [ "$left" -lt 5 ]; then
    skip "$name" "no time is left of $all s"
    return
  fi
  [ "$most" -le "$left" ] || most=$left
  printf '%q ' "$@" >"$log.command"
  for ((shard = 0; shard < shards; shard++)); do
    (
      begin=$SECONDS
      if [ "$shards" -gt 1 ]; then
        threads=$(($(nproc) / shards))
        export GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard OMP_WAIT_POLICY=passive
        export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
      fi
      timeout -k 5 "$most" "$@" >"$log.$shard" 2>&1
      echo "$? $((SECONDS - begin))" >"$log.$shard.end"
    ) &
  done
  started+=("$name" "$most" "$shards" "$log")
}

# Waits for all checks that were started and reports them.
conclude() {
  local verdict seconds text
  wait
  while [ ${#started[@]} -gt 0 ]; do
    IFS=$'\t' read -r verdict seconds text < <(
      python3 -B "$here/results.py" check "$out/results.jsonl" "$part" "${started[@]:0:4}")
    report "${started[0]}" "${verdict:-FAILED}" "${seconds:-0}" "${text:-}"
    started=("${started[@]:4}")
  done
}

check() { # NAME SECONDS COMMAND...
  launch "$1" "$2" 1 "${@:3}"
  conclude
}

# Returns why a check that needs a GPU and, if TOOL is not -, a program of the machine cannot run.
refusal() { # TOOL
  if [ -n "$no_gpu" ]; then
    echo "$no_gpu"
  elif [ "$1" != - ] && ! command -v "$1" >/dev/null; then
    echo "there is no ${1##*/}"
  fi
}

# Starts a check that needs a GPU and, if TOOL is not -, a program.
launch_on_gpu() { # TOOL NAME SECONDS SHARDS COMMAND...
  local reason
  reason=$(refusal "$1")
  if [ -n "$reason" ]; then skip "$2" "$reason"; else launch "${@:2}"; fi
}

on_gpu() { # TOOL NAME SECONDS COMMAND...
  launch_on_gpu "$1" "$2" "$3" 1 "${@:4}"
  conclude
}

# Runs a script that needs modules of Python.
with_modules() { # "MODULES" NAME SECONDS COMMAND...
  local module
  for module in $1; do
    if [ -z "$no_gpu" ] && ! python3 -c "import $module" 2>/dev/null; then
      skip "$2" "python3 has no module $module"
      return
    fi
  done
  on_gpu - "${@:2}"
}

step() { # NAME SECONDS OPTIONS...
  on_gpu - "$1" "$2" "$bin/ballast" bench step --device cuda --json "${@:3}"
}

sanitize() { # TOOL NAME SECONDS FILTER
  launch_on_gpu compute-sanitizer "$1, $2" "$3" 1 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$bin/gpu_kernels" --gtest_filter="$4"
}

# Tests of kernels in eight processes, as references on the host take most of the time.
kernels() { # NAME SECONDS FILTER
  launch "$1" "$2" 8 "$bin/gpu_kernels" --gtest_filter="$3"
}

# Prints the compute capability of the first GPU, such as 9.0, or nothing.
capability() {
  command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1
}

# Whether `ballast --version` in $version names machine code for a compute capability: that of the
# same major number and no larger minor one. Without the line, as in builds for -Dgpu_architectures=
# native, code is assumed.
has_code_for() { # CAPABILITY
  local codes code
  codes=$(printf '%s\n' "$version" | sed -n 's/^ *GPU kernels *machine code for \([0-9., ]*\).*/\1/p')
  [ -n "$codes" ] && [ -n "$1" ] || return 0
  for code in ${codes//,/ }; do
    if [ "${code%.*}" = "${1%.*}" ] && [ "${code#*.}" -le "${1#*.}" ]; then return 0; fi
  done
  return 1
}

# The first check. Without a GPU, checks that do not skip themselves are left out.
check_gpu() {
  local before=$skipped
  check GPU 60 "$bin/gpu_device"
  if [ $skipped -gt $before ]; then
    no_gpu=$(python3 -B "$here/results.py" reason "$logs/GPU.log.0")
  elif ! has_code_for "$(capability)"; then
    echo "no machine code for compute capability $(capability): the driver compiles the kernels first"
    on_gpu - 'compiling kernels' 240 "$bin/gpu_kernels" \
      --gtest_filter='CudaRows.*:*CudaMixers*short*:CudaNorm.IsTheHosts*:Attention/1.Seq*:CudaUpdate.E*:Tokens*.Grad*'
  fi
}

count_gpus() {
  if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>/dev/null | grep -c '^GPU '; else echo 0; fi
}
