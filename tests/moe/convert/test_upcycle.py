"""Conversions dense to sparse and back, through checkpoints on disk: the output stays equal wherever it must, a report says what is lost,
and `moe train` continues from the new checkpoint at step 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.cli import main as cli
from moe.convert import upcycle
from moe.convert.checks import Settings, check_convertible, gate_sum, settings_of
from moe.convert.convert import compared, convert, find, loads, main
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer, moe_layers
from moe.nn.context import Context
from moe.parallelize.build import build as build_model
from moe.recipe.load import build_run, resolved_yaml
from moe.recipe.presets import PRESETS
from moe.recipe.sections import Run
from moe.records import metrics
from moe.router.router import Router
from moe.train.loop import trainer
from moe.train.start import opening
from moe.train.start.restore import restore
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process.process import World
from parallel.store.checkpoint import numbered
from parallel.store.stored import Reader
from tests.support import trained

# layers 1 and 3 of 4 become sparse; sizes as in tests/support/trained.py: D 16, F 24
SPARSE: dict[str, Any] = {"num_layers": 4, "moe_every": 2}
GLAM: dict[str, Any] = {"preset": "glam", "capacity_factor": None, "min_capacity": 0, "jitter": 0.0}
SWITCH: dict[str, Any] = {"preset": "switch", "capacity_factor": None, "min_capacity": 0, "jitter": 0.0}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("upcycle"), patch)


def recipe(home: Path, *, model: dict[str, Any], router: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Run:
    return trained.recipe(home, model=model, router=router or GLAM, **sections)


@pytest.fixture(scope="module")
def source(home: Path) -> Callable[..., Path]:
    """Return a function that trains a model for a few steps and returns its run folder: source(ffn="swiglu"), source(sparse=True)."""
    done: dict[str, Path] = {}

    def make(*, ffn: str = "swiglu", sparse: bool = False, **sections: Any) -> Path:
        key = f"{ffn} {sparse} {sections}"
        if key not in done:
            model = {"num_layers": 4, "moe_every": 2 if sparse else 0, "ffn": ffn}
            out = done[key] = home / f"source-{len(done)}"
            trained.train(recipe(home, model=model, train={"steps": 3, "save_every": 0}, **sections), out)
        return done[key]

    return make


def written(run: Run, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "target.yaml"
    path.write_text(resolved_yaml(run, {}))
    return path


def converted(run: Run, source: Path, out: Path, **settings: Any) -> Path:
    """Convert as `moe convert` does, and return the new checkpoint's folder."""
    load = settings.pop("load", None)
    main(str(source), str(out), recipe=str(written(run, out)), overrides={}, settings=Settings(**settings), load=load)
    ((step, path),) = numbered(out / "checkpoints")
    assert step == 0 or settings.get("moments") == "copy"
    return path


def logits(model: Transformer, *, training: bool) -> Tensor:
    model.train(training)
    tokens = torch.randint(256, (3, 11), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens).logits_BLV


def assert_same_output(old: Path, new: Path, *, training: tuple[bool, ...] = (False, True)) -> None:
    before, after = restore(find(old)), restore(find(new))
    for mode in training:
        want, got = logits(before, training=mode), logits(after, training=mode)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


