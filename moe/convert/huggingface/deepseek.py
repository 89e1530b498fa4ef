"""DeepSeek-V2, DeepSeek-V3 and GLM-4.5 of transformers: keys of config.json that must be read together. Needs no torch.

    first_k_dense_replace          layers before the first with experts      model.moe_layers
    topk_method, n_group,          groups of experts; one group: no limit    router.select, expert_groups, top_groups
    topk_group
    rope_parameters: mscale, mscale_all_dim of YaRN                          model.rope.mscale, mscale_all

If mscale and mscale_all_dim are not both set, transformers multiplies cos and sin by 0.1 ln(factor) + 1.
"""

from __future__ import annotations

from typing import Any

from moe.recipe.sections import Rope, Run
from parallel.errors import BadInput

UNREAD = ("head_dim", "num_key_value_heads")  # keys that transformers writes but does not use for these models


def recipe_values(config: dict[str, Any], dense: int, groups: int, top: int | None) -> dict[str, Any]:
    """Recipe values that the table of keys cannot express. `dense`, `groups`, `top`: defaults of first_k_dense_replace, n_group,
    topk_group.

    Raises BadInput if there are groups but no number of groups that a token may use.
    """
    first, count = config.get("first_k_dense_replace"), config["num_hidden_layers"]
    dense = dense if first is None else int(first)
    values: dict[str, Any] = {"model.moe_every": 1} if dense == 0 else {"model.moe_layers": list(range(dense, count))}
    groups = config.get("n_group") or groups
    if groups == 1 or config.get("topk_method", "greedy" if config["model_type"] == "deepseek_v2" else "noaux_tc") == "greedy":
        return values | {"router.select": "top_k", "router.expert_groups": 1, "router.top_groups": 1}
    top = config.get("topk_group") or top
    if top is None:
        fix = "take the config.json that belongs to the files"
        raise BadInput("config.json: topk_group", got="nothing", needed=f"the number of the {groups} groups that a token may use", fix=fix)
    return values | {"router.select": "group_limited", "router.expert_groups": groups, "router.top_groups": top}


def config_of(run: Run, model_type: str) -> dict[str, Any]:
    """Keys of config.json that the table of keys cannot express."""
    m, spec = run.model, run.router
    sparse = m.layers_with_experts()
    method = "group_limited_greedy" if spec.select == "group_limited" else "greedy"
    return ({"topk_method": method} if model_type == "deepseek_v2" else {}) | {
        "first_k_dense_replace": sparse[0] if sparse else m.num_layers,
        "n_group": spec.expert_groups,
        "topk_group": spec.top_groups,
        "num_key_value_heads": m.num_kv_heads or m.num_heads,
    }


def mscales(given: dict[str, Any]) -> dict[str, float]:
    """The recipe's mscale and mscale_all, which are removed from YaRN's parameters `given`. Raises BadInput for mscale_all_dim without
    mscale.
    """
    mscale, every = float(given.pop("mscale", None) or 0), float(given.pop("mscale_all_dim", None) or 0)
    if every and not mscale:
        needed, fix = "mscale together with mscale_all_dim", "nothing here computes another: see docs/use/huggingface.md"
        raise BadInput("config.json: rope_parameters.mscale", got="null", needed=needed, fix=fix)
    return {"mscale": mscale, "mscale_all": every} if mscale and every else {}


def mscales_of(rope: Rope) -> dict[str, float]:
    """mscale and mscale_all_dim as transformers names them, if they are set."""
    return {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all} if rope.mscale_all else {}
