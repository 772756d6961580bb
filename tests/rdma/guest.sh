#!/bin/bash
# Inside the virtual machine: makes the Soft-RoCE device, runs the tests, and asks the device what it has counted.
# Usage: guest.sh FOLDER PYTHON STDLIB SITE PYVERBS COMMAND...; the report and the exit code go to FOLDER.
# Exit code 75: the kernel has lost the device by itself, so the tests after that say nothing.
set -uo pipefail
folder=$1 python=$2 stdlib=$3 site=$4 pyverbs=$5
shift 5
exec >>"$folder/report" 2>&1
trap 'echo "$?" >"$folder/rc"; sync' EXIT

counters() {
    echo "--- $1: what the device has counted"
    rdma statistic show link rxe0/1
    ethtool -S dummy0 2>/dev/null || true
}
sent_packets() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts; }

set -e
echo "The machine is up."
for module in virtio_blk ext4 dummy rdma_rxe ib_uverbs; do modprobe "$module"; done
ip link set lo up
ip link add dummy0 type dummy
ip address add 10.77.0.1/24 dev dummy0
# The largest MTU of RDMA, 4096, and its headers.
ip link set dummy0 mtu 4200 up
rdma link add rxe0 type rxe netdev dummy0
ulimit -l unlimited
mkdir -p /tmp/image
mount -o ro /dev/vda /tmp/image
# The host's files are read one by one over a slow channel; these come from the image.
mount --bind /tmp/image/site "$site"
mount --bind /tmp/image/stdlib "$stdlib"
mount --bind /tmp/image/pyverbs "$pyverbs"
mkdir -p /tmp/tree
cp -a /tmp/image/tree/. /tmp/tree
cd /tmp/tree
export PYTHONPATH=/tmp/tree:/tmp/tree/proto OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export BATON_RDMA_BYTES=/tmp/handed-over
export BATON_RDMA_PACKETS=/tmp/packets-of-the-device-that-was-removed
echo 0 >"$BATON_RDMA_PACKETS"
echo 0 0 >"$BATON_RDMA_BYTES"
"$python" -c 'import platform; print("Linux", platform.release(), "Python", platform.python_version())'
rdma link
counters before
before=$(sent_packets)
again=
[ ! -e "$folder/cache" ] || again=again
set +e
"$python" "$@"
rc=$?
set -e
# Soft-RoCE of Linux 6.1 has lost its device like this, as if a reference were counted down twice: sysfs lists it, all
# else denies that it is there, and it can neither be removed nor made again.
if [ -e /sys/class/infiniband/rxe0 ] && ! rdma statistic show link rxe0/1 >/dev/null 2>&1; then
    dmesg | grep -v "speed is unknown" | tail -n 60
    exit 75
fi
counters after
moved=$(($(sent_packets) + $(cat "$BATON_RDMA_PACKETS") - before))
# What the cluster's handoffs moved, and what the device sent between their begin and their end.
read -r bytes packets <"$BATON_RDMA_BYTES"
echo "the device has sent $moved packets in all, each of at most 4096 bytes of data;"
echo "handed over by the cluster: $bytes bytes, in which time it sent $packets packets"
case " $* $again" in *" -k "* | *again) whole=0 ;; *" tests/rdma "*) whole=1 ;; *) whole=0 ;; esac
if [ "$rc" -eq 0 ] && { [ "$moved" -le 0 ] || [ $((packets * 4096)) -lt "$bytes" ]; }; then
    echo "The device has not moved what was handed over: it went another way."
    rc=1
fi
if [ "$rc" -eq 0 ] && [ "$whole" -eq 1 ] && [ "$bytes" -le 0 ]; then
    echo "No cluster has handed anything over: the test of that has not run."
    rc=1
fi
exit "$rc"
