"""The server of tests/forkserver: `python -m tests.forkserver.server SOCKET EXECUTABLE`."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from pathlib import Path

from tinsmith.processes import fork_server, garbage_collection


def preload() -> None:
    """Import what programs import; nothing of it may start a thread."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import tinsmith.cli
    import tinsmith.engine.cluster.worker
    import tinsmith.engine.fake.engine
    import tinsmith.engine.torch_engine
    import tinsmith.rl.policy.tinker
    import tinsmith.runner
    import tinsmith.service.server  # noqa: F401
    from tests import sdk_faults
    from tinsmith.dialects import dialects

    dialects()
    sdk_faults.keep_cancellations()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"


def main() -> None:
    """Fork for each connection until the process is terminated. Only a forked process returns: it runs its program."""
    path, executable = sys.argv[1:]
    status = fork_server.ends_at_once()
    preload()
    garbage_collection.leave_out_existing()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    words = fork_server.become(fork_server.serve(listener, lambda: listener.accept()[0]))
    listener.detach()  # closed
    sys.executable = executable
    fork_server.run(lambda: run(words), status)


def run(words: list[str]) -> None:
    """Run a program as `python WORDS` in this process."""
    folder = os.getcwd()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    match words[1:] if words[:1] == ["-P"] else words:
        case ["-m", module, *arguments]:
            sys.path[0] = folder
            sys.argv = ["-m", *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", text, *arguments]:
            sys.path[0] = ""
            sys.argv = ["-c", *arguments]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *arguments]:
            sys.path[0] = str(Path(file).parent.absolute())
            sys.argv = [file, *arguments]
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
