"""Stands in for vLLM where a test is about starting and ending it: put `tests/fake_vllm` on PYTHONPATH."""
