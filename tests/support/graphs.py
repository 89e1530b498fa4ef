"""Small graphs of operators for the planner's searches."""

from __future__ import annotations

from typing import Literal

from parallel.annotations.graph import Dim, Graph, Operator


def chain(layers: int, *, b: int, d: int, f: int, then: Literal["nothing", "pointwise"] = "nothing") -> Graph:
    """Return a graph of `layers` matrix products of an input x [b, d], to width f and back to d in turn. then: "pointwise": a pointwise
    operator follows each product."""
    dims = {"b": Dim("batch", b), "d": Dim("width", d), "f": Dim("hidden", f)}
    ops, x, parameters = [], "x", {}
    for i in range(layers):
        rule = "bd,df->bf" if i % 2 == 0 else "bf,fd->bd"
        parameters[f"w{i}"] = rule[3:5]
        ops.append(Operator(f"layer{i}", "product", rule, (x, f"w{i}"), 2.0 * b * d * f))
        x = f"layer{i}"
        if then == "pointwise":
            ops.append(Operator(f"act{i}", "pointwise", f"{rule[-2:]}->{rule[-2:]}", (x,)))
            x = f"act{i}"
    return Graph(dims, {"x": "bd"}, parameters, tuple(ops), 2)
