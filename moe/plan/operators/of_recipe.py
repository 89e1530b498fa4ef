"""Records a recipe's operators in one forward pass on the meta device, in the order in which modules run.

    graph_of(run, sequences=8)  ->  embedding, layers.0.attention_norm, layers.0.attention.q, ..., norm, head, loss

A hook on each module adds the module's operators when it runs, with the sizes of its parameters. A MoE layer is not run, because routing
needs data. Its experts are recorded as products of `slots` rows for each expert and sequence. This is the number of rows that a balanced
router sends, rounded up. In einsum notation, as in GShard (letters: _LETTERS): dispatch "bld,ble->ebud", experts "ebud,edm->ebum", combine
"ebud,ble->bld". Dropout, random numbers, top-k and the router's losses are left out, because they have the same shardings as the
operators before and after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe.plan.job.flops import attended, rows_of_token
from moe.plan.job.of_recipe import compute_bytes
from moe.recipe.sections import Run
from moe.recipe.shapes import T5_BUCKETS
from parallel.annotations.graph import Dim, Graph, Kind, Operator

# role of a dim -> its letter. places: positions of keys. queries: query heads of one key-value head. parts: 2 outputs that PR-MoE mixes.
# Latent attention: compressed: latent and rotary key; pairs: content key and value of a head. Multi-token prediction: joined: 2 x width.
_LETTERS = {
    "batch": "b", "length": "l", "places": "s", "width": "d", "vocab": "v", "heads": "k", "queries": "g", "channels": "c", "hidden": "f",
    "experts": "e", "slots": "u", "expert_hidden": "m", "shared_hidden": "n", "buckets": "z", "parts": "x",
    "query_rank": "q", "key_rank": "r", "rotary": "t", "compressed": "o", "pairs": "w", "values": "a", "joined": "y",
}  # fmt: skip


def graph_of(run: Run, *, sequences: int) -> Graph:
    """Return the operators of a forward pass in training. sequences: number of sequences in the batch of all replicas together."""
    import torch

    from moe.experts.layer import MoELayer
    from moe.model.transformer import Transformer
    from moe.nn.attention import Attention
    from moe.nn.context import Context
    from moe.nn.latent import LatentAttention
    from moe.nn.linear import FeedForward, Norm

    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size).eval()
        tokens_BL = torch.empty(sequences, run.model.read_length, dtype=torch.int64)
    trace = _Trace(run, sequences)
    trace.embedding()
    rules: dict[type, Callable[..., None]] = {Norm: trace.norm, FeedForward: trace.feed_forward}
    rules |= {Attention: trace.attention, LatentAttention: trace.latent_attention}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            setattr(module, "forward", lambda x_BLD, context: (x_BLD, None))  # noqa: B010 (only this instance)
            hooks.append(module.register_forward_hook(lambda m, *_, name=name: trace.experts(name, m)))
        elif (rule := rules.get(type(module))) is not None:
            hooks.append(module.register_forward_hook(lambda m, *_, name=name, rule=rule: rule(name, m)))
    with torch.no_grad():
        context = Context.of(tokens_BL, source=run.model.source_length)
        model(tokens_BL, context)
        trace.head("")
        for number, depth in enumerate(model.ahead):  # multi-token prediction, which runs only in training
            trace.join_tokens(f"ahead.{number}", "targets" if number == 0 else f"ahead.{number - 1}.targets")
            block: Any = depth.block
            block(torch.empty(*tokens_BL.shape, run.model.d_model, device="meta"), context)
            trace.layer_norm(f"ahead.{number}.norm", trace.stream)
            trace.head(f"ahead.{number}.")
    for hook in hooks:
        hook.remove()
    graph = Graph(trace.dims, trace.inputs, trace.parameters, tuple(trace.operators), compute_bytes(run))
    for name, parameter in model.named_parameters():
        assert graph.size(graph.parameters[name]) == parameter.numel(), f"{name} is not in the graph as it is in the model"
    return graph


@dataclass
class _Trace:
    """Records operators while modules run. Each dim has a letter, and an operator's rule is written as in einsum. stream: name of the
    operator whose output is the residual stream. x: name of the tensor that the next operator reads. layer: index of the current layer.
    length: letter of the length of the sequences that the current layer reads; `add` replaces the letter `l` of a rule by it. source: name
    of the encoder's output, and the letter of its length.

    Arguments of the methods: name: path of a module, or name of an operator. module: the module. x, y: names of tensors. letters, dims:
    letters of a tensor's dims.
    """

    run: Run
    sequences: int
    dims: dict[str, Dim] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    stream: str = ""
    x: str = ""
    layer: int = -1
    length: str = "l"
    source: tuple[str, str] = ("", "")
    inputs: dict[str, str] = field(default_factory=lambda: {"tokens": "bl", "targets": "bl"})

    def __post_init__(self) -> None:
        m = self.run.model
        for role, size in (("batch", self.sequences), ("length", m.read_length - m.source_length), ("width", m.d_model)):
            self.letter(role, size)

    def letter(self, role: str, size: int) -> str:
        """Return the letter of a dim with this role and size. Dims of the same role but different sizes have different letters."""
        wanted = next((a for a, dim in self.dims.items() if dim == Dim(role, size)), _LETTERS[role])
        if self.dims.get(wanted, Dim(role, size)) != Dim(role, size):
            wanted = next(chr(c) for c in range(ord("A"), ord("Z") + 1) if chr(c) not in self.dims)
        self.dims[wanted] = Dim(role, size)
        return wanted

    def add(self, name: str, kind: Kind, rule: str, *inputs: str, flops: float | None = None, **more: str) -> str:
        """Append an operator. Returns `name`, which is also the name of the operator's output. rule: einsum rule, in which `l` stands for
        the length of the current layer's sequences. more: other fields of Operator; in `whole`, the letters that cannot be
        sharded."""
        rule = rule.replace("l", self.length)
        if kind == "product":
            flops = 2.0 * math.prod(self.dims[a].size for a in set(rule) - set(",->"))
        self.operators.append(Operator(name, kind, rule, inputs, flops or 0.0, self.layer, **more))
        return name

    def weight(self, name: str, letters: str) -> str:
        """Add a parameter with these dims. Returns its name."""
        self.parameters[name] = letters
        return name

    def product(self, name: str, rule: str, x: str) -> str:
        """Add a product of `x` with the module's own matrix."""
        return self.add(name, "product", rule, x, self.weight(f"{name}.weight", rule.partition("->")[0].split(",")[1]))

    # --- one function for each kind of module --------------------------------------------------------------------------------

    def embedding(self) -> None:
        v = self.letter("vocab", self.run.vocab_size)
        table = self.weight("embedding", f"{v}d")
        if self.run.model.source_length:
            self.length = self.letter("length", self.run.model.source_length)
            self.inputs |= {"tokens": f"b{self.length}", "written": "bl"}
        self.stream = self.x = self.add("embedding.rows", "lookup", f"bl,{v}d->bld", "tokens", table)
        if self.run.model.source_length:
            self.operators.append(Operator("embedding.written", "lookup", f"bl,{v}d->bld", ("written", table), 0.0, self.layer))

    def norm(self, name: str, module: Any) -> None:
        """Add a norm, and set `layer` to its layer (num_layers for the model's last norm). Norms of q and k are added by `attention`."""
        parts = name.split(".")
        if parts[-1] in ("q_norm", "k_norm", "q_down_norm", "kv_down_norm"):
            return
        ends = name == "encoder_norm"
        of_block = parts[0] == "layers"
        self.layer = int(parts[1]) if of_block else self.run.model.decoder_begins - 1 if ends else self.run.model.num_layers
        self.layer_norm(name, self.stream)
        if ends:
            self.source, self.stream, self.length = (self.x, self.length), "embedding.written", "l"

    def layer_norm(self, name: str, x: str) -> None:
        self.x = self.add(name, "norm", "bld,d->bld", x, self.weight(f"{name}.weight", "d"), statistics="d")

    def _join(self, name: str, y: str) -> None:
        """Append the operator `name`, which adds `y` to the residual stream. y: output of attention, a feed-forward network or experts."""
        self.stream = self.add(name, "pointwise", "bld,bld->bld", self.stream, y)

    def attention(self, name: str, module: Any) -> None:
        m, cross, size = self.run.model, name.endswith(".cross"), self.dims[self.length].size
        groups, queried = m.num_kv_heads or m.num_heads, self.length
        k, g, c = self.letter("heads", groups), self.letter("queries", m.num_heads // groups), self.letter("channels", module.head_size)
        q = self._projection(name, "q", k + g + c, self.x, module)
        read, self.length = self.source if cross else (self.x, queried)
        keys, values = (self._projection(name, part, k + c, read, module) for part in ("k", "v"))
        num_keys, self.length = self.dims[self.length].size, queried
        s = self.letter("places", num_keys)
        rule, inputs, whole = f"bl{k}{g}{c},b{s}{k}{c},b{s}{k}{c}", [q, keys, values], s + c
        half = m.half_of(self.layer)
        if m.positions == "t5" and not cross:  # in an encoder-decoder, the encoder's layers share one bias, the decoder's another
            z = self.letter("buckets", T5_BUCKETS)
            of = f"layers.{half.start}.attention" if m.kind == "encoder_decoder" else name
            rule, inputs, whole = f"{rule},{z}{k}{g}", [*inputs, self.weight(f"{of}.bias.weight", z + k + g)], whole + z
        if module.sinks is not None:
            rule, inputs = f"{rule},{k}{g}", [*inputs, self.weight(f"{name}.sinks.weight", k + g)]
        seen = num_keys if cross or self.layer < m.decoder_begins else (size + 1) / 2 if half.start else attended(m, layer=self.layer)
        flops = 4.0 * self.sequences * m.num_heads * module.head_size * size * seen
        core = self.add(f"{name}.core", "attention", f"{rule}->bl{k}{g}{c}", *inputs, flops=flops, whole=whole)
        out = self.product(f"{name}.out", f"bl{k}{g}{c},{k}{g}{c}d->bld", core)
        out = out if module.out_bias is None else self._add_bias(f"{name}.out_bias", "d", out)
        self._join(f"{name}.add", out)

    def latent_attention(self, name: str, module: Any) -> None:
        m, size, length = self.run.model, module.size, self.dims[self.length].size
        k, c, s = self.letter("heads", m.num_heads), self.letter("channels", size.key), self.letter("places", length)
        low, q = self.x, "d"
        if module.q_down is not None:
            q = self.letter("query_rank", m.latent.query_rank or 0)
            low = self.product(f"{name}.q_down", f"bld,d{q}->bl{q}", self.x)
            low = self.add(
                f"{name}.q_down_norm", "norm", f"bl{q},{q}->bl{q}", low, self.weight(f"{name}.q_down_norm.weight", q), statistics=q
            )
        queries = self.product(f"{name}.{'q' if q == 'd' else 'q_up'}", f"bl{q},{q}{k}{c}->bl{k}{c}", low)
        r, t, o = (self.letter(*of) for of in (("key_rank", size.rank), ("rotary", size.rotary), ("compressed", size.rank + size.rotary)))
        both = self.product(f"{name}.kv_down", f"bld,d{o}->bl{o}", self.x)
        gain = self.weight(f"{name}.kv_down_norm.weight", r)
        latent = self.add(f"{name}.kv_down_norm", "norm", f"bl{o},{r}->bl{r}", both, gain, whole=o + r)
        turned = self.add(f"{name}.rotary", "pointwise", f"bl{o}->bl{t}", both, whole=o + t)
        w, a = self.letter("pairs", size.content + size.value), self.letter("values", size.value)
        pairs = self.product(f"{name}.kv_up", f"bl{r},{r}{k}{w}->bl{k}{w}", latent)
        inputs, rule = [queries, pairs, turned], f"bl{k}{c},b{s}{k}{w},b{s}{t}"
        if module.sinks is not None:
            inputs, rule = [*inputs, self.weight(f"{name}.sinks.weight", k)], f"{rule},{k}"
        flops = 2.0 * self.sequences * m.num_heads * (size.key + size.value) * length * attended(m, layer=self.layer)
        core = self.add(f"{name}.core", "attention", f"{rule}->bl{k}{a}", *inputs, flops=flops, whole=s + c + w + t + a)
        out = self.product(f"{name}.out", f"bl{k}{a},{k}{a}d->bld", core)
        self._join(f"{name}.add", out if module.out_bias is None else self._add_bias(f"{name}.out_bias", "d", out))

    def _projection(self, name: str, part: str, dims: str, x: str, module: Any) -> str:
        """Add the product of `x` that gives q, k or v (`part`), with its bias and its norm."""
        y = self.product(f"{name}.{part}", f"bld,d{dims}->bl{dims}", x)
        y = y if getattr(module, f"{part}_bias") is None else self._add_bias(f"{name}.{part}_bias", dims, y)
        return y if getattr(module, f"{part}_norm", None) is None else self._head_norm(f"{name}.{part}_norm", dims, y)

    def _add_bias(self, name: str, dims: str, x: str) -> str:
        return self.add(name, "pointwise", f"bl{dims},{dims}->bl{dims}", x, self.weight(f"{name}.weight", dims))

    def _head_norm(self, name: str, dims: str, x: str) -> str:
        over = dims if self.run.model.qk_norm == "whole" else dims[-1]
        return self.add(name, "norm", f"bl{dims},{over}->bl{dims}", x, self.weight(f"{name}.weight", over), statistics=over)

    def feed_forward(self, name: str, module: Any) -> None:
        out = self._network(name, self.letter("hidden", module.w1.weight.shape[0]), self.x, gated=module.w3 is not None)
        self._join(f"{name}.add", out)

    def _network(self, name: str, f: str, x: str, *, gated: bool) -> str:
        """Append the operators of a feed-forward network. Returns the name of its output. f: letter of the hidden units. x: name of the
        input."""
        first = [self.product(f"{name}.{w}", f"bld,d{f}->bl{f}", x) for w in (("w1", "w3") if gated else ("w1",))]
        act = self.add(f"{name}.act", "pointwise", ",".join([f"bl{f}"] * len(first)) + f"->bl{f}", *first)
        return self.product(f"{name}.w2", f"bl{f},{f}d->bld", act)

    def experts(self, name: str, module: Any) -> None:
        count, hidden, length = module.experts.num_experts, module.experts.d_ff, self.dims[self.length].size
        among = module.router.num_experts  # including zero-computation experts, which have no parameters
        slots = max(1, math.ceil(rows_of_token(self.run.router, among) * length / among))
        e, u, m = self.letter("experts", count), self.letter("slots", slots), self.letter("expert_hidden", hidden)
        r = self.letter("experts", among)
        read, router = self.x, f"{name}.router"
        if module.router.input_norm is not None:
            norm = self.weight(f"{router}.input_norm.weight", "d")
            read = self.add(f"{router}.input_norm", "norm", "bld,d->bld", read, norm, statistics="d")
        gates = self.product(router, f"bld,{r}d->bl{r}", read)
        if module.router.logit_bias is not None:
            gates = self.add(f"{router}.affine", "pointwise", f"bl{r},{r}->bl{r}", gates, self.weight(f"{router}.logit_bias", r))
        if module.router.noise_weight is not None:
            matrix = self.weight(f"{router}.noise_weight", f"{r}d")
            noise = self.add(f"{router}.noise", "product", f"bld,{r}d->bl{r}", read, matrix)
            gates = self.add(f"{router}.noisy", "pointwise", f"bl{r},bl{r}->bl{r}", gates, noise)
        if module.router.expert_scale is not None:
            gates = self.add(f"{router}.scaled", "pointwise", f"bl{r},{r}->bl{r}", gates, self.weight(f"{router}.expert_scale", r))
        rows = self.add(f"{name}.dispatch", "dispatch", f"bld,bl{r}->{e}b{u}d", self.x, gates)
        first = []
        for w in ("w1", "w3") if module.experts.w3 is not None else ("w1",):
            matrix = self.weight(f"{name}.experts.{w}", f"{e}d{m}")
            first.append(self.add(f"{matrix}.rows", "product", f"{e}b{u}d,{e}d{m}->{e}b{u}{m}", rows, matrix))
            if module.experts.biases:
                bias = self.weight(f"{name}.experts.b{w[1]}", f"{e}{m}")
                first[-1] = self.add(f"{bias}.rows", "pointwise", f"{e}b{u}{m},{e}{m}->{e}b{u}{m}", first[-1], bias)
        act = self.add(f"{name}.experts.act", "pointwise", ",".join([f"{e}b{u}{m}"] * len(first)) + f"->{e}b{u}{m}", *first)
        matrix = self.weight(f"{name}.experts.w2", f"{e}{m}d")
        rows = self.add(f"{matrix}.rows", "product", f"{e}b{u}{m},{e}{m}d->{e}b{u}d", act, matrix)
        y = self.add(f"{name}.combine", "combine", f"{e}b{u}d,bl{r}->bld", rows, gates)
        if module.output_bias is not None:
            gates = gates if r == e else self.add(f"{name}.of_experts", "dispatch", f"bl{r}->bl{e}", gates)
            biases = self.add(f"{name}.biases", "product", f"bl{e},{e}d->bld", gates, self.weight(f"{name}.output_bias", f"{e}d"))
            y = self.add(f"{name}.biased", "pointwise", "bld,bld->bld", y, biases)
        self._join(f"{name}.add", self._with_shared(name, module, y))

    def _with_shared(self, name: str, module: Any, y: str) -> str:
        """Add the networks that process every token: the residual network or the shared experts. Returns the name of the sum of their
        output and the routed experts' output `y`."""
        if module.residual is not None:
            n, parts = self.letter("shared_hidden", module.residual.w1.weight.shape[0]), self.letter("parts", 2)
            other = self._network(f"{name}.residual", n, self.x, gated=module.residual.w3 is not None)
            share = self.product(f"{name}.coefficient", f"bld,{parts}d->bl{parts}", self.x)
            y = self.add(f"{name}.mixed", "pointwise", f"bld,bld,bl{parts}->bld", y, other, share, whole=parts)
        if module.shared is not None:
            n = self.letter("shared_hidden", module.shared.w1.weight.shape[0])
            shared = self._network(f"{name}.shared", n, self.x, gated=module.shared.w3 is not None)
            if module.shared_gate is not None:
                gate = self.add(f"{name}.shared_gate", "product", "bld,d->bl", self.x, self.weight(f"{name}.shared_gate.weight", "d"))
                shared = self.add(f"{name}.gated", "pointwise", "bld,bl->bld", shared, gate)
            y = self.add(f"{name}.beside", "pointwise", "bld,bld->bld", y, shared)
        return y

    def join_tokens(self, name: str, tokens: str) -> None:
        """Add the operators of one depth of multi-token prediction before its block: norms of the stream and of the embedded next
        tokens, their concatenation, and its product with `proj`. tokens: name of the input whose tokens are embedded."""
        v, y = self.letter("vocab", self.run.vocab_size), self.letter("joined", 2 * self.run.model.d_model)
        self.layer_norm(f"{name}.hidden_norm", self.stream)
        hidden = self.x
        self.layer_norm(f"{name}.token_norm", self.add(f"{name}.rows", "lookup", f"bl,{v}d->bld", tokens, "embedding"))
        joined = self.add(f"{name}.joined", "pointwise", f"bld,bld->bl{y}", hidden, self.x, whole=f"d{y}")
        self.stream = self.product(f"{name}.proj", f"bl{y},{y}d->bld", joined)

    def head(self, before: str) -> None:
        """Add the product with the vocabulary and the loss. before: prefix of the names of the operators and targets."""
        v = self.letter("vocab", self.run.vocab_size)
        matrix = "embedding" if self.run.model.tied_embeddings else self.weight("head.weight", f"{v}d")
        logits = self.add(f"{before}head", "product", f"bld,{v}d->bl{v}", self.x, matrix)
        self.inputs[f"{before}targets"] = "bl"
        self.add(f"{before}loss", "loss", f"bl{v},bl->bl", logits, f"{before}targets", statistics=v)
