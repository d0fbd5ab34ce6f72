"""A small server of OpenAI completions in vLLM's format, with planaria's decoding.

    python openai_server.py FOLDER

It prints its port and serves http://127.0.0.1:PORT/WHO+HABIT until it is killed. Each WHO has separate models; a habit
imitates another server or a broken one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from planaria.models.transformers.adapters import global_name_of
from planaria.swarm.policy.policies import LlamaPolicy, open_policy

BASE = open_policy(sys.argv[1])
assert isinstance(BASE, LlamaPolicy)
MODELS: dict[str, dict[str, LlamaPolicy]] = defaultdict(lambda: {"base": BASE})
"""by server name"""
LOCK = threading.Lock()
TOKEN = "sesame"


def completions(request: dict[str, Any], models: dict[str, LlamaPolicy], habits: set[str]) -> dict[str, Any]:
    policy = models[request["model"]]
    generator = torch.Generator().manual_seed(request["seed"])
    count = 1 if "one" in habits else request["n"]
    (drawn,) = policy.sample(
        [request["prompt"]], count, request["max_tokens"], 1.0, max(0, request["top_k"]), generator
    )
    return {"choices": [choice(policy, one, habits) for one in drawn]}


def choice(policy: LlamaPolicy, completion: Any, habits: set[str]) -> dict[str, Any]:
    ids, logps = [*completion.ids, *([policy.end] if completion.ended else [])], list(completion.logps)
    reply: dict[str, Any] = {
        "text": policy.decode(completion.ids),
        "finish_reason": "stop" if completion.ended else "length",
    }
    if "llamacpp" in habits:
        pairs = zip(ids, logps, strict=True)
        return reply | {
            "logprobs": {"content": [{"id": i, "token": policy.decode([i]), "logprob": p} for i, p in pairs]}
        }
    if "mute" in habits:
        return reply
    names = [f"token_id:{i}" for i in ids] if "named" in habits else [policy.decode([i]) for i in ids]
    reply["logprobs"] = {"tokens": names, "token_logprobs": logps}
    return reply if "named" in habits or "plain" in habits else reply | {"token_ids": ids}


def load(path: str, request: dict[str, Any], models: dict[str, LlamaPolicy]) -> dict[str, Any]:
    if path == "/v1/load_lora_adapter":
        folder = Path(request["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        policy = LlamaPolicy(BASE.clone()._model, BASE.tokenizer, config["r"])
        own = policy._model.global_state()
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            own[global_name_of(name)].copy_(tensor)
        models[request["lora_name"]] = policy
    elif path == "/v1/unload_lora_adapter":
        del models[request["lora_name"]]
    else:
        loaded = open_policy(request["model_path"])
        assert isinstance(loaded, LlamaPolicy)
        models["base"] = loaded
    return {"success": True}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def who(self) -> str:
        return self.path.split("/")[1]

    @property
    def place(self) -> str:
        return "/" + self.path.split("/", 2)[2]

    @property
    def habits(self) -> set[str]:
        return set(self.who.split("+")[1:])

    @property
    def models(self) -> dict[str, LlamaPolicy]:
        return MODELS[self.who]

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": name} for name in self.models]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "token" in self.habits and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(401, {"error": {"message": "who\x1b[31m are you?"}})
        if self.place == "/v1/completions":
            return self._complete(request)
        if "fixed" in self.habits or ("weights" not in self.habits and self.place == "/update_weights_from_disk"):
            return self._answer(404, {"error": "Not Found"})
        with LOCK:
            return self._answer(200, load(self.place, request, self.models))

    def _complete(self, request: dict[str, Any]) -> None:
        if "broken" in self.habits:
            return self._answer(500, {"error": {"message": "out of memory"}})
        if "garbage" in self.habits:
            return self._send(200, b"<html>")
        if "empty" in self.habits:
            return self._answer(200, {"choices": []})
        if "huge" in self.habits:
            return self._send(200, b" " * 10, announced=1 << 26)
        if "drips" in self.habits:
            return self._drip()
        if "slow" in self.habits:
            time.sleep(1.0)
        with LOCK:
            reply = completions(request, self.models, self.habits)
        return self._answer(200, reply)

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(1000):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)

    def _answer(self, status: int, reply: dict[str, Any]) -> None:
        self._send(status, json.dumps(reply).encode())

    def _send(self, status: int, body: bytes, announced: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(announced or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def main() -> None:
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
