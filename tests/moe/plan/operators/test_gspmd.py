"""GSPMD: propagated annotations give the collectives of known methods, in any order of operators, and ranks equal one process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import numpy as np
import pytest

from moe.plan.operators import gspmd
from parallel.annotations.graph import Dim, Graph, Operator
from parallel.annotations.partition import Program, shape, tensors
from parallel.annotations.resharding import Sharding, Sizes, Step, reshard, sent
from parallel.errors import BadInput
from tests.support import simulated

MESH = {"rows": 2, "columns": 3}


def graph(dims: Mapping[str, int], inputs: Mapping[str, str], parameters: Mapping[str, str], *operators: tuple[str, str, str]) -> Graph:
    """Return a graph of operators (name, "names of inputs", rule). An operator is pointwise if its rule has one input and equal letters."""
    made = tuple(
        Operator(name, "pointwise" if len(set(rule.split("->"))) == 1 else "product", rule, tuple(read.split(", ")))
        for name, read, rule in operators
    )
    return Graph({letter: Dim(letter, size) for letter, size in dims.items()}, inputs, parameters, made, itemsize=8)


def network(**more: int) -> Graph:
    return graph(
        {"b": 12, "d": 18, "f": 24} | more,
        {"x": "bd"},
        {"w1": "df", "w2": "fd"},
        ("h", "x, w1", "bd,df->bf"),
        ("a", "h", "bf->bf"),
        ("y", "a, w2", "bf,fd->bd"),
    )


def attention() -> Graph:
    """Return multi-head attention as a graph. The positions of keys have a letter of their own."""
    return graph(
        {"b": 6, "l": 4, "s": 4, "d": 10, "h": 6, "c": 5},
        {"x": "bld"},
        {"wq": "dhc", "wk": "dhc", "wv": "dhc", "wo": "hcd"},
        ("q", "x, wq", "bld,dhc->blhc"),
        ("k", "x, wk", "bld,dhc->blhc"),
        ("v", "x, wv", "bld,dhc->blhc"),
        ("logits", "q, k", "blhc,bshc->bhls"),
        ("p", "logits", "bhls->bhls"),
        ("o", "p, v", "bhls,bshc->blhc"),
        ("y", "o, wo", "blhc,hcd->bld"),
        ("z", "y", "bld->bld"),
    )


def experts() -> Graph:
    """Return GShard's MoE layer as a graph: groups g of s tokens, e experts with c slots for each group."""
    return graph(
        {"g": 6, "s": 5, "e": 12, "c": 3, "m": 8, "h": 15},
        {"mask": "gsec", "x": "gsm"},
        {"wi": "emh", "wo": "ehm"},
        ("rows", "mask, x", "gsec,gsm->egcm"),
        ("hidden", "rows, wi", "egcm,emh->egch"),
        ("out", "hidden, wo", "egch,ehm->egcm"),
        ("y", "out, mask", "egcm,gsec->gsm"),
    )


def said(program: Program) -> list[tuple[str, str, str]]:
    return [(move.direction, move.tensor, f"{move.step.kind} {move.step.axis}") for move in program.collectives]


def equals_one_process(program: Program, *, seed: int = 0) -> None:
    made, drawn = program.graph, np.random.default_rng(seed)
    values = {name: drawn.standard_normal(shape(made, name)) / 3 for name in (*made.inputs, *made.parameters)}
    read = {name for op in made.operators for name in op.inputs}
    ends = {op.name: drawn.standard_normal(shape(made, op.name)) for op in made.operators if op.name not in read}
    got, want = simulated.run(program, values, ends), simulated.alone(made, values, ends)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-9, err_msg=name)


# --- known methods ------------------------------------------------------------------------------------------------------------


def test_two_annotated_weights_give_megatrons_f_and_g() -> None:
    """An all-reduce of the output forward, and of the input's gradient backward (arXiv 1909.08053, section 3)."""
    made = gspmd.program(network(), {"columns": 3}, {"w1": "_, columns", "w2": "columns, _"})
    assert said(made) == [("forward", "y", "all_reduce columns"), ("backward", "x", "all_reduce columns")]
    assert [str(made.shardings[name]) for name in ("x", "h", "a", "y")] == ["[_, _]", "[_, columns]", "[_, columns]", "[_, _]"]
    assert made.sent == 2 * (2 * 2 / 3) * 12 * 18 * 8
    equals_one_process(made)


def test_one_annotated_weight_is_enough_for_both() -> None:
    assert gspmd.propagate(network(), MESH, {"w1": "_, columns"}).shardings["w2"] == Sharding((("columns",), ()))


