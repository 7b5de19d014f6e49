"""The trainer's weights, brought to servers that TRL's own sync does not reach.

TRL syncs over NCCL, to `vllm serve`, from a CUDA trainer with `use_vllm=True`. With `use_vllm=False` (a trainer on a
CPU, a Mac, another accelerator) nothing syncs, and the rollout does: the model is saved as safetensors into a folder
that the server can read, and the server reloads it in place.

The order on each server is: reload, reset of the prefix cache (whose entries the old weights computed), first request.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ServerGoneError, SetupError, WeightSyncError, boundary

if TYPE_CHECKING:
    import requests

CONNECT_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 600.0
RESET_TIMEOUT_S = 30.0
PREFIX = "rollout-weights-step-"
"""Begins the name of each folder that is written, and so of those that are removed."""


class CheckpointSync:
    """Saves the model and has `vllm serve` reload it.

    Needs a server with development endpoints (`VLLM_SERVER_DEV_MODE=1`; `trl-rollouts serve` sets it).

    Args:
        folder: where the weights go, on a disk that the server reads under the same path. By default `rollout_weights`
            in the trainer's `output_dir`. Only the newest weights are kept, so give each run a folder of its own.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._synced: tuple[Any, int, frozenset[str]] | None = None
        self._pushed: Path | None = None
        self._is_shared = False
        """Whether other processes use the same servers."""

    def sync(self, trainer: Any, base_urls: Sequence[str]) -> list[str]:
        """Bring the weights of the trainer's current step to every server, once a step. Called on every process.

        The main process saves and reloads; the others wait for it, and all raise what it raised.

        Returns:
            Of several servers, those that could not be reached: they are not to be sampled before `restore`.

        Raises:
            SetupError: the model cannot be saved this way, or a server has no reload.
            WeightSyncError: a server failed to take the weights, or none could be reached.
        """
        # The state too: another `train()`, and another trainer, count their steps from 0 again, with other weights.
        state, step, servers = trainer.state, int(trainer.state.global_step), frozenset(base_urls)
        if self._synced is not None and self._synced[0] is state and self._synced[1:] == (step, servers):
            return []
        state_dict = _state_dict(trainer)
        outcome = _Outcome(servers)
        if trainer.accelerator.is_main_process:
            try:
                with boundary(WeightSyncError, "The weights could not be saved or sent"):
                    outcome.folder, outcome.left_out = self._push(trainer, state_dict, base_urls)
            except Exception as error:
                outcome.problem = error
        outcome = _from_main_process(trainer, outcome)
        if outcome.problem is not None:
            raise outcome.problem
        if outcome.base_urls != servers:
            raise SetupError(
                f"The processes sample from different servers, the main one from {', '.join(outcome.base_urls)} and "
                f"this one from {', '.join(servers)}, and only the main one syncs. Give all the same base_url."
            )
        self._synced, self._pushed = (state, step, servers), outcome.folder
        self._is_shared = trainer.accelerator.num_processes > 1
        return outcome.left_out

    def restore(self, base_url: str) -> None:
        """Bring the weights that were synced last to a server that was started anew, or has missed them.

        Every process that samples from the server may do so by itself, and at the same time as the others.

        Raises:
            ServerGoneError: it cannot be reached.
            WeightSyncError: nothing was synced yet, or the server failed to take the weights.
        """
        if self._pushed is None:
            raise WeightSyncError(f"There are no weights to bring to {base_url}: none were synced yet.")
        _reload(base_url, self._pushed, is_shared=self._is_shared)

    def _push(self, trainer: Any, state_dict: dict[str, Any], base_urls: Sequence[str]) -> tuple[Path, list[str]]:
        """The folder, and the servers that could not be reached."""
        folder = (self._folder or Path(trainer.args.output_dir) / "rollout_weights").absolute()
        step = folder / f"{PREFIX}{trainer.state.global_step:08d}-{uuid.uuid4().hex[:8]}"
        _save(trainer.accelerator.unwrap_model(trainer.model), state_dict, step)
        gone = {}
        for base_url in base_urls:
            try:
                _reload(base_url, step)
            except ServerGoneError as error:
                gone[base_url] = error
        if gone and len(gone) == len(base_urls):
            first = next(iter(gone.values()))
            raise WeightSyncError(str(first)) from first
        # What the servers no longer need, and what a killed run left half-written.
        for old in folder.glob(f"{PREFIX}*"):
            if old != step:
                shutil.rmtree(old, ignore_errors=True)
        return step, list(gone)