TARGETS: dict[str, dict[str, Any]] = {
    "copy": {"method": "copy", "experts": {"num_experts": 4}},
    "pyramid": {"method": "copy", "experts": {"num_experts": [2, 6]}},
    "residual": {"method": "copy", "experts": {"num_experts": 4, "residual": True}},
    "gated shared": {"method": "copy", "experts": {"num_experts": 4, "shared": 1, "shared_gate": True, "shared_d_ff": 7}},
    "every layer, top-3": {"method": "copy", "experts": {"num_experts": 5}, "model": {"moe_every": 1}, "router": {"num_choices": 3}},
    "softmax over the chosen": {"method": "copy", "experts": {"num_experts": 4}, "router": {"preset": "mixtral"}},
    "sigmoid, scaled": {
        "method": "copy",
        "experts": {"num_experts": 8},
        "router": {"preset": "deepseek_v3", "expert_groups": 4, "top_groups": 2, "num_choices": 3},
    },
    "granular, 2 shards": {"method": "granular", "experts": {"num_experts": 8, "d_ff": 12}},
    "granular, 3 shards, top-6": {"method": "granular", "experts": {"num_experts": 12, "d_ff": 8}, "router": {"num_choices": 6}},
    "granular pyramid": {"method": "granular", "experts": {"num_experts": [2, 6], "d_ff": 12}},
    "no noise": {"method": "noise", "experts": {"num_experts": 4}, "scale": 0.0},
    "none of the weights": {"method": "noise", "experts": {"num_experts": 4}, "share": 0.0},
    "no unit": {"method": "drop", "experts": {"num_experts": 4}, "share": 0.0},
}


@pytest.mark.parametrize(
    ("name", "ffn"), [*((name, "swiglu") for name in TARGETS), ("copy", "relu"), ("granular, 2 shards", "relu")], ids=str
)
def test_upcycling_keeps_the_output(name: str, ffn: str, home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    """A converted model of each of TARGETS has the logits of the dense model, in evaluation and in training without drops."""
    values = dict(TARGETS[name])
    model = SPARSE | {"ffn": ffn} | values.pop("model", {})
    run = recipe(home, model=model, router=GLAM | values.pop("router", {}), experts=values.pop("experts"))
    converted(run, source(ffn=ffn), tmp_path / "new", **values)
    assert_same_output(source(ffn=ffn), tmp_path / "new")


def test_a_copy_is_the_dense_network_to_the_bit_and_the_router_that_of_a_new_model(
    home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 3})
    new, old = Reader(converted(run, source(), tmp_path / "new")), Reader(find(source()))
    whole: Callable[[Reader, str], Tensor] = lambda r, n: r.region(n, "weight", tuple(slice(0, s) for s in r.names()[n]))  # noqa: E731
    for e in range(3):
        for m in ("w1", "w2", "w3"):
            assert torch.equal(whole(new, f"layers.1.experts.{e}.{m}"), whole(old, f"layers.1.ffn.{m}.weight").T)
    for name in ("embedding", "layers.1.attention.q.weight", "layers.2.ffn.w3.weight", "norm.weight"):
        assert torch.equal(whole(new, name), whole(old, name))
    fresh, _ = build_model(check_run(run, 1), Mesh.of(Degrees()), device=torch.device("cpu"))
    assert torch.equal(whole(new, "layers.3.router.weight"), dict(fresh.named_parameters())["layers.3.moe.router.weight"])


def test_the_shards_of_a_network_are_chosen_together(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, router=GLAM | {"num_choices": 4}, experts={"num_experts": 8, "d_ff": 12})
    model = restore(converted(run, source(), tmp_path / "new", method="granular"))
    for report in model(torch.randint(256, (2, 9))).layers:
        assert torch.equal(report.load_E[0::2], report.load_E[1::2]) and report.load_E.sum() == 2 * 9 * 4


def test_switchs_gates_are_refused_unless_approximate_and_then_scaled_for_an_even_router(
    home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, router=SWITCH, experts={"num_experts": 4})
    with pytest.raises(BadInput, match="router.preset: got switch, whose gates of a token do not sum to a constant.*--approximate"):
        converted(run, source(), tmp_path / "no")
    assert not (tmp_path / "no/checkpoints").exists()
    model = restore(converted(run, source(), tmp_path / "new", approximate=True))
    for name, parameter in model.named_parameters():
        if ".router." in name:
            parameter.data.mul_(1e-6)  # nearly equal logits: every gate is 1 / E
    torch.testing.assert_close(logits(model, training=False), logits(restore(find(source())), training=False), rtol=1e-3, atol=1e-4)


