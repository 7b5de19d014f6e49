"""`make demo`: a real vLLM server, a real small model, and GRPO that teaches it to call a tool.

    python recipes/demo.py [OUTPUT_DIR]

Starts the server on a free port, runs `recipes/tool_call.py` with `configs/tool_call_cpu.yaml`, stops the server,
and shows the reward by step. Takes 5 to 10 minutes on two CPU cores.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from trl_rollouts import read_transcripts
from trl_rollouts.serving import free_port, serving

RECIPES = Path(__file__).parent
MODEL = Path(".cache/SmolLM2-135M-Instruct")


def main(output_dir: Path) -> int:
    console = Console()
    started = time.monotonic()
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(parents=True)
    base_url = f"http://127.0.0.1:{(port := free_port())}"
    serve = [sys.executable, "-m", "trl_rollouts.cli", "serve", str(MODEL), "--port", str(port)]
    serve += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
    log = output_dir / "server.log"
    console.print(f"Starting vLLM at {base_url} (its log: {log})")
    with serving(serve, f"{base_url}/health", name="vLLM", log=log, report=console.print):
        console.print("Training: a step is 8 questions, 8 calls of the model, one update")
        train(output_dir, base_url)
    rewards = [entry["reward"] for entry in log_history(output_dir) if "reward" in entry]
    show(console, output_dir, rewards)
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    console.print(f"Mean reward: {first:.2f} over the first 5 steps, {last:.2f} over the last 5.")
    console.print(
        f"{time.monotonic() - started:.0f} s in all. What the model wrote: {output_dir}/transcripts/rank0.jsonl"
    )
    return 0 if last - first >= 0.3 else 1


def train(output_dir: Path, base_url: str) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [str(RECIPES / "tool_call.py"), "--config", str(RECIPES / "configs" / "tool_call_cpu.yaml")]
    command += ["--model_name_or_path", str(MODEL), "--vllm_server_base_url", base_url]
    command += ["--output_dir", str(output_dir), "--transcript_dir", str(output_dir / "transcripts")]
    subprocess.run(command, check=True, env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"})


def log_history(output_dir: Path) -> list[dict]:
    return json.loads((output_dir / "trainer_state.json").read_text())["log_history"]


def show(console: Console, output_dir: Path, rewards: list[float]) -> None:
    """A table in the terminal and a picture beside the transcripts."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    calls = {}
    for line in read_transcripts(output_dir / "transcripts"):
        calls.setdefault(line["step"], []).append(sum(call["error"] is None for call in line["tool_calls"]))
    table = Table("step", "reward", "valid calls of 8", "", title="GRPO learns to call a tool")
    for step, reward in enumerate(rewards):
        table.add_row(str(step + 1), f"{reward:.2f}", str(sum(map(bool, calls[step]))), "█" * round(30 * reward))
    console.print(table)
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="SmolLM2-135M learns to call multiply")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.savefig(output_dir / "reward.png", dpi=150)
    console.print(f"Picture: {output_dir}/reward.png")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output")))
