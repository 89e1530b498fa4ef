"""Tests of the simulator against closed forms of papers and measured step times; links, all-reduces of replicas, activations in flight.

p ranks, m micro-batches, v chunks a rank; F and B = I + W are times of one micro-batch in one stage. Bubble: idle time / ideal time.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.errors import BadInput
from parallel.pipeline.check import check
from parallel.pipeline.schedule import Action, Message, Op, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from parallel.pipeline.simulator.held import peak_activations, peak_held, peak_kept
from parallel.pipeline.simulator.simulate import Timeline, costs, makespan, period, simulate
from tests.support.plain_simulation import find, needs_of

SIZES = [(p, factor * p) for p in (2, 3, 4, 8) for factor in (1, 2, 4)]
RATIOS = [(1, 1), (1, 2), (3, 5)]
THIRDS = [(1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 2)]  # times of F, I and W


def run(name: str, p: int, m: int, F: int = 1, B: int = 2, **size: int) -> Timeline:
    return simulate(make_schedule(name, ranks=p, microbatches=m, **size), costs(F, B))


def idle(timeline: Timeline, ideal: int) -> Fraction:
    """Return the idle time of a rank divided by `ideal`. The idle time must be equal on all ranks."""
    found = {timeline.idle(rank) for rank in range(timeline.schedule.num_ranks)}
    assert len(found) == 1
    return Fraction(found.pop()) / ideal


def split(F: int, I: int, W: int) -> tuple[int, int, float]:  # noqa: E741
    return F, I + W, W / (I + W)


# --- bubbles equal the papers' closed forms --------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("F", "B"), RATIOS)
def test_bubbles_of_naive_gpipe_and_1f1b(p: int, m: int, F: int, B: int) -> None:
    """GPipe and 1F1B: (p - 1) / m for any F and B (GPipe, section 2.3; Megatron-LM, 2104.04473, section 2.2.1). Naive: p - 1."""
    assert idle(run("naive", p, m, F, B), m * (F + B)) == p - 1
    assert idle(run("gpipe", p, m, F, B), m * (F + B)) == Fraction(p - 1, m)
    assert idle(run("1f1b", p, m, F, B), m * (F + B)) == Fraction(p - 1, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_bubbles_of_chunked_schedules(name: str, p: int, m: int, v: int) -> None:
    """The bubble is (p - 1) / (v m): Megatron-LM (2104.04473), section 2.2.2, and breadth-first (2211.05953), equation 4."""
    for F, B in RATIOS[:2]:
        assert idle(run(name, p, m, F, B, chunks=v), v * m * (F + B)) == Fraction(p - 1, v * m)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_interleaved_with_any_number_of_micro_batches(p: int, v: int) -> None:
    """The bubble is (p - 1) / (v m) for any m >= p. If m < p, ranks also wait p - m before each chunk but the first."""
    for m in range(1, 3 * p + 3):
        largest = -(-m // max(1, m // p))
        for F, B in RATIOS[:2]:
            timeline = run("interleaved", p, m, F, B, chunks=v)
            assert idle(timeline, v * m * (F + B)) == Fraction(p - 1 + (v - 1) * max(0, p - m), v * m)
            peaks = tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * largest + 1) for r in range(p))
            assert peak_activations(timeline.schedule) == peaks


@pytest.mark.parametrize("name", ["pipedream", "two_bw"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_pipedream_and_two_bw_have_only_the_bubble_of_warm_up_and_drain(name: str, p: int, m: int) -> None:
    """A run of n batches takes n m (F + B) + (p - 1) (F + B): there is no bubble in the steady state (PipeDream, section 3.2)."""
    timeline = run(name, p, m, batches=2)
    assert timeline.makespan == 2 * m * 3 + (p - 1) * 3
    fill = -(-2 * p // m)
    assert period(lambda n: make_schedule(name, ranks=p, microbatches=m, batches=n), batches=fill) == m * 3


@pytest.mark.parametrize(("p", "m"), [s for s in SIZES if s[0] % 2 == 0])
def test_chimeras_bubble_for_equal_forward_and_backward_times(p: int, m: int) -> None:
    """Chimera (2107.06925), table 2 with f = 1: (p - 2) / (2 m + p - 2) of the step, which is (p - 2) / (2 m) of the ideal time."""
    assert idle(run("chimera", p, m, 1, 1), 2 * m) == Fraction(p - 2, 2 * m)


@pytest.mark.parametrize(("p", "n"), [(4, 4), (6, 6), (8, 4), (8, 8), (12, 4), (12, 6)])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_chimera_of_more_pipelines(p: int, n: int, blocks: int) -> None:
    """n pipelines and F = B (Chimera, section 3.6): the bubble is (p - n) / (n m + p - n) of the step; p - p / n + 1 to p micro-batches
    are in flight; each rank holds n stages."""
    schedule = check(make_schedule("chimera", ranks=p, microbatches=blocks * p, pipelines=n))
    timeline = simulate(schedule, costs(1, 1))
    assert idle(timeline, int(timeline.makespan)) == Fraction(p - n, n * blocks * p + p - n)
    in_flight = peak_activations(schedule)
    assert min(in_flight) == p - p // n + 1 and max(in_flight) == p
    assert all(len(set(homes)) == n for homes in schedule.homes) and {len(schedule.stages_of(rank)) for rank in range(p)} == {n}
    for stage in range(p):
        share = Counter(node.rank for j in range(blocks * p) if (node := find(schedule, Op.F, stage, j)) is not None)
        assert share == dict.fromkeys(schedule.homes[stage], blocks * p // n)  # replicas train the same number of micro-batches
    assert timeline.makespan < simulate(schedule, costs(1, 1, summation=1)).makespan <= timeline.makespan + n


@pytest.mark.parametrize("p", [2, 4, 8])
def test_chimeras_time_for_one_block(p: int) -> None:
    """For m = p a step takes p F + (2 p - 2) B (Chimera, section 3.4). For B = 2 F the bubble is (p - 2) / (3 p / 2 + p - 2) of it."""
    for F, B in RATIOS:
        assert run("chimera", p, p, F, B).makespan == p * F + (2 * p - 2) * B
    whole = run("chimera", p, p)
    assert idle(whole, int(whole.makespan)) == Fraction(p - 2) / (Fraction(3 * p, 2) + p - 2)


@pytest.mark.parametrize("p", [4, 6, 8])
@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_chimera_has_no_bubbles_between_blocks_if_backward_takes_longer(p: int, blocks: int) -> None:
    """A step takes m (F + B) + (p - 2) B for any number of blocks, which is less than 1F1B's; for p = 4 and m = 8 the optimum, 28."""
    m = blocks * p
    for F, B in [*RATIOS, (1, 3), (2, 3)]:
        took = run("chimera", p, m, F, B).makespan
        assert took == m * (F + B) + (p - 2) * B < run("1f1b", p, m, F, B).makespan
    assert (p, m) != (4, 8) or run("chimera", p, m).makespan == 28


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("F", "I", "W"), [*THIRDS, (1, 2, 2), (3, 1, 2)])
def test_bubble_of_zero_bubble_h1(p: int, m: int, F: int, I: int, W: int) -> None:  # noqa: E741
    """The idle time is (p - 1) (F + I - W) if W is not longer than F and I (zero bubble, 2401.10241, table 1, where I is called B).
    For a longer W it is (p - 1) max(F + I - W, F, I)."""
    forward, backward, share = split(F, I, W)
    timeline = simulate(make_schedule("zb_h1", ranks=p, microbatches=m), costs(forward, backward, weight_share=share))
    assert idle(timeline, p - 1) == max(F + I - W, F, I)