def test_sharded_tensors_between_layers_give_megatrons_sequence_parallelism() -> None:
    """All-gathers and reduce-scatters replace all-reduces and send the same bytes (arXiv 2205.05198)."""
    made = gspmd.program(network(), {"columns": 3}, {"w1": ". , columns", "w2": "columns, .", "x": "columns, .", "y": "columns, ."})
    assert said(made) == [
        ("forward", "x", "all_gather columns"),
        ("forward", "y", "reduce_scatter columns"),
        ("backward", "y", "all_gather columns"),
        ("backward", "x", "reduce_scatter columns"),
    ]
    assert made.sent == gspmd.program(network(), {"columns": 3}, {"w1": "_, columns"}).sent
    equals_one_process(made)


def test_a_cut_batch_is_data_parallelism_and_cut_weights_are_fsdp() -> None:
    data = gspmd.program(network(), {"rows": 2}, {"x": "rows, _"})
    assert sorted(said(data)) == [("backward", "w1", "all_reduce rows"), ("backward", "w2", "all_reduce rows")]
    sharded = gspmd.program(network(b=240), {"rows": 2}, {"x": "rows, .", "a": "rows, .", "y": "rows, .", "w1": "rows, .", "w2": "rows, ."})
    assert sorted(said(sharded)) == [
        ("backward", "w1", "reduce_scatter rows"),
        ("backward", "w2", "reduce_scatter rows"),
        ("forward", "w1", "all_gather rows"),
        ("forward", "w2", "all_gather rows"),
    ]
    equals_one_process(data)
    equals_one_process(sharded)


def test_one_annotation_divides_all_of_attention_by_heads() -> None:
    """From wq, the axis spreads to wk, wv and wo. The gradients of x from q, k and v are summed in one all-reduce."""
    made = gspmd.program(attention(), MESH, {"wq": "_, columns, _", "x": "rows, _, _"})
    assert [str(made.shardings[name]) for name in ("wk", "wv", "wo")] == ["[_, columns, _]"] * 2 + ["[columns, _, _]"]
    assert [step for step in said(made) if "columns" in step[2]] == [
        ("forward", "y", "all_reduce columns"),
        ("backward", "x", "all_reduce columns"),
    ]
    equals_one_process(made)


def test_experts_and_groups_on_one_axis_are_an_all_to_all() -> None:
    """GSPMD section 5.4: if groups and experts are divided over one axis, dispatch and combine are all-to-alls, also backward."""
    made = gspmd.program(experts(), MESH, {"x": "rows, _, _", "mask": "rows, _, _, _", "wi": "rows, _, columns", "wo": "rows, columns, _"})
    exchanges = [move for move in made.collectives if move.step.kind == "all_to_all"]
    assert [move.direction for move in exchanges] == ["forward"] * 2 + ["backward"] * 2
    assert {move.tensor for move in exchanges} == {"rows", "out"}
    assert not [step for step in said(made) if step[2] == "all_gather rows"]
    equals_one_process(made)


# --- annotations of users -----------------------------------------------------------------------------------------------------


def test_propagation_keeps_the_users_annotations() -> None:
    notes = {"w1": "., columns", "h": "_, . | rows", "x": "rows?, ."}
    found = gspmd.propagate(network(), MESH, notes)
    assert [str(found.shardings[name]) for name in ("w1", "h", "x")] == ["[_, columns]", "[_, _]", "[rows, _]"]
    more = gspmd.propagate(network(b=24), MESH, {"x": "rows?, .", "h": "rows+columns, ."})
    assert more.shardings["x"] == Sharding((("rows", "columns"), ()))
    assert gspmd.propagate(network(b=24), MESH, {"x": "rows, .", "h": "rows+columns, ."}).shardings["x"] == Sharding((("rows",), ()))


def test_an_earlier_priority_spreads_first() -> None:
    """Annotations of w1 and w2 compete for the hidden units. The annotation without the later priority `1:` gets them."""
    first = gspmd.propagate(network(), {"u": 2, "v": 3}, {"w1": "_, u", "w2": "1: v, _"})
    second = gspmd.propagate(network(), {"u": 2, "v": 3}, {"w1": "1: _, u", "w2": "v, _"})
    assert first.shardings["a"] == Sharding(((), ("u",))) and second.shardings["h"] == Sharding(((), ("v",)))


