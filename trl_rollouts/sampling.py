"""What a `GRPOConfig` asks of one request.

All sampling settings come from the trainer's config, are read on every call, and are all sent: a server fills what a
request leaves out from the model's generation_config.json, and would sample from another distribution than the one
that is trained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .errors import SetupError

_OURS = frozenset(
    "n best_of prompt prompts model stream echo logprobs return_token_ids return_tokens_as_token_ids".split()
)


class SamplingConfig(Protocol):
    """The fields of TRL's `GRPOConfig` that this package samples with."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    max_completion_length: int | None
    generation_kwargs: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings of one request."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 turns it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings that this package has no name for; they reach the server as they are."""

    @classmethod
    def from_config(cls, config: SamplingConfig) -> "Sampling":
        """Read a `GRPOConfig`. `generation_kwargs` overrides the named fields, as in TRL.

        Raises:
            SetupError: `generation_kwargs` holds `n` or another field that the rollout itself must set.
        """
        if not config.max_completion_length or config.max_completion_length < 1:
            raise SetupError(
                f"GRPOConfig.max_completion_length is {config.max_completion_length}; a rollout needs a number."
            )
        given = dict(config.generation_kwargs or {})
        if taken := sorted(_OURS & given.keys()):
            raise SetupError(
                f"generation_kwargs holds {taken}, which the rollout sets itself (the trainer repeats each prompt "
                "num_generations times, and every row is one request). Remove them from GRPOConfig.generation_kwargs."
            )
        regex = getattr(config, "vllm_structured_outputs_regex", None)  # absent from older configs
        if regex is not None:
            given.setdefault("structured_outputs", {"regex": regex})
        stop, stop_token_ids = given.pop("stop", None) or (), given.pop("stop_token_ids", None) or ()
        if not isinstance(stop_token_ids, list | tuple):
            raise SetupError(f"generation_kwargs: stop_token_ids must be a list of ids, not {stop_token_ids!r}.")
        max_tokens = given.pop("max_tokens", None) or config.max_completion_length
        named: dict[str, Any] = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "seed": None,
        }
        named.update({name: given.pop(name) for name in list(given) if name in named})
        named["min_p"] = named["min_p"] or 0.0
        return cls(
            max_tokens=min(max_tokens, config.max_completion_length),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            extra=given,
            **named,
        )

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be sampled at all."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def limited(self, max_tokens: int) -> "Sampling":
        """The same settings for at most `max_tokens` tokens."""
        return replace(self, max_tokens=min(self.max_tokens, max_tokens))

    def seeded(self, trajectory: int, turn: int) -> "Sampling":
        """A user's `seed` as a different one for each trajectory and turn; without a seed, the same settings.

        One seed for all would make the members of a group equal, and leave GRPO nothing to compare.
        """
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + trajectory * 1_000_003 + turn) % 2**31)

    def ending_at(self, eos_token_ids: Iterable[int]) -> "Sampling":
        """The same settings for a server that may not know what ends a turn here.

        A server stops at the EOS ids in the model's own files. The trainer's may be others: a base model trained on
        ChatML, a tokenizer whose eos_token was set.
        """
        if self.extra.get("ignore_eos"):
            return self
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *eos_token_ids})))

    def stopping_at(self, strings: Iterable[str]) -> "Sampling":
        """The same settings, with further strings that end a completion once the model has written them."""
        return replace(self, stop=tuple(dict.fromkeys([*self.stop, *strings])))

    def body(self) -> dict[str, Any]:
        """The settings as fields of a vLLM request, `max_tokens` included."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,  # off; every vLLM takes -1
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.stop:
            # The matched text belongs to what was sampled: without it the last token's text would be cut.
            fields |= {"stop": list(self.stop), "include_stop_str_in_output": True}
        if self.stop_token_ids:
            fields["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            fields["seed"] = self.seed
        return fields | dict(self.extra)
