#!/bin/sh
# Compares the plans of an older commit with those of the working tree, as tests/plans dumps them:
#     tools/dev/compare_plans.sh COMMIT [RUN/SEED [SECTION]]
# Prints the first differing line of the named run (see plan_dumps --list), or of the first run whose
# hashes differ. Each side is built with its own dumper, which translates to common names. The commit
# is unpacked and built in the folder COMPARE_DIR (default: a folder for the commit below /tmp), which
# stays for the next comparison. BUILD is the build folder of the working tree (default: build).
# The exit status is 1 if something differs.
set -eu
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
commit=$(git rev-parse --verify --short "$1^{commit}")
run=${2:-}
section=${3:-}
old=${COMPARE_DIR:-${TMPDIR:-/tmp}/ballast-plans-$commit}
build=${BUILD:-build}

build_dumper() {  # of the source tree $1 in the folder $2
  [ -e "$2/build.ninja" ] || meson setup "$2" "$1" -Db_pch=false -Dcuda=disabled >"$2.log" 2>&1 ||
    { tail "$2.log"; exit 2; }
  ninja -C "$2" tests/plans/plan_dumps >"$2.log" 2>&1 || { tail "$2.log"; exit 2; }
}

if [ ! -e "$old/tests/plans" ]; then
  mkdir -p "$old"
  git archive "$commit" | tar -x -C "$old"
fi
[ -e "$old/tests/plans" ] || { echo "$commit has no tests/plans"; exit 2; }
build_dumper "$old" "$old/build"
build_dumper . "$build"

dump_old() { BALLAST_TEST_DATA="$old/tests/data" "$old/build/tests/plans/plan_dumps" "$@"; }
dump_new() { BALLAST_TEST_DATA=tests/data "$build/tests/plans/plan_dumps" "$@"; }
before=$(mktemp)
after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT

if [ -z "$run" ]; then
  dump_old --hashes >"$before"
  dump_new --hashes >"$after"
  if cmp -s "$before" "$after"; then
    echo "all plans are those of $commit"
    exit 0
  fi
  run=$(diff "$before" "$after" | sed -n 's/^[<>] \([^ ]*\) .*/\1/p' | head -n 1)
  echo "$(diff "$before" "$after" | grep -c '^>') of $(wc -l <"$after") runs differ, first $run"
fi
dump_old --dump "$run" $section >"$before"
dump_new --dump "$run" $section >"$after"
cmp -s "$before" "$after" && { echo "run $run is that of $commit"; exit 0; }
# The hashes in the titles of sections differ wherever a line of the section does.
for file in "$before" "$after"; do sed -i 's/^== \([^ ]*\) .*/== \1/' "$file"; done
line=$(cmp "$before" "$after" | sed 's/.* //')
echo "run $run, $(head -n "$line" "$before" | grep '^== ' | tail -n 1 | cut -c 4-), line $line:"
echo "$commit: $(sed -n "${line}p" "$before")"
echo "now:      $(sed -n "${line}p" "$after")"
exit 1
