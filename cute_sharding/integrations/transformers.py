"""Names and shapes of the checkpoints of transformers, and back, as functions of whole tensors:
for :func:`cute_sharding.plan_load`, ``plan_refit`` and ``load_checkpoint``.

A model of transformers has other weights than its checkpoint: experts in one tensor, fused
projections, other names. Engines load checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    revert_weight_conversion,
)

Weights: TypeAlias = "dict[str, torch.Tensor]"
Conversion: TypeAlias = "Callable[[Mapping[str, torch.Tensor]], Weights]"


def without_data(model: PreTrainedModel | PretrainedConfig) -> PreTrainedModel:
    """The model itself; of a config, a model on the meta device."""
    if isinstance(model, PreTrainedModel):
        return model
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model)


def to_checkpoint(model: PreTrainedModel | PretrainedConfig) -> Conversion:
    """From the state dict of a model to the weights of its checkpoint, which has those that layers
    share once.

    Args:
        model: of the same class and config as the one whose weights are converted, with data or
            without; or the config of a causal language model.
    """
    model = without_data(model)
    shared = model.all_tied_weights_keys  # the name in a checkpoint of each other name

    def convert(weights: Mapping[str, torch.Tensor]) -> Weights:
        own = {n: x for n, x in weights.items() if shared.get(n) not in weights}
        return revert_weight_conversion(model, own)

    return convert


def from_checkpoint(model: PreTrainedModel | PretrainedConfig) -> Conversion:
    """From the weights of a checkpoint to the state dict of a model; ``model`` as for
    :func:`to_checkpoint`. Weights that several layers share have all of their names.
    """
    model = without_data(model)

    def convert(weights: Mapping[str, torch.Tensor]) -> Weights:
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        steps: dict[str, Any] = {}
        for name in sorted(weights, key=dot_natural_key):
            renamed, step, pattern = _step(name, renamings, converters)
            steps.setdefault(renamed, step).add_tensor(renamed, name, pattern, weights[name])
        found: Weights = {}
        for name, step in steps.items():
            for key, x in step.convert(name, model=model, config=model.config).items():
                found[key] = x[0] if isinstance(x, list) else x
        for name, other in model.all_tied_weights_keys.items():
            if other in found:
                found.setdefault(name, found[other])
        return found

    return convert


def _step(name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, Any, str]:
    """What a weight is called in the model, or the first of several that are made of it; what
    makes it, and by which pattern.
    """
    renamed = name
    for renaming in renamings:
        renamed, _ = renaming.rename_source_key(renamed)
    for converter in converters:
        converted, pattern = converter.rename_source_key(renamed)
        if pattern is not None:
            return converted, deepcopy(converter), pattern
    return renamed, WeightRenaming(name, renamed), name
