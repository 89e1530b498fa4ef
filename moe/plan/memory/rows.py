"""Rows of experts: their number on a rank, the bytes that they keep for the backward pass, and their messages over ep.

An expert's row is one choice of one token. Ranks have different numbers of rows. The bytes that experts keep are counted for
the rank with the most rows, which has `Experts.share` times the mean.
"""

from __future__ import annotations

from moe.plan.job.network import Experts, Network, Plan
from moe.plan.memory.stack import Stack
from parallel.mesh.traffic import Load, Message, Traffic

FP32_BYTES = 4


def rows_of(network: Network, plan: Plan) -> float:
    """Mean number of rows that a rank's experts compute for one micro-batch. The etp ranks of an expert compute the same rows."""
    e = network.experts
    if e is None:
        return 0.0
    return plan.microbatch * network.length / plan.sp / plan.tp * e.choices * e.mean_rows * plan.etp


def most_rows(network: Network, plan: Plan) -> float:
    """Number of rows that the experts of the busiest rank compute for one micro-batch."""
    return rows_of(network, plan) * (1.0 if network.experts is None else network.experts.share(plan.ep))


def padding(network: Network, plan: Plan, stack: Stack) -> float:
    """Mean number of zero rows per rank. If unfused experts have LoRA in 16 bits, zeros pad each expert's rows, so matrix products have
    few different shapes; otherwise 0."""
    e = network.experts
    if e is None or e.fused or network.adapters is None or plan.compute_bytes >= FP32_BYTES:
        return 0.0
    return e.count / plan.ep * (stack.expert_multiple - 1) / 2


def traffic_of(network: Network, plan: Plan, tokens: float, rows: float, number_bytes: int) -> Traffic:
    """Return the messages over ep of one MoE layer that sends `rows` rows for `tokens` tokens. number_bytes: bytes of an element."""
    e = network.experts
    assert e is not None
    slots = None if e.slots is None else tokens * e.choices * e.slots
    row_bytes, share = network.width * number_bytes, e.share(plan.ep)
    each, choices = e.dispatched
    load = Load(tokens * each, choices, rows, slots, network.width, row_bytes, e.count, plan.ep, share, e.reached, not e.apart)
    if e.exchange is not None:
        return e.exchange.traffic(load)
    return Traffic.there_and_back(rows=Message("ep", "all_to_all", rows * load.row_bytes, plan.ep, busiest=load.busiest))


def once_each(experts: Experts, ep: int, nodes: int) -> tuple[float, float]:
    """Return (copies sent to ranks, copies sent to nodes) of an exchange over `ep` ranks that sends a token once to each node, and there
    once to each rank, that needs it. Both are fractions of an all-to-all's rows. They count for the busiest rank and node, as its rows do;
    these get at most one copy of each dispatched token."""
    rows, busiest = experts.dispatched[1] * experts.mean_rows, experts.share(ep)

    def copies(targets: int) -> float:
        reached = experts.reached(targets)
        return reached * min(busiest, max(1.0, targets / reached)) / (rows * busiest)

    return copies(ep), copies(nodes)


def buffers_of(network: Network, plan: Plan) -> float:
    """Bytes of the buffers for the largest message of one MoE layer over ep; 0 if one rank holds all experts."""
    if network.experts is None or plan.ep == 1:
        return 0.0
    tokens = plan.microbatch * network.length / plan.sp / plan.tp * plan.etp
    return max(message.held for message in traffic_of(network, plan, tokens, rows_of(network, plan), plan.compute_bytes).forward)


def experts_kept(n: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that a layer's experts, router and shared experts keep for the backward pass. They are counted for the ep rank with the most
    rows."""
    e, c, rows = n.experts, plan.compute_bytes, rows_of(n, plan)
    assert e is not None
    count = stack.gated if e.gated else 1 if n.activation == "relu" else stack.plain
    tensors = (stack.expert_gated if e.gated else stack.expert_plain) + e.dropout if e.fused else count + 2 * e.dropout
    hidden = tensors * e.hidden / plan.etp
    narrow = 0 if n.adapters is None or not n.trains("experts") else n.adapters.rank * (3 if e.gated else 2)  # LoRA keeps x A
    moved = stack.expert_rows if plan.ep * plan.etp > 1 or stack.expert_rows == 1 or not e.fused else 0
    here = plan.microbatch * n.length / plan.sp
    shared = c * count * e.shared_hidden * here / plan.tp
    of_token = stack.maps * e.choices + c * e.gates * n.width + router_kept(n, stack, c)
    # if results are sent back, the rank that sent a row keeps its result; the rank that computed it keeps only the row
    computed = min(moved, 1) if e.exchange is None or e.exchange.returns_rows else moved
    more = (most_rows(n, plan) - rows) * c * (computed * n.width + hidden) + padding(n, plan, stack) * c * hidden
    return rows * c * (moved * n.width + hidden + narrow) + more + here / plan.tp * of_token + shared


def router_kept(n: Network, stack: Stack, itemsize: int) -> float:
    """Bytes that the router and its losses keep for each token: in fp32 the jitter and the jittered input, the inputs of the norm and of
    the noise's matrix, logits and probabilities; and what routing keeps (`r.kept`). itemsize: bytes of an element of activations."""
    e = n.experts
    assert e is not None
    r, held = e.router, 0.0
    if r.jitter:
        held += 8 * n.width
    elif (r.norm or r.noise) and itemsize < 4:
        held += 4 * n.width
    if r.norm:
        held += (4 + stack.rms) * n.width + stack.statistics
    return held + r.kept + (e.count + e.free) * (8 + 8 * r.noise + 4 * r.capped)