def test_noise_is_on_its_share_of_the_weights_and_of_its_size() -> None:
    network = {"w1": random(40, 50, seed=1) * 3, "w2": random(50, 40, seed=2)}
    first, second = upcycle.noisy(network, 2, share=0.25, scale=0.1, key="layers.1.experts", seed=7)
    change = first["w1"] - network["w1"]
    assert (change != 0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert change[change != 0].std() == pytest.approx(0.1 * network["w1"].std().item(), rel=0.1)
    assert not torch.equal(first["w1"], second["w1"])
    again = upcycle.noisy(network, 2, share=0.25, scale=0.1, key="layers.1.experts", seed=7)[1]
    assert torch.equal(second["w1"], again["w1"]) and torch.equal(second["w2"], again["w2"])


def test_drop_draws_whole_units_anew_in_the_statistics_of_the_old() -> None:
    network = {"w1": random(60, 80, seed=1) * 3 + 1, "w2": random(80, 60, seed=2) / 5, "w3": random(60, 80, seed=3)}
    first, second = upcycle.redrawn(network, 2, share=0.3, key="layers.1.experts", seed=7)
    assert network["w3"] is not None and first["w3"] is not None
    new = [(first["w1"] != network["w1"]).any(0), (first["w2"] != network["w2"]).any(1), (first["w3"] != network["w3"]).any(0)]
    assert (
        new[0].sum() == 24 and torch.equal(new[0], new[1]) and torch.equal(new[0], new[2])
    )  # the same units are drawn anew in all three matrices
    assert first["w1"][:, new[0]].mean() == pytest.approx(1, abs=0.3) and first["w1"][:, new[0]].std() == pytest.approx(3, rel=0.1)
    assert first["w2"][new[0]].std() == pytest.approx(0.2, rel=0.1)
    assert not torch.equal((second["w1"] != network["w1"]).any(0), new[0])


@pytest.mark.parametrize("weights", ["uniform", "load"])
@pytest.mark.parametrize("num_experts", [3, [7, 2]])
def test_dense_to_copies_to_merged_is_the_dense_model_to_the_bit(
    weights: str, num_experts: Any, home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    sparse = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": num_experts})
    there = converted(sparse, source(), tmp_path / "sparse")
    counts = {1: [0.1 * (e + 1) for e in range(sparse.experts.of_layer(0))], 3: [3.0 * e for e in range(sparse.experts.of_layer(1))]}
    (tmp_path / "load.json").write_text(json.dumps(counts))
    dense = recipe(home, model={"num_layers": 4, "moe_every": 0, "ffn": "swiglu"})
    back = converted(dense, there, tmp_path / "back", method="merge", weights=weights, load=str(tmp_path / "load.json"))
    new, old = Reader(back), Reader(find(source()))
    assert new.names() == old.names()
    for name, shape in old.names().items():
        region = tuple(slice(0, n) for n in shape)
        assert torch.equal(new.region(name, "weight", region), old.region(name, "weight", region)), name


def test_merging_copies_to_fewer_keeps_the_output(
    home: Path, source: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = converted(recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": [8, 6]}), source(), tmp_path / "8")
    fewer = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": [4, 6]})
    new = converted(fewer, there, tmp_path / "4", method="merge")
    assert_same_output(there, new)
    rows = Reader(there).region("layers.1.router.weight", "weight", (slice(0, 8), slice(0, 16)))
    got = Reader(new).region("layers.1.router.weight", "weight", (slice(0, 4), slice(0, 16)))
    torch.testing.assert_close(got, rows.view(4, 2, 16).mean(1))
    assert "otherwise" not in capsys.readouterr().out
    converted(fewer.model_copy(update={"router": fewer.router.model_copy(update={"gate_scale": 2.0})}), there, tmp_path / "scaled")
    assert "  the new recipe changes what the weights compute: router.gate_scale: 1.0 -> 2.0" in capsys.readouterr().out


def test_pruning_experts_that_no_token_chose_keeps_the_output(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    """The load in metrics.jsonl is replaced by the load of two tokens, which choose at most four of six experts. Pruned to these experts,
    the model has the same logits for the two tokens."""
    run = recipe(home, model=SPARSE, experts={"num_experts": 6}, train={"steps": 2, "save_every": 0})
    trained.train(run, tmp_path / "run")
    tokens = torch.tensor([[65, 110]])
    with torch.no_grad():
        want = restore(find(tmp_path / "run"))(tokens)
    lines = metrics.read(tmp_path / "run")
    for line in lines:
        for layer, report in zip(line.get("moe") or [], want.layers, strict=False):
            layer["load"] = report.load_E.tolist()
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = recipe(home, model=SPARSE, experts={"num_experts": [int((report.load_E > 0).sum()) for report in want.layers]})
    new = restore(converted(small, tmp_path / "run", tmp_path / "small", method="prune"))
    assert small.experts.counts != (6, 6)
    with torch.no_grad():
        torch.testing.assert_close(new(tokens).logits_BLV, want.logits_BLV)


def test_pruning_keeps_the_most_used_experts_and_their_router_rows(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text(json.dumps({"1": [5, 0, 9, 1], "3": [2, 2, 2, 0]}))
    small = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 2})
    old = Reader(find(source(sparse=True)))
    new = Reader(converted(small, source(sparse=True), tmp_path / "new", method="prune", load=str(tmp_path / "load.json")))
    for layer, kept in ((1, [0, 2]), (3, [0, 1])):
        rows = old.region(f"layers.{layer}.router.weight", "weight", (slice(0, 4), slice(0, 16)))
        assert torch.equal(new.region(f"layers.{layer}.router.weight", "weight", (slice(0, 2), slice(0, 16))), rows[kept])
        for place, e in enumerate(kept):
            region = (slice(0, 24), slice(0, 16))
            want = old.region(f"layers.{layer}.experts.{e}.w2", "weight", region)
            assert torch.equal(new.region(f"layers.{layer}.experts.{place}.w2", "weight", region), want)


def test_equal_experts_and_shared_ones_become_one_wider_dense_network(home: Path, tmp_path: Path) -> None:
    """Experts with d_ff 24 and a shared network of 2 * 5 hidden units become one network of 34 hidden units with equal output."""
    experts = {"num_experts": 3, "d_ff": 24, "shared": 2, "shared_d_ff": 5}
    sparse = recipe(home, model=SPARSE | {"moe_every": 1, "d_ff": 34}, experts=experts, train={"steps": 2, "save_every": 0})
    trained.train(sparse, tmp_path / "run")
    reader, run = Reader(find(tmp_path / "run")), recipe(home, model=SPARSE | {"moe_every": 0, "d_ff": 34})
    old = restore(reader.path)
    for layer in old.layers:
        assert layer.moe is not None
        for w in layer.moe.experts.parameters():
            w.data.copy_(w.data.mean(0, keepdim=True).expand_as(w))
    held = {name: w for name, w in old.named_parameters() if ".experts." in name}
    read = Reader.region

    def equal(self: Reader, name: str, kind: str, region: tuple[slice, ...]) -> Tensor:
        stem, _, matrix = name.rpartition(".")
        stack, _, number = stem.rpartition(".")
        found = held.get(f"{stack.replace('.experts', '.moe.experts')}.{matrix}")
        return found.detach()[int(number)] if found is not None and number.isdigit() else read(self, name, kind, region)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "region", equal)
        engine, _, _ = convert(run, reader.path, Settings())
    torch.testing.assert_close(logits(engine.module, training=False), logits(old, training=False), rtol=1e-4, atol=1e-5)


ALL_OF_A_ROUTER = {"logits": "affine", "input_norm": "rmsnorm", "expert_scale": "learned", "noise": "noisy_top_k"}


def test_all_that_a_router_learned_goes_along_with_its_experts(home: Path, tmp_path: Path) -> None:
    router = {"preset": "deepseek_v3", "num_choices": 2, "expert_groups": 2, "top_groups": 2, "bias_rate": 0.1} | ALL_OF_A_ROUTER
    run = recipe(home, model=SPARSE, router=router, experts={"num_experts": 4}, train={"steps": 3, "save_every": 0})
    trained.train(run, tmp_path / "run")
    (tmp_path / "load.json").write_text(json.dumps({"1": [5, 0, 9, 1], "3": [2, 2, 2, 0]}))
    old = restore(find(tmp_path / "run"))
    small = recipe(home, model=SPARSE, router=router, experts={"num_experts": 2})
    settings = {"method": "prune", "load": str(tmp_path / "load.json")}
    new = restore(converted(small, tmp_path / "run", tmp_path / "new", **settings))
    biases = [[m.router.bias_E for m in moe_layers(model)] for model in (old, new)]
    for before, after, kept in zip(*biases, ([0, 2], [0, 1]), strict=True):
        assert before is not None and after is not None and before.abs().sum() > 0
        assert torch.equal(after, before[kept])
    for was, now, kept in zip(moe_layers(old), moe_layers(new), ([0, 2], [0, 1]), strict=True):
        held = dict(now.router.named_parameters())
        assert held.keys() == {"weight", "logit_bias", "noise_weight", "expert_scale", "input_norm.weight"}
        for name, weight in was.router.named_parameters():
            assert torch.equal(held[name], weight if name == "input_norm.weight" else weight[kept]), name
            assert weight.std() > 0, name  # not the equal numbers with which it began
    with pytest.raises(BadInput, match="router.bias_rate: got null, needed a number: the source's routers have a selection bias"):
        without = recipe(home, model=SPARSE, router=GLAM | ALL_OF_A_ROUTER, experts={"num_experts": 2})
        converted(without, tmp_path / "run", tmp_path / "no", **settings)


def test_the_load_is_the_mean_of_a_runs_last_lines_up_to_the_checkpoint(source: Callable[..., Path]) -> None:
    run = source(sparse=True)
    before = build_run(Reader(find(run)).state["recipe"])
    lines = [line for line in metrics.read(run) if line["kind"] == "train"]
    got = loads(run, before, step=2)
    for at, layer in enumerate((1, 3)):
        want = [sum(line["moe"][at]["load"][e] for line in lines[:2]) / 2 for e in range(4)]
        assert got[layer] == pytest.approx(want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_continues_from_step_0_on_any_layout(ranks: int, home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    """The first loss of the converted model equals the dense model's loss on the first batch."""
    sparse = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4}, train={"steps": 2}, degrees={"ep": ranks})
    converted(sparse, source(), tmp_path / "new")
    trained.train(sparse, tmp_path / "new", ranks=ranks)
    lines = metrics.read(tmp_path / "new")
    assert ("resumed", 0) in trained.events(tmp_path / "new") and [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    model = restore(find(source()))
    data = opening.open_data(sparse.data, max_length=12, vocab_size=256, seed=0, log=lambda _: None)
    tokens = torch.from_numpy(data.train.batch(0, TokenShard.whole(8, 12)))
    want = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits_BLV.flatten(0, 1), tokens[:, 1:].flatten().long()).item()
    assert next(line["loss"] for line in lines if line["kind"] == "train") == pytest.approx(want, rel=1e-5)


def test_copied_moments_sum_to_the_sources_and_training_continues_at_its_step(
    home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    sparse = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4}, train={"steps": 5})
    path = converted(sparse, source(), tmp_path / "new", moments="copy")
    new, old = Reader(path), Reader(find(source()))
    assert path.name == "step-3" and new.state["counters"]["updates"] == 3
    mine = [new.region(f"layers.1.experts.{e}.w1", "exp_avg", (slice(0, 16), slice(0, 24))) for e in range(4)]
    dense = old.region("layers.1.ffn.w1.weight", "exp_avg", (slice(0, 24), slice(0, 16))).T
    torch.testing.assert_close(sum(mine), dense)
    squares = new.region("layers.1.experts.2.w1", "exp_avg_sq", (slice(0, 16), slice(0, 24)))
    torch.testing.assert_close(squares * 16, old.region("layers.1.ffn.w1.weight", "exp_avg_sq", (slice(0, 24), slice(0, 16))).T)
    assert new.region("layers.1.router.weight", "exp_avg", (slice(0, 4), slice(0, 16))).abs().sum() == 0
    trainer.train(sparse, out=tmp_path / "new", world=World(), display=False)
    assert [line["step"] for line in metrics.read(tmp_path / "new") if line["kind"] == "train"] == [4, 5]


def test_a_check_prints_how_far_apart_the_models_are(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4})
    engine, _, _ = convert(run, find(source()), Settings())
    said = compared(find(source()), engine.module).said()
    assert float(said.split("at most ")[1].split()[0]) < 1e-5
    engine, _, _ = convert(run, find(source()), Settings(method="noise", scale=0.5))
    assert compared(find(source()), engine.module).largest_difference > 1e-3


@pytest.mark.parametrize(("halves", "counted"), [(False, 4 * 8), (True, 4 * 4)])
def test_a_check_counts_the_tokens_that_have_logits(halves: bool, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compared` counts all tokens of a decoder, but only the decoder's half of the tokens of an encoder-decoder."""
    kind = {"kind": "encoder_decoder", "positions": "t5"} if halves else {}
    sizes = {"num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 8, "max_length": 8, "moe_every": 0}
    run = build_run({"model": sizes | kind, "data": {"objective": "span_corruption" if halves else "next_token"}})
    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    monkeypatch.setattr("moe.convert.convert.restore", lambda _: model)
    assert compared(Path(), model).said().startswith(f"checked on {counted} random tokens: logits differ by at most 0.00e+00")


@pytest.mark.parametrize("preset", PRESETS)
def test_gate_sum_is_the_sum_of_the_routers_gates(preset: str) -> None:
    """A router's gates sum to the constant of `gate_sum` for each token; where `gate_sum` is None, the sum varies."""
    settings = build_run({"router": {"preset": preset}}).router
    if preset != "expert_choice":  # expert_choice always has a capacity
        settings = settings.model_copy(update={"capacity_factor": None, "eval_capacity_factor": None})
    router = Router(settings, num_experts=64, d_model=8).eval()
    router.weight.data.copy_(random(64, 8))
    tokens = torch.zeros(2, 30, dtype=torch.long)
    routing = router(random(60, 8, seed=3), sequence_tokens=30, context=Context.of(tokens))
    sums = (routing.gate_TK * routing.kept_TK).sum(1)
    want = gate_sum(settings)
    assert (sums.std() > 1e-3) if want is None else torch.allclose(sums, torch.tensor(want))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model": {"moe_every": 0}}, {}, "--to: got the source's number of experts in each layer"),
    ({"model": {"num_heads": 4}}, {}, "model.num_heads: got 4, needed the source's 2"),
    ({"model": {"norm": "layernorm"}}, {}, "model.norm: got layernorm"),
    ({"model": {"ffn": "geglu"}}, {}, "model.ffn: got geglu, needed the source's swiglu"),
    ({"experts": {"ffn": "relu"}}, {}, "experts.ffn: got relu, needed the source's swiglu"),
    ({"experts": {"d_ff": 12}}, {}, "experts.d_ff: got 12, needed the source's d_ff 24; fix: --experts.d_ff 24, or --method granular"),
    ({"experts": {"d_ff": 24}}, {"method": "granular"}, "experts.d_ff: got 24, needed a proper divisor of the source's d_ff 24"),
    ({"experts": {"d_ff": 8}}, {"method": "granular"}, "experts.num_experts: got 4, needed a multiple of 3,"),
    ({"experts": {"d_ff": 6}}, {"method": "granular"}, "router.num_choices: got 2, needed a multiple of 4,"),
    ({"experts": {"d_ff": 12}, "router": {"noise": "gumbel"}}, {"method": "granular"}, "router.noise: got gumbel with --method granular"),
    ({"experts": {"d_ff": 12, "residual": True}}, {"method": "granular"}, "experts.residual: got true with --method granular"),
    ({}, {"method": "merge"}, "--method: got merge, needed one of copy, granular, noise, drop"),
    ({}, {"method": "noise", "moments": "copy"}, "--moments: got copy with --method noise"),
]


@pytest.mark.parametrize(("values", "settings", "said"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_cannot_be_upcycled_is_refused_and_nothing_is_written(
    values: dict[str, Any], settings: dict[str, Any], said: str, home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    model, router = SPARSE | {"ffn": "swiglu"} | values.get("model", {}), GLAM | values.get("router", {})
    run = recipe(home, model=model, router=router, experts={"num_experts": 4} | values.get("experts", {}))
    with pytest.raises(BadInput) as refused:
        converted(run, source(), tmp_path / "new", **settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["target.yaml"]


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        ({"experts": {"num_experts": 8}}, {}, "experts.num_experts: got 8 in layer 1, needed at most the source's 4"),
        ({"experts": {"num_experts": 3}}, {"method": "merge"}, "experts.num_experts: got 3, needed a divisor of the source's 4"),
        ({"experts": {"num_experts": 2}}, {"method": "copy"}, "--method: got copy, needed one of merge, prune"),
        ({"experts": {"num_experts": 2, "d_ff": 12}}, {}, "experts.d_ff: got 12, needed 24, the width of an expert"),
        ({"experts": {"num_experts": 2, "shared": 1}}, {}, "parameter layers.1.shared.w1.weight: got nothing in the source"),
        ({"experts": {"num_experts": 2, "shared": 1}}, {}, "so that unconverted parameters have the source's names and sizes"),
        ({"model": {"moe_every": 1}}, {}, "--to: got more experts in layers"),
        (
            {"model": {"moe_layers": [1, 2], "moe_every": 0}, "experts": {"num_experts": 4}},
            {},
            "--to: got more experts in layers [2], fewer in [3]",
        ),
        ({"experts": {"num_experts": 2}}, {"method": "prune", "load": "no.json"}, "--load: got no.json"),
    ],
)
def test_what_cannot_be_made_smaller_is_refused(
    values: dict[str, Any], settings: dict[str, Any], said: str, home: Path, source: Callable[..., Path], tmp_path: Path
) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"} | values.get("model", {}), experts={"num_experts": 2} | values.get("experts", {}))
    with pytest.raises(BadInput) as refused:
        converted(run, source(sparse=True), tmp_path / "new", **settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_gates_with_a_learned_scale_sum_to_one_in_a_new_router_alone() -> None:
    def model(moe_every: int, **router: str) -> Run:
        sizes = {"model": {"moe_every": moe_every, "d_model": 24, "num_heads": 4, "d_ff": 20}, "experts": {"num_experts": 4}}
        return build_run(sizes | {"router": {"preset": "glam"} | router})

    check_convertible(model(0), model(2, expert_scale="learned"), Settings(method="copy"))
    check_convertible(model(2), model(0), Settings(method="merge"))
    with pytest.raises(BadInput, match="--to: got dense layers from glam, whose gates of a token do not sum to a constant"):
        check_convertible(model(2, expert_scale="learned"), model(0), Settings(method="merge"))


def test_what_would_be_lost_of_a_router_or_of_tokens_ahead_is_refused_by_its_key() -> None:
    def model(num_experts: int, ahead: int = 0, **router: str) -> Run:
        sizes = {"moe_every": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "ahead": ahead}
        return build_run({"model": sizes, "experts": {"num_experts": num_experts}, "router": {"preset": "glam"} | router})

    for key, value in ALL_OF_A_ROUTER.items():
        check_convertible(model(4, **{key: value}), model(2, **{key: value}), Settings())
        plain = {"logits": "linear"}.get(key, "none")
        for old, new, has, needed in ((4, 2, plain, value), (4, 2, value, plain)):
            with pytest.raises(BadInput) as refused:
                check_convertible(model(old, **{key: needed}), model(new, **{key: has}), Settings())
            assert str(refused.value) == f"router.{key}: got {has}, needed the source's {needed}; fix: --router.{key} {needed}"
    check_convertible(model(4), model(2, noise="gumbel"), Settings())  # accepted: this noise has no weights to convert
    with pytest.raises(BadInput, match="model.ahead: got 0, needed the source's 1; fix: --model.ahead 1"):
        check_convertible(model(4, ahead=1), model(2), Settings())


def test_flags_that_do_not_go_together_are_refused() -> None:
    for given, said in (
        ({"method": "copy", "share": 0.5}, "--share: got --share with --method copy"),
        ({"method": "drop", "scale": 0.5}, "--scale: got --scale with --method drop"),
        ({"share": 0.5}, "--share: got no --method"),
        ({"method": "noise", "share": 1.5}, "--share: got 1.5"),
        ({"method": "noise", "scale": -1.0}, "--scale: got -1.0"),
        ({"method": "prune", "weights": "load"}, "--weights: got --weights with --method prune"),
    ):
        with pytest.raises(BadInput) as refused:
            settings_of(given, approximate=False)
        assert said in str(refused.value)


def test_a_folder_with_checkpoints_is_not_written_over(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4})
    with pytest.raises(BadInput, match="TO_RUN: got .*, which has checkpoints.* fix: choose another folder$"):
        converted(run, source(), source(sparse=True))


def test_the_verb_says_what_it_did_and_how_to_go_on(
    home: Path, source: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4})
    words = [str(source()), str(tmp_path / "new"), "--to", str(written(run, tmp_path)), "--experts.num_experts", "[4, 6]", "--check"]
    words += ["--json", str(tmp_path / "done.json")]
    assert cli.main(["convert", *words]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("copy: ") and "layers 1, 3" in said[1]
    assert "dense -> 6 experts, copies of the dense network; router new, seed 0" in said[3]
    assert "output: the source's, up to rounding" in said[5]
    assert said[6] == f"continue with: moe train {tmp_path}/new/recipe.yaml --out {tmp_path}/new"
    assert float(said[7].split("at most ")[1].split()[0]) < 1e-4
    done = json.loads((tmp_path / "done.json").read_text())
    assert (done["verb"], done["method"], done["to"], done["failed"]) == ("convert", "copy", str(tmp_path / "new"), 0)
    assert [row["part"] for row in done["rows"]] == ["unchanged", "layer 1", "layer 3", "moments"] and done["output"] == said[5][8:]
    assert 0 < done["check"]["largest_difference"] < 1e-4 < done["check"]["largest_logit"]
    assert cli.main(["convert", *words]) == 2
    assert "TO_RUN: got" in capsys.readouterr().err


def test_another_order_of_samples_is_reported_only_with_copied_moments(
    home: Path, source: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without copied moments a converted model starts at step 0 and has seen no sample. With them it continues at the source's step, so a
    changed batch size or seed is reported."""
    changed = {"steps": 1, "global_batch": 4, "seed": 3}
    run = recipe(home, model=SPARSE | {"ffn": "swiglu"}, experts={"num_experts": 4}, train=changed)
    converted(run, source(), tmp_path / "fresh")
    longer = run.model_copy(update={"model": run.model.model_copy(update={"max_length": 14})})
    trainer.train(longer, out=tmp_path / "fresh", world=World(), display=True)
    assert "order of samples" not in capsys.readouterr().out
    converted(run, source(), tmp_path / "copy", moments="copy")
    assert "samples    in another order than the source's: train.global_batch: 8 -> 4, train.seed: 0 -> 3" in capsys.readouterr().out
