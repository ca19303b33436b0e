#!/bin/sh
# Installs the packages of this distribution from which Ballast is built, and nothing else. Safe to run
# again: if every package is installed, it needs neither the network nor root.
#
#   tools/setup.sh                       what building needs
#   tools/setup.sh --tests               also what only tools/test.sh needs (Debian and Ubuntu)
#   tools/setup.sh --command PACKAGE...  prints the command that installs these; Debian's names
set -eu

# Names in Debian and Ubuntu, and in Fedora.
table="
g++                gcc-c++
meson              meson
ninja-build        ninja-build
pkg-config         pkgconf-pkg-config
libfmt-dev         fmt-devel
nlohmann-json3-dev json-devel
libcli11-dev       cli11-devel
liburing-dev       liburing-devel
libtbb-dev         tbb-devel
libxsimd-dev       xsimd-devel
libdnnl-dev        onednn-devel
libxxhash-dev      xxhash-devel
libssl-dev         openssl-devel
libhwloc-dev       hwloc-devel
libopenmpi-dev     openmpi-devel
openmpi-bin        openmpi
python3-dev        python3-devel
python3-venv       python3
"
of_tests="libgtest-dev clang clang-format clang-tidy libclang-rt-dev libomp-dev lld iproute2 strace tmux"

fail() {
  echo "setup: error: $*" >&2
  exit 1
}

# The distribution: ID and ID_LIKE of its file; tests name another one.
about=$(sed -n 's/^ID\(_LIKE\)\{0,1\}=//p' "${OS_RELEASE:-/etc/os-release}" 2>/dev/null | tr -d '"' | tr '\n' ' ')
case " $about" in
  *" debian "* | *" ubuntu "*)
    column=1
    get="apt-get install"
    is_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q "ok installed"; }
    install() { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }
    ;;
  *" fedora "*)
    column=2
    get="dnf install"
    is_installed() { rpm -q "$1" >/dev/null 2>&1; }
    install() { $sudo dnf install -y --setopt=install_weak_deps=False "$@"; }
    ;;
  *) column=1 get="" ;;
esac

# Debian's names in this distribution's; one that the table lacks stays.
names_of() {
  for one in "$@"; do
    echo "$table" | awk -v one="$one" -v column=$column '$1 == one { one = $column } END { print one }'
  done | sort -u | tr '\n' ' ' | sed 's/ $//'
}

if [ "${1:-}" = "--command" ]; then
  shift
  [ $# -gt 0 ] || fail "--command needs names of packages"
  names=$(names_of "$@")
  echo "${get:-install the development packages that Debian calls} $names"
  exit 0
fi
[ -n "$get" ] || fail "knows Debian, Ubuntu and Fedora; on another distribution install what Debian calls:" $(names_of $(echo "$table" | awk '{ print $1 }'))

wanted=$(echo "$table" | awk '{ print $1 }')
if [ "${1:-}" = "--tests" ]; then
  [ $column = 1 ] || fail "--tests: tools/test.sh runs on Debian and Ubuntu"
  wanted="$wanted $of_tests"
fi
missing=""
for package in $(names_of $wanted); do
  is_installed "$package" || missing="$missing $package"
done
if [ -z "$missing" ]; then
  echo "setup: every package is installed"
  exit 0
fi

sudo=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "not root and no sudo; as root run: $get$missing"
  sudo="sudo"
fi
echo "setup: installing$missing"
log=$(mktemp)
if ! install $missing >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  fail "${get%% *} failed; its whole output is in $log"
fi
rm -f "$log"
[ $column = 1 ] || echo "setup: for MPI, before meson and before each run: module load mpi"
echo "setup: done"