@pytest.mark.parametrize(("p", "m"), [s for s in SIZES if s[1] >= 2 * s[0] - 1])
def test_zero_bubble_h2_and_v_have_no_bubble_for_equal_times(p: int, m: int) -> None:
    """H2's idle time is (p - 1) (F + I - 2 W) (zero bubble, table 1), which is 0 for F = I = W, as for V (section 6). The period of
    repeated batches is measured, because ranks start and end a single batch one after another."""
    for F, I, W in THIRDS:  # noqa: E741
        forward, backward, share = split(F, I, W)
        cost = costs(forward, backward, weight_share=share)
        took = period(lambda n: make_schedule("zb_h2", ranks=p, microbatches=m, batches=n), lambda s, cost=cost: makespan(s, cost))
        assert took - m * (F + I + W) == (p - 1) * (F + I - 2 * W)
    for name, v in (("zb_h2", 1), ("zb_v", 2)):
        assert period(lambda n, name=name: make_schedule(name, ranks=p, microbatches=m, batches=n)) == 3 * v * m
        assert run(name, p, m).makespan == 3 * v * m + p - 1


@pytest.mark.parametrize(("p", "m"), [s for s in SIZES if s[1] >= 2 * s[0]])
def test_bubble_of_dualpipe_v(p: int, m: int) -> None:
    """The idle time is (p - 1) (F&B + B - 3 W) for F = I (DualPipe's README), where a pair takes F&B = F + B.
    With paired=False it is (p - 1) (F + I - W), like H1's, if I is not longer than F."""
    for F, I, W in THIRDS:  # noqa: E741
        forward, backward, share = split(F, I, W)
        cost = costs(forward, backward, weight_share=share)
        if F == I:
            assert idle(simulate(dualpipe_v(p, m), cost), 1) == (p - 1) * (F + 2 * (I + W) - 3 * W)
        if I <= F:
            assert idle(simulate(dualpipe_v(p, m, paired=False), cost), 1) == (p - 1) * (F + I - W)


