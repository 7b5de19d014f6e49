"""Rollouts for `GRPOTrainer(rollout_func=...)`: what a call reads from the trainer, does, and returns.

    rollout_func(prompts, trainer)          len(prompts) rows in, as many out, in order; on every rank with its slice
     1  settings, tokenizer, client         the server is proved at the first call; the settings are read at every call
     2  weights, where TRL does not sync    before the first request
     3  trajectories                        each on its own (`episode`), at most max_concurrency at a time; servers
                                            that are lost meanwhile are looked for
     4  transcripts, figures
     5  columns                             every length asserted

TRL repeats each prompt num_generations times before it calls, and may split a group over ranks: nothing here counts
groups.
"""

import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from . import trainer as reading
from .clients import Client, connect_pool, normal_url
from .engine import Cleanup, Engine
from .env import EnvFactory
from .episode import Prompt, Setting, run_trajectories
from .errors import ServerError, SetupError
from .failures import Failures
from .hosting import EnvLimits
from .kinds import EnvKinds
from .metrics import all_refused, log_figures, mostly_cut
from .options import RolloutOptions, check_positive, check_values
from .sampling import Sampling
from .tokens import ChatTokenizer
from .trajectory import StopReason, Trajectory, columns
from .transcripts import write_transcripts
from .weights import CheckpointSync

if TYPE_CHECKING:
    from .clients.pool import PoolClient

logger = logging.getLogger(__name__)

_INHERITED: list[Any] = []
"""What a forked child must not collect: its parent's connections would be closed with it."""


