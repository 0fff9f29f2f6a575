"""The parts of a rolling decoder, each alone: finality, lookahead, acceptance, hidden states, memory."""

import pytest
import torch

from ssd_pipelines.grid import UNDRAWN, Cells, Span, TokenGrid
from ssd_pipelines.pipeline_output import DecodingStats, PhaseClock
from ssd_pipelines.sampling import SamplingSettings
from ssd_pipelines.verifiers import DecodingState
from ssd_pipelines.verifiers.acceptance import (
    GumbelAcceptance,
    IndependentAcceptance,
    ResidualAcceptance,
    acceptance_rule,
)
from ssd_pipelines.verifiers.finality import FinalityRule, RoundResult
from ssd_pipelines.verifiers.lookahead import LEAST_WINDOW, LookaheadSegments, LookaheadWindow
from ssd_pipelines.verifiers.predictions import draft_heads
from ssd_pipelines.verifiers.staged import StagedMemory
from ssd_pipelines.verifiers.state import HiddenStates
from ssd_pipelines.verifiers.window import RollingMemory, RollingWindow


VOCABULARY = 7


def state_on(grid: TokenGrid, batch_size: int = 1) -> DecodingState:
    """A call on a grid, without a model: logits are the hidden states, embeddings one-hot."""
    state = DecodingState(
        grid,
        grid.empty_sequence(batch_size),
        SamplingSettings(),
        [torch.Generator().manual_seed(k) for k in range(batch_size)],
        None,
        lambda tokens: torch.nn.functional.one_hot(tokens, VOCABULARY).float(),
        lambda hidden: hidden,
        DecodingStats(tokens=grid.length),
        PhaseClock(torch.device("cpu")),
    )
    state.memory = RollingMemory.begin(state)
    return state


def after_round(
    rule: FinalityRule,
    columns: int,
    first_change: int,
    rounds: int = 1,
    needs_round: frozenset[int] | set[int] = frozenset(),
):
    """Settled and committed positions of a row of draft tokens after a round that changed `first_change` first."""
    state = state_on(TokenGrid(2, columns))
    state.sequence[:, :columns] = 0
    state.drafted = torch.tensor([columns])
    window = RollingWindow(state)
    done = RoundResult(
        is_open=window.not_final(state),
        num_rounds=torch.full((1, columns), rounds),
        first_change=torch.tensor([[first_change]]),
        needs_round=torch.tensor([[column in needs_round for column in range(columns)]]) if needs_round else None,
    )
    rule.settle(state, window, done)
    return int(state.settled), int(state.committed)


def test_tokens_up_to_the_first_changed_one_are_exact_and_the_cache_keeps_those_before_it():
    # Column 3 changed: it was predicted from final tokens, so it is final; the cache still holds the old token there.
    assert after_round(FinalityRule(), 6, first_change=3) == (4, 3)
    assert after_round(FinalityRule(), 6, first_change=0) == (1, 0), "every pass settles at least one token"
    assert after_round(FinalityRule(), 6, first_change=6) == (6, 6), "nothing changed"


def test_with_rounds_tokens_are_final_after_as_many_of_them():
    rule = FinalityRule(first_row_rounds=2, rounds=1, adaptive=False)
    assert after_round(rule, 6, first_change=3, rounds=1) == (0, 0)
    assert after_round(rule, 6, first_change=3, rounds=2) == (6, 3), "final, but the cache is stale from column 3 on"
    assert (rule.rounds_needed(0), rule.rounds_needed(1), FinalityRule().rounds_needed(1)) == (2, 1, None)


def test_a_token_that_needs_another_round_stays_open_until_it_is_exact():
    rule = FinalityRule(first_row_rounds=1, rounds=1)
    assert after_round(rule, 6, first_change=1, needs_round={4}) == (4, 1)
    assert after_round(rule, 6, first_change=5, needs_round={4}) == (6, 5), "exact, so a further round can't improve it"


@pytest.mark.parametrize("row_end", [False, True])
def test_a_lookahead_window_feeds_its_length_and_never_ends_before_a_row_end(row_end):
    grid = TokenGrid(4, 4, row_end=row_end)
    state = state_on(grid)
    for committed in range(grid.length):
        state.committed = state.settled = torch.tensor([committed])
        end = int(LookaheadWindow(3).ends(state))
        wanted = min(committed + 3, grid.length)
        assert end == wanted + int(row_end and wanted % grid.stride == grid.columns)
    state.committed, state.settled = torch.tensor([0]), torch.tensor([6])
    assert int(LookaheadWindow(3).ends(state)) >= 7, "the backbone has predicted the next cell: it is always drafted"


def test_a_lookahead_window_is_two_rows_long_but_not_shorter_than_the_least():
    assert LookaheadWindow().length_on(TokenGrid(48, 48, row_end=True)) == 98
    assert LookaheadWindow().length_on(TokenGrid(16, 16)) == LEAST_WINDOW
    assert LookaheadWindow(5).length_on(TokenGrid(48, 48)) == 5


