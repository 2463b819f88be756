"""Conversions of transformers in both directions, where the package is installed: bit for bit the
checkpoint that it saves, on whole tensors and as recorded moves.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from cute_sharding import Spec, plan_refit  # noqa: E402
from cute_sharding.integrations.transformers import from_checkpoint, to_checkpoint  # noqa: E402

SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
del ROUTED["num_experts"]
LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 4, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 4, "num_hidden_layers": 4, "head_dim": 4},
    "shared_expert_intermediate_size": 8,
}
FAMILIES = {
    "LlamaConfig": {},
    "Qwen2Config": {"tie_word_embeddings": True},
    "Qwen3MoeConfig": {**EXPERTS, "head_dim": 4},
    "MixtralConfig": {"num_local_experts": 4},
    "DeepseekV3Config": {**ROUTED, **LATENT},
    "GptOssConfig": {"num_local_experts": 4, "head_dim": 4},
    "Qwen3NextConfig": {**EXPERTS, **DELTA},
    "Gemma3TextConfig": {"head_dim": 4},
    "Phi3Config": {"pad_token_id": 0},
    "OlmoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "JambaConfig": {"num_experts": 4, "mamba_dt_rank": 4},
    "Glm4MoeConfig": ROUTED,
}


def config_of(family):
    return getattr(transformers, family)(**{**SMALL, **FAMILIES[family]})


def model_of(family):
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    for p in model.parameters():
        p.data.normal_()
    return model


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_the_one_that_transformers_saves(family, tmp_path):
    from safetensors.torch import load_file

    model, config = model_of(family), config_of(family)
    model.save_pretrained(tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert_same(to_checkpoint(config)(state), saved)
    assert_same(from_checkpoint(config)(saved), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_directions_only_move_elements(family):
    config = config_of(family)
    state = {n: Spec(x.shape, (2,), "S(0)") for n, x in model_of(family).state_dict().items()}
    there = plan_refit(to_checkpoint(config), state, {"*": ((2,), "R")})
    assert there.coverage == 1
    checkpoint = {name: Spec(x.shape, (2,), "S(0)") for name, x in there.target.items()}
    back = plan_refit(from_checkpoint(config), checkpoint, {"*": ((2,), "R")})
    assert {name: x.shape for name, x in back.target.items()} == {
        name: x.shape for name, x in state.items()
    }
