from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from autoprec.tuning.decide.sampler.posterior import TIMED_NOISE, DivergenceModel, LinearModel, Points

GROUPS, CHOICES = 12, 4


@dataclass
class Observation:
    index: np.ndarray
    value: float
    seed: int = 0
    features: tuple[float, ...] = ()


def points(rows: list[Observation]) -> Points:
    features = np.array([o.features for o in rows]).reshape(len(rows), -1)
    return Points(np.stack([o.index for o in rows]), features, np.zeros(len(rows)))


def values(rows: list[Observation]) -> np.ndarray:
    return np.array([o.value for o in rows])


def fit(model: DivergenceModel, rows: list[Observation]) -> None:
    model.fit(points(rows), values(rows), np.array([o.seed for o in rows]))


def asked(*index: np.ndarray) -> Points:
    return Points(np.stack(index), np.zeros((len(index), 0)), np.zeros(len(index)))


def tables(seed: int = 0, misfit: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    prior = rng.lognormal(-8, 1, (GROUPS, CHOICES)) * np.array([0.0, 0.2, 1.0, 5.0])
    return prior, prior * rng.lognormal(0, misfit, prior.shape)


def observe(truth: np.ndarray, count: int, seed: int, noise: float = 0.05) -> list[Observation]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        index = rng.integers(0, CHOICES, GROUPS)
        index[rng.random(GROUPS) < rng.random()] = 0
        total = truth[np.arange(GROUPS), index].sum()
        gap = 0.03 * np.sqrt(total + 1e-12) * np.exp(noise * rng.normal())
        out.append(Observation(index, float(gap)))
    return out


def error_of(model: DivergenceModel, rows: list[Observation]) -> float:
    kept = [o for o in rows if o.value > 1e-7]
    mean, _ = model.predict(points(kept))
    return float(np.sqrt(np.mean(np.square(mean - np.log([o.value for o in kept])))))


def test_the_scale_is_learned_from_a_few_trials_and_the_table_from_many() -> None:
    prior, truth = tables()
    fresh = observe(truth, 100, 9, noise=0.0)
    errors = []
    for count in (3, 20, 100):
        model = DivergenceModel(prior, 0)
        fit(model, observe(truth, count, 1))
        errors.append(error_of(model, fresh))
    assert errors[0] < 0.6  # the unknown scale alone has a prior width of 3
    assert errors[2] < min(0.25, 0.8 * errors[0])


def test_the_law_is_what_is_predicted() -> None:
    prior, truth = tables()
    model = DivergenceModel(prior, 0)
    fit(model, observe(truth, 30, 1))
    squares, _, _ = model.law()
    index = np.full(GROUPS, 2)
    predicted = float(np.exp(model.predict(asked(index))[0][0]))
    assert np.sqrt(squares[np.arange(GROUPS), index].sum()) == pytest.approx(predicted, rel=0.25)  # to first order


def test_what_is_predicted_is_as_uncertain_as_it_should_be_and_surer_with_more_seeds() -> None:
    """Runs of four seeds that are off as a whole: another twenty runs of the same seeds cannot tell their mean."""
    prior, truth = tables(misfit=0.2)
    index = np.full((1, GROUPS), 2)
    actual = np.log(0.03 * np.sqrt(truth[np.arange(GROUPS), index[0]].sum()))
    spreads = {}
    for runs, seeds in ((4, 4), (40, 4), (40, 40)):
        found = [replace(o, seed=k % seeds) for k, o in enumerate(observe(truth, runs, 1, noise=0.3))]
        model = DivergenceModel(prior, 0)
        fit(model, found)
        mean, spread = model.predict(asked(index[0]))
        assert abs(mean[0] - actual) < 3 * spread[0]
        spreads[runs, seeds] = float(spread[0])
    assert spreads[40, 40] < spreads[40, 4] < spreads[4, 4]


def test_a_policy_that_was_measured_tells_of_its_neighbours_more_than_of_others() -> None:
    prior, _ = tables()
    model = DivergenceModel(prior, 0)
    at = np.full(GROUPS, 2)
    near, far = at.copy(), np.zeros(GROUPS, dtype=np.int64)
    near[0], far[0] = 1, 3
    fit(model, [Observation(at, 0.01, seed) for seed in range(4)])
    _, spread = model.predict(asked(at, near, far))
    assert spread[0] < 1.2 * spread[1] < spread[2]


def test_the_spread_from_seed_to_seed_is_that_of_the_study() -> None:
    """A noisy script asks for more seeds: its bound is further away after as many runs."""
    prior, truth = tables(misfit=0.0)
    bounds, index = [], np.full((1, GROUPS), 2)
    for noise in (0.15, 0.36, 0.9):
        model = DivergenceModel(prior, 0)
        assert model.spread == pytest.approx(0.36, rel=0.3)
        fit(model, [replace(o, seed=k) for k, o in enumerate(observe(truth, 40, 1, noise=noise))])
        assert model.spread == pytest.approx(noise, rel=0.35)
        bounds.append(float(model.predict(asked(index[0]))[1][0]))
    assert bounds == sorted(bounds)


def test_runs_that_hardly_differ_leave_a_narrow_bound() -> None:
    """Runs of 200 steps differ by a tenth from seed to seed: eight of them bound their mean within a seventh."""
    prior, _ = tables()
    at = np.full((1, GROUPS), 2)
    model = DivergenceModel(prior, 0)
    luck = np.random.default_rng(3).normal(size=8)
    values = 0.002 * np.exp(0.1 * (luck - luck.mean()) / luck.std())
    fit(model, [Observation(at[0], float(v), seed) for seed, v in enumerate(values)])
    mean, sd = model.predict(asked(at[0]))
    assert model.spread < 0.17  # 0.20 with the prior that short runs alone had shown
    assert float(np.exp(mean + 2 * sd)[0]) < 1.15 * values.mean()


def test_neighbours_under_one_seed_do_not_count_as_seeds() -> None:
    prior, _ = tables()
    at = np.full(GROUPS, 2)
    rows = []
    for g in range(8):
        near = at.copy()
        near[g] = 1
        rows.append(near)
    sure = []
    for seeds in (range(8), [0] * 8):
        model = DivergenceModel(prior, 0)
        fit(model, [Observation(row, 0.01, seed) for row, seed in zip(rows, seeds, strict=True)])
        sure.append(float(model.predict(asked(at))[1][0]))
    assert sure[1] > 1.2 * sure[0]


def test_a_table_that_is_wrong_is_trusted_less() -> None:
    """What is measured moves policies with other choices less, the worse the table agrees with what is seen."""
    prior, _ = tables()
    shares = []
    for wrong in (1.0, 6.0):
        model, rows = DivergenceModel(prior, 0), []
        for seed in range(12):
            index = np.full(GROUPS, 1 + seed % 3)
            value = 0.03 * np.sqrt(prior[np.arange(GROUPS), index].sum()) * (wrong if seed % 3 == 1 else 1.0)
            rows.append(Observation(index, float(value), seed))
        fit(model, rows)
        mixed = np.array([1, 2] * (GROUPS // 2))
        shares.append(float(model.predict(asked(mixed))[1][0]))
    assert shares[1] > shares[0]


def test_before_any_trial_the_prior_answers() -> None:
    prior, _ = tables()
    squares, scale, _ = DivergenceModel(prior, 0).law()
    np.testing.assert_allclose(squares, scale * prior)


def test_runs_whose_error_is_not_known_teach_nothing() -> None:
    prior, truth = tables()
    rows = observe(truth, 8, 1)
    known, unknown = DivergenceModel(prior, 0), DivergenceModel(prior, 0)
    fit(known, rows[:6])
    given = points(rows)
    given.base2[6:] = np.inf  # the probe of what they run beside the layers failed
    unknown.fit(given, values(rows), np.zeros(8, dtype=np.int64))
    assert np.isfinite(unknown.predict(given)).all()
    one = asked(rows[0].index)
    assert unknown.predict(one)[0] == pytest.approx(known.predict(one)[0])


def test_choices_that_are_not_offered_stay_impossible() -> None:
    prior, truth = tables()
    prior[3, 2] = np.inf
    model = DivergenceModel(prior, 0)
    fit(model, [o for o in observe(truth, 40, 1) if o.index[3] != 2])
    assert np.isinf(model.law()[0][3, 2])


def test_parameter_effects_are_learned() -> None:
    prior, truth = tables()
    rows = []
    for k, o in enumerate(observe(truth, 60, 1)):
        rows.append(replace(o, value=o.value * (2.0 if k % 2 else 1.0), features=(k % 2,)))
    model = DivergenceModel(prior, 1)
    fit(model, rows)
    assert model.law()[2][0] == pytest.approx(np.log(2), rel=0.25)


def test_linear_model_learns_times() -> None:
    rng = np.random.default_rng(0)
    prior = rng.uniform(0.5, 1.5, (GROUPS, 1)) * np.array([1.0, 0.8, 0.6, 0.5])
    truth = prior * rng.lognormal(0, 0.1, prior.shape)
    model = LinearModel(prior, 5.0, np.array([-1.0]), noise={0.005: 1.0}, trust=0.5)
    rows = []
    for k in range(80):
        index = rng.integers(0, CHOICES, GROUPS)
        value = 6.0 + truth[np.arange(GROUPS), index].sum() - 1.5 * (k % 2) + 0.02 * rng.normal()
        rows.append(Observation(index, float(value), features=(k % 2,)))
    model.fit(points(rows), values(rows))
    table, base, effects = model.mean()
    assert effects[0] == pytest.approx(-1.5, abs=0.1)
    rest = [base + table[np.arange(GROUPS), o.index].sum() + effects @ np.array(o.features) - o.value for o in rows]
    assert np.std(rest) < 0.1
    assert np.corrcoef((table - table[:, :1]).ravel(), (truth - truth[:, :1]).ravel())[0, 1] > 0.97


def test_how_noisy_times_are_is_learned_and_noisy_ones_prove_little() -> None:
    """Thirty runs within 1 % of what the table says, or within 8 %; what is then said of another policy."""
    prior = np.ones((GROUPS, 1)) * np.array([1.0, 0.8, 0.6, 0.5])
    spreads = []
    for noise in (0.01, 0.08):
        rng = np.random.default_rng(1)
        indices = [rng.integers(0, CHOICES, GROUPS) for _ in range(30)]
        times = [5.0 + prior[np.arange(GROUPS), i].sum() for i in indices]
        model = LinearModel(prior, 5.0, np.zeros(0), noise=TIMED_NOISE, trust=0.3)
        model.fit(asked(*indices), np.array(times) * (1.0 + noise * rng.standard_normal(30)))
        spreads.append(model.predict(asked(np.zeros(GROUPS, dtype=np.int64)))[1][0])
    assert spreads[1] > 2.0 * spreads[0]


def test_what_a_duel_timed_counts_for_more_than_a_run() -> None:
    prior = np.ones((GROUPS, 1)) * np.array([1.0, 0.8, 0.6, 0.5])
    model = LinearModel(prior, 5.0, np.zeros(0), noise=TIMED_NOISE, trust=0.3)
    uniform = asked(*[np.full(GROUPS, 1)] * 2)
    first, second = 12.0, 15.0
    model.fit(uniform, np.array([first, second]), np.array([0.01, np.nan]))
    assert model.predict(uniform)[0][0] == pytest.approx(first, abs=0.1)


def test_a_recipe_that_is_slower_than_modelled_everywhere_is_learned_from_one_run() -> None:
    prior = np.ones((GROUPS, 1)) * np.array([1.0, 0.8, 0.6, 0.5])
    model = LinearModel(prior, 5.0, np.zeros(0), noise={0.01: 1.0}, trust=0.3)
    uniform = [np.full(GROUPS, c) for c in (0, 3)]
    model.fit(asked(*uniform), np.array([17.0, 17.5]))
    table, _, _ = model.mean()
    assert (table[:, 3] > 0.6).all()
    half = np.array([0] * (GROUPS // 2) + [3] * (GROUPS // 2))
    mean, spread = model.predict(asked(half))
    assert mean[0] == pytest.approx(17.2, abs=1.0)
    assert 0 < spread[0] < 1.5


def test_a_recipe_that_is_slow_in_layers_of_one_kind_may_be_fast_in_others() -> None:
    """All in bf16 is slower than as written: depthwise convolutions may be the cause, and the others gain."""
    prior, half = np.ones((GROUPS, 1)) * np.array([1.0, 0.6]), GROUPS // 2
    kinds = [list(range(half)), list(range(half, GROUPS))]
    uniform = asked(*[np.full(GROUPS, c) for c in (0, 1)])
    mixed = asked(np.array([1] * half + [0] * (GROUPS - half)))
    hoped = []
    for known in ((), kinds):
        model = LinearModel(prior, 5.0, np.zeros(0), noise={0.01: 1.0}, trust=0.3, kinds=known)
        model.fit(uniform, np.array([5.0 + GROUPS, 6.0 + GROUPS]), np.array([0.01, 0.01]))
        mean, spread = model.predict(mixed)
        hoped.append(mean[0] - 2.0 * spread[0])
    assert hoped[1] < 5.0 + GROUPS < hoped[0]
    model.fit(asked(np.zeros(GROUPS, dtype=np.int64), *[mixed.index[0]] * 2), np.array([17.0, 13.0, 13.0]))
    table, _, _ = model.mean()
    assert table[0, 1] < table[-1, 1], "what is learnt of one kind is that of its groups above all"


def test_an_effect_that_is_doubted_follows_what_was_measured() -> None:
    """Autocast is modelled to cost nothing outside the layers, and costs a tenth of a step."""
    prior = np.ones((GROUPS, 1)) * np.array([1.0, 0.8])
    index = np.full((4, GROUPS), 1, dtype=np.int64)
    runs = Points(index, np.array([[0.0], [0.0], [1.0], [1.0]]), np.zeros(4))
    times = np.array([14.6, 14.6, 16.1, 16.1])
    learnt = []
    for effect_sd in (0.0, 0.05):
        model = LinearModel(prior, 5.0, np.zeros(1), noise={0.02: 1.0}, trust=0.3, effect_sd=np.array([effect_sd]))
        model.fit(runs, times)
        learnt.append(float(model.mean()[2][0]))
    assert learnt[0] < 0.3 < 1.0 < learnt[1] < 1.6


def test_laws_are_drawn_around_the_most_likely_one_and_are_sharper_after_runs() -> None:
    error2 = np.array([[0.0, 1.0], [0.0, 1.0]])
    model = DivergenceModel(error2, 0)

    def spread() -> float:
        rng = np.random.default_rng(0)
        return float(np.std([np.log(model.drawn_law(rng)[0][0, 1]) for _ in range(100)]))

    before = spread()
    index = np.array([[1, 0]] * 12, dtype=np.int64)
    points = Points(index, np.zeros((12, 0)), np.zeros(12))
    model.fit(points, np.full(12, 0.002), np.arange(12))
    assert spread() < 0.5 * before


def test_times_are_drawn_around_the_most_likely_ones() -> None:
    prior = np.ones((GROUPS, 1)) * np.array([1.0, 0.6])
    model = LinearModel(prior, 5.0, np.zeros(0), noise={0.01: 1.0}, trust=0.3)
    index = asked(*[np.full(GROUPS, c) for c in (0, 1)] * 4)
    model.fit(index, np.tile([5.0 + GROUPS, 5.0 + 0.9 * GROUPS], 4))
    rng = np.random.default_rng(0)
    totals = np.array(
        [[base + table[:, c].sum() for c in (0, 1)] for table, base, _ in (model.drawn(rng) for _ in range(200))]
    )
    assert totals.mean(axis=0) == pytest.approx([5.0 + GROUPS, 5.0 + 0.9 * GROUPS], rel=0.01)
    assert (totals.std(axis=0) > 0.0).all()
    assert (totals.std(axis=0) < 0.02 * 17.0).all()
