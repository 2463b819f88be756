"""Weights for vLLM: an engine of its weight transfer, of the name ``cute``.

vLLM's workers know it once :func:`register` has run in them. A plugin of vLLM does so wherever
cute-sharding is installed (``vllm.general_plugins``).
"""

from __future__ import annotations

NAME = "cute"
_WORKER = ("cute_sharding.integrations.vllm.worker", "CuteWeightTransferEngine")
_TRAINER = ("cute_sharding.integrations.vllm.trainer", "CuteTrainerWeightTransferEngine")


def register() -> None:
    """Tell vLLM of the engine ``cute``, for its workers and for trainers; once more does nothing.
    It imports nothing but vLLM's factories.
    """
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, where in (
        (WeightTransferEngineFactory, _WORKER),
        (WeightTransferTrainerFactory, _TRAINER),
    ):
        try:
            factory.register_engine(NAME, *where)
        except ValueError as error:  # the factory says so of a name that it knows
            if "already registered" not in str(error):
                raise


def plugin() -> None:
    """:func:`register` for vLLM's plugins, which run in every process of vLLM: without effect in
    a vLLM without weight transfer.
    """
    try:
        register()
    except ImportError:
        return
