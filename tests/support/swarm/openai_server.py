"""A small server of OpenAI completions in vLLM's format, with planaria's decoding.

    python openai_server.py FOLDER

It prints its port and serves http://127.0.0.1:PORT/WHO+HABIT until it is killed. Each WHO has separate models; a habit
imitates another server or a broken one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from planaria.models.transformers.adapters import global_name_of
from planaria.swarm.policy.policies import LlamaPolicy, open_policy

BASE = open_policy(sys.argv[1])
assert isinstance(BASE, LlamaPolicy)
MODELS: dict[str, dict[str, LlamaPolicy]] = defaultdict(lambda: {"base": BASE})
"""by server name"""
LOCK = asyncio.Lock()
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


async def models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": name} for name in MODELS[request.path_params["who"]]]})


async def act(request: Request) -> Response:
    who, path, asked = request.path_params["who"], f"/{request.path_params['path']}", await request.json()
    habits = set(who.split("+")[1:])
    if "token" in habits and request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return JSONResponse({"error": {"message": "who\x1b[31m are you?"}}, 401)
    if path != "/v1/completions":
        if "fixed" in habits or ("weights" not in habits and path == "/update_weights_from_disk"):
            return JSONResponse({"error": "Not Found"}, 404)
        return JSONResponse(await alone(load, path, asked, MODELS[who]))
    misbehaviours: dict[str, Callable[[], Response]] = {
        "broken": lambda: JSONResponse({"error": {"message": "out of memory"}}, 500),
        "garbage": lambda: Response("<html>"),
        "empty": lambda: JSONResponse({"choices": []}),
        "huge": lambda: Response(" " * 10, headers={"Content-Length": str(1 << 26)}),
        "drips": lambda: StreamingResponse(drip(), headers={"Content-Length": "1000"}),
    }
    for habit in habits & misbehaviours.keys():
        return misbehaviours[habit]()
    if "slow" in habits:
        await asyncio.sleep(1.0)
    return JSONResponse(await alone(completions, asked, MODELS[who], habits))


async def alone(of: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Call a function in a thread; calls take turns."""
    async with LOCK:
        return await asyncio.to_thread(of, *given)


async def drip() -> AsyncIterator[bytes]:
    for _ in range(1000):
        yield b" "
        await asyncio.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    door = socket.create_server(("127.0.0.1", 0))
    print(door.getsockname()[1], flush=True)
    app = Starlette(routes=[Route("/{who}/v1/models", models), Route("/{who}/{path:path}", act, methods=["POST"])])
    uvicorn.run(app, fd=door.fileno(), log_level="critical")


if __name__ == "__main__":
    main()
