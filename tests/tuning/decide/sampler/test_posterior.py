from __future__ import annotations

import numpy as np
import pytest

from autoprec.tuning.decide.sampler.posterior import DivergenceModel, LinearModel, Observation

GROUPS, CHOICES = 12, 4
FAMILIES = [g % 3 for g in range(GROUPS)]


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
        out.append(Observation(index, np.zeros(0), 0.0, float(gap)))
    return out


def error_of(model: DivergenceModel, points: list[Observation]) -> float:
    belief = model.mean()
    gaps = [np.log(belief.divergence(o.index, o.features, o.base2) / o.value) for o in points if o.value > 1e-7]
    return float(np.sqrt(np.mean(np.square(gaps))))


def test_the_scale_is_learned_from_a_few_trials_and_the_table_from_many() -> None:
    prior, truth = tables()
    fresh = observe(truth, 100, 9, noise=0.0)
    errors = []
    for count in (3, 20, 100):
        model = DivergenceModel(prior, FAMILIES, 0)
        for _ in range(3):
            model.fit(observe(truth, count, 1))
        errors.append(error_of(model, fresh))
    assert errors[0] < 0.6  # the unknown scale alone has a prior width of 3
    assert errors[2] < min(0.2, 0.65 * errors[0])
    assert errors[2] < 0.15


def test_budget_is_the_inverse_of_divergence() -> None:
    prior, truth = tables()
    model = DivergenceModel(prior, FAMILIES, 0, floor=1e-4)
    model.fit(observe(truth, 30, 1))
    belief = model.mean()
    index = np.full(GROUPS, 2)
    gap = belief.divergence(index, np.zeros(0), 0.0)
    assert belief.budget(gap, np.zeros(0), 0.0) == pytest.approx(belief.error2[np.arange(GROUPS), index].sum())
    assert belief.budget(5e-5, np.zeros(0), 0.0) == 0.0  # below the floor nothing fits


def test_draws_spread_like_the_posterior_and_shrink_with_data() -> None:
    prior, truth = tables()
    index = np.full(GROUPS, 2)
    spreads = []
    for count in (4, 60):
        model = DivergenceModel(prior, FAMILIES, 0)
        model.fit(observe(truth, count, 1))
        rng = np.random.default_rng(0)
        draws = [np.log(model.draw(rng).divergence(index, np.zeros(0), 0.0)) for _ in range(200)]
        spreads.append(np.std(draws))
        actual = np.log(0.03 * np.sqrt(truth[np.arange(GROUPS), index].sum()))
        assert abs(np.mean(draws) - actual) < 4 * np.std(draws) + 0.05
    assert spreads[1] < 0.5 * spreads[0]


def test_before_any_trial_the_prior_answers() -> None:
    prior, _ = tables()
    belief = DivergenceModel(prior, FAMILIES, 0).mean()
    np.testing.assert_allclose(belief.error2, prior)


def test_choices_that_are_not_offered_stay_impossible() -> None:
    prior, truth = tables()
    prior[3, 2] = np.inf
    model = DivergenceModel(prior, FAMILIES, 0)
    model.fit([o for o in observe(truth, 40, 1) if o.index[3] != 2])
    assert np.isinf(model.draw(np.random.default_rng(0)).error2[3, 2])


def test_parameter_effects_are_learned() -> None:
    prior, truth = tables()
    rows = []
    for k, o in enumerate(observe(truth, 60, 1)):
        z = np.array([float(k % 2)])
        rows.append(Observation(o.index, z, 0.0, o.value * (2.0 if k % 2 else 1.0)))
    model = DivergenceModel(prior, FAMILIES, 1)
    for _ in range(3):
        model.fit(rows)
    assert model.mean().parameter[0] == pytest.approx(2 * np.log(2), rel=0.25)


def test_linear_model_learns_times() -> None:
    rng = np.random.default_rng(0)
    prior = rng.uniform(0.5, 1.5, (GROUPS, 1)) * np.array([1.0, 0.8, 0.6, 0.5])
    truth = prior * rng.lognormal(0, 0.1, prior.shape)
    model = LinearModel(prior, 5.0, np.zeros(1), noise=0.005)
    rows = []
    for k in range(80):
        index = rng.integers(0, CHOICES, GROUPS)
        value = 6.0 + truth[np.arange(GROUPS), index].sum() - 1.5 * (k % 2) + 0.02 * rng.normal()
        rows.append(Observation(index, np.array([float(k % 2)]), 0.0, float(value)))
    model.fit(rows)
    table, base, effects = model.mean()
    assert effects[0] == pytest.approx(-1.5, abs=0.1)
    rest = [base + table[np.arange(GROUPS), o.index].sum() + effects @ o.features - o.value for o in rows]
    assert np.std(rest) < 0.1
    assert np.corrcoef((table - table[:, :1]).ravel(), (truth - truth[:, :1]).ravel())[0, 1] > 0.97


def test_many_divergences_at_once_are_those_one_by_one() -> None:
    prior, truth = tables()
    model = DivergenceModel(prior, FAMILIES, 0, floor=1e-4)
    seen = observe(truth, 20, 1)
    model.fit(seen)
    belief = model.mean()
    index = np.stack([o.index for o in seen])
    together = belief.divergences(index, np.zeros((20, 0)), np.zeros(20))
    assert together.tolist() == pytest.approx([belief.divergence(o.index, o.features, o.base2) for o in seen])


def test_noise_and_trust_are_learned_from_the_trials() -> None:
    for noise, misfit in ((0.05, 0.0), (0.35, 0.0), (0.05, 1.2)):
        prior, truth = tables(misfit=misfit)
        model = DivergenceModel(prior, FAMILIES, 0)
        for _ in range(3):
            model.fit(observe(truth, 80, 2, noise=noise))
        assert abs(model.residual - noise) <= 0.1
        assert (model.stretch > 1.0) == (misfit > 0)
