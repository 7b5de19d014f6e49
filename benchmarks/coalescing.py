"""TRL <= 1.10's own server, 64 trajectories: contexts that travel together against one request each.

    make bench

That server works on one request at a time. Both ways run on the same server in one run, greedy, 16 tokens each;
`ratio` is how many times longer one request each takes.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

from servers import SMOLLM2, old_trl_server
from transformers import AutoTokenizer

from trl_rollouts import Sampling
from trl_rollouts.clients import Client, connect
from trl_rollouts.tokens import ChatTokenizer

NUM_TRAJECTORIES = 64
SAMPLING = Sampling(max_tokens=16, temperature=0.0, extra={"ignore_eos": True})


async def all_at_once(client: Client, prompts: list[list[int]]) -> float:
    """Seconds for all prompts, asked for at the same moment."""
    started = time.monotonic()
    await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts))
    return time.monotonic() - started


async def main(base_url: str) -> dict[str, float]:
    tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained(SMOLLM2))
    prompts = [tokenizer.prompt([{"role": "user", "content": f"Tell me about {i}."}]) for i in range(NUM_TRAJECTORIES)]
    together = await connect(base_url, tokenizer)
    apart = [await connect(base_url, tokenizer) for _ in prompts]  # a client each: nothing to travel with
    try:
        await all_at_once(together, prompts)  # warms the server up, and its prefix cache for both ways
        together_s = await all_at_once(together, prompts)
        started = time.monotonic()
        await asyncio.gather(*(c.generate(p, SAMPLING) for c, p in zip(apart, prompts, strict=True)))
        apart_s = time.monotonic() - started
    finally:
        for client in (together, *apart):
            await client.close()
    return {"together_s": round(together_s, 2), "apart_s": round(apart_s, 2), "ratio": round(apart_s / together_s, 1)}


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        old_trl_server(SMOLLM2, Path(folder) / "server.log") as base_url,
    ):
        figures = asyncio.run(main(base_url))
    print(json.dumps({"benchmark": "coalescing", "trajectories": NUM_TRAJECTORIES, "tokens": 16, **figures}))