class Rollout:
    """A `rollout_func`. `ready_made` makes them, and says what the arguments mean.

    Args:
        env_factory: makes the environment of a trajectory; or several by name, see `EnvKinds`.
        max_turns: completions of one trajectory.
        env_limits: how long the calls of an environment may take.
        max_result_tokens: an observation that is longer is shown without its middle.
        stop: strings that end a completion, besides `GRPOConfig`'s.
        cleanups: coroutine functions for when the rollout is closed.
        **options: see `RolloutOptions`.
    """

    def __init__(
        self,
        env_factory: EnvFactory | Mapping[str, EnvFactory],
        *,
        max_turns: int,
        env_limits: EnvLimits = EnvLimits(),  # noqa: B008
        max_result_tokens: int | None = None,
        stop: Sequence[str] = (),
        cleanups: Sequence[Cleanup] = (),
        **options: Unpack[RolloutOptions],
    ) -> None:
        check_positive("max_turns", max_turns)
        check_values(options)
        self._env_kinds, self._env_limits = EnvKinds(env_factory), env_limits
        self._max_turns = max_turns
        self._max_result_tokens = max_result_tokens
        self._stop = tuple(stop)
        self._cleanups = list(cleanups)
        base_url = options.get("base_url")
        urls = [base_url] if isinstance(base_url, str) else base_url
        self._base_urls = None if urls is None else [normal_url(url) for url in urls]
        self._given_client = options.get("client")
        self._pool: PoolClient | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._connected_to: tuple[list[str], Callable[[str], None] | None] | None = None
        self._parser = options.get("parser")
        self._max_concurrency = options.get("max_concurrency", 256)
        self._request_timeout_s = options.get("request_timeout_s", 600.0)
        self._trajectory_timeout_s = options.get("trajectory_timeout_s", 1500.0)
        transcript_dir = options.get("transcript_dir")
        self._transcript_dir = None if transcript_dir is None else Path(transcript_dir)
        self._weight_sync = options.get("weight_sync", "auto")
        self._own_sync = CheckpointSync()
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._failures = Failures()
        self._warned: set[str] = set()

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        """One trajectory for each prompt, as the columns of TRL's contract.

        Raises:
            SetupError: the trainer, the server and the arguments cannot work together.
            ServerError: the server is gone.
            RolloutError: every trajectory failed; the first cause is named and chained.
        """
        with self._lock:
            return self._roll(prompts, trainer)

    def _roll(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, list[Any]]:
        reading.refuse_conflicts(trainer)
        self._tokenizer = tokenizer = reading.chat_tokenizer(trainer, self._tokenizer)
        sampling = Sampling.from_config(trainer.args).ending_at(tokenizer.eos_token_ids).stopping_at(self._stop)
        for topic, warning in reading.warnings(trainer, sampling, self._trajectory_timeout_s).items():
            self._warn_once(topic, warning)
        if self._engine is None or self._engine.pid != os.getpid():  # a forked child has no thread of its own
            _INHERITED.append((self._engine, self._pool))
            self._engine, self._pool = Engine(), None
            self._engine.cleanups[:] = self._cleanups
        base_urls = self._urls(trainer)
        sync = self._sync_for(trainer, base_urls)
        client = self._connected(trainer, tokenizer, base_urls, self._restore_by(trainer, base_urls, sync))
        left_out = sync.sync(trainer, base_urls) if sync is not None else None
        if left_out and self._pool is not None:
            self._engine.run(self._pool.lose(left_out))

        setting = Setting(
            env_kinds=self._env_kinds,
            env_limits=self._env_limits,
            client=client,
            tokenizer=tokenizer,
            parser=self._parser,
            sampling=sampling,
            max_completion_length=trainer.args.max_completion_length,
            vocab_size=reading.vocab_size(trainer),
            max_turns=self._max_turns,
            max_result_tokens=self._max_result_tokens,
            timeout_s=self._trajectory_timeout_s,
        )
        step, rank = int(trainer.state.global_step), int(trainer.accelerator.process_index)
        seeds = [hash((step, rank, index)) for index in range(len(prompts))]  # of ints: the same in every process
        work = run_trajectories(prompts, seeds, setting, self._max_concurrency)
        trajectories = self._engine.run(work) if self._pool is None else self._run_on(self._pool, work)
        self._report(trainer, trajectories)
        return columns(trajectories, placeholder_id=tokenizer.eos_token_id)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Rollout holds a thread, connections and environments, so it cannot be pickled or copied. Make one in "
            "each process, in the script that makes its trainer."
        )

    def close(self) -> None:
        """Close connections and end the thread. Also happens when the Rollout is collected, or Python exits."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._pool = None

    def _urls(self, trainer: Any) -> list[str]:
        """The servers' addresses: ours, or the trainer's; none for a given client."""
        if self._given_client is not None:
            return []
        if self._base_urls is not None:
            return self._base_urls
        if url := reading.server_url(trainer):
            return [url]
        raise SetupError(
            f"No server to sample from: use_vllm={trainer.use_vllm}, vllm_mode={trainer.args.vllm_mode!r}. Start one "
            "(`trl-rollouts serve MODEL`). Then, with use_vllm=True, set vllm_mode='server' in GRPOConfig; with "
            "use_vllm=False, pass base_url='http://localhost:8000' or set vllm_server_base_url."
        )

    def _connected(
        self, trainer: Any, tokenizer: ChatTokenizer, base_urls: list[str], restore: Callable[[str], None] | None
    ) -> Client:
        """The client, proved against this trainer when it is first needed, and there."""
        if self._given_client is not None:
            return self._given_client
        assert self._engine is not None
        if self._pool is not None and self._connected_to != (base_urls, restore):
            self._engine.run(self._pool.close())
            self._pool = None
        if self._pool is None:
            self._pool = self._engine.run(
                connect_pool(
                    base_urls,
                    tokenizer,
                    max_completion_length=trainer.args.max_completion_length,
                    max_model_len=reading.max_model_len(trainer),
                    wait_s=trainer.args.vllm_server_timeout,
                    request_timeout_s=self._request_timeout_s,
                    restore=restore,
                )
            )
            self._connected_to = base_urls, restore
            self._engine.cleanups[:] = [self._pool.close, *self._cleanups]
        self._engine.run(self._pool.roll_call())
        return self._pool

    def _sync_for(self, trainer: Any, base_urls: list[str]) -> CheckpointSync | None:
        """What brings the trainer's weights to servers that TRL does not sync; a step's first request comes after."""
        if self._weight_sync != "auto":
            return self._weight_sync
        if trainer.use_vllm and self._base_urls and not reading.is_own_server(trainer, self._base_urls):
            raise SetupError(
                f"TRL syncs its weights to its own vLLM (vllm_mode={trainer.args.vllm_mode!r}), not to {base_urls}. "
                "Leave out base_url to use the trainer's server, or pass weight_sync=CheckpointSync(), or "
                "weight_sync=None if those servers' weights are meant to stay as they are."
            )
        return None if trainer.use_vllm or not base_urls else self._own_sync

    def _restore_by(
        self, trainer: Any, base_urls: list[str], sync: CheckpointSync | None
    ) -> Callable[[str], None] | None:
        """What brings them to a server that was started anew; None where only TRL could, which cannot."""
        if sync is not None:
            return getattr(sync, "restore", None)  # a user's own sync may have none
        is_trls = trainer.use_vllm and reading.is_own_server(trainer, base_urls)
        return None if is_trls or self._weight_sync is not None else _leave_weights

    def _run_on(self, pool: "PoolClient", work: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
        """Run to the end of the call, after which no server is looked for.

        Raises:
            ServerError: none is left, or one was restarted and nobody noticed in time.
        """
        assert self._engine is not None
        assert self._connected_to is not None
        try:
            trajectories = self._engine.run(work)
        except BaseException:
            with suppress(Exception):
                self._engine.run(pool.rest())
            raise
        restarted = self._engine.run(pool.rest())
        absence = pool.absence()
        if absence is not None and all(
            one.stop_reason in (StopReason.TIMEOUT, StopReason.ERROR) for one in trajectories
        ):
            raise absence
        if restarted and self._connected_to[1] is not _leave_weights:
            raise ServerError(
                f"{', '.join(restarted)}: restarted during this rollout, and no request missed it. What was sampled "
                "since may be of its first weights, not the trainer's. Start the training again from its last "
                "checkpoint."
            )
        return trajectories

    def _report(self, trainer: Any, trajectories: Sequence[Trajectory]) -> None:
        """Transcripts, figures, warnings; raises where nothing is left to train on."""
        mode = reading.mode(trainer)
        if self._transcript_dir is not None and trajectories:
            write_transcripts(
                self._transcript_dir,
                trajectories,
                step=int(trainer.state.global_step),
                mode=mode,
                rank=int(trainer.accelerator.process_index),
            )
        self._failures.check(trajectories, is_whole_update=reading.is_whole_update(trainer))
        if trajectories:
            log_figures(trainer, trajectories, mode)
        if warning := mostly_cut(trajectories, trainer.args.max_completion_length):
            self._warn_once("length", warning)
        if warning := all_refused(trajectories):
            self._warn_once("refused", warning)

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message)


def _leave_weights(base_url: str) -> None:
    """For servers whose weights are meant to stay as they are."""
