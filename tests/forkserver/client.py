"""Stands for a program that tests/forkserver/server.py runs: `python -m MODULE …`, `python -c TEXT …`, `python FILE …`.

Imports little, because each start pays for it.
"""

import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    """Send arguments, environment and descriptors; wait for the exit status."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: link.send(bytes([number])))
    descriptors = sorted({int(name) for name in os.listdir("/proc/self/fd")} - {link.fileno()})
    descriptors = [number for number in descriptors if _is_open(number)]
    request = repr((sys.argv[1:], os.getcwd(), dict(os.environ), descriptors)).encode()
    socket.send_fds(link, [len(request).to_bytes(8, "little")], descriptors)
    link.sendall(request)
    os.closerange(3, link.fileno())
    os.closerange(link.fileno() + 1, 4096)
    answer = link.recv(4)
    status = int.from_bytes(answer, "little", signed=True) if answer else 1
    if status < 0:
        if -status != signal.SIGKILL:  # which has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


main()