def test_segments_cover_the_grid_block_by_block():
    def ends(lookahead, grid):
        found = [lookahead.segment_end(grid, 0)]
        while found[-1] < grid.length:
            found.append(lookahead.segment_end(grid, found[-1]))
        return found

    grid = TokenGrid(4, 6, row_end=True)
    assert ends(LookaheadSegments(3, 2, False, 1, 1), grid) == [4, 7, 21, 28], "first row by cells, then two rows"
    assert ends(LookaheadSegments(5, 1, True, 1, 1), grid) == [7, 14, 21, 28], "every row along itself"
    assert LookaheadSegments(3, 2, False, 1, 1).segment_end(grid, 28) == 28, "nothing after the last row"


def test_a_segment_waits_until_the_one_before_has_had_its_rounds():
    grid, lookahead = TokenGrid(4, 4), LookaheadSegments(3, 1, False, first_row_lag=1, lag=2)
    state = state_on(grid)
    state.settled, state.drafted = torch.tensor([4]), torch.tensor([8])
    for rounds, end in ((0, 8), (1, 8), (2, 12)):
        RollingMemory.of(state).rounds[:] = rounds
        assert int(lookahead.ends(state)) == end
    state.settled = torch.tensor([8])
    RollingMemory.of(state).rounds[:] = 0
    assert int(lookahead.ends(state)) == 12, "nothing is open any more"


def test_each_coupling_has_its_acceptance_rule():
    assert acceptance_rule("gumbel") == GumbelAcceptance()
    assert acceptance_rule("residual", 3) == ResidualAcceptance(3)
    assert acceptance_rule("independent", 3) == IndependentAcceptance(3)


def test_a_draft_token_that_the_shared_noise_draws_again_is_accepted():
    state = state_on(TokenGrid(2, 4))
    state.drafted = torch.tensor([4])
    window = RollingWindow(state)
    logits = torch.randn(1, 4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    drawn = GumbelAcceptance().resample(state, window, torch.zeros(1, 4, dtype=torch.long), logits).tokens
    again = GumbelAcceptance().resample(state, window, drawn, logits)
    assert torch.equal(again.tokens, drawn) and bool(again.accepted.all())
    other = (drawn + 1) % VOCABULARY
    assert not bool(GumbelAcceptance().resample(state, window, other, logits).accepted.any())


def test_hidden_states_are_kept_at_the_positions_that_they_predict():
    states = HiddenStates(batch_size=2, length=6)
    with pytest.raises(RuntimeError, match="No pass was made yet"):
        states.between(0, 1)
    numbers = torch.arange(4.0).view(4, 1, 1)  # with guidance: two pictures, two branches
    states.receive(Span(0, 0), numbers)
    assert states.between(0, 1).flatten().tolist() == [0, 1, 2, 3]
    states.receive(Span(2, 4), numbers.expand(4, 2, 1) + 10)
    assert states.between(3, 5)[0].flatten().tolist() == [10, 10], "feeding 2 and 3 predicts 3 and 4"
    states.receive(Cells(torch.tensor([[0], [4]]), 0, 5), numbers + 20)
    assert states.at(torch.tensor([0, 1]), torch.tensor([[1], [5]])).flatten().tolist() == [20, 21, 22, 23]
    states.predict(torch.tensor([1]), torch.tensor([[1, 2]]), torch.full((2, 2, 1), 9.0), torch.tensor([[True, False]]))
    assert states.at(torch.tensor([1]), torch.tensor([[1, 2]]))[..., 0].tolist() == [[9, 0], [9, 0]]


def test_the_memory_of_another_algorithm_is_refused():
    with pytest.raises(TypeError, match="This call's memory is RollingMemory, not StagedMemory"):
        StagedMemory.of(state_on(TokenGrid(2, 2)))


def test_drafting_without_heads_says_so():
    with pytest.raises(ValueError, match="needs draft heads, and this call has none"):
        draft_heads(state_on(TokenGrid(2, 2)))


def test_a_ragged_batch_draws_as_many_numbers_for_a_picture_as_it_would_alone():
    together = state_on(TokenGrid(2, 4), batch_size=2)
    drawn = together.random.ragged_uniforms(1, [0, 2], [3, 4])[0]
    alone = state_on(TokenGrid(2, 4)).random.ragged_uniforms(1, [0], [3])[0]
    assert torch.equal(drawn[0, :3], alone[0]) and drawn[0, 3] == 0 and bool((drawn[1, :2] == 0).all())


def test_the_open_window_of_an_uneven_batch_repeats_last_positions_and_marks_them():
    state = state_on(TokenGrid(2, 4), batch_size=2)
    assert bool((state.sequence == UNDRAWN).all())
    state.committed, state.settled = torch.tensor([0, 2]), torch.tensor([1, 3])
    state.drafted = torch.tensor([4, 4])
    window = RollingWindow(state)
    assert (window.num_leading_final, window.width, window.lengths.tolist()) == (1, 3, [3, 1])
    assert window.positions.tolist() == [[1, 2, 3], [3, 3, 3]]
    assert window.own is not None and window.own.tolist() == [[True] * 3, [True, False, False]]
    assert window.not_final(state).tolist() == [[True] * 3, [True, False, False]]
    fed = window.fed()
    assert isinstance(fed, Cells) and fed.positions.tolist() == [[0, 1, 2, 3], [2, 3, 3, 3]]
