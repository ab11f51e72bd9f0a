"""The published search that ours is compared with finds a single token, in its passes; how the passes of ours grow.

Its model is real, its ranks are taken one after another.
"""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import published_search, search_growth
from benchmarks.published_search import PublishedSearch, num_published_passes

_RANKS, _ROWS, _LENGTH, _VOCABULARY = 2, 2, 8, 11


class _Run:
    """Four micro-batches of a tiny model; the ranks are taken one after another and averaged.

    The loss of a bad token counts many times. The denominator is that of all tokens: a mask that changed it, as the
    published one does, would change every norm with it.
    """

    def __init__(self, bad: dict[tuple[int, int, int], float]) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Embedding(_VOCABULARY, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, _VOCABULARY)
        )
        self.tokens = torch.randint(_VOCABULARY, (4, _RANKS, _ROWS, _LENGTH + 1))
        self.weights = torch.ones(4, _RANKS, _ROWS * _LENGTH)
        for place, weight in bad.items():
            self.weights[place] = weight
        self.masks: list[tuple[int, Tensor]] = []

    def __call__(self, micro_batch: int, mask: Tensor) -> float:
        self.masks.append((micro_batch, mask.clone()))
        self.model.zero_grad()
        for rank in range(_RANKS):
            tokens = self.tokens[micro_batch, rank]
            losses = F.cross_entropy(
                self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            weights = torch.where(mask[rank], self.weights[micro_batch, rank], 0)
            ((losses * weights).sum() / losses.numel() / _RANKS).backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def search(self) -> published_search.Located:
        search = PublishedSearch(self, num_micro_batches=4, num_ranks=_RANKS, num_tokens=_ROWS * _LENGTH)
        return search.search()


def test_examples() -> None:
    assert doctest.testmod(published_search).failed == 0


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 1, 7), (2, 0, 9), (3, 1, 15)])
def test_it_finds_one_bad_token_of_a_model(place: tuple[int, int, int]) -> None:
    run = _Run({place: 1e3})
    located = run.search()
    assert (located.micro_batch, located.rank, located.token) == place
    assert located.num_passes == len(run.masks) == num_published_passes(4, 2, 16) == 18
    assert located.seconds > 0


def test_it_finds_a_token_whose_loss_is_not_a_number() -> None:
    located = _Run({(2, 1, 6): math.nan}).search()
    assert (located.micro_batch, located.rank, located.token) == (2, 1, 6)


def test_the_last_passes_rebuild_the_gradient_without_the_token() -> None:
    run = _Run({(1, 1, 7): 1e3})
    run.search()
    for micro_batch, (number, mask) in enumerate(run.masks[-4:]):
        assert number == micro_batch
        closed = (~mask).nonzero().tolist()
        assert closed == ([[1, 7]] if micro_batch == 1 else [])


def test_it_follows_one_token_of_two() -> None:
    located = _Run({(0, 0, 3): 1e3, (2, 1, 4): 1e4}).search()
    assert (located.micro_batch, located.rank, located.token) == (2, 1, 4)


@pytest.mark.parametrize(
    ("num_micro_batches", "num_ranks", "num_tokens", "num_passes"),
    [(4, 2, 4 * 512, 32), (1, 1, 1, 2), (8, 8, 4096, 46), (3, 3, 100, 24), (2, 5, 1000, 30)],
)
def test_passes(num_micro_batches: int, num_ranks: int, num_tokens: int, num_passes: int) -> None:
    # M + 2 ceil(log2 W) + 2 ceil(log2 N) + M.
    assert num_published_passes(num_micro_batches, num_ranks, num_tokens) == num_passes
    for rank, token in ((0, 0), (num_ranks - 1, num_tokens - 1), (num_ranks // 2, num_tokens // 3)):
        calls: list[int] = []

        def run(
            micro_batch: int, mask: Tensor, rank: int = rank, token: int = token, calls: list[int] = calls
        ) -> float:
            calls.append(micro_batch)
            return 50.0 if micro_batch == 0 and mask[rank, token] else 1.0

        located = PublishedSearch(
            run, num_micro_batches=num_micro_batches, num_ranks=num_ranks, num_tokens=num_tokens
        ).search()
        assert (located.micro_batch, located.rank, located.token) == (0, rank, token)
        assert located.num_passes == len(calls) == num_passes


@pytest.mark.parametrize("num_bad", [1, 5])
def test_an_honest_ranking_takes_as_few_passes_of_many_units(num_bad: int) -> None:
    for num_units in (1000, 30_000):
        counted = search_growth.count_passes(num_units, num_bad, is_hidden=False)
        assert counted.is_exact
        assert counted.num_passes <= 2


def test_a_lying_ranking_takes_passes_as_the_logarithm() -> None:
    for num_units in (1000, 30_000):
        counted = search_growth.count_passes(num_units, 1, is_hidden=True)
        assert counted.is_exact
        assert counted.num_passes <= 2 * math.log2(num_units)


def test_the_benchmark_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert search_growth.main(["--tiny"]) == 0
    assert "1,000" in capsys.readouterr().out
