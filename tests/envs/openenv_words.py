"""An OpenEnv server for the tests: guess the word that the seed picks. It fails on demand, and counts its sessions.

    python openenv_words.py --port PORT CAPACITY PINGING_PORT

It runs in a virtual environment of its own, with the package `openenv`. GET /sessions says how many are open, were at
most at a time, have been opened, were refused, and came with a header. What else an episode does, the row's columns
and the guesses say.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, HTTPEnvServer, Observation, State
from pydantic import Field

WORDS = ["apple", "berry", "cherry"]


class Guess(Action):
    guess: str = Field(min_length=1)


class Hint(Observation):
    text: str


class Words(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        COUNTS.opened()
        self.word = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Hint:
        if row.get("fails"):
            raise RuntimeError("no such level")
        time.sleep(row.get("reset_s", 0.0))
        self.word = row.get("word", WORDS[(seed or 0) % 3])
        text = row.get("opening", f"A fruit with {len(self.word)} letters, seed {seed}.")
        return Hint(text=os.urandom(4).hex() if row.get("is_random") else text, done=row.get("is_over", False))

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        name, _, what = action.guess.partition(" ")
        if name == "sleep":
            time.sleep(float(what))
        if name == "raise":
            raise RuntimeError("the level broke")
        if name == "misbuilt":
            return Hint.model_validate({})
        if name == "end":  # "end 0.5", "end nan", "end": without a reward
            return Hint(text="The end.", done=True, reward=float(what) if what else None)
        if action.guess == self.word:
            return Hint(text="Right.", done=True, reward=1.0)
        return Hint(text=f"Not {action.guess}.")

    @property
    def state(self) -> State:
        return State()


class Counts:
    def __init__(self, server: HTTPEnvServer) -> None:
        self.server = server
        self.forget()

    def forget(self) -> None:
        self.most = self.num_opened = self.num_refused = self.num_cut = self.num_authorized = 0

    def opened(self) -> None:
        self.num_opened += 1
        self.most = max(self.most, self.server.active_sessions)


class Cut:
    """Cuts the connection at the guess "cut", and the first two times at a reset so told. Counts who was refused."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_cut = False
        COUNTS.num_authorized += (b"authorization", b"Bearer me") in scope.get("headers", [])

        async def received() -> Any:
            nonlocal is_cut
            event = await receive()
            text = event.get("text") or ""
            if '"guess": "block' in text:  # the server's event loop, pings and all
                time.sleep(0.6)
            if '"guess": "cut"' in text or ('"cuts": 2' in text and COUNTS.num_cut < 2):
                COUNTS.num_cut += '"cuts"' in text
                is_cut = True
                await send({"type": "websocket.close", "code": 1011})
                return {"type": "websocket.disconnect", "code": 1011}
            return event

        async def sent(event: Any) -> None:
            COUNTS.num_refused += "CAPACITY_REACHED" in (event.get("text") or "")
            if not is_cut:
                await send(event)

        await self.app(scope, received if scope["type"] == "websocket" else receive, sent)


port, capacity, pinging_port = (int(argument) for argument in sys.argv[2:])
app = FastAPI()
COUNTS = Counts(HTTPEnvServer(Words, Guess, Hint, max_concurrent_envs=capacity))
COUNTS.server.register_routes(app)


@app.get("/sessions")
def sessions(forget: bool = False) -> dict[str, int]:
    counts = {"open": COUNTS.server.active_sessions, "most": COUNTS.most}
    counts |= {"opened": COUNTS.num_opened, "refused": COUNTS.num_refused}
    counts |= {"authorized": COUNTS.num_authorized}
    if forget:
        COUNTS.forget()
    return counts


async def serve() -> None:
    """On two ports; at the second, who does not answer a ping within a second is hung up on."""
    common = {"app": Cut(app), "host": "127.0.0.1", "log_level": "warning"}
    pinging = uvicorn.Config(port=pinging_port, ws_ping_interval=1.0, ws_ping_timeout=1.0, **common)
    await asyncio.gather(uvicorn.Server(uvicorn.Config(port=port, **common)).serve(), uvicorn.Server(pinging).serve())


if __name__ == "__main__":
    asyncio.run(serve())