@pytest.mark.parametrize(("hidden", "kept"), [(48, "d:rows"), (6, "b:rows"), (2, "b:rows")])
def test_a_conflict_is_resolved_by_bytes_and_reported(hidden: int, kept: str) -> None:
    """Either the batch (b) or the summed width (d) is divided over rows. The first gathers w1; the second exchanges x and reduces h."""
    made = gspmd.program(network(f=hidden), {"rows": 2}, {"w1": "rows, .", "x": "rows, .", "h": "rows, ."})
    conflict = next(c for c in made.conflicts if c.where == "h")
    assert {work.operator.name: work for work in made.work}["h"].cuts == {kept[0]: ("rows",)}
    assert conflict.kept == kept and conflict.kept_bytes <= conflict.instead_bytes
    assert f"h: {kept} (" in str(conflict) and "bytes) rather than" in str(conflict)
    equals_one_process(made)


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ({"w": "_, _"}, "annotate w"),
        ({"w1": "_"}, 'begin with "_, _"'),
        ({"w1": "_, colums"}, "use columns"),
        ({"w1": "rows, rows"}, "keep rows at one place only"),
        ({"w1": "rows, _ | rows"}, "keep rows at one place only"),
        ({"w2": "_, rows+columns"}, "set the size to 24"),
        ({"w1": "first: rows, _"}, "a priority 'first'"),
        ({"w1": ": rows, _"}, 'write "0: rows, _"'),
    ],
)
def test_a_wrong_annotation_is_one_line(notes: dict[str, str], words: str) -> None:
    with pytest.raises(BadInput) as error:
        gspmd.propagate(network(d=20), MESH, notes)
    assert words in str(error.value)


def test_a_mesh_of_no_ranks_or_no_axes_is_one_line() -> None:
    for mesh, words in (({"rows": 0}, "mesh axis rows: got 0"), ({}, "no axis: the mesh has none"), ({"rows": 2.0}, "got 2.0")):
        with pytest.raises(BadInput, match=words):
            gspmd.propagate(network(d=20), mesh, {"w1": "rows, _"})  # type: ignore[arg-type]


# --- laws over random graphs --------------------------------------------------------------------------------------------------

SIZES = {"a": 6, "b": 12, "c": 18, "d": 12, "e": 6}


def random_graph(drawn: random.Random) -> Graph:
    """Return a graph of six random operators. Some read a tensor with other letters of the same sizes."""
    leaves = {f"t{i}": "".join(drawn.sample("abcde", drawn.randint(1, 3))) for i in range(4)}
    letters, operators = dict(leaves), []
    for i in range(6):
        names = drawn.sample(sorted(letters), drawn.choice((1, 2, 2)))
        terms = [letters[name] if drawn.random() < 0.8 else _other(letters[name]) for name in names]
        there = sorted(set("".join(terms)))
        output = "".join(drawn.sample(there, drawn.randint(1, min(3, len(there)))))
        letters[f"o{i}"] = output
        operators.append((f"o{i}", ", ".join(names), f"{','.join(terms)}->{output}"))
    return graph(SIZES, {}, leaves, *operators)


def _other(letters: str) -> str:
    """Return other letters with the same sizes, or the same letters if two would be equal."""
    found = letters.translate(str.maketrans("abde", "edba"))
    return found if len(set(found)) == len(found) else letters


def random_notes(drawn: random.Random, made: Graph, mesh: Sizes) -> dict[str, str]:
    notes = {}
    for name in drawn.sample(sorted(tensors(made)), 3):
        free = list(mesh)
        words = []
        for size in shape(made, name):
            axes = [axis for axis in drawn.sample(free, min(len(free), drawn.choice((0, 0, 1, 1, 2)))) if size % 6 == 0]
            free = [axis for axis in free if axis not in axes]
            words.append("+".join(axes) + drawn.choice(("", "?")) if axes else drawn.choice(("_", "_", ".")))
        notes[name] = ", ".join(words)
    return notes


CASES = 60