@dataclass(slots=True)
class _Outcome:
    """What came of a sync on the main process, for all."""

    base_urls: frozenset[str]
    problem: Exception | None = None
    folder: Path | None = None
    left_out: list[str] = field(default_factory=list)


def _state_dict(trainer: Any) -> dict[str, Any]:
    """The full weights; a collective operation where the model is sharded."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise SetupError(
            "CheckpointSync saves whole models; this one has a PEFT adapter, whose weights the server would not "
            "find. Train without PEFT, or with use_vllm=True, where TRL merges and syncs the adapter itself."
        )
    state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}  # DeepSpeed: None but on rank 0
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in state_dict.items()}  # torch.compile's prefix


def _save(model: Any, state_dict: dict[str, Any], folder: Path) -> None:
    """Write into a folder that appears whole under its name or not at all."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    with _no_progress_bar():
        model.save_pretrained(unfinished, state_dict=state_dict)
    unfinished.chmod(0o755)
    for file in unfinished.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; the server may run as another user
    unfinished.rename(folder)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers shows one for every save, which would be one a step."""
    from transformers.utils import logging

    bars: Any = logging  # untyped
    was_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            bars.enable_progress_bar()


def _reload(base_url: str, folder: Path, *, is_shared: bool = False) -> None:
    """Reload, and forget what the old weights computed.

    `is_shared`: other processes of this run may be sampling already. Each of them has brought the same weights first,
    and the first of them found nobody sampling, so its reset took place, and what was computed since is right.
    """
    _post(base_url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    started = time.monotonic()
    while not _was_reset(_post(base_url, "/reset_prefix_cache", None)):
        if is_shared:
            return
        if time.monotonic() - started >= RESET_TIMEOUT_S:
            raise WeightSyncError(
                f"{base_url} did not reset its prefix cache within {RESET_TIMEOUT_S:g} s: requests still use it. They "
                "are not this rollout's; give the server to one run only."
            )
        time.sleep(0.1)  # requests that a rollout gave up are still winding down


def _was_reset(response: "requests.Response") -> bool:
    """vLLM keeps a cache that requests still use, and says so with status 200; older ones answer nothing."""
    return not response.content or response.json() != {"success": False}


def _post(base_url: str, path: str, body: dict[str, Any] | None) -> "requests.Response":
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = False  # no proxy, as for sampling
            response = session.post(
                base_url + path, json=body, timeout=(CONNECT_TIMEOUT_S, RELOAD_TIMEOUT_S), allow_redirects=False
            )
    except requests.ConnectionError as cause:
        raise ServerGoneError(f"{base_url}{path} cannot be reached: {type(cause).__name__}: {cause}") from cause
    except requests.RequestException as cause:
        raise WeightSyncError(f"{base_url}{path} did not answer: {type(cause).__name__}: {cause}") from cause
    if response.status_code == 404:
        raise SetupError(
            f"The server at {base_url} has no {path}, so it cannot take the trainer's weights. Restart it with "
            "VLLM_SERVER_DEV_MODE=1 in its environment (`trl-rollouts serve` sets it), or pass weight_sync=None if "
            "its weights are meant to stay as they are. TRL <= 1.10's own server takes weights only with "
            "use_vllm=True."
        )
    if response.status_code != 200:
        raise WeightSyncError(f"{base_url}{path} answered {response.status_code}: {response.text[:1000]}")
    return response


def _from_main_process(trainer: Any, outcome: _Outcome) -> _Outcome:
    """The main process's outcome, on every process. It is also the barrier that the others wait at."""
    if trainer.accelerator.num_processes == 1:
        return outcome
    from accelerate.utils import broadcast_object_list

    outcomes = [outcome]
    broadcast_object_list(outcomes, from_process=0)
    return outcomes[0]