# --- activations in flight equal the papers' closed forms ------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_micro_batches_in_flight(p: int, m: int) -> None:
    """Rank r has m in GPipe, min(m, p - r) in 1F1B (2104.04473, section 2.2.1); until W, p in ZB-H1 and 2 p - 1 in ZB-H2 (table 1)."""
    ranks = range(p)

    def kept(name: str) -> Schedule:
        return make_schedule(name, ranks=p, microbatches=m)

    assert peak_activations(kept("naive")) == (1,) * p
    assert peak_activations(kept("gpipe")) == (m,) * p
    assert peak_activations(kept("1f1b")) == tuple(min(m, p - r) for r in ranks)
    assert peak_activations(kept("zb_h1")) == tuple(min(m, p - r) for r in ranks)
    assert peak_held(kept("zb_h1")) == (min(m, p),) * p and peak_kept(kept("zb_h1"), lambda stage: 0, lambda stage: 1) == tuple(
        min(m, r + 1) for r in ranks
    )
    assert peak_held(kept("zb_h2")) == (min(m, 2 * p - 1),) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_chunks_in_flight_of_interleaved(p: int, m: int, v: int) -> None:
    """Rank r has min(m v, 2 (p - 1 - r) + (v - 1) p + 1) chunks in flight (Megatron-LM); rank 0 keeps 1 + (p - 1) / (p v) times all layers'
    activations of p micro-batches (2205.05198, section 4.2.3)."""
    schedule = make_schedule("interleaved", ranks=p, microbatches=m, chunks=v)
    assert peak_activations(schedule) == tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p))
    if m > p:
        peak = Fraction(int(peak_activations(schedule)[0]), v * p)  # of rank 0; 1: all activations of one micro-batch
        assert peak == 1 + Fraction(p - 1, p * v)
    assert peak_activations(make_schedule("looped_bfs", ranks=p, microbatches=m, chunks=v)) == (m * v,) * p


