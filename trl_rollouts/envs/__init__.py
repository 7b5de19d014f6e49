"""Environments that were written for something else, as they are: one module for each kind.

Every module has a function whose result `env_rollout` takes. An optional library is imported when that is called.
"""
