"""Runs a command that is not trusted: `python -m tinsmith.processes.confine LIMITS COMMAND`, with LIMITS in JSON.

On Linux, where the kernel grants namespaces, the command sees no network, no process but its own, and of the files
only those that `shown` names, read-only, and a /tmp of its own with an empty folder, in which it starts. It is
nobody's: as root it runs under a user id without files, else without any capability. Elsewhere only the limits hold.
Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tinsmith.processes.parent import end_with_forking_thread

NOT_CONFINED = 97
"""Exit code if namespaces are required and the kernel does not grant them."""

_NEW_USER, _NEW_FILES = 0x10000000, 0x00020000
_NEW_OTHERS = 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # processes, network, IPC and host name
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEV = 0x1000, 0x4000, 1 << 18, 2, 4
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442  # the same on all architectures
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_FIRST_USER = 0x40000000
"""User ids from here on belong to nobody; each command of root gets its own, so that each has its own processes."""
_FOLDER = "/tmp/program"
"""Where the command starts: its own, beside shown paths that lie in /tmp."""
_DEVICES = ("null", "zero", "full", "random", "urandom")


def main() -> None:
    """Confine this process and become the command."""
    limits, command = json.loads(sys.argv[1]), sys.argv[2:]
    os.umask(0o022)  # the command, as another user, must pass the folders that are made for it
    end_with_forking_thread()
    if not _enter_namespaces():
        if limits["strict"]:
            sys.exit(NOT_CONFINED)
        _become(command, limits, limits["folder"])
    first = os.fork()
    if first:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    end_with_forking_thread()
    try:
        _replace_files(limits)
        folder = _FOLDER
    except OSError:
        if limits["strict"]:
            os._exit(NOT_CONFINED)
        folder = limits["folder"]
        with suppress(OSError):  # what was mounted there before the error
            _call("umount2", folder.encode(), _DETACH)
    program = os.fork()
    if not program:
        _become(command, limits, folder)
    while True:  # the first process of a namespace takes over those whose parents ended; the kernel ends all with it
        ended, status = os.wait()
        if ended == program:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _enter_namespaces() -> bool:
    """Whether this process is in new namespaces: the next process that it forks is the first of its namespace."""
    if sys.platform != "linux":
        return False
    user, group = os.geteuid(), os.getegid()
    with suppress(OSError, AttributeError):
        if user == 0:
            with suppress(OSError):
                _call("unshare", _NEW_FILES | _NEW_OTHERS)
                return True
        _call("unshare", _NEW_USER | _NEW_FILES | _NEW_OTHERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
        return True
    return False


def _replace_files(limits: Mapping[str, Any]) -> None:
    """Make a new file system with the shown paths, devices and an empty /tmp. Raises OSError."""
    root = Path(limits["folder"])
    pivot = _PIVOT_ROOT.get(platform.machine())
    if pivot is None:
        raise OSError(f"no system call is known for {platform.machine()}")
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", str(root), "tmpfs", _NO_SUID | _NO_DEV, "size=1m,mode=755")
    (root / "tmp").mkdir()
    _mount("tmpfs", str(root / "tmp"), "tmpfs", _NO_SUID | _NO_DEV, f"size={limits['disk_bytes']},mode=1777")
    for path in limits["shown"]:
        _show(Path(path), root)
    for name in _DEVICES:
        _show(Path("/dev") / name, root, read_only=False)
    (root / "proc").mkdir()
    with suppress(OSError):  # a container that hides parts of /proc does not allow a new one
        _mount("proc", str(root / "proc"), "proc", _NO_SUID | _NO_DEV)
    own = root / Path(_FOLDER).relative_to("/")
    own.mkdir()
    own.chmod(0o777)
    _set_read_only(root, 0)
    os.chdir(root)
    _call("syscall", pivot, b".", b".")
    _call("umount2", b".", _DETACH)


def _show(path: Path, root: Path, *, read_only: bool = True) -> None:
    """Show a file or folder under its own path; a link stays a link, and what is missing stays missing."""
    place = root / path.relative_to("/")
    if place.is_symlink() or not os.path.lexists(path):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        place.symlink_to(path.readlink())
        return
    if path.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(str(path), str(place), None, _BIND | _RECURSIVE)
    if read_only:
        _set_read_only(place, _AT_RECURSIVE)


def _become(command: Sequence[str], limits: Mapping[str, Any], folder: str) -> NoReturn:
    """Set the limits and execute the command in its folder, with an environment of its own."""
    os.chdir(folder)
    memory, size, seconds = limits["memory_bytes"], limits["disk_bytes"], limits["cpu_seconds"]
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):
        with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
            resource.setrlimit(kind, (most, most))
    if folder == _FOLDER and os.geteuid() == 0:
        user = _FIRST_USER + int(limits["number"])
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.execve(command[0], list(command), {**variables, **threads})


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, options and options.encode())


def _set_read_only(path: Path, flags: int) -> None:
    """Make a mount read-only, without devices and without programs that change the user."""
    attributes = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, str(path).encode(), flags, attributes, len(attributes))


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError."""
    function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
