"""The interfaces of engines, each served by :func:`cute_sharding.plan_load`.

- :mod:`cute_sharding.integrations.groups`: one process group over a trainer and its engines.
- :mod:`cute_sharding.integrations.streams`: whole tensors, a bucket at a time.
- :mod:`cute_sharding.integrations.transformers`: names and shapes of checkpoints, and back.
- :mod:`cute_sharding.integrations.vllm`: an engine of vLLM's weight transfer.
- :mod:`cute_sharding.integrations.verl`: a checkpoint engine of verl.

Nothing here is imported before it is asked for, and nothing of the package imports it.
"""
