"""DeepSeek-V2, -V3 and GLM-4.5 of transformers: the keys of config.json that say something together (no torch here).

    first_k_dense_replace          layers before the first with experts      model.moe_layers
    topk_method, n_group,          groups of experts; one limits nothing     router.select, expert_groups, top_groups
    topk_group
    rope_parameters: mscale, mscale_all_dim of YaRN                          model.rope.mscale, mscale_all

Where mscale and mscale_all_dim are not both there, transformers takes cos and sin times 0.1 ln(factor) + 1.
"""

from __future__ import annotations

from typing import Any

from moe.recipe.sections import Rope, Run
from parallel.errors import BadInput

UNREAD = ("head_dim", "num_key_value_heads")  # what transformers writes beside the sizes that it reads


def recipe_values(config: dict[str, Any], dense: int, groups: int, top: int | None) -> dict[str, Any]:
    """What the table of keys cannot say. `dense`, `groups`, `top`: of a config without first_k_dense_replace, n_group or topk_group.
    Raises BadInput for groups of which nothing says how many a token may use."""
    first, count = config.get("first_k_dense_replace"), config["num_hidden_layers"]
    dense = dense if first is None else int(first)
    values: dict[str, Any] = {"model.moe_every": 1} if dense == 0 else {"model.moe_layers": list(range(dense, count))}
    groups = config.get("n_group") or groups
    if groups == 1 or config.get("topk_method", "greedy" if config["model_type"] == "deepseek_v2" else "noaux_tc") == "greedy":
        return values | {"router.select": "top_k", "router.expert_groups": 1, "router.top_groups": 1}
    top = config.get("topk_group") or top
    if top is None:
        fix = "take the config.json that belongs to the files"
        raise BadInput("config.json: topk_group", got="nothing", needed=f"how many of {groups} groups a token may use", fix=fix)
    return values | {"router.select": "group_limited", "router.expert_groups": groups, "router.top_groups": top}


def config_of(run: Run, model_type: str) -> dict[str, Any]:
    """What the table of keys cannot say of a run."""
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
    """Of YaRN's parameters, which lose these two. Raises BadInput for a mscale_all_dim alone: cos and sin would not be a quotient."""
    mscale, every = float(given.pop("mscale", None) or 0), float(given.pop("mscale_all_dim", None) or 0)
    if every and not mscale:
        needed, fix = "mscale beside mscale_all_dim", "nothing here computes another: see docs/use/huggingface.md"
        raise BadInput("config.json: rope_parameters.mscale", got="null", needed=needed, fix=fix)
    return {"mscale": mscale, "mscale_all": every} if mscale and every else {}


def mscales_of(rope: Rope) -> dict[str, float]:
    """The same two, as transformers has them."""
    return {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all} if rope.mscale_all else {}
