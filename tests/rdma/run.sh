#!/bin/bash
# RDMA for real, on any machine with Debian's packages: boots Debian's kernel in a virtual machine (emulated: no KVM is
# needed) over this machine's files, makes a Soft-RoCE device there, and runs the tests of tests/rdma on it.
#
# Usage: run.sh [PYTHON ARGUMENTS...], by default "-m pytest tests/rdma". PYTHON names the interpreter of the virtual
# environment; SECONDS_MAX is when the machine is given up. A machine whose kernel loses the device is booted once more,
# for the tests that have not passed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
seconds_max=${SECONDS_MAX:-900}
work=$PWD/build/rdma run=$PWD/build/rdma/run
[ "$#" -gt 0 ] || set -- -m pytest -o "cache_dir=$run/cache" --last-failed -p no:xdist -v --durations=8 tests/rdma

say() { echo "test-rdma: $*"; }
give_up() { say "$*" >&2; exit 1; }

# Debian's kernel has its 9p and virtio as modules: the virtual machine starts from an initramfs, which needs busybox.
packages=(qemu-system-x86 busybox-static udev rdma-core ibverbs-providers ibverbs-utils libibverbs-dev perftest
    python3-pyverbs kmod iproute2 ethtool e2fsprogs)

have_packages() {
    dpkg -s "${packages[@]}" >/dev/null 2>&1
}

install_packages() {
    have_packages && return
    [ "$(id -u)" -eq 0 ] || give_up "packages are missing; as root: apt-get install ${packages[*]}"
    say "installing packages"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}" \
        >"$work/apt.log" 2>&1 || { tail -5 "$work/apt.log" >&2; give_up "apt-get has failed"; }
}

# Sets `kernel` (the image) and puts its modules where the virtual machine looks for them.
fetch_kernel() {
    local release
    if ! release=$(cat "$work/release" 2>/dev/null) || [ ! -e "$work/kernel/boot/vmlinuz-$release" ]; then
        apt-cache show linux-image-amd64 >/dev/null 2>&1 || apt-get update -qq
        release=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: linux-image-\([0-9].*\)/\1/p' | head -1)
        [ -n "$release" ] || give_up "this distribution has no linux-image-amd64"
        say "fetching Linux $release"
        rm -rf "$work/kernel"
        mkdir -p "$work/kernel"
        (cd "$work/kernel" && apt-get download "linux-image-$release" 2>/dev/null && dpkg -x linux-image-*.deb . && rm ./*.deb)
        echo "$release" >"$work/release"
    fi
    kernel=$work/kernel/boot/vmlinuz-$release
    if [ ! -e "/lib/modules/$release/modules.dep" ]; then
        [ -w /lib ] || give_up "the kernel's modules have to be put into /lib/modules/$release: run this as root"
        mkdir -p /lib/modules
        cp -a "$work/kernel/lib/modules/$release" /lib/modules/
        depmod "$release"
    fi
}

# What Python reads, in one image: the virtual machine reads single files of the host slowly.
make_image() {
    local stage=$work/stage
    rm -rf "$stage"
    mkdir -p "$stage"/{tree,site,stdlib,pyverbs}
    tar -c --exclude='./.*' --exclude=./build --exclude=./docs --exclude=./k8s . | tar -x -C "$stage/tree"
    local heavy=(torch torchgen functorch triton nvidia transformers kubernetes_validate sympy matplotlib openai PIL
        fontTools networkx pip setuptools grpc_tools hf_xet mpmath virtme virtme_ng)
    tar -c -C "$site" --exclude='*mypy*' "${heavy[@]/#/--exclude=./}" . | tar -x -C "$stage/site"
    tar -c -C "$stdlib" --exclude=./test --exclude=./site-packages --exclude='./config-*' --exclude=./idlelib \
        --exclude=./ensurepip --exclude=./tkinter . | tar -x -C "$stage/stdlib"
    mkdir -p "$stage/stdlib/site-packages"
    cp -a "$pyverbs/." "$stage/pyverbs"
    "$python" -m compileall -q -j 2 "$stage" >/dev/null 2>&1 || true
    local kib
    kib=$(du -sk "$stage" | cut -f1)
    rm -f "$work/image"
    mkfs.ext4 -q -O ^has_journal -m 0 -d "$stage" "$work/image" "$((kib + kib / 4 + 65536))k"
    rm -rf "$stage"
}

began=$SECONDS
mkdir -p "$work"
[ -x "$python" ] || give_up "$python is not there: run make test-rdma"
install_packages
fetch_kernel
vng=$(dirname "$python")/vng
[ -x "$vng" ] || "$python" -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[vm]'
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
"$python" -c 'from kvtransfer.transports.rdma_verbs import load_verbs; load_verbs()' ||
    give_up "pyverbs does not load in $python: it has to be the distribution's version of Python"
pyverbs=$(dirname "$("$python" -c 'from kvtransfer.transports.rdma_verbs import load_verbs; print(load_verbs().qp.__file__)')")
"$python" -c 'from kvtransfer.transports.rdma_verbs import rdma_library; assert rdma_library()' ||
    give_up "the native poster was not built"
say "making the image"
make_image

rm -rf "$run"
mkdir -p "$run"
: >"$run/report"
machine=
trap '[ -z "$machine" ] || kill -- "-$machine" 2>/dev/null || true' EXIT

# Boots the machine, shows its report, and sets `rc`.
boot() {
    rm -f "$run/rc"
    say "booting; at most $seconds_max s from here"
    PATH=$(dirname "$python"):$PATH setsid timeout -k 10 "$seconds_max" "$vng" --disable-kvm -r "$kernel" --cpus 2 \
        --memory 4G --user root --rwdir "$run" --disk "$work/image" -- \
        bash "$PWD/tests/rdma/guest.sh" "$run" "$python" "$stdlib" "$site" "$pyverbs" "$@" >"$run/console" 2>&1 </dev/null &
    machine=$!
    tail -n "+$(($(wc -l <"$run/report") + 1))" -f --pid="$machine" "$run/report" || true
    wait "$machine" || true
    if [ ! -e "$run/rc" ]; then
        tail -20 "$run/console" >&2
        give_up "the virtual machine has ended, or was given up after $seconds_max s, without a result"
    fi
    rc=$(cat "$run/rc")
}

boot "$@"
if [ "$rc" -eq 75 ]; then
    say "the kernel has lost the device by itself (see above); once more, for the tests that have not passed"
    boot "$@"
fi
say "$((SECONDS - began)) s, exit code $rc"
exit "$rc"
