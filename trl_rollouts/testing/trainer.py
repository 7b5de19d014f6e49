"""A stand-in for `GRPOTrainer`: what a rollout reads of a trainer, and nothing that trains.

The settings have `GRPOConfig`'s names and the defaults of TRL 1.16. Models, weight syncs and logging callbacks are not
here: for those, a real trainer with `tiny_model` takes a few seconds.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Literal

_DEFAULTS: dict[str, Any] = {
    # sampling
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "cache_implementation": None,
    "chat_template_kwargs": None,
    "max_tool_calling_iterations": None,
    # batches
    "num_generations": 8,
    "num_generations_eval": None,
    "num_iterations": 1,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "ddp_timeout": 1800,
    "ds3_gather_for_generation": True,
    # the server
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    # the loss, where it looks at what was sampled
    "loss_type": "dapo",
    "beta": 0.0,
    "mask_truncated_completions": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "use_transformers_continuous_batching": False,
    # the run
    "output_dir": "trainer_output",
    "seed": 42,
    "logging_steps": 10,
    "log_completions": False,
    "report_to": "none",
    "use_cpu": False,
}


def fake_trainer(tokenizer: Any, *, mode: Literal["train", "eval"] = "train", **grpo_config_fields: Any) -> Any:
    """What a `rollout_func` takes as `trainer`.

    Args:
        tokenizer: the processing class.
        mode: whether the model is training.
        grpo_config_fields: settings under `GRPOConfig`'s names, such as `temperature=0.7`.
    """
    if unknown := sorted(grpo_config_fields.keys() - _DEFAULTS.keys()):
        raise TypeError(f"Not settings that a rollout reads: {unknown}. fake_trainer knows {sorted(_DEFAULTS)}.")
    args = SimpleNamespace(**_DEFAULTS | grpo_config_fields)
    model = SimpleNamespace(
        training=mode == "train",
        config=SimpleNamespace(max_position_embeddings=4096),
        generation_config=SimpleNamespace(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id),
    )
    accelerator = SimpleNamespace(
        process_index=0,
        num_processes=1,
        is_main_process=True,
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model: model,
    )
    return SimpleNamespace(
        args=args,
        processing_class=tokenizer,
        chat_template=None,
        chat_template_kwargs=args.chat_template_kwargs or {},
        tools=None,
        model=model,
        model_wrapped=model,
        accelerator=accelerator,
        state=SimpleNamespace(global_step=0),
        use_vllm=args.use_vllm,
        vllm_mode=args.vllm_mode,
        num_generations=args.num_generations,
        num_generations_eval=args.num_generations_eval or args.num_generations,
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
