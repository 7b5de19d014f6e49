"""An OpenEnv server for the tests whose environment has MCP tools: buy the fruit that costs less.

    python openenv_shop.py --port PORT

It runs in a virtual environment of its own, with the package `openenv`.
"""

import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import HTTPEnvServer, Observation, State
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

PRICES = {"pear": 4, "plum": 7}


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("shop")
        self.bought: str | None = None

        @mcp.tool
        def price(fruit: str) -> int:
            """The price of a kilo."""
            return PRICES[fruit]

        @mcp.tool
        def buy(fruit: str, kilos: int = 1) -> str:
            """Buy it, which ends the visit."""
            self.bought = fruit
            return f"{kilos} kilos of {fruit}"

        @mcp.tool
        def wait(seconds: float) -> None:
            """Wait."""
            time.sleep(seconds)

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s)
        if self.bought is not None:
            observation.done, observation.reward = True, float(self.bought == "pear")
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State()


app = FastAPI()
HTTPEnvServer(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=8).register_routes(app)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