@pytest.mark.parametrize("part", range(3))
def test_any_annotations_of_any_graph_give_what_one_process_gives(part: int) -> None:
    for seed in range(part * CASES // 3, (part + 1) * CASES // 3):
        drawn = random.Random(seed)
        made = random_graph(drawn)
        equals_one_process(gspmd.program(made, MESH, random_notes(drawn, made, MESH)), seed=seed)


def test_the_order_of_operators_does_not_matter() -> None:
    """`gspmd.program` gives the same result for any topological order of the operators and any order of the annotations."""
    for seed in range(CASES):
        drawn = random.Random(seed)
        made = random_graph(drawn)
        notes = random_notes(drawn, made, MESH)
        want = gspmd.program(made, MESH, notes)
        operators, there = [], set(made.parameters)
        while len(operators) < len(made.operators):
            ready = [op for op in made.operators if op not in operators and set(op.inputs) <= there]
            operators.append(drawn.choice(ready))
            there.add(operators[-1].name)
        again = Graph(made.dims, made.inputs, made.parameters, tuple(operators), made.itemsize)
        got = gspmd.program(again, MESH, dict(sorted(notes.items(), key=lambda _: drawn.random())))
        assert got.shardings == want.shardings
        assert sorted(map(str, got.conflicts)) == sorted(map(str, want.conflicts))
        assert {work.operator.name: work.cuts for work in got.work} == {work.operator.name: work.cuts for work in want.work}


def test_propagation_ends_at_a_fixpoint() -> None:
    """With the resulting shardings as further annotations, propagation changes nothing."""
    for seed in range(CASES):
        drawn = random.Random(seed)
        made = random_graph(drawn)
        notes = random_notes(drawn, made, MESH)
        found = gspmd.propagate(made, MESH, notes).shardings
        again = {
            name: ", ".join("+".join(axes) + "?" if axes else "_" for axes in lies.dims)
            for name, lies in found.items()
            if name not in notes
        }
        assert gspmd.propagate(made, MESH, again | notes).shardings == found


# --- resharding ---------------------------------------------------------------------------------------------------------------


def every_sharding(rank: int, mesh: Sizes) -> list[Sharding]:
    """Return all shardings of a tensor with `rank` dims, also those with partial sums."""
    found = set()
    for places in itertools.product(range(-2, rank), repeat=len(mesh)):
        for order in itertools.permutations(mesh):
            of = dict(zip(mesh, places, strict=True))
            dims = tuple(tuple(axis for axis in order if of[axis] == d) for d in range(rank))
            found.add(Sharding(dims, tuple(sorted(axis for axis in mesh if of[axis] == -2))))
    return sorted(found, key=str)


def test_resharding_gives_the_wanted_sharding_with_the_fewest_bytes() -> None:
    """For all pairs of shardings: `reshard` sends at most the bytes of any sequence of up to three collectives."""
    size = (12, 18)
    whole = np.random.default_rng(1).standard_normal(size)
    for held in every_sharding(2, MESH):
        cheapest = {axes: cheapest_of_three(held, size, axes) for n in range(3) for axes in itertools.combinations(MESH, n)}
        parts = simulated.parts_of(whole, held, MESH)
        for wanted in every_sharding(2, MESH):
            if wanted.partial:
                continue
            steps = reshard(held, wanted, size, MESH, itemsize=8)
            got = parts
            for step in steps:
                got = simulated.take(got, step, MESH)
            np.testing.assert_allclose(simulated.whole_of(got, wanted, MESH, size), whole, atol=1e-12)
            either = tuple(axis for axis in MESH if axis in held.axes | wanted.axes)
            assert sent(steps) <= cheapest[either].get(wanted, float("inf")) + 1e-9


def cheapest_of_three(held: Sharding, size: tuple[int, int], over: tuple[str, ...]) -> dict[Sharding, float]:
    """Return the least bytes that a rank sends to reach each sharding from `held` by up to three collectives over the axes `over`."""
    best = {held: 0.0}
    for _ in range(3):
        for now, cost in list(best.items()):
            bytes_held = 8.0 * np.prod([s / np.prod([MESH[a] for a in axes]) for s, axes in zip(size, now.dims, strict=True)])
            for kind, axis, source, target in itertools.product(
                ("slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"), over, (None, 0, 1), (None, 0, 1)
            ):
                needs = {"slice": (0, 1), "all_gather": (1, 0), "all_to_all": (1, 1), "reduce_scatter": (0, 1), "all_reduce": (0, 0)}[kind]
                if needs != (source is not None, target is not None) or source == target is not None:
                    continue
                if (axis in now.partial) != (kind in ("reduce_scatter", "all_reduce")) or (kind == "slice" and axis in now.axes):
                    continue
                if source is not None and now.dims[source][-1:] != (axis,):
                    continue
                dims = [*now.dims]
                if source is not None:
                    dims[source] = dims[source][:-1]
                if target is not None:
                    dims[target] = (*dims[target], axis)
                n = MESH[axis]
                sent_now = {"slice": 0.0, "all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n) * bytes_held
                after = Sharding(tuple(dims), tuple(a for a in now.partial if a != axis))
                best[after] = min(best.get(after, float("inf")), cost + sent_now)
    return best


def test_a_step_says_what_it_does() -> None:
    assert str(Step("all_to_all", "rows", 0, 1, 8.0)) == "all_to_all over rows dim 0 to dim 1"
