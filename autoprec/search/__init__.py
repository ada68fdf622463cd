"""Sensitivity, groups, solver, sampler, Optuna study, finalists, Pareto front, verdict."""
