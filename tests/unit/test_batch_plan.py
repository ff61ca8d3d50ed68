"""What a plan rests on: costs between and beyond measured sizes, acceptance rates, and the best plan of all plans."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.batch.history import History
from infer.batch.tree import NOTHING, Budget, VerifiedDraft, candidate_budgets
from infer.speculation import control
from infer.speculation.control.acceptance_model import AcceptanceModel
from infer.speculation.control.batch_plan import Candidate, best_plan
from infer.speculation.control.cost_model import CostModel, CostTable, Curve
from infer.speculation.control.planner import GAIN, Controller
from tests.drafts import chain, chains, make_costs, with_rates


def test_curves_go_on_past_their_ends_and_never_below_zero():
    curve = Curve((2.0, 4.0), (10.0, 14.0))
    assert [curve(size) for size in (2.0, 3.0, 4.0, 6.0, -9.0)] == [10.0, 12.0, 14.0, 18.0, 0.0]
    assert Curve((3.0,), (5.0,))(9.0) == 5.0


def test_costs_lie_between_the_measured_batches():
    costs = make_costs(row=1.0, draft=2.0)
    assert costs.verify(1, 3) == pytest.approx(14.0)
    assert costs.verify(2, 6) == pytest.approx(17.0)
    assert costs.verify(32, 64) == pytest.approx(75.0)
    assert costs.draft("head", 2, 3) == pytest.approx(6.0)
    assert costs.draft("ngram", 2, 3) == 0.0


def test_rows_that_seemed_to_save_time_cost_none():
    costs = CostModel(CostTable((1,), (Curve((1.0, 4.0), (10.0, 9.0)),), {}))
    assert [costs.verify(1, rows) for rows in (1, 2, 9)] == [10.0, 10.0, 10.0]


def test_costs_are_corrected_by_steps_and_no_stall_moves_them_far():
    costs = make_costs(row=1.0, draft=2.0)
    for _ in range(50):  # steps and drafts take other times than predicted
        costs.learn_plain(1, 18.0)
        costs.learn_drafted(1, 8, "head", [1, 1, 1], 28.5 + 3.0, 3.0)
    assert costs.plain(1) == pytest.approx(18.0)
    assert costs.verify(1, 8) == pytest.approx(28.5)
    assert costs.draft("head", 1, 3) == pytest.approx(3.0)
    assert costs.plain(16) == pytest.approx(1.5 * make_costs(1.0, 2.0).plain(16))  # until steps of 16 were seen
    costs.learn_plain(1, 1e5)
    assert costs.plain(1) < 28.0


def test_the_first_step_of_its_kind_may_be_slow():
    """Caches are cold then. It counts as twice what the table says, so that drafts go on and show what they cost."""
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    verify, draft = table.verify(1, 2), table.draft("head", 1, 1)
    costs.learn_drafted(1, 2, "head", [1], 100 * verify, 50 * draft)
    assert costs.verify(1, 2) == pytest.approx(2 * verify)
    assert costs.draft("head", 1, 1) == pytest.approx(2 * draft)
    for _ in range(3):
        costs.learn_drafted(1, 2, "head", [1], verify + draft, draft)
    assert costs.draft("head", 1, 1) == pytest.approx(1.25 * draft)
    costs.learn_plain(2, 1e4)
    assert costs.plain(2) == pytest.approx(2 * table.plain(2))


def test_steps_that_have_not_settled_show_only_what_is_cheaper():
    costs, table = make_costs(row=1.0, draft=2.0), make_costs(row=1.0, draft=2.0)
    verify, draft = table.verify(1, 2), table.draft("head", 1, 1)
    costs.settled = False
    costs.learn_plain(1, 2 * table.plain(1))
    costs.learn_drafted(1, 2, "head", [1], 2 * verify + 0.8 * draft, 0.8 * draft)
    assert costs.plain(1) == table.plain(1)
    assert costs.verify(1, 2) == verify
    assert costs.draft("head", 1, 1) == pytest.approx(0.8 * draft)
    costs.settled = True
    costs.learn_drafted(1, 2, "head", [1], 1.5 * verify + draft, draft)
    assert costs.verify(1, 2) == pytest.approx(1.5 * verify)


def test_a_draft_whose_chains_end_one_by_one_teaches_what_a_level_costs():
    """A level costs 1 plus 1 per request; the machine is half as fast as when it was profiled."""
    batches = (1, 2, 4)
    drafts = tuple(Curve((1.0, 4.0), (1.0 + batch, 4 * (1.0 + batch))) for batch in batches)
    steps = tuple(Curve((float(batch), 9.0 * batch), (9.0, 9.0)) for batch in batches)
    costs = CostModel(CostTable(batches, steps, {"head": drafts}))
    for _ in range(30):
        costs.learn_drafted(4, 11, "head", [4, 2, 1], 30.0, 2 * (5.0 + 3.0 + 2.0))
    assert costs.draft("head", 4, 1) == pytest.approx(10.0)


@given(
    rates=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    row=st.floats(0.01, 8.0),
    draft=st.floats(0.0, 5.0),
)
def test_no_plan_of_chains_is_much_better_than_the_chosen_one(rates, row, draft):
    depth, batch, margin = 3, len(rates), 0.03
    costs, (acceptance, histories) = make_costs(row, draft), with_rates(rates)
    chances = [acceptance.chances(history, "head", Budget(depth, depth)) for history in histories]

    def speed(depths: tuple[int, ...]) -> float:
        tokens = batch + sum(sum(probs[:planned]) for probs, planned in zip(chances, depths, strict=True))
        drafting = costs.draft("head", sum(map(bool, depths)), max(depths))
        return tokens / (costs.verify(batch, batch + sum(depths)) + drafting)

    plan = best_plan(batch, chains(depth, histories), costs, acceptance, margin)
    planned = tuple(plan.budgets.get(str(index), NOTHING).depth for index in range(batch))
    best = max(speed(depths) for depths in itertools.product(range(depth + 1), repeat=batch))
    assert plan.speed == pytest.approx(speed(planned), rel=1e-6)
    assert plan.speed >= best / (1 + margin) / 1.02  # the order by gain per row is not always the best
    assert plan.speed >= speed((0,) * batch)


def test_cheap_rows_are_drafted_and_dear_ones_are_not():
    acceptance, histories = with_rates([0.9, 0.1])
    cheap = best_plan(2, chains(4, histories), make_costs(row=0.5, draft=0.1), acceptance, 0.0)
    assert cheap.budgets["0"].depth == 4
    assert cheap.budgets.get("1", NOTHING).depth < 4
    assert best_plan(2, chains(4, histories), make_costs(row=20.0, draft=0.1), acceptance, 0.0).budgets == {}
    assert best_plan(2, chains(4, histories), make_costs(row=0.1, draft=50.0), acceptance, 0.0).budgets == {}


def test_drafts_begin_at_twice_the_gain_at_which_they_go_on():
    acceptance, histories = with_rates([0.6])
    candidates = chains(1, histories)
    (accepted,) = acceptance.chances(histories[0], "head", candidates[0].allowed)

    def costs(gain: float) -> CostModel:
        """A row more costs 1 of 12 and drafting the rest, so that drafts promise `gain` over plain decoding."""
        return make_costs(row=1.0, draft=12.0 * (1 + accepted) / (1 + gain) - 13.0)

    controller, drafted = Controller(costs(GAIN * 1.5), acceptance, probe_share=0.0), list[bool]()
    for gain in (1.5, 2.5, 1.5, 0.5, 1.5):  # times GAIN
        controller.costs = costs(GAIN * gain)
        controller.plan(("0",), candidates)
        drafted.append(bool(controller.current.budgets))
    assert drafted == [False, True, True, False, False]


RANKS = [0.8, 0.5, 0.4, 0.2, 0.15, 0.1, 0.08, 0.06] + [0.01] * 8


def tree(path: list[int], nodes: int = 16) -> VerifiedDraft:
    """Return a draft of so many nodes, four deep, of which the nodes in `path` were accepted."""
    return VerifiedDraft(Budget(nodes, 4), nodes, 4, path)


def drawn(rng: random.Random, ranks: list[float], nodes: int) -> VerifiedDraft:
    return tree([node for node, rank in enumerate(ranks[:nodes], start=1) if rng.random() < rank], nodes)


def test_of_a_tree_the_best_nodes_are_drafted_as_far_as_they_pay():
    """A node gains the acceptance rate observed at its rank and costs a row."""
    acceptance, rng, history = AcceptanceModel(), random.Random(0), History()
    candidate = Candidate("0", "head", Budget(16, 4), history=history)
    for _ in range(1000):
        acceptance.record(history, "head", drawn(rng, RANKS, 16), 0.0)
    sizes = []
    for row in (0.01, 1.0, 3.0, 30.0):
        costs = make_costs(row=row, draft=0.1)
        plan = best_plan(1, [candidate], costs, acceptance, 0.03)
        nodes = plan.budgets.get("0", NOTHING).nodes
        speeds = {n: (1 + sum(RANKS[:n])) / (costs.verify(1, 1 + n) + 0.4) for n in range(2, 17, 2) if n != 4}
        best = max(speeds.values())
        assert (speeds[nodes] if nodes else plan.plain) >= (0.97 * best if best > 1.1 * plan.plain else plan.plain)
        sizes.append(nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 12 > sizes[1] > sizes[2] > sizes[3] == 0


def test_copies_are_drafted_to_their_end_though_most_drafts_are_short_and_wrong():
    """Three of four drafts are short and wrong, the fourth is long and right: a deep row is almost always right."""
    acceptance, budget, history = AcceptanceModel(), Budget(16, 16), History()
    acceptance.self_limiting = frozenset({"suffix"})
    for number in range(200):
        short = number % 4 > 0
        draft = VerifiedDraft(budget, 2, 2, ()) if short else VerifiedDraft(budget, 16, 16, range(1, 17))
        acceptance.record(history, "suffix", draft, 0.0)
    chances = acceptance.chances(history, "suffix", budget)
    assert chances[0] < 0.4
    assert min(chances[4:]) > 0.7
    candidate = Candidate("0", "suffix", budget, history=history)
    plan = best_plan(1, [candidate], make_costs(row=2.0, draft=0.0), acceptance, 0.02)
    assert plan.budgets == {"0": budget}


def test_nodes_that_bring_more_than_those_before_them_are_drafted_with_them():
    """This occurs in a fixed tree, whose nodes are ordered by level."""
    acceptance, rng, history = AcceptanceModel(), random.Random(0), History()
    candidate = Candidate("0", "head", Budget(16, 4), history=history)
    for _ in range(1000):
        acceptance.record(history, "head", drawn(rng, [0.5, 0.02, 0.02, 0.02, 0.9, 0.8] + [0.02] * 10, 16), 0.0)
    for row, nodes in ((0.5, 6), (9.0, 0)):
        plan = best_plan(1, [candidate], make_costs(row=row, draft=0.1), acceptance, 0.03)
        assert plan.budgets.get("0", NOTHING).nodes == nodes


def test_nodes_that_a_smaller_tree_leaves_out_are_tried_again_when_the_text_changes():
    acceptance, rng, steps, history = AcceptanceModel(), random.Random(0), [], History()
    candidate, costs = Candidate("0", "head", Budget(16, 4), history=history), make_costs(row=0.3, draft=0.1)
    for ranks in ([0.5, 0.2] + [0.0] * 14, [0.9, 0.8, 0.6] + [0.4] * 4 + [0.25] * 9):
        for _ in range(1500):
            nodes = best_plan(1, [candidate], costs, acceptance, 0.03).budgets.get("0", NOTHING).nodes
            steps.append(nodes)
            acceptance.record(history, "head", drawn(rng, ranks, nodes or 16), 0.0)
    assert sum(steps[1000:1500]) < 6 * 500
    assert sum(steps[2500:]) > 10 * 500


def test_what_is_not_known_of_a_trees_ranks_falls_off_by_zipfs_law():
    acceptance, budget, history = AcceptanceModel({"head": [0.9, 0.8, 0.7, 0.6]}), Budget(16, 4), History()
    gains = acceptance.gains(history, "head", budget)
    harmonic = [0.9 * sum(1 / rank for rank in range(1, each.nodes + 1)) for each in candidate_budgets(budget)]
    assert list(gains.values()) == pytest.approx(harmonic)
    for _ in range(2000):
        acceptance.record(history, "head", tree([1, 2, 5]), 0.0)
    assert acceptance.expected(history, "head", tree([])) == pytest.approx(3.0, abs=0.1)
    assert list(acceptance.gains(history, "head", budget).values())[:2] == pytest.approx([2.0, 3.0], abs=0.1)


def test_chances_follow_a_request_and_start_from_what_its_drafter_showed():
    acceptance, a, b = AcceptanceModel({"head": [0.9, 0.8]}), History(), History()
    assert acceptance.chances(a, "head", Budget(3, 3)) == pytest.approx([0.9, 0.72, 0.576])
    sampled = acceptance.chances(a, "head", Budget(3, 3), sampled=True)
    assert sampled == pytest.approx([0.5, 0.25, 0.125])  # training was greedy
    for _ in range(300):
        acceptance.record(a, "head", chain(3, 0), 0.0)
    assert acceptance.chances(a, "head", Budget(1, 1))[0] < 0.1
    assert acceptance.chances(b, "head", Budget(1, 1))[0] < 0.2
    assert acceptance.chances(b, "head", Budget(1, 1), sampled=True)[0] == 0.5
    for _ in range(60):
        acceptance.record(b, "head", chain(3, 3), 0.0)
    assert acceptance.chances(b, "head", Budget(3, 3))[2] > 0.5
    assert acceptance.chances(a, "head", Budget(1, 1))[0] < 0.2
    assert acceptance.chances(History(), "head", Budget(1, 1))[0] < 0.8


def test_a_chain_shows_where_it_was_first_wrong_and_nothing_of_what_follows():
    acceptance, history = AcceptanceModel(), History()
    for _ in range(300):
        acceptance.record(history, "head", chain(4, 1), 0.0)
    first, second, third, _ = acceptance.chances(history, "head", Budget(4, 4))
    assert first > 0.9
    assert second < 0.1
    assert third == pytest.approx(second / 2)


@pytest.mark.parametrize(("misses", "drafts"), [(8, True), (60, False)])
def test_a_few_misses_in_a_row_end_no_drafts_but_many_do(misses, drafts):
    acceptance, rng = AcceptanceModel(), random.Random(0)

    def others(count: int) -> None:  # right at a rate of 0.45, as drafts for sampled requests are
        for _ in range(count):
            right = next((place for place in range(4) if rng.random() > 0.45), 4)
            acceptance.record(History(), "head", chain(4, right), 0.0)

    history = History()
    others(1000)
    for _ in range(misses):
        acceptance.record(history, "head", chain(4, 0), 0.0)
        others(20)  # keeps the drafter's overall acceptance rate constant
    costs = make_costs(row=0.2, draft=0.2, fixed=2.8)
    assert bool(best_plan(1, chains(4, [history]), costs, acceptance, 0.03).budgets) == drafts


def test_the_planner_and_what_it_rests_on_stay_small():
    (folder,) = map(Path, control.__path__)
    assert 0 < sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.glob("*.py")) <= 900