@pytest.mark.parametrize(("p", "m"), [s for s in SIZES if s[1] >= 2 * s[0]])
def test_chunks_in_flight_on_a_v(p: int, m: int) -> None:
    """Every rank has 2 p chunks in flight in ZB-V (zero bubble, section 6), and 2 p + 1 in DualPipe-V (DualPipe's README)."""
    assert peak_activations(make_schedule("zb_v", ranks=p, microbatches=m)) == (2 * p,) * p
    assert peak_activations(make_schedule("dualpipe_v", ranks=p, microbatches=m)) == (2 * p + 1,) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipes_bubble_activations_and_symmetry(p: int) -> None:
    """DualPipe's README: the idle time is (p / 2 - 1) (F&B + B - 3 W), and p + 1 micro-batches are in flight. Ranks r and p - 1 - r have
    the same order, each with half of the micro-batches."""
    for m in (2 * p, 2 * p + 2, 4 * p):
        schedule = check(dualpipe(p, m))
        assert schedule.homes == tuple(tuple(sorted((s, p - 1 - s))) for s in range(p))
        assert peak_activations(schedule) == (p + 1,) * p
        for F, I, W in [(1, 1, 1), (2, 2, 1), (3, 3, 2)]:  # noqa: E741
            cost = costs(F, I + W, weight_share=W / (I + W))
            assert idle(simulate(schedule, cost), 1) == (p // 2 - 1) * (F + 2 * (I + W) - 3 * W)
            assert idle(simulate(dualpipe(p, m, paired=False), cost), 1) == (p // 2 - 1) * (F + I - W)
        for rank, order in enumerate(schedule.orders):
            other = [a._replace(microbatch=(a.microbatch + m // 2) % m) if a.microbatch >= 0 else a for a in order]
            assert tuple(other) == schedule.orders[p - 1 - rank]


@pytest.mark.parametrize("p", range(2, 10))
def test_memory_and_bubble_of_v_half_and_v_min(p: int) -> None:
    """V-Half keeps (p + 2) // 2 micro-batches until W and has a bubble of at most p / 2 m for F = I = W; V-Min (p + 4) // 3 and 2 p / 3 m
    (2405.15362, table 1)."""
    for m in (1, p - 1, p, p + 1, 3 * p):
        half, least = (run(name, p, m, 1, 2) for name in ("v_half", "v_min"))
        kept = [max(peak_held(timeline.schedule)) for timeline in (half, least)]
        assert kept <= [2 * ((p + 2) // 2), 2 * ((p + 4) // 3)]
        if m >= p:
            assert kept == [2 * ((p + 2) // 2), 2 * ((p + 4) // 3)]
            assert half.makespan == 6 * m + 3 * p - 4 - (p % 2 == 0) <= 6 * m * (1 + Fraction(p, 2 * m))
            assert least.makespan <= 6 * m + 4 * p - (5 if p % 3 else 7) <= 6 * m * (1 + Fraction(2 * p, 3 * m))


@pytest.mark.parametrize(("p", "m"), [s for s in SIZES if s[0] % 2 == 0])
def test_micro_batches_in_flight_of_chimera(p: int, m: int) -> None:
    """For m = p, from p / 2 + 1 on the outer ranks to p on the middle ranks (Chimera, table 2); for m > p, p on all ranks."""
    block = tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p))
    assert peak_activations(make_schedule("chimera", ranks=p, microbatches=m)) == (block if m == p else (p,) * p)


# --- unequal stages, and measured stage times ------------------------------------------------------------------------

TIMES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(times=TIMES, m=st.integers(1, 9))
def test_time_of_unequal_stages(times: list[tuple[int, int]], m: int) -> None:
    """1F1B takes at most sum t_i + (m - 1) max t_i with t_i = F_i + B_i, and exactly that if the last stage is the slowest."""
    forward, backward = zip(*times, strict=True)
    whole = [f + b for f, b in times]
    took = simulate(make_schedule("1f1b", ranks=len(times), microbatches=m), costs(forward, backward)).makespan
    form = sum(whole) + (m - 1) * max(whole)
    assert m * max(whole) <= took <= form
    if whole[-1] == max(whole):
        assert took == form


# Measured times of GPT 4B on 8 A100 with 1F1B, p = 8, m = 128. Columns: layout, sequence length, vocabulary size, seconds of a step, then
# microseconds of one micro-batch: the forward pass of each of 8 stages, then the backward pass of each. Source: all rows with 1F1B of
# sail-sg/VocabularyParallelism at 6191c3bf, artifact/exp_one_host.csv.
MEASURED = """
    base 2048 256000 11.7222 10572 10591 10475 10725 10360 10444 10381 36818 25185 21108 20737 21143 20805 21030 20827 52363
    redis 2048 256000 7.5992 10627 10656 10606 13501 13327 13257 13200 26019 25401 21220 20851 26906 26392 26589 26431 30535
    base 2048 128000 8.2026 10599 10616 10637 10612 10352 10540 10470 24152 23338 20978 20968 21162 20785 21242 21067 37615
    redis 2048 128000 6.1406 10696 10629 10572 10612 10444 13674 13660 18708 23417 21081 20955 21362 20975 27415 27328 26685
    base 2048 64000 6.4095 10727 10694 10656 10618 10527 10637 10450 17748 22614 21304 21212 21117 21227 21450 21016 29803
    redis 2048 64000 5.5955 10881 10880 10913 10679 10641 10789 13773 14876 22845 21465 21517 21361 21373 21717 27570 24031
    base 2048 32000 5.4899 10761 10887 10681 10573 10554 10674 10612 14603 21993 21497 21130 21279 21267 21412 21364 25997
    redis 2048 32000 5.5087 10733 10881 10701 10581 10586 10688 10612 14668 22002 21472 21194 21311 21249 21508 21289 26045
    base 4096 256000 23.9594 24223 23749 23346 23621 23470 23433 23650 76548 50416 45615 45146 45292 45518 45198 45715 106804
    redis 4096 256000 14.9005 24391 23909 23369 30201 29923 30086 30028 52733 50764 46045 45464 58007 57927 58110 58271 58574
    base 4096 128000 16.9322 24234 23606 23381 23389 23356 23545 23397 50855 48131 45522 45045 45316 45557 45624 45351 77239
    redis 4096 128000 12.4898 24367 23848 23524 23500 23441 30108 30020 39031 48636 46143 45525 45740 45928 59536 59052 53522
    base 4096 64000 13.5771 24329 23758 23736 23767 23476 23858 23614 37916 47796 45588 45945 46077 45503 45803 45772 63819
    redis 4096 64000 12.1515 24488 23783 23836 23906 23586 23922 30213 31623 48235 45992 46252 46482 45867 46311 60048 51291
    base 4096 32000 11.8254 24399 24190 23903 23922 23628 23788 23607 31613 47648 46570 46361 46502 46310 46298 46179 56466
    redis 4096 32000 11.8557 24413 24115 23961 24095 23626 23797 23663 31649 47647 46505 46311 46637 46331 46323 46210 56631
"""


@pytest.mark.parametrize("row", MEASURED.strip().splitlines(), ids=lambda row: "-".join(row.split()[:3]))
def test_measured_stage_times_give_the_measured_step_time(row: str) -> None:
    """The simulated step time is up to 2 % below the measured one, because transfers and the optimizer's step are not simulated."""
    seconds, *stages = map(float, row.split()[3:])
    took = simulate(make_schedule("1f1b", ranks=8, microbatches=128), costs(stages[:8], stages[8:])).makespan / 1e6
    assert -0.02 < took / seconds - 1 < 0


# --- links, all-reduces of replicas, bytes ---------------------------------------------------------------------------


def test_a_message_arrives_a_transfer_after_it_was_made() -> None:
    """With p = 2 and m = 1 a step takes F + transfer + F + B + transfer + B."""
    for overlap in (True, False):
        assert simulate(make_schedule("1f1b", ranks=2, microbatches=1), transfer_time=5, overlap=overlap).makespan == 1 + 5 + 1 + 2 + 5 + 2


def test_transfers_overlap_with_compute_or_the_sender_waits() -> None:
    """GPipe with p = 2, F = 3, B = 4, transfer = 2. With overlap, rank 1 starts 3 + 2 after rank 0. Without, each F takes rank 0 3 + 2."""
    schedule, cost = make_schedule("gpipe", ranks=2, microbatches=4), costs(3, 4)
    beside = simulate(schedule, cost, transfer_time=2)
    assert [span.start for span in beside.spans[1][:4]] == [5, 8, 11, 14]
    after = simulate(schedule, cost, transfer_time=2, overlap=False)
    assert [span.start for span in after.spans[0][:4]] == [0, 5, 10, 15] and [span.start for span in after.spans[1][:4]] == [5, 10, 15, 20]
    assert beside.makespan == 5 + 4 * 3 + 4 * 4 + 2 + 4 < after.makespan
    assert after.busy(0) == beside.busy(0) == 4 * (3 + 4)


def test_a_link_carries_one_message_at_a_time() -> None:
    """With F = 1 and transfer = 7, rank 1 receives one message every 7 units of time."""
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=3), costs(1, 1), transfer_time=7)
    assert [span.start for span in timeline.spans[1][:3]] == [8, 15, 22]


@pytest.mark.parametrize("name", SCHEDULES)
def test_sent_bytes_equal_messages_times_their_size(name: str) -> None:
    """A micro-batch sends one message forward and one backward over each boundary of stages on different ranks. With v chunks a rank there
    are v p - 1 boundaries; on a V one less, because its middle boundary is within a rank."""
    p, m, size = 4, 8, 10
    timeline = run(name, p, m, batches=1)
    by_rank = simulate(timeline.schedule, message_bytes=size).sent_bytes()
    looped, folded = ("interleaved", "looped_bfs"), ("zb_v", "v_half", "v_min", "dualpipe_v")
    crossings = 2 * p - 1 if name in looped else 2 * p - 2 if name in folded else p - 1
    assert sum(by_rank) == 2 * crossings * m * size
    per_stage = simulate(timeline.schedule, message_bytes=lambda message: 3 if message.op is Op.F else 0).sent_bytes()
    assert sum(per_stage) == 3 * crossings * m


def test_transfer_times_and_bytes_can_depend_on_the_message() -> None:
    def slow(message: Message) -> float:
        return 4 if (message.source, message.target) == (0, 1) else 0

    assert simulate(make_schedule("1f1b", ranks=3, microbatches=1), transfer_time=slow).makespan == 3 * 3 + 4


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (8, 8)])
def test_chimeras_all_reduces_run_in_the_bubbles(p: int, m: int) -> None:
    """All but the last all-reduce of a rank overlap with compute, so the step is longer by one all-reduce only."""
    schedule = make_schedule("chimera", ranks=p, microbatches=m)
    bare = simulate(schedule).makespan
    assert simulate(schedule, costs(summation=1)).makespan == bare + 1
    blocking = simulate(schedule, costs(summation=1), overlap=False).makespan
    assert bare + 1 <= blocking <= bare + 2 * p
    sums = {}
    for rank, spans in enumerate(simulate(schedule, costs(summation=3)).spans):
        for span in spans:
            if span.action.op is Op.S:
                sums.setdefault(span.action.stage, set()).add((span.start, span.end))
                gradients = [s.end for s in spans if s.action.op is Op.B and s.action.stage == span.action.stage]
                assert span.start >= max(gradients), rank
    assert sorted(sums) == list(range(p)) and all(len(times) == 1 for times in sums.values())  # equal times on both ranks


def test_updates_take_time_and_wait_for_all_reduces() -> None:
    schedule = make_schedule("chimera", ranks=2, microbatches=2)
    timeline = simulate(schedule, costs(update=4, summation=3))
    assert timeline.makespan == 1 + 1 + 2 + 3 + 4 + 4  # F, F and B of the last stage, its all-reduce, two updates
    assert timeline.busy(0) == 2 * 3 + 2 * 4


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(BadInput, match="cost: got -1 for 0F0, needed a time of at least 0"):
        simulate(make_schedule("1f1b", ranks=2, microbatches=2), lambda rank, action: -1)


# --- any schedule and any times --------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    half=st.integers(1, 2),
    groups=st.integers(2, 3),
    data=st.data(),
    transfer=st.integers(0, 3),
    overlap=st.booleans(),
)
def test_simulated_actions_start_after_their_needs_and_one_at_a_time_on_a_rank(
    name: str, half: int, groups: int, data: st.DataObject, transfer: int, overlap: bool
) -> None:
    p = 2 * half
    schedule = make_schedule(name, ranks=p, microbatches=groups * p)
    forward, backward = (data.draw(st.lists(st.integers(1, 6), min_size=n, max_size=n)) for n in [schedule.num_stages] * 2)
    timeline = simulate(schedule, costs(forward, backward, summation=2, update=1), transfer_time=transfer, overlap=overlap)
    for node, action in schedule.nodes():
        span = timeline.spans[node.rank][node.at]
        for need in needs_of(schedule, node):
            made = timeline.spans[need.rank][need.at]
            crossed = transfer if need.rank != node.rank and schedule.action(need).op is not Op.S else 0
            assert made.end + crossed <= span.start
        before = timeline.spans[node.rank][node.at - 1] if node.at else None
        if before is not None and Op.S not in (before.action.op, action.op):
            assert before.end <= span.start
    assert timeline.makespan >= max(timeline.busy(rank) for rank in range(p))
    slower = simulate(
        schedule, lambda rank, action: 2 * costs(forward, backward, summation=2, update=1)(rank, action), transfer_time=2 * transfer
    )
    assert slower.makespan == 2 * simulate(schedule, costs(forward, backward, summation=2, update=1), transfer_time=transfer).makespan


def test_costs_can_depend_on_the_rank() -> None:
    """In Chimera, where rank 3 is three times slower, it is busy three times as long as rank 0, which holds replicas of the same stages."""

    def cost(rank: int, action: Action) -> float:
        return (1 if action.op is Op.F else 2) * (3 if rank == 3 else 1) if action.op in (Op.F, Op.B) else 0

    timeline = simulate(make_schedule("chimera", ranks=4, microbatches=4), cost)
    assert timeline.busy(3) == 3 * timeline.busy(0) == 3 * 4 * 3
