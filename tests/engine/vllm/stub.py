"""A stub of vLLM's server with the paths in use. Token i of sample s is (last prompt token + s + i + 1) % 512.

A prompt that begins with token 511 is answered slowly. Requests and closed connections are recorded in the file
--record, one per line. The file --faults is a JSON object: paths that answer with an error, or not at all, as long as
it says so. `hang` waits; `die` closes the connection and exits after DEATH_S. /metrics may be `frozen`, or `busy`:
frozen while a process computes. With --fail the stub prints an error and exits. It ends with its standard input.

While it sleeps, completions wait, and loading an adapter ends it: the GPU's memory is not there.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread, Timer
from typing import Any

SLOW = 511
CHUNK = 2
DEATH_S = 1.5


class Stub(ThreadingHTTPServer):
    """Records requests in a file and knows the loaded adapters."""

    def __init__(self, port: int, name: str, record: Path, faults: Path | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.record, self.loaded, self.faults = record, {name}, faults
        self.steps = 0
        self.is_asleep = False

    def compute(self) -> None:
        """Start a process that keeps a core busy; it ends with the process group."""
        if self.steps >= 0:
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.steps = -1

    def record_event(self, event: str, value: Any) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps([event, value]) + "\n")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.server.steps += self.fault() not in ("frozen", "busy")
            if self.fault() == "busy":
                self.server.compute()
            self.respond(200, f"vllm:num_requests_running 0.0\nvllm:generation_tokens_total {self.server.steps}.0\n")
        elif self.path == "/openapi.json":
            options = [{"name": name} for name in ("level", "mode")[: 1 if self.fault() else 2]]
            self.respond(200, {"paths": {"/sleep": {"post": {"parameters": options}}}})
        elif self.path == "/v1/models":
            self.respond(200, {"data": [{"id": name} for name in self.server.loaded]})
        elif not self.fails():
            self.respond(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
        self.server.record_event(self.path, body)
        if self.fails():
            return
        if self.path in ("/sleep?level=1&mode=keep", "/wake_up"):
            self.server.is_asleep = self.path != "/wake_up"
            self.respond(200, {})
            return
        while self.server.is_asleep and self.path == "/v1/completions":
            time.sleep(0.01)
        if self.server.is_asleep and self.path == "/v1/load_lora_adapter":
            os._exit(1)
        if self.path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.server.loaded.add(body["lora_name"])
            self.respond(200, {})
        elif self.path == "/v1/unload_lora_adapter":
            self.server.loaded.remove(body["lora_name"])
            self.respond(200, {})
        elif body["model"] not in self.server.loaded:
            self.respond(404, {"error": "no such model"})
        elif body["stream"]:
            self.stream(chunks_of(body))
        elif body["prompt"][0] != SLOW or self.respond_slowly():
            self.respond(200, completion(body))

    def fails(self) -> bool:
        """Whether the request has been answered with an error. A path that hangs is answered once it no longer does."""
        while (fault := self.fault()) == "hang":
            time.sleep(0.05)
        if fault == "die":
            Timer(DEATH_S, os._exit, (1,)).start()
            self.close_connection = True
        elif fault:
            self.respond(500, {"error": fault})
        return bool(fault)

    def fault(self) -> str:
        faults = self.server.faults
        return json.loads(faults.read_text()).get(self.path, "") if faults is not None and faults.exists() else ""

    def respond(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, chunks: Iterator[Any]) -> None:
        self.send_response(200)
        self.end_headers()
        for part in chunks:
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def respond_slowly(self) -> bool:
        """Wait; returns whether the client is still connected."""
        closed, _, _ = select.select([self.connection], [], [], 600)
        if closed:
            self.server.record_event("closed", self.path)
        return not closed


def main() -> None:
    parser = ArgumentParser()
    for option in ("--port", "--served-model-name", "--record", "--faults"):
        parser.add_argument(option)
    parser.add_argument("--fail", action="store_true")
    options, _ = parser.parse_known_args()
    if options.port is None:
        return  # the caller only checks that vLLM is installed
    if options.fail:
        print(
            "(VllmWorker-0 pid=5) ERROR 11-26 17:54:01 [executor.py:953] ValueError: no memory for the cache (5 GiB)."
        )
        print("(APIServer pid=4) INFO 11-26 17:54:01 [utils.py:3] waiting\n" * 30)
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    faults = Path(options.faults) if options.faults else None
    Stub(int(options.port), options.served_model_name, Path(options.record), faults).serve_forever()


def choice_of(body: Any, sample: int) -> dict[str, Any]:
    tokens: list[int] = []
    while len(tokens) < body["max_tokens"] and (not tokens or tokens[-1] not in body["stop_token_ids"]):
        tokens.append((body["prompt"][-1] + sample + len(tokens) + 1) % 512)
    logprobs = [-token / 100 for token in tokens]
    # The sampled token is the least likely of the cells, as if it were not among the k likeliest.
    tops = [
        {f"token_id:{token}": logprob} | {f"token_id:{k}": logprob + k + 1 for k in range(body["logprobs"])}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {
        "index": sample,
        "token_ids": tokens,
        "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops},
        "finish_reason": "stop" if tokens[-1] in body["stop_token_ids"] else "length",
    }


def completion(body: Any) -> dict[str, Any]:
    usage = {"prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2}}
    return {"choices": [choice_of(body, sample) for sample in range(body["n"])], "usage": usage}


def chunks_of(body: Any) -> Iterator[dict[str, Any]]:
    for choice in completion(body)["choices"]:
        count = len(choice["token_ids"])
        for first in range(0, count, CHUNK):
            chunk = slice(first, first + CHUNK)
            reason = choice["finish_reason"] if first + CHUNK >= count else None
            logprobs = {key: values[chunk] for key, values in choice["logprobs"].items()}
            choice_chunk = {"index": choice["index"], "token_ids": choice["token_ids"][chunk], "logprobs": logprobs}
            yield {"choices": [choice_chunk | {"finish_reason": reason}], "usage": None}
    yield {"choices": [], "usage": completion(body)["usage"]}


if __name__ == "__main__":
    main()
