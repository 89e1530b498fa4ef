"""Laws of a plan: the first matching pattern counts, parameters become the layouts' shards, slots are filled. A new style is ten lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.data.tiling import Tiled
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.tensor.style import Copied, Plan, Shape, Stacked, apply, fits, lay_out

# --- a made-up layer and its style: ten lines each --------------------------------------------------------------------


class Linear(nn.Module):
    """Returns x W^T by its slot `product`."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


@dataclass(frozen=True)
class Cut:
    """A style that splits `dim` of a weight over `axis`, and fills the slot `product` with `of_part`."""

    axis: str
    dim: int

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {self.dim: self.axis})

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name in layouts:
            model.get_submodule(name.rpartition(".")[0]).product = partial(of_part, axis=mesh.axis(self.axis))  # type: ignore[assignment]


def of_part(x: Tensor, weight: Tensor, *, axis: Axis) -> Tensor:
    """Return x W^T for a shard of W. There is no collective: the test adds up the ranks' outputs."""
    return F.linear(x, weight)


PLAN = Plan((("*.up.weight", Cut("tp", 0)), ("*.down.weight", Cut("tp", 1)), ("*.gain.*", Copied("gains"))))


def network() -> nn.Module:
    return nn.ModuleList([nn.ModuleDict({"up": Linear(6, 8), "gain": nn.RMSNorm(6), "down": Linear(8, 5)}) for _ in range(2)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_style_for_a_made_up_layer(tp: int) -> None:
    """The ranks' outputs of a network split by columns, then rows, add up to the whole network's output."""
    values = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) for name, p in network().named_parameters()}
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))
    want, got = F.linear(F.linear(x, values["1.up.weight"]).relu(), values["1.down.weight"]), torch.zeros(3, 5)
    for rank in range(tp):
        with torch.device("meta"):
            model = network()
        layouts, mesh = lay_out(model, PLAN, tiled_dim=lambda name: 0), Mesh.of(Degrees(tp=tp), rank)
        apply(model, PLAN, layouts, mesh)
        assert all(p.is_meta for p in model.parameters())
        for name, parameter in list(model.named_parameters()):
            held = values[name][layouts[name].region(mesh)]
            assert parameter.shape == held.shape
            model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(held.clone())
        assert model[1]["up"].product is not F.linear and model[1]["up"].weight.shape == (8 // tp, 6)  # type: ignore[index]
        got += model[1]["down"](model[1]["up"](x).relu())  # type: ignore[index]
    torch.testing.assert_close(got, want)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "whether"),
    [
        ("layers.*.up.weight", "layers.3.up.weight", True),
        ("layers.*.up.weight", "layers.3.moe.up.weight", False),
        ("layers.**.weight", "layers.3.moe.up.weight", True),
        ("layers.*", "layers.3.up", False),
        ("**", "embedding", True),
        ("layers.*.up.weight", "layers.3.tiles.1.up.weight", True),  # a tile matches by the path of the whole parameter
        ("a.b", "aXb", False),
    ],
)
def test_a_star_is_one_word_of_a_path_and_two_are_any_number(pattern: str, name: str, whether: bool) -> None:
    assert fits(pattern, name) == whether


def test_the_first_row_that_fits_counts_and_the_rest_is_copied() -> None:
    plan = Plan((("layers.0.**", Copied("first")), ("layers.**", Copied("others"))))
    found = [plan.style_of(name).layout(name, (2, 3)) for name in ("layers.0.w", "layers.1.w", "head")]
    assert found == [Layout((2, 3), family="first"), Layout((2, 3), family="others"), Layout((2, 3))]
    rows = ["layers.0.**  Copied(family='first'", "layers.**    Copied(family='others'", "**           Copied(family='dense'"]
    assert [line.partition(", alike")[0] for line in str(plan).splitlines()] == rows


def test_tiles_are_laid_out_as_parts_of_their_whole() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"up": Tiled(Linear(6, 4) for _ in range(3))})
    layouts = lay_out(model, Plan((("up.weight", Cut("tp", 1)),)), tiled_dim=lambda name: 0)
    assert [name for name in layouts] == [f"up.tiles.{i}.weight" for i in range(3)]
    mesh = Mesh.of(Degrees(tp=2), 1)
    assert [layout.region(mesh) for layout in layouts.values()] == [(slice(4 * i, 4 * i + 4), slice(3, 6)) for i in range(3)]


def test_a_stack_is_told_which_networks_and_which_of_their_units_are_here() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.empty(8, 5, 6)), nn.Parameter(torch.empty(8, 6, 5))

        def hold(self, numbers: tuple[int, ...], *, hidden: slice) -> None:
            self.held = numbers, hidden

    with torch.device("meta"):
        model = nn.ModuleDict({"stack": Stack()})
    plan = Plan((("stack.*", Stacked("ep", hidden="etp", hidden_dim={"w1": 2, "w2": 1}, name_of=lambda path: f"{path}.{{}}")),))
    layouts, mesh = lay_out(model, plan, tiled_dim=lambda name: 0), Mesh.of(Degrees(dp=4, ep=2, etp=2), 3)
    apply(model, plan, layouts, mesh)
    assert model["stack"].held == ((4, 5, 6, 7), slice(3, 6)) and layouts["stack.w1"].unstack == "stack.w1.{}"
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {"stack.w1": (4, 5, 3), "stack.w2": (4, 3, 5)}


def test_what_has_values_is_not_cut() -> None:
    model = network()
    with pytest.raises(AssertionError, match=r"0.up.weight is not on the meta device"):
        apply(model, PLAN, lay_out(model, PLAN, tiled_dim=lambda name: 0), Mesh.of(Degrees(tp=2), 1))
