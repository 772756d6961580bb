"""`python in_pid_namespace.py COMMAND...`: runs the command in a PID namespace of its own, as a container has.

Needs the right to make one (CAP_SYS_ADMIN). SIGINT and SIGTERM are handed on, the exit status is the command's; it dies
with this process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

CLONE_NEWPID: Final = 0x20000000
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> int:
    if _LIBC.unshare(CLONE_NEWPID) != 0:
        print(f"no PID namespace: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    # The supervisor starts its processes with these blocked, for them to unblock.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP))
    pid = os.fork()
    if pid == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.pop("BATON_SUPERVISOR_PID", None)  # its parent has no number in here
        os.execv(command[0], command)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: os.kill(pid, signum))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
