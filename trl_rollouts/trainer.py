"""What a rollout reads of a `GRPOTrainer`: the one place that knows TRL's attributes.

Read at every call, since a config may change between calls. Nothing here changes the trainer.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from packaging.version import Version

from .clients import normal_url
from .errors import SetupError
from .sampling import Sampling
from .tokens import ChatTokenizer
from .trajectory import FIELDS


def refuse_conflicts(trainer: Any) -> None:
    """Raises `SetupError` for what would silently spoil a rollout's work inside TRL."""
    if getattr(trainer, "tools", None):
        raise SetupError(
            "GRPOTrainer got tools= and rollout_func=. TRL would run its own tool loop on top of this rollout's. "
            "Remove tools= from the trainer and pass the functions to tool_rollout."
        )
    datasets = [getattr(trainer, "train_dataset", None), getattr(trainer, "eval_dataset", None)]
    columns = {name for dataset in datasets for name in getattr(dataset, "column_names", None) or ()}
    if taken := sorted(set(FIELDS) & columns):
        raise SetupError(
            f"The dataset's columns {taken} have names of the rollout's fields, and TRL would replace their values "
            "without a word before it calls the reward functions. Rename them."
        )


def chat_tokenizer(trainer: Any, last: ChatTokenizer | None = None) -> ChatTokenizer:
    """The trainer's tokenizer, under the template and its arguments that TRL itself would use.

    `last`, with all that it has proved, while these are the same.
    """
    config = getattr(trainer.model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)  # several models end turns with more ids than the tokenizer's one
    tokenizer = ChatTokenizer(
        trainer.processing_class,
        chat_template=trainer.chat_template,
        template_kwargs=trainer.chat_template_kwargs,
        eos_token_ids=[ids] if isinstance(ids, int) else ids or (),
    )
    return last if last is not None and last.settings == tokenizer.settings else tokenizer


def mode(trainer: Any) -> str:
    """The log that TRL is filling, "train" or "eval"."""
    return "train" if trainer.model.training else "eval"


def is_whole_update(trainer: Any) -> bool:
    """Whether a slice of which nothing can be trained spoils an update.

    So it does where the slice is all of the batch. And before TRL 1.9 it may everywhere: a batch in which the rows of
    every process are masked turns the gradient, and then the model, into NaN (huggingface/trl#6439).
    """
    is_old = Version(importlib.metadata.version("trl")) < Version("1.9")
    return mode(trainer) == "train" and (is_old or trainer.accelerator.num_processes == 1)


def server_url(trainer: Any) -> str | None:
    """The server that the trainer's config names; None where it names none.

    Only the main process holds TRL's own client, so the address comes from the config.
    """
    args = trainer.args
    if trainer.use_vllm and args.vllm_mode != "server":
        return None
    if args.vllm_server_base_url:
        return normal_url(args.vllm_server_base_url)
    return normal_url(f"{args.vllm_server_host}:{args.vllm_server_port}") if trainer.use_vllm else None


def is_own_server(trainer: Any, base_urls: Sequence[str]) -> bool:
    """Whether `base_urls` is the one server that TRL syncs its weights to, under whichever name of this machine."""
    own = server_url(trainer)
    return own is not None and [_loopback(url) for url in base_urls] == [_loopback(own)]


def _loopback(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(url)
    host = "localhost" if parts.hostname in {"0.0.0.0", "127.0.0.1", "::1", "::"} else parts.hostname
    return host, parts.port, parts.path


def max_model_len(trainer: Any) -> int | None:
    """What is known of the server's context without asking it: the config's word, or the most that the model can."""
    limit: int | None = trainer.args.vllm_max_model_length
    return limit or getattr(trainer.model.config, "max_position_embeddings", None)


def vocab_size(trainer: Any) -> int | None:
    """Rows of the model's embedding, which may be more than the tokenizer's tokens; None where its config has none."""
    config = trainer.model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size: int | None = getattr(config, "vocab_size", None)
    return size


def warnings(trainer: Any, sampling: Sampling, trajectory_timeout_s: float) -> dict[str, str]:
    """Settings that work and will disappoint, by topic."""
    args = trainer.args
    found = {}
    if trainer.use_vllm and args.vllm_importance_sampling_correction and sampling.is_truncated:
        found["truncated sampling"] = (
            f"top_p={sampling.top_p:g}, top_k={sampling.top_k}, min_p={sampling.min_p:g} cut the distribution that is "
            "sampled, and its logprobs are of what is left; the trainer's are of the whole. The importance-sampling "
            "correction is biased by the mass that was cut. Use top_p=1, top_k=0, min_p=None, or turn it off."
        )
    if trainer.accelerator.num_processes > 1 and trajectory_timeout_s >= args.ddp_timeout:
        found["time limits"] = (
            f"trajectory_timeout_s={trajectory_timeout_s:g} is not below ddp_timeout={args.ddp_timeout}: while one "
            "process waits for a slow trajectory the others may give up. Raise ddp_timeout or lower the limit."
        )
    return found
